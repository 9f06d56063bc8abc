"""Staging through the application: store by segment, publish the winners once; in every encoding, at both listeners."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager

import pytest
import trio
from broker_in_process import TOPICS, in_process

from broker.api.messages.publish import ask_to_publish
from plainsong.protocol.frames import decode_frames
from plainsong.protocol.ids import unpack_id
from plainsong.protocol.names import TopicName
from plainsong.protocol.requests import PollRequest, PublishRequest
from plainsong.protocol.topic.asks import PublishStaged
from tests.codecs import AVRO, AVRO_2, JSON

TYPES = {"v2": "avro/binary; version=2", "json": "application/json"}
CODECS = {"v2": AVRO_2, "json": JSON}
FRAMES = "application/vnd.plainsong.frames"
every_encoding = pytest.mark.parametrize("encoding", TYPES)
every_listener = pytest.mark.parametrize("listener", [None, "hot", "application"])
POLLS = ("avro/binary", "avro/binary; version=2", "application/json", FRAMES)


class Staging:
    """One topic, and a producer that stages messages in it in one encoding."""

    def __init__(self, daemon, encoding="json", topic="t", producer="job"):
        self.daemon, self.codec, self.topic, self.producer = daemon, CODECS[encoding], topic, producer
        self.headers = {"Content-Type": TYPES[encoding]}

    async def post(self, verb, body, **expected):
        path = f"{TOPICS}/{self.topic}/{verb}"
        return await self.daemon.call("POST", path, content=body, headers=self.headers, **expected)

    async def store(self, segment, *payloads, ids=None, fields=None, **expected):
        request = PublishRequest([each.encode() for each in payloads], producer=self.producer, segment=segment)
        request.sequence_ids = ids
        for name, value in (fields or {}).items():
            setattr(request, name, value)
        return await self.post("store", self.codec.encode_publish(request), **expected)

    async def publish(self, sequence_id, *segments, fields=None, **expected):
        """Publish; return the answer, and the receipt unless the answer is an error."""
        request = PublishRequest([], producer=self.producer, sequence_ids=[sequence_id], segments=list(segments))
        for name, value in (fields or {}).items():
            setattr(request, name, value)
        answer = await self.post("publish", self.codec.encode_publish(request), **expected)
        return answer, None if expected else self.codec.decode_receipt(answer.content)

    async def polled(self, content_type="application/json", **body):
        """Poll in this encoding, and return the payloads."""
        codec = {"avro/binary": AVRO, TYPES["v2"]: AVRO_2}.get(content_type, JSON)
        headers = {"Content-Type": content_type}
        if content_type == FRAMES:
            headers = {"Content-Type": "application/json", "Accept": FRAMES}
        content = codec.encode_poll(PollRequest(**body))
        path = f"{TOPICS}/{self.topic}/poll"
        self.last = await self.daemon.call("POST", path, content=content, headers=headers)
        if content_type == FRAMES:
            return [frame.payload.decode() for frame in decode_frames(self.last.content)]
        return [message.payload.decode() for message in codec.decode_page(self.last.content)]


@asynccontextmanager
async def staging(encoding="json", listener=None, properties=None, **settings):
    async with in_process(listener=listener, **settings) as daemon:
        await daemon.create(**(properties or {}))
        yield Staging(daemon, encoding)


@every_listener
@every_encoding
async def test_winning_segments_become_visible_together_and_once(encoding, listener):
    async with staging(encoding, listener) as talk:
        await talk.store("a.0", "lost", ids=[0])
        await talk.store("a.1", "one", "two", ids=[0, 1])
        await talk.store("b.0", "three", ids=[0])
        await talk.store("a.1", "four", ids=[2])
        assert await talk.polled() == []
        answer, receipt = await talk.publish(0, "a.1", "b.0")
        assert answer.headers["plainsong-duplicate"] == "false"
        assert answer.headers["plainsong-last-sequence-id"] == "0"
        assert (receipt.duplicate, receipt.deduplicated, receipt.last_sequence_id, receipt.generation) == (
            (False, True, 0, 1)
        )
        for content_type in POLLS:
            assert await talk.polled(content_type) == ["one", "two", "three", "four"]
        again, known = await talk.publish(0, "a.1", "b.0")
        assert again.headers["plainsong-duplicate"] == "true"
        assert known.duplicate
        assert (known.first_id, known.last_id) == (receipt.first_id, receipt.last_id)
        assert await talk.polled() == ["one", "two", "three", "four"]


@every_encoding
async def test_a_receipt_encloses_the_messages_it_is_for(encoding):
    async with staging(encoding) as talk:
        await talk.daemon.publish("before")
        await talk.store("a", "one", "two", ids=[0, 1])
        _, receipt = await talk.publish(7, "a")
        await talk.daemon.publish("behind")
        polled = await talk.daemon.poll()
        ids = [bytes.fromhex(message["id"]) for message in polled]
        assert ids[0] < receipt.first_id <= ids[1] < ids[2] <= receipt.last_id < ids[3]
        assert unpack_id(receipt.first_id)[:2] == unpack_id(receipt.last_id)[:2] == unpack_id(ids[1])[:2]
        assert await talk.polled(start_from=receipt.first_id) == ["one", "two", "behind"]
        for inclusive in (True, False):
            assert await talk.polled(start_from=receipt.last_id, inclusive=inclusive) == ["behind"]


# --- reading ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", POLLS[1:])
@pytest.mark.parametrize("limit", range(1, 8))
async def test_pages_of_every_size_in_every_encoding_may_end_inside_a_batch_and_continue_there(content_type, limit):
    async with staging() as talk:
        await talk.daemon.publish("before")
        await talk.store("lost", "x", "y")
        await talk.store("a", *"bcd")
        await talk.store("b", *"ef")
        await talk.publish(0, "a", "b")
        await talk.daemon.publish("behind")
        expected, seen, start = ["before", *"bcdef", "behind"], [], None
        for isolation in ("uncommitted", "committed"):
            while True:
                body = {"limit": limit, "isolation": isolation, "inclusive": False}
                page = await talk.polled(content_type, **body, start_from=start)
                assert len(page) <= limit
                seen += page
                start = bytes.fromhex(talk.last.headers["plainsong-last-id"])
                if talk.last.headers["plainsong-end"] == "end":
                    break
            assert seen == expected
            seen, start = [], None


async def test_frames_of_a_batch_have_its_attributes_and_no_write_pointer():
    async with staging() as talk:
        fields = {"attributes": [{"k": "1"}, {}], "routing_key": "r"}
        await talk.store("a", "one", "two", fields=fields)
        await talk.publish(0, "a")
        headers = {"Content-Type": "application/json", "Accept": f"{FRAMES}; fields=pointer; version=2"}
        answer = await talk.daemon.call("POST", f"{TOPICS}/t/poll", json={}, headers=headers)
        frames = decode_frames(answer.content, pointers=True, attributes=True)
        assert [(frame.pointer, dict(frame.attributes)) for frame in frames] == [
            (0, {"k": "1", "routingKey": "r"}),
            (0, {"routingKey": "r"}),
        ]


async def test_every_view_shows_a_batch_as_plain_messages_of_its_producer():
    async with staging() as talk:
        await talk.store("a", "one", "two", ids=[0, 1])
        await talk.store("lost", "x", ids=[0])
        await talk.publish(5, "a")
        call = talk.daemon.call
        shown = (await call("GET", f"{TOPICS}/t/messages")).json()
        assert [(each["state"], each["writePointer"], each["payload"]) for each in shown] == [
            ("plain", None, "one"),
            ("plain", None, "two"),
        ]
        assert [(each["producer"], each["sequenceId"], each["batch"]) for each in shown] == [("job", None, None)] * 2
        stats = (await call("GET", f"{TOPICS}/t/stats")).json()
        assert (stats["messages"], stats["openTransactions"]) == (2, 0)
        assert stats["newestId"] == shown[-1]["id"]
        producer = (await call("GET", f"{TOPICS}/t/producers/job")).json()
        assert producer["lastSequenceId"] == 5
        assert producer["recent"][0]["response"] is None
        metrics = (await call("GET", "/metrics")).text
        assert "plainsong_undecided_pointers 0.0" in metrics


async def test_offsets_count_a_batch_and_may_end_inside_it():
    async with staging() as talk:
        await talk.store("lost", "xxxx")
        await talk.store("a", *"abcdefgh")
        await talk.publish(0, "a")
        path = f"{TOPICS}/t/offsets"
        told = (await talk.daemon.call("POST", path, json={"splits": 4, "isolation": "committed"})).json()
        assert told["count"] == 8
        bounds = [None, *map(bytes.fromhex, told["splits"]), bytes.fromhex(told["end"])]
        parts = [await talk.polled(start_from=low, end_before=high) for low, high in itertools.pairwise(bounds)]
        assert len(parts) == 4
        assert [payload for part in parts for payload in part] == list("abcdefgh")
        told = (await talk.daemon.call("POST", path, json={"maxMessages": 3})).json()
        assert await talk.polled(end_before=bytes.fromhex(told["end"])) == ["a", "b", "c"]


async def test_a_committed_poll_waits_for_a_batch_and_is_not_held_by_staged_messages():
    async with staging() as talk:
        seen = []

        async def follow():
            seen.extend(await talk.polled(isolation="committed", wait_ms=5000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await talk.store("a", "one", "two")
            assert await talk.polled(isolation="committed") == []
            assert talk.last.headers["plainsong-end"] == "end"
            await talk.publish(0, "a")
        assert seen == ["one", "two"]


# --- refusals -----------------------------------------------------------------------------------------


@every_encoding
async def test_every_refusal_of_a_publish_has_its_code_and_changes_nothing(encoding):
    async with staging(encoding) as talk:
        await talk.store("a", "one", ids=[0])
        answer, _ = await talk.publish(0, "a", "missing", status=400, code="invalid_parameter")
        assert "'missing'" in answer.json()["detail"]
        assert answer.json()["outcome"] == "not-applied"
        for fields, status, code in (
            ({"segments": []}, 400, "no_messages"),
            ({"segments": None}, 400, "no_messages"),
            ({"messages": [b"m"]}, 400, "invalid_parameter"),
            ({"producer": None, "sequence_ids": None}, 400, "invalid_parameter"),
            ({"sequence_ids": None}, 400, "invalid_sequence_ids"),
            ({"sequence_ids": [0, 1]}, 400, "invalid_sequence_ids"),
            ({"routing_key": "k"}, 400, "invalid_parameter"),
            ({"segment": "a"}, 400, "invalid_parameter"),
            ({"ttl_s": 0}, 400, "invalid_parameter"),
            ({"generation": 2}, 409, "generation_changed"),
            ({"producer_epoch": 1}, 410, "producer_expired"),
        ):
            answer, _ = await talk.publish(0, "a", fields=fields, status=status, code=code)
            assert answer.json()["hint"] or status == 409
        _, receipt = await talk.publish(0, "a", fields={"ttl_s": 60, "generation": 1, "atomic": True})
        assert not receipt.duplicate
        assert await talk.polled() == ["one"]


@every_encoding
async def test_every_refusal_of_a_store_has_its_code(encoding):
    async with staging(encoding, topic__max_message_bytes=3) as talk:
        for fields, status, code in (
            ({"messages": []}, 400, "no_messages"),
            ({"segment": None}, 400, "transaction_required"),
            ({"producer": None}, 400, "transaction_required"),
            ({"sequence_ids": [0, 1]}, 400, "invalid_sequence_ids"),
            ({"segment": "s" * 65}, 400, "invalid_parameter"),
            ({"segments": ["a"]}, 400, "invalid_parameter"),
            ({"messages": [b"four"]}, 413, "message_too_large"),
            ({"generation": 2}, 409, "generation_changed"),
        ):
            await talk.store("a", "one", fields=fields, status=status, code=code)
        talk.topic = "none"
        await talk.store("a", "one", status=404, code="topic_not_found")
        await talk.publish(0, "a", status=404, code="topic_not_found")


async def test_a_topic_that_requires_transactions_stages_nothing():
    async with staging(properties={"transactional": "required"}) as talk:
        await talk.store("a", "one", status=400, code="transaction_required")
        await talk.publish(0, "a", status=400, code="transaction_required")


@every_encoding
async def test_an_older_session_is_fenced_from_stores_and_publishes(encoding):
    async with staging(encoding) as talk:
        opened = [(await talk.daemon.call("PUT", f"{TOPICS}/t/producers/job")).json() for _ in range(2)]
        old, new = ({"producer_epoch": each["epoch"]} for each in opened)
        await talk.store("a", "one", ids=[0], fields=new)
        await talk.store("a", "two", ids=[1], fields=old, status=409, code="producer_fenced")
        await talk.publish(0, "a", fields=old, status=409, code="producer_fenced")
        _, receipt = await talk.publish(0, "a", fields=new)
        assert receipt.last_sequence_id == 0
        assert await talk.polled() == ["one"]


@every_encoding
async def test_without_deduplication_batches_are_published_and_the_answer_reports_it(encoding):
    async with staging(encoding, properties={"deduplication": "disabled"}) as talk:
        await talk.store("a", "one", ids=[0])
        answer, receipt = await talk.publish(0, "a")
        assert answer.headers["plainsong-duplicate"] == "false"
        assert "plainsong-last-sequence-id" not in answer.headers
        assert (receipt.deduplicated, receipt.last_sequence_id) == (False, None)
        await talk.publish(0, "a", status=400, code="invalid_parameter")


async def test_a_full_topic_accepts_nothing_more_until_the_batch_expires():
    async with staging(properties={"max_bytes": 100, "ttl": 10}) as talk:
        await talk.store("a", "x" * 60, ids=[0])
        await talk.store("a", "x" * 60, ids=[1], status=503, code="topic_full")
        await talk.publish(0, "a")
        await talk.store("a", "x" * 60, ids=[0], status=503, code="topic_full")
        talk.daemon.clock.ms += 11_000
        await talk.store("a", "x" * 60, ids=[0])


async def test_a_plain_publish_of_the_producer_ends_no_staging_and_staged_bytes_count_until_the_publish():
    async with in_process() as daemon:
        await daemon.create(max_bytes=1_000)
        staging = Staging(daemon)
        await staging.store("0.a", "x" * 600)
        plain = PublishRequest([b"plain"], producer="job", sequence_ids=[0])
        await staging.post("publish", staging.codec.encode_publish(plain))
        await daemon.call("POST", f"{TOPICS}/t/publish", json={"messages": ["y" * 600]}, status=503, code="topic_full")
        await staging.publish(1, "0.a")
        assert await staging.polled() == ["plain", "x" * 600]
        await staging.publish(2, "0.a", status=400, code="invalid_parameter")


async def test_streams_publish_staged_messages():
    async with staging() as talk:
        await talk.store("a", "one", ids=[0])
        request = PublishRequest([], producer="job", sequence_ids=[0], segments=["a"])
        ask = ask_to_publish(request, 0)
        assert isinstance(ask, PublishStaged)
        receipt = await talk.daemon.service.directory.ask(TopicName("ns", "t"), ask)
        assert await talk.polled() == ["one"]
        assert receipt.deduplicated

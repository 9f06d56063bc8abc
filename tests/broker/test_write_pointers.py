"""Publish, store and rollback under a write pointer, and polls of the result, in every encoding at both listeners."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from broker_in_process import START_MS, TOPICS, in_process

from plainsong.protocol.requests import PollRequest, PublishRequest, PublishResponse
from plainsong.protocol.tephra.state import encode_transaction
from plainsong.protocol.transactions.transaction import Transaction
from tests.codecs import AVRO, AVRO_2, JSON

TYPES = {"v1": "avro/binary", "v2": "avro/binary; version=2", "json": "application/json"}
CODECS = {"v1": AVRO, "v2": AVRO_2, "json": JSON}
FRAMES = "application/vnd.plainsong.frames; fields=pointer"
#: A pointer issued at the clock's time.
NOW = START_MS * 1_000_000
every_encoding = pytest.mark.parametrize("encoding", TYPES)
every_listener = pytest.mark.parametrize("listener", [None, "hot", "application"])


class Talk:
    """A topic, and requests to it in one encoding."""

    def __init__(self, daemon, encoding, topic="t"):
        self.daemon, self.codec, self.topic = daemon, CODECS[encoding], topic
        self.headers = {"Content-Type": TYPES[encoding]}

    async def post(self, verb, body, *, status=200, code=None, query="", **headers):
        path = f"{TOPICS}/{self.topic}/{verb}{query}"
        return await self.daemon.call(
            "POST", path, status=status, code=code, content=body, headers={**self.headers, **headers}
        )

    async def publish(self, *payloads, pointer=None, **more):
        request = PublishRequest([payload.encode() for payload in payloads], pointer)
        expected = {name: more.pop(name) for name in ("status", "code", "query") if name in more}
        for name, value in more.items():
            setattr(request, name, value)
        answer = await self.post("publish", self.codec.encode_publish(request), **expected)
        return answer if expected else (self.codec.decode_publish_response(answer.content) if pointer else answer)

    async def store(self, *payloads, pointer=None, segment=None, **expected):
        request = PublishRequest([payload.encode() for payload in payloads], pointer, segment=segment)
        return await self.post("store", self.codec.encode_publish(request), **expected)

    async def rollback(self, response, **expected):
        return await self.post("rollback", self.codec.encode_publish_response(response), **expected)

    async def poll(self, **body):
        answer = await self.post("poll", self.codec.encode_poll(PollRequest(**body)))
        self.last = answer
        return [message.payload.decode() for message in self.codec.decode_page(answer.content)]


@pytest.fixture
async def daemon():
    async with in_process(transactions__service="off") as running:
        yield running


@asynccontextmanager
async def talking(encoding, listener=None, **settings):
    """Run a daemon whose clients choose write pointers; with its own service it would refuse foreign pointers."""
    settings = {"transactions__service": "off", **settings}
    async with in_process(listener=listener, **settings) as daemon:
        await daemon.create()
        yield Talk(daemon, encoding)


def snapshot(read_pointer, *, in_progress=(), invalids=(), own=1):
    return encode_transaction(Transaction(read_pointer, own, own, tuple(invalids), tuple(in_progress)))


# --- the golden bytes ------------------------------------------------------------------------------


@every_listener
async def test_the_golden_bytes_of_a_transactional_publish_are_accepted_answered_and_rolled_back(listener):
    async with talking("v1", listener, transactions__max_lifetime_s=0) as talk:
        assert (await talk.post("publish", bytes.fromhex("0204046d30046d3100"))).content == b""
        answered = await talk.post("publish", bytes.fromhex("000202046d3200"))
        assert answered.content.hex() == "000280a0abfef9620480a0abfef96204"
        assert answered.headers["content-type"] == "avro/binary"
        exclusive = bytes.fromhex("00280000018bcfe5680000010000000000000000000000001402")
        polled = await talk.post("poll", exclusive)
        assert polled.content.hex() == "02280000018bcfe56800000200000000000000000000046d3200"
        assert (await talk.post("rollback", answered.content)).content == b""
        brought = snapshot(1)
        assert await talk.poll(transaction=brought) == ["m0", "m1"]
        # A partly rolled back pointer may be used again; an empty publish writes nothing.
        nothing = AVRO.decode_publish_response((await talk.post("publish", bytes.fromhex("000200"))).content)
        assert nothing.write_pointer == 1
        assert await talk.poll() == ["m0", "m1", "m2"]


# --- publish and store -----------------------------------------------------------------------------


@every_encoding
@every_listener
async def test_stored_messages_are_published_first_and_in_their_order(encoding, listener):
    async with talking(encoding, listener) as talk:
        assert (await talk.store("a", "b", pointer=NOW)).content == b""
        await talk.store("c", pointer=NOW)
        assert await talk.poll() == []
        await talk.publish("between")
        response = await talk.publish("d", pointer=NOW)
        assert response.write_pointer == NOW
        assert await talk.poll() == ["between", "a", "b", "c", "d"]
        for limit in (1, 2, 3):
            assert await talk.poll(limit=limit) == ["between", "a", "b"][:limit]


@every_encoding
async def test_a_repeated_publish_of_stored_messages_gets_the_same_answer(encoding):
    async with talking(encoding) as talk:
        await talk.store("a", pointer=NOW)
        first = await talk.publish(pointer=NOW)
        talk.daemon.clock.ms += 5
        assert await talk.publish(pointer=NOW) == first
        assert await talk.poll() == ["a"]
        await talk.store("b", pointer=NOW, status=409, code="already_published")


@every_encoding
async def test_an_empty_publish_is_answered_even_if_nothing_is_stored(encoding):
    async with talking(encoding) as talk:
        assert (await talk.publish(pointer=NOW)).write_pointer == NOW
        assert await talk.poll() == []


@pytest.mark.parametrize("encoding", ["v2", "json"])
async def test_only_the_listed_segments_are_ever_part_of_the_topic(encoding):
    async with talking(encoding) as talk:
        await talk.store("lost", pointer=NOW, segment="attempt-1")
        await talk.store("won", pointer=NOW, segment="attempt-2")
        await talk.publish(pointer=NOW, segments=["attempt-2", "attempt-9"])
        assert await talk.poll() == ["won"]


@every_encoding
async def test_a_store_without_messages_or_without_a_pointer_is_refused(encoding):
    async with talking(encoding) as talk:
        await talk.store(pointer=NOW, status=400, code="no_messages")
        await talk.store("a", status=400, code="transaction_required")


@every_encoding
@pytest.mark.parametrize("pointer", [0, -5])
async def test_a_pointer_that_is_not_above_zero_is_refused(encoding, pointer):
    async with talking(encoding) as talk:
        await talk.publish("a", pointer=pointer, status=400, code="invalid_parameter")
        await talk.store("a", pointer=pointer, status=400, code="invalid_parameter")
        await talk.rollback(PublishResponse(pointer, 1, 0, 1, 0), status=400, code="invalid_parameter")


@every_encoding
async def test_a_pointer_older_than_a_transaction_may_live_is_refused(encoding):
    old = NOW - 90_000_000 * 1_000_000
    async with talking(encoding) as talk:
        await talk.publish("a", pointer=old, status=409, code="transaction_expired")
        await talk.store("a", pointer=old, status=409, code="transaction_expired")
        await talk.publish("a", pointer=old + 1_000_000)
    async with talking(encoding, transactions__max_lifetime_s=0) as talk:
        await talk.publish("a", pointer=1)


@every_encoding
async def test_an_absent_topic_is_404_whatever_the_pointer(encoding):
    async with talking(encoding) as talk:
        talk.topic = "none"
        await talk.publish("a", pointer=NOW, status=404, code="topic_not_found")
        await talk.store("a", pointer=NOW, status=404, code="topic_not_found")
        await talk.rollback(PublishResponse(NOW, 1, 0, 1, 0), status=404, code="topic_not_found")


@every_encoding
async def test_the_property_transactional_is_enforced(encoding):
    async with talking(encoding) as talk:
        await talk.daemon.create("all", transactional="required")
        await talk.daemon.create("none", transactional="disabled")
        talk.topic = "all"
        await talk.publish("a", status=400, code="transaction_required")
        await talk.publish("a", pointer=NOW)
        talk.topic = "none"
        await talk.publish("a", pointer=NOW, status=400, code="transaction_refused")
        await talk.store("a", pointer=NOW, status=400, code="transaction_refused")
        await talk.publish("b")
        assert await talk.poll() == ["b"]


async def test_the_property_can_be_changed_and_is_shown(daemon):
    await daemon.create("x", transactional="required")
    assert (await daemon.call("GET", f"{TOPICS}/x")).json()["properties"]["transactional"] == "required"
    await daemon.call("PUT", f"{TOPICS}/x/properties", json={"transactional": "disabled"})
    await daemon.publish("plain", topic="x")
    await daemon.call("PUT", f"{TOPICS}/y", json={"transactional": "always"}, status=400, code="invalid_property")


async def test_write_pointers_are_numbers_digits_or_strings_in_json(daemon):
    await daemon.create()
    body = {"transactionWritePointer": str(NOW), "messages": ["a"]}
    answer = await daemon.call("POST", f"{TOPICS}/t/publish", json=body)
    assert answer.json()["transactionWritePointer"] == NOW
    answer = await daemon.call("POST", f"{TOPICS}/t/publish?longs=string", json=body)
    assert answer.json()["transactionWritePointer"] == str(NOW)
    await daemon.call("POST", f"{TOPICS}/t/rollback", json=answer.json())


async def test_under_a_pointer_the_answer_ignores_prefer(daemon):
    await daemon.create()
    body = {"transactionWritePointer": NOW, "messages": ["a"]}
    headers = {"Prefer": "return=representation"}
    answer = await daemon.call("POST", f"{TOPICS}/t/publish", json=body, headers=headers)
    assert answer.json()["transactionWritePointer"] == NOW


async def test_a_store_and_a_rollback_refuse_parameters_they_do_not_know(daemon):
    await daemon.create()
    body = {"transactionWritePointer": NOW, "messages": ["a"]}
    await daemon.call("POST", f"{TOPICS}/t/store?longs=string", json=body, status=400, code="invalid_parameter")
    await daemon.call("POST", f"{TOPICS}/t/store?ttl=5", json=body)
    only = {"transactionWritePointer": NOW}
    await daemon.call("POST", f"{TOPICS}/t/rollback?ttl=5", json=only, status=400, code="invalid_parameter")


async def test_stored_messages_live_no_longer_than_their_ttl_counted_from_the_publish():
    async with talking("v2") as talk:
        await talk.store("a", pointer=NOW)
        talk.daemon.clock.ms += 3_600_000
        await talk.publish(pointer=NOW, ttl_s=10)
        talk.daemon.clock.ms += 10_000
        assert await talk.poll() == ["a"]
        talk.daemon.clock.ms += 1
        assert await talk.poll() == []


# --- rollback --------------------------------------------------------------------------------------


@every_encoding
@every_listener
async def test_a_rollback_touches_only_its_pointer_and_may_be_repeated(encoding, listener):
    async with talking(encoding, listener) as talk:
        first = await talk.publish("a", "b", pointer=NOW)
        await talk.publish("plain")
        await talk.publish("other", pointer=NOW + 1)
        wide = PublishResponse(NOW, first.start_timestamp_ms, 0, first.end_timestamp_ms, 65_535)
        for _ in range(2):
            assert (await talk.rollback(wide)).content == b""
        brought = snapshot(NOW + 5, own=NOW + 9)
        assert await talk.poll(transaction=brought) == ["plain", "other"]
        assert await talk.poll() == ["a", "b", "plain", "other"]


async def test_a_rollback_of_a_pointer_alone_covers_all_its_messages_and_wins_over_later_ones():
    async with talking("json") as talk:
        await talk.publish("a", pointer=NOW)
        await talk.store("b", pointer=NOW)
        await talk.post("rollback", b'{"transactionWritePointer": %d}' % NOW)
        await talk.publish("c", pointer=NOW, status=409, code="rolled_back")
        await talk.store("c", pointer=NOW, status=409, code="rolled_back")
        assert await talk.poll(transaction=snapshot(NOW + 5, own=NOW + 9)) == []
        assert await talk.poll() == ["a"]


@every_encoding
async def test_a_rollback_without_a_pointer_or_with_an_invalid_range_is_refused(encoding):
    async with talking(encoding) as talk:
        await talk.rollback(PublishResponse(None, 1, 0, 1, 0), status=400, code="transaction_required")
        for start, end in (((-1, 0), (1, 0)), ((1, 0), (1, 65_536)), ((2, 0), (1, 0))):
            await talk.rollback(PublishResponse(NOW, *start, *end), status=400, code="invalid_parameter")


# --- polls with a snapshot -------------------------------------------------------------------------


@every_encoding
@every_listener
async def test_a_snapshot_delivers_skips_or_stops_row_by_row(encoding, listener):
    async with talking(encoding, listener) as talk:
        await talk.publish("plain")
        await talk.publish("committed", pointer=NOW)
        await talk.publish("invalid", pointer=NOW + 1)
        rolled = await talk.publish("rolled", pointer=NOW + 2)
        await talk.rollback(rolled)
        talk.daemon.clock.ms += 1
        await talk.publish("open", pointer=NOW + 3)
        await talk.publish("behind")
        brought = snapshot(NOW + 9, in_progress=[NOW + 3], invalids=[NOW + 1], own=NOW + 10)
        assert await talk.poll(transaction=brought) == ["plain", "committed"]
        said = talk.last.headers
        assert said["plainsong-end"] == "held"
        assert said["plainsong-held-by"] == str(NOW + 3)
        assert said["plainsong-held-since"] == str(START_MS + 1)
        assert said["plainsong-hidden-messages"] == "2"
        resumed = bytes.fromhex(said["plainsong-last-id"])
        later = snapshot(NOW + 9, invalids=[NOW + 1], own=NOW + 10)
        assert await talk.poll(transaction=later, start_from=resumed, inclusive=False) == ["open", "behind"]
        assert talk.last.headers["plainsong-end"] == "end"
        assert "plainsong-held-by" not in talk.last.headers


async def test_more_than_a_thousand_hidden_messages_are_not_counted():
    async with talking("json") as talk:
        await talk.publish("open", pointer=NOW)
        await talk.publish(*["x"] * 999)
        brought = snapshot(NOW - 1, in_progress=[], own=NOW + 5)
        await talk.poll(transaction=brought)
        assert talk.last.headers["plainsong-hidden-messages"] == "1000"
        await talk.publish("one more")
        await talk.poll(transaction=brought)
        assert talk.last.headers["plainsong-hidden-messages"] == "1000+"


async def test_a_held_poll_with_its_own_snapshot_is_answered_at_once():
    async with talking("json") as talk:
        await talk.publish("open", pointer=NOW)
        assert await talk.poll(transaction=snapshot(NOW - 1, own=NOW + 5), wait_ms=60_000) == []
        assert talk.last.headers["plainsong-end"] == "held"


@every_encoding
async def test_bytes_that_are_not_a_transaction_are_refused(encoding):
    async with talking(encoding) as talk:
        body = talk.codec.encode_poll(PollRequest(transaction=b"\x0a\x00"))
        await talk.post("poll", body, status=400, code="malformed_transaction")


async def test_an_oversized_snapshot_is_refused():
    async with talking("v1") as talk:
        body = talk.codec.encode_poll(PollRequest(transaction=bytes((16 << 20) + 1)))
        await talk.post("poll", body, status=413, code="request_too_large")


async def test_a_snapshot_of_a_hundred_thousand_pointers_is_read():
    async with talking("json") as talk:
        await talk.publish("invalid", pointer=NOW)
        await talk.publish("seen")
        assert await talk.poll(transaction=snapshot(NOW, invalids=range(NOW - 99_999, NOW + 1))) == ["seen"]


@every_encoding
async def test_a_snapshot_and_an_isolation_exclude_each_other(encoding):
    async with talking(encoding) as talk:
        body = talk.codec.encode_poll(PollRequest(transaction=snapshot(NOW)))
        for isolation in ("committed", "uncommitted"):
            await talk.post("poll", body, query=f"?isolation={isolation}", status=400, code="invalid_parameter")


async def test_frames_have_the_pointer_of_each_message_and_it_is_negative_when_rolled_back():
    async with talking("json") as talk:
        await talk.publish("plain")
        await talk.publish("open", pointer=NOW)
        await talk.rollback(await talk.publish("back", pointer=NOW + 1))
        answer = await talk.post("poll", b"{}", Accept=FRAMES)
        pointers, at, frames = [], 0, answer.content
        while frames[at : at + 20] != b"\xff" * 20:
            pointers.append(int.from_bytes(frames[at + 20 : at + 28], "big", signed=True))
            at += 32 + int.from_bytes(frames[at + 28 : at + 32], "big")
        assert pointers == [0, NOW, -(NOW + 1)]


async def test_a_version_1_stream_keeps_its_view_to_the_end():
    async with talking("v1", poll__max_messages=2) as talk:
        await talk.publish("a", "b", "c", pointer=NOW)
        await talk.publish("d", pointer=NOW + 1)
        await talk.publish("e", pointer=NOW + 2)
        brought = snapshot(NOW + 9, in_progress=[NOW + 2], invalids=[NOW + 1], own=NOW + 10)
        assert await talk.poll(transaction=brought) == ["a", "b", "c"]
        assert "plainsong-end" not in talk.last.headers

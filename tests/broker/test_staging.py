"""Staging through the application: store by segments, publish the winners once, in every encoding and through both doors."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
from broker_in_process import TOPICS, in_process

from protocol.codec import AVRO, AVRO_2, JSON
from protocol.frames import decode_frames
from protocol.ids import unpack_id
from protocol.requests import PollRequest, PublishRequest

TYPES = {"v2": "avro/binary; version=2", "json": "application/json"}
CODECS = {"v2": AVRO_2, "json": JSON}
FRAMES = "application/vnd.plainsong.frames"
every_encoding = pytest.mark.parametrize("encoding", TYPES)
every_door = pytest.mark.parametrize("door", [None, "lane", "hypercorn"])
POLLS = ("avro/binary", "avro/binary; version=2", "application/json", FRAMES)


class Staging:
    """One topic and a producer that stages in it, in one encoding."""

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
        """The answer, and the receipt unless it is an error."""
        request = PublishRequest([], producer=self.producer, sequence_ids=[sequence_id], segments=list(segments))
        for name, value in (fields or {}).items():
            setattr(request, name, value)
        answer = await self.post("publish", self.codec.encode_publish(request), **expected)
        return answer, None if expected else self.codec.decode_receipt(answer.content)

    async def polled(self, content_type="application/json", **body):
        """Payloads, in the encoding asked for."""
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
async def staging(encoding="json", door=None, properties=None, **settings):
    async with in_process(door=door, **settings) as daemon:
        await daemon.create(**(properties or {}))
        yield Staging(daemon, encoding)


@every_door
@every_encoding
async def test_winning_segments_become_visible_together_and_once(encoding, door):
    async with staging(encoding, door) as talk:
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

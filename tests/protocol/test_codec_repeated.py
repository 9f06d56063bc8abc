"""The shortcut for requests of one message and for a producer's cached fields decodes the same as the full decoder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.codec import avro
from plainsong.protocol.codec.avro import Avro2Codec
from plainsong.protocol.codec.avro_cursor import read_only_message
from plainsong.protocol.errors import BadRequest
from plainsong.protocol.page import varint
from plainsong.protocol.requests import PublishRequest

LONGS = st.integers(-(1 << 63), (1 << 63) - 1)
PAYLOADS = st.binary(max_size=3) | st.sampled_from([b"x" * 63, b"x" * 64, b"x" * 8191, b"x" * 8192])
PRODUCERS = st.builds(
    PublishRequest,
    st.lists(PAYLOADS, min_size=1, max_size=1),
    ttl_s=st.none() | st.integers(1, 500),
    producer=st.none() | st.text(max_size=4) | st.just("long" * 100),
    producer_epoch=st.none() | LONGS,
    generation=st.none() | st.integers(1, 500),
    sequence_ids=st.none() | st.lists(LONGS, min_size=1, max_size=2),
)
#: Unusual but legal: two blocks, a block with its size, a number with two superfluous bytes, a branch in two bytes.
ODD_IDS = [b"\x02\x02\x08\x02\x08\x00", b"\x02\x01\x02\x08\x00", b"\x02\x02\x88\x80\x00\x00", b"\x82\x00\x02\x08\x00"]


class WithoutShortcuts(Avro2Codec):
    """Decodes every field of every body."""

    def decode_publish(self, body: bytes) -> PublishRequest:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(avro, "read_only_message", lambda _: (None, 0))
            return super().decode_publish(body)


def told(codec, body):
    """Return the request, or the body's error."""
    try:
        return codec.decode_publish(body)
    except BadRequest as error:
        return error.code, error.detail


def of_one_message(payload, ids):
    """Return a body whose sequence ids have these bytes."""
    return b"\x02\x02" + varint(len(payload)) + payload + b"\x00\x00\x02\x02p\x00\x00" + ids + bytes(6)


@given(PRODUCERS, st.lists(st.tuples(PAYLOADS, LONGS), min_size=1, max_size=3))
def test_the_next_request_of_a_producer_is_read_like_its_first_one(first, following):
    codec = Avro2Codec()
    assert codec.decode_publish(codec.encode_publish(first)) == first
    for payload, sequence_id in following:
        ids = None if first.sequence_ids is None else [sequence_id]
        request = PublishRequest(
            [payload], None, first.ttl_s, first.producer, first.producer_epoch, first.generation, ids
        )
        body = codec.encode_publish(request)
        assert codec.decode_publish(body) == told(WithoutShortcuts(), body) == request


@given(PRODUCERS, st.data())
def test_a_damaged_request_of_a_producer_is_refused_like_any_other(first, data):
    codec = Avro2Codec()
    whole = codec.encode_publish(first)
    codec.decode_publish(whole)
    body = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)) | st.integers(max(0, len(body) - 20), len(body)))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    assert told(codec, bytes(body)) == told(WithoutShortcuts(), bytes(body))
    for cut in range(len(whole) if len(whole) < 100 else 0):
        assert told(codec, whole[:cut]) == told(WithoutShortcuts(), whole[:cut])


@pytest.mark.parametrize("ids", ODD_IDS)
@pytest.mark.parametrize(
    "following", [b"\x08", b"\x80\x01", b"\x80" * 10, b"\xff" * 9 + b"\x01", b"\xff" * 9 + b"\x02"]
)
def test_unusual_ways_to_write_a_sequence_id_are_read_alike_again_and_again(ids, following):
    codec = Avro2Codec()
    for each in (ids, ids, b"\x02\x02" + following + b"\x00", ids[:-2] + following + b"\x00"):
        body = of_one_message(b"m", each)
        assert told(codec, body) == told(WithoutShortcuts(), body)


def test_remembered_requests_of_producers_are_bounded():
    codec = Avro2Codec()
    for number in range(3000):
        for name in (f"p{number}", "n" * 400 + str(number)):
            codec.decode_publish(codec.encode_publish(PublishRequest([b"m"], producer=name, sequence_ids=[number])))
    kept = codec._producers_seen._fields
    assert 0 < len(kept) <= 1024
    assert max(map(len, kept)) <= 300


def test_a_plain_request_of_one_message_is_recognised():
    assert read_only_message(Avro2Codec().encode_publish(PublishRequest([b"m" * 100]))) == (b"m" * 100, 104)

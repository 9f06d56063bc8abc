"""The body executors make of bytes alone is, byte for byte, what the protocol's codec makes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.requests import PublishRequest
from pyspark_plainsong.staging import StoredUnder, store_body, zigzag

_NAMES = st.text(min_size=1, max_size=40).filter(lambda name: len(name.encode()) <= 64)
_POINTERS = st.none() | st.integers(1, (1 << 63) - 1)
_TTLS_S = st.none() | st.integers(1, (1 << 31) - 1)


def as_codec_writes(under: StoredUnder, payloads: list[bytes], first_id: int, ttls_s, attributes) -> bytes:
    return AVRO_2.encode_publish(
        PublishRequest(
            payloads,
            under.write_pointer,
            ttl_s=under.ttl_s,
            producer=under.producer,
            generation=under.generation,
            sequence_ids=range(first_id, first_id + len(payloads)),
            segment=under.segment,
            message_ttls_s=ttls_s,
            attributes=attributes,
        )
    )


@given(st.data())
def test_the_body_equals_that_of_the_codec(data: st.DataObject) -> None:
    under = StoredUnder(
        data.draw(_NAMES),
        data.draw(_NAMES),
        data.draw(st.none() | st.integers(1, 1 << 30)),
        data.draw(_POINTERS),
        data.draw(_TTLS_S),
    )
    payloads = data.draw(st.lists(st.binary(max_size=9), min_size=1, max_size=20))
    count = len(payloads)
    ttls_s = data.draw(st.none() | st.lists(_TTLS_S, min_size=count, max_size=count))
    maps = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)
    attributes = data.draw(st.none() | st.lists(maps, min_size=count, max_size=count))
    first_id = data.draw(st.integers(0, 1 << 40))
    assert store_body(under, payloads, first_id, ttls_s, attributes) == as_codec_writes(
        under, payloads, first_id, ttls_s, attributes
    )


def test_equal_and_unequal_lengths_of_every_prefix_are_read_back() -> None:
    under = StoredUnder("producer", "segment")
    for payloads in (
        [b"x" * 100] * 1000,
        [b"", b""],
        [b"x" * size for size in (0, 63, 64, 4095, 4096, 8191, 8192, 1 << 20)],
    ):
        request = AVRO_2.decode_publish(store_body(under, payloads, 1000))
        assert list(request.messages) == payloads
        assert list(request.sequence_ids or ()) == list(range(1000, 1000 + len(payloads)))


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_numbers_of_64_bits_are_read_back(number: int) -> None:
    from plainsong.protocol.codec.avro_cursor import Cursor

    cursor = Cursor(zigzag(number))
    assert cursor.long() == number
    cursor.finish()

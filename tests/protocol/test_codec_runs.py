"""Consecutive sequence ids in Avro are recognised by their bytes, and read to the same numbers as any others."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.codec.avro_cursor import Cursor, consecutive, read_longs
from plainsong.protocol.errors import InvalidSequenceIds, MalformedBody
from plainsong.protocol.page import varint
from plainsong.protocol.requests import PublishRequest, check_sequence_ids


@given(st.integers(0, (1 << 63) - 400), st.integers(0, 300))
@example(0, 64)
@example(63, 2)
@example(64, 1)
@example(8191, 2)
@example((1 << 63) - 300, 300)
def test_the_bytes_are_those_of_the_numbers_one_by_one(first, count):
    assert consecutive(first, count) == b"".join(map(varint, range(first, first + count)))


@given(st.lists(st.integers(0, 200), max_size=40).map(sorted), st.integers(0, 1 << 40))
def test_any_list_is_read_as_it_was_written(gaps, first):
    ids = [first + gap for gap in gaps]
    request = PublishRequest([b""] * len(ids), producer="p", sequence_ids=ids)
    assert list(AVRO_2.decode_publish(AVRO_2.encode_publish(request)).sequence_ids) == ids


@pytest.mark.parametrize("first", [0, 5, 60, 8_190, 10**6, (1 << 63) - 1000])
def test_consecutive_ids_are_a_range(first):
    request = PublishRequest([b"x"] * 1000, producer="p", sequence_ids=range(first, first + 1000))
    read = AVRO_2.decode_publish(AVRO_2.encode_publish(request))
    assert read.sequence_ids == range(first, first + 1000)
    assert type(read.sequence_ids) is range


@given(st.binary(max_size=60))
def test_whatever_is_no_run_is_left_to_the_reader_of_arrays(data):
    def outcome(read):
        cursor = Cursor(data)
        try:
            return list(read(cursor)), cursor.at, cursor.room
        except MalformedBody:
            return MalformedBody

    assert outcome(read_longs) == outcome(lambda cursor: cursor.array(cursor.long))


def test_a_range_has_to_have_one_id_for_each_message_too():
    check_sequence_ids(range(5, 8), 3)
    for ids, messages in ((range(5, 8), 2), (range(-1, 2), 3), (range(5, 2, -1), 3)):
        with pytest.raises(InvalidSequenceIds):
            check_sequence_ids(ids, messages)

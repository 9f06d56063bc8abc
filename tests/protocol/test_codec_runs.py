"""Runs of consecutive sequence ids in Avro are recognised by their bytes, and decoded as any other list would be."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plainsong.protocol.codec import AVRO_2
from plainsong.protocol.codec.avro_cursor import Cursor, end_of_run, read_longs
from plainsong.protocol.errors import InvalidSequenceIds, MalformedBody
from plainsong.protocol.page import varint
from plainsong.protocol.requests import PublishRequest, check_sequence_ids

FIRSTS = st.integers(0, (1 << 63) - 400) | st.sampled_from([0, 63, 64, 8191, 8192, 16_383, (1 << 14) - 30])


@given(FIRSTS, st.integers(1, 300), st.binary(max_size=3))
@example(0, 64, b"")
@example(63, 2, b"")
@example(64, 1, b"")
@example(8191, 2, b"")
@example(50, 300, b"")
@example((1 << 63) - 300, 300, b"")
def test_consecutive_numbers_are_recognised_by_their_bytes(first, count, before):
    run = b"".join(map(varint, range(first, first + count)))
    assert end_of_run(before + run + b"\x00", len(before), first, count) == len(before) + len(run)


@given(FIRSTS, st.integers(1, 300), st.data())
def test_numbers_that_differ_in_one_byte_are_not_a_run(first, count, data):
    run = bytearray(b"".join(map(varint, range(first, first + count))))
    run[data.draw(st.integers(0, len(run) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert end_of_run(bytes(run), 0, first, count) is None


@given(FIRSTS, st.integers(1, 300), st.data())
def test_numbers_that_end_early_are_not_a_run(first, count, data):
    run = b"".join(map(varint, range(first, first + count)))
    assert end_of_run(run[: data.draw(st.integers(0, len(run) - 1))], 0, first, count) is None


def test_a_run_of_many_numbers_is_recognised_across_all_lengths():
    run = b"".join(map(varint, range(5, 40_000)))
    assert end_of_run(run, 0, 5, 39_995) == len(run)
    assert end_of_run(run, 0, 6, 39_995) is None


@given(st.lists(st.integers(0, 200), max_size=40).map(sorted), st.integers(0, 1 << 40))
def test_any_list_round_trips(gaps, first):
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
def test_anything_but_a_run_is_left_to_the_reader_of_arrays(data):
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

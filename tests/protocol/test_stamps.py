"""Stamps: what the rows of a request say of it, and how its first row is found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.ids import SEQUENCES_PER_MS, pack_position
from protocol.keys import DamagedRow
from protocol.rows import MessageRow, decode_row, encode_row
from protocol.stamps import BATCH, INDEX, STAMP, Stamp, first_position, number_in, stamp_of
from protocol.topic.roll import positions
from protocol.topic.sequence import Sequence


@given(st.sets(st.integers(0, 1 << 62), min_size=1, max_size=20).map(sorted), st.sampled_from([None, 1, 7]))
def test_a_stamp_comes_back_from_its_row_and_knows_each_messages_id(ids, epoch):
    stamp = Stamp.of("p", epoch, ids)
    found = stamp_of(decode_row(encode_row(MessageRow(b"m", extras={STAMP: stamp.packed()}))).extras)
    assert [found.sequence_id(index) for index in range(found.count)] == ids
    assert (found.producer, found.epoch, found.first, found.last) == ("p", epoch or 0, ids[0], ids[-1])


def test_consecutive_ids_are_one_number_whatever_their_count():
    assert Stamp.of("p", 1, range(5, 60_005)).packed() == ["p", 1, 60_000, 5]
    assert Stamp.of("p", 1, [5, 7]).packed() == ["p", 1, 2, [5, 7]]


@pytest.mark.parametrize(
    "packed", [7, [], ["p", 1, 1], ["p", 1, 0, 5], [7, 1, 1, 5], ["p", 1, 2, [5]], ["p", True, 1, 5], ["p", 1, 1, "5"]]
)
def test_a_stamp_that_is_none_of_ours_is_a_damaged_row(packed):
    with pytest.raises(DamagedRow):
        stamp_of({STAMP: packed})


def test_a_row_without_stamp_has_none():
    assert stamp_of({INDEX: 4}) is None
    assert (number_in({INDEX: 4}, INDEX), number_in({INDEX: 4}, BATCH)) == (4, None)
    for number in (0, -1, "4", True):
        with pytest.raises(DamagedRow):
            number_in({INDEX: number}, INDEX)


@given(st.integers(0, 1 << 40), st.sampled_from([0, 7, SEQUENCES_PER_MS - 3]), st.integers(1, 70_000))
def test_going_back_by_its_index_leads_from_every_row_of_a_request_to_the_first(ts_ms, before, count):
    sequence = Sequence(ts_ms, before)
    found = positions(sequence.take(ts_ms, count))
    for index in {0, 1 % count, count // 2, count - 1}:
        assert first_position(found[index], index) == found[0]


def test_there_is_no_row_before_the_first_position():
    assert first_position(pack_position(0, 3), 3) == pack_position(0, 0)
    assert first_position(pack_position(0, 3), 4) is None

"""The precedence of overlapping entries of an archive of an earlier version."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pyspark_plainsong.pipeline.archive.former import merged, minus, pieces
from pyspark_plainsong.pipeline.archive.layout import Range
from tests.pipeline.former_archives import batch_entry, entry, small_id

LAST = 30


@st.composite
def entries(draw):
    found = []
    for number in range(draw(st.integers(0, 7))):
        start = draw(st.integers(0, LAST))
        kind = draw(st.sampled_from(["batch", "day"]))
        more = {"written_ms": draw(st.integers(0, 5)), "folder": str(number), "source": str(number)}
        more |= {"batch": number} if kind == "batch" else {"revision": draw(st.integers(1, 3)), "day": "2026-01-31"}
        found.append(entry(kind, start, draw(st.integers(start, LAST)), **more))
    return found


def ids(ranges):
    return [each for start, end in ranges for each in range(int.from_bytes(start), int.from_bytes(end))]


@given(entries())
def test_every_id_that_some_entry_holds_is_read_from_exactly_one(found):
    read = ids((piece.start, piece.end) for piece in pieces(found))
    assert sorted(read) == sorted(set(read))
    assert set(read) == set(ids((each.start, each.end) for each in found))


@given(entries())
def test_of_several_entries_the_lowest_rank_is_read(found):
    for piece in pieces(found):
        for each in ids([(piece.start, piece.end)]):
            others = [other for other in found if other.start <= small_id(each) < other.end]
            assert piece.entry.rank == min(other.rank for other in others)


def test_of_two_batches_with_the_same_ids_the_one_written_first_is_read():
    early, late = batch_entry(0, 10, written_ms=1, source="z"), batch_entry(5, 15, written_ms=2, source="a")
    assert [(piece.entry, piece.start) for piece in pieces([late, early])] == [
        (early, small_id(0)),
        (late, small_id(10)),
    ]


@given(st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST))), st.integers(0, LAST), st.integers(0, LAST))
def test_ranges_behave_as_sets_of_ids(given_ranges, start, end):
    ranges = [Range(small_id(min(each)), small_id(max(each))) for each in given_ranges]
    as_one = merged(ranges)
    assert set(ids(as_one)) == set(ids(ranges))
    assert all(one.end < other.start for one, other in pairwise(as_one))
    whole = Range(small_id(min(start, end)), small_id(max(start, end)))
    assert ids(minus(whole, as_one)) == sorted(set(ids([whole])) - set(ids(ranges)))

"""The precedence of overlapping entries of an archive."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pyspark_plainsong.pipeline.archive.compaction import replaced
from pyspark_plainsong.pipeline.archive.manifest import Range, covered, holes, merged, minus, pieces
from tests.pipeline.archives import batch_entry, entry, small_id

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


@given(entries(), st.data())
def test_removing_any_of_the_replaced_entries_changes_nothing_that_is_read(found, data):
    gone = replaced(found, before_ms=10)
    some = data.draw(st.sets(st.sampled_from([each.folder for each in gone]))) if gone else set()
    left = [each for each in found if each.folder not in some]
    assert covered(left) == covered(found)
    assert [piece for piece in pieces(left) if piece.start < piece.end] == pieces(found)


def test_an_entry_is_kept_until_its_replacement_is_old_enough():
    batch = batch_entry(0, 10)
    day = entry("day", 0, 10, written_ms=500, day="2026-01-31", revision=1)
    assert replaced([batch, day], before_ms=499) == []
    assert replaced([batch, day], before_ms=500) == [batch]


def test_an_entry_that_is_broken_replaces_nothing():
    batch, day = batch_entry(0, 10), entry("day", 0, 10, day="2026-01-31", revision=1)
    better = entry("day", 0, 10, day="2026-01-31", revision=2, folder="better")
    assert replaced([batch, day], before_ms=10, broken={day.folder}) == []
    assert replaced([batch, day, better], before_ms=10, broken={"better"}) == [batch]
    assert replaced([batch, day, better], before_ms=10, broken={day.folder}) == [day, batch]


def test_a_batch_that_is_partly_left_is_not_replaced():
    assert replaced([batch_entry(0, 10), entry("day", 0, 9, day="2026-01-31", revision=1)], before_ms=10) == []


def test_of_two_batches_of_the_same_ids_the_one_written_first_is_read():
    early, late = batch_entry(0, 10, written_ms=1, source="z"), batch_entry(5, 15, written_ms=2, source="a")
    assert [(piece.entry, piece.start) for piece in pieces([late, early])] == [
        (early, small_id(0)),
        (late, small_id(10)),
    ]


def test_a_hole_is_a_range_missing_before_other_entries_or_the_checkpoint():
    first, second, third = (batch_entry(start, start + 5, batch=start // 5) for start in (0, 5, 10))
    reached = Range(small_id(0), small_id(15))
    assert holes([first, second, third], reached) == holes([first, second, third]) == holes([]) == []
    assert holes([first, third], reached) == holes([first, third]) == [Range(small_id(5), small_id(10))]
    assert holes([first, second], reached) == [Range(small_id(10), small_id(15))]
    assert holes([second, third], reached) == [Range(small_id(0), small_id(5))]
    assert holes([second, third]) == [Range(bytes(20), small_id(5))]  # it was not the first
    assert holes([], reached) == [reached]


@given(st.lists(st.tuples(st.integers(0, LAST), st.integers(0, LAST))), st.integers(0, LAST), st.integers(0, LAST))
def test_ranges_behave_as_sets_of_ids(given_ranges, start, end):
    ranges = [Range(small_id(min(each)), small_id(max(each))) for each in given_ranges]
    as_one = merged(ranges)
    assert set(ids(as_one)) == set(ids(ranges))
    assert all(one.end < other.start for one, other in pairwise(as_one))
    whole = Range(small_id(min(start, end)), small_id(max(start, end)))
    assert ids(minus(whole, as_one)) == sorted(set(ids([whole])) - set(ids(ranges)))

"""A backup's objects: windows of keys do not depend on earlier backups, and every flipped bit is detected."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.backup import objects
from storage.backup.objects import (
    DamagedObject,
    WindowedRows,
    compress,
    decode_rows,
    decompress,
    encode_row,
    keyed_windows,
    name_of,
)

PREFIX = b"shop:orders:\x00\x00\x00\x01"
SMALL = 600


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(objects, "WINDOW_BYTES", SMALL)


def rows_at(positions, size=20):
    return [(PREFIX + each.to_bytes(10, "big"), each.to_bytes(10, "big") + bytes(size)) for each in sorted(positions)]


def rows_of_all_sizes(at):
    """Return rows; every fifth is larger than a window."""
    return [(key, value + bytes(SMALL * (int.from_bytes(key[-10:], "big") % 5 == 0))) for key, value in rows_at(at)]


def windows_of(rows, *, step=7, floor=0):
    windowed = WindowedRows(PREFIX, 10, 42, floor)
    found = []
    for at in range(0, len(rows), step):
        windowed.feed(rows[at : at + step])
        found += windowed.windows(complete=False)
    return found + list(windowed.windows(complete=True))


positions = st.sets(st.integers(0, 1 << 20) | st.integers(1 << 60, (1 << 60) + 500), max_size=120)


@given(positions, st.integers(1, 50))
def test_windows_have_every_row_once_in_order_and_are_bounded(at, step):
    rows = rows_of_all_sizes(at)
    found = windows_of(rows, step=step)
    assert [row for window in found for row in decode_rows(window.data)] == rows
    assert all(len(window.data) <= SMALL or window.count == 1 for window in found)
    assert [(window.first, window.last) for window in found] == [
        (decode_rows(window.data)[0][0], decode_rows(window.data)[-1][0]) for window in found
    ]


@given(positions, st.integers(1, 50), st.integers(1, 50))
def test_windows_are_the_same_however_the_rows_arrive(at, one, other):
    rows = rows_of_all_sizes(at)
    assert [w.data for w in windows_of(rows, step=one)] == [w.data for w in windows_of(rows, step=other)]


@given(positions)
def test_a_page_continues_where_the_last_one_ended_without_a_difference(at):
    rows = rows_at(at)
    whole = windows_of(rows)
    windowed = WindowedRows(PREFIX, 10, 42)
    windowed.feed(rows)
    paged = []
    while (window := next(windowed.windows(complete=True), None)) is not None:
        paged.append(window)
        floor = windowed.floor
        windowed = WindowedRows(PREFIX, 10, 42, floor)
        windowed.feed([row for row in rows if row[0] >= PREFIX + floor.to_bytes(10, "big")])
    assert [w.data for w in paged] == [w.data for w in whole]


def test_a_new_message_changes_only_the_last_windows():
    at = range(1 << 30, (1 << 30) + 100_000, 100)
    before = {name_of(w.data) for w in windows_of(rows_at(at))}
    after = {name_of(w.data) for w in windows_of(rows_at([*at, at[-1] + 100]))}
    assert len(before) > 50
    assert len(after - before) <= 2


def test_a_removed_message_changes_its_own_window_and_at_most_those_it_joins():
    at = range(1 << 30, (1 << 30) + 100_000, 100)
    before = {name_of(w.data) for w in windows_of(rows_at(at))}
    after = {name_of(w.data) for w in windows_of(rows_at(each for each in at if each != at[500]))}
    assert len(after - before) <= 2


def test_rows_of_metadata_keep_their_objects_where_others_change(monkeypatch):
    monkeypatch.setattr(objects, "WINDOW_BYTES", 200_000)
    rows = [(b"\x00htopic%05d:" % each, b"value %d" % each) for each in range(50_000)]
    before = {name_of(w.data) for w in keyed_windows(rows)}
    rows[5000] = (rows[5000][0], b"another, longer value")
    after = {name_of(w.data) for w in keyed_windows(rows)}
    assert len(before) > 10
    assert len(after - before) <= 2
    assert [row for w in keyed_windows(rows) for row in decode_rows(w.data)] == rows


def test_an_object_that_is_cut_or_longer_is_found():
    data = encode_row((b"key", b"value"))
    name, kept = name_of(data), compress(data)
    for wrong in (kept[:-1], kept + b"\x00", b"", kept[:4], compress(data + b"x")):
        with pytest.raises(DamagedObject):
            decompress(wrong, name)
    with pytest.raises(DamagedObject):
        decode_rows(data[:-1])

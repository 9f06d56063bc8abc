"""Packed rows survive a round trip, except removed ones, and rolled-back ones have reversed signs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.keys import DamagedRow, generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, decode_row, encode_row
from storage.hbase.layout import CELL, PRESENT, Stamp, pack, removing_columns, rolling_column, stamp_of, unpack

PREFIX = generation_prefix(TopicName("ns", "topic"), 1)
POINTERS = (5, 6)
BOUND = 400
FIRST = Stamp(1, 1)

positions = st.integers(0, 1 << 20).map(lambda number: number.to_bytes(10, "big"))
values = st.builds(
    lambda payload, pointer: encode_row(MessageRow(payload, pointer)),
    st.binary(max_size=60),
    st.sampled_from([None, *POINTERS]),
)
tables = st.dictionaries(positions.map(PREFIX.__add__), values, min_size=1, max_size=60)
stamps = st.builds(Stamp, st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))


def packed(table, stamp=FIRST, bound=BOUND):
    """Return HBase's rows for a table's rows, by key."""
    keys = sorted(table)
    return {each.key: {CELL: each.cell} for each in pack(keys, [table[key] for key in keys], stamp, bound)}


def unpacked(store):
    return [row for key in sorted(store) for row in unpack(key, store[key])]


@given(tables, stamps, st.integers(1, 2000))
def test_packed_rows_round_trip_in_cells_below_the_bound(table, stamp, bound):
    store = packed(table, stamp, bound)
    assert unpacked(store) == sorted(table.items())
    for key, columns in store.items():
        assert stamp_of(columns[CELL]) == stamp
        rows = unpack(key, columns)
        assert rows[-1][0] == key
        assert len(columns[CELL]) <= bound or len(rows) == 1


@given(tables, st.data())
def test_any_removals_and_rollbacks_have_the_same_effect_as_on_a_dict(table, data):
    store, model = packed(table), dict(table)
    for _ in range(data.draw(st.integers(0, 4))):
        if data.draw(st.booleans()):
            gone = data.draw(st.sets(st.sampled_from(sorted(table))))
            for key, columns in store.items():
                keys = [row[0] for row in unpack(key, columns)]
                columns.update(dict.fromkeys(removing_columns(columns[CELL], keys, gone), PRESENT))
            model = {key: value for key, value in model.items() if key not in gone}
            continue
        pointer = data.draw(st.sampled_from(POINTERS))
        first, last = sorted(data.draw(st.tuples(st.sampled_from(sorted(table)), st.sampled_from(sorted(table)))))
        for key, columns in store.items():
            inside = [row[0] for row in unpack(key, columns) if first <= row[0] <= last]
            if inside:
                columns[rolling_column(columns[CELL], pointer, inside[0], inside[-1])] = PRESENT
        for key, value in model.items():
            row = decode_row(value)
            if first <= key <= last and row.pointer == pointer:
                model[key] = encode_row(MessageRow(row.payload, -pointer))
    assert unpacked(store) == sorted(model.items())


@given(tables, stamps, stamps)
def test_cells_about_rows_of_another_commit_are_ignored(table, stamp, other):
    store, before = packed(table, stamp), packed(table, other)
    for key, columns in store.items():
        keys = [row[0] for row in unpack(key, columns)]
        columns.update(dict.fromkeys(removing_columns(before[key][CELL], keys, set(keys)), PRESENT))
    assert unpacked(store) == ([] if stamp == other else sorted(table.items()))


@given(st.dictionaries(st.binary(min_size=1, max_size=6), st.binary(max_size=5), max_size=30))
def test_keys_that_end_in_no_position_share_a_row_with_their_neighbours_only(table):
    store = packed(table)
    assert unpacked(store) == sorted(table.items())
    for key, columns in store.items():
        rows = unpack(key, columns)
        assert int.from_bytes(key, "big") - int.from_bytes(rows[0][0], "big") == len(rows) - 1


@given(tables, st.data())
def test_a_cell_that_is_cut_or_longer_is_damaged(table, data):
    key, columns = next(iter(packed(table, bound=1 << 20).items()))
    cell = columns[CELL]
    cut = cell[: data.draw(st.integers(0, len(cell) - 1))]
    for damaged in (cut, cell + b"x", b"\x07" + cell[1:]):
        with pytest.raises(DamagedRow):
            unpack(key, {CELL: damaged})


@given(tables, st.data())
def test_a_cell_whose_rows_do_not_end_with_its_own_key_is_damaged(table, data):
    key, columns = next(iter(packed(table, bound=1 << 20).items()))
    cell = columns[CELL]
    shared = data.draw(st.integers(0, int.from_bytes(cell[17:19], "big") - 1))
    with pytest.raises(DamagedRow):
        unpack(key, {CELL: cell[:17] + shared.to_bytes(2, "big") + cell[19:]})

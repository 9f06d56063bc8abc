"""Upkeep on HBase skips unreadable rows: they stay, and all other void rows are removed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import metadata_key, pointer_key
from plainsong.protocol.names import TopicName
from storage.hbase import upkeep
from storage.hbase.cells import SLOTS, Slots, slot_of
from storage.hbase.layout import Head, Stamp, encode_serial, hashed
from storage.hbase.owners import EPOCHS_COLUMN, EPOCHS_KEY, FENCE, HEAD, Owners, encode_epoch
from storage.hbase.scan import ScannedRow
from storage.hbase.tables import Tables
from storage.hbase.upkeep import MANY_FENCES, Upkeep

TABLES = Tables("t")
METADATA, MESSAGE = TABLES[Table.METADATA], TABLES[Table.MESSAGE]
NAMES = [TopicName("ns", f"t{number}") for number in range(6)]
BAD = NAMES[2]
#: HBase's clock; the rows are as old as possible.
NOW_MS = 10**12
#: The previous owner's last commit.
BEFORE = Stamp(100, 5)


class HBase:
    """Replaces the pool of connections: the calls that upkeep makes, on in-memory rows."""

    def __init__(self):
        self.rows = {table: {} for table in map(TABLES.__getitem__, Table)}
        self.calls = []

    def columns(self, table, key):
        found = self.rows[table].get(key, {})
        return {column: SimpleNamespace(value=value, timestamp=0) for column, value in found.items()}

    async def call(self, method, table, *args):
        await trio.lowlevel.checkpoint()
        self.calls.append(method)
        match method, args:
            case "getRows", (keys, _):
                return [SimpleNamespace(row=key, columns=self.columns(table, key)) for key in keys]
            case "getRow", (key, _):
                return [SimpleNamespace(row=key, columns=self.columns(table, key))]
            case "get", (key, column, _):
                assert (key, column) == (EPOCHS_KEY, EPOCHS_COLUMN)
                return [SimpleNamespace(timestamp=NOW_MS)]
            case "deleteAllRowTs", (key, _, _):
                del self.rows[table][key]
            case "deleteAllTs", (key, column, _, _):
                del self.rows[table][key][column]
        return None

    async def first_rows(self, pool, wanted, limit, *, timeout_s):
        """Replaces a scan."""
        await trio.lowlevel.checkpoint()
        keys = sorted(key for key in self.rows[wanted.table] if wanted.contains(key))
        return [ScannedRow(key, self.rows[wanted.table][key]) for key in keys[:limit]]


@pytest.fixture
def hbase(monkeypatch):
    hbase = HBase()
    monkeypatch.setattr(upkeep, "first_rows", hbase.first_rows)
    return hbase


def upkeep_of(hbase):
    owners = Owners(hbase, TABLES, Slots(hbase, METADATA))
    return Upkeep(hbase, TABLES, owners, timeout_s=1.0, kept_s=0.0)


def head(name):
    return hashed(metadata_key(name))


def fill(hbase, *, fences=0):
    """Write topics, each with a void row and a live one."""
    for name in NAMES:
        now = Head(Stamp(200, 7), BEFORE)
        fenced = {FENCE + encode_epoch(epoch): encode_serial(1) for epoch in range(1, fences + 1)}
        hbase.rows[MESSAGE][head(name)] = {HEAD: now.encode(), **fenced}
        hbase.rows[METADATA][gone(name)] = {SLOTS[0]: slot_of(BEFORE, None)}
        hbase.rows[METADATA][metadata_key(name)] = {SLOTS[0]: slot_of(BEFORE, b"there")}


def gone(name):
    return pointer_key(name, 1, 7)


def left(hbase):
    """Return the names of topics whose void row still exists."""
    return [name for name in NAMES if gone(name) in hbase.rows[METADATA]]


async def steps(upkeep, count):
    return [await upkeep.step() for _ in range(count)]


async def test_deleted_rows_are_removed_and_live_ones_stay(hbase):
    fill(hbase)
    assert await steps(upkeep_of(hbase), 2) == [len(NAMES), 0]
    assert sorted(hbase.rows[METADATA]) == sorted(map(metadata_key, NAMES))


async def test_an_unreadable_row_stays_and_all_other_deleted_ones_are_removed(hbase, caplog):
    fill(hbase)
    hbase.rows[METADATA][gone(BAD)] = {SLOTS[0]: b"?"}
    assert await steps(upkeep_of(hbase), 3) == [len(NAMES) - 1, 0, 0]
    assert left(hbase) == [BAD]
    assert [each.key for each in caplog.records if "skips an unreadable row" in each.message] == [gone(BAD).hex()]


async def test_an_unreadable_head_keeps_the_rows_of_its_topic_and_of_no_other(hbase, caplog):
    fill(hbase)
    hbase.rows[MESSAGE][head(BAD)] = {HEAD: b"?"}
    assert await steps(upkeep_of(hbase), 3) == [len(NAMES) - 1, 0, 0]
    assert left(hbase) == [BAD]
    assert [each.key for each in caplog.records if "skips an unreadable row" in each.message] == [
        metadata_key(BAD).hex()
    ]


async def test_an_unreadable_head_is_found_among_very_many_with_few_calls(hbase):
    names = [TopicName("ns", f"many{number:03}") for number in range(200)]
    for name in names:
        hbase.rows[MESSAGE][head(name)] = {HEAD: Head(Stamp(200, 7), BEFORE).encode()}
        hbase.rows[METADATA][gone(name)] = {SLOTS[0]: slot_of(BEFORE, None)}
    hbase.rows[MESSAGE][head(names[77])] = {HEAD: b"?"}
    assert await upkeep_of(hbase).step() == len(names) - 1
    assert hbase.calls.count("getRows") < 20


async def test_steps_continue_after_a_page_with_unreadable_rows(hbase, monkeypatch):
    monkeypatch.setattr(upkeep, "STEP_ROWS", 3)
    fill(hbase)
    hbase.rows[METADATA][gone(BAD)] = {SLOTS[0]: b"?"}
    assert sum(await steps(upkeep_of(hbase), 5)) == len(NAMES) - 1
    assert left(hbase) == [BAD]


async def test_fences_stay_where_an_unreadable_row_may_need_them_and_are_removed_elsewhere(hbase, caplog):
    fill(hbase, fences=MANY_FENCES + 4)
    hbase.rows[METADATA][gone(BAD)] = {SLOTS[0]: b"?"}
    await steps(upkeep_of(hbase), 2)

    def fences(name):
        return sum(column.startswith(FENCE) for column in hbase.rows[MESSAGE][head(name)])

    assert {name: fences(name) for name in NAMES} == {name: MANY_FENCES + 4 if name == BAD else 0 for name in NAMES}
    assert [each.key for each in caplog.records if "skips an unreadable row" in each.message] == [
        gone(BAD).hex(),
        metadata_key(BAD).hex(),
    ]

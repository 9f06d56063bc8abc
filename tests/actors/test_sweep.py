"""Removing rows in steps; unreadable ones are left in place."""

from __future__ import annotations

from itertools import pairwise

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, generations_range
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import plain_head
from storage import cleaning
from storage.base import read_rows
from storage.cleaning import Sweep, is_message
from storage.memory import MemoryStore

NAME = TopicName("ns", "t")
PREFIX = generation_prefix(NAME, 1)


async def a_store_with(values: list[bytes]) -> MemoryStore:
    store = MemoryStore()
    claim = await store.claim(NAME)
    suffixes = [pack_position(1000 + i, 0) for i in range(len(values))]
    await store.write([Put(Table.MESSAGE, PREFIX, suffixes, values)], claim=claim)
    return store


async def test_a_range_is_removed_in_steps(autojump_clock):
    store = await a_store_with([plain_head(1) + b"x"] * 25)
    start, stop = generations_range(NAME, 1, 1)
    assert await Sweep(store, step_rows=4).remove(Table.MESSAGE, start, stop, is_message) == 25
    assert await read_rows(store, Table.MESSAGE, start, stop, limit=100) == []


async def test_unreadable_rows_are_kept_and_reported(autojump_clock, caplog):
    good = plain_head(2) + b"ok"
    cut, flagged = plain_head(9) + b"short", b"\xff nobody knows"
    store = await a_store_with([good, cut, good, flagged, good])
    start, stop = generations_range(NAME, 1, 1)
    assert await Sweep(store, step_rows=2).remove(Table.MESSAGE, start, stop, is_message) == 3
    assert [value for _, value in await read_rows(store, Table.MESSAGE, start, stop, limit=9)] == [cut, flagged]
    assert "rows that cannot be read were kept" in caplog.text


async def test_a_key_of_another_shape_is_kept(autojump_clock):
    store = await a_store_with([plain_head(0)])
    odd = PREFIX + b"odd"
    await store.write([Put(Table.MESSAGE, odd, [b""], [plain_head(0)])], claim=await store.claim(NAME))
    start, stop = generations_range(NAME, 1, 1)
    assert await Sweep(store, step_rows=10).remove(Table.MESSAGE, start, stop, is_message) == 1
    assert [key for key, _ in await read_rows(store, Table.MESSAGE, start, stop, limit=9)] == [odd]


async def test_space_is_reclaimed_in_pieces_that_cover_the_range(autojump_clock, monkeypatch):
    monkeypatch.setattr(cleaning, "MIN_RECLAIM_ROWS", 5)
    monkeypatch.setattr(cleaning, "RECLAIM_ROWS", 10)
    store = await a_store_with([plain_head(0)] * 34)
    asked: list[tuple[bytes, bytes]] = []

    async def reclaim(table: Table, start: bytes, stop: bytes) -> None:
        asked.append((start, stop))

    monkeypatch.setattr(store, "reclaim", reclaim)
    start, stop = generations_range(NAME, 1, 1)
    await Sweep(store, step_rows=5).remove(Table.MESSAGE, start, stop, is_message)
    assert len(asked) == 4
    assert asked[0][0] == start
    assert asked[-1][1] == stop
    assert all(one[1] == other[0] for one, other in pairwise(asked))

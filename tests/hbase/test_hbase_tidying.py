"""Removed data is gone from HBase itself: rows and bytes are counted there, after major compactions."""

from __future__ import annotations

import time
from functools import partial

import pytest
import trio

from plainsong.protocol.effects import Delete, Put, RollBack, put_one
from plainsong.protocol.keys import CHAIN_POINTER, generation_prefix, metadata_key, payload_prefix, pointer_key
from plainsong.protocol.names import TopicName
from storage.base import StoreError
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from storage.hbase.upkeep import MANY_FENCES
from tests.hbase.conftest import OPTIONS
from tests.hbase.held_calls import Lost, puts_to
from tests.hbase.test_hbase_owners import KEY, MESSAGE, METADATA, NAME, PAYLOAD, POINTER_KEY, rows, values
from tests.hbase_server import ROOT
from tests.patience import PATIENCE_S

TABLES = Tables(OPTIONS.table_prefix)


@pytest.fixture
async def tidy(hbase, store):
    """A store on the same tables that removes deleted rows without delay."""
    async with await HBaseStore.open([hbase.address], OPTIONS, gone_kept_s=-1.0) as opened:
        yield opened


async def cells(store, table):
    """Return the cells of each row in HBase, without heads and the counter of epochs."""
    found = await first_rows(store._pool, ScanRange(TABLES[table], b"", b""), 10_000, timeout_s=20)
    return {row.key: row.columns for row in found if not {b"d:h", b"d:n"} & row.columns.keys()}


def files(hbase, table) -> int:
    """Return the size of a table's store files in bytes."""
    name = TABLES[table].decode()
    return sum(
        path.stat().st_size
        for path in (hbase.directory / "data/data/default" / name).rglob("d/*")
        if path.is_file() and not path.name.startswith(".")
    )


async def compacted(hbase, table, below: int) -> int:
    """Run the operators' compaction, wait until the table's files are below a bound, and return their bytes."""
    ran = await trio.to_thread.run_sync(
        partial(hbase.run_script, ROOT / "etc/hbase/compact.rb", PLAINSONG_TABLE_PREFIX=OPTIONS.table_prefix)
    )
    assert ran.returncode == 0, ran.stderr
    assert f"{TABLES[table].decode()} is being compacted" in ran.stdout
    deadline_s = time.monotonic() + PATIENCE_S
    while (size := files(hbase, table)) >= below:
        assert time.monotonic() < deadline_s, size
        await trio.sleep(0.2)
    return size


async def flushed(hbase, store, table) -> int:
    """Return the bytes of the table's files with everything flushed: disabling a table does that."""
    await store._pool.call("disableTable", TABLES[table])
    await store._pool.call("enableTable", TABLES[table])
    return files(hbase, table)


async def test_removed_rows_take_no_space_in_hbase_after_a_major_compaction(hbase, store):
    claim = await store.claim(NAME)
    prefix = generation_prefix(NAME, 1)
    keys = [(100 + number).to_bytes(8, "big") + b"\x00\x00" for number in range(400)]
    for at in range(0, 400, 10):
        values_ = [number.to_bytes(2, "big") * 5000 for number in range(at, at + 10)]
        await store.write([Put(MESSAGE, prefix, keys[at : at + 10], values_)], claim=claim)
        if at == 200:
            await flushed(hbase, store, MESSAGE)
    before = await flushed(hbase, store, MESSAGE)
    assert len(await cells(store, MESSAGE)) == 40
    await store.discard(MESSAGE, [prefix + key for key in keys[:395]])
    assert len(await cells(store, MESSAGE)) == 1
    after = await compacted(hbase, MESSAGE, before // 4)
    assert [len(value) for value in await values(store)] == [10_000] * 5
    print(f"store files: {before} bytes before, {after} after")


async def test_rows_of_commits_that_never_happened_are_removed_with_those_around_them(store, others):
    claim = await store.claim(NAME)
    await store.write([rows(MESSAGE, b"before", 1)], claim=claim)
    Lost(store, puts_to("heads"), happens=False)
    with pytest.raises(StoreError):
        await store.write([rows(MESSAGE, b"void", 2, 3)], claim=claim)
    claim = await others[0].claim(NAME)
    await others[0].write([rows(MESSAGE, b"behind", 4)], claim=claim)
    assert len(await cells(store, MESSAGE)) == 3
    await others[0].discard(MESSAGE, [rows(MESSAGE, b"", 4).prefix + rows(MESSAGE, b"", n).suffixes[0] for n in (1, 4)])
    assert await cells(store, MESSAGE) == {}


async def test_rolled_back_and_partly_removed_rows_leave_no_cells_when_the_last_of_them_goes(store):
    claim = await store.claim(NAME)
    put = rows(MESSAGE, b"m", *range(10))
    keys = [put.prefix + each for each in put.suffixes]
    await store.write([put, RollBack(keys[0], keys[-1] + b"\x00", 7)], claim=claim)
    await store.discard(MESSAGE, keys[::2])
    assert len(next(iter((await cells(store, MESSAGE)).values()))) > 1
    await store.discard(MESSAGE, keys)
    assert await cells(store, MESSAGE) == {}


async def test_deleted_rows_of_metadata_leave_hbase_and_live_ones_stay(store, tidy):
    claim = await store.claim(NAME)
    keys = [pointer_key(NAME, 1, number) for number in range(1, 31)]
    await store.write([put_one(METADATA, key, b"there") for key in keys], claim=claim)
    await store.write([Delete(METADATA, keys[:20])], claim=claim)
    assert len(await cells(store, METADATA)) == 30
    assert await store.tidy() == 0  # removed less than a day ago
    assert await tidy.tidy() == 20
    assert set(await cells(store, METADATA)) == set(keys[20:])
    await store.write([put_one(METADATA, keys[0], b"again")], claim=claim)
    assert await store.get(METADATA, keys[0]) == await tidy.get(METADATA, keys[0]) == b"again"
    assert await values(tidy, METADATA) == [b"again", *[b"there"] * 10]


async def test_a_row_whose_commit_is_in_progress_is_not_taken_for_a_deleted_one(store, tidy):
    claim = await store.claim(NAME)
    commit = store._owners.commit

    async def late(of):
        assert await tidy.tidy() == 0
        await commit(of)

    store._owners.commit = late
    await store.write([put_one(METADATA, POINTER_KEY, b"there")], claim=claim)
    assert await tidy.get(METADATA, POINTER_KEY) == b"there"


async def test_a_step_reads_a_bounded_number_of_rows_and_the_next_continues_after_them(store, tidy, monkeypatch):
    monkeypatch.setattr("storage.hbase.upkeep.STEP_ROWS", 8)
    claim = await store.claim(NAME)
    keys = [pointer_key(NAME, 1, number) for number in range(1, 31)]
    await store.write([put_one(METADATA, key, b"there") for key in keys], claim=claim)
    await store.write([Delete(METADATA, keys)], claim=claim)
    steps = [await tidy.tidy() for _ in range(5)]
    assert max(steps) <= 8
    assert sum(steps) == 30


async def fences(store) -> int:
    head = await store._owners.read(metadata_key(NAME))
    return len(head.fences)


async def test_fences_of_owners_without_rows_are_removed_and_the_remaining_rows_count(store, tidy):
    claim = await store.claim(NAME)
    await store.write([put_one(METADATA, KEY, b"properties")], claim=claim)
    for number in range(MANY_FENCES + 4):
        await store.write([rows(MESSAGE, b"%d" % number, number)], claim=await store.claim(NAME))
    many = await fences(store)
    assert many > MANY_FENCES
    assert await tidy.tidy() == 0
    first = rows(MESSAGE, b"", *range(MANY_FENCES))
    await store.discard(MESSAGE, [first.prefix + each for each in first.suffixes])
    assert await tidy.tidy() == MANY_FENCES
    assert await fences(tidy) == many - MANY_FENCES
    for each in (tidy, store):
        await each.claim(NAME)
        assert await values(each) == [b"%d" % number for number in range(MANY_FENCES, MANY_FENCES + 4)]
        assert await values(each, METADATA) == [b"properties"]


async def test_fences_stay_while_stored_messages_have_unexamined_owners(store, tidy):
    await store.write([rows(PAYLOAD, b"p", 1), put_one(METADATA, KEY, b"m")], claim=await store.claim(NAME))
    for number in range(MANY_FENCES + 4):
        await store.write([put_one(METADATA, KEY, b"%d" % number)], claim=await store.claim(NAME))
    assert await tidy.tidy() == 0
    assert await values(tidy, PAYLOAD) == [b"p"]


def entries(generation, *positions):
    prefix = payload_prefix(NAME, generation, CHAIN_POINTER)
    return Put(PAYLOAD, prefix, [each.to_bytes(10, "big") for each in positions], [b"entry"] * len(positions))


async def test_fences_of_a_chained_topic_are_removed_except_those_of_owners_of_present_entries(store, tidy):
    claims = [await store.claim(NAME)]
    await store.write([entries(1, 1), put_one(METADATA, KEY, b"m")], claim=claims[0])
    for number in range(MANY_FENCES + 4):
        claims.append(await store.claim(NAME))
        await store.write([put_one(METADATA, KEY, b"%d" % number)], claim=claims[-1])
    await store.write([entries(2, 2)], claim=claims[-1])
    # Two fences remain: the first owner's, and that of the owner before the current one, which is in the head.
    many = await fences(store)
    assert await tidy.tidy() == many - 1
    assert set((await store._owners.read(metadata_key(NAME))).fences) == {claims[0].epoch}
    for each in (tidy, store):
        await each.claim(NAME)
        assert await values(each, PAYLOAD) == [b"entry", b"entry"]


async def test_the_first_entry_of_a_long_chain_says_which_fences_may_be_removed(store, tidy, monkeypatch):
    monkeypatch.setattr("storage.hbase.upkeep.FEW_ENTRIES", 8)
    await store.write([put_one(METADATA, KEY, b"m")], claim=await store.claim(NAME))
    for number in range(1, MANY_FENCES + 5):
        await store.write([entries(1, number)], claim=await store.claim(NAME))
    await store.write([put_one(METADATA, KEY, b"m")], claim=await store.claim(NAME))
    keys = [entries(1, number).prefix + number.to_bytes(10, "big") for number in range(1, 4)]
    many = await fences(store)
    await store.discard(PAYLOAD, keys)
    assert await tidy.tidy() == 3  # the first owner's fence stays: its row of metadata has been replaced only once
    assert await fences(tidy) == many - 3
    for each in (tidy, store):
        await each.claim(NAME)
        assert await values(each, PAYLOAD) == [b"entry"] * (MANY_FENCES + 1)


async def test_fences_of_a_chained_topic_stay_while_there_are_stored_messages(store, tidy):
    stored = Put(PAYLOAD, payload_prefix(NAME, 1, 7), [(1).to_bytes(10, "big")], [b"p"])
    await store.write([entries(1, 1), stored], claim=await store.claim(NAME))
    for number in range(MANY_FENCES + 4):
        await store.write([put_one(METADATA, KEY, b"%d" % number)], claim=await store.claim(NAME))
    assert await tidy.tidy() == 0
    assert await values(tidy, PAYLOAD) == [b"entry", b"p"]


async def test_heads_of_other_topics_are_not_rows_of_a_topic(store, tidy):
    other = TopicName("ns", "topics")
    for number in range(MANY_FENCES + 4):
        for name in (NAME, other):
            key = metadata_key(name)
            await store.write([put_one(METADATA, key, b"%d" % number)], claim=await store.claim(name))
    assert await tidy.tidy() > 0
    assert await tidy.get(METADATA, metadata_key(other)) == await tidy.get(METADATA, KEY) == b"%d" % (MANY_FENCES + 3)

"""Connections to a real gateway: cancelled, broken, frozen; no call gets another's answer, and every wait ends."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import trio

from plainsong.protocol.effects import Put, RollBack, Table, put_one
from plainsong.protocol.keys import generation_prefix, metadata_key, stop_after
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, encode_row
from storage.base import StoreError, read_rows
from storage.hbase.gateway import thrift
from storage.hbase.pool import GatewayRefused, Pool
from storage.hbase.scan import ScannedRow, ScanRange, first_rows, scan
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from tests.freezing import freeze, thaw
from tests.hbase.conftest import OPTIONS, remove
from tests.hbase.test_hbase_owners import NAME, rows, values
from tests.patience import PATIENCE_S

TABLE = Tables(OPTIONS.table_prefix)[Table.MESSAGE]


@pytest.fixture
async def pool(hbase, store):
    each = Pool([hbase.address], size=4, timeout_s=60)
    yield each
    await each.aclose()


async def put(pool: Pool, key: bytes, value: bytes) -> None:
    await pool.call("mutateRow", TABLE, key, [thrift.Mutation(column=b"d:v", value=value)], {})


async def get(pool: Pool, key: bytes) -> bytes:
    return (await pool.call("getRow", TABLE, key, {}))[0].columns[b"d:v"].value


async def test_calls_that_are_cancelled_never_give_their_answer_to_another(pool):
    chance = random.Random(8)
    keys = [b"row%d" % number for number in range(16)]
    for key in keys:
        await put(pool, key, b"value of " + key)
    answered = cancelled = 0

    async def ask(key: bytes, patience_s: float) -> None:
        nonlocal answered, cancelled
        with trio.move_on_after(patience_s) as scope:
            assert await get(pool, key) == b"value of " + key
            answered += 1
        cancelled += scope.cancelled_caught

    async def ask_many() -> None:
        while cancelled < 1000:
            await ask(chance.choice(keys), chance.uniform(0, usual_s))
            await ask(chance.choice(keys), 60)

    begun_s = time.monotonic()
    for key in keys:
        await get(pool, key)
    usual_s = (time.monotonic() - begun_s) / len(keys)
    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(ask_many)
    assert answered >= 1000


async def test_a_deferred_call_is_sent_with_the_next_one_and_its_answer_dropped(pool):
    await put(pool, b"later", b"value")
    async with pool.connection() as gateway:
        opened = [await gateway.call("scannerOpenWithScan", TABLE, thrift.TScan(), {}) for _ in range(2)]
        gateway.call_later("scannerClose", opened[0])
        gateway.call_later("scannerClose", 1 << 30)  # it does not exist; the error is ignored
        found = await gateway.call("getRow", TABLE, b"later", {})
        assert found[0].columns[b"d:v"].value == b"value"
        assert await gateway.call("scannerGetList", opened[1], 1)
    with pytest.raises(GatewayRefused):
        async with pool.connection() as gateway:
            await gateway.call("scannerGetList", opened[0], 1)  # closed


async def test_a_refusal_of_hbase_is_raised_and_the_connection_used_again(pool):
    await put(pool, b"k", b"v")
    connection = pool._idle[-1]
    with pytest.raises(GatewayRefused):
        await pool.call("getRow", b"no_such_table", b"k", {})
    assert await get(pool, b"k") == b"v"
    assert pool._idle[-1] is connection


async def test_no_more_connections_are_open_than_allowed(pool):
    async def ask() -> None:
        async with pool.connection() as gateway:
            await gateway.call("getTableNames")
            nonlocal most
            most = max(most, 4 - pool._slots.value)

    most = 0
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(ask)
    assert most == 4
    assert len(pool._idle) <= 4


async def test_scans_that_make_calls_about_their_rows_leave_a_connection_for_these(hbase, store):
    names = [TopicName("ns", f"t{number}") for number in range(12)]
    claims = [await store.claim(name) for name in names]
    for name, claim in zip(names, claims, strict=True):
        stored = Put(Table.MESSAGE, generation_prefix(name, 1), [b"\x01" * 10], [encode_row(MessageRow(b"m", 7))])
        await store.write([put_one(Table.METADATA, metadata_key(name), b"x"), stored], claim=claim)
    options = replace(OPTIONS, max_connections=2, timeout_s=2 * PATIENCE_S)
    async with await HBaseStore.open([hbase.address], options) as small:
        seen: list[int] = []

        async def look() -> None:  # reads, page by page, heads of topics that it does not own
            found = await read_rows(small, Table.METADATA, b"ns:", b"ns;", limit=100)
            seen.append(len(found))

        async def roll_back(name: TopicName) -> None:  # changes rows during the scan
            claim = await small.claim(name)
            prefix = metadata_key(name)
            await small.write([RollBack(prefix, stop_after(prefix), 7)], claim=claim)
            seen.append(12)

        with trio.fail_after(PATIENCE_S):
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(look)
                    nursery.start_soon(roll_back, name)
        assert seen == [12] * 24


async def test_a_scan_does_not_wait_for_a_connection_forever(pool):
    entered = trio.Event()

    async def keep() -> None:
        async with pool.place_to_scan(60):
            entered.set()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(keep)
        await entered.wait()
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(StoreError, match="no connection to HBase became free in"):
            await first_rows(pool, ScanRange(TABLE, b"", b""), 1, timeout_s=0.2)
        nursery.cancel_scope.cancel()


async def test_a_gateway_that_does_not_answer_ends_in_an_error_when_the_time_is_over(hbase, store):
    async with await HBaseStore.open([hbase.address], OPTIONS) as other:
        claim = await other.claim(NAME)
        other._pool.timeout_s = 1.0
        freeze(hbase.processes["thrift"].pid)
        try:
            begun_s = time.monotonic()
            with pytest.raises(StoreError, match="had no answer in 1 s"):
                await other.write([rows(Table.MESSAGE, b"unknown", 1)], claim=claim)
            assert time.monotonic() - begun_s < PATIENCE_S
        finally:
            thaw(hbase.processes["thrift"].pid)
        other._pool.timeout_s = 60.0
        claim = await other.claim(NAME)
        await other.write([rows(Table.MESSAGE, b"known", 2)], claim=claim)
        assert await values(other) == [b"known"]


async def test_writes_and_reads_continue_when_a_killed_gateway_is_back(hbase, store):
    store._pool.timeout_s = store._reader._timeout_s = 90.0
    cell = [thrift.Mutation(column=b"d:v", value=b"v" * 4000)]
    batches = [thrift.BatchMutation(row=b"scan%04d" % number, mutations=cell) for number in range(3000)]
    for at in range(0, 3000, 500):
        await store._pool.call("mutateRows", TABLE, batches[at : at + 500], {})
    seen: list[bytes] = []
    written: list[bytes] = []
    killed, again = trio.Event(), trio.Event()

    async def write() -> None:
        claim = await store.claim(NAME)
        for number in range(200):
            if number == 100:
                killed.set()
            await store.write([rows(Table.MESSAGE, b"%d" % number, number)], claim=claim)
            written.append(b"%d" % number)

    async def read() -> None:
        async def take(page):
            seen.extend(found.key for found in page)
            await again.wait()
            return True

        wanted = ScanRange(TABLE, b"scan", b"scao")
        await scan(store._pool, wanted, take, first_page=4, timeout_s=90)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        nursery.start_soon(read)
        await killed.wait()
        await trio.to_thread.run_sync(hbase.kill, "thrift")
        hbase.start("thrift")
        again.set()
    assert seen == [b"scan%04d" % number for number in range(3000)]
    for at in range(0, 3000, 500):
        found = [ScannedRow(key, {b"d:v": b""}) for key in seen[at : at + 500]]
        await remove(store._pool, found, TABLE)
    assert await values(store) == written == [b"%d" % number for number in range(200)]

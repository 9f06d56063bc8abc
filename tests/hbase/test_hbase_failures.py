"""Gateways killed, frozen or cut; HBase killed or frozen; clocks set back; tables disabled: work continues."""

from __future__ import annotations

import itertools
import socket
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

import pytest
import trio

from plainsong.protocol.effects import Delete, RollBack, put_one
from plainsong.protocol.keys import pointer_key
from storage.base import SERVICE_NAME, NothingWritten, StoreConflict, StoreError
from storage.hbase.cells import value_in
from storage.hbase.gateway import thrift
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from tests.freezing import freeze, thaw
from tests.hbase.conftest import OPTIONS
from tests.hbase.test_hbase_owners import KEY, MESSAGE, METADATA, NAME, PAYLOAD, POINTER_KEY, rows, values
from tests.hbase_server import PATIENCE_S, free_ports

TABLES = Tables(OPTIONS.table_prefix)
NUMBERS = itertools.count()
QUICK = replace(OPTIONS, timeout_s=9.0)


@pytest.fixture
def two(hbase, store):
    """The addresses of two gateways, the second of which is started here."""
    (port,) = free_ports(1)
    hbase.start("second", "-p", str(port), "-f")
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    yield [hbase.address, ("127.0.0.1", port)]
    if "second" in hbase.processes:
        hbase.kill("second")


@contextmanager
def frozen(hbase, name):
    freeze(hbase.processes[name].pid)
    try:
        yield
    finally:
        thaw(hbase.processes[name].pid)


async def write_each(store, numbers) -> list[bytes]:
    """Commit a row for each number; after a failure, claim the topic again and check for the row."""
    written: list[bytes] = []
    claim = None
    for number in numbers:
        while True:
            try:
                claim = claim or await store.claim(NAME)
                await store.write([rows(MESSAGE, b"%d" % number, number)], claim=claim)
                break
            except StoreError:
                claim = None
                try:
                    claim = await store.claim(NAME)
                    if b"%d" % number in await values(store):
                        break
                except StoreError:
                    claim = None
                    await trio.sleep(0.1)
        written.append(b"%d" % number)
    return written


async def test_commits_continue_while_either_of_two_gateways_is_frozen_killed_or_cut(hbase, two):
    async with await HBaseStore.open(two, QUICK) as store:
        claim = await store.claim(NAME)
        await store.write([rows(MESSAGE, b"0", 0)], claim=claim)
        with frozen(hbase, "second"):
            begun_s = time.monotonic()
            for number in range(1, 30):
                await store.write([rows(MESSAGE, b"%d" % number, number)], claim=claim)
            assert time.monotonic() - begun_s < 60  # thirty times QUICK's time-out would take minutes
        for gateway in store._pool._idle:
            gateway._stream.socket.shutdown(socket.SHUT_RDWR)
        await store.write([rows(MESSAGE, b"30", 30)], claim=claim)
        await trio.to_thread.run_sync(hbase.kill, "second")
        for number in range(31, 60):
            await store.write([rows(MESSAGE, b"%d" % number, number)], claim=claim)
        assert await values(store) == [b"%d" % number for number in range(60)]


async def test_a_failing_gateway_is_reported_once_and_again_when_it_answers(hbase, two, caplog):
    caplog.set_level("INFO")
    # The first gateway may stall for a while, which must not be logged.
    async with await HBaseStore.open(two, OPTIONS) as store:
        await trio.to_thread.run_sync(hbase.kill, "second")
        claim = await store.claim(NAME)
        for number in range(20):
            store._pool._idle, idle = [], store._pool._idle
            for gateway in idle:
                await gateway.aclose()
            await store.write([rows(MESSAGE, b"%d" % number, number)], claim=claim)
        told = [record for record in caplog.records if record.message == "an HBase gateway does not answer"]
        assert [record.gateway for record in told] == [f"127.0.0.1:{two[1][1]}"]
        hbase.start("second", "-p", str(two[1][1]), "-f")
        with trio.fail_after(PATIENCE_S):
            while "an HBase gateway answers again" not in [record.message for record in caplog.records]:
                store._pool._idle, idle = [], store._pool._idle
                for gateway in idle:
                    await gateway.aclose()
                await store.check(claim)
                await trio.sleep(0.2)


async def test_no_acknowledged_commit_is_lost_when_hbase_is_killed_and_started_again(hbase, store):
    begun = trio.Event()

    async def kill() -> None:
        await begun.wait()
        await trio.sleep(0.3)
        await trio.to_thread.run_sync(hbase.kill, "hbase")
        hbase.start("hbase")

    async with await HBaseStore.open([hbase.address], replace(OPTIONS, timeout_s=60.0)) as patient:
        await write_each(patient, range(20))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            begun.set()
            with trio.fail_after(PATIENCE_S):
                written = await write_each(patient, range(20, 300))
        assert await values(patient) == [b"%d" % number for number in range(20)] + written


async def test_writes_to_a_frozen_hbase_wait_fail_in_time_and_leave_nothing_half_done(hbase, store):
    async with await HBaseStore.open([hbase.address], OPTIONS) as hasty:
        claim = await hasty.claim(NAME)
        await hasty.write([rows(MESSAGE, b"before", 1)], claim=claim)
        hasty._pool.timeout_s = 2.0
        with frozen(hbase, "hbase"):
            begun_s = time.monotonic()
            with pytest.raises(NothingWritten, match="had no answer in 2 s"):
                await hasty.write([rows(MESSAGE, b"frozen", 2)], claim=claim)
            assert time.monotonic() - begun_s < PATIENCE_S
    claim = await store.claim(NAME)
    await store.write([rows(MESSAGE, b"after", 3)], claim=claim)
    assert await values(store) == [b"before", b"after"]


async def test_a_table_that_is_disabled_fails_commits_at_once_until_it_is_enabled(store):
    claim = await store.claim(NAME)
    await store._pool.call("disableTable", TABLES[PAYLOAD])
    try:
        with pytest.raises(NothingWritten):
            await store.write([rows(PAYLOAD, b"p", 1), put_one(METADATA, POINTER_KEY, b"w")], claim=claim)
        assert await values(store, METADATA) == []
    finally:
        await store._pool.call("enableTable", TABLES[PAYLOAD])
    claim = await store.claim(NAME)
    await store.write([rows(PAYLOAD, b"p", 1), put_one(METADATA, POINTER_KEY, b"w")], claim=claim)
    assert await values(store, PAYLOAD) == [b"p"]


async def test_a_cell_that_hbase_refuses_fails_its_commit_and_no_other(hbase, store):
    async with await HBaseStore.open([hbase.address], replace(OPTIONS, max_cell_bytes=16 << 20)) as large:
        claim = await large.claim(NAME)
        with pytest.raises(NothingWritten, match="HBase refused"):
            await large.write([rows(MESSAGE, bytes(11 << 20), 1)], claim=claim)
        claim = await large.claim(NAME)
        await large.write([rows(MESSAGE, b"m", 1)], claim=claim)
        assert await values(large) == [b"m"]


@pytest.fixture
async def instances(hbase):
    """Three instances on their own tables, because other tests do not remove rows with a time in the future."""
    options = replace(OPTIONS, table_prefix=f"clocks{next(NUMBERS)}_")
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(await HBaseStore.open([hbase.address], options)) for _ in range(3)]


async def an_hour_ahead(store) -> None:
    """Rewrite all rows as if clocks had been an hour ahead when they were written."""
    for name in store._owners._table, store._owners._epochs._counter:
        for row in await first_rows(store._pool, ScanRange(name, b"", b""), 10_000, timeout_s=20):
            mutations = [thrift.Mutation(column=column, value=value) for column, value in row.columns.items()]
            await store._pool.call("mutateRowTs", name, row.key, mutations, row.time_ms + 3_600_000, {})


async def test_a_store_whose_clocks_are_set_back_by_an_hour_continues(instances):
    store, *others = instances
    claim = await store.claim(NAME)
    ten = rows(MESSAGE, b"m", *range(10))
    keys = [ten.prefix + each for each in ten.suffixes]
    spare = pointer_key(NAME, 1, 99)
    first = [ten, put_one(METADATA, KEY, b"0"), put_one(METADATA, POINTER_KEY, b"0"), put_one(METADATA, spare, b"0")]
    await store.write(first, claim=claim)
    await store.write([put_one(METADATA, KEY, b"1"), Delete(METADATA, [spare])], claim=claim)
    await an_hour_ahead(store)
    await store.write([rows(MESSAGE, b"n", 10), put_one(METADATA, KEY, b"2")], claim=claim)
    await store.write([put_one(METADATA, KEY, b"3"), Delete(METADATA, [POINTER_KEY])], claim=claim)
    await store.write([put_one(METADATA, KEY, b"4"), put_one(METADATA, spare, b"again")], claim=claim)
    await store.write([RollBack(keys[2], keys[3], 7), Delete(MESSAGE, keys[:2])], claim=claim)
    for each in (store, others[0]):
        assert len(await values(each)) == 9
        assert [await each.get(METADATA, key) for key in (KEY, POINTER_KEY, spare)] == [b"4", None, b"again"]
    later = await others[0].claim(NAME)
    assert later.epoch > claim.epoch
    await others[0].write([rows(MESSAGE, b"o", 11), put_one(METADATA, KEY, b"5")], claim=later)
    await others[0].discard(MESSAGE, keys)
    for each in instances:
        each._owners.forget(b"ns:topic:")
        assert await values(each) == [b"n", b"o"]
        assert await each.get(METADATA, KEY) == b"5"


async def test_a_compare_and_set_is_a_conflict_even_if_the_cell_has_the_value_already(instances):
    store = instances[0]
    claim = await store.claim(SERVICE_NAME)
    cells = store._commit_writer._cells
    await cells.put_expected(b"\0service", None, b"1", claim.epoch)
    with pytest.raises(StoreConflict):
        await cells.put_expected(b"\0service", None, b"1", claim.epoch)
    await cells.put_expected(b"\0service", b"1", b"1", claim.epoch)
    assert value_in(await cells.get(b"\0service")) == b"1"


async def test_a_row_of_a_commit_that_never_happened_is_replaced_even_if_clocks_are_set_back(instances):
    store, *others = instances
    claim = await store.claim(NAME)
    commit = store._owners.commit

    async def lost(_):
        store._owners.commit = commit
        raise StoreError("no answer")

    store._owners.commit = lost
    with pytest.raises((StoreError, StoreConflict)):
        await store.write([rows(MESSAGE, b"void", 1), put_one(METADATA, KEY, b"void")], claim=claim)
    await an_hour_ahead(store)
    claim = await others[0].claim(NAME)
    await others[0].write([rows(MESSAGE, b"m", 1), put_one(METADATA, KEY, b"1")], claim=claim)
    assert await values(others[1]) == [b"m"]
    assert await others[1].get(METADATA, KEY) == b"1"

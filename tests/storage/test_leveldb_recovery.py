"""LevelDB after a failure: it is reopened from disk with no thread left inside, and calls wait in the right order."""

from __future__ import annotations

import threading
from collections import Counter
from random import Random

import pytest
import trio
from disks import fill, small_disk, write_commits
from spy import Spy
from trio.testing import wait_all_tasks_blocked

from plainsong.protocol.names import TopicName
from storage.base import StoreError
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb import store as store_module
from tests.patience import PATIENCE_S
from tests.storage.contract import LAST, MESSAGE, NAME, everything, numbered
from tests.storage.tiny_volumes import settled


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as opened:
        yield opened


# --- failing and opening again --------------------------------------------------------------------


async def test_a_full_disk_fails_writes_and_once_freed_a_claim_brings_all_acknowledged_back(tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        async with await LevelDBStore.open(
            disk / "data", LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 20))
        ) as store:
            await write_commits(store, 10, rows=100)
            ballast = fill(disk)
            with pytest.raises(StoreError, match="No space left"):
                await write_commits(store, 1, rows=2000, value=bytes(range(256)) * 4, first=50)
            ballast.unlink()
            with pytest.raises(StoreError, match="a write failed before"):
                await store.write([numbered(1)], claim=None)
            await write_commits(store, 5, rows=100, first=10)
        async with await LevelDBStore.open(disk / "data") as store:
            rows = Counter(int.from_bytes(key[:4], "big") for key, _ in await everything(store))
    assert [rows[number] for number in range(15)] == [100] * 15
    assert rows[50] in (0, 2000)


async def test_while_the_disk_stays_full_a_claim_says_so_and_succeeds_when_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        async with await LevelDBStore.open(
            disk / "data", LevelDBOptions(StorageConfig(write_buffer_bytes=4 << 20))
        ) as store:
            await write_commits(store, 10, rows=1000)
            ballast = fill(disk)
            claim = await store.claim(NAME)
            with pytest.raises(StoreError):
                await store.write([numbered(1, b"x", bytes(1 << 20))], claim=claim)
            with pytest.raises(StoreError, match="cannot be reopened"):
                await store.claim(NAME)
            with pytest.raises(StoreError):
                await store.get(MESSAGE, b"k")
            assert store.statistics().free_bytes == 0
            ballast.unlink()
            await store.claim(NAME)
            assert sum(1 for key, _ in await everything(store) if key[:1] != b"x") == 10_000


async def test_a_claim_waits_for_active_readers_which_then_have_to_retry(store):
    claim = await store.claim(NAME)
    await store.write([numbered(1000)], claim=claim)
    inside, release = threading.Event(), threading.Event()
    old = store._db
    claimed = False

    def feed(chunk: list[object]) -> bool:
        inside.set()
        release.wait()
        return True

    async def read() -> None:
        with pytest.raises(StoreError, match="reopened"):
            await store.scan(MESSAGE, b"", LAST, feed, first_chunk=1)

    async def claim_again() -> None:
        nonlocal claimed
        await store.claim(NAME)
        claimed = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.to_thread.run_sync(inside.wait)
        Spy(store).fail = OSError("the disk says no")
        with pytest.raises(StoreError):
            await store.write([numbered(1)], claim=claim)
        nursery.start_soon(claim_again)
        await trio.testing.wait_all_tasks_blocked()
        assert not claimed
        # A read that begins now waits until the database is reopened, and then succeeds.
        nursery.start_soon(store.get, MESSAGE, b"k")
        await trio.testing.wait_all_tasks_blocked()
        release.set()
    assert claimed
    assert store._db is not old
    assert len(await everything(store)) == 1000


async def test_a_claim_without_a_failure_opens_nothing_again(store):
    before = store._db
    await store.claim(NAME)
    await store.claim(TopicName("ns", "other"))
    assert store._db is before


# --- threads --------------------------------------------------------------------------------------


async def test_a_cancelled_scan_ends_at_its_next_list(store):
    await store.write([numbered(3000)], claim=await store.claim(NAME))
    inside, release = threading.Event(), threading.Event()
    fed: list[int] = []

    def feed(chunk: list[object]) -> bool:
        fed.append(len(chunk))
        inside.set()
        release.wait()
        return True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.scan(MESSAGE, b"", LAST, feed, first_chunk=10))
        await trio.to_thread.run_sync(inside.wait)
        nursery.cancel_scope.cancel()
        release.set()
    assert fed == [10]


async def test_closing_waits_for_the_write_in_progress(store, tmp_path):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([numbered(5)], claim=claim))
        await spy.entered()
        nursery.start_soon(store.aclose)
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    async with await LevelDBStore.open(tmp_path / "data") as again:
        assert len(await everything(again)) == 5


async def test_readers_that_fill_their_threads_hold_up_no_writer(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", LevelDBOptions(max_readers=2)) as store:
        claim = await store.claim(NAME)
        await store.write([numbered(10)], claim=claim)
        release = threading.Event()
        entered = threading.Semaphore(0)

        def feed(chunk: list[object]) -> bool:
            entered.release()
            release.wait()
            return False

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(store.scan, MESSAGE, b"", LAST, feed)
            await trio.to_thread.run_sync(entered.acquire)
            await wait_all_tasks_blocked()
            readers = store._readers.statistics()
            assert (readers.borrowed_tokens, readers.tasks_waiting) == (2, 4)
            try:
                with trio.fail_after(PATIENCE_S):
                    await store.write([numbered(10, b"z")], claim=claim)
                    await store.discard(MESSAGE, [b"z\x00\x00\x00\x00"])
                    await store.tidy()
                    await store.reclaim(MESSAGE, b"", LAST)
            finally:
                release.set()


@pytest.mark.parametrize("is_sealed", [False, True], ids=["newest volume", "sealed volume"])
async def test_statistics_have_the_stored_bytes_and_shrink_when_space_is_reclaimed(tmp_path, monkeypatch, is_sealed):
    monkeypatch.setattr(store_module, "_MEASURE_EVERY_S", 0.0)
    async with await LevelDBStore.open(
        tmp_path / "data", LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16))
    ) as store:
        await write_commits(store, 50, rows=100, value=Random(1).randbytes(1000))
        if is_sealed:
            await store.begin_files()
            await settled(store)
        await store.reclaim(MESSAGE, b"", LAST)
        full = store.statistics()
        assert full.bytes > 100_000
        assert full.free_bytes > 0
        await store.discard(MESSAGE, [key for key, _ in await everything(store)])
        await store.reclaim(MESSAGE, b"", LAST)
        await settled(store)
        assert store.statistics().bytes < full.bytes / 2

"""What LevelDB promises beyond the contract: whole commits, synced, through kills, full disks and failures."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from random import Random

import pytest
import trio
from contract import LAST, MESSAGE, METADATA, NAME, PAYLOAD, StoreContract, everything, numbered
from disks import fill, small_disk, write_commits

from protocol.effects import Delete, Expect, Put, put_one
from protocol.names import TopicName
from storage.base import StoreConflict, StoreError
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.store import DISCARD_ROWS

ROOT = Path(__file__).parents[2]


class Spy:
    """Stands before a plyvel database and notes its batches; can let the next one fail."""

    def __init__(self, store: LevelDBStore) -> None:
        self.batches: list[dict[str, bool]] = []
        self.fail: Exception | None = None
        self.hold: threading.Event | None = None
        self._real = store._db._db
        store._db._db = self

    def write_batch(self, **options: bool) -> object:
        self.batches.append(options)
        if self.hold is not None:
            self.hold.wait()
        if self.fail is not None:
            raise self.fail
        return self._real.write_batch(**options)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as opened:
        yield opened


class TestLevelDBKeepsTheContract(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path):
        async with await LevelDBStore.open(tmp_path / "data") as opened:
            yield opened

    def break_next_write(self, store):
        Spy(store).fail = OSError("the disk says no")


# --- whole and synced -----------------------------------------------------------------------------


async def test_every_commit_is_one_synced_batch_over_all_tables(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    await store.write([put_one(table, b"k", b"v") for table in (METADATA, MESSAGE, PAYLOAD)], claim=claim)
    await store.write([numbered(1000), Delete(MESSAGE, [b"k"])], claim=claim)
    assert spy.batches == [{"transaction": True, "sync": True}] * 2


async def test_a_discard_alone_does_not_wait_for_the_disk_and_goes_in_bounded_steps(store):
    spy = Spy(store)
    await store.discard(MESSAGE, [b"%05d" % i for i in range(2 * DISCARD_ROWS + 1)])
    assert spy.batches == [{"transaction": True, "sync": False}] * 3


async def test_a_discard_that_rides_with_a_commit_is_synced_with_it(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([numbered(1, b"a")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(store.discard, MESSAGE, [b"a\x00\x00\x00\x00"])
        nursery.start_soon(lambda: store.write([numbered(1, b"b")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert spy.batches == [{"transaction": True, "sync": True}] * 2
    assert [key[:1] for key, _ in await everything(store)] == [b"b"]


async def test_a_commit_that_cannot_be_encoded_leaves_nothing_behind(store, tmp_path):
    claim = await store.claim(NAME)
    with pytest.raises(StoreError):
        await store.write([put_one(METADATA, b"k", b"v"), put_one(MESSAGE, b"k", "text")], claim=claim)
    with pytest.raises(StoreError):
        await store.write([Put(MESSAGE, b"", [b"a", b"b"], [b"v"])], claim=await store.claim(NAME))
    await store.claim(NAME)
    assert await everything(store) == []
    assert await everything(store, METADATA) == []


async def test_acknowledged_rows_survive_closing_and_opening(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await write_commits(store, 20)
        before = await everything(store)
    async with await LevelDBStore.open(tmp_path / "data") as store:
        assert await everything(store) == before


CHILD = """
import sys, trio
from pathlib import Path
from protocol.effects import Put, Table
from protocol.names import TopicName
from storage.leveldb import LevelDBStore, LevelDBOptions

async def main():
    store = await LevelDBStore.open(Path(sys.argv[1]), LevelDBOptions(write_buffer_bytes=1 << 16))
    async def publish(task):
        claim = await store.claim(TopicName("ns", f"t{task}"))
        number = 0
        while True:
            prefix = b"%02d:%06d:" % (task, number)
            await store.write([Put(t, prefix, [b"%02d" % i for i in range(20)], [b"v" * 50] * 20) for t in Table], claim=claim)
            sys.stdout.write(prefix.decode() + "\\n")
            sys.stdout.flush()
            number += 1
    async with trio.open_nursery() as nursery:
        for task in range(4):
            nursery.start_soon(publish, task)

trio.run(main)
"""


def kill_a_publisher(directory: Path, acknowledgements: int) -> list[bytes]:
    """Start ``CHILD``, kill it after so many lines, and give all that it acknowledged."""
    command = [sys.executable, "-c", CHILD, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        acknowledged = [child.stdout.readline().strip() for _ in range(acknowledgements)]
        child.kill()
        # What was printed before the kill took hold counts, except a line that was cut.
        return acknowledged + [line.strip() for line in child.stdout if line.endswith(b"\n")]


@pytest.mark.parametrize("acknowledgements", [1, 60, 400])
async def test_acknowledged_commits_survive_sigkill_and_no_commit_is_half(tmp_path, acknowledgements):
    acknowledged = kill_a_publisher(tmp_path / "data", acknowledgements)
    async with await LevelDBStore.open(tmp_path / "data") as store:
        for table in (METADATA, MESSAGE, PAYLOAD):
            rows = Counter(key[:10] for key, _ in await everything(store, table))
            assert set(acknowledged) <= set(rows)
            assert set(rows.values()) == {20}


# --- joining --------------------------------------------------------------------------------------


async def test_commits_that_wait_are_joined_into_one_batch_in_their_order(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(lambda n=number: store.write([put_one(METADATA, b"%d" % n, b"v")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert len(spy.batches) == 2
    assert len(await everything(store, METADATA)) == 30


async def test_a_group_is_bounded_in_bytes(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        for number in range(7):
            nursery.start_soon(lambda n=number: store.write([put_one(PAYLOAD, b"%d" % n, bytes(2 << 20))], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert len(spy.batches) == 7


async def test_a_commit_with_expectations_sees_those_before_it_and_goes_alone(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    refused: list[int] = []

    async def expecting(number: int) -> None:
        try:
            await store.write(
                [put_one(METADATA, b"k", b"%d" % number)], claim=claim, expect=[Expect(METADATA, b"k", b"0")]
            )
        except StoreConflict:
            refused.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([put_one(METADATA, b"k", b"0")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        for number in (1, 2):
            nursery.start_soon(expecting, number)
        nursery.start_soon(lambda: store.write([put_one(METADATA, b"other", b"")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert len(refused) == 1
    assert await store.get(METADATA, b"other") == b""


async def test_when_a_group_fails_all_of_it_learns_so_each_with_an_exception_of_its_own(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    errors: list[StoreError] = []

    async def write(number: int) -> None:
        try:
            await store.write([put_one(METADATA, b"%d" % number, b"")], claim=claim)
        except StoreError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(write, number)
        await trio.testing.wait_all_tasks_blocked()
        spy.fail = OSError(28, "No space left on device")
        spy.hold.set()
    assert len(errors) == len({id(error) for error in errors}) == 10
    assert any("No space left" in error.detail and "free some space" in error.hint for error in errors)
    assert len(spy.batches) == 1


# --- failing and opening again --------------------------------------------------------------------


async def test_a_full_disk_fails_writes_and_once_freed_a_claim_brings_all_acknowledged_back(tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        async with await LevelDBStore.open(disk / "data", LevelDBOptions(write_buffer_bytes=1 << 20)) as store:
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
        async with await LevelDBStore.open(disk / "data", LevelDBOptions(write_buffer_bytes=4 << 20)) as store:
            await write_commits(store, 10, rows=1000)
            ballast = fill(disk)
            claim = await store.claim(NAME)
            with pytest.raises(StoreError):
                await store.write([numbered(1, b"x", bytes(1 << 20))], claim=claim)
            with pytest.raises(StoreError, match="cannot be opened again"):
                await store.claim(NAME)
            with pytest.raises(StoreError):
                await store.get(MESSAGE, b"k")
            assert store.statistics().free_bytes == 0
            ballast.unlink()
            await store.claim(NAME)
            assert sum(1 for key, _ in await everything(store) if key[:1] != b"x") == 10_000


async def test_a_claim_waits_for_the_readers_inside_who_are_told_to_ask_again(store):
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
        with pytest.raises(StoreError, match="opened again"):
            await store.scan(MESSAGE, b"", LAST, feed, first_chunk=1)

    async def come_back() -> None:
        nonlocal claimed
        await store.claim(NAME)
        claimed = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.to_thread.run_sync(inside.wait)
        Spy(store).fail = OSError("the disk says no")
        with pytest.raises(StoreError):
            await store.write([numbered(1)], claim=claim)
        nursery.start_soon(come_back)
        await trio.testing.wait_all_tasks_blocked()
        assert not claimed
        # A read that comes now waits for the database to be back, and is served.
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


async def test_closing_waits_for_the_write_that_is_under_way(store, tmp_path):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([numbered(5)], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
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
        most, inside, lock, entered = 0, 0, threading.Lock(), threading.Semaphore(0)

        def feed(chunk: list[object]) -> bool:
            nonlocal most, inside
            with lock:
                inside += 1
                most = max(most, inside)
            entered.release()
            release.wait()
            with lock:
                inside -= 1
            return False

        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(store.scan, MESSAGE, b"", LAST, feed)
            for _ in range(2):
                await trio.to_thread.run_sync(entered.acquire)
            await store.write([numbered(10, b"z")], claim=claim)
            await store.reclaim(MESSAGE, b"", LAST)
            release.set()
    assert most == 2


async def test_statistics_say_what_is_stored_and_shrink_when_space_is_reclaimed(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", LevelDBOptions(write_buffer_bytes=1 << 16)) as store:
        await write_commits(store, 50, rows=100, value=Random(1).randbytes(1000))
        await store.reclaim(MESSAGE, b"", LAST)
        full = store.statistics()
        assert full.bytes > 100_000
        assert full.free_bytes > 0
        await store.discard(MESSAGE, [key for key, _ in await everything(store)])
        await store.reclaim(MESSAGE, b"", LAST)
        assert store.statistics().bytes < full.bytes / 2

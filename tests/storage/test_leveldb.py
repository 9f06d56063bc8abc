"""LevelDB's promises beyond the contract: complete and synced commits, despite kills, full disks and failures."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel
from disks import write_commits
from spy import Spy

from plainsong.protocol.effects import Delete, Expect, Put, put_one
from storage.base import Claim, StoreConflict, StoreError
from storage.leveldb import LevelDBStore
from storage.leveldb.operations import PendingWrite
from storage.leveldb.options import LevelDBOptions
from storage.leveldb.store import DISCARD_ROWS
from storage.leveldb.tables import LevelDBTables, Turn
from tests.patience import PATIENCE_S
from tests.storage.contract import MESSAGE, METADATA, NAME, PAYLOAD, StoreContract, everything, numbered
from tests.storage.old_logs import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.base import Row

ROOT = Path(__file__).parents[2]
CLAIM = Claim(NAME, 0)


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


# --- complete and synced --------------------------------------------------------------------------


async def test_a_checkpoint_of_the_metadata_is_requested_once_until_it_is_done(store, monkeypatch):
    keeper, requests = store._db.keeper, []
    await store.write([put_one(METADATA, b"key", b"1")], claim=CLAIM)
    with monkeypatch.context() as patched:
        patched.setattr(keeper.thread, "put", requests.append)
        keeper.checkpoint_soon()
        keeper.checkpoint_soon()
        assert len(requests) == 1
    await store.reclaim(METADATA, b"", b"\xff")  # this writes a checkpoint before the requested one
    with monkeypatch.context() as patched:
        patched.setattr(keeper.thread, "put", requests.append)
        keeper.checkpoint_soon()
        assert len(requests) == 2


async def test_every_commit_is_one_synced_batch_over_all_tables(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    await store.write([put_one(table, b"k", b"v") for table in (METADATA, MESSAGE, PAYLOAD)], claim=claim)
    await store.write([numbered(1000), Delete(MESSAGE, [b"k"])], claim=claim)
    assert spy.batches == [{"transaction": True, "sync": True}] * 2


async def test_a_discard_goes_in_bounded_steps_each_synced_since_only_the_last_batch_of_a_log_may_be_torn(store):
    keys = [b"%05d" % i for i in range(2 * DISCARD_ROWS + 1)]
    await store.write([Put(MESSAGE, b"", keys, [b"v"] * len(keys))], claim=await store.claim(NAME))
    spy = Spy(store)
    await store.discard(MESSAGE, keys)
    assert spy.batches == [{"transaction": True, "sync": True}] * 3


async def test_a_discard_that_joins_a_commit_is_synced_with_it(store):
    spy = Spy(store)
    claim = await store.claim(NAME)
    spy.hold = threading.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: store.write([numbered(1, b"a")], claim=claim))
        await spy.entered()
        nursery.start_soon(store.discard, MESSAGE, [b"a\x00\x00\x00\x00"])
        nursery.start_soon(lambda: store.write([numbered(1, b"b")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert spy.batches == [{"transaction": True, "sync": True}] * 2
    assert [key[:1] for key, _ in await everything(store)] == [b"b"]


async def test_a_commit_that_cannot_be_encoded_leaves_nothing(store, tmp_path):
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
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.names import TopicName
from storage.config import StorageConfig
from storage.leveldb import LevelDBStore, LevelDBOptions

async def main():
    store = await LevelDBStore.open(Path(sys.argv[1]), LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16)))
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
    """Start ``CHILD``, kill it after a number of lines, and return everything that it acknowledged."""
    command = [sys.executable, "-c", CHILD, str(directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        acknowledged = [child.stdout.readline().strip() for _ in range(acknowledgements)]
        child.kill()
        # Lines that were printed before the kill took effect count, except a truncated one.
        return acknowledged + [line.strip() for line in child.stdout if line.endswith(b"\n")]


@pytest.mark.parametrize("acknowledgements", [1, 60, 400])
async def test_acknowledged_commits_survive_sigkill_and_no_commit_is_partial(tmp_path, acknowledgements):
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
    # The size of the first batch depends on when its thread started.
    assert len(spy.batches) <= 2
    assert len(await everything(store, METADATA)) == 30


async def test_commits_that_begin_commits_do_not_starve_the_event_loop(store):
    left = 200
    turns = 0

    def written(error):
        nonlocal left
        assert error is None
        left -= 1
        if left:
            store.begin([put_one(METADATA, b"%d" % left, b"")], written, claim=CLAIM)
            time.sleep(0.002)  # lets the new commit end before this callback returns

    store.begin([put_one(METADATA, b"first", b"")], written, claim=CLAIM)
    while left:
        await trio.lowlevel.checkpoint()
        turns += 1
    assert turns >= 100


def _until_written(store, groups=1):
    """Wait until this many groups are written, blocking the event loop's thread, so that no task runs before that."""
    end_s = time.monotonic() + PATIENCE_S
    while len(store._group_commit._written) < groups:
        assert time.monotonic() < end_s


async def test_a_commit_is_completed_before_any_task_that_wakes_with_it_runs(store):
    for _ in range(20):  # trio runs the tasks that are ready in any order
        ours, theirs = socket.socketpair()
        order = []

        async def wait(sock=ours, order=order):
            await trio.lowlevel.wait_readable(sock)
            order.append("a task")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            theirs.send(b"x")
            store.begin([put_one(METADATA, b"k", b"")], lambda _, order=order: order.append("the commit"), claim=CLAIM)
            _until_written(store)
        ours.close()
        theirs.close()
        assert order == ["the commit", "a task"]


async def test_an_event_loop_that_is_awake_is_not_woken_for_each_group(store, monkeypatch):
    group_commit, woken = store._group_commit, []
    wake = group_commit._wake
    monkeypatch.setattr(group_commit, "_wake", lambda: (woken.append(1), wake()))
    completed = []
    for number in range(20):
        store.begin([put_one(METADATA, b"%d" % number, b"")], completed.append, claim=CLAIM)
        _until_written(store, number + 1)
    with trio.fail_after(PATIENCE_S):
        while len(completed) < 20:
            await trio.lowlevel.checkpoint()
    assert completed == [None] * 20
    assert len(woken) <= 1


def test_a_bug_in_the_callback_of_a_commit_ends_the_event_loop(tmp_path):
    async def main():
        async with await LevelDBStore.open(tmp_path / "data") as store:
            store.begin([put_one(METADATA, b"k", b"")], lambda _: 1 / 0, claim=CLAIM)
            _until_written(store)
            await trio.sleep_forever()

    with pytest.raises(trio.TrioInternalError):
        trio.run(main)


async def test_a_commit_without_a_size_fails_alone_and_others_are_written(store):
    claim = await store.claim(NAME)
    with pytest.raises(TypeError):
        await store.write([Put(METADATA, b"", [b"k"], [5])], claim=claim)
    await store.write([put_one(METADATA, b"other", b"")], claim=claim)
    assert await store.get(METADATA, b"other") == b""


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


async def test_a_commit_with_expectations_sees_those_before_it_and_is_written_alone(store):
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
        await spy.entered()
        for number in (1, 2):
            nursery.start_soon(expecting, number)
        nursery.start_soon(lambda: store.write([put_one(METADATA, b"other", b"")], claim=claim))
        await trio.testing.wait_all_tasks_blocked()
        spy.hold.set()
    assert len(refused) == 1
    assert await store.get(METADATA, b"other") == b""


async def test_when_a_group_fails_each_of_its_commits_gets_its_own_exception(store):
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


def test_threads_get_their_turn_in_the_order_in_which_they_asked_for_it() -> None:
    turn, order = Turn(), []

    def take(name: str) -> None:
        with turn:
            order.append(name)

    with turn:
        waiting = []
        for name in ("first", "second"):
            thread = threading.Thread(target=take, args=(name,))
            thread.start()
            waiting.append(thread)
            until(lambda: len(turn._waiting) == len(waiting))
    # The thread that had the turn asks for it again while the others still sleep, and gets it after them.
    take("the one before")
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert order == ["first", "second", "the one before"]


def test_after_a_turn_that_ends_with_an_error_the_next_thread_has_it() -> None:
    turn = Turn()
    with pytest.raises(ValueError, match="it failed"), turn:
        raise ValueError("it failed")
    with turn:
        pass


class Clock:
    """A clock that advances at each reading."""

    def __init__(self) -> None:
        self.now_s, self.naps = 0.0, 0

    def perf_counter(self) -> float:
        self.now_s += 0.0001
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.naps += 1
        self.now_s += seconds


@pytest.mark.parametrize(("runs", "least", "most"), [(0, 0, 0), (3, 3, 3), (10**9, 10, 100)])
def test_a_scan_gives_way_to_a_busy_event_loop_and_continues_if_it_never_sleeps(
    tmp_path, monkeypatch, runs, least, most
) -> None:
    options, clock, asked = LevelDBOptions(), Clock(), iter(range(runs))
    LevelDBTables.create(tmp_path, options)
    with closing(LevelDBTables(tmp_path, options)) as tables:
        names = [b"%d" % (1000 + number) for number in range(500)]
        tables.committer.write([PendingWrite([Put(METADATA, b"topic", names, [b"x"] * 500)])])
        monkeypatch.setattr("storage.leveldb.tables.time", clock)
        monkeypatch.setattr("storage.leveldb.tables.nap", clock.nap)
        found: list[bytes] = []

        def feed(rows: Sequence[Row]) -> bool:
            found.extend(key for key, _ in rows)
            return True

        def loop_runs() -> bool:
            return next(asked, None) is not None

        tables.scan(METADATA, b"topic", b"topid", feed, first_chunk=1, loop_runs=loop_runs)
    assert found == [b"topic" + name for name in names]
    assert least <= clock.naps <= most

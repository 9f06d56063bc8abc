"""Small commits written by the event loop itself: when it does so, when the thread does, and what failures mean."""

from __future__ import annotations

import errno
import os
import threading
from itertools import count

import pytest
import trio
from spy import Spy

from plainsong.protocol.effects import Delete, Expect, Put, RollBack, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from storage.base import Claim, NothingWritten, StoreError
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore, group_commit
from storage.leveldb.inline_policy import MAX_INLINE_BYTES, QUICK_CALLS, SLOW_FACTORS, InlinePolicy
from storage.leveldb.operations import PendingWrite
from tests.patience import PATIENCE_S
from tests.storage.contract import MESSAGE, METADATA, NAME, everything
from tests.storage.tiny_volumes import PREFIX, key, message, settled

MAX_S = StorageConfig().inline_commit_s
CLAIM = Claim(NAME, 0)


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Replace the clock that measures writes: it advances only when the test moves it, even on a busy machine."""

    class Clock:
        now_s = 1000.0

        def __call__(self):
            return self.now_s

    made = Clock()
    monkeypatch.setattr(group_commit, "perf_counter", made)
    return made


def gathered(store, *commits, completed=None):
    """Begin commits as one turn of the event loop does; return the outcomes of those completed at its end."""
    completed = [] if completed is None else completed
    store.gather_writes()
    for commit in commits:
        store.begin(commit, completed.append, claim=CLAIM)
    store.write_gathered()
    return completed


async def until_completed(completed, count):
    with trio.fail_after(PATIENCE_S):
        while len(completed) < count:
            await trio.lowlevel.checkpoint()


async def test_the_small_commits_of_a_turn_are_one_synced_batch_that_is_durable_when_the_turn_ends(store):
    spy = Spy(store)
    completed = gathered(store, [message(1)], [message(2), put_one(METADATA, b"k", b"v")], [message(3)])
    assert completed == [None] * 3
    assert spy.batches == [{"transaction": True, "sync": True}]
    assert list(dict(await everything(store, MESSAGE))) == [key(number) for number in (1, 2, 3)]
    assert await store.get(METADATA, b"k") == b"v"


async def test_commits_outside_a_turn_are_written_by_the_thread(store):
    completed = []
    store.begin([message(1)], completed.append, claim=CLAIM)
    assert completed == []
    await until_completed(completed, 1)
    assert completed == [None]


@pytest.mark.parametrize(
    "commit",
    [
        [message(1, bytes(MAX_INLINE_BYTES))],
        [message(1), RollBack(key(1), key(2), 7)],
        [message(1), Delete(MESSAGE, [key(9)])],
    ],
    ids=["large", "rollback", "removal"],
)
async def test_commits_that_may_take_longer_than_a_sync_go_to_the_thread_with_those_gathered_before(store, commit):
    completed = gathered(store, [message(5)], commit, [message(6)])
    assert completed == []
    await until_completed(completed, 3)
    assert completed == [None] * 3
    assert set(dict(await everything(store, MESSAGE))) == {key(number) for number in (1, 5, 6)}


async def test_gathered_commits_are_no_larger_than_one_may_be(store):
    spy = Spy(store)
    part = bytes(MAX_INLINE_BYTES // 4)
    completed = gathered(store, *([message(number, part)] for number in range(5)))
    assert completed == []
    await until_completed(completed, 5)
    assert len(spy.batches) <= 2


async def test_a_commit_with_expectations_goes_to_the_thread(store):
    store.gather_writes()
    completed = []
    work = PendingWrite(
        [message(1)], [Expect(METADATA, b"k", None)], on_completed=lambda done: completed.append(done.error)
    )
    store._group_commit.begin(work)
    store.write_gathered()
    assert completed == []
    await until_completed(completed, 1)


async def test_while_the_thread_has_a_commit_further_ones_join_it(store):
    spy = Spy(store)
    spy.hold = threading.Event()
    first = []
    store.begin([message(1)], first.append, claim=CLAIM)
    await spy.entered()
    assert not store.writes_inline
    assert not store.is_idle
    completed = gathered(store, [message(2)])
    assert completed == []
    spy.hold.set()
    await until_completed(completed, 1)
    assert first == completed == [None]
    assert store.writes_inline
    assert store.is_idle
    assert gathered(store, [message(3)]) == [None]


async def test_commits_begun_by_answers_are_written_by_the_thread_so_that_the_loop_does_not_write_forever(store):
    completed = []

    def again(error):
        completed.append(error)
        if len(completed) < 3:
            store.begin([message(10 + len(completed))], again, claim=CLAIM)

    store.gather_writes()
    store.begin([message(1)], again, claim=CLAIM)
    store.write_gathered()
    assert completed == [None]
    await until_completed(completed, 3)
    assert completed == [None] * 3


@pytest.fixture
def slow_write(store, clock, monkeypatch):
    """Return a function that writes a small commit with a given duration."""
    write, numbers = store._group_commit._write, count(1000)

    def written(took_s):
        def slow(*group):
            write(*group)
            clock.now_s += took_s

        with monkeypatch.context() as patched:
            patched.setattr(store._group_commit, "_write", slow)
            assert gathered(store, [message(next(numbers))]) == [None]

    return written


async def test_after_a_slow_write_the_thread_writes_for_ten_times_as_long(store, clock, slow_write):
    slow_write(3 * MAX_S)
    assert not store.writes_inline
    completed = gathered(store, [message(2)])
    assert completed == []
    await until_completed(completed, 1)
    clock.now_s += SLOW_FACTORS[0] * 3 * MAX_S - 1e-6
    assert not store.writes_inline
    clock.now_s += 2e-6
    assert gathered(store, [message(3)]) == [None]


def pause_of(store, clock):
    """Return how long the thread will write commits from now on."""
    return store._group_commit._inline.off_until_s - clock.now_s


def factor_after(policy, took_s):
    """Make a call of a given duration; return for how many times as long it turns inline calls off."""
    policy.begin(1000.0)
    policy.end(1000.0 + took_s)
    return round((policy.off_until_s - 1000.0 - took_s) / took_s)


def test_on_a_disk_that_stays_slow_that_time_doubles_up_to_a_thousandfold():
    policy = InlinePolicy(MAX_S)
    factors = [factor_after(policy, 2 * MAX_S) for _ in range(9)]
    assert factors == [10, 20, 40, 80, 160, 320, 640, 1000, 1000]


@pytest.mark.parametrize(("quick", "factor"), [(QUICK_CALLS - 1, 80), (QUICK_CALLS, SLOW_FACTORS[0])])
def test_a_disk_that_was_fast_for_long_counts_as_fast_again(quick, factor):
    policy = InlinePolicy(MAX_S)
    for took_s in (*[2 * MAX_S] * 3, *[MAX_S / 2] * quick):
        factor_after(policy, took_s)
    assert factor_after(policy, 2 * MAX_S) == factor


async def test_a_slow_write_of_the_thread_does_not_make_the_disk_a_slow_one(store, clock, monkeypatch):
    write = store._group_commit._write

    def slow(*group):
        write(*group)
        clock.now_s += 1.0

    monkeypatch.setattr(store._group_commit, "_write", slow)
    completed = gathered(store, [message(1, bytes(MAX_INLINE_BYTES))])
    await until_completed(completed, 1)
    assert store.writes_inline


async def test_with_a_bound_of_zero_the_thread_writes_every_commit(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", LevelDBOptions(StorageConfig(inline_commit_s=0.0))) as store:
        assert not store.writes_inline
        completed = gathered(store, [message(1)])
        assert completed == []
        await until_completed(completed, 1)


@pytest.mark.parametrize("name", [NAME, TopicName("n" * 200, "t" * 200)], ids=["short name", "long name"])
async def test_a_volume_is_sealed_by_the_thread_and_never_by_the_event_loop(tmp_path, name):
    volume_bytes = 6 * MAX_INLINE_BYTES
    prefix = generation_prefix(name, 1)
    async with await LevelDBStore.open(
        tmp_path / "data", LevelDBOptions(StorageConfig(volume_bytes=volume_bytes))
    ) as store:
        sets, inline, completed = store._db.sets, 0, []
        for number in range(60):
            newest = sets.current.newest
            rows = Put(MESSAGE, prefix, [pack_position(number, each) for each in range(50)], [b"v" * 20] * 50)
            gathered(store, [rows], completed=completed)
            if len(completed) > number:
                inline += 1
                assert sets.current.newest is newest
            await until_completed(completed, number + 1)
            # Make the next volume before this one is full.
            await settled(store)
        assert completed == [None] * 60
        assert 10 < inline < 60
        assert len(sets.current.all) > 1
        assert len(await everything(store, MESSAGE)) == 3000


async def test_every_commit_of_a_group_is_completed_although_the_callback_of_one_raises(store):
    completed = []
    store.gather_writes()
    store.begin([message(1)], lambda _: 1 / 0, claim=CLAIM)
    store.begin([message(2)], completed.append, claim=CLAIM)
    with pytest.raises(ZeroDivisionError):
        store.write_gathered()
    assert completed == [None]


async def test_after_a_failure_each_commit_gets_an_error_and_nothing_is_written_until_the_store_is_reopened(store):
    spy = Spy(store)
    spy.fail = OSError(28, "No space left on device")
    completed = gathered(store, [message(1)], [message(2)])
    assert len(completed) == len({id(error) for error in completed}) == 2
    assert all(isinstance(error, StoreError) and "No space left" in error.detail for error in completed)
    refused = gathered(store, [message(3)])
    await until_completed(refused, 1)
    assert isinstance(refused[0], NothingWritten)
    assert len(spy.batches) == 1
    await store.claim(NAME)
    assert gathered(store, [message(4)]) == [None]
    assert dict(await everything(store, MESSAGE)) == {key(4): message(4).values[0]}


async def test_a_commit_without_a_size_fails_alone_and_the_gathered_ones_are_written(store):
    completed = []
    store.gather_writes()
    store.begin([message(1)], completed.append, claim=CLAIM)
    with pytest.raises(TypeError):
        store.begin([Put(MESSAGE, PREFIX, [b"k"], [5])], completed.append, claim=CLAIM)
    store.write_gathered()
    assert completed == [None]


async def test_a_closed_store_refuses_commits_that_would_be_gathered(tmp_path):
    store = await LevelDBStore.open(tmp_path / "data")
    await store.aclose()
    store.gather_writes()
    with pytest.raises(StoreError, match="closed"):
        store.begin([message(1)], lambda _: None, claim=CLAIM)
    store.write_gathered()


# --- small reads --------------------------------------------------------------------------------------


@pytest.fixture
def read_in(store, clock, monkeypatch):
    """Return a function that reads a metadata row with a given duration, and returns True if the event loop did."""
    read = type(store._db).get

    async def read_in(took_s=0.0):
        threads = []

        def get(tables, *asked):
            threads.append(threading.current_thread())
            clock.now_s += took_s
            return read(tables, *asked)

        with monkeypatch.context() as patched:
            patched.setattr(type(store._db), "get", get)
            assert await store.get(METADATA, b"k") == b"v"
        return threads == [threading.current_thread()]

    return read_in


async def test_a_row_of_the_metadata_is_read_by_the_event_loop_while_that_writes_small_commits_itself(store, read_in):
    assert gathered(store, [put_one(METADATA, b"k", b"v")]) == [None]
    assert await read_in()
    spy = Spy(store)
    spy.hold = threading.Event()
    completed = []
    store.begin([message(1)], completed.append, claim=CLAIM)
    await spy.entered()
    assert not await read_in()
    spy.hold.set()
    await until_completed(completed, 1)
    assert await read_in()


async def test_after_a_slow_read_threads_read_and_write_for_ten_times_as_long(store, clock, read_in):
    await store.write([put_one(METADATA, b"k", b"v")], claim=await store.claim(NAME))
    assert await read_in(3 * MAX_S)
    assert not store.writes_inline
    assert not await read_in()
    clock.now_s += SLOW_FACTORS[0] * 3 * MAX_S + 1e-6
    assert await read_in()


async def test_a_disk_that_reads_fast_for_long_counts_as_fast_again(store, clock, read_in):
    await store.write([put_one(METADATA, b"k", b"v")], claim=await store.claim(NAME))
    for _ in range(3):
        assert await read_in(2 * MAX_S)
        clock.now_s += pause_of(store, clock) + 1e-6
    for _ in range(QUICK_CALLS):
        assert await store.get(METADATA, b"k") == b"v"
    assert await read_in(2 * MAX_S)
    assert pause_of(store, clock) == pytest.approx(SLOW_FACTORS[0] * 2 * MAX_S)


async def test_a_task_that_reads_many_rows_of_the_metadata_lets_others_run(store):
    turns = []

    async def others():
        while len(turns) < 10:
            turns.append(True)
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(others)
        for _ in range(12):
            await store.get(METADATA, b"k")
        assert len(turns) == 10


async def test_a_closed_store_reads_nothing_on_the_event_loop_either(tmp_path):
    store = await LevelDBStore.open(tmp_path / "data")
    await store.aclose()
    with pytest.raises(StoreError, match="closed"):
        await store.get(METADATA, b"k")


# --- while the disk syncs ------------------------------------------------------------------------------


def fails(descriptor):
    """Fail like the sync of a broken disk."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


class Watched:
    """Records the callbacks of commits, and the syncs, in order."""

    def __init__(self, store, monkeypatch, *, during=lambda: None):
        self.events = []
        self._store = store
        self._during = during
        sync = os.fdatasync

        def synced(descriptor):
            self.events.append("synced")
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", synced)

    def commit(self, number):
        """Write a commit with a callback while syncing, in one turn of the event loop; return the events."""
        self._store.gather_writes()
        self._store.begin([message(number)], self._completed, claim=CLAIM, while_syncing=self._while_syncing)
        self._store.write_gathered()
        found, self.events = self.events, []
        return found

    def _while_syncing(self):
        self.events.append("syncing")
        self._during()

    def _completed(self, error):
        self.events.append("completed" if error is None else error)


async def test_callbacks_while_syncing_run_between_the_write_and_its_sync(store, monkeypatch):
    watched = Watched(store, monkeypatch, during=lambda: rows.append(store._db.get(MESSAGE, key(2))))
    rows = []
    assert watched.commit(1) == ["syncing", "completed"]  # the end of the log was not known yet, so LevelDB synced it
    assert watched.commit(2) == ["syncing", "synced", "completed"]
    assert rows == [None, message(2).values[0]]


async def test_nothing_is_written_before_it_is_durable_while_a_thread_reads(store, monkeypatch):
    watched = Watched(store, monkeypatch)
    watched.commit(1)
    with store._tables.counted():
        assert watched.commit(2) == ["completed"]
    assert watched.commit(3) == ["syncing", "synced", "completed"]


async def test_commits_begun_during_a_sync_are_written_after_it(store, monkeypatch):
    completed = []

    def during():
        store.begin([message(10)], completed.append, claim=CLAIM)
        assert store._group_commit.is_idle

    watched = Watched(store, monkeypatch, during=during)
    assert watched.commit(1) == ["syncing", "completed"]
    await until_completed(completed, 1)
    assert watched.commit(2) == ["syncing", "synced", "completed"]
    await until_completed(completed, 2)
    assert completed == [None, None]


async def test_a_failed_sync_is_reported_and_nothing_is_written_until_the_store_is_reopened(store, monkeypatch):
    watched = Watched(store, monkeypatch)
    watched.commit(1)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        done, error = watched.commit(2)
    assert done == "syncing"
    assert isinstance(error, StoreError)
    assert not isinstance(error, NothingWritten)
    assert "Input/output error" in error.detail
    refused = gathered(store, [message(3)])
    await until_completed(refused, 1)
    assert isinstance(refused[0], NothingWritten)
    await store.claim(NAME)
    assert watched.commit(4)[-1] == "completed"
    assert {key(1), key(4)} <= set(dict(await everything(store, MESSAGE))) <= {key(1), key(2), key(4)}


@pytest.mark.parametrize(("table", "row", "value"), [(MESSAGE, key(1), message(1).values[0]), (METADATA, b"k", b"v")])
async def test_a_read_after_a_failed_sync_reopens_the_store_first(store, monkeypatch, table, row, value):
    assert gathered(store, [put_one(METADATA, b"k", b"v")]) == [None]
    watched = Watched(store, monkeypatch)
    watched.commit(1)
    before = store._db

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", fails)
        watched.commit(2)
    assert store._db is before
    assert await store.get(table, row) == value
    assert store._db is not before
    assert gathered(store, [message(3)]) == [None]


async def test_the_time_of_callbacks_while_syncing_is_no_time_of_the_disk(store, clock, monkeypatch):
    def slowly():
        clock.now_s += 100 * MAX_S

    watched = Watched(store, monkeypatch, during=slowly)
    watched.commit(1)
    assert watched.commit(2) == ["syncing", "synced", "completed"]
    assert store.writes_inline


async def test_commits_gathered_during_a_sync_go_to_the_thread(store, monkeypatch):
    completed = []

    def during():
        store.gather_writes()
        store.begin([message(10)], completed.append, claim=CLAIM)
        store.write_gathered()

    watched = Watched(store, monkeypatch, during=during)
    watched.commit(1)
    await until_completed(completed, 1)
    assert watched.commit(2) == ["syncing", "synced", "completed"]
    await until_completed(completed, 2)
    assert completed == [None, None]


async def test_metadata_is_changed_after_the_sync_since_a_checkpoint_may_be_written_at_any_time(store, monkeypatch):
    watched = Watched(store, monkeypatch)
    watched.commit(1)
    seen = []
    store.gather_writes()
    store.begin(
        [put_one(METADATA, b"k", b"new")],
        seen.append,
        claim=CLAIM,
        while_syncing=lambda: seen.append(store._db.metadata.get(b"k")),
    )
    store.write_gathered()
    assert seen == [None, None]  # the second None: no error
    assert store._db.metadata.get(b"k") == b"new"

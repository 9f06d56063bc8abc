"""Failures outside commits: nothing is written afterwards, and the store can be reopened from the disk."""

from __future__ import annotations

import errno
import resource
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import aclosing, closing, contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
import trio

from plainsong.protocol.effects import Delete, Put
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.names import TopicName
from storage.base import NothingWritten, StoreError, StoreFull
from storage.leveldb import (
    LevelDBOptions,
    LevelDBStore,
    former,
    listed_volumes,
    next_volume,
    threads,
    tidying,
    volume_list,
)
from storage.leveldb import commit as commit_module
from storage.leveldb.engine.database import Database, Shape
from storage.leveldb.index import DeadRanges
from storage.leveldb.keeper import Keeper
from storage.leveldb.keeper_thread import Stopped
from storage.leveldb.listed_volumes import ListedVolumes
from storage.leveldb.operations import ForgetDead, MarkDead, PendingWrite, Seal
from storage.leveldb.sealed_rows import SealedRows
from storage.leveldb.tables import LevelDBTables
from storage.leveldb.volume import Volume
from tests.patience import PATIENCE_S
from tests.storage.contract import MESSAGE, METADATA, NAME, everything
from tests.storage.old_logs import until
from tests.storage.tiny_volumes import PREFIX, TINY, fill, key, message, paused_until, settle, settled

SHAPE = Shape(1 << 20, 1 << 20, 1 << 20)


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as opened:
        yield opened


class Tables(LevelDBTables):
    """Tables whose owner applies the keeper's operations, as the commit thread does."""

    def __init__(self, directory: Path, options: LevelDBOptions) -> None:
        self.handed_in: deque[PendingWrite] = deque()
        super().__init__(directory, options, hand_in=self.handed_in.append)


@pytest.fixture
def tables(tmp_path):
    LevelDBTables.create(tmp_path, TINY)
    opened = Tables(tmp_path, TINY)
    yield opened
    opened.close()


def written(tables: LevelDBTables, *operations: object) -> PendingWrite:
    """Write one commit, and wait until the keeper has changed sealed volumes for it."""
    changed = threading.Event()
    work = PendingWrite(operations, on_changed=lambda _: changed.set())
    tables.committer.write([work])
    assert not work.is_with_keeper or changed.wait(PATIENCE_S)
    return work


def sealed(tables: LevelDBTables) -> Volume:
    """Seal the newest volume and return it."""
    newest = tables.sets.current.newest
    seal = Seal(newest)
    written(tables, seal)
    assert seal.error is None
    return newest


def result_of(tables: Tables, start: Callable[[Callable[[object], object]], None]) -> object:
    """Start long work in the keeper, and apply its operations as the commit thread does, until there is a result."""
    results: SimpleQueue[object] = SimpleQueue()
    start(results.put)
    while True:
        with suppress(Empty):
            return results.get(timeout=0.001)
        while tables.handed_in:
            work = tables.handed_in.popleft()
            tables.committer.write([work])
            work.on_completed(work)


@contextmanager
def no_file_beyond(size_bytes: int):
    """Within the block, fail writes that would extend a file beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def log_bytes(path: Path) -> int:
    return max(path.glob("*.log")).stat().st_size


# --- nothing is written after a failed write ---------------------------------------------------------


def put_many(database: Database, first: int, count: int) -> None:
    with database.batch(sync=True) as batch:
        for number in range(first, first + count):
            batch.put(b"\x01" + number.to_bytes(4, "big"), bytes(1000))


def test_a_database_whose_write_failed_refuses_the_next_and_opens_without_the_torn_record(tmp_path):
    database = Database(tmp_path / "db", SHAPE, create=True)
    put_many(database, 0, 10)
    with no_file_beyond(log_bytes(tmp_path / "db") + 50_000), pytest.raises(StoreError, match="File too large"):
        put_many(database, 10, 200)
    with pytest.raises(StoreError, match="a write failed before"):
        put_many(database, 210, 1)
    assert database.get(METADATA, bytes(4)) is not None
    database.close()
    database = Database(tmp_path / "db", SHAPE, create=False)
    assert len(database.own_rows(b"\x01", b"\x02")) == 10
    put_many(database, 10, 1)
    database.close()


def test_a_checkpoint_of_the_metadata_that_failed_is_not_repeated_after_its_torn_record(tmp_path):
    options = LevelDBOptions()
    LevelDBTables.create(tmp_path, options)
    tables = LevelDBTables(tmp_path, options)
    for at in range(5):
        names = [b"%d" % (1000 * at + number) for number in range(1000)]
        written(tables, Put(METADATA, b"topic", names, [bytes(range(100))] * 1000))
    with no_file_beyond(log_bytes(tmp_path / "metadata") + 100_000), pytest.raises(StoreError):
        tables.metadata.checkpoint()
    with pytest.raises(StoreError, match="a write failed before"):
        tables.metadata.checkpoint()
    tables.close()
    tables = LevelDBTables(tmp_path, options)
    assert tables.get(METADATA, b"topic4999") == bytes(range(100))
    tables.metadata.checkpoint()
    tables.close()


@pytest.mark.parametrize("failing", ["tidy", "reclaim", "discard"])
async def test_a_failure_next_to_commits_lets_nothing_be_written_until_the_store_is_opened_again(
    store, monkeypatch, failing
):
    await fill(store, 40)
    await store.drop(MESSAGE, [(PREFIX, key(20))])
    calls = {
        "tidy": store.tidy,
        "reclaim": lambda: store.reclaim(MESSAGE, PREFIX, stop_after(PREFIX)),
        "discard": lambda: store.discard(MESSAGE, [key(25)]),
    }
    places = {
        "tidy": (tidying, "first_live_table"),
        "reclaim": (LevelDBTables, "compact"),
        "discard": (SealedRows, "change"),
    }

    def fail(*_, **__):
        raise StoreError("the disk says no")

    before = store._db
    with monkeypatch.context() as patched:
        patched.setattr(*places[failing], fail)
        with pytest.raises(StoreError, match="the disk says no"):
            await calls[failing]()
    for _ in range(2):
        with pytest.raises(NothingWritten, match=r"the disk says no|a write failed before"):
            await store.write([message(40)], claim=None)
    assert store._db is before
    await fill(store, 1, 40)
    assert store._db is not before
    assert len(await everything(store)) == 21


@pytest.mark.parametrize("failing", ["a commit", "the keeper"])
async def test_tidying_opens_the_store_again_after_a_failure_and_makes_room(store, monkeypatch, failing):
    await fill(store, 40)
    await store.drop(MESSAGE, [(PREFIX, key(30))])
    before = store._db
    if failing == "the keeper":
        store._db.keeper.thread.failed = StoreError("the disk says no")
    else:
        with monkeypatch.context() as patched:
            patched.setattr(Database, "batch", lambda *_, **__: 1 / 0)
            with pytest.raises(StoreError):
                await store.write([message(40)], claim=None)
    assert await store.tidy() > 3
    assert store._db is not before
    await store.write([message(41)], claim=None)
    assert [found for found, _ in await everything(store)] == [key(number) for number in [*range(30, 40), 41]]


async def test_a_claim_opens_the_store_again_when_its_keeper_failed(store):
    await fill(store, 40)
    store._db.keeper.thread.failed = StoreError("the disk says no")
    await fill(store, 1, 40)
    assert len(await everything(store)) == 41


async def test_a_volume_is_not_removed_before_the_metadata_has_its_journal(store, monkeypatch):
    await fill(store, 40)
    await store.drop(MESSAGE, [(PREFIX, key(30))])
    metadata = store._db.metadata
    listed = store._db.sets.current.all
    metadata.durable = 0
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "checkpoint", lambda: None)
        with pytest.raises(StoreError, match="would be lost"):
            await store.tidy()
    assert store._db.sets.current.all == listed
    assert await store.tidy() > 3
    assert await store.get(METADATA, b"last") == b"39"


async def test_a_commit_after_a_failure_of_the_keeper_reports_that_nothing_was_written(store):
    await fill(store, 10)
    store._db.keeper.thread.failed = StoreError("the disk says no", hint="free some space")
    with pytest.raises(NothingWritten, match="the disk says no") as caught:
        await store.write([message(10)], claim=None)
    assert caught.value.hint == "free some space"
    await fill(store, 1, 10)
    assert len(await everything(store)) == 11


def test_a_commit_whose_rows_the_keeper_could_not_change_does_not_report_that_nothing_was_written(tables):
    written(tables, message(1), message(2))
    sealed(tables)
    tables.keeper.thread.failed = StoreError("the disk says no", hint="free some space")
    work = written(tables, Delete(MESSAGE, [key(1)]), message(3))
    assert type(work.error) is StoreError
    assert (work.error.detail, work.error.hint) == ("the disk says no", "free some space")
    assert tables.get(MESSAGE, key(1)) is not None
    assert tables.get(MESSAGE, key(3)) is not None


# --- tidying while commits are written ---------------------------------------------------------------


def reopened(tables: LevelDBTables, directory: Path, options: LevelDBOptions = TINY) -> Tables:
    tables.close()
    return Tables(directory, options)


def test_topics_may_be_added_while_tidying_looks_at_what_is_in_volumes(tables, tmp_path, monkeypatch):
    tables = reopened(tables, tmp_path, LevelDBOptions())
    topics = [generation_prefix(TopicName("ns", f"t{number:02}"), 1) for number in range(40)]
    added = iter(topics[::2])
    written(tables, *(message(1, prefix=prefix) for prefix in topics[1::2]))
    written(tables, MarkDead(MESSAGE, [(prefix, stop_after(prefix)) for prefix in topics[1::2]]))
    real = DeadRanges.live_parts

    def add_and_look(*arguments):
        for prefix in added:
            written(tables, message(1, prefix=prefix))
            break
        return real(*arguments)

    monkeypatch.setattr(DeadRanges, "live_parts", add_and_look)
    # Tidying finds the newest volume dead, has it sealed, and then finds the added topics.
    result_of(tables, tables.tidy)
    assert len(tables.sets.current.sealed) == 1
    assert next(added, None) is None
    for number, prefix in enumerate(topics):
        assert (tables.get(MESSAGE, prefix + key(1)[len(PREFIX) :]) is not None) == (number % 2 == 0)
    tables.close()


@pytest.mark.parametrize("together", [False, True], ids=["in a group before", "in the same group"])
def test_a_dead_range_that_grows_before_it_is_forgotten_stays_dead(tables, tmp_path, together):
    written(tables, message(1), message(2))
    written(tables, MarkDead(MESSAGE, [(b"a", b"b")]))
    results: SimpleQueue[object] = SimpleQueue()
    tables.tidy(results.put)
    until(lambda: tables.handed_in)
    forget = tables.handed_in.popleft()
    assert [type(operation) for operation in forget.operations] == [ForgetDead]
    grow = PendingWrite([MarkDead(MESSAGE, [(b"b", key(2))])])
    for group in [[grow, forget]] if together else [[grow], [forget]]:
        tables.committer.write(group)
    forget.on_completed(forget)
    assert results.get() == 0
    assert tables.sets.current.dead[MESSAGE].items() == [(b"a", key(2))]
    again = reopened(tables, tmp_path)
    dead, rows = again.sets.current.dead[MESSAGE].items(), [again.get(MESSAGE, key(number)) for number in (1, 2)]
    again.close()
    assert dead == [(b"a", key(2))]
    assert rows == [None, b"v" * 100]


async def test_any_error_of_tidying_is_a_failure_of_the_store(store, monkeypatch):
    await fill(store, 10)

    def fail(*_, **__):
        raise RuntimeError("/var/lib/store/volumes/00000001: of any kind")

    with monkeypatch.context() as patched:
        patched.setattr(tidying, "first_live_table", fail)
        with pytest.raises(StoreError, match=r"the store's upkeep: RuntimeError\('00000001: of any kind'\)"):
            await store.tidy()
    assert store._db.keeper.thread.failed.__traceback__ is None
    await store.tidy()
    assert len(await everything(store)) == 10


@pytest.mark.parametrize(("part", "failing"), [(SealedRows, "note_dead"), (ListedVolumes, "make_next")])
def test_any_error_in_the_keepers_thread_is_a_failure_of_the_store(tables, monkeypatch, part, failing):
    def fail(*_):
        raise RuntimeError("/var/lib/store/volumes/00000001: of any kind")

    written(tables, message(1))
    monkeypatch.setattr(part, failing, fail)
    if failing == "note_dead":
        written(tables, MarkDead(MESSAGE, [(key(1), key(2))]))
    else:
        tables.keeper.make_spare()
    until(lambda: tables.failed is not None or not tables.keeper.thread._thread.is_alive())
    assert tables.failed.detail == "the store's upkeep: RuntimeError('00000001: of any kind')"
    if failing == "make_next":
        # The commit may wait for the result.
        until(lambda: isinstance(tables.keeper.spare(wait=False), StoreError))


def test_a_removal_in_a_sealed_volume_does_not_affect_newer_rows(tables):
    written(tables, message(1))
    first = sealed(tables)
    written(tables, message(2))
    held, changed = threading.Event(), threading.Event()
    tables.keeper.thread.start(lambda: iter(()), lambda _: held.wait())  # keeps the keeper busy
    removal = PendingWrite([Delete(MESSAGE, [key(2), key(1)])], on_changed=lambda _: changed.set())
    tables.committer.write([removal])
    tables.committer.write([PendingWrite([message(1, b"again"), message(2, b"again")])])
    assert tables.get(MESSAGE, key(1)) == b"again"
    held.set()
    assert changed.wait(PATIENCE_S)
    assert removal.error is None
    assert [tables.get(MESSAGE, key(number)) for number in (1, 2)] == [b"again"] * 2
    with tables.databases.lease(first) as database:
        assert database.get(MESSAGE, key(1)) is None


async def test_a_volume_whose_last_rows_die_while_it_is_rewritten_is_removed(store, monkeypatch):
    await fill(store, 40)
    await store.discard(MESSAGE, [key(number) for number in range(40) if number % 4])
    real = tidying._copy
    dropped = []

    async def drop() -> None:
        dropped.append(await store.drop(MESSAGE, [(PREFIX, stop_after(PREFIX))]))

    loop = trio.lowlevel.current_trio_token()

    def copy_and_drop(*arguments: object) -> Iterator[float]:
        yield from real(*arguments)
        if not dropped:
            yield from paused_until(loop, drop)

    monkeypatch.setattr(tidying, "_copy", copy_and_drop)
    await store.tidy()
    await store.tidy()
    assert dropped
    assert await everything(store) == []
    await settled(store)
    assert not any("." in volume.path.name for volume in store._db.sets.current.all)


async def of_version_0_1(store: LevelDBStore) -> Volume:
    """Fill a store's first volume, half of its rows dead, as if it were version 0.1's database; return the volume."""
    await fill(store, 40)
    large = store._db.sets.current.all[0]
    large.large = True
    assert large.rows > 3
    await store.drop(MESSAGE, [(PREFIX, key(large.rows // 2))])
    return large


async def test_rows_that_die_while_the_volume_of_version_0_1_is_swept_are_swept_later(store, monkeypatch):
    large = await of_version_0_1(store)
    tables, count = store._db, large.rows
    real = former._remove
    loop = trio.lowlevel.current_trio_token()

    async def drop() -> None:
        await store.drop(MESSAGE, [(PREFIX, key(count))])

    def remove_and_drop(*arguments: object) -> Generator[float, None, bytes]:
        end = yield from real(*arguments)
        yield from paused_until(loop, drop)
        return end

    with monkeypatch.context() as patched:
        patched.setattr(former, "_remove", remove_and_drop)
        assert await store.tidy() == 0
    assert list(tables.metadata.dead_ranges()) == [(MESSAGE, PREFIX, key(count))]
    with tables.databases.lease(large) as database, database.rows(MESSAGE, PREFIX, stop_after(PREFIX)) as rows:
        assert [found for found, _ in rows] == [key(number) for number in range(count // 2, count)]
    assert await store.tidy() == 1
    await trio.to_thread.run_sync(until, lambda: not large.path.exists())
    assert not list(tables.metadata.dead_ranges())


async def test_each_swept_piece_is_durable_before_the_next_and_before_its_rows_are_forgotten(store, monkeypatch):
    large = await of_version_0_1(store)
    events = []
    replace, batch = ListedVolumes.replace_in_memory, Database.batch

    def noted(self, *, sync):
        if self is database:
            events.append("synced" if sync else "not synced")
        return batch(self, sync=sync)

    monkeypatch.setattr(
        ListedVolumes, "replace_in_memory", lambda *given: events.append("forgotten") or replace(*given)
    )
    monkeypatch.setattr(Database, "batch", noted)
    monkeypatch.setattr(former, "_PIECE_ROWS", 1)
    with store._db.databases.lease(large) as database:
        await store.tidy()
    assert len(events) > 2
    assert {*events[:-1]} == {"synced"}
    assert events[-1] == "forgotten"


async def test_between_two_merges_of_a_swept_volume_the_keeper_handles_new_requests(store, monkeypatch):
    await of_version_0_1(store)
    events = []
    compact = Database.compact

    def noted(self: Database, *given: object) -> None:
        events.append("merged")
        store._db.keeper.thread.put(lambda: events.append("done"))
        compact(self, *given)

    monkeypatch.setattr(Database, "compact", noted)
    monkeypatch.setattr(former, "_PIECE_ROWS", 1)
    monkeypatch.setattr(former, "SWEPT_BYTES", 1)
    await store.tidy()
    await settled(store)
    assert len(events) > 4
    assert events == ["merged", "done"] * (len(events) // 2)
    assert len(await everything(store)) > 0


# --- the next volume, and the list ------------------------------------------------------------------


def no_list(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/var/lib/store/volumes/LIST.tmp")


async def test_a_next_volume_that_could_not_be_listed_is_made_by_a_later_attempt(store, monkeypatch):
    before, kept = store._db, []
    monkeypatch.setattr(next_volume, "RETRY_S", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(listed_volumes, "write_list", no_list)
        with pytest.raises(NothingWritten, match=r"No space left on device: 'LIST\.tmp'") as caught:
            await fill(store, 40)
        # A caller keeps the exception, and with it the frames.
        kept.append(caught.value)
        acknowledged = len(await everything(store))
    assert 0 < acknowledged < 40
    await fill(store, 40)
    assert len(await everything(store)) == 40
    assert len(store._db.sets.current.all) > 4
    assert store._db is before


async def test_without_a_next_volume_the_newest_is_written_until_it_has_twice_its_size(store, monkeypatch):
    monkeypatch.setattr(listed_volumes, "write_list", no_list)
    monkeypatch.setattr(next_volume, "RETRY_S", 1000.0)
    newest = store._db.sets.current.newest
    for _ in range(2):
        with pytest.raises(NothingWritten, match="No space left"):
            await fill(store, 40, newest.rows)
        row_bytes = newest.memory_bytes // newest.rows
        assert 0 <= newest.memory_bytes - commit_module.MAX_OVERFULL * TINY.settings.volume_bytes < row_bytes
        assert store._db.sets.current.all == (newest,)
    assert [found for found, _ in await everything(store)] == [key(number) for number in range(newest.rows)]
    # Views, tidying and operations that free space need no next volume.
    async with aclosing(await store.pin(60)) as view:
        assert len(await everything(view)) == newest.rows
    await store.drop(MESSAGE, [(PREFIX, key(2))])
    assert [found for found, _ in await everything(store)] == [key(number) for number in range(2, newest.rows)]
    await store.tidy()


@pytest.mark.parametrize("retry_s", [0.0, 1000.0])
def test_a_next_volume_that_could_not_be_made_is_not_tried_again_at_once(tables, monkeypatch, retry_s):
    asked, real = [], Keeper.make_spare
    monkeypatch.setattr(next_volume, "RETRY_S", retry_s)
    monkeypatch.setattr(listed_volumes, "write_list", no_list)
    monkeypatch.setattr(Keeper, "make_spare", lambda keeper: asked.append(True) or real(keeper))
    for number in range(11):
        written(tables, message(number))
        settle(tables)
    assert tables.sets.current.newest.memory_bytes > TINY.settings.volume_bytes
    assert (len(asked) == 1) == bool(retry_s), asked


def test_a_next_volume_that_cannot_be_made_is_reported_without_folders_and_with_its_hint(tables, monkeypatch):
    real = Database.__init__

    def fail(self, path, *_, **__):
        monkeypatch.setattr(Database, "__init__", real)
        raise StoreFull(f"{path}: No space left on device", hint="free some space")

    monkeypatch.setattr(Database, "__init__", fail)
    seal = Seal(tables.sets.current.newest)
    written(tables, seal)
    assert seal.error.detail == "the next volume cannot be made: 00000002: No space left on device"
    assert seal.error.hint == "free some space"
    assert sealed(tables).number == 1


def fail_after_the_list(monkeypatch) -> None:
    """Make the sync of the folder fail after the new list was moved into it."""

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(volume_list, "sync_directory", fail)


@pytest.mark.parametrize("power_cut", [False, True])
async def test_when_the_new_list_may_not_be_durable_no_volume_of_either_list_is_removed(
    tmp_path, monkeypatch, power_cut
):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        await store.discard(MESSAGE, [key(number) for number in range(40) if number % 4])
        listed = tmp_path / "data" / "volumes" / "LIST"
        before = listed.read_bytes()
        with monkeypatch.context() as patched:
            fail_after_the_list(patched)
            with pytest.raises(StoreError, match=r"listing the volumes: .*Input/output error"):
                await store.tidy()
        assert listed.read_bytes() != before
    if power_cut:
        listed.write_bytes(before)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(0, 40, 4)]
        folders = {path.name for path in listed.parent.iterdir() if path.is_dir()}
        assert folders == {volume.path.name for volume in store._db.sets.current.all}


def test_a_next_volume_that_may_be_listed_is_not_made_again(tables, tmp_path, monkeypatch):
    written(tables, message(1))
    seals = [Seal(tables.sets.current.newest) for _ in range(2)]
    with monkeypatch.context() as patched:
        fail_after_the_list(patched)
        written(tables, seals[0])
    made = (tmp_path / "volumes" / "00000002").stat().st_ino
    written(tables, seals[1])
    assert ["Input/output error" in seal.error.detail for seal in seals] == [True] * 2
    assert (tmp_path / "volumes" / "00000002").stat().st_ino == made
    # The commit is written only after the store has been reopened.
    assert tables.sets.current.newest.number == 1
    assert tables.failed is not None
    again = reopened(tables, tmp_path)
    assert again.get(MESSAGE, key(1)) is not None
    assert again.sets.current.newest.number == 2
    again.close()


# --- closing while tidying --------------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["rewriting", "sweeping", "dropping"])
async def test_tidying_ends_at_its_next_piece_when_the_store_is_closed_and_that_is_no_failure(
    store, tmp_path, monkeypatch, doing
):
    await fill(store, 40)
    tables = store._db
    first = tables.sets.current.all[0]
    if doing == "dropping":
        await store.drop(MESSAGE, [(PREFIX, key(30))])
    elif doing == "rewriting":
        await store.discard(MESSAGE, [key(number) for number in range(40) if number % 4])
    else:
        first.large = True
        await store.drop(MESSAGE, [(PREFIX, key(first.rows - 1))])
    expected = await everything(store)
    place, step = {
        "rewriting": (ListedVolumes, "successor"),
        "sweeping": (DeadRanges, "dead_parts"),
        "dropping": (ListedVolumes, "replace"),
    }[doing]
    real = getattr(place, step)
    begun = []

    def leave(*arguments):
        begun.append(step)
        tables.keeper.thread.leave()
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(place, step, leave)
        with pytest.raises(Stopped):
            await store.tidy()
    assert begun == [step]
    assert tables.failed is None
    if doing == "sweeping":
        with tables.databases.lease(first) as database:
            assert database.get(MESSAGE, key(0)) is not None
    await store.aclose()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as again:
        assert await everything(again) == expected


async def test_a_store_that_cannot_be_opened_again_is_reported_without_folders(store, tmp_path):
    await fill(store, 40)
    store._db.keeper.thread.failed = StoreError("the disk says no")
    (tmp_path / "data" / "volumes" / "00000001").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be reopened") as caught:
        await store.claim(NAME)
    assert "00000001" in caught.value.detail
    assert "/" not in caught.value.detail


def test_a_table_that_could_not_be_written_fails_the_next_batch_even_an_empty_one(tmp_path):
    shape = LevelDBOptions().volume_shape()
    with closing(Database(tmp_path / "copy", shape, create=True)) as database:
        with database.batch(sync=False) as batch:
            batch.put(b"\x02key", b"value")
        for number in range(1, 100):  # the table's file has one of these names
            (tmp_path / "copy" / f"{number:06d}.ldb").mkdir()
        database.flush_memory()
        with pytest.raises(StoreError, match="writing"), database.batch(sync=True):
            pass


async def test_a_store_that_gets_no_thread_when_it_is_opened_again_is_opened_by_a_later_claim(store, monkeypatch):
    await fill(store, 1)
    store._db.keeper.thread.failed = StoreError("the disk says no")

    def no_thread(*_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threads, "spawn", no_thread)
        with pytest.raises(StoreError, match="can't start new thread"):
            await store.claim(NAME)
    await store.claim(NAME)
    assert len(await everything(store)) == 1

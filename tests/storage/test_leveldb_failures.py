"""What failed beside commits: nothing is written behind it, and the store can be opened again from what is on the disk."""

from __future__ import annotations

import errno
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from plainsong.protocol.effects import Put
from plainsong.protocol.keys import stop_after
from storage.base import NothingWritten, StoreError, StoreFull
from storage.leveldb import LevelDBOptions, LevelDBStore, tidying, volume_list
from storage.leveldb import tables as tables_module
from storage.leveldb import volumes as volumes_module
from storage.leveldb.database import Database, Shape
from storage.leveldb.tables import LevelDBTables, MarkDead, Seal
from storage.leveldb.tidying import Stopped
from storage.leveldb.volume import Volume
from storage.leveldb.volumes import Volumes
from tests.storage.contract import MESSAGE, METADATA, NAME, everything
from tests.storage.tiny_volumes import PREFIX, TINY, fill, key, message, settled

SHAPE = Shape(1 << 20, 1 << 20, 1 << 20)


@pytest.fixture
async def store(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as opened:
        yield opened


@pytest.fixture
def tables(tmp_path):
    LevelDBTables.create(tmp_path, TINY)
    opened = LevelDBTables(tmp_path, TINY)
    yield opened
    opened.close()


async def filled(store: LevelDBStore, count: int, first: int = 0) -> None:
    """``fill``, and what is done beside commits."""
    await fill(store, count, first)
    await settled(store)


@contextmanager
def no_file_beyond(size_bytes: int):
    """No file of this process grows beyond a size meanwhile, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def log_bytes(path: Path) -> int:
    return max(path.glob("*.log")).stat().st_size


# --- nothing is written behind a failed write --------------------------------------------------------


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


def test_a_checkpoint_of_the_metadata_that_failed_is_not_repeated_behind_its_torn_record(tmp_path):
    options = LevelDBOptions()
    LevelDBTables.create(tmp_path, options)
    tables = LevelDBTables(tmp_path, options)
    for at in range(5):
        names = [b"%d" % (1000 * at + number) for number in range(1000)]
        tables.write([Put(METADATA, b"topic", names, [bytes(range(100))] * 1000)])
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
async def test_what_fails_beside_commits_lets_nothing_be_written_until_the_store_is_opened_again(
    store, monkeypatch, failing
):
    await filled(store, 40)
    await store.drop(MESSAGE, [(PREFIX, key(20))])
    calls = {
        "tidy": store.tidy,
        "reclaim": lambda: store.reclaim(MESSAGE, PREFIX, stop_after(PREFIX)),
        "discard": lambda: store.discard(MESSAGE, [key(25)]),
    }
    places = {"tidy": "tidy", "reclaim": "compact", "discard": "discard_sealed"}

    def fail(*_):
        raise StoreError("the disk says no")

    with monkeypatch.context() as patched:
        patched.setattr(LevelDBTables, places[failing], fail)
        with pytest.raises(StoreError, match="the disk says no"):
            await calls[failing]()
    with pytest.raises(StoreError, match="a write failed before"):
        await store.write([message(40)], claim=None)
    await filled(store, 1, 40)
    assert len(await everything(store)) == 21


@pytest.mark.parametrize("failing", ["a commit", "the upkeep"])
async def test_tidying_opens_the_store_again_after_a_failure_and_makes_room(store, monkeypatch, failing):
    await filled(store, 40)
    await store.drop(MESSAGE, [(PREFIX, key(30))])
    before = store._db
    if failing == "the upkeep":
        store._db.upkeep.failed = StoreError("the disk says no")
    else:
        with monkeypatch.context() as patched:
            patched.setattr(Database, "batch", lambda *_, **__: 1 / 0)
            with pytest.raises(StoreError):
                await store.write([message(40)], claim=None)
    assert await store.tidy() > 3
    assert store._db is not before
    await store.write([message(41)], claim=None)
    assert [found for found, _ in await everything(store)] == [key(number) for number in [*range(30, 40), 41]]


async def test_a_claim_opens_the_store_again_when_its_upkeep_failed(store):
    await filled(store, 40)
    store._db.upkeep.failed = StoreError("the disk says no")
    await filled(store, 1, 40)
    assert len(await everything(store)) == 41


async def test_no_volume_goes_whose_journal_the_metadata_does_not_have(store, monkeypatch):
    await filled(store, 40)
    await store.drop(MESSAGE, [(PREFIX, key(30))])
    metadata = store._db.metadata
    listed = list(store._db.volumes.all)
    metadata.durable = 0
    with monkeypatch.context() as patched:
        patched.setattr(metadata, "checkpoint", lambda: None)
        with pytest.raises(StoreError, match="would be lost"):
            await store.tidy()
    assert store._db.volumes.all == listed
    assert await store.tidy() > 3
    assert await store.get(METADATA, b"last") == b"39"


async def test_a_commit_behind_a_failure_of_the_upkeep_says_that_nothing_was_written(store):
    await filled(store, 10)
    store._db.upkeep.failed = StoreError("the disk says no", hint="free some space")
    with pytest.raises(NothingWritten, match="the disk says no") as caught:
        await store.write([message(10)], claim=None)
    assert caught.value.hint == "free some space"
    # Of a group that has begun, a later batch does not say so.
    with pytest.raises(StoreError) as caught:
        store._db.write([message(10)])
    assert type(caught.value) is StoreError
    await filled(store, 1, 10)
    assert len(await everything(store)) == 11


# --- tidying beside commits --------------------------------------------------------------------------


def test_topics_may_be_added_while_tidying_looks_at_what_is_in_volumes(tables, monkeypatch):
    tables.write([message(1)])
    volumes, newest = tables.volumes, tables.volumes.newest

    class Watched(dict):
        """What is known of the newest volume; another thread adds topics to it under the lock."""

        def values(self):
            assert volumes._lock.locked()
            return super().values()

        def items(self):
            assert volumes._lock.locked()
            return super().items()

    volumes.touched.add(newest)
    with monkeypatch.context() as patched:
        for table, extents in newest.extents.items():
            patched.setitem(newest.extents, table, Watched(extents))
        assert not tables.tidy().operations


def test_dead_ranges_are_listed_between_the_changes_of_a_commit(tables):
    volumes = tables.volumes
    tables.write([MarkDead(MESSAGE, [(b"a", b"b")])])
    ranges = volumes.dead[MESSAGE]

    class Watched(list):
        def __iter__(self):
            assert volumes._lock.locked()
            return super().__iter__()

    ranges.starts = Watched(ranges.starts)
    steps = tables.tidy()
    assert [operation.ranges for operation in steps.operations] == [[(MESSAGE, b"a", b"b")]]


async def test_whatever_goes_wrong_while_tidying_is_a_failure_of_the_store(store, monkeypatch):
    await filled(store, 10)

    def fail(*_):
        raise RuntimeError("/var/lib/store/volumes/00000001: of any kind")

    with monkeypatch.context() as patched:
        patched.setattr(tables_module, "tidy", fail)
        with pytest.raises(StoreError, match=r"tidying: RuntimeError\('00000001: of any kind'\)"):
            await store.tidy()
    assert store._db.upkeep.failed.__traceback__ is None
    await store.tidy()
    assert len(await everything(store)) == 10


def test_a_discard_beside_a_seal_leaves_the_new_newest_volume_to_the_thread_that_commits(tables, monkeypatch):
    tables.write([message(1)])
    volumes, real = tables.volumes, tables.volumes.places

    def seal_before(*row):
        monkeypatch.setattr(volumes, "places", real)
        tables.write([Seal(volumes.newest)])
        tables.write([message(1), message(2)])
        return real(*row)

    monkeypatch.setattr(volumes, "places", seal_before)
    assert tables.discard_sealed(MESSAGE, [key(2), key(1)]) == [key(2), key(1)]
    assert tables.get(MESSAGE, key(2)) is not None
    assert volumes.all[0].open().get(MESSAGE, key(1)) is None
    assert volumes.newest.open().get(MESSAGE, key(1)) is not None


async def test_a_volume_whose_last_rows_die_while_it_is_rewritten_goes(store, monkeypatch):
    await filled(store, 40)
    await store.discard(MESSAGE, [key(number) for number in range(40) if number % 4])
    real = tidying._copy
    dropped = []

    def copy_and_drop(*arguments):
        real(*arguments)
        if not dropped:
            dropped.append(True)
            trio.from_thread.run(store.drop, MESSAGE, [(PREFIX, stop_after(PREFIX))])

    monkeypatch.setattr(tidying, "_copy", copy_and_drop)
    await store.tidy()
    await store.tidy()
    assert dropped
    assert await everything(store) == []
    await settled(store)
    assert not any("." in volume.path.name for volume in store._db.volumes.all)


async def of_version_0_1(store: LevelDBStore) -> Volume:
    """A store with rows in its first volume, which counts as the database of version 0.1, half of them dead."""
    await filled(store, 40)
    large = store._db.volumes.all[0]
    large.large = True
    assert large.rows > 3
    await store.drop(MESSAGE, [(PREFIX, key(large.rows // 2))])
    return large


async def test_rows_that_die_while_the_volume_of_version_0_1_is_swept_are_swept_later(store, monkeypatch):
    large = await of_version_0_1(store)
    tables, count = store._db, large.rows
    real = tidying._remove

    def remove_and_mark(*arguments):
        real(*arguments)
        tables.write([MarkDead(MESSAGE, [(PREFIX, key(count))])])

    with monkeypatch.context() as patched:
        patched.setattr(tidying, "_remove", remove_and_mark)
        assert not tables.tidy().operations
    assert tables.volumes.has_rows(MESSAGE, PREFIX, key(count))
    assert tables.volumes.first_in(large, MESSAGE, PREFIX, stop_after(PREFIX)) == key(count // 2)
    await store.tidy()
    assert not large.path.exists()
    assert not list(tables.metadata.dead_ranges())


async def test_each_piece_of_what_is_swept_is_durable_before_the_rest_and_before_it_is_forgotten(store, monkeypatch):
    large = await of_version_0_1(store)
    events = []
    shrink, batch = Volumes.shrink, Database.batch

    def noted(self, *, sync):
        if self is large.database:
            events.append("synced" if sync else "not synced")
        return batch(self, sync=sync)

    monkeypatch.setattr(Volumes, "shrink", lambda *given: events.append("forgotten") or shrink(*given))
    monkeypatch.setattr(Database, "batch", noted)
    monkeypatch.setattr(tidying, "_PIECE_ROWS", 1)
    await store.tidy()
    assert len(events) > 2
    assert {*events[:-1]} == {"synced"}
    assert events[-1] == "forgotten"


# --- the next volume, and the list ------------------------------------------------------------------


async def test_a_next_volume_that_could_not_be_listed_is_made_by_a_later_attempt(store, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "/var/lib/store/volumes/LIST.tmp")

    kept = []
    with monkeypatch.context() as patched:
        patched.setattr(volumes_module, "write_list", fail)
        with pytest.raises(StoreError, match=r"No space left on device: 'LIST\.tmp'") as caught:
            await filled(store, 20)
        # Somebody keeps the exception, and with it the frames that it went through.
        kept.append(caught.value)
    await filled(store, 40)
    assert len(await everything(store)) == 40
    assert len(store._db.volumes.all) > 4


def test_a_next_volume_that_cannot_be_made_is_told_without_folders_and_with_its_hint(tables, monkeypatch):
    real = Database.__init__

    def fail(self, path, *_, **__):
        monkeypatch.setattr(Database, "__init__", real)
        raise StoreFull(f"{path}: No space left on device", hint="free some space")

    monkeypatch.setattr(Database, "__init__", fail)
    with pytest.raises(StoreError) as caught:
        tables.volumes.prepare()
    assert caught.value.detail == "the next volume cannot be made: 00000002: No space left on device"
    assert caught.value.hint == "free some space"


def fail_behind_the_list(monkeypatch) -> None:
    """Let the folder not be synced once the new list is in it."""

    def fail(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(volume_list, "sync_directory", fail)


@pytest.mark.parametrize("power_cut", [False, True])
async def test_when_the_new_list_is_perhaps_not_durable_no_volume_of_either_list_goes(tmp_path, monkeypatch, power_cut):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await filled(store, 40)
        await store.discard(MESSAGE, [key(number) for number in range(40) if number % 4])
        listed = tmp_path / "data" / "volumes" / "LIST"
        before = listed.read_bytes()
        with monkeypatch.context() as patched:
            fail_behind_the_list(patched)
            with pytest.raises(StoreError, match=r"listing the volumes: .*Input/output error"):
                await store.tidy()
        assert listed.read_bytes() != before
    if power_cut:
        listed.write_bytes(before)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(0, 40, 4)]
        folders = {path.name for path in listed.parent.iterdir() if path.is_dir()}
        assert folders == {volume.path.name for volume in store._db.volumes.all}


def test_a_next_volume_that_is_perhaps_listed_is_not_made_again(tables, tmp_path, monkeypatch):
    tables.write([message(1)])
    with monkeypatch.context() as patched:
        fail_behind_the_list(patched)
        with pytest.raises(StoreError, match="Input/output error"):
            tables.volumes.prepare()
    made = (tmp_path / "volumes" / "00000002").stat().st_ino
    with pytest.raises(StoreError, match="perhaps not written"):
        tables.volumes.seal()
    assert (tmp_path / "volumes" / "00000002").stat().st_ino == made
    tables.close()
    again = LevelDBTables(tmp_path, TINY)
    assert again.get(MESSAGE, key(1)) is not None
    assert again.volumes.newest.number == 2
    again.close()


# --- leaving while tidying --------------------------------------------------------------------------


@pytest.mark.parametrize("doing", ["rewriting", "sweeping", "dropping"])
async def test_tidying_ends_at_its_next_piece_when_the_store_is_closed_and_that_is_no_failure(
    store, tmp_path, monkeypatch, doing
):
    await filled(store, 40)
    tables = store._db
    first = tables.volumes.all[0]
    if doing == "dropping":
        await store.drop(MESSAGE, [(PREFIX, key(30))])
    elif doing == "rewriting":
        await store.discard(MESSAGE, [key(number) for number in range(40) if number % 4])
    else:
        first.large = True
        await store.drop(MESSAGE, [(PREFIX, key(first.rows - 1))])
    expected = await everything(store)
    step = {"rewriting": "successor", "sweeping": "dead_parts", "dropping": "replace"}[doing]
    real = getattr(Volumes, step)
    begun = []

    def leave(*arguments):
        begun.append(step)
        tables.leaving = True
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(Volumes, step, leave)
        with pytest.raises(Stopped):
            await store.tidy()
    assert begun == [step]
    assert tables.upkeep.failed is None
    if doing == "sweeping":
        assert tables.volumes.first_in(first, MESSAGE, PREFIX, stop_after(PREFIX)) == key(0)
    await store.aclose()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as again:
        assert await everything(again) == expected


async def test_a_store_that_cannot_be_opened_again_is_told_without_folders(store, tmp_path):
    await filled(store, 40)
    store._db.upkeep.failed = StoreError("the disk says no")
    (tmp_path / "data" / "volumes" / "00000001").rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot be opened again") as caught:
        await store.claim(NAME)
    assert "00000001" in caught.value.detail
    assert "/" not in caught.value.detail

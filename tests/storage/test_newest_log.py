"""The newest log is preallocated, although nothing may depend on that, and is synced early."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from random import Random

import plyvel
import pytest
from disks import newest_log, write_commits, written

from plainsong.protocol.effects import Put, Table
from storage.base import StoreError
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.engine.database import Database
from storage.leveldb.engine.log_format import BLOCK_BYTES, HEADER
from storage.leveldb.engine.newest_log import LARGE_BYTES, SMALL_BYTES, STEP_BYTES, ZEROS_BYTES, NewestLog
from tests.storage.contract import NAME, everything
from tests.storage.old_logs import removed_logs_freed
from tests.storage.test_leveldb_failures import no_file_beyond
from tests.storage.tiny_volumes import TINY, fill, settled

VOLUME = Path("volumes") / "00000001"
SMALL = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16))
SMALL_STEP = (1 << 16) // 4


async def test_small_commits_do_not_change_the_length_of_the_log(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await write_commits(store, 1)
        log = newest_log(tmp_path / "data" / VOLUME)
        length = log.stat().st_size
        assert length >= STEP_BYTES > written(log)
        await write_commits(store, 50, first=1)
        assert newest_log(tmp_path / "data" / VOLUME) == log
        assert log.stat().st_size == length


async def test_the_room_is_not_counted_as_space(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await write_commits(store, 1)
        store._db.measure()
        assert newest_log(tmp_path / "data" / VOLUME).stat().st_size >= STEP_BYTES
        assert store.statistics().bytes < STEP_BYTES / 4


async def test_small_commits_find_zeros_where_they_are_written_and_large_ones_do_not(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        log = newest_log(tmp_path / "data" / VOLUME)
        blocks = set()
        for number in range(100):
            await write_commits(store, 1, value=b"v" * 100, first=number)
            blocks.add(log.stat().st_blocks)
        assert written(log) > ZEROS_BYTES // 2
        assert len(blocks) <= 4
        before = log.stat().st_blocks
        for number in range(100, 103):
            await write_commits(store, 1, value=b"v" * (SMALL_BYTES // 4), first=number)
            assert log.stat().st_blocks > before
            before = log.stat().st_blocks


async def test_a_log_is_made_longer_again_and_so_is_one_that_leveldb_begins(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        volume = tmp_path / "data" / VOLUME
        lengths: dict[str, set[int]] = {}
        # Fill the write buffer several times.
        for number in range(300):
            await write_commits(store, 1, value=b"v" * 100, first=number)
            log = newest_log(volume)
            length = log.stat().st_size
            assert length <= written(log) + SMALL_STEP + 4096
            lengths.setdefault(log.name, set()).add(length)
    logs = sorted(lengths)
    assert len(logs) > 3
    # Each log took about 65 commits of 1.3 kB. At most twelve extended it before preallocation; later ones, in steps.
    assert all(len(lengths[name]) < 25 for name in logs[:-1])


async def test_sealed_volumes_have_no_log_that_takes_room(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 60)
        await settled(store)
        sealed = [volume.path for volume in store._db.sets.current.all[:-1]]
        assert len(sealed) > 3
        assert [newest_log(path).stat().st_size for path in sealed] == [0] * len(sealed)


async def test_logs_of_sealed_volumes_are_not_held_open_once_leveldb_has_removed_them(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 60)
        await settled(store)
        assert len(store._db.sets.current.all) > 3
        removed_logs_freed(tmp_path)


async def test_a_log_that_cannot_be_made_longer_grows_with_each_commit(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        with no_file_beyond(STEP_BYTES // 2):
            await write_commits(store, 20)
        log = newest_log(tmp_path / "data" / VOLUME)
        assert written(log) <= log.stat().st_size < written(log) + 4096
        assert len(await everything(store)) == 200


async def test_a_large_commit_makes_no_room_since_its_sync_writes_the_journal_anyway(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as store:
        claim = await store.claim(NAME)
        await store.write(
            [Put(Table.MESSAGE, b"", [b"%04d" % n for n in range(100)], [b"v" * 1000] * 100)], claim=claim
        )
        log = newest_log(tmp_path / "data" / VOLUME)
        assert LARGE_BYTES < written(log) <= log.stat().st_size < written(log) + 100


async def test_leveldb_itself_opens_what_a_stopped_store_and_a_killed_one_left(tmp_path):
    """Older versions, which do not preallocate, can open it, too."""
    async with await LevelDBStore.open(tmp_path / "data") as store:
        await write_commits(store, 5)
        rows = await everything(store)
        log = newest_log(tmp_path / "data" / VOLUME)
        killed = log.read_bytes()
    assert log.stat().st_size >= STEP_BYTES
    assert log.read_bytes() == killed
    database = plyvel.DB(str(tmp_path / "data" / VOLUME), paranoid_checks=True)
    found = list(database.prefixed_db(bytes([Table.MESSAGE])).iterator())
    database.close()
    assert found == rows


def test_the_content_of_a_log_stays_and_only_the_newest_gets_room(tmp_path):
    old, new = tmp_path / "000009.log", tmp_path / "000010.log"
    old.write_bytes(b"old")
    new.write_bytes(b"content" * 1000)
    room = NewestLog(tmp_path, 5000)
    for _ in range(3):
        room.take(2000)
    assert old.read_bytes() == b"old"
    assert new.read_bytes() == b"content" * 1000 + bytes(HEADER.size + 2000 + 5000)
    room.take(2000)
    assert new.stat().st_size == 7000 + 4 * (HEADER.size + 2000) + 5000
    room.let_go()


@pytest.mark.parametrize("name", ["", "no-log"])
def test_without_a_log_nothing_is_made(tmp_path, name):
    if name:
        (tmp_path / name).write_bytes(b"")
    NewestLog(tmp_path, 5000).take(100)
    NewestLog(tmp_path / "missing", 5000).take(100)
    assert [each.name for each in tmp_path.iterdir()] == ([name] if name else [])


# --- syncs that begin early ---------------------------------------------------------------------------


class Syncs:
    """Records the files synced by separate descriptors, and their content at the sync."""

    def __init__(self, monkeypatch):
        self.synced = {}
        sync = os.fdatasync

        def noted(descriptor):
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            self.synced[path.name] = b""
            with suppress(FileNotFoundError):  # LevelDB has removed an older one
                self.synced[path.name] = path.read_bytes()
            sync(descriptor)

        monkeypatch.setattr(os, "fdatasync", noted)

    def commit(self, database, key, value):
        """Write a row without a sync, and sync it by another descriptor; return the files synced for it."""
        self.synced.clear()
        early = database.syncs_early
        with database.batch(sync=not early) as batch:
            batch.put(key, value)
            database.make_room(batch.approximate_size())
        if early:
            database.sync_while(lambda: None)
        return self.synced if early else None


@pytest.fixture
def database(tmp_path):
    opened = Database(tmp_path / "data", SMALL.volume_shape(), create=True)
    yield opened
    opened.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("length", [10, 3000, BLOCK_BYTES - 40, BLOCK_BYTES + 100, LARGE_BYTES - 1000])
def test_data_synced_early_is_in_a_log_that_is_synced_whenever_leveldb_begins_another(database, monkeypatch, length):
    syncs = Syncs(monkeypatch)
    rng = Random(length)
    early, several = 0, 0
    for number in range(600 if length <= 3000 else 60):
        value = rng.randbytes(length + number % 40)
        synced = syncs.commit(database, b"\2%06d" % number, value)
        if synced is not None:
            early += 1
            several += len(synced) > 1
            piece = value[: min(len(value), 1000)]
            assert any(piece in content for content in synced.values()), number
    removed_logs_freed(database._path)
    assert early >= (300 if length <= 3000 else 15), [early, several]
    if length == 3000:
        assert several > 3


def test_an_unannounced_batch_makes_leveldb_sync_the_next_one_itself(database, monkeypatch):
    syncs = Syncs(monkeypatch)
    syncs.commit(database, b"\2a", b"1")
    assert len(syncs.commit(database, b"\2b", b"2")) == 1
    with database.batch(sync=True) as batch:
        batch.put(b"\2c", b"3")
    assert not database.syncs_early
    assert syncs.commit(database, b"\2d", b"4") is None


def test_where_a_record_is_not_found_all_logs_are_synced(database, monkeypatch):
    syncs = Syncs(monkeypatch)
    syncs.commit(database, b"\2a", b"1")
    database._log._end += 100  # simulates a wrong count
    database._log._length = 1 << 30
    assert any(b"a" + b"\x05value" in content for content in syncs.commit(database, b"\2a", b"value").values())
    assert not database.syncs_early
    assert syncs.commit(database, b"\2b", b"2") is None


def test_after_a_failed_sync_no_descriptor_stays_open_and_the_database_takes_no_more_writes(database, monkeypatch):
    syncs = Syncs(monkeypatch)
    syncs.commit(database, b"\2a", b"1")
    opened = descriptors()

    def fails(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdatasync", fails)
    with pytest.raises(StoreError, match="No space left"):
        syncs.commit(database, b"\2b", b"2")
    assert descriptors() == opened
    with pytest.raises(StoreError, match="a write failed before"):
        syncs.commit(database, b"\2c", b"3")


def test_a_descriptor_whose_close_fails_fails_no_commit_that_was_synced(database, monkeypatch):
    """A network file system reports failures of earlier writes at close."""
    syncs = Syncs(monkeypatch)
    syncs.commit(database, b"\2a", b"1")
    real, failed = os.close, []

    def fails(descriptor):
        is_log = os.readlink(f"/proc/self/fd/{descriptor}").endswith(".log")
        real(descriptor)
        if is_log:
            failed.append(descriptor)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", fails)
    database._log._end += 100  # simulates a wrong count: all logs are opened, synced and closed
    database._log._length = 1 << 30
    assert syncs.commit(database, b"\2b", b"2")
    assert failed
    database.close()
    assert len(failed) > 1, "its own descriptor of the log, too"
    again = Database(database._path, SMALL.volume_shape(), create=False)
    assert [key for key, _ in again.own_rows(b"\2", b"\3")] == [b"\2a", b"\2b"]
    again.close()


def test_zeros_are_never_written_over_what_was_not_announced(database, monkeypatch):
    """Simulates that LevelDB has written more than was counted."""
    syncs = Syncs(monkeypatch)
    syncs.commit(database, b"\2a", b"1")
    syncs.commit(database, b"\2b", b"2")
    real = database._db
    with real.write_batch(sync=True) as batch:
        batch.put(b"\2unannounced", b"value")
    database._log._zeroed = 0
    assert syncs.commit(database, b"\2c", b"3") is not None
    assert not database.syncs_early
    database.close()
    found = plyvel.DB(str(database._path), paranoid_checks=True)
    assert [key for key, _ in found] == [b"\2a", b"\2b", b"\2c", b"\2unannounced"]
    found.close()


def test_without_room_for_zeros_commits_still_work(database, monkeypatch):
    syncs = Syncs(monkeypatch)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    for number in range(2000):
        syncs.commit(database, b"\2%04d" % number, b"v" * 100)
    with database.rows(Table.MESSAGE, b"", b"\xff") as rows:
        assert len(list(rows)) == 2000

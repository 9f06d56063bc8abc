"""The log that is written is longer than what was written to it, costs no space, and nothing depends on that."""

from __future__ import annotations

from pathlib import Path

import plyvel
import pytest
from disks import newest_log, write_commits, written

from plainsong.protocol.effects import Put, Table
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.room_ahead import LARGE_BYTES, STEP_BYTES, RoomAhead
from tests.storage.contract import NAME, everything
from tests.storage.test_leveldb_failures import no_file_beyond
from tests.storage.tiny_volumes import TINY, fill, settled

VOLUME = Path("volumes") / "00000001"
SMALL = LevelDBOptions(write_buffer_bytes=1 << 16)
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


async def test_a_log_is_made_longer_again_and_so_is_one_that_leveldb_begins(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", SMALL) as store:
        volume = tmp_path / "data" / VOLUME
        lengths: dict[str, set[int]] = {}
        # The write buffer is filled several times over.
        for number in range(300):
            await write_commits(store, 1, value=b"v" * 100, first=number)
            log = newest_log(volume)
            length = log.stat().st_size
            assert length <= written(log) + SMALL_STEP + 4096
            lengths.setdefault(log.name, set()).add(length)
    logs = sorted(lengths)
    assert len(logs) > 3
    # Of about 65 commits of 1.3 kB each log grew with those before its room was made, twelve at most, and then by steps.
    assert all(len(lengths[name]) < 25 for name in logs[:-1])


async def test_sealed_volumes_have_no_log_that_takes_room(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 60)
        await settled(store)
        sealed = [volume.path for volume in store._db.volumes.all[:-1]]
        assert len(sealed) > 3
        assert [newest_log(path).stat().st_size for path in sealed] == [0] * len(sealed)


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


async def test_leveldb_itself_opens_what_a_stopped_store_and_a_killed_one_have_left(tmp_path):
    """As an older version does, which knows nothing of the room."""
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


def test_what_a_log_holds_stays_and_only_the_newest_gets_room(tmp_path):
    old, new = tmp_path / "000009.log", tmp_path / "000010.log"
    old.write_bytes(b"old")
    new.write_bytes(b"content" * 1000)
    room = RoomAhead(tmp_path, 5000)
    for _ in range(3):
        room.take(2000)
    assert old.read_bytes() == b"old"
    assert new.read_bytes() == b"content" * 1000 + bytes(7000)
    room.take(2000)
    assert new.stat().st_size == 7000 + 2 * 7000


@pytest.mark.parametrize("name", ["", "no-log"])
def test_without_a_log_nothing_is_made(tmp_path, name):
    if name:
        (tmp_path / name).write_bytes(b"")
    RoomAhead(tmp_path, 5000).take(100)
    RoomAhead(tmp_path / "missing", 5000).take(100)
    assert [each.name for each in tmp_path.iterdir()] == ([name] if name else [])

"""Directories left by a race in version 0.1, and removals that a disk temporarily refuses."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import trio

from plainsong.protocol.effects import Delete, Put, RollBack, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import stop_after
from storage.base import Claim, StoreError, StoreUnusable, Unreadable
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.engine.database import Database
from storage.leveldb.volume_list import read_list, write_list
from tests.patience import PATIENCE_S
from tests.storage.contract import MESSAGE, METADATA, NAME, everything
from tests.storage.rolling_contract import under
from tests.storage.tiny_volumes import PREFIX, TINY, fill, key, settled


async def test_a_volume_with_rows_that_the_list_has_lost_is_part_of_the_store_again(tmp_path, caplog):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        expected = await everything(store)
        newest = store._db.sets.current.newest.name
    folder = tmp_path / "data" / "volumes"
    listed = read_list(folder)
    while listed[-1].folder != newest:
        listed.pop()  # the next volume, which is still empty
    (folder / f"{newest}.index").unlink()
    write_list(folder, listed[:-1])
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert await everything(store) == expected
        assert await store.get(METADATA, b"last") == b"39"
        await fill(store, 10, 40)
    assert "a volume missing from the list was added again" in caplog.text
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert len(await everything(store)) == 50


async def test_a_lost_volume_that_cannot_be_opened_for_a_moment_is_not_removed(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        expected = await everything(store)
        newest = store._db.sets.current.newest
    folder = tmp_path / "data" / "volumes"
    listed = [each for each in read_list(folder) if each.number < newest.number]
    (folder / f"{newest.name}.index").unlink()
    write_list(folder, listed)
    with closing(Database(newest.path, newest.shape, create=False)), pytest.raises(StoreUnusable, match="lock"):
        await LevelDBStore.open(tmp_path / "data", TINY)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert await everything(store) == expected


async def test_a_rewrite_does_not_begin_with_the_rows_of_a_copy_that_could_not_be_removed(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 40)
        await settled(store)
        keeper = store._db.keeper
        source = store._db.sets.current.sealed[0]
        left = source.path.with_name(f"{source.name}.1")
        shutil.copytree(source.path, left)
        with unremovable(left):
            target = keeper.listed.successor([source])
        assert not target.path.exists()


async def test_a_next_volume_is_not_made_over_a_folder_that_cannot_be_removed(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        keeper = store._db.keeper
        left = keeper.listed._directory / f"{keeper.listed._listed[-1].number + 1:08d}"
        shutil.copytree(store._db.sets.current.newest.path, left)
        with unremovable(left), pytest.raises(StoreError, match=r"making the next volume: .*File exists"):
            keeper.listed.make_next()
        assert [each.path for each in keeper.listed._listed] == [store._db.sets.current.newest.path]


@contextmanager
def unremovable(folder):
    """Make the disk refuse to remove anything in a folder."""
    real = os.unlink

    def unlink(path, *given, **options):
        if options.get("dir_fd") is not None or folder in Path(path).parents:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *given, **options)

    with mock.patch.object(os, "unlink", unlink):
        yield


async def test_rows_written_to_a_sealed_volume_after_its_index_are_found(tmp_path):
    """The other half of the race: the volume before the lost one was written again."""
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 1)
    index = tmp_path / "data" / "volumes" / "00000001.index"
    old = index.read_bytes()
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await fill(store, 1, 1)
    index.write_bytes(old)
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        assert [found for found, _ in await everything(store)] == [key(number) for number in range(2)]


async def test_a_removal_whose_pack_cannot_be_read_for_a_moment_is_not_acknowledged(tmp_path, monkeypatch):
    suffixes = [pack_position(number, 0) for number in range(100)]
    async with await LevelDBStore.open(tmp_path / "data", LevelDBOptions()) as store:
        await store.write([Put(MESSAGE, PREFIX, suffixes, [b"\x00\x50m"] * 100)], claim=None)

        def fail(*_):
            raise Unreadable("reading a row: Input/output error")

        with monkeypatch.context() as patched:
            patched.setattr(Database, "first_from", fail)
            with pytest.raises(StoreError, match="Input/output error"):
                await store.write([Delete(MESSAGE, [key(5)])], claim=None)
        await store.claim(NAME)
        assert len(await everything(store)) == 100
        await store.write([Delete(MESSAGE, [key(5)])], claim=None)
        assert key(5) not in dict(await everything(store))


async def with_a_volume_that_cannot_be_opened(path) -> str:
    """Make a stopped store in which a sealed volume has lost a table; return that volume's name."""
    async with await LevelDBStore.open(path, TINY) as store:
        claim = await store.claim(NAME)
        for number in range(40):
            await store.write([Put(MESSAGE, PREFIX, [pack_position(number, 0)], [under(7, b"v" * 90)])], claim=claim)
            await settled(store)
    table = sorted((path / "volumes").glob("*/*.ldb"))[1]
    table.unlink()
    return table.parent.name


async def test_a_volume_that_cannot_be_opened_is_not_tidied_and_nothing_else_fails(tmp_path):
    await with_a_volume_that_cannot_be_opened(tmp_path / "data")
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        await store.drop(MESSAGE, [(PREFIX, key(39))])
        for number in range(3):
            await store.tidy()
            await store.write([put_one(METADATA, b"other", b"%d" % number)], claim=None)
        assert store._db.failed is None


async def test_a_rollback_whose_rows_cannot_be_read_fails_alone(tmp_path):
    await with_a_volume_that_cannot_be_opened(tmp_path / "data")
    async with await LevelDBStore.open(tmp_path / "data", TINY) as store:
        completed, done = trio.open_memory_channel(2)
        store.begin([RollBack(PREFIX, stop_after(PREFIX), 7)], completed.send_nowait, claim=Claim(NAME, 0))
        store.begin([put_one(METADATA, b"other", b"1")], completed.send_nowait, claim=Claim(NAME, 0))
        with trio.fail_after(PATIENCE_S):
            errors = [await done.receive(), await done.receive()]
        assert sorted(error is None for error in errors) == [False, True]
        await store.write([put_one(METADATA, b"other", b"2")], claim=None)

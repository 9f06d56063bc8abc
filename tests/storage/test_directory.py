"""Opening the data directory: the processes that may open it, and the errors for those that may not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from disks import fill, make_read_only, small_disk, snapshot, write_commits

from storage.base import StoreDamaged, StoreFull, StoreInUse, StoreReadOnly, StoreTooNew, StoreUnusable
from storage.directory import FORMAT, FORMAT_NAME, LOCK_NAME, UNFINISHED_FORMAT_NAME, DataDirectory
from storage.leveldb import LevelDBStore
from tests.storage.contract import everything

ROOT = Path(__file__).parents[2]


async def made(path: Path, commits: int = 5) -> Path:
    """A stopped store with some rows."""
    async with await LevelDBStore.open(path) as store:
        await write_commits(store, commits)
    return path


async def refused(path: Path, kind: type[StoreUnusable]) -> StoreUnusable:
    """Return the error of an attempt to open; nothing below ``path`` may have changed."""
    before = snapshot(path)
    with pytest.raises(kind) as caught:
        await LevelDBStore.open(path)
    assert snapshot(path) == before
    assert caught.value.hint
    assert str(path) in caught.value.detail
    return caught.value


async def test_a_directory_and_its_parents_are_created_for_the_owner_only(tmp_path):
    path = await made(tmp_path / "a" / "b" / "data")
    assert path.stat().st_mode & 0o777 == 0o700
    assert json.loads((path / FORMAT_NAME).read_text())["format"] == FORMAT
    assert {entry.name for entry in path.iterdir()} == {FORMAT_NAME, LOCK_NAME, "metadata", "volumes"}


async def test_an_empty_directory_with_lost_and_found_becomes_a_store(tmp_path):
    (tmp_path / "lost+found").mkdir()
    await made(tmp_path)


async def test_the_error_for_a_second_store_in_one_process_names_the_holder_of_the_directory(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data", address="127.0.0.1:7420"):
        error = await refused(tmp_path / "data", StoreInUse)
    assert f"process {os.getpid()} on " in error.detail
    assert "127.0.0.1:7420" in error.detail
    assert " since 20" in error.detail
    assert "--data-dir" in error.hint


@contextmanager
def holder(path: Path):
    """Another process that holds ``path``."""
    code = (
        "import sys, time; from pathlib import Path; from storage.directory import DataDirectory;"
        "d = DataDirectory.open(Path(sys.argv[1])); print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout.readline() == b"in\n"
        try:
            yield child
        finally:
            child.kill()


async def test_a_directory_is_refused_while_another_process_uses_it_and_opens_once_that_process_is_killed(tmp_path):
    path = await made(tmp_path / "data")
    with holder(path) as child:
        error = await refused(path, StoreInUse)
        assert f"process {child.pid} on " in error.detail
        child.send_signal(signal.SIGKILL)
        child.wait()
        async with await LevelDBStore.open(path) as store:
            assert len(await everything(store)) == 50


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"pid": "x"}', b'{"pid":1,"since_s":1e400,"host":1}'])
async def test_an_unreadable_lock_file_is_ignored(tmp_path, said):
    path = await made(tmp_path / "data")
    (path / LOCK_NAME).write_bytes(said)
    async with await LevelDBStore.open(path):
        (path / LOCK_NAME).write_bytes(said)
        assert "a process that has not identified itself" in (await refused(path, StoreInUse)).detail


async def test_a_newer_format_is_refused_before_anything_is_touched(tmp_path):
    path = await made(tmp_path / "data")
    (path / FORMAT_NAME).write_text(json.dumps({"format": FORMAT + 1, "written_by": "9.1"}))
    error = await refused(path, StoreTooNew)
    assert "9.1" in error.detail


@pytest.mark.parametrize(
    "said", [b"", b"\x00\x01", b"[]", b"7", b'{"format": "1"}', b'{"format": 0}', b'{"format": true}']
)
async def test_an_unreadable_format_is_damage(tmp_path, said):
    path = await made(tmp_path / "data")
    (path / FORMAT_NAME).write_bytes(said)
    await refused(path, StoreDamaged)


async def test_rows_without_a_format_are_damage_and_not_a_new_store(tmp_path):
    path = await made(tmp_path / "data")
    (path / FORMAT_NAME).unlink()
    await refused(path, StoreDamaged)


async def test_a_directory_of_another_user_is_refused(tmp_path):
    (tmp_path / "holiday.jpg").write_bytes(b"\xff\xd8")
    error = await refused(tmp_path, StoreUnusable)
    assert "holiday.jpg" in error.detail


async def test_a_file_is_refused_as_a_directory(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnusable, match="is a file"):
        await LevelDBStore.open(tmp_path / "file")


async def test_an_interrupted_creation_is_finished_by_the_next(tmp_path):
    path = tmp_path / "data"
    DataDirectory.open(path).close()
    (path / "rows").mkdir()
    (path / UNFINISHED_FORMAT_NAME).write_bytes(b"{")
    await made(path, commits=0)
    (path / FORMAT_NAME).unlink()
    await made(path)


async def test_a_read_only_disk_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk:
        await made(disk / "data")
        make_read_only(disk)
        await refused(disk / "data", StoreReadOnly)
        with pytest.raises(StoreReadOnly):
            await LevelDBStore.open(disk / "new")


async def test_a_full_disk_is_refused_and_opens_once_there_is_room(tmp_path):
    with small_disk(tmp_path / "disk", 8) as disk:
        await made(disk / "data", commits=50)
        ballast = fill(disk)
        with pytest.raises(StoreFull) as caught:
            await LevelDBStore.open(disk / "data")
        assert "free some space" in caught.value.hint
        with pytest.raises(StoreFull):
            await LevelDBStore.open(disk / "new")
        ballast.unlink()
        async with await LevelDBStore.open(disk / "data") as store:
            assert len(await everything(store)) == 500

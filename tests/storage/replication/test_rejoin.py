"""``rejoin``: killed at any step, its repetition finishes, or the daemon starts as one or the other; no row is lost."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from storage.directory import DataDirectory, set_aside
from storage.leveldb import LevelDBStore
from storage.replication.protocol import ROOT
from storage.replication.record import Record, read_record, rejoin, write_record
from tests.storage.contract import NAME
from tests.storage.replication.shipped import rows_of
from tests.storage.tiny_volumes import TINY, message, settled

#: The calls at which a process is killed.
CALLS = ("mkdir", "rename", "replace", "fsync", "unlink")
#: More than ``rejoin`` makes.
MOST_STEPS = 60
TIME_MS = 1_000


class Killed(BaseException):
    """The process has ended. No later call of it has an effect."""


@contextmanager
def killed_at(step):
    """Let the process be killed before its n-th call."""
    count = 0

    def counting(real):
        def called(*args, **options):
            nonlocal count
            count += 1
            if count >= step:
                raise Killed
            return real(*args, **options)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, counting(getattr(os, name)))
        yield


async def deposed(directory):
    """Make the directory of a primary; return its rows."""
    async with await LevelDBStore.open(directory, TINY) as store:
        claim = await store.claim(NAME)
        for number in range(1, 20):
            await store.write([message(number)], claim=claim)
            await settled(store)
        rows = await rows_of(store)
    (directory / "scrub.json").write_text("{}")
    write_record(directory, Record("s" * 32, replace(ROOT, epoch=3, commit=20), (bytes(16),)))
    return rows


def joined(directory, now_ms=TIME_MS):
    home = DataDirectory.open(directory)
    try:
        return rejoin(directory, read_record(directory), now_ms)
    finally:
        home.close()


async def rows_in(directory):
    """Return the rows of a store that no longer belongs to any log."""
    with TemporaryDirectory() as folder:
        other = Path(folder) / "data"
        shutil.copytree(directory, other)
        (other / "REPLICATION").unlink()
        async with await LevelDBStore.open(other, TINY) as store:
            return await rows_of(store)


async def test_the_store_of_a_deposed_primary_is_moved_into_a_folder_of_its_directory_and_to_no_other_place(tmp_path):
    rows = await deposed(tmp_path / "data")
    before = read_record(tmp_path / "data")
    aside = joined(tmp_path / "data")
    assert aside == "deposed-1000"
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # it may be a mount point
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "REPLICATION",
        "deposed-1000",
        "plainsong.lock",
    ]
    assert read_record(tmp_path / "data" / aside) == before
    assert (tmp_path / "data" / aside / "scrub.json").exists()
    record = read_record(tmp_path / "data")
    assert (record.store, record.standby, record.place, record.aside) == (before.store, True, ROOT, "")
    assert [event.action for event in record.events] == ["replication.rejoin"]
    assert await rows_in(tmp_path / "data" / aside) == rows


async def test_killed_at_any_step_it_can_be_repeated(tmp_path):
    rows = await deposed(tmp_path / "made")
    for step in range(1, MOST_STEPS):
        directory = tmp_path / f"at-{step}" / "data"
        shutil.copytree(tmp_path / "made", directory)
        try:
            with killed_at(step):
                joined(directory)
        except Killed:
            if read_record(directory).standby and not read_record(directory).aside:
                break
            joined(directory, TIME_MS + 1)
        else:
            break
        await check(directory, rows)
    assert step > 20
    await check(directory, rows)


async def check(directory, rows):
    record = read_record(directory)
    assert (record.standby, record.aside, len(record.events)) == (True, "", 1)
    (store,) = directory.glob("deposed-*/FORMAT")
    assert await rows_in(store.parent) == rows
    home = DataDirectory.open(directory)
    assert home.is_new
    home.close()


async def test_killed_at_any_step_the_directory_is_the_deposed_primarys_or_a_standbys(tmp_path):
    rows = await deposed(tmp_path / "made")
    was_standby = []
    for step in range(1, MOST_STEPS):
        directory = tmp_path / f"at-{step}" / "data"
        shutil.copytree(tmp_path / "made", directory)
        try:
            with killed_at(step):
                joined(directory)
        except Killed:
            pass
        else:
            break
        record = read_record(directory)
        was_standby.append(record.standby)
        home = DataDirectory.open(directory)  # as a start does
        if record.aside:
            set_aside(directory, record.aside)  # as a standby does before it builds
        home.close()
        (store,) = [directory] if not record.standby else [each.parent for each in directory.glob("deposed-*/FORMAT")]
        assert await rows_in(store) == rows
    assert was_standby == sorted(was_standby)
    assert {True, False} == set(was_standby)

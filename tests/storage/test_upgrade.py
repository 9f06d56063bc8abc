"""A data directory of version 0.1 is upgraded in place; a killed upgrade continues at the next start."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import plyvel
import pytest

from plainsong.protocol.effects import Table
from storage import directory as directories
from storage.base import StoreTooNew
from storage.directory import FORMAT_NAME
from storage.leveldb import LevelDBOptions, LevelDBStore, opening, upgrade
from tests.storage.contract import everything

KEPT = Path(__file__).parents[1] / "kept" / "0.1" / "data"


def rows_of_0_1(directory: Path) -> dict[Table, list[tuple[bytes, bytes]]]:
    """Return the rows of version 0.1's single database."""
    with plyvel.DB(str(directory / "rows")) as database:
        rows = list(database)
    return {table: [(key[1:], value) for key, value in rows if key[0] == table] for table in Table}


@pytest.fixture
def kept(tmp_path):
    """A copy of the directory kept from version 0.1, and its rows."""
    rows = rows_of_0_1(shutil.copytree(KEPT, tmp_path / "looked at"))
    assert all(rows.values())
    return shutil.copytree(KEPT, tmp_path / "data"), rows


async def has_all(directory: Path, rows: dict[Table, list[tuple[bytes, bytes]]]) -> None:
    async with await LevelDBStore.open(directory) as store:
        for table in Table:
            assert await everything(store, table) == rows[table]
    assert not (directory / "rows").exists()
    assert not (directory / "metadata.new").exists()


async def test_every_row_is_present_and_stays_present(kept):
    directory, rows = kept
    await has_all(directory, rows)
    await has_all(directory, rows)
    assert json.loads((directory / FORMAT_NAME).read_text())["format"] == directories.FORMAT == 3


async def test_version_0_1_refuses_a_directory_that_was_upgraded(kept, monkeypatch):
    directory, rows = kept
    await has_all(directory, rows)
    monkeypatch.setattr(directories, "FORMAT", 1)
    with pytest.raises(StoreTooNew, match="has format 3"):
        await LevelDBStore.open(directory)


class Killed(BaseException):
    """The process has died."""


def die_at(monkeypatch: pytest.MonkeyPatch, step: int, *, before: bool) -> list[str]:
    """Make the process die before or after change number ``step`` to the files; return a list that collects the steps."""
    done: list[str] = []
    dead: list[str] = []

    def wrap(holder: object, name: str) -> None:
        real = getattr(holder, name)

        def stepwise(*arguments: object, **options: object) -> object:
            if dead:
                raise Killed
            done.append(name)
            number = len(done)
            if number == step + 1 and before:
                dead.append(name)
                raise Killed
            found = real(*arguments, **options)
            if number == step + 1:
                dead.append(name)
                raise Killed
            return found

        monkeypatch.setattr(holder, name, stepwise)

    for holder, name in (
        (upgrade, "sync_directory"),
        (upgrade, "write_format"),
        (upgrade, "make_first"),
        (upgrade, "Database"),
        (opening, "write_list"),
        (opening, "Database"),
        (opening, "sync_directory"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "mkdir"),
        (os, "fsync"),
    ):
        wrap(holder, name)
    return done


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("step", range(26))
async def test_an_upgrade_that_is_killed_at_any_step_continues_at_the_next_start(kept, monkeypatch, step, before):
    directory, rows = kept
    with monkeypatch.context() as patched:
        done = die_at(patched, step, before=before)
        try:
            upgrade.upgrade_directory(directory, LevelDBOptions())
        except Killed:
            pass
        else:
            assert len(done) <= step
    if json.loads((directory / FORMAT_NAME).read_text())["format"] == 1:
        # Version 0.1 can still open it.
        assert rows_of_0_1(shutil.copytree(directory, directory.with_name("back"))) == rows
    await has_all(directory, rows)


@pytest.mark.parametrize("step", [2, 5, 8, 11])
async def test_an_upgrade_may_be_killed_again_and_again(kept, monkeypatch, step):
    directory, rows = kept
    for again in range(step, 0, -1):
        with monkeypatch.context() as patched:
            die_at(patched, again, before=bool(again % 2))
            with contextlib.suppress(Killed):
                upgrade.upgrade_directory(directory, LevelDBOptions())
    await has_all(directory, rows)

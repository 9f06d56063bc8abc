"""An archive of an earlier version becomes a Delta table: each message once, wherever the migration is killed."""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive import archiving, read
from pyspark_plainsong.pipeline.archive.layout import FIRST
from pyspark_plainsong.pipeline.archive.table import TopicTable
from pyspark_plainsong.pipeline.archive.verification import damaged
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter
from pyspark_plainsong.pipeline.files import LocalFiles
from pyspark_plainsong.pipeline.job import Run
from tests.pipeline.archives import BATCHES, TIMES, Archive, raw_ids, rewrite, times_read
from tests.pipeline.former_archives import FOLDER, write_batch


@pytest.fixture(scope="module")
def original(spark, tmp_path_factory):
    """Batches of two days, and the compacted first day, whose sources were not removed yet."""
    root = tmp_path_factory.mktemp("former") / "root"
    start = FIRST
    for number, times in enumerate(BATCHES):
        start = write_batch(spark, root, number, times, start)
    write_batch(spark, root, 9, TIMES[:24], FIRST, day="2026-01-31")
    return root


@pytest.fixture
def root(original, tmp_path):
    shutil.copytree(original, tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def run(spark):
    return Run("archive", spark=spark)


def is_whole(spark, root):
    archive = Archive(root)
    table = archive.table
    assert times_read(spark, archive) == TIMES
    assert len(raw_ids(str(root))) == len(set(raw_ids(str(root)))) == len(TIMES)
    assert damaged(spark, table, table.all_files(), [1], table.days(1)) == {}
    assert not (root / FOLDER).exists()


@pytest.mark.usefixtures("adaptive")
def test_a_migrated_archive_has_each_message_once_and_its_old_folders_are_gone(spark, run, root):
    with pytest.raises(CommandFailed, match="written by an earlier version") as raised:
        read(spark, str(root))
    assert raised.value.code == Exit.STORE
    assert "archive migrate" in str(raised.value.hint)
    archiving.migrate(run, [], str(root), compression="zstd")
    is_whole(spark, root)
    archiving.migrate(run, [], str(root), compression="zstd")
    is_whole(spark, root)
    Archive(root).append(spark, [TIMES[-1] + 1])
    assert times_read(spark, Archive(root)) == [*TIMES, TIMES[-1] + 1]


class Died(Exception):
    """Stands for the death of a run."""


#: Every call of a migration that changes the archive. It makes one for each file and folder that it removes.
CHANGES = ((TopicTable, "create"), (ArchiveWriter, "write"), (TopicTable, "_commit"), (os, "unlink"), (os, "rmdir"))


def test_a_migration_that_dies_before_any_change_continues_there(spark, run, root, monkeypatch):
    """The first run dies before its first change, the second before its second, and so on. Each continues the last."""
    left = 0

    def dying(real):
        def change(*given, **more):
            nonlocal left
            left -= 1
            if left < 0:
                raise Died
            return real(*given, **more)

        return change

    for runs in itertools.count():
        left = runs
        with monkeypatch.context() as patched:
            for owner, name in CHANGES:
                patched.setattr(owner, name, dying(getattr(owner, name)))
            try:
                archiving.migrate(run, [], str(root), compression="zstd")
            except Died:
                continue
        break
    assert runs > 5
    is_whole(spark, root)
    archiving.migrate(run, [], str(root), compression="zstd")
    is_whole(spark, root)


def test_a_folder_that_was_removed_in_part_is_no_gap(spark, run, root, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(LocalFiles, "remove", lambda *given: None)
        archiving.migrate(run, [], str(root), compression="zstd")
    for folder in sorted((root / FOLDER / "batches").glob("*/*"))[:4]:
        shutil.rmtree(folder)
    archiving.migrate(run, [], str(root), compression="zstd")
    is_whole(spark, root)


def test_a_damaged_or_missing_entry_ends_the_migration_and_nothing_is_removed(spark, run, root, capsys):
    shutil.rmtree(root / FOLDER / "days")
    folders = sorted((root / FOLDER / "batches").glob("*/*"))
    file = next(folders[1].glob("*.parquet"))
    sound = file.read_bytes()
    rewrite(file, pq.read_table(file, partitioning=None).slice(1))
    with pytest.raises(CommandFailed, match=r"batch=000000000001-0000 is damaged") as raised:
        archiving.migrate(run, [], str(root), compression="zstd")
    assert raised.value.code == Exit.STORE
    file.write_bytes(sound)
    Path(f"{file.parent}/.{file.name}.crc").unlink(missing_ok=True)
    shutil.move(folders[2], root / "aside")
    with pytest.raises(CommandFailed, match="the archive has no messages from"):
        archiving.migrate(run, [], str(root), compression="zstd")
    shutil.copytree(root / "aside", folders[2])
    shutil.rmtree(root / "aside")
    archiving.migrate(run, [], str(root), compression="zstd")
    is_whole(spark, root)


def test_a_dry_run_changes_nothing(run, root, capsys):
    before = sorted(root.rglob("*"))
    run.dry_run = True
    archiving.migrate(run, [], str(root), compression="zstd")
    assert "orders: would migrate generation 1" in capsys.readouterr().out
    assert sorted(root.rglob("*")) == before

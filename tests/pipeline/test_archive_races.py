"""Two processes that write the same archive at once: nothing is lost, and nothing is read twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive.layout import Range
from pyspark_plainsong.pipeline.archive.upkeep import Compaction, prune
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter
from tests.pipeline.archives import (
    DAY_MS,
    HOUR_MS,
    LOG,
    TIMES,
    Archive,
    after,
    id_at,
    messages,
    times_read,
    two_days,
)

MORE = [DAY_MS + hour * HOUR_MS for hour in (40, 41, 42)]
START = after(id_at(TIMES[-1]))


@pytest.fixture(scope="module")
def original(spark, tmp_path_factory):
    return two_days(spark, tmp_path_factory.mktemp("archive") / "root")


@pytest.fixture
def archive(original, tmp_path):
    shutil.copytree(original.root, tmp_path / "root")
    return Archive(tmp_path / "root")


def test_a_batch_that_is_given_twice_is_committed_once(spark, archive):
    rows, bounds = messages(spark, MORE), Range(START, after(id_at(MORE[-1])))
    assert archive.writer.put(rows, bounds).rows == 3
    assert archive.writer.put(rows, bounds) is None
    assert ArchiveWriter(archive.files, LOG).put(rows, bounds) is None
    assert times_read(spark, archive) == [*TIMES, *MORE]


@pytest.mark.parametrize(("other", "rows"), [(MORE[:1], 2), (MORE[:2], 1), (MORE, None)])
def test_rows_that_another_process_committed_while_a_batch_was_written_are_left_out(
    spark, archive, monkeypatch, other, rows
):
    def overtaken(self, *given):
        written = real(self, *given)
        monkeypatch.setattr(ArchiveWriter, "write", real)
        Archive(Path(archive.root)).append(spark, other)
        return written

    real = ArchiveWriter.write
    monkeypatch.setattr(ArchiveWriter, "write", overtaken)
    batch = archive.writer.put(messages(spark, MORE), Range(START, after(id_at(MORE[-1]))))
    assert (None if batch is None else batch.rows) == rows
    assert times_read(spark, archive) == [*TIMES, *MORE]


def test_a_compaction_while_a_batch_is_written_disturbs_neither(spark, archive, monkeypatch):
    def meanwhile(self, *given):
        written = real(self, *given)
        Compaction(spark, archive.table).run("2026-01-31")
        Compaction(spark, archive.table).run("2026-02-01")
        return written

    real = ArchiveWriter.write
    monkeypatch.setattr(ArchiveWriter, "write", meanwhile)
    assert archive.append(spark, MORE).rows == 3
    assert times_read(spark, archive) == [*TIMES, *MORE]


def test_a_batch_that_arrives_while_a_day_is_compacted_is_kept(spark, archive):
    compaction = Compaction(spark, archive.table)
    sources = compaction.check("2026-02-01")
    made = compaction.write("2026-02-01", sources)
    archive.append(spark, MORE)
    compaction.finish("2026-02-01", sources, made)
    assert times_read(spark, archive) == [*TIMES, *MORE]
    compaction.run("2026-02-01")
    compaction.vacuum(0)
    assert times_read(spark, archive) == [*TIMES, *MORE]


def test_of_two_compactions_of_a_day_one_succeeds(spark, archive):
    one, other = Compaction(spark, archive.table), Compaction(spark, archive.table)
    sources = one.check("2026-01-31")
    made, same = one.write("2026-01-31", sources), other.write("2026-01-31", other.check("2026-01-31"))
    one.finish("2026-01-31", sources, made)
    with pytest.raises(CommandFailed, match="another process compacts 2026-01-31") as raised:
        other.finish("2026-01-31", sources, same)
    assert raised.value.code == Exit.STORE
    assert times_read(spark, archive) == TIMES


def test_a_day_that_is_pruned_while_it_is_compacted_does_not_come_back(spark, archive):
    compaction = Compaction(spark, archive.table)
    sources = compaction.check("2026-01-31")
    made = compaction.write("2026-01-31", sources)
    prune(archive.table, "2026-02-01")
    with pytest.raises(CommandFailed, match="another process compacts 2026-01-31"):
        compaction.finish("2026-01-31", sources, made)
    assert times_read(spark, archive) == TIMES[24:]


def test_a_batch_that_arrives_while_days_are_pruned_is_kept(spark, archive):
    table = archive.table
    archive.append(spark, MORE)
    prune(table, "2026-02-01")
    assert times_read(spark, archive) == [*TIMES[24:], *MORE]


def test_a_table_that_went_back_during_a_run_ends_it_and_leaves_no_gap(spark, archive, original):
    archive.append(spark, MORE[:1])
    shutil.rmtree(archive.root)
    shutil.copytree(original.root, archive.root)  # a backup was restored
    bounds = Range(after(id_at(MORE[0])), after(id_at(MORE[-1])))
    with pytest.raises(CommandFailed, match="has gone back to an older version during the run"):
        ArchiveWriter(archive.files, LOG).put(messages(spark, MORE[1:]), bounds)
    assert times_read(spark, archive) == TIMES


def test_rows_outside_of_their_range_are_not_committed(spark, archive):
    version = archive.table.version
    with pytest.raises(CommandFailed, match="has ids outside its range"):
        archive.writer.put(messages(spark, MORE), Range(START, after(id_at(MORE[1]))))
    assert archive.table.version == version

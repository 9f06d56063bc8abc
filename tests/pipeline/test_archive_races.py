"""Two who write the same archive at once, and what vanishes under one's hands: nothing is lost, nothing read twice."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive import archiving, layout, read, reading
from pyspark_plainsong.pipeline.archive.compaction import Compaction, plan
from pyspark_plainsong.pipeline.archive.reading import load_manifests, stats_of
from pyspark_plainsong.pipeline.job import Run
from pyspark_plainsong.pipeline.locks import Busy, busy
from tests.pipeline.archives import (
    BATCHES,
    DAY_MS,
    HOUR_MS,
    LOG,
    TIMES,
    Archive,
    after,
    batch_folder,
    id_at,
    messages,
    times_read,
    two_days,
)


@pytest.fixture(scope="module")
def original(spark, tmp_path_factory):
    return two_days(spark, tmp_path_factory.mktemp("archive") / "root")


@pytest.fixture
def archive(original, tmp_path):
    shutil.copytree(original.root, tmp_path / "root")
    return Archive(tmp_path / "root")


@pytest.fixture
def compaction(spark, archive):
    return Compaction(spark, archive.files, LOG)


def test_two_compactions_at_once_spoil_nothing(spark, archive, compaction):
    """A lock prevents this; without it, each writes into a folder of its own, however their steps interleave."""
    other = Compaction(spark, archive.files, LOG)
    (day,), (same,) = plan(compaction.entries()), plan(other.entries())
    written = compaction.write(day)
    begun = other.write(same)
    compaction.finish(day, written)
    assert times_read(spark, archive) == TIMES
    other.finish(same, begun)
    assert times_read(spark, archive) == TIMES
    assert compaction.sweep(0) == 4  # three batches, and the day that was written last
    assert times_read(spark, archive) == TIMES


def test_a_second_compaction_of_a_topic_is_refused_with_the_holder(spark, archive):
    run = Run("archive", spark=spark)
    with archive.files.lock(layout.lock_file("default", "orders", "compacting"), "it", print):
        before = sorted(Path(archive.root).rglob("*"))
        with pytest.raises(Busy, match=r"days of default:orders is already being written, by process \d+ on") as raised:
            archiving.compact(run, [], archive.root, compression="zstd")
        assert raised.value.code == Exit.STORE
        assert sorted(Path(archive.root).rglob("*")) == before
    archiving.compact(run, [], archive.root, compression="zstd")
    assert [entry.kind for entry in load_manifests(archive.files)].count("day") == 1


@pytest.mark.parametrize("what", ["all", "one file"])
def test_a_day_whose_files_disappeared_while_it_was_read_back_gets_no_manifest(
    spark, archive, compaction, monkeypatch, what
):
    (day,) = plan(compaction.entries())
    folder = compaction.write(day)

    def counted_then_lost(rows):
        stats = stats_of(rows)
        if what == "all":
            archive.files.remove(folder)
            (Path(archive.root) / folder).mkdir()
        else:
            next((Path(archive.root) / folder).glob("*.parquet")).unlink()
        return stats

    monkeypatch.setattr(reading, "stats_of", counted_then_lost)
    with pytest.raises(CommandFailed, match="was changed by another process while it was written"):
        compaction.finish(day, folder)
    monkeypatch.undo()
    compaction.sweep(0)
    assert times_read(spark, archive) == TIMES


def test_nothing_is_removed_for_an_entry_that_cannot_replace_it(spark, archive, compaction):
    (day,) = plan(compaction.entries())
    folder = Path(archive.root) / compaction.run(day).folder
    next(folder.glob("*.parquet")).unlink()
    with pytest.raises(CommandFailed, match="is missing; what it replaces was not removed"):
        compaction.sweep(0)
    with pytest.raises(CommandFailed, match=r"is damaged: .* is missing"):
        read(spark, archive.root)
    shutil.rmtree(folder)  # as the hint says
    assert times_read(spark, archive) == TIMES
    compaction.run(day)
    compaction.sweep(0)
    assert times_read(spark, archive) == TIMES


def test_an_entry_that_is_altered_fails_its_readers_at_once(spark, archive):
    file = next(batch_folder(archive, 1).glob("*.parquet"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(CommandFailed, match=r"batch=000000000001-\w+ is damaged: .* bytes, not"):
        read(spark, archive.root)
    assert read(spark, archive.root, end=id_at(TIMES[7])).count() == 7  # of which it has none


def test_a_process_that_has_lost_its_lease_finishes_nothing(spark, archive):
    def lost():
        raise busy("it", "another")

    compaction = Compaction(spark, archive.files, LOG, held=lost)
    (day,) = plan(compaction.entries())
    with pytest.raises(Busy):
        compaction.run(day)
    assert len(compaction.entries()) == len(BATCHES)
    with pytest.raises(Busy):
        compaction.sweep(0)


def test_a_batch_given_to_two_processes_is_finished_by_either_and_read_once(spark, archive, monkeypatch):
    """Two concurrent appends, which a lock prevents: neither touches what the other has finished."""
    times = [DAY_MS + hour * HOUR_MS for hour in (40, 41)]
    bounds = (after(id_at(TIMES[-1])), after(id_at(times[-1])))
    writer, rows = archive.writer, messages(spark, times)
    one, other = writer.new_folder(archive.archive, 5), writer.new_folder(archive.archive, 5)
    writer.write(rows, one)
    writer.write(rows, other)
    writer.describe(spark, one, archive.archive, 5, bounds)
    assert times_read(spark, archive) == [*TIMES, *times]
    assert writer._is_there(archive.archive, 5, *bounds)  # the batch comes again: what was finished stays, alone
    assert [each.batch for each in load_manifests(archive.files)].count(5) == 1
    assert archive.files.names(other) == []
    assert times_read(spark, archive) == [*TIMES, *times]

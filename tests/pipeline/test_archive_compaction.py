"""Batches become days: each message is read once at every step, and damage is not copied."""

from __future__ import annotations

import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from plainsong.cli.command import CommandFailed
from pyspark_plainsong.pipeline.archive import layout, read
from pyspark_plainsong.pipeline.archive.compaction import Compaction, plan
from pyspark_plainsong.pipeline.archive.reading import damaged, load_manifests, stats_by_entry
from tests.pipeline.archives import (
    BATCHES,
    DAY_MS,
    HOUR_MS,
    LOG,
    TIMES,
    Archive,
    after,
    batch_folder,
    damage,
    id_at,
    on_disk,
    rewrite,
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


def test_an_archive_is_read_as_it_was_written(spark, archive):
    rows = read(spark, archive.root).orderBy("message_id").collect()
    assert [layout.time_of(row.message_id) for row in rows] == TIMES
    assert [row.payload.decode() for row in rows] == [f"payload {time_ms}" for time_ms in TIMES]
    assert {(row.namespace, row.topic, row.generation) for row in rows} == {("default", "orders", 1)}
    assert rows[1].headers == {"number": "1"}


def test_a_range_of_ids_opens_only_the_files_it_needs(spark, archive):
    rows = read(spark, archive.root, start=id_at(TIMES[8]), end=id_at(TIMES[15]))
    assert sorted(layout.time_of(row.message_id) for row in rows.collect()) == TIMES[8:15]
    assert len(rows.inputFiles()) < len(list(Path(archive.root).rglob("*.parquet")))


def test_each_message_is_read_once_after_every_step(spark, archive, compaction):
    (day,) = plan(compaction.entries())
    assert day.day == "2026-01-31"
    compaction.check(day)
    folder = compaction.write(day)
    assert times_read(spark, archive) == TIMES
    compaction.finish(day, folder)
    assert times_read(spark, archive) == TIMES
    # A kill during the sweep leaves some of the replaced entries.
    replaced = [piece.entry.folder for piece in day.pieces][:2]
    for folder in replaced:
        archive.files.remove(folder)
        assert times_read(spark, archive) == TIMES
    compaction.sweep(0)
    assert times_read(spark, archive) == TIMES
    assert on_disk(archive) == sorted([*TIMES, *TIMES[21:24]])  # the batch over midnight is still there


def test_a_compaction_that_was_killed_before_its_end_is_done_again_and_its_remains_go(spark, archive, compaction):
    (day,) = plan(compaction.entries())
    left = compaction.write(day)  # and killed
    (again,) = plan(compaction.entries())
    compaction.run(again)
    compaction.sweep(HOUR_MS)
    assert archive.files.names(left) == []
    assert plan(compaction.entries()) == []
    assert times_read(spark, archive) == TIMES


def test_a_batch_over_midnight_goes_with_its_second_day(spark, archive, compaction):
    (day,) = plan(compaction.entries())
    compaction.run(day)
    compaction.sweep(0)
    kept = {entry.batch for entry in compaction.entries() if entry.kind == "batch"}
    assert kept == {3, 4}
    (unfinished,) = plan(compaction.entries(), unfinished=True)
    compaction.run(unfinished)
    compaction.sweep(0)
    assert [(entry.kind, entry.day) for entry in compaction.entries()] == [("day", "2026-01-31"), ("day", "2026-02-01")]
    assert on_disk(archive) == times_read(spark, archive) == TIMES


def test_a_day_that_was_unfinished_is_written_again_when_it_has_grown(spark, archive, compaction):
    for day in plan(compaction.entries(), unfinished=True):
        compaction.run(day)
    more = [DAY_MS + hour * HOUR_MS for hour in (40, 50)]
    archive.append(spark, 5, more, (after(id_at(TIMES[-1])), after(id_at(more[-1]))))
    (day,) = plan(compaction.entries())
    assert (day.day, day.revision) == ("2026-02-01", 2)
    compaction.run(day)
    compaction.sweep(0)
    assert times_read(spark, archive) == [*TIMES, *more]
    assert on_disk(archive) == [*TIMES, more[0], *more]  # the last batch has an hour of the third day


def test_days_are_sorted_files_of_their_day(spark, archive, compaction):
    (day,) = plan(compaction.entries())
    folder = Path(archive.root) / compaction.run(day).folder
    assert folder.parent.name == "dt=2026-01-31"
    (file,) = folder.glob("*.parquet")
    ids = pq.read_table(file)["message_id"].to_pylist()
    assert ids == sorted(ids) == [id_at(time_ms) for time_ms in TIMES[:24]]
    assert spark.read.parquet(str(folder.parents[1])).select("dt").distinct().count() == 1


def test_replaced_files_stay_as_long_as_readers_may_need_them(spark, archive, compaction):
    rows = read(spark, archive.root)
    (day,) = plan(compaction.entries())
    compaction.run(day)
    assert compaction.sweep(HOUR_MS) == 0
    assert rows.count() == len(TIMES)


def test_a_reader_of_swept_files_fails_and_does_not_miss_rows_in_silence(spark, archive, compaction):
    rows = read(spark, archive.root)
    (day,) = plan(compaction.entries())
    compaction.run(day)
    compaction.sweep(0)
    with pytest.raises(Exception, match=r"FILE_NOT_EXIST|PATH_NOT_FOUND|does not exist"):
        rows.count()


def test_damage_is_found_before_it_is_copied(spark, archive, compaction):
    (day,) = plan(compaction.entries())
    damage(batch_folder(archive, 1))
    with pytest.raises(CommandFailed, match=r"batch=000000000001-\w+ is damaged: .* bytes, not"):
        compaction.run(day)
    assert len(compaction.entries()) == len(BATCHES)


def test_damaged_entries_are_reported_with_the_fault(spark, archive):
    damage(batch_folder(archive, 1))
    folders = [entry.folder for entry in load_manifests(archive.files)]
    gone = next((Path(archive.root) / folders[2]).glob("*.parquet"))
    gone.unlink()
    broken = max((Path(archive.root) / folders[4]).glob("*.parquet"))
    broken.write_bytes(bytes(broken.stat().st_size))
    found = damaged(spark, archive.files, load_manifests(archive.files))
    assert found.keys() == {folders[1], folders[2], folders[4]}
    assert "bytes, not" in found[folders[1]]
    assert found[folders[2]] == f"{gone.name} is missing"
    assert found[folders[4]].startswith("cannot be read: ")


def test_rows_of_other_contents_are_damage_too(spark, archive):
    entry = load_manifests(archive.files)[3]
    for file in (Path(archive.root) / entry.folder).glob("*.parquet"):
        table = pq.read_table(file)
        other = [b"x" * len(each) for each in table["payload"].to_pylist()]
        where = table.schema.get_field_index("payload")
        rewrite(file, table.set_column(where, table.schema.field("payload"), [other]))
    of_these_sizes = replace(entry, files=tuple(archive.files.sizes(entry.folder).items()))
    assert damaged(spark, archive.files, [of_these_sizes]) == {entry.folder: "has rows with different contents"}


def test_leftovers_of_killed_runs_are_removed_when_they_are_old(spark, archive, compaction, monkeypatch):
    left = archive.writer.new_folder("b" * 32, 0)
    archive.files.write(f"{left}/part-0.parquet", b"half")
    assert compaction.sweep(0) == 0
    monkeypatch.setattr("pyspark_plainsong.pipeline.archive.compaction.ORPHAN_MS", -1)
    assert compaction.sweep(0) == 1
    assert archive.files.names(left) == []
    assert times_read(spark, archive) == TIMES


DERIVED = {
    "publish_timestamp": datetime(2020, 1, 1, tzinfo=UTC),
    "seq_id": 1,
    "namespace": "other",
    "topic": "other",
    "generation": 2,
    "write_timestamp": datetime(2020, 1, 1, tzinfo=UTC),
    "payload_seq_id": 7,
}


def test_a_changed_value_of_any_column_is_damage_although_the_digest_leaves_the_column_out(spark, archive):
    entries = load_manifests(archive.files)
    assert damaged(spark, archive.files, entries) == {}
    (entry, *_) = entries
    file = max((Path(archive.root) / entry.folder).glob("*.parquet"), key=lambda each: pq.read_metadata(each).num_rows)
    sound = pq.read_table(file)
    for name, value in DERIVED.items():
        index, kind = sound.column_names.index(name), sound.schema.field(name).type
        column = pa.array([value, *sound[name].to_pylist()[1:]], kind)
        rewrite(file, sound.set_column(index, sound.schema.field(name), column))
        stats = stats_by_entry(spark, archive.files, [entry])
        assert stats == {entry.folder: None}, name

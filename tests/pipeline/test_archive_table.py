"""The table's state changes with its files, in one commit: on local disks, and on S3."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive.layout import FIRST
from pyspark_plainsong.pipeline.archive.table import Conflict, TableFile, Tally, TopicTable, Written, schema
from pyspark_plainsong.pipeline.files import LocalFiles
from tests.pipeline.archives import DAY_MS, HOUR_MS, after, id_at
from tests.storage.replication.s3_server import BUCKET, s3_server


class S3Files(LocalFiles):
    """The library's files are in a bucket; all other questions are answered from a folder."""

    def table(self, path):
        return f"s3://{BUCKET}/{path}"

    def names(self, folder):
        return ["_delta_log"] if "/_delta_log" not in folder else ["0.json"]

    def settle(self, paths):
        pass


@pytest.fixture(params=["local", "s3"])
def files(request, tmp_path, monkeypatch):
    if request.param == "local":
        yield LocalFiles(tmp_path / "root")
        return
    with s3_server(tmp_path / "s3") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield S3Files(tmp_path / "root")


def opened(files):
    table = TopicTable.open(files, "default", "orders")
    assert table is not None
    return table


def written(number, at_ms, digest):
    """A file of one row that does not exist: a commit does not check for it."""
    file = TableFile(f"data/{number}/day=2026-01-31/part-{number}.parquet", 10, "2026-01-31", 1, at_ms, at_ms, (1, 1))
    return Written(file, Tally(1, digest), 5)


def test_of_two_that_append_from_the_same_place_only_the_first_commits(files):
    TopicTable.create(files, "default", "orders")
    one, other = opened(files), opened(files)
    end = after(id_at(DAY_MS))
    batch = one.append(1, FIRST, end, [written(1, DAY_MS, 7)])
    assert (batch.number, batch.rows) == (1, 1)
    with pytest.raises(Conflict):
        other.append(1, FIRST, end, [written(2, DAY_MS, 9)])
    other.reload()
    assert other.end(1) == end
    assert [each.path for each in other.all_files()] == ["data/1/day=2026-01-31/part-1.parquet"]
    later = after(id_at(DAY_MS + HOUR_MS))
    assert other.append(1, end, later, [written(2, DAY_MS + HOUR_MS, 9)]).number == 2
    assert opened(files).tally(1, "2026-01-31") == Tally(2, 7 ^ 9)
    assert other.days(1) == ["2026-01-31"]
    assert other.generations() == [1]


def test_a_batch_without_messages_moves_the_end_and_adds_no_file(files):
    table = TopicTable.create(files, "default", "orders")
    table.append(3, FIRST, after(id_at(DAY_MS)), [])
    again = opened(files)
    assert (again.end(3), again.all_files(), again.generations(), again.days(3)) == (after(id_at(DAY_MS)), [], [3], [])


def test_the_state_survives_a_checkpoint_and_the_removal_of_the_log_before_it(tmp_path):
    table = TopicTable.create(LocalFiles(tmp_path), "default", "orders")
    ends = [FIRST, *(after(id_at(DAY_MS + hour * HOUR_MS, seq=hour)) for hour in range(3))]
    for number in range(3):
        table.append(1, ends[number], ends[number + 1], [written(number, DAY_MS + number * HOUR_MS, -(number + 1))])
    table.delta.create_checkpoint()
    log = tmp_path / "default/orders/_delta_log"
    for each in range(3):
        (log / f"{each:020d}.json").unlink()
    again = TopicTable.open(LocalFiles(tmp_path), "default", "orders")
    assert (again.end(1), again.batches(1)) == (ends[3], 3)
    assert again.tally(1, "2026-01-31") == Tally(3, -1 ^ -2 ^ -3)


def test_a_commit_says_what_it_has_in_the_history(tmp_path):
    table = TopicTable.create(LocalFiles(tmp_path), "default", "orders")
    end = after(id_at(DAY_MS))
    table.append(1, FIRST, end, [written(1, DAY_MS, 7)])
    about = DeltaTable(tmp_path / "default/orders").history(1)[0]["plainsong"]
    about = json.loads(about) if isinstance(about, str) else about
    assert about == {"generation": 1, "start": FIRST.hex(), "end": end.hex(), "rows": 1}


def test_a_pruned_day_is_out_of_the_table_and_of_its_records(tmp_path):
    table = TopicTable.create(LocalFiles(tmp_path), "default", "orders")
    table.append(1, FIRST, after(id_at(DAY_MS)), [written(1, DAY_MS, 7)])
    assert table.prune("2026-01-31") == []
    (gone,) = table.prune("2026-02-01")
    assert gone.day == "2026-01-31"
    assert (table.all_files(), table.tally(1, "2026-01-31"), table.days(1)) == ([], Tally(), [])
    assert table.start_ms(1) == DAY_MS + 24 * HOUR_MS
    assert table.end(1) == after(id_at(DAY_MS))


def test_a_table_of_an_earlier_version_gets_the_columns_that_it_lacks(tmp_path):
    files = LocalFiles(tmp_path)
    files.make_folder("default/orders")
    fields = [each for each in schema().fields if each.name not in ("headers", "checksum")]
    DeltaTable.create(files.table("default/orders"), type(schema())(fields), partition_by=["day"])
    table = opened(files)
    table.widen()
    assert {each.name for each in opened(files).delta.schema().fields} == {each.name for each in schema().fields}
    version = opened(files).version
    table.widen()
    assert opened(files).version == version


def test_a_table_that_cannot_be_read_is_named(tmp_path):
    log = tmp_path / "default/orders/_delta_log"
    log.mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("{")
    with pytest.raises(CommandFailed, match=r"the Delta table .*default/orders cannot be used: ") as raised:
        TopicTable.open(LocalFiles(tmp_path), "default", "orders")
    assert raised.value.code == Exit.STORE


def test_the_log_has_statistics_of_each_file_that_readers_prune_by(tmp_path):
    table = TopicTable.create(LocalFiles(tmp_path), "default", "orders")
    path = Path(tmp_path / "default/orders/data/1/day=2026-01-31/part-1.parquet")
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({"generation": pa.array([1], pa.int32())}), path)
    table.append(1, FIRST, after(id_at(DAY_MS)), [written(1, DAY_MS, 7)])
    (file,) = opened(LocalFiles(tmp_path)).all_files()
    assert (file.rows, file.first_ms, file.last_ms, file.generations) == (1, DAY_MS, DAY_MS, (1, 1))
    assert file.may_hold(FIRST, after(id_at(DAY_MS)))
    assert not file.may_hold(id_at(DAY_MS + 1), id_at(DAY_MS + 2))
    assert not file.may_be_of(2)

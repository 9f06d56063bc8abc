"""The files of an archive are written atomically, to local disks and through Hadoop."""

from __future__ import annotations

import json
import os

import pytest

from plainsong.cli.command import CommandFailed
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.writing import Log, Offsets
from pyspark_plainsong.pipeline.files import LocalFiles, open_files
from pyspark_plainsong.pipeline.hadoop import HadoopFiles


@pytest.fixture(params=["local", "hadoop"])
def files(request, tmp_path):
    if request.param == "local":
        return LocalFiles(tmp_path / "root")
    return HadoopFiles((tmp_path / "root").as_uri(), request.getfixturevalue("spark"))


def test_files_are_written_over_each_other_and_found(files):
    files.write("a/b=1/plan.json", b"one")
    files.write("a/b=1/plan.json", b"other")
    files.write("a/c/part-0.parquet", b"12345")
    files.write("a/c/_hidden.parquet", b"12345")
    assert files.read("a/b=1/plan.json") == b"other"
    assert files.read("a/none") is None
    assert files.read("none/none") is None
    assert files.sizes("a/c") == {"part-0.parquet": 5}
    assert files.sizes("none") == {}
    assert files.names("a") == ["b=1", "c"]
    assert files.names("none") == []
    files.make_folder("a/c")
    files.make_folder("a/d/e")
    assert files.names("a/d") == ["e"]
    files.settle(["a/c/part-0.parquet", "a/b=1/plan.json"])


def test_a_removed_folder_is_gone_and_may_be_removed_again(files):
    files.write("a/c/d/file", b"")
    files.write("a/c/part-0.parquet", b"12345")
    files.remove("a/c")
    files.remove("a/c")
    assert files.names("a") == []


def test_a_file_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    files = LocalFiles(tmp_path)
    files.write("file", b"before")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        files.write("file", b"after")
    assert files.read("file") == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_root_is_a_path_or_a_url(tmp_path):
    assert open_files(str(tmp_path)).url("a") == open_files(tmp_path.as_uri()).url("a") == f"{tmp_path.as_uri()}/a"
    with pytest.raises(CommandFailed, match="without Spark"):
        open_files("hdfs://host/archive")


def test_days_are_those_of_utc():
    assert layout.day_of(0) == "1970-01-01"
    assert layout.day_of(layout.day_start_ms("2026-01-31") - 1) == "2026-01-30"
    assert layout.day_of(layout.day_start_ms("2026-01-31") + layout.DAY_MS - 1) == "2026-01-31"


def test_a_checkpoint_has_the_range_of_each_batch(tmp_path):
    files, log = LocalFiles(tmp_path), Log("default", "orders", 3)
    for batch, end in enumerate((b"\2", b"\3")):
        told = {"v": 1, "topics": {"default:orders": {"gen": 3, "next": (end * 20).hex()}}}
        files.write(f"offsets/{batch}", f"v1\n{{}}\n{json.dumps(told)}".encode())
    offsets = Offsets(files, log, b"\1" * 20)
    assert offsets.bounds(0) == (b"\1" * 20, b"\2" * 20)
    assert offsets.bounds(1) == (b"\2" * 20, b"\3" * 20)
    with pytest.raises(CommandFailed, match="default:orders was deleted and created again during the run"):
        Offsets(files, Log("default", "orders", 4), b"\1" * 20).bounds(0)

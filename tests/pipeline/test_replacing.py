"""A folder is replaced only where it holds what Spark writes of a table, and nothing else."""

from __future__ import annotations

import pytest

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.files import LocalFiles, check_replaceable


def made(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_files_written_by_spark_are_replaced_even_if_incomplete(spark, tmp_path):
    spark.range(3).write.parquet(str(tmp_path / "whole"))
    made(tmp_path / "half", "_temporary/0/part-00000.parquet")
    (tmp_path / "empty").mkdir()
    check_replaceable(LocalFiles(tmp_path), ["whole", "half", "empty", "none"])


@pytest.mark.parametrize("other", ["notes.txt", "2025/a.parquet", "trail.parquet", ".hidden"])
def test_foreign_files_are_not_replaced(tmp_path, other):
    made(tmp_path / "usage", "part-00000-x.snappy.parquet", "_SUCCESS", other)
    with pytest.raises(CommandFailed, match=r"usage would be replaced, but it holds files") as refused:
        check_replaceable(LocalFiles(tmp_path), ["trail", "usage"])
    assert refused.value.code == Exit.USAGE

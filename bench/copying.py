"""Spark's own copy of a folder of Parquet files: in a session, or as a process that starts one."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from pyspark_plainsong.pipeline.session import build_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: That of an archive.
COMPRESSION = "zstd"


def copy(spark: SparkSession, source: str, target: str) -> None:
    """Copy all rows, in place of what is in ``target``."""
    spark.read.parquet(source).write.mode("overwrite").option("compression", COMPRESSION).parquet(target)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.copying", description="Copy Parquet files with Spark.")
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    conf = dict(each.split("=", 1) for each in args.conf)
    spark = build_session("plainsong bench copy", conf=conf)
    try:
        copy(spark, args.source, args.target)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()

"""Reads archives, and computes the checksums of rows."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.table import TableFile, TopicTable, tables
from pyspark_plainsong.pipeline.files import literal, open_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

#: The columns of a message, in order: the connector's, and the generation.
SCHEMA = (
    "namespace STRING, topic STRING, generation INT, message_id BINARY, publish_timestamp TIMESTAMP, seq_id INT, "
    "write_timestamp TIMESTAMP, payload_seq_id INT, routing_key STRING, headers MAP<STRING,STRING>, payload BINARY"
)
COLUMNS = [each.split()[0] for each in SCHEMA.split(", ")]
CHECKSUM = "checksum"
#: An exclusive bound after every id.
LAST = b"\xff" * 20


def read(
    spark: SparkSession,
    root: str,
    *,
    namespace: str | None = None,
    topic: str | None = None,
    start: bytes | None = None,
    end: bytes | None = None,
) -> DataFrame:
    """Return the archived messages, each once, unordered (``orderBy("generation", "message_id")`` gives topic order).

    Any program that reads Delta tables gives the same rows; this needs no Delta in the session. The files are those of
    the tables' versions at the time of this call: later messages do not appear, and if a vacuum has removed a file
    before the query runs, the query fails instead of changing its result.

    Args:
      root: the job's ``--root``: a path, or a URL that Hadoop can open.
      namespace, topic: read only these.
      start, end: read only ids ``start <= id < end``, 20 bytes each; no file outside is opened.
    Returns:
      the columns of the connector (``docs/spark.md``) and ``generation INT``.
    Raises:
      CommandFailed: a table cannot be opened, or was written by an earlier version.
    """
    files = open_files(root, lambda: spark)
    named = [each for each in tables(files) if namespace in (None, each[0]) and topic in (None, each[1])]
    opened = [table for table in (TopicTable.open(files, *each) for each in named) if table is not None]
    bounds = layout.Range(start or layout.FIRST, end or LAST)
    parts = [rows_of(spark, table, bounds) for table in opened]
    if not parts:
        return spark.createDataFrame([], SCHEMA)
    return reduce(lambda one, other: one.unionByName(other), parts)


def rows_of(spark: SparkSession, table: TopicTable, bounds: layout.Range, generation: int | None = None) -> DataFrame:
    """Return the messages of a table, of one generation or of all, with ids ``start <= id < end``."""
    found = [each for each in table.all_files() if each.may_hold(*bounds) and each.may_be_of(generation)]
    rows = rows_in(spark, table, found).select(*COLUMNS)
    if any(bounds.start):
        rows = rows.where(sf.col("message_id") >= sf.lit(bounds.start))
    if bounds.end != LAST:
        rows = rows.where(sf.col("message_id") < sf.lit(bounds.end))
    return rows if generation is None else rows.where(sf.col("generation") == generation)


def rows_in(spark: SparkSession, table: TopicTable, found: Sequence[TableFile]) -> DataFrame:
    """Return the rows of a table's files, with their checksums."""
    return parquet(spark, [table.files.url(f"{table.folder}/{each.path}") for each in found])


def parquet(spark: SparkSession, urls: Iterable[str]) -> DataFrame:
    """Return the rows of Parquet files or folders of an archive, with their checksums."""
    schema = f"{SCHEMA}, {CHECKSUM} BIGINT"
    paths = [literal(each) for each in urls]
    if not paths:
        return spark.createDataFrame([], schema)
    return spark.read.schema(schema).parquet(*paths).select(*COLUMNS, CHECKSUM)


def file_path() -> Column:
    """Return the path of the file with a row; not its name, which would be cut out of the path for each row."""
    return sf.input_file_name().alias("path")


def name_in(path: str) -> str:
    """Return a file's name from a ``file_path``, with the folder of its day."""
    # Writers put a random number into the name of each file, the same for all days of a batch.
    return "/".join(path.rsplit("/", 2)[1:])


def archived(messages: DataFrame, generation: int) -> DataFrame:
    """Convert the connector's rows to those of an archive."""
    return messages.withColumn("generation", sf.lit(generation)).select(*COLUMNS)


def checksum() -> Column:
    """Return a 64-bit hash of all columns of a message. It detects damage, not an adversary."""
    # Spark's hash skips null, so a number stands for it; and it cannot hash a map, which has no order.
    return sf.xxhash64(
        "namespace",
        "topic",
        "generation",
        "message_id",
        _or_less(sf.unix_micros("publish_timestamp")),
        _or_less(sf.col("seq_id")),
        _or_less(sf.unix_micros("write_timestamp")),
        _or_less(sf.col("payload_seq_id")),
        _or_less(sf.octet_length("routing_key")),
        "routing_key",
        _or_less(sf.size("headers")),
        sf.sort_array(sf.map_entries("headers")),  # array_sort calls an interpreted function for each comparison
        _or_less(sf.octet_length("payload")),
        "payload",
    )


def _or_less(number: Column) -> Column:
    return sf.coalesce(number.cast("bigint"), sf.lit(-1).cast("bigint"))


def day_column() -> Column:
    """Return the day of the publish time in UTC, whatever the session's time zone is."""
    return sf.expr(f"date_from_unix_date(cast(floor(unix_millis(publish_timestamp) / {layout.DAY_MS}) as int))")

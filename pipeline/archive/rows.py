"""The rows of an archive: their columns, what they amount to, and whether files still hold what their manifest says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from pipeline.archive.manifest import NOTHING, Stats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from pipeline.archive.files import Files
    from pipeline.archive.manifest import Manifest

#: What the files have, in this order: the connector's columns, and the generation.
SCHEMA = (
    "namespace STRING, topic STRING, generation INT, message_id BINARY, publish_timestamp TIMESTAMP, seq_id INT, "
    "write_timestamp TIMESTAMP, payload_seq_id INT, routing_key STRING, headers MAP<STRING,STRING>, payload BINARY"
)
COLUMNS = [each.split()[0] for each in SCHEMA.split(", ")]
_BITS = (1 << 64) - 1


def archived(messages: DataFrame, generation: int) -> DataFrame:
    """Rows of the connector as an archive keeps them."""
    return messages.withColumn("generation", sf.lit(generation)).select(*COLUMNS)


def row_hash() -> Column:
    """64 bits of what a message is: its id, payload, routing key and headers."""
    # Maps have no order and cannot be hashed; their entries, sorted, can.
    headers = sf.array_sort(sf.map_entries("headers"))
    return sf.xxhash64("message_id", "payload", sf.coalesce("routing_key", sf.lit("\0")), headers)


def stats_columns() -> list[Column]:
    """The aggregates that ``stats_of`` reads."""
    return [
        sf.count(sf.lit(1)).alias("count"),
        sf.coalesce(sf.sum(sf.octet_length("payload")), sf.lit(0)).alias("payload_bytes"),
        sf.coalesce(sf.bit_xor(row_hash()), sf.lit(0)).alias("digest"),
        sf.min("message_id").alias("first"),
        sf.max("message_id").alias("last"),
    ]


def stats_of(rows: DataFrame) -> Stats:
    """What rows amount to; one pass over them."""
    row = rows.select(*stats_columns()).first()
    return NOTHING if row is None else _stats(row.asDict())


def _stats(row: dict[str, object]) -> Stats:
    first, last = row["first"], row["last"]
    return Stats(
        int(str(row["count"])),
        int(str(row["payload_bytes"])),
        int(str(row["digest"])) & _BITS,
        bytes(first) if isinstance(first, (bytes, bytearray)) else None,
        bytes(last) if isinstance(last, (bytes, bytearray)) else None,
    )


def rows_in(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> DataFrame:
    """All rows of the files that manifests name, and of no others."""
    urls = [files.url(f"{entry.folder}/{name}") for entry in entries for name, _ in entry.files]
    if not urls:
        return spark.createDataFrame([], SCHEMA)
    return spark.read.schema(SCHEMA).parquet(*urls)


def stats_by_entry(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, Stats]:
    """What the files of each entry amount to now, by its folder; one pass over all of them."""
    # The last such folder: there may be one above the archive.
    folder = sf.regexp_extract(sf.input_file_name(), r".*/(gen=\d+/.*)/[^/]+$", 1).alias("folder")
    counted = rows_in(spark, files, entries).groupBy(folder).agg(*stats_columns()).collect()
    by_end = {row["folder"]: _stats(row.asDict()) for row in counted}
    # Folders below the topic's are enough to tell entries of one topic apart, and free of how URLs are quoted.
    return {entry.folder: by_end.get("/".join(entry.folder.split("/")[2:]), NOTHING) for entry in entries}

"""Reads an archive, every message once, and checks its files against their manifests.

An archive may contain batches, days and interrupted compactions of the same messages at once.
"""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive.layout import MANIFEST_NAME
from pyspark_plainsong.pipeline.archive.manifest import NOTHING, Manifest, Piece, Stats, parse_manifest, pieces
from pyspark_plainsong.pipeline.files import literal, open_files
from pyspark_plainsong.pipeline.job import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from pyspark_plainsong.pipeline.files import Files

#: Attempts to get two equal listings of a changing archive.
LOOKS = 100


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

    The files are fixed by the manifests at the time of this call: later messages do not appear, and if a compaction has
    removed a file before the query runs, the query fails instead of changing its result.

    Args:
      root: the job's ``--root``: a path, or a URL that Hadoop can open.
      namespace, topic: read only these.
      start, end: read only ids ``start <= id < end``, 20 bytes each; no file outside is opened.
    Returns:
      the columns of the connector (``docs/spark.md``) and ``generation INT``.
    Raises:
      CommandFailed: a manifest cannot be read; files are missing, or have other sizes than it says.
    """
    files = open_files(root, lambda: spark)
    under = "/".join(each for each in (namespace, topic if namespace else None) if each)
    entries = [each for each in load_manifests(files, under) if topic is None or each.topic == topic]
    return rows_of(spark, files, within(pieces_of(entries), start, end))


def load_manifests(files: Files, under: str = "") -> list[Manifest]:
    """Load all entries below a folder. Raises CommandFailed: a manifest is unreadable, or the archive keeps changing."""
    for _ in range(LOOKS):
        paths = files.find(under, MANIFEST_NAME)
        texts = {path: files.read(path) for path in paths}
        # During a listing a day may be finished and its batches removed. An entry that vanished before the end of the
        # first listing was replaced before the second one began. New batches replace nothing.
        now = {path for path in files.find(under, MANIFEST_NAME) if path in texts or "/batches/" not in path}
        if now == texts.keys() and None not in texts.values():
            return [parse_manifest(text or b"", path.rpartition("/")[0]) for path, text in texts.items()]
    raise CommandFailed(f"the archive below {files.url(under)} kept changing while it was read", code=Exit.UNAVAILABLE)


def pieces_of(entries: Iterable[Manifest]) -> list[Piece]:
    """Return the pieces to read, over all topics and generations."""

    def log(entry: Manifest) -> tuple[str, str, int]:
        return entry.namespace, entry.topic, entry.generation

    return [piece for _, group in groupby(sorted(entries, key=log), log) for piece in pieces(group)]


def within(found: Iterable[Piece], start: bytes | None, end: bytes | None) -> list[Piece]:
    """Cut the pieces to ids ``start <= id < end``."""
    cut = [
        Piece(piece.entry, max(piece.start, start or piece.start), min(piece.end, end or piece.end)) for piece in found
    ]
    return [piece for piece in cut if piece.start < piece.end]


def rows_of(spark: SparkSession, files: Files, found: Sequence[Piece]) -> DataFrame:
    """Return the rows of pieces: whole entries in one scan, each part of an entry in a scan of its own.

    Raises:
      CommandFailed: files are missing, or have other sizes than their manifest says.
    """
    held = [piece for piece in found if _may_hold(piece)]
    check_unaltered(files, [piece.entry for piece in held])
    whole = [piece.entry for piece in held if is_all(piece)]
    parts = [rows_in(spark, files, whole)] if whole else []
    for piece in held:
        if not is_all(piece):
            inside = (sf.col("message_id") >= sf.lit(piece.start)) & (sf.col("message_id") < sf.lit(piece.end))
            parts.append(rows_in(spark, files, [piece.entry]).where(inside))
    if not parts:
        return spark.createDataFrame([], SCHEMA)
    return reduce(lambda one, other: one.unionByName(other), parts)


def is_all(piece: Piece) -> bool:
    """True if all rows of the entry are in the piece, even if the entry's range exceeds it."""
    first, last = piece.entry.stats.first, piece.entry.stats.last
    return piece.is_whole or (first is not None and last is not None and piece.start <= first and last < piece.end)


def _may_hold(piece: Piece) -> bool:
    first, last = piece.entry.stats.first, piece.entry.stats.last
    return first is not None and last is not None and first < piece.end and piece.start <= last


# --- inspection ------------------------------------------------------------------------------------


def read_back(spark: SparkSession, files: Files, folder: str) -> tuple[Stats, tuple[tuple[str, int], ...]]:
    """Read a folder that was just written, and make it durable.

    Returns:
      the figures of its rows, and the names and sizes of the files that the rows were read from.
    Raises:
      CommandFailed: another process changed or removed the folder.
    """
    there = files.sizes(folder)
    if there:  # Spark writes a file even without rows
        stats = stats_of(_parquet(spark, [files.url(f"{folder}/{name}") for name in there]))
        files.settle(folder)
        if files.sizes(folder) == there:
            return stats, tuple(there.items())
    raise damage(f"{folder} was changed by another process while it was written")


def altered(files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Return a description of missing files and wrong sizes, by entry folder; opens no file."""
    found: dict[str, str] = {}
    for entry in entries:
        there = files.sizes(entry.folder)
        wrong = [
            f"{name} is missing" if name not in there else f"{name} has {there[name]} bytes, not {size}"
            for name, size in entry.files
            if there.get(name) != size
        ]
        if entry.stats.count and not entry.files:
            wrong.append(f"none of its files has its {entry.stats.count} rows")
        if wrong:
            found[entry.folder] = "; ".join(wrong)
    return found


def check_unaltered(files: Files, entries: Sequence[Manifest]) -> None:
    """Check that all files exist with the right sizes. Raises CommandFailed: an entry is damaged."""
    for folder, why in altered(files, entries).items():
        raise damage(f"{folder} is damaged: {why}")


def damage(message: str, *, hint: str = "archive verify lists all damage") -> CommandFailed:
    """Make the error about damaged entries."""
    return CommandFailed(message, hint=hint, code=Exit.STORE)


def damaged(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Return a description of the damage, by entry folder: files missing, of another size, or with other rows."""
    each_once = list({entry.folder: entry for entry in entries}.values())
    found = altered(files, each_once)
    return found | _changed(spark, files, [entry for entry in each_once if entry.folder not in found])


def _changed(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Return the entries that have other rows than their manifest. One scan; bisected if a file cannot be read."""
    try:
        now = stats_by_entry(spark, files, entries)
    except Exception as error:  # noqa: BLE001 - whatever a broken file makes of Spark
        if len(entries) == 1:
            return {entries[0].folder: f"cannot be read: {reason_of(error)}"}
        half = len(entries) // 2
        return _changed(spark, files, entries[:half]) | _changed(spark, files, entries[half:])
    found = {}
    for entry in entries:
        is_now = now[entry.folder]
        if is_now is None:
            found[entry.folder] = "has rows whose columns contradict their ids, or of another topic"
        elif is_now.count != entry.stats.count:
            found[entry.folder] = f"has {is_now.count} rows, not {entry.stats.count}"
        elif is_now != entry.stats:
            found[entry.folder] = "has rows with different contents"
    return found


# --- rows ------------------------------------------------------------------------------------------

#: The columns of the files, in order: the connector's, and the generation.
SCHEMA = (
    "namespace STRING, topic STRING, generation INT, message_id BINARY, publish_timestamp TIMESTAMP, seq_id INT, "
    "write_timestamp TIMESTAMP, payload_seq_id INT, routing_key STRING, headers MAP<STRING,STRING>, payload BINARY"
)
COLUMNS = [each.split()[0] for each in SCHEMA.split(", ")]
_BITS = (1 << 64) - 1


def archived(messages: DataFrame, generation: int) -> DataFrame:
    """Convert the connector's rows to the columns of an archive."""
    return messages.withColumn("generation", sf.lit(generation)).select(*COLUMNS)


def row_hash() -> Column:
    """Return a 64-bit hash of a message's id, payload, routing key and headers."""
    # Spark cannot hash a map, which has no order; its sorted entries can be hashed.
    headers = sf.array_sort(sf.map_entries("headers"))
    return sf.xxhash64("message_id", "payload", sf.coalesce("routing_key", sf.lit("\0")), headers)


def stats_columns() -> list[Column]:
    """Return the aggregates that make up ``Stats``."""
    return [
        sf.count(sf.lit(1)).alias("count"),
        sf.coalesce(sf.sum(sf.octet_length("payload")), sf.lit(0)).alias("payload_bytes"),
        sf.coalesce(sf.bit_xor(row_hash()), sf.lit(0)).alias("digest"),
        sf.min("message_id").alias("first"),
        sf.max("message_id").alias("last"),
    ]


def stats_of(rows: DataFrame) -> Stats:
    """Compute the figures of rows in one scan."""
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
    """Return the rows of the entries' files."""
    urls = [files.url(f"{entry.folder}/{name}") for entry in entries for name, _ in entry.files]
    if not urls:
        return spark.createDataFrame([], SCHEMA)
    return _parquet(spark, urls)


def _parquet(spark: SparkSession, urls: Iterable[str]) -> DataFrame:
    return spark.read.schema(SCHEMA).parquet(*map(literal, urls))


def stats_by_entry(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, Stats | None]:
    """Compute the figures of each entry's files in one scan, by folder.

    None if rows contradict their own ids or belong to another topic or generation.
    """
    # The greedy ".*" takes the last match: a folder above the archive may have the same name.
    folder = sf.regexp_extract(sf.input_file_name(), r".*/(gen=\d+/.*)/[^/]+$", 1).alias("folder")
    logs = [(f"{each}({name})", name) for name in ("namespace", "topic", "generation") for each in ("min", "max")]
    bounds = [getattr(sf, call.partition("(")[0])(name).alias(call) for call, name in logs]
    columns = [*stats_columns(), sf.count_if(contradicts_id()).alias("contradictions"), *bounds]
    counted = rows_in(spark, files, entries).groupBy(folder).agg(*columns).collect()
    by_end = {row["folder"]: row.asDict() for row in counted}
    found: dict[str, Stats | None] = {}
    for entry in entries:
        # The path below the topic's folder identifies the entry, and has no characters that URLs quote.
        row = by_end.get("/".join(entry.folder.split("/")[2:]))
        if row is None:
            found[entry.folder] = NOTHING
        elif row["contradictions"] or any(row[call] != getattr(entry, name) for call, name in logs):
            found[entry.folder] = None
        else:
            found[entry.folder] = _stats(row)
    return found


def contradicts_id() -> Column:
    """True if a column that repeats a part of the id differs from it; the digest does not cover these columns."""

    def number(first: int, size: int) -> Column:
        digits = sf.hex(sf.substring("message_id", first, size))
        return sf.conv(digits, 16, 10).try_cast("bigint")

    write_ms, batch_id = number(11, 8), number(19, 2)
    written = sf.when(write_ms != 0, sf.timestamp_millis(write_ms))
    counted = sf.when((write_ms != 0) | (batch_id != 0), batch_id)
    same = (
        sf.col("publish_timestamp").eqNullSafe(sf.timestamp_millis(number(1, 8)))
        & sf.col("seq_id").eqNullSafe(number(9, 2))
        & sf.col("write_timestamp").eqNullSafe(written)
        & sf.col("payload_seq_id").eqNullSafe(counted)
    )
    return ~same

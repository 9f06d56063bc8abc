"""Reads archives that version 0.1 wrote, to migrate them.

    NAMESPACE/TOPIC/gen=1/batches/archive=ID/batch=000000000000-TRY/part-….parquet, _manifest.json
    NAMESPACE/TOPIC/gen=1/days/dt=2026-01-31/entry=ID-TRY/part-….parquet, _manifest.json

A manifest describes the messages in its folder's files; a folder without one is no part of the archive. Entries may
overlap; then one of them is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Literal, NamedTuple

from pyspark.sql import functions as sf

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.output import counted
from pyspark_plainsong.pipeline.archive.layout import Range
from pyspark_plainsong.pipeline.archive.reading import SCHEMA
from pyspark_plainsong.pipeline.files import literal
from pyspark_plainsong.pipeline.job import reason_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from pyspark_plainsong.pipeline.files import Files

VERSION = 1
#: The file that describes an entry, and makes its folder one.
MANIFEST_NAME = "_manifest.json"
_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Stats:
    """Count, size, digest and bounds of rows."""

    count: int
    payload_bytes: int
    digest: int
    """64 bits, unsigned."""
    first: bytes | None = None
    last: bytes | None = None
    """The smallest and the largest id; None: there is no row."""

    def __add__(self, other: Stats) -> Stats:
        firsts = [each for each in (self.first, other.first) if each is not None]
        lasts = [each for each in (self.last, other.last) if each is not None]
        return Stats(
            self.count + other.count,
            self.payload_bytes + other.payload_bytes,
            self.digest ^ other.digest,
            min(firsts, default=None),
            max(lasts, default=None),
        )


NOTHING = Stats(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Manifest:
    """An entry of an archive: a batch of one query, or a day."""

    kind: Literal["batch", "day"]
    namespace: str
    topic: str
    generation: int
    start: bytes
    end: bytes
    """The entry holds all messages with ``start <= id < end`` that could be read when it was written."""
    stats: Stats
    files: tuple[tuple[str, int], ...]
    """Names and sizes in bytes, sorted."""
    written_ms: int
    source: str
    """The archive id of a batch; the entry id of a day."""
    batch: int | None = None
    day: str | None = None
    revision: int = 0
    folder: str = ""
    """The entry's folder, from the root; not part of the file."""

    @property
    def rank(self) -> tuple[int, int, int, str, int, str]:
        """The precedence where entries overlap: the entry with the lowest rank is read."""
        return (self.kind == "batch", -self.revision, self.written_ms, self.source, self.batch or 0, self.folder)


def parse_manifest(text: bytes, folder: str) -> Manifest:
    """Parse a manifest. Raises CommandFailed, which names the folder: it is invalid, or of a newer version."""
    try:
        fields = json.loads(text)
        if fields["version"] != VERSION:
            raise _bad(folder, f"it is of version {fields['version']}, this program reads {VERSION}")
        is_batch = fields["kind"] == "batch"
        if fields["count"] and not fields["files"]:
            raise _bad(folder, f"it has {counted(fields['count'], 'row')} in no files")
        return Manifest(
            kind="batch" if is_batch else "day",
            namespace=fields["namespace"],
            topic=fields["topic"],
            generation=int(fields["generation"]),
            start=bytes.fromhex(fields["start"]),
            end=bytes.fromhex(fields["end"]),
            stats=Stats(
                int(fields["count"]),
                int(fields["payloadBytes"]),
                int(fields["digest"], 16),
                None if fields["firstId"] is None else bytes.fromhex(fields["firstId"]),
                None if fields["lastId"] is None else bytes.fromhex(fields["lastId"]),
            ),
            files=tuple((each["name"], int(each["bytes"])) for each in fields["files"]),
            written_ms=int(fields["writtenMs"]),
            source=fields["archive" if is_batch else "entry"],
            batch=int(fields["batch"]) if is_batch else None,
            day=None if is_batch else fields["day"],
            revision=0 if is_batch else int(fields["revision"]),
            folder=folder,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _bad(folder, f"{type(error).__name__}: {error}") from error


def _bad(folder: str, why: str) -> CommandFailed:
    return CommandFailed(f"{folder}/{MANIFEST_NAME} cannot be read: {why}", code=Exit.STORE)


# --- coverage --------------------------------------------------------------------------------------
#
# Every entry of an archive (a batch, or a day made of batches) holds all messages of one range of ids,
# ``start <= id < end``. Where entries overlap, one of them is read and the others are not: a day wins over
# batches, a higher revision over a lower one, and the batch written first over later ones (a later copy of the same
# range may lack messages that expired in between). So no row is read twice, even if an entry was replaced in part or
# two compactions ran at once; and an entry gives up a range only where another one holds it.


class Piece(NamedTuple):
    """The part of an entry that is read: ``start <= id < end``."""

    entry: Manifest
    start: bytes
    end: bytes

    @property
    def is_whole(self) -> bool:
        """True if the piece is the whole entry."""
        return (self.start, self.end) == (self.entry.start, self.entry.end)


def pieces(entries: Iterable[Manifest]) -> list[Piece]:
    """Return the pieces of entries to read, in the order of the ids; no id is in two pieces.

    Args:
      entries: of one generation of one topic.
    """
    taken: list[Range] = []
    found: list[Piece] = []
    for entry in sorted(entries, key=lambda each: each.rank):
        free = minus(Range(entry.start, entry.end), taken)
        found += [Piece(entry, start, end) for start, end in free]
        taken = merged([*taken, *free])
    return sorted(found, key=lambda piece: piece.start)


def minus(whole: Range, taken: Sequence[Range]) -> list[Range]:
    """``whole`` without the ranges ``taken``, which are in order and do not overlap."""
    left: list[Range] = []
    start = whole.start
    for each in taken:
        if each.end <= start or each.start >= whole.end:
            continue
        if each.start > start:
            left.append(Range(start, each.start))
        start = each.end
    if start < whole.end:
        left.append(Range(start, whole.end))
    return left


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same ids in ranges that neither overlap nor touch, in order; empty ones are left out."""
    found: list[Range] = []
    for each in sorted(each for each in ranges if each.start < each.end):
        if found and each.start <= found[-1].end:
            found[-1] = Range(found[-1].start, max(found[-1].end, each.end))
        else:
            found.append(each)
    return found


# --- rows ------------------------------------------------------------------------------------------


def load_manifests(files: Files, generation: str) -> list[Manifest]:
    """Load all entries of a generation's folder, which only ``migrate`` changes. Raises CommandFailed: one is unreadable."""
    found = []
    for kind in ("batches", "days"):
        for group in files.names(f"{generation}/{kind}"):
            for entry in files.names(f"{generation}/{kind}/{group}"):
                folder = f"{generation}/{kind}/{group}/{entry}"
                text = files.read(f"{folder}/{MANIFEST_NAME}")
                if text is not None:
                    found.append(parse_manifest(text, folder))
    return found


def within(found: Iterable[Piece], start: bytes | None, end: bytes | None) -> list[Piece]:
    """Cut the pieces to ids ``start <= id < end``."""
    cut = [
        Piece(piece.entry, max(piece.start, start or piece.start), min(piece.end, end or piece.end)) for piece in found
    ]
    return [piece for piece in cut if piece.start < piece.end]


def rows_of(spark: SparkSession, files: Files, found: Sequence[Piece]) -> DataFrame:
    """Return the rows of pieces: whole entries in one scan, each part of an entry in a scan of its own."""
    held = [piece for piece in found if _may_hold(piece)]
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
            wrong.append(f"none of its files has its {counted(entry.stats.count, 'row')}")
        if wrong:
            found[entry.folder] = "; ".join(wrong)
    return found


def damaged(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Return a description of the damage, by entry folder: files missing, of the wrong size, or with other rows."""
    each_once = list({entry.folder: entry for entry in entries}.values())
    found = altered(files, each_once)
    return found | _changed(spark, files, [entry for entry in each_once if entry.folder not in found])


def _changed(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Return the entries whose rows differ from their manifest. One scan; bisected if a file cannot be read."""
    try:
        now = stats_by_entry(spark, files, entries)
    except Exception as error:  # noqa: BLE001 - Spark's errors for broken files vary
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
            found[entry.folder] = f"has {counted(is_now.count, 'row')}, not {entry.stats.count}"
        elif is_now != entry.stats:
            found[entry.folder] = "has rows with different contents"
    return found


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


def to_stats(row: dict[str, object]) -> Stats:
    """Convert a row of ``stats_columns``."""
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
    by_folder = rows_in(spark, files, entries).groupBy(folder).agg(*columns).collect()
    by_end = {row["folder"]: row.asDict() for row in by_folder}
    found: dict[str, Stats | None] = {}
    for entry in entries:
        # The path below the topic's folder identifies the entry, and has no characters that URLs quote.
        row = by_end.get("/".join(entry.folder.split("/")[2:]))
        if row is None:
            found[entry.folder] = NOTHING
        elif row["contradictions"] or any(row[call] != getattr(entry, name) for call, name in logs):
            found[entry.folder] = None
        else:
            found[entry.folder] = to_stats(row)
    return found


def contradicts_id() -> Column:
    """True if a column that repeats a part of the id differs from it; the digest does not cover these columns."""

    def number(first: int, size: int) -> Column:
        digits = sf.hex(sf.substring("message_id", first, size))
        return sf.conv(digits, 16, 10).try_cast("bigint")

    write_ms, batch_id = number(11, 8), number(19, 2)
    written = sf.when(write_ms != 0, sf.timestamp_millis(write_ms))
    sequence_id = sf.when((write_ms != 0) | (batch_id != 0), batch_id)
    same = (
        sf.col("publish_timestamp").eqNullSafe(sf.timestamp_millis(number(1, 8)))
        & sf.col("seq_id").eqNullSafe(number(9, 2))
        & sf.col("write_timestamp").eqNullSafe(written)
        & sf.col("payload_seq_id").eqNullSafe(sequence_id)
    )
    return ~same

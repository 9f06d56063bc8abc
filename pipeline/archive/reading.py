"""Reading an archive: every message once, whatever batches, days and half-done compactions stand in it."""

from __future__ import annotations

from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from pipeline.archive.coverage import Piece, pieces
from pipeline.archive.files import open_files
from pipeline.archive.inspection import check_unaltered
from pipeline.archive.manifest import NAME, Manifest, parse_manifest
from pipeline.archive.rows import SCHEMA, rows_in
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.archive.files import Files

#: An archive whose days come and go is looked at so often, for two looks that are alike.
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
    """The archived messages, each once, in no order (``orderBy("generation", "message_id")`` gives the topic's).

    Only files that stand in a manifest are read, at the time of this call: what is archived or compacted later is
    not seen, and files that a compaction swept away meanwhile fail the query instead of changing its result.

    Args:
      root: what ``--root`` was: a path, or a URL that Hadoop knows.
      namespace, topic: only these.
      start, end: only ids ``start <= id < end``, 20 bytes each; whole files outside are not opened.
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
    """All entries below a folder. Raises CommandFailed: a manifest cannot be read, or days change all the time."""
    for _ in range(LOOKS):
        paths = files.find(under, NAME)
        texts = {path: files.read(path) for path in paths}
        # A listing is not of one moment: a day may be finished and its batches swept away while it goes on. Whatever
        # vanished before the first listing's end was replaced before the second one began. New batches replace nothing.
        now = {path for path in files.find(under, NAME) if path in texts or "/batches/" not in path}
        if now == texts.keys() and None not in texts.values():
            return [parse_manifest(text or b"", path.rpartition("/")[0]) for path, text in texts.items()]
    raise CommandFailed(
        f"the archive below {files.url(under)} changed each time it was looked at", code=Exit.UNAVAILABLE
    )


def pieces_of(entries: Iterable[Manifest]) -> list[Piece]:
    """What is read of each entry, over all topics and generations."""

    def log(entry: Manifest) -> tuple[str, str, int]:
        return entry.namespace, entry.topic, entry.generation

    return [piece for _, group in groupby(sorted(entries, key=log), log) for piece in pieces(group)]


def within(found: Iterable[Piece], start: bytes | None, end: bytes | None) -> list[Piece]:
    """The same, cut to ids ``start <= id < end``."""
    cut = [
        Piece(piece.entry, max(piece.start, start or piece.start), min(piece.end, end or piece.end)) for piece in found
    ]
    return [piece for piece in cut if piece.start < piece.end]


def rows_of(spark: SparkSession, files: Files, found: Sequence[Piece]) -> DataFrame:
    """The rows of these pieces: whole entries in one scan, each part of an entry in one of its own.

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
    """Whether every row of the entry is in the piece, which its first and last id tell better than its range."""
    first, last = piece.entry.stats.first, piece.entry.stats.last
    return piece.is_whole or (first is not None and last is not None and piece.start <= first and last < piece.end)


def _may_hold(piece: Piece) -> bool:
    first, last = piece.entry.stats.first, piece.entry.stats.last
    return first is not None and last is not None and first < piece.end and piece.start <= last

"""What is replayed: an archive, or any Parquet with a payload and a column to order it by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql import types

from pipeline.archive import layout, reading
from pipeline.archive.coverage import covered
from pipeline.archive.files import open_files
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from pipeline.archive.files import Files
    from pipeline.archive.writing import Log

FIRST_ID, LAST_ID = "00" * 20, "ff" * 20
#: Columns that a message is made of, as far as a source has them.
PARTS = ("payload", "routing_key", "headers")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows with a key, ``start <= key < end``; keys are told as text."""

    name: str
    """The same for the same rows, wherever they are mounted."""
    files: Files
    folder: str
    """Where plans are kept, from the files' root."""
    key: str
    """The column that orders the rows."""

    def rows(self, spark: SparkSession, start: str, end: str) -> DataFrame:
        """The rows of a range; an empty bound is none."""
        raise NotImplementedError

    def as_read(self, spark: SparkSession) -> dict[str, str]:
        """What would tell other rows of the same name; nothing, where a name always means the same."""
        return {}


@dataclass(frozen=True, slots=True)
class ArchiveSource(Source):
    """One generation of a topic in an archive; its keys are ids, as 40 hex digits."""

    root: str
    log: Log

    def rows(self, spark: SparkSession, start: str, end: str) -> DataFrame:
        """As ``Source``; days that were compacted meanwhile are the same rows."""
        found = reading.pieces_of(reading.load_manifests(self.files, self.log.folder))
        bounds = (bytes.fromhex(start or FIRST_ID), bytes.fromhex(end or LAST_ID))
        return reading.rows_of(spark, self.files, reading.within(found, *bounds))

    @property
    def end(self) -> str:
        """The first id after all that is archived. Raises CommandFailed: nothing is."""
        held = covered(reading.load_manifests(self.files, self.log.folder))
        if not held:
            raise CommandFailed(f"there is no archive of {self.log.name} in {self.root}", code=Exit.NOT_FOUND)
        return held[-1].end.hex()


@dataclass(frozen=True, slots=True)
class ParquetSource(Source):
    """Any Parquet files."""

    path: str

    def rows(self, spark: SparkSession, start: str, end: str) -> DataFrame:
        """As ``Source``. Raises CommandFailed: a column is missing, or cannot order rows."""
        rows = spark.read.parquet(self.path)
        if "payload" not in rows.columns or self.key not in rows.columns:
            missing = "payload" if "payload" not in rows.columns else self.key
            has = f"it has {', '.join(rows.columns)[:200]}"
            raise CommandFailed(f"{self.path} has no column {missing}", hint=has, code=Exit.USAGE)
        kind = rows.schema[self.key].dataType
        if start:
            rows = rows.where(sf.col(self.key) >= _value(start, kind))
        return rows.where(sf.col(self.key) < _value(end, kind)) if end else rows

    def as_read(self, spark: SparkSession) -> dict[str, str]:
        """As ``Source``: which files there are, of which size and time."""
        told = [f"_metadata.{each}" for each in ("file_name", "file_size", "file_modification_time")]
        files = sorted(map(str, spark.read.parquet(self.path).select(*told).distinct().collect()))
        return {"files": hashlib.sha256("\n".join(files).encode()).hexdigest()[:16]}


def archive_source(root: str, log: Log, files: Files) -> ArchiveSource:
    """A topic's generation in an archive."""
    folder = f"{layout.topic_folder(log.namespace, log.topic)}/_replays"
    return ArchiveSource(f"{log.name} generation {log.generation}", files, folder, "message_id", root, log)


def parquet_source(spark: SparkSession, path: str, key: str) -> ParquetSource:
    """Parquet files below a path, or one file; plans are kept in the folder, or beside the file."""
    at = PurePosixPath(path) if "://" not in path else None
    root = path if not path.rstrip("/").endswith(".parquet") or at is None else str(at.parent)
    name = f"{path.rstrip('/').rpartition('/')[2]} by {key}"
    return ParquetSource(name, open_files(root, lambda: spark), "_replays", key, path)


def key_text(key: str, kind: types.DataType) -> Column:
    """A key as text that ``rows`` takes as a bound."""
    return sf.lower(sf.hex(key)) if isinstance(kind, types.BinaryType) else sf.col(key).cast("string")


def _value(text: str, kind: types.DataType) -> Column:
    return sf.lit(bytes.fromhex(text)) if isinstance(kind, types.BinaryType) else sf.lit(text).cast(kind)

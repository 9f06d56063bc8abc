"""Keeps the tables up to date: each batch of messages is in all of them or in none, once, after any crash.

A batch is written as one part per table; replacing the manifest commits it. The manifest also names the last message
of each topic, and later batches skip rows up to it. So a batch that is repeated, after a crash or by a new query that
starts from the beginning, changes nothing. Batch numbers and checkpoints do not matter, only that the messages of a
topic arrive in order.

Eight parts of a level are merged into one of the next, up to a full size. So a table has at most a few dozen parts that
are not full, and each row is rewritten once per level.
"""

from __future__ import annotations

import fcntl
import math
import re
import secrets
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq
from pyspark.sql import functions as F  # noqa: N812

from plainsong.cli.command import CommandFailed, Exit
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline.audit.lineage import EDGES, edge_rows
from pyspark_plainsong.pipeline.audit.manifest import (
    LOCK,
    MANIFEST,
    Part,
    TablesManifest,
    first_look,
    load_manifest,
    store_manifest,
)
from pyspark_plainsong.pipeline.audit.messages import ACCESS, parsed
from pyspark_plainsong.pipeline.audit.reading import unmerged
from pyspark_plainsong.pipeline.audit.table import DEAD_LETTERS, TRAIL, USAGE, dead_letter_rows, trail_rows, usage_rows
from pyspark_plainsong.pipeline.files import LocalFiles

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.pipeline.audit.table import Table

TABLES: Final = (TRAIL, USAGE, EDGES, DEAD_LETTERS)
TABLE: Final = {table.name: table for table in TABLES}


@dataclass(frozen=True)
class Absorbed:
    """The figures of a batch: new messages, the bad ones among them, and bytes."""

    messages: int = 0
    bad: int = 0
    bytes: int = 0
    #: The same by topic (``namespace:name``), for topics with new messages.
    of_topic: dict[str, Absorbed] = field(default_factory=dict)


def absorb(keeping: Keeping, messages: DataFrame) -> Absorbed:
    """Add the connector's rows to the tables, without those that the tables already have.

    ``messages`` must have no gap before the last message of each topic. On return, the rows are in the tables, on disk.
    After an error, it is uncertain whether they are, and the caller has to pass them again.
    """
    weighed = keeping.unseen(parsed(messages))
    # Drop the payloads of good messages, which are parsed. A dead letter has only its payload.
    lean = weighed.withColumn("size", F.length("payload")).withColumn(
        "payload", F.when(F.col("reason").isNotNull(), F.col("payload"))
    )
    rows = lean.persist()
    try:
        topics = (
            rows.groupBy("topic")
            .agg(
                F.max("message_id").alias("last"),
                F.count(F.lit(1)).alias("messages"),
                F.count("reason").alias("bad"),
                F.count_if(F.col("reason").isNull() & (F.col("type") == ACCESS)).alias("accesses"),
                F.sum("size").alias("bytes"),
            )
            .collect()
        )
        if not topics:
            return Absorbed()
        count = {name: sum(topic[name] for topic in topics) for name in ("messages", "bad", "accesses", "bytes")}
        batch = {}
        if count["messages"] > count["bad"]:
            batch[TRAIL.name] = trail_rows(rows)
        if count["accesses"]:
            batch |= {USAGE.name: usage_rows(rows), EDGES.name: edge_rows(rows)}
        if count["bad"]:
            batch[DEAD_LETTERS.name] = dead_letter_rows(rows)
        keeping.add(batch, {topic["topic"]: bytes(topic["last"]).hex() for topic in topics})
    finally:
        rows.unpersist()
    keeping.merge(messages.sparkSession)
    of_topic = {each["topic"]: Absorbed(each["messages"], each["bad"], each["bytes"]) for each in topics}
    return Absorbed(count["messages"], count["bad"], count["bytes"], of_topic)


# --- tables ----------------------------------------------------------------------------------------

#: Number of parts of one level that are merged into one of the next.
FAN_IN: Final = 8
#: A part with this many rows is full: in tables without keys it is not merged again.
FULL_ROWS: Final = 5_000_000


class TablesBusy(CommandFailed):
    """Another process has locked these tables for writing. No table was changed; the folder exists."""


class Keeping:
    """The tables in a folder that this process has locked for writing; made by ``keep``."""

    def __init__(self, root: Path, tables: Sequence[Table], keep_s: float) -> None:
        self._root = root
        self._tables = {table.name: table for table in tables}
        self._keep_ms = int(keep_s * 1000)
        self._manifest = load_manifest(root) or TablesManifest()

    @property
    def manifest(self) -> TablesManifest:
        """The current manifest."""
        return self._manifest

    def begin(self, lives: dict[str, int]) -> None:
        """Record the generation of each topic; a topic that was created again is read from its beginning."""
        self._manifest = self._manifest.living(lives)

    def unseen(self, rows: DataFrame) -> DataFrame:
        """Return the rows that the tables do not have yet.

        Args:
          rows: with the columns topic (``namespace:name``) and message_id.
        """
        for topic, last in self._manifest.through.items():
            rows = rows.where(~((F.col("topic") == topic) & (F.col("message_id") <= F.unhex(F.lit(last)))))
        return rows

    def add(self, rows: dict[str, DataFrame], through: dict[str, str]) -> list[Part]:
        """Add the rows, by table, of all messages up to ``through``; return the new parts.

        On return, the rows are in the tables, on disk. After an error, it is uncertain whether they are; the caller may
        pass them again.
        """
        folder = new_folder(self._manifest.sequence + 1)
        written = [write_part(each, self._tables[name], self._root, folder) for name, each in rows.items()]
        parts = [part for part in written if part is not None]
        self._commit(self._manifest.adding(parts, through))
        return parts

    def merge(self, spark: SparkSession) -> int:
        """Merge parts wherever a level has ``FAN_IN`` of them; return the number of parts that were merged."""
        gone = 0
        for table in self._tables.values():
            while (ripe := self._ripe(table)) is not None:
                folder = new_folder(self._manifest.sequence + 1)
                merged = merge_parts(ripe, table, self._root, folder, unmerged(spark, self._root, table, ripe))
                if merged is None:
                    raise AssertionError("parts have rows")
                self._commit(self._manifest.merging(ripe, merged, now_ms()))
                gone += len(ripe)
        return gone

    def _ripe(self, table: Table) -> list[Part] | None:
        by_level: dict[int, list[Part]] = {}
        for part in self._manifest.of(table.name):
            if table.keys or part.rows < FULL_ROWS:
                by_level.setdefault(part.level, []).append(part)
        return next((parts[:FAN_IN] for _level, parts in sorted(by_level.items()) if len(parts) >= FAN_IN), None)

    def _commit(self, manifest: TablesManifest) -> None:
        """Replace the manifest, then remove parts that were retired longer than ``keep_s`` ago."""
        last = now_ms() - self._keep_ms
        old = [each.path for each in manifest.retired if each.at_ms <= last]
        manifest = replace(manifest, retired=tuple(each for each in manifest.retired if each.at_ms > last))
        store_manifest(self._root, manifest)
        self._manifest = manifest
        for path in old:
            shutil.rmtree(self._root / path, ignore_errors=True)

    def sweep(self) -> int:
        """Remove the parts that a killed process left, which the manifest does not name; return their number.

        Only folders named like parts are removed: others do not belong to the tables.
        """
        named = {part.path for part in self._manifest.parts} | {old.path for old in self._manifest.retired}
        swept = 0
        for batch in _folders(self._root / DATA):
            if not FOLDER.fullmatch(batch.name):
                continue
            for folder in _folders(batch):
                if folder.name in self._tables and folder.relative_to(self._root).as_posix() not in named:
                    shutil.rmtree(folder, ignore_errors=True)
                    swept += 1
            if not any(batch.iterdir()):
                batch.rmdir()
        return swept


def _folders(within: Path) -> list[Path]:
    """List the folders directly in a folder, sorted, without links."""
    found = within.iterdir() if within.is_dir() else ()
    return sorted(each for each in found if each.is_dir() and not each.is_symlink())


@contextmanager
def keep(root: Path, tables: Sequence[Table], *, keep_s: float = 3600.0) -> Iterator[Keeping]:
    """Lock the tables in a folder for writing; create the folder, and remove parts that a killed process left.

    Args:
      keep_s: how long files stay after a merge, for readers that have opened them.
    Raises:
      TablesBusy, FolderTaken, TablesUnreadable: no table was changed; the folder may have been created.
    """
    first_look(root)
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise TablesBusy(f"another process keeps the tables in {root}", code=Exit.STORE) from error
        keeping = Keeping(root, tables, keep_s)
        if not (root / MANIFEST).exists():
            store_manifest(root, keeping.manifest)
        keeping.sweep()
        yield keeping


# --- parts -----------------------------------------------------------------------------------------

#: The folder of the parts, within the tables' folder.
DATA: Final = "data"
#: The names that ``new_folder`` makes.
FOLDER: Final = re.compile(r"\d{12,}-[0-9a-f]{8}")
#: Merged parts have files of about this size: large enough to be few, small enough to be read in parallel.
FILE_BYTES: Final = 128 << 20


def new_folder(sequence: int) -> str:
    """Return a new path for parts, never used before: a killed process may have left an incomplete folder."""
    return f"{DATA}/{sequence:012d}-{secrets.token_hex(4)}"


def write_part(rows: DataFrame, table: Table, root: Path, folder: str, *, level: int = 0) -> Part | None:
    """Write rows as a part of a table below ``folder``; None without rows. Invisible until a manifest names it."""
    path = root / folder / table.name
    # Parquet's footers have bounds for 64-bit timestamps, which readers use to skip row groups.
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    ordered = rows.select(*table.columns.names).sortWithinPartitions(*table.order)
    ordered.write.option("compression", "zstd").parquet(str(path.absolute()))
    disk, where = LocalFiles(root), f"{folder}/{table.name}"
    counts = {name: pq.read_metadata(path / name).num_rows for name in disk.sizes(where)}
    sizes = {name: size for name, size in disk.sizes(where).items() if counts[name]}
    if not sizes:
        disk.remove(where)
        return None
    disk.settle([f"{where}/{name}" for name in sizes])
    return Part(table.name, where, tuple(sizes), sum(counts.values()), sum(sizes.values()), level)


def merge_parts(parts: list[Part], table: Table, root: Path, folder: str, frame: DataFrame) -> Part | None:
    """Write ``frame``, the rows of ``parts``, as one part of the next level."""
    files = max(1, math.ceil(sum(part.bytes for part in parts) / FILE_BYTES))
    merged = table.merged(frame)
    spread = merged.coalesce(1) if files == 1 else merged.repartitionByRange(files, *table.order)
    return write_part(spread, table, root, folder, level=max(part.level for part in parts) + 1)

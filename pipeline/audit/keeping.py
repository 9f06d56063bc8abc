"""Keeping tables up to date: each batch of messages is in all of them or in none, once, whoever is killed and when.

A batch is written as one part for each table, then the manifest is replaced: that moment is the commit. The manifest
also says which message of each topic was the last, and rows up to it are left out of what comes later. So a batch that
is given again, after a death or by a new query that starts from the beginning, changes nothing; the number of the batch
and the checkpoint do not matter, only that messages of a topic come in their order.

Parts are merged by eights, as soon as there are eight of a level: a table has a few dozen parts at most, beside full
ones, and each row is rewritten once a level.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812

from pipeline.audit.manifest import LOCK, MANIFEST, Manifest, first_look, load_manifest, store_manifest
from pipeline.audit.parts import DATA, FOLDER, merge_parts, new_folder, write_part
from pipeline.audit.reading import unmerged
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.audit.manifest import Part
    from pipeline.audit.table import Table

#: So many parts of one level become one of the next.
FAN_IN: Final = 8
#: A part of a table without keys that has so many rows is merged no more.
FULL_ROWS: Final = 5_000_000


class TablesBusy(CommandFailed):
    """Another process keeps these tables. Nothing was changed."""


class Keeping:
    """The tables in a folder, of which this process is the only writer; made by `keep`."""

    def __init__(self, root: Path, tables: Sequence[Table], keep_s: float) -> None:
        self._root = root
        self._tables = {table.name: table for table in tables}
        self._keep_ms = int(keep_s * 1000)
        self._manifest = load_manifest(root) or Manifest()

    @property
    def manifest(self) -> Manifest:
        """What the tables consist of now."""
        return self._manifest

    def begin(self, lives: dict[str, int]) -> None:
        """Say which life (generation) each topic is in; ids of one that was made again count from the beginning."""
        self._manifest = self._manifest.living(lives)

    def unseen(self, rows: DataFrame) -> DataFrame:
        """Those of rows with topic (`namespace:name`) and message_id that the tables do not tell of yet."""
        for topic, last in self._manifest.through.items():
            rows = rows.where(~((F.col("topic") == topic) & (F.col("message_id") <= F.unhex(F.lit(last)))))
        return rows

    def add(self, rows: dict[str, DataFrame], through: dict[str, str]) -> list[Part]:
        """Add rows, by table, that tell of all messages up to `through`; returns the parts that were written.

        When it returns they are in the tables and on the disk. When it raises they may be: giving them again is right.
        """
        folder = new_folder(self._manifest.sequence + 1)
        written = [write_part(each, self._tables[name], self._root, folder) for name, each in rows.items()]
        parts = [part for part in written if part is not None]
        self._commit(self._manifest.adding(parts, through))
        return parts

    def merge(self, spark: SparkSession) -> int:
        """Merge where there are eight parts of a level; returns how many parts were merged away."""
        gone = 0
        for table in self._tables.values():
            while (ripe := self._ripe(table)) is not None:
                folder = new_folder(self._manifest.sequence + 1)
                merged = merge_parts(ripe, table, self._root, folder, unmerged(spark, self._root, table, ripe))
                if merged is None:
                    raise AssertionError("parts have rows")
                self._commit(self._manifest.merging(ripe, merged, _now_ms()))
                gone += len(ripe)
        return gone

    def _ripe(self, table: Table) -> list[Part] | None:
        by_level: dict[int, list[Part]] = {}
        for part in self._manifest.of(table.name):
            if table.keys or part.rows < FULL_ROWS:
                by_level.setdefault(part.level, []).append(part)
        return next((parts[:FAN_IN] for _level, parts in sorted(by_level.items()) if len(parts) >= FAN_IN), None)

    def _commit(self, manifest: Manifest) -> None:
        """Replace the manifest; then remove what was retired long enough ago, and is in no manifest any more."""
        last = _now_ms() - self._keep_ms
        old = [each.path for each in manifest.retired if each.at_ms <= last]
        manifest = replace(manifest, retired=tuple(each for each in manifest.retired if each.at_ms > last))
        store_manifest(self._root, manifest)
        self._manifest = manifest
        for path in old:
            shutil.rmtree(self._root / path, ignore_errors=True)

    def sweep(self) -> int:
        """Remove the parts that the manifest does not name: left by a process that died. Returns their number.

        Only what is called as parts are: whatever else lies there is somebody's.
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
    """The folders right in a folder, sorted; no links."""
    found = within.iterdir() if within.is_dir() else ()
    return sorted(each for each in found if each.is_dir() and not each.is_symlink())


@contextmanager
def keep(root: Path, tables: Sequence[Table], *, keep_s: float = 3600.0) -> Iterator[Keeping]:
    """Be the one that keeps the tables in a folder, which is made if need be; what a dead one left is swept away.

    `keep_s`: how long files stay after they were merged into others, for those who are reading them.
    Raises TablesBusy, FolderTaken, and TablesUnreadable.
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


def _now_ms() -> int:
    return time.time_ns() // 1_000_000

"""Compacts the days of a table, removes the files that are no longer part of it, and prunes old days.

Before a day is compacted, its rows are compared with their checksums and with the table's records, so that no damage is
copied; the new files are compared in the same way before one commit replaces the old ones.

Spark writes the files, not delta-rs: its optimize (1.6.6) commits as if it had read the newest version, so if two run
concurrently, both succeed, and every row is duplicated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as sf

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.reading import rows_in
from pyspark_plainsong.pipeline.archive.table import DAY, Conflict, TableFile, TopicTable
from pyspark_plainsong.pipeline.archive.verification import damaged
from pyspark_plainsong.pipeline.archive.writing import SETTINGS, read_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

#: Approximate bytes per file of a compacted day.
FILE_BYTES: Final = 256 << 20
_HOUR_MS: Final = 3_600_000


def days_to_compact(table: TopicTable, *, today: bool = False) -> dict[str, list[TableFile]]:
    """Return the files of each day that has several files, unless a compaction wrote all of them.

    Args:
      today: include days that the archive has only in part.
    """
    end_ms = max((layout.time_of(table.end(each)) for each in table.generations()), default=0)
    by_day: dict[str, list[TableFile]] = {}
    for file in table.all_files():
        if today or layout.day_start_ms(file.day) + layout.DAY_MS <= end_ms:
            by_day.setdefault(file.day, []).append(file)
    return {day: found for day, found in by_day.items() if len(found) > 1 and not all(map(is_compacted, found))}


def is_compacted(file: TableFile) -> bool:
    """True if a compaction wrote the file."""
    return file.path.startswith(layout.COMPACTED)


class Compaction:
    """The compaction of a topic's table."""

    def __init__(self, spark: SparkSession, table: TopicTable, *, compression: str = "zstd") -> None:
        self._spark = spark
        self._table = table
        self._compression = compression

    def run(self, day: str) -> int:
        """Compact a day; return the number of its rows.

        Raises:
          CommandFailed: a file is damaged, or another process compacts the day; nothing was replaced.
        """
        sources = self.check(day)
        self.finish(day, sources, self.write(day, sources))
        return sum(each.rows or 0 for each in sources)

    def check(self, day: str) -> list[TableFile]:
        """Return the files of a day. Raises CommandFailed if one is damaged."""
        table = self._table
        table.reload()
        found = [each for each in table.all_files() if each.day == day]
        for path, why in damaged(self._spark, table, found, table.generations(), [day]).items():
            raise _damage(f"{table.folder}/{path} {why}")
        return found

    def write(self, day: str, sources: Sequence[TableFile]) -> list[TableFile]:
        """Write the rows of files, sorted, to new files in a new folder, which are not part of the table yet."""
        for name, value in SETTINGS.items():
            self._spark.conf.set(name, value)
        table = self._table
        folder = layout.new_compacted_folder(table.folder)
        count = 1 + sum(each.size for each in sources) // FILE_BYTES
        order = [sf.col("generation"), sf.col("message_id")]
        rows = rows_in(self._spark, table, sources)
        spread = rows.repartition(1) if count == 1 else rows.repartitionByRange(count, *order)
        files = spread.sortWithinPartitions(*order).write.option("compression", self._compression)
        files.parquet(table.files.url(f"{folder}/{DAY}={day}"))
        return [each.file for each in read_back(self._spark, table.files, table.folder, folder) if each.file.rows]

    def finish(self, day: str, sources: Sequence[TableFile], made: Sequence[TableFile]) -> None:
        """Replace ``sources`` with ``made`` in one commit.

        Raises:
          CommandFailed: the new files are damaged, or another process has replaced the old ones; nothing was replaced.
        """
        table = self._table
        for path, why in damaged(self._spark, table, made, table.generations(), [day]).items():
            raise _damage(f"{table.folder}/{path} {why}, after it was compacted")
        table.files.settle([f"{table.folder}/{each.path}" for each in made])
        try:
            table.swap(made, sources)
        except Conflict as error:
            says = f"{table.folder}: another process compacts {day}"
            raise CommandFailed(says, hint="wait until it ends", code=Exit.STORE) from error

    def vacuum(self, keep_ms: int) -> int:
        """Delete files that left the table more than ``keep_ms`` ago; return the number of those with rows."""
        removed = self._table.delta.vacuum(
            retention_hours=-(-keep_ms // _HOUR_MS), dry_run=False, enforce_retention_duration=False, full=True
        )
        self._table.reload()
        self._table.settle()
        return sum(path.endswith(".parquet") for path in removed)


def _damage(message: str) -> CommandFailed:
    return CommandFailed(message, hint="archive verify lists all damage", code=Exit.STORE)


def prune(table: TopicTable, before: str) -> list[TableFile]:
    """Remove all days before a day from the table; return their files.

    Raises:
      CommandFailed: another process changed the files.
    """
    while True:
        try:
            return table.prune(before)
        except Conflict:
            table.reload()

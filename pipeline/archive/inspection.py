"""Whether the files of an archive hold what their manifests say: before one is written, and ever after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.archive.rows import SCHEMA, stats_by_entry, stats_of
from pipeline.failures import reason_of
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from pipeline.archive.files import Files
    from pipeline.archive.manifest import Manifest, Stats


def read_back(spark: SparkSession, files: Files, folder: str) -> tuple[Stats, tuple[tuple[str, int], ...]]:
    """Make what was just written to a folder durable.

    Returns:
      what its rows amount to, and the names and sizes of its files, which are those that the rows were read from.
    Raises:
      CommandFailed: the folder was changed, or taken away, meanwhile.
    """
    there = files.sizes(folder)
    if there:  # Spark writes a file where there is no row, too
        stats = stats_of(spark.read.schema(SCHEMA).parquet(*(files.url(f"{folder}/{name}") for name in there)))
        files.settle(folder)
        if files.sizes(folder) == there:
            return stats, tuple(there.items())
    raise damage(f"{folder} was changed by somebody while it was written")


def altered(files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Which entries have files missing, or of another size, by their folder; no file is opened."""
    found: dict[str, str] = {}
    for entry in entries:
        there = files.sizes(entry.folder)
        wrong = [
            f"{name} is missing" if name not in there else f"{name} has {there[name]} bytes, not {size}"
            for name, size in entry.files
            if there.get(name) != size
        ]
        if entry.stats.count and not entry.files:
            wrong.append(f"its {entry.stats.count} rows are in no file")
        if wrong:
            found[entry.folder] = "; ".join(wrong)
    return found


def check_unaltered(files: Files, entries: Sequence[Manifest]) -> None:
    """Raises CommandFailed: an entry has files missing, or of another size."""
    for folder, why in altered(files, entries).items():
        raise damage(f"{folder} is damaged: {why}")


def damage(message: str, *, hint: str = "archive verify tells all that is damaged") -> CommandFailed:
    """The error for it."""
    return CommandFailed(message, hint=hint, code=Exit.STORE)


def damaged(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """What is wrong with entries, by their folder: files missing or of another size, rows of other contents."""
    each_once = list({entry.folder: entry for entry in entries}.values())
    found = altered(files, each_once)
    return found | _changed(spark, files, [entry for entry in each_once if entry.folder not in found])


def _changed(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """Entries whose rows are not those of the manifest: one pass, and halves of it where a file cannot be read."""
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
        if is_now.count != entry.stats.count:
            found[entry.folder] = f"has {is_now.count} rows, not {entry.stats.count}"
        elif is_now != entry.stats:
            found[entry.folder] = "has rows of other contents"
    return found

"""Whether the files of an archive still hold what their manifests say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.archive.rows import stats_by_entry
from pipeline.failures import reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from pipeline.archive.files import Files
    from pipeline.archive.manifest import Manifest


def damaged(spark: SparkSession, files: Files, entries: Sequence[Manifest]) -> dict[str, str]:
    """What is wrong with entries, by their folder: files missing or of another size, rows of other contents."""
    found: dict[str, str] = {}
    each_once = list({entry.folder: entry for entry in entries}.values())
    for entry in each_once:
        there = files.sizes(entry.folder)
        wrong = [
            f"{name} is missing" if name not in there else f"{name} has {there[name]} bytes, not {size}"
            for name, size in entry.files
            if there.get(name) != size
        ]
        if wrong:
            found[entry.folder] = "; ".join(wrong)
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

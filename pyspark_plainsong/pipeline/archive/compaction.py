"""Compacts batches into one entry for each day of a topic. Each step can be interrupted and repeated.

    check   compare the sources' files with their manifests, so that no damage is copied
    write   write the day's rows, sorted, into a folder of this try's own
    finish  read back, compare, make durable, write the manifest: from now on the day answers for its range
    sweep   later, remove entries that others answer for, if the files of those still exist

A day is compacted once the archive reaches beyond its end, so it is written once. A batch across midnight is compacted
with the second of its days.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from plainsong.cli.options import now_ms
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.layout import MANIFEST_NAME
from pyspark_plainsong.pipeline.archive.manifest import NOTHING, Manifest, Range, Stats, covered, merged, minus, pieces
from pyspark_plainsong.pipeline.archive.reading import (
    altered,
    damage,
    damaged,
    is_all,
    load_manifests,
    read_back,
    rows_of,
    stats_of,
    within,
)
from pyspark_plainsong.pipeline.archive.writing import TIMESTAMPS

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from pyspark.sql import SparkSession

    from plainsong.cli.command import CommandFailed
    from pyspark_plainsong.pipeline.archive.manifest import Piece
    from pyspark_plainsong.pipeline.archive.writing import Log
    from pyspark_plainsong.pipeline.files import Files

#: A folder without a manifest that has not changed for this long was left by a killed run.
ORPHAN_MS = 86_400_000
#: Approximate payload bytes per file of a day.
FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Day:
    """A day to write."""

    day: str
    start: bytes
    end: bytes
    pieces: tuple[Piece, ...]

    @property
    def revision(self) -> int:
        """Higher than all revisions that it replaces."""
        return 1 + max((piece.entry.revision for piece in self.pieces if piece.entry.kind == "day"), default=0)

    @property
    def entry(self) -> str:
        """The name of the day's entry; the same sources give the same name."""
        parts = [self.day, self.start.hex(), self.end.hex(), *sorted(piece.entry.folder for piece in self.pieces)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def plan(entries: Sequence[Manifest], *, unfinished: bool = False) -> list[Day]:
    """Return the days of one generation that are not yet in one entry.

    Args:
      unfinished: include the last day even if the archive ends before the day does.
    """
    found = pieces(entries)
    days: list[Day] = []
    for run in covered(entries):
        start = run.start
        for day in _days_with_rows(within(found, *run)):
            day_end = layout.time_bound(layout.day_start_ms(day) + layout.DAY_MS)
            end = min(day_end, run.end)
            parts = tuple(within(found, start, end))
            done = len(parts) == 1 and parts[0].entry.kind == "day" and parts[0].is_whole
            if not done and (unfinished or end == day_end):
                days.append(Day(day, start, end, parts))
            start = end
    return days


def _days_with_rows(found: Sequence[Piece]) -> list[str]:
    days: set[str] = set()
    for piece in found:
        first, last = piece.entry.stats.first, piece.entry.stats.last
        if first is None or last is None or last < piece.start or first >= piece.end:
            continue
        low, high = max(first, piece.start), min(last, piece.end)
        low_ms = layout.day_start_ms(layout.day_of(layout.time_of(low)))
        days |= {layout.day_of(ms) for ms in range(low_ms, layout.time_of(high) + 1, layout.DAY_MS)}
    return sorted(days)


class Compaction:
    """The compaction of one generation of one topic.

    Args:
      held: called before a manifest is written and before a folder is removed; raises if this process no longer holds
        the lock.
    """

    def __init__(
        self,
        spark: SparkSession,
        files: Files,
        log: Log,
        *,
        compression: str = "zstd",
        held: Callable[[], None] = lambda: None,
    ) -> None:
        self._spark = spark
        self._files = files
        self._log = log
        self._compression = compression
        self._held = held

    def entries(self) -> list[Manifest]:
        """Load the present entries."""
        return load_manifests(self._files, self._log.folder)

    def run(self, day: Day) -> Manifest:
        """Do all steps of one day but the sweep. Raises CommandFailed: a source is damaged; nothing was replaced."""
        self.check(day)
        return self.finish(day, self.write(day))

    def check(self, day: Day) -> None:
        """Check the sources' files. Raises CommandFailed: one differs from its manifest; nothing was done."""
        broken = damaged(self._spark, self._files, [piece.entry for piece in day.pieces])
        if broken:
            folder, why = next(iter(broken.items()))
            raise damage(f"{folder} is damaged: {why}")

    def write(self, day: Day) -> str:
        """Write the files into a folder of this try's own, and return it."""
        above = layout.day_folder(self._log.namespace, self._log.topic, self._log.generation, day.day)
        folder = f"{above}/{layout.new_try(f'entry={day.entry}')}"
        self._spark.conf.set(*TIMESTAMPS)
        rows = rows_of(self._spark, self._files, day.pieces)
        count = 1 + sum(piece.entry.stats.payload_bytes for piece in day.pieces) // FILE_BYTES
        spread = rows.repartition(1) if count == 1 else rows.repartitionByRange(count, sf.col("message_id"))
        sorted_rows = spread.sortWithinPartitions("message_id")
        sorted_rows.write.option("compression", self._compression).parquet(self._files.url(folder))
        return folder

    def finish(self, day: Day, folder: str) -> Manifest:
        """Add the day to the archive.

        Raises:
          CommandFailed: its rows differ from those of its sources; it was not added.
        """
        stats, names = read_back(self._spark, self._files, folder)
        if stats != self._expected(day):
            raise damage(f"{folder} differs from its sources")
        manifest = Manifest(
            kind="day",
            namespace=self._log.namespace,
            topic=self._log.topic,
            generation=self._log.generation,
            start=day.start,
            end=day.end,
            stats=stats,
            files=names,
            written_ms=now_ms(),
            source=day.entry,
            day=day.day,
            revision=day.revision,
            folder=folder,
        )
        self._held()
        self._files.write(f"{folder}/{MANIFEST_NAME}", manifest.as_json())
        return manifest

    def sweep(self, keep_ms: int, removed: Callable[[str], None] = lambda folder: None) -> int:
        """Remove entries that others have answered for since ``keep_ms``, and folders of killed runs.

        Args:
          removed: called with each removed folder.
        Returns:
          the number of removed folders.
        """
        entries = self.entries()
        before_ms = now_ms() - keep_ms
        gone = replaced(entries, before_ms)
        broken = altered(self._files, entries) if gone else {}
        if broken:  # a damaged entry still answers for its range, but the entries that it replaced must stay
            gone = replaced(entries, before_ms, broken)
        with_manifest = {entry.folder for entry in entries}
        left = [folder for folder in self._folders() if folder not in with_manifest and self._is_left(folder)]
        for folder in [*(entry.folder for entry in gone), *left]:
            self._held()
            self._files.remove(folder)
            removed(folder)
        for entry in entries:
            if entry.folder in broken and entry not in gone:
                raise _broken(entry, broken[entry.folder])
        return len(gone) + len(left)

    def _expected(self, day: Day) -> Stats:
        whole = [piece for piece in day.pieces if is_all(piece)]
        cut = [piece for piece in day.pieces if not is_all(piece)]
        found = sum((piece.entry.stats for piece in whole), NOTHING)
        return found + stats_of(rows_of(self._spark, self._files, cut)) if cut else found

    def _folders(self) -> list[str]:
        found = []
        for above in ("batches", "days"):
            for group in self._files.names(f"{self._log.folder}/{above}"):
                under = f"{self._log.folder}/{above}/{group}"
                found += [f"{under}/{name}" for name in self._files.names(under)]
        return found

    def _is_left(self, folder: str) -> bool:
        """True if a folder without a manifest was left by a killed run."""
        if folder.startswith(f"{self._log.folder}/days/"):
            return True  # only this process writes them, under the lock
        modified_ms = self._files.modified_ms(folder)
        return modified_ms is not None and now_ms() - modified_ms > ORPHAN_MS


def replaced(entries: Sequence[Manifest], before_ms: int, broken: Container[str] = ()) -> list[Manifest]:
    """Return the entries that others, written before a time, fully answer for.

    Args:
      broken: folders of damaged entries, which answer for no other.
    """
    found: list[Manifest] = []
    ranked = sorted((entry for entry in entries if entry.written_ms <= before_ms), key=lambda each: each.rank)
    taken: list[Range] = []
    for entry in ranked:
        if not minus(Range(entry.start, entry.end), taken):
            found.append(entry)
        if entry.folder in broken:
            continue
        taken = merged([*taken, Range(entry.start, entry.end)])
    return found


def _broken(entry: Manifest, why: str) -> CommandFailed:
    says = f"{entry.folder} is damaged: {why}; what it replaces was not removed"
    return damage(says, hint="remove the folder: the files that it replaces are then read and compacted again")

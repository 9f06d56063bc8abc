"""Makes a Delta table of an archive that an earlier version wrote, entry by entry.

Each entry is checked, copied and committed as a batch, in the order of the ids, so the table's end says how far the
migration has come, and a killed one continues there. The old folder is removed once the table has all of it; until then
no other command uses the archive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.output import counted
from pyspark_plainsong.pipeline.archive import former, layout
from pyspark_plainsong.pipeline.archive.table import TopicTable
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter, Log

if TYPE_CHECKING:
    from pyspark_plainsong.pipeline.archive.former import Piece
    from pyspark_plainsong.pipeline.files import Files
    from pyspark_plainsong.pipeline.job import Run


class Migration:
    """The migration of one topic's archive.

    Args:
      may_lose: continue after ranges that the archive lacks, instead of failing.
    """

    def __init__(self, run: Run, files: Files, topic: str, *, compression: str, may_lose: bool) -> None:
        self._run = run
        self._files = files
        self._namespace = run.where.namespace
        self._topic = topic
        self._compression = compression
        self._may_lose = may_lose

    def generations(self) -> list[Log]:
        """Return the generations that wait for their migration."""
        names = self._files.names(layout.topic_folder(self._namespace, self._topic))
        numbers = (name.removeprefix(layout.FORMER) for name in names if name.startswith(layout.FORMER))
        return [Log(self._namespace, self._topic, each) for each in sorted(int(number) for number in numbers)]

    def take_over(self, log: Log) -> int:
        """Copy the rest of a generation into the table, and remove its folder; return the number of rows.

        Raises:
          CommandFailed: an entry is damaged or missing; nothing was removed.
        """
        folder = f"{log.folder}/{layout.FORMER}{log.generation}"
        entries = former.load_manifests(self._files, folder)
        table = TopicTable.create(self._files, self._namespace, self._topic)
        end = table.end(log.generation)
        writer = ArchiveWriter(self._files, log, compression=self._compression)
        rows = 0
        # An entry before the table's end was copied: since then its folder may have been removed in part.
        for piece in former.within(former.pieces(entries), end, None):
            self._check_no_gap(log, end, piece.start)
            rows += self._copy(writer, piece, end)
            end = piece.end
        self._files.remove(folder)
        self._files.remove(f"{log.folder}/_checkpoints/{layout.FORMER}{log.generation}")
        return rows

    def _copy(self, writer: ArchiveWriter, piece: Piece, end: bytes) -> int:
        spark = self._run.session()
        for folder, why in former.damaged(spark, self._files, [piece.entry]).items():
            raise CommandFailed(f"{folder} is damaged: {why}", hint="restore the folder", code=Exit.STORE)
        rows = former.rows_of(spark, self._files, [piece])
        batch = writer.put(rows, layout.Range(end, piece.end))
        count = 0 if batch is None else batch.rows
        if former.is_all(piece) and count != piece.entry.stats.count:
            says = (
                f"{piece.entry.folder} has {counted(piece.entry.stats.count, 'row')}, but {count} came out of the copy"
            )
            raise CommandFailed(says, code=Exit.STORE)
        self._run.metrics.add("rows_total", count, topic=self._topic)
        self._run.metrics.add("batches_total", topic=self._topic)
        self._run.progress.event("batch", topic=self._topic, rows=count, folder=piece.entry.folder)
        return count

    def _check_no_gap(self, log: Log, end: bytes, start: bytes) -> None:
        if start <= end or end == layout.FIRST:
            return
        says = f"{log.name}: the archive has no messages {layout.show_range(end, start)}"
        if not self._may_lose:
            raise CommandFailed(says, hint="restore the folders, or continue without: --may-lose", code=Exit.STORE)
        self._run.warn(says, "hole", topic=self._topic, start=end.hex(), end=start.hex())

"""Writes one micro-batch into a new folder, reads it back, and commits it to the topic's table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as sf

from plainsong.cli.command import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.reading import (
    CHECKSUM,
    LAST,
    archived,
    checksum,
    day_column,
    file_path,
    name_in,
    parquet,
)
from pyspark_plainsong.pipeline.archive.table import DAY, Batch, Conflict, TableFile, Tally, TopicTable, Written

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.pipeline.files import Files

#: Settings of the session for writing.
SETTINGS: Final[Mapping[str, str]] = {
    # Spark's default is INT96, which other readers have deprecated.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Otherwise each task sorts its rows by day before it writes them.
    "spark.sql.maxConcurrentOutputFileWriters": "32",
}


@dataclass(frozen=True, slots=True)
class Log:
    """One generation of one topic."""

    namespace: str
    topic: str
    generation: int

    @property
    def name(self) -> str:
        """The topic's name in the connector's offsets."""
        return f"{self.namespace}:{self.topic}"

    @property
    def folder(self) -> str:
        """The folder of the topic's table."""
        return layout.topic_folder(self.namespace, self.topic)


class Offsets:
    """The range of each batch of a query, from its checkpoint.

    Args:
      files: files with the checkpoint as their root.
      log: the topic that the query reads.
      start: where the query began.
    """

    def __init__(self, files: Files, log: Log, start: bytes) -> None:
        self._files = files
        self._log = log
        self._start = start

    def bounds(self, batch: int) -> layout.Range:
        """Return the ids of a batch that Spark has begun."""
        return layout.Range(self._start if batch == 0 else self._end(batch - 1), self._end(batch))

    def _end(self, batch: int) -> bytes:
        text = self._files.read(f"offsets/{batch}")
        assert text is not None, f"Spark writes offsets/{batch} before it runs the batch"
        # Three lines: the version, Spark's metadata, the connector's offset.
        offset: dict[str, Any] = json.loads(text.decode().splitlines()[2])["topics"][self._log.name]
        if offset["gen"] != self._log.generation:
            says = f"{self._log.name} was deleted and created again during the run"
            raise CommandFailed(says, hint="run it again, which archives the new topic", code=Exit.STORE)
        return bytes.fromhex(offset["next"])


class ArchiveWriter:
    """Writes batches into the table of one generation.

    The table has the position, so a batch is committed once: what is repeated after a kill, or was archived by another
    process at the same time, is left out.

    Args:
      files: the archive's files.
    """

    def __init__(self, files: Files, log: Log, *, compression: str = "zstd") -> None:
        self._files = files
        self._log = log
        self._compression = compression
        self._table: TopicTable | None = None

    def put(self, rows: DataFrame, bounds: layout.Range) -> Batch | None:
        """Write all messages of a range as one commit; None if the table has them already.

        Raises CommandFailed, or what Spark raises: then the messages are not part of the archive.
        """
        table = self._opened()
        while (position := table.end(self._log.generation)) < bounds.end:
            if position < bounds.start:
                says = f"the archive of {self._log.name} has gone back to an older version during the run"
                raise CommandFailed(says, hint="run it again", code=Exit.STORE)
            left = rows if position == bounds.start else rows.where(sf.col("message_id") >= sf.lit(position))
            written = self.write(left, layout.Range(position, bounds.end))
            while table.end(self._log.generation) == position:
                try:
                    return table.append(self._log.generation, position, bounds.end, written)
                except Conflict:  # another process appends or compacts
                    table.reload()
        return None

    def write(self, rows: DataFrame, bounds: layout.Range) -> list[Written]:
        """Write rows into files of a new folder, read them back, and make them durable."""
        spark = rows.sparkSession
        for name, value in SETTINGS.items():
            spark.conf.set(name, value)
        number = self._opened().batches(self._log.generation) + 1
        folder = layout.new_batch_folder(self._log.namespace, self._log.topic, number)
        kept = archived(rows, self._log.generation).withColumn(CHECKSUM, checksum()).withColumn(DAY, day_column())
        # Each partition of the connector is a range of ids in order, and so is each file.
        kept.write.option("compression", self._compression).partitionBy(DAY).parquet(self._files.url(folder))
        written = read_back(spark, self._files, self._log.folder, folder, bounds)
        self._files.settle([f"{self._log.folder}/{each.file.path}" for each in written])
        return written

    def _opened(self) -> TopicTable:
        if self._table is None:
            self._table = TopicTable.create(self._files, self._log.namespace, self._log.topic)
            self._table.widen()
        self._table.reload()
        return self._table


class BatchCommitter:
    """Writes the batches of ``foreachBatch``.

    Args:
      done: called with each batch that was committed.
    """

    def __init__(self, writer: ArchiveWriter, offsets: Offsets, done: Callable[[Batch], None]) -> None:
        self._writer = writer
        self._offsets = offsets
        self._done = done

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Write a batch. Raises CommandFailed, or what Spark raises: then the batch is not part of the archive."""
        committed = self._writer.put(rows, self._offsets.bounds(batch))
        if committed is not None:
            self._done(committed)


def read_back(
    spark: SparkSession, files: Files, table: str, folder: str, bounds: layout.Range | None = None
) -> list[Written]:
    """Return the Parquet files in the folders of days below a folder of a table, and their figures, by name.

    Args:
      bounds: the range of their ids; None: any.
    Raises:
      CommandFailed: they have ids outside ``bounds``.
    """
    days = [name for name in files.names(folder) if name.startswith(f"{DAY}=")]
    sizes = {f"{day}/{name}": size for day in days for name, size in files.sizes(f"{folder}/{day}").items()}
    if not sizes:
        return []
    counted = parquet(spark, [files.url(f"{folder}/{each}") for each in sizes]).groupBy(file_path())
    start, end = (sf.lit(each) for each in bounds or (layout.FIRST, LAST))
    at_ms = sf.unix_millis("publish_timestamp")
    # All of them are numbers: Spark sorts the rows for the smallest or the largest binary value.
    rows = counted.agg(
        sf.count(sf.lit(1)).alias("rows"),
        sf.coalesce(sf.bit_xor(CHECKSUM), sf.lit(0)).alias("digest"),
        sf.coalesce(sf.sum(sf.octet_length("payload")), sf.lit(0)).alias("size"),
        sf.count_if((sf.col("message_id") < start) | (sf.col("message_id") >= end)).alias("outside"),
        *(figure for of in (sf.min, sf.max) for figure in (of(at_ms), of("generation"))),
    ).collect()
    within = folder.removeprefix(f"{table}/")
    found = []
    for path, count, digest, size, outside, first_ms, lowest, last_ms, highest in rows:
        if outside:
            raise CommandFailed(f"{folder} has ids outside its range", code=Exit.STORE)
        name = name_in(path)
        day = name.partition("/")[0].removeprefix(f"{DAY}=")
        generations = int(lowest), int(highest)
        file = TableFile(f"{within}/{name}", sizes[name], day, count, int(first_ms), int(last_ms), generations)
        found.append(Written(file, Tally(count, int(digest)), int(size)))
    return sorted(found, key=lambda each: each.file.path)

"""Writes one micro-batch into one folder, a new one for each attempt; reads it back, and writes its manifest last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.options import now_ms
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.layout import MANIFEST_NAME
from pyspark_plainsong.pipeline.archive.manifest import Manifest, parse_manifest
from pyspark_plainsong.pipeline.archive.reading import archived, check_unaltered, read_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.pipeline.files import Files

#: The file in a checkpoint with the start of its first batch.
START = "_start.json"
#: The file in a checkpoint with the time when there was nothing left to archive.
CAUGHT_UP = "_caught_up.json"
#: Spark's default is INT96, which other readers have deprecated.
TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


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
        """The folder of its entries."""
        return layout.generation_folder(self.namespace, self.topic, self.generation)


class Offsets:
    """The offsets in a query's checkpoint: the range of each batch.

    Args:
      files: files with the checkpoint as their root.
      log: the topic that the query reads.
    """

    def __init__(self, files: Files, log: Log) -> None:
        self.files = files
        self._log = log

    def bounds(self, batch: int) -> tuple[bytes, bytes]:
        """Return the range of ids, ``start <= id < end``, of a batch that Spark has begun. Raises CommandFailed."""
        start = self.first() if batch == 0 else self._end(batch - 1)
        end = self._end(batch)
        if start is None or end is None:
            raise CommandFailed(f"the checkpoint has no batch {batch}", code=Exit.STORE)
        return start, end

    def done(self) -> bytes | None:
        """Return the end of the newest finished batch; None if there is none."""
        batches = [int(name) for name in self.files.names("commits") if name.isdigit()]
        return self._end(max(batches)) if batches else None

    @property
    def is_new(self) -> bool:
        """True if no query has used the checkpoint yet."""
        return not self.files.names("offsets")

    def first(self) -> bytes | None:
        """Return the start of the first batch; None if the checkpoint is new."""
        text = self.files.read(START)
        return None if text is None else bytes.fromhex(json.loads(text)["start"])

    def begin(self, start: bytes) -> None:
        """Record the start of the first batch before it is requested, so that it is the same after a kill."""
        fields = {"topic": self._log.name, "generation": self._log.generation, "start": start.hex()}
        self.files.write(START, json.dumps(fields).encode())

    def note_caught_up(self, end: bytes, at_ms: int) -> None:
        """Record that all messages were archived at ``at_ms``: the topic had none from ``end`` on."""
        self.files.write(CAUGHT_UP, json.dumps({"end": end.hex(), "atMs": at_ms}).encode())

    def caught_up_ms(self) -> int | None:
        """Return when the archive had caught up with the topic; None if it never has, or has archived batches since."""
        text = self.files.read(CAUGHT_UP)
        caught_up = {} if text is None else json.loads(text)
        done = self.done()
        return int(caught_up["atMs"]) if done is not None and caught_up.get("end") == done.hex() else None

    def _end(self, batch: int) -> bytes | None:
        text = self.files.read(f"offsets/{batch}")
        if text is None:
            return None
        # Three lines: the version, Spark's metadata, the connector's offset.
        offset: dict[str, Any] = json.loads(text.decode().splitlines()[2])["topics"][self._log.name]
        if offset["gen"] != self._log.generation:
            says = f"the checkpoint is of generation {offset['gen']} of {self._log.name}, not {self._log.generation}"
            raise CommandFailed(says, hint="give each generation a --checkpoint of its own", code=Exit.STORE)
        return bytes.fromhex(offset["next"])


class ArchiveWriter:
    """Writes the batches of ``foreachBatch``. After a kill Spark repeats the last batch, with the same range.

    Args:
      files: the archive's files.
      offsets: the offsets of the query's checkpoint.
      is_held: returns True if the archive already has a range of ids; called for the first batch of a run only, since
        no other can be a repetition.
      check: called before a manifest is written; raises if this process no longer holds the lock.
      done: called with the manifest of each batch that was written.
    """

    def __init__(
        self,
        files: Files,
        log: Log,
        offsets: Offsets,
        *,
        compression: str = "zstd",
        is_held: Callable[[bytes, bytes], bool] = lambda start, end: False,
        check: Callable[[], None] = lambda: None,
        done: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        self._files = files
        self._log = log
        self._offsets = offsets
        self._compression = compression
        self._is_held = is_held
        self._check = check
        self._done = done
        self._is_first = True

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Write a batch, unless the archive has it.

        Raises CommandFailed, or what Spark raises: the batch is not part of the archive.
        """
        archive = _query_id(rows.sparkSession)
        start, end = self._offsets.bounds(batch)
        again, self._is_first = self._is_first, False
        if again and (self._is_there(archive, batch, start, end) or self._is_held(start, end)):
            return
        self._done(self.put(rows, archive, batch, (start, end)))

    def put(self, rows: DataFrame, archive: str, batch: int, bounds: tuple[bytes, bytes]) -> Manifest:
        """Write rows as an entry. Raises CommandFailed, or what Spark raises: they are not part of the archive."""
        folder = self.new_folder(archive, batch)
        self.write(rows, folder)
        return self.describe(rows.sparkSession, folder, archive, batch, bounds)

    def new_folder(self, archive: str, batch: int) -> str:
        """Return a new folder for an attempt to write a batch."""
        return f"{self._batches(archive)}/{layout.new_try(layout.batch_name(batch))}"

    def write(self, rows: DataFrame, folder: str) -> None:
        """Write the files into a new folder."""
        kept = archived(rows, self._log.generation)
        # Each partition of the connector is a range of ids in order, and so is each file.
        kept.write.option("compression", self._compression).parquet(self._files.url(folder))

    def describe(
        self, spark: SparkSession, folder: str, archive: str, batch: int, bounds: tuple[bytes, bytes]
    ) -> Manifest:
        """Read the files back, make them durable, and write the manifest, which makes them part of the archive."""
        stats, names = read_back(spark, self._files, folder)
        start, end = bounds
        if stats.count and not (start <= (stats.first or b"") and (stats.last or b"") < end):
            raise CommandFailed(f"batch {batch} of {self._log.name} has ids outside its range", code=Exit.STORE)
        manifest = Manifest(
            kind="batch",
            namespace=self._log.namespace,
            topic=self._log.topic,
            generation=self._log.generation,
            start=start,
            end=end,
            stats=stats,
            files=names,
            written_ms=now_ms(),
            source=archive,
            batch=batch,
            folder=folder,
        )
        self._check()
        self._files.write(f"{folder}/{MANIFEST_NAME}", manifest.as_json())
        return manifest

    def _is_there(self, archive: str, batch: int, start: bytes, end: bytes) -> bool:
        """Return True if an earlier attempt has finished the batch. Removes the unfinished attempts of killed runs."""
        found = False
        batches = self._batches(archive)
        for name in self._files.names(batches):
            if not name.startswith(layout.batch_name(batch)):
                continue
            folder = f"{batches}/{name}"
            text = self._files.read(f"{folder}/{MANIFEST_NAME}")
            if text is None:
                self._check()
                self._files.remove(folder)
                continue
            there = parse_manifest(text, folder)
            if (there.start, there.end) != (start, end):
                says = f"{there.name} has ids that do not match the checkpoint"
                raise CommandFailed(says, hint="was the checkpoint restored, or edited?", code=Exit.STORE)
            check_unaltered(self._files, [there])
            found = True
        return found

    def _batches(self, archive: str) -> str:
        return layout.batches_folder(self._log.namespace, self._log.topic, self._log.generation, archive)


def _query_id(spark: SparkSession) -> str:
    """Return the archive id: the id of the query, which its checkpoint stores."""
    found = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    assert found is not None, "this runs inside a streaming query"
    return found.replace("-", "")

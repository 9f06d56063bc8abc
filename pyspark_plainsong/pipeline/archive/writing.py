"""Writes one micro-batch into one folder, a new one for each try; reads it back, and writes its manifest last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plainsong.cli.options import now_ms
from plainsong.cli.verb import CommandFailed, Exit
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.layout import MANIFEST_NAME
from pyspark_plainsong.pipeline.archive.manifest import Manifest, parse_manifest
from pyspark_plainsong.pipeline.archive.reading import archived, check_unaltered, read_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.pipeline.files import Files

#: The file in a checkpoint that says where its first batch starts.
START = "_start.json"
#: And the one that says when there was nothing left to archive.
CAUGHT_UP = "_caught_up.json"
#: Spark's own default is the INT96 of old, which other readers take for deprecated.
TIMESTAMPS = ("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")


@dataclass(frozen=True, slots=True)
class Log:
    """One generation of one topic."""

    namespace: str
    topic: str
    generation: int

    @property
    def name(self) -> str:
        """As the connector's offsets name it."""
        return f"{self.namespace}:{self.topic}"

    @property
    def folder(self) -> str:
        """Of its entries."""
        return layout.generation_folder(self.namespace, self.topic, self.generation)


class Offsets:
    """What a query noted in its checkpoint: the range of each batch.

    Args:
      files: with the checkpoint as their root.
      log: whose messages the query reads.
    """

    def __init__(self, files: Files, log: Log) -> None:
        self.files = files
        self._log = log

    def bounds(self, batch: int) -> tuple[bytes, bytes]:
        """The ids ``start <= id < end`` of a batch that Spark has begun. Raises CommandFailed."""
        start = self.first() if batch == 0 else self._end(batch - 1)
        end = self._end(batch)
        if start is None or end is None:
            raise CommandFailed(f"the checkpoint says nothing of batch {batch}", code=Exit.STORE)
        return start, end

    def done(self) -> bytes | None:
        """Where the newest batch that was finished ends; None before the first one."""
        batches = [int(name) for name in self.files.names("commits") if name.isdigit()]
        return self._end(max(batches)) if batches else None

    @property
    def is_new(self) -> bool:
        """Whether no query has used the checkpoint yet."""
        return not self.files.names("offsets")

    def first(self) -> bytes | None:
        """Where the first batch starts; None for a new checkpoint."""
        text = self.files.read(START)
        return None if text is None else bytes.fromhex(json.loads(text)["start"])

    def begin(self, start: bytes) -> None:
        """Note where the first batch starts, before there is one: what is asked for again after a kill is the same."""
        told = {"topic": self._log.name, "generation": self._log.generation, "start": start.hex()}
        self.files.write(START, json.dumps(told).encode())

    def note_caught_up(self, end: bytes, at_ms: int) -> None:
        """Note that at a time the topic had no message from ``end`` on, and all before it was archived."""
        self.files.write(CAUGHT_UP, json.dumps({"end": end.hex(), "atMs": at_ms}).encode())

    def caught_up_ms(self) -> int | None:
        """When the archive had caught up with the topic, if nothing was archived since."""
        text = self.files.read(CAUGHT_UP)
        told = {} if text is None else json.loads(text)
        done = self.done()
        return int(told["atMs"]) if done is not None and told.get("end") == done.hex() else None

    def _end(self, batch: int) -> bytes | None:
        text = self.files.read(f"offsets/{batch}")
        if text is None:
            return None
        # v1, a line of Spark's, and the connector's offset.
        told: dict[str, Any] = json.loads(text.decode().splitlines()[2])["topics"][self._log.name]
        if told["gen"] != self._log.generation:
            says = f"the checkpoint is of generation {told['gen']} of {self._log.name}, not {self._log.generation}"
            raise CommandFailed(says, hint="give each generation a --checkpoint of its own", code=Exit.STORE)
        return bytes.fromhex(told["next"])


class ArchiveWriter:
    """What ``foreachBatch`` calls; the same batch comes again after a kill, with the same range.

    Args:
      files: of the archive.
      offsets: of the query's checkpoint.
      is_held: whether a range of ids stands in the archive already; asked once, since only the first batch of a run
        can be one that was there before.
      check: called before a manifest is written; raises when this process is no longer the only writer.
      done: called with each batch that was written.
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
        """Write a batch, unless it is there. Raises whatever Spark raises; the batch is no part of the archive then."""
        archive = _query_id(rows.sparkSession)
        start, end = self._offsets.bounds(batch)
        again, self._is_first = self._is_first, False
        if again and (self._is_there(archive, batch, start, end) or self._is_held(start, end)):
            return
        self._done(self.put(rows, archive, batch, (start, end)))

    def put(self, rows: DataFrame, archive: str, batch: int, bounds: tuple[bytes, bytes]) -> Manifest:
        """Make rows an entry. Raises CommandFailed, or what Spark raises: they are no part of the archive."""
        folder = self.new_folder(archive, batch)
        self.write(rows, folder)
        return self.describe(rows.sparkSession, folder, archive, batch, bounds)

    def new_folder(self, archive: str, batch: int) -> str:
        """For one try at a batch."""
        return f"{self._batches(archive)}/{layout.new_try(layout.batch_name(batch))}"

    def write(self, rows: DataFrame, folder: str) -> None:
        """The files, in a folder that is not there yet."""
        kept = archived(rows, self._log.generation)
        # A partition of the connector is a range of ids, read in order: so is each file.
        kept.write.option("compression", self._compression).parquet(self._files.url(folder))

    def describe(
        self, spark: SparkSession, folder: str, archive: str, batch: int, bounds: tuple[bytes, bytes]
    ) -> Manifest:
        """Read back what was written, make it durable, and write the manifest, which makes it part of the archive."""
        stats, names = read_back(spark, self._files, folder)
        start, end = bounds
        if stats.count and not (start <= (stats.first or b"") and (stats.last or b"") < end):
            raise CommandFailed(f"batch {batch} of {self._log.name} has ids outside of its range", code=Exit.STORE)
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
        """Whether a try was finished; the others, of which only killed runs can be, are taken away."""
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
                says = f"{there.name} is of other ids than the checkpoint says"
                raise CommandFailed(says, hint="was the checkpoint restored, or edited?", code=Exit.STORE)
            check_unaltered(self._files, [there])
            found = True
        return found

    def _batches(self, archive: str) -> str:
        return layout.batches_folder(self._log.namespace, self._log.topic, self._log.generation, archive)


def _query_id(spark: SparkSession) -> str:
    """The archive id: that of the query, which is that of its checkpoint."""
    found = spark.sparkContext.getLocalProperty("sql.streaming.queryId")
    assert found is not None, "this runs inside of a streaming query"
    return found.replace("-", "")

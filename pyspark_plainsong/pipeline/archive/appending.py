"""Brings an archive up to date with a topic: a streaming query from where the archive ends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from plainsong.cli.options import show_length
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.layout import FIRST
from pyspark_plainsong.pipeline.archive.table import Batch, TopicTable
from pyspark_plainsong.pipeline.archive.writing import ArchiveWriter, BatchCommitter, Log, Offsets
from pyspark_plainsong.pipeline.files import LocalFiles, open_files
from pyspark_plainsong.pipeline.grace import Grace
from pyspark_plainsong.pipeline.streams import Batches, disposable_checkpoints

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack

    from pyspark.sql.streaming.query import StreamingQuery

    from plainsong import Client
    from pyspark_plainsong.pipeline.job import Run


@dataclass(frozen=True, slots=True)
class AppendOptions:
    """Options of archiving."""

    root: str
    batch_rows: int = 500_000
    batch_bytes: int = 256 << 20
    compression: str = "zstd"
    isolation: str | None = None
    may_lose: bool = False
    """Skip messages that expired before they were archived, instead of failing."""
    warn_at: float = 0.5
    """Warn when the oldest waiting message is older than this fraction of the topic's ttl."""


class Subject:
    """One topic and its archive. Raises CommandFailed: the archive was written by an earlier version."""

    def __init__(self, run: Run, client: Client, topic: str, choices: AppendOptions) -> None:
        properties = client.admin.properties(topic)
        self.run, self.topic, self.choices = run, topic, choices
        self.log = Log(run.where.namespace, topic, int(properties["generation"]))
        self.ttl_s = int(properties["ttl"])
        self.files = open_files(choices.root, run.session)
        self._table = TopicTable.open(self.files, self.log.namespace, topic)
        self._grace = Grace()
        self._client = client

    @property
    def resumes_at(self) -> bytes:
        """The id at which a new run would start to archive."""
        if self._table is None:
            self._table = TopicTable.open(self.files, self.log.namespace, self.topic)
            return FIRST if self._table is None else self._table.end(self.log.generation)
        self._table.reload()
        return self._table.end(self.log.generation)

    def start(
        self, done: Callable[[Batch], None], scratch: ExitStack, *, every: str | None
    ) -> tuple[StreamingQuery, Batches]:
        """Start the query; return it and the handler of its batches.

        Args:
          done: called in the query's thread with each committed batch.
          scratch: removes Spark's working files at the end. They are needed during one run only, since the table has
            the position.
          every: the trigger's interval; None: end when the current backlog is archived.
        """
        start = self.resumes_at
        checkpoint = scratch.enter_context(TemporaryDirectory(prefix="plainsong-archive-", ignore_cleanup_errors=True))
        rows = self.run.session().readStream.format("plainsong")
        rows = rows.options(**self.source(start, follows=every is not None))
        offsets = Offsets(LocalFiles(Path(checkpoint)), self.log, start)
        batches = Batches(BatchCommitter(self.writer(), offsets, done))
        query = rows.load().writeStream.foreachBatch(batches).queryName(f"archive {self.log.name}")
        query = query.option("checkpointLocation", Path(checkpoint).as_uri())
        timed = query.trigger(availableNow=True) if every is None else query.trigger(processingTime=every)
        with disposable_checkpoints(self.run.session()):
            return timed.start(), batches

    def writer(self) -> ArchiveWriter:
        """Return a writer of batches into this archive."""
        return ArchiveWriter(self.files, self.log, compression=self.choices.compression)

    def check_nothing_was_lost(self) -> None:
        """Check the duration of a run that could not detect losses.

        Raises:
          CommandFailed: the run took so long that messages may have expired unarchived.
        """
        self._grace.check(now_ms(), f"{self.log.name}: the run", "archive more often, or raise the ttl")

    def waiting_s(self, end: bytes) -> float:
        """Return the age in seconds of the oldest message from ``end`` on, in any state; 0 if there is none."""
        seen = self._client.admin.messages(self.topic, end, limit=1)
        return max(0.0, (now_ms() - seen[0].publish_time_ms) / 1000) if seen else 0.0

    def warn_if_behind(self, end: bytes, *, is_complete: bool = False) -> bool:
        """Report the archive's lag; True if it exceeds ``warn_at``.

        Args:
          is_complete: a run that would have noticed a loss has just ended at ``end``. Otherwise an empty topic proves
            nothing if a message could have been published and expired since the archive was known to be complete.
        """
        asked_ms = now_ms()
        age_s = self.waiting_s(end)
        known_ms = max(layout.time_of(end), self._caught_up_ms() or 0)
        is_complete = is_complete or asked_ms - known_ms < self.ttl_s * 1000
        if age_s == 0 and end != FIRST and is_complete and not self.run.dry_run:
            self.files.write(self._caught_up_file, json.dumps({"end": end.hex(), "atMs": asked_ms}).encode())
        self.run.metrics.set("lag_seconds", age_s, topic=self.topic)
        self.run.metrics.set("ttl_used_ratio", age_s / self.ttl_s, topic=self.topic)
        if age_s <= self.choices.warn_at * self.ttl_s:
            return False
        used = f"{age_s / self.ttl_s:.0%} of its time to live"
        self.run.warn(
            f"{self.log.name}: the oldest unarchived message is {show_length(age_s * 1000)} old, {used}; archive more "
            "often, or raise the ttl",
            "behind",
            topic=self.topic,
            ageSeconds=round(age_s, 1),
            ttlSeconds=self.ttl_s,
        )
        return True

    def _caught_up_ms(self) -> int | None:
        """Return when the archive had caught up with the topic; None if it never has, or has archived batches since."""
        text = self.files.read(self._caught_up_file)
        caught_up = {} if text is None else json.loads(text)
        return int(caught_up["atMs"]) if caught_up.get("end") == self.resumes_at.hex() else None

    @property
    def _caught_up_file(self) -> str:
        return layout.caught_up_file(self.log.namespace, self.topic, self.log.generation)

    def _is_safe(self) -> bool:
        """True if no message can have expired unarchived, although the archive's end may be older than the ttl."""
        caught_up_ms = self._caught_up_ms()
        return caught_up_ms is not None and self._grace.begin([(caught_up_ms, self.ttl_s * 1000)], now_ms())

    @property
    def is_quiet(self) -> bool:
        """True if the archive's end is older than the ttl, and yet no message can be missing."""
        return layout.time_of(self.resumes_at) < now_ms() - self.ttl_s * 1000 and self._is_safe()

    def source(self, start: bytes, *, follows: bool = False) -> dict[str, str]:
        """Return the connector's options for a query from ``start``."""
        options = self.run.source(
            subscribe=self.topic,
            startingOffsets=starting_offsets(self.log, start),
            maxOffsetsPerTrigger=str(self.choices.batch_rows),
            maxBytesPerTrigger=str(self.choices.batch_bytes),
            minPartitions=str(self.run.session().sparkContext.defaultParallelism),
            failOnDataLoss=str(not (self.choices.may_lose or (not follows and self._is_safe()))).lower(),
        )
        if self.choices.isolation is not None:
            options["isolation"] = self.choices.isolation
        return options


def starting_offsets(log: Log, start: bytes) -> str:
    """Format an id for the option startingOffsets."""
    if start == FIRST:
        return "earliest"
    offset: dict[str, Any] = {"v": 1, "topics": {log.name: {"gen": log.generation, "next": start.hex()}}}
    return json.dumps(offset, separators=(",", ":"))

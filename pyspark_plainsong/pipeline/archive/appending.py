"""Brings an archive up to date with a topic: a streaming query from where the archive ends.

Holes in the archive are filled first, while the topic still has the messages.
"""

from __future__ import annotations

import json
import secrets
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.options import now_ms, show_length
from plainsong.cli.output import show_count
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.manifest import Range, covered, minus
from pyspark_plainsong.pipeline.archive.reading import load_manifests
from pyspark_plainsong.pipeline.archive.writing import TIMESTAMPS, ArchiveWriter, Log, Offsets
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.grace import Grace
from pyspark_plainsong.pipeline.streams import Batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from plainsong import Client
    from pyspark_plainsong.pipeline.archive.manifest import Manifest
    from pyspark_plainsong.pipeline.job import Run

FIRST = bytes(20)


@dataclass(frozen=True, slots=True)
class AppendOptions:
    """Options of archiving."""

    root: str
    checkpoint: str | None = None
    """The folder of the queries' checkpoints; None: inside the archive."""
    batch_rows: int = 500_000
    batch_bytes: int = 256 << 20
    compression: str = "zstd"
    isolation: str | None = None
    may_lose: bool = False
    """Skip messages that expired before they were archived, instead of failing."""
    warn_at: float = 0.5
    """Warn when the oldest waiting message is older than this part of the topic's ttl."""


class Subject:
    """One topic, its archive and its checkpoint."""

    def __init__(self, run: Run, client: Client, topic: str, choices: AppendOptions) -> None:
        properties = client.admin.properties(topic)
        self.run, self.topic, self.choices = run, topic, choices
        self.log = Log(run.where.namespace, topic, int(properties["generation"]))
        self.ttl_s = int(properties["ttl"])
        self.files = open_files(choices.root, run.session)
        self.checkpoint, self.offsets = checkpoint_of(run, self.log, choices.root, choices.checkpoint)
        self._grace = Grace()
        self._client = client
        self._check: Callable[[], None] = lambda: None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock this archive for appending. Raises Busy: another process is appending; nothing was done."""

        def say(text: str) -> None:
            self.run.warn(text, "taken_over", topic=self.topic)

        path = layout.lock_file(self.log.namespace, self.topic, "appending")
        with self.files.lock(path, f"the archive of {self.log.name}", say) as hold:
            self._check = hold.check
            yield

    def holes(self) -> list[Range]:
        """Ranges before the checkpoint's end that no entry holds."""
        first, done = (
            self.offsets.first(),
            self.offsets.done(),
        )  # before the entries are listed: an entry is written before the checkpoint moves past it
        if first is None or done is None or first >= done:
            return []
        return minus(Range(first, done), covered(self.entries()))

    @property
    def resumes_at(self) -> bytes:
        """The id at which a new run would start to archive."""
        return self.offsets.done() or self.offsets.first() or self._end_of_archive()

    def begin(self) -> bytes:
        """Return where the query's first batch starts; recorded in a new checkpoint, and fixed from then on.

        Raises:
          CommandFailed: the checkpoint belongs to another query.
        """
        start = self.offsets.first()
        if start is None:
            if not self.offsets.is_new:
                says = f"{self.checkpoint} is the checkpoint of a different query"
                raise CommandFailed(says, hint="choose another --checkpoint", code=Exit.STORE)
            start = self._end_of_archive()
            self.offsets.begin(start)
        return start

    def start(self, done: Callable[[Manifest], None], *, every: str | None) -> tuple[StreamingQuery, Batches]:
        """Start the query; return it and the handler of its batches.

        Args:
          done: called in the query's thread with each written batch.
          every: the trigger's interval; None: end when the present backlog is archived.
        """
        start = self.begin()
        spark = self.run.session()
        spark.conf.set(*TIMESTAMPS)
        rows = spark.readStream.format("plainsong").options(**self.source(start, follows=every is not None)).load()
        batches = Batches(self.writer(done))
        query = rows.writeStream.foreachBatch(batches).queryName(f"archive {self.log.name}")
        query = query.option("checkpointLocation", self.offsets.files.url(""))
        timed = query.trigger(availableNow=True) if every is None else query.trigger(processingTime=every)
        return timed.start(), batches

    def writer(self, done: Callable[[Manifest], None] = lambda manifest: None) -> ArchiveWriter:
        """Return a writer of batches into this archive; it calls ``done`` after each."""
        return ArchiveWriter(
            self.files,
            self.log,
            self.offsets,
            compression=self.choices.compression,
            is_held=lambda first, end: not minus(Range(first, end), covered(self.entries())),
            check=self._check,
            done=done,
        )

    def check_nothing_was_lost(self) -> None:
        """Check the duration of a run that could not detect losses.

        Raises:
          CommandFailed: the run took so long that messages may have expired unarchived.
        """
        self._grace.check(now_ms(), f"{self.log.name}: the run", "archive more often, or raise the ttl")

    def entries(self) -> list[Manifest]:
        """Load the archive's entries of this generation."""
        return load_manifests(self.files, self.log.folder)

    def waiting_s(self, end: bytes) -> float:
        """Return the age in seconds of the oldest message from ``end`` on, in any state; 0 if there is none."""
        seen = self._client.admin.messages(self.topic, end, limit=1)
        return max(0.0, (now_ms() - seen[0].publish_time_ms) / 1000) if seen else 0.0

    def warn_if_behind(self, end: bytes) -> bool:
        """Report the archive's lag; True if it exceeds ``warn_at``."""
        asked_ms = now_ms()
        age_s = self.waiting_s(end)
        if age_s == 0 and self.offsets.done() == end and not self.run.dry_run:
            self.offsets.note_caught_up(end, asked_ms)
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

    def _is_safe(self) -> bool:
        """True if no message can have expired unarchived, although the archive's end may be older than the ttl."""
        caught_up_ms = self.offsets.caught_up_ms()
        return caught_up_ms is not None and self._grace.begin([(caught_up_ms, self.ttl_s * 1000)], now_ms())

    @property
    def is_quiet(self) -> bool:
        """True if the archive's end is older than the ttl, and yet no message can be missing."""
        return layout.time_of(self.resumes_at) < now_ms() - self.ttl_s * 1000 and self._is_safe()

    def _end_of_archive(self) -> bytes:
        """Return the id after all archived ones of this generation; gaps before it are not considered."""
        held = covered(self.entries())
        return held[-1].end if held else FIRST

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


def checkpoint_of(run: Run, log: Log, root: str, checkpoint: str | None) -> tuple[str, Offsets]:
    """Return the checkpoint of a topic's query: its path or URL, and its offsets."""
    below = layout.checkpoint_folder(log.namespace, log.topic, log.generation)
    at = f"{(root if checkpoint is None else checkpoint).rstrip('/')}/{below}"
    return at, Offsets(open_files(at, run.session), log)


def starting_offsets(log: Log, start: bytes) -> str:
    """Format an id for the option startingOffsets."""
    if start == FIRST:
        return "earliest"
    offset: dict[str, Any] = {"v": 1, "topics": {log.name: {"gen": log.generation, "next": start.hex()}}}
    return json.dumps(offset, separators=(",", ":"))


# --- holes -----------------------------------------------------------------------------------------


def fill_holes(subject: Subject) -> int:
    """Archive each hole before the checkpoint's end as an entry of its own; return the number of messages.

    Holes are folders that were lost or removed by hand. The query continues after them and never goes back.

    Raises:
      CommandFailed: the messages may have expired in the topic; nothing was done.
    """
    found = subject.holes()
    expired_before = layout.time_bound(max(0, now_ms() - subject.ttl_s * 1000))
    for hole in found:
        if hole.start < expired_before and not subject.choices.may_lose:
            raise CommandFailed(
                f"{subject.log.name}: the archive has no messages {layout.show_range(*hole)}, although the checkpoint "
                "is past it, and the messages may have expired in the topic",
                hint="restore the folders, or continue with the remaining messages: --may-lose",
                code=Exit.STORE,
            )
    count = 0
    for hole in found:
        rows = fill(subject, hole)
        says = (
            f"{subject.log.name}: the archive had no messages {layout.show_range(*hole)}; {show_count(rows)} "
            "messages were archived again"
        )
        bounds = {"start": hole.start.hex(), "end": hole.end.hex()}
        subject.run.warn(says, "hole", topic=subject.topic, rows=rows, **bounds)
        count += rows
    return count


def fill(subject: Subject, hole: Range) -> int:
    """Archive the topic's messages of a range; return their number.

    Spark's errors are raised unchanged; the hole is then still there.
    """
    subject.run.session().conf.set(*TIMESTAMPS)
    manifest = subject.writer().put(in_topic(subject, hole), secrets.token_hex(16), 0, hole)
    return manifest.stats.count


def in_topic(subject: Subject, hole: Range) -> DataFrame:
    """Read the messages of a range from the topic."""
    options = subject.source(hole.start) | {"endingOffsets": starting_offsets(subject.log, hole.end)}
    for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
        del options[name]
    options["failOnDataLoss"] = str(not subject.choices.may_lose).lower()
    return subject.run.session().read.format("plainsong").options(**options).load()

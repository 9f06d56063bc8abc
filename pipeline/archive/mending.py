"""Holes of an archive, before the place that its checkpoint came to: filled from the topic while that has the messages."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pipeline.archive import layout
from pipeline.archive.appending import starting_offsets
from pipeline.archive.writing import TIMESTAMPS
from plainsong.cli.options import now_ms
from plainsong.cli.output import show_count
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pipeline.archive.appending import Subject
    from pipeline.archive.coverage import Range


def mend(subject: Subject) -> int:
    """Archive what is missing before the checkpoint's end, each hole as an entry of its own; how many messages.

    Nothing that this program does makes a hole; folders that were lost or taken away do. The query goes on behind
    them and would never look there again.

    Raises:
      CommandFailed: the messages may have expired in the topic; nothing was done.
    """
    found = subject.holes()
    expired_before = layout.time_bound(max(0, now_ms() - subject.ttl_s * 1000))
    for hole in found:
        if hole.start < expired_before and not subject.choices.may_lose:
            raise CommandFailed(
                f"{subject.log.name}: the archive has nothing {layout.tell_range(*hole)}, though the checkpoint is past it, and the "
                "messages may have expired in the topic",
                hint="bring the folders back, or archive what is left of it, and go on: --may-lose",
                code=Exit.STORE,
            )
    count = 0
    for hole in found:
        rows = fill(subject, hole)
        says = f"{subject.log.name}: the archive had nothing {layout.tell_range(*hole)}; {show_count(rows)} messages were archived again"
        bounds = {"start": hole.start.hex(), "end": hole.end.hex()}
        subject.run.warn(says, "hole", topic=subject.topic, rows=rows, **bounds)
        count += rows
    return count


def fill(subject: Subject, hole: Range) -> int:
    """Archive what the topic has of a range; how many messages. Raises what Spark raises; the hole is there still."""
    subject.run.session().conf.set(*TIMESTAMPS)
    manifest = subject.writer().put(in_topic(subject, hole), secrets.token_hex(16), 0, hole)
    return manifest.stats.count


def in_topic(subject: Subject, hole: Range) -> DataFrame:
    """The messages of a range."""
    options = subject.source(hole.start) | {"endingOffsets": starting_offsets(subject.log, hole.end)}
    for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
        del options[name]
    options["failOnDataLoss"] = str(not subject.choices.may_lose).lower()
    return subject.run.session().read.format("plainsong").options(**options).load()

"""The stream that keeps the tables: topics in, batch by batch, until it has caught up or for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.audit.absorbing import TABLES, Absorbed, absorb
from pipeline.audit.keeping import keep
from pipeline.streams import watch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from pipeline.audit.manifest import Manifest
    from pipeline.job import Run

#: Between batches of a stream that follows; a batch also waits for messages as long as the daemon lets it.
FOLLOW_EVERY = "1 second"


@dataclass
class Sum:
    """What a run came to so far."""

    messages: int = 0
    bad: int = 0
    batches: int = 0


def run_stream(
    run: Run, topics: Sequence[str], root: Path, *, batch_messages: int, keep_s: float, follow: bool
) -> tuple[Sum, Manifest]:
    """Read topics from where the tables in `root` end, and add what they say.

    Args:
      batch_messages: a batch has at most so many.
      keep_s: how long merged files stay for those who read them.
      follow: go on for ever; else until what is there now is in.
    Returns:
      what this run added, and the manifest at its end.
    Raises:
      TablesBusy, TablesUnreadable; StreamingQueryException: what is in is in, the rest is for the next run.
    """
    spark = run.session()
    options = run.source(
        subscribe=",".join(topics), startingOffsets="earliest", maxOffsetsPerTrigger=str(batch_messages)
    )
    total = Sum()
    with keep(root, TABLES, keep_s=keep_s) as keeping:
        came_to: dict[int, Absorbed] = {}

        def on_rows(rows: DataFrame, batch: int) -> None:
            came_to[batch] = absorb(keeping, rows)

        def on_batch(progress: dict[str, Any]) -> None:
            absorbed = came_to.pop(progress["batchId"], Absorbed())
            total.messages += absorbed.messages
            total.bad += absorbed.bad
            total.batches += 1
            _tell(run, ",".join(topics), absorbed, total, progress)

        messages = spark.readStream.format("plainsong").options(**options).load()
        writer = messages.writeStream.foreachBatch(on_rows).option(
            "checkpointLocation", str((root / "checkpoint").absolute())
        )
        query = (writer.trigger(processingTime=FOLLOW_EVERY) if follow else writer.trigger(availableNow=True)).start()
        watch(query, on_batch)
        return total, keeping.manifest


def _tell(run: Run, topic: str, absorbed: Absorbed, total: Sum, progress: dict[str, Any]) -> None:
    lag_s = _lag_s(progress, absorbed)
    run.metrics.add("rows_total", absorbed.messages, topic=topic)
    run.metrics.add("bytes_total", absorbed.bytes, topic=topic)
    run.metrics.add("dead_letters_total", absorbed.bad, topic=topic)
    run.metrics.add("batches_total", topic=topic)
    run.metrics.set("lag_seconds", lag_s, topic=topic)
    run.metrics.write()
    run.progress.step(
        total.messages, what=topic, batch=progress["batchId"], lag_s=lag_s, deadLetters=total.bad, last=True
    )


def _lag_s(progress: dict[str, Any], absorbed: Absorbed) -> float:
    """Age of the newest message that is in, while others wait; 0 when none does."""
    caught_up = all(source["endOffset"] == source["latestOffset"] for source in progress["sources"])
    return 0.0 if caught_up else max(0.0, time.time() - absorbed.last_published_ms / 1000)

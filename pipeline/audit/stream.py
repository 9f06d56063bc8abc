"""The stream that keeps the tables: topics in, batch by batch, until it has caught up or for ever."""

from __future__ import annotations

import hashlib
import json
import shutil
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

#: Within the folder of the tables.
CHECKPOINTS = "checkpoints"


@dataclass
class Sum:
    """What a run came to so far."""

    messages: int = 0
    bad: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Choices:
    """How topics are read."""

    batch_rows: int = 100_000
    batch_bytes: int = 64 << 20
    keep_s: float = 3600.0
    """How long merged files stay for those who read them."""
    every: str | None = None
    """Go on for ever, looking so often ("10 seconds"); None: until what is there now is in."""
    isolation: str | None = None
    may_lose: bool = False
    """Go on behind what expired before it was read, instead of failing."""


def run_stream(run: Run, topics: Sequence[str], root: Path, choices: Choices) -> tuple[Sum, Manifest]:
    """Read topics from where the tables in `root` end, and add what they say.

    Returns:
      what this run added, and the manifest at its end.
    Raises:
      TopicNotFound, TablesBusy, TablesUnreadable: nothing happened. StreamingQueryException: what is in is in, the
        rest is for the next run.
    """
    with run.client(*topics) as client:
        namespace = run.where.namespace
        lives = {f"{namespace}:{topic}": int(client.properties(topic)["generation"]) for topic in topics}
    spark = run.session()
    total = Sum()
    with keep(root, TABLES, keep_s=choices.keep_s) as keeping:
        keeping.begin(lives)
        came_to: dict[int, Absorbed] = {}

        def on_rows(rows: DataFrame, batch: int) -> None:
            came_to[batch] = absorb(keeping, rows)

        def on_batch(progress: dict[str, Any]) -> None:
            absorbed = came_to.pop(progress["batchId"], Absorbed())
            total.messages += absorbed.messages
            total.bad += absorbed.bad
            total.batches += 1
            _tell(run, ",".join(topics), absorbed, total, progress)

        options = _source(run, topics, choices, keeping.manifest, lives)
        messages = spark.readStream.format("plainsong").options(**options).load()
        query = messages.writeStream.foreachBatch(on_rows).queryName(f"audit {','.join(topics)}")
        query = query.option("checkpointLocation", str(_checkpoint(root, keeping.manifest, lives)))
        started = query.trigger(processingTime=choices.every) if choices.every else query.trigger(availableNow=True)
        watch(started.start(), on_batch)
        return total, keeping.manifest


def _source(
    run: Run, topics: Sequence[str], choices: Choices, manifest: Manifest, lives: dict[str, int]
) -> dict[str, str]:
    options = run.source(
        subscribe=",".join(topics),
        startingOffsets="earliest",
        maxOffsetsPerTrigger=str(choices.batch_rows),
        maxBytesPerTrigger=str(choices.batch_bytes),
        minPartitions=str(run.session().sparkContext.defaultParallelism),
        failOnDataLoss=str(not choices.may_lose).lower(),
    )
    known = {
        topic: {"gen": life, "next": after(manifest.through[topic])}
        for topic, life in lives.items()
        if topic in manifest.through
    }
    if known:
        options["startingOffsets"] = json.dumps({"v": 1, "topics": known}, separators=(",", ":"))
    if choices.isolation is not None:
        options["isolation"] = choices.isolation
    return options


def after(message_id: str) -> str:
    """The id that follows, in hex as the one given."""
    return f"{int(message_id, 16) + 1:040x}"


def _checkpoint(root: Path, manifest: Manifest, lives: dict[str, int]) -> Path:
    """Where Spark keeps its offsets of these topics in these lives.

    The tables do not go by them: other topics, or a new life of one, may well have others.
    """
    folder = root.absolute() / CHECKPOINTS
    if not manifest.through:
        # Tables that were taken away begin again; offsets that are ahead of them would skip messages.
        shutil.rmtree(folder, ignore_errors=True)
    name = ",".join(f"{topic}@{life}" for topic, life in sorted(lives.items()))
    return folder / hashlib.sha256(name.encode()).hexdigest()[:16]


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

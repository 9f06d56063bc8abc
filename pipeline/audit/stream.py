"""The stream that keeps the tables: topics in, batch by batch, until it has caught up or for ever."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from pipeline.audit.absorbing import TABLES, Absorbed, absorb
from pipeline.audit.behind import Behind
from pipeline.audit.keeping import keep
from pipeline.audit.manifest import first_look
from pipeline.audit.quiet import Quiet
from pipeline.streams import watch
from protocol.ids import after

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from pipeline.audit.keeping import Keeping
    from pipeline.audit.manifest import Manifest
    from pipeline.job import Run

#: Within the folder of the tables.
CHECKPOINTS: Final = "checkpoints"
_CHECKPOINT: Final = re.compile("[0-9a-f]{16}")
#: Without batches, what waits is asked about this often, in looks of a second.
TELL_EVERY: Final = 30


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
      TopicNotFound, TablesBusy, FolderTaken, TablesUnreadable: nothing happened. StreamingQueryException: what is in
        is in, the rest is for the next run. CommandFailed: some messages may have expired unread.
    """
    first_look(root)
    namespace = run.where.namespace
    with run.client(*topics) as client:
        properties = {f"{namespace}:{topic}": client.properties(topic) for topic in topics}
        lives = {topic: int(each["generation"]) for topic, each in properties.items()}
        ttls_s = {topic: int(each["ttl"]) for topic, each in properties.items()}
        run.session()  # before the folder is taken; and its start is no part of how fast it goes
        run.progress.begin()
        with keep(root, TABLES, keep_s=choices.keep_s) as keeping:
            keeping.begin(lives)
            quiet = Quiet(root, ttls_s)
            behind = Behind(run, client, ttls_s, quiet, uncommitted=choices.isolation == "uncommitted")
            told = _Told(run, keeping, behind)
            behind.tell(keeping.manifest)
            # One that is followed must look out for losses, which it can only from where something is.
            if choices.every is None or quiet.is_old(keeping.manifest):
                safe = quiet.is_safe(keeping.manifest)
                _go(run, lives, root, replace(choices, every=None, may_lose=choices.may_lose or safe), keeping, told)
                behind.tell(keeping.manifest)
                if safe and not choices.may_lose:
                    quiet.check()
            if choices.every is not None:
                _go(run, lives, root, choices, keeping, told)
            return told.total, keeping.manifest


def _go(run: Run, lives: dict[str, int], root: Path, choices: Choices, keeping: Keeping, told: _Told) -> None:
    """One query, to its end."""
    options = _source(run, choices, keeping.manifest, lives)
    messages = run.session().readStream.format("plainsong").options(**options).load()
    query = messages.writeStream.foreachBatch(told.on_rows).queryName(f"audit {options['subscribe']}")
    query = query.option("checkpointLocation", str(_checkpoint(root)))
    every = choices.every
    timed = query.trigger(availableNow=True) if every is None else query.trigger(processingTime=every)
    watch(timed.start(), told.on_batch, idle=told.idle)


class _Told:
    """Batches end in the query's thread, and are told in the command's."""

    def __init__(self, run: Run, keeping: Keeping, behind: Behind) -> None:
        self.total = Sum()
        self._run = run
        self._keeping = keeping
        self._behind = behind
        self._came_to: dict[int, Absorbed] = {}
        self._looks = 0

    def on_rows(self, rows: DataFrame, batch: int) -> None:
        """A batch of the query."""
        self._came_to[batch] = absorb(self._keeping, rows)

    def on_batch(self, progress: dict[str, Any]) -> None:
        """It is in."""
        absorbed = self._came_to.pop(progress["batchId"], Absorbed())
        self.total.messages += absorbed.messages
        self.total.bad += absorbed.bad
        self.total.batches += 1
        for topic, each in absorbed.of_topic.items():
            name = topic.partition(":")[2]
            self._run.metrics.add("rows_total", each.messages, topic=name)
            self._run.metrics.add("bytes_total", each.bytes, topic=name)
            self._run.metrics.add("dead_letters_total", each.bad, topic=name)
            self._run.metrics.add("batches_total", topic=name)
        self._run.progress.step(
            self.total.messages,
            what=",".join(topic.partition(":")[2] for topic in sorted(absorbed.of_topic)),
            batch=progress["batchId"],
            lag_s=self._behind.tell(self._keeping.manifest),
            deadLetters=self.total.bad,
            last=True,
        )

    def idle(self) -> None:
        """A second went by."""
        self._looks += 1
        if self._looks % TELL_EVERY == 0:
            self._behind.tell(self._keeping.manifest)


def _source(run: Run, choices: Choices, manifest: Manifest, lives: dict[str, int]) -> dict[str, str]:
    options = run.source(
        subscribe=",".join(topic.partition(":")[2] for topic in lives),
        startingOffsets="earliest",
        maxOffsetsPerTrigger=str(choices.batch_rows),
        maxBytesPerTrigger=str(choices.batch_bytes),
        minPartitions=str(run.session().sparkContext.defaultParallelism),
        failOnDataLoss=str(not choices.may_lose).lower(),
    )
    known = {
        topic: {"gen": life, "next": after(bytes.fromhex(manifest.through[topic])).hex()}
        for topic, life in lives.items()
        if topic in manifest.through
    }
    if known:
        options["startingOffsets"] = json.dumps({"v": 1, "topics": known}, separators=(",", ":"))
    if choices.isolation is not None:
        options["isolation"] = choices.isolation
    return options


def _checkpoint(root: Path) -> Path:
    """Where Spark keeps its offsets, for one query: the next one begins where the tables end, whatever these say.

    Those that others left are taken away.
    """
    folder = root.absolute() / CHECKPOINTS
    for each in folder.iterdir() if folder.is_dir() else ():
        if _CHECKPOINT.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)
    return folder / secrets.token_hex(8)

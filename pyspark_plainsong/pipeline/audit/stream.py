"""The stream that maintains the tables: it reads topics batch by batch, until it has caught up or forever.

It also measures the lag of the tables, and distinguishes quiet topics from lost messages.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from plainsong.positions import now_ms
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND, after, unpack_id
from pyspark_plainsong.pipeline.audit.keeping import TABLES, Absorbed, absorb, keep
from pyspark_plainsong.pipeline.audit.manifest import first_look
from pyspark_plainsong.pipeline.files import LocalFiles
from pyspark_plainsong.pipeline.grace import Grace
from pyspark_plainsong.pipeline.streams import Batches, watch_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pyspark.sql import DataFrame

    from plainsong import Client
    from plainsong.messages import Seen
    from pyspark_plainsong.pipeline.audit.keeping import Keeping
    from pyspark_plainsong.pipeline.audit.manifest import TablesManifest
    from pyspark_plainsong.pipeline.job import Run

#: The folder of the checkpoints, within the tables' folder.
CHECKPOINTS: Final = "checkpoints"
_CHECKPOINT: Final = re.compile("[0-9a-f]{16}")
#: Seconds between lag measurements while no batch arrives.
REPORT_EVERY: Final = 30


@dataclass
class Sum:
    """The figures of a run so far."""

    messages: int = 0
    bad: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Choices:
    """Options of reading."""

    batch_rows: int = 100_000
    batch_bytes: int = 64 << 20
    keep_s: float = 3600.0
    """Seconds for which merged files stay, for readers that have opened them."""
    every: str | None = None
    """Follow the topics at this interval ("10 seconds"); None: end when the current backlog is in the tables."""
    isolation: str | None = None
    may_lose: bool = False
    """Skip messages that expired before they were read, instead of failing."""


def run_stream(run: Run, topics: Sequence[str], root: Path, choices: Choices) -> tuple[Sum, TablesManifest]:
    """Read topics from where the tables in ``root`` end, and add their messages.

    Returns:
      the figures of this run, and the manifest at its end.
    Raises:
      TopicNotFound, TablesBusy, FolderTaken, TablesUnreadable: nothing happened. StreamingQueryException: whole batches
        were added, and the next run adds the rest. CommandFailed: some messages may have expired unread.
    """
    first_look(root)
    namespace = run.where.namespace
    with run.client(*topics) as client:
        properties = {f"{namespace}:{topic}": client.admin.properties(topic) for topic in topics}
        lives = {topic: int(each["generation"]) for topic, each in properties.items()}
        ttls_s = {topic: int(each["ttl"]) for topic, each in properties.items()}
        run.session()  # start Spark before locking the folder, and before the rates begin to count
        run.progress.begin()
        with keep(root, TABLES, keep_s=choices.keep_s) as keeping:
            keeping.begin(lives)
            quiet = Quiet(root, ttls_s)
            behind = Lag(run, client, ttls_s, quiet, uncommitted=choices.isolation == "uncommitted")
            report = _StreamReport(run, keeping, behind)
            behind.tell(keeping.manifest)
            # A following query has to detect losses, which needs a start at a message that still exists. So if the
            # position is old, catch up first.
            if choices.every is None or quiet.is_old(keeping.manifest):
                safe = quiet.is_safe(keeping.manifest)
                _go(run, lives, root, replace(choices, every=None, may_lose=choices.may_lose or safe), keeping, report)
                behind.tell(keeping.manifest)
                if safe and not choices.may_lose:
                    quiet.check()
            if choices.every is not None:
                _go(run, lives, root, choices, keeping, report)
            return report.total, keeping.manifest


def _go(run: Run, lives: dict[str, int], root: Path, choices: Choices, keeping: Keeping, report: _StreamReport) -> None:
    """Run one query to its end."""
    options = _source(run, choices, keeping.manifest, lives)
    messages = run.session().readStream.format("plainsong").options(**options).load()
    batches = Batches(report.on_rows)
    query = messages.writeStream.foreachBatch(batches).queryName(f"audit {options['subscribe']}")
    query = query.option("checkpointLocation", str(_checkpoint(root)))
    every = choices.every
    timed = query.trigger(availableNow=True) if every is None else query.trigger(processingTime=every)
    with batches.own_error():
        watch_all([timed.start()], idle=report.idle)


class _StreamReport:
    """Reports a query's batches in the command's thread; they end in the query's thread."""

    def __init__(self, run: Run, keeping: Keeping, behind: Lag) -> None:
        self.total = Sum()
        self._run = run
        self._keeping = keeping
        self._behind = behind
        #: Batches that were added and not reported yet, with their numbers.
        self._added: deque[tuple[int, Absorbed]] = deque()
        self._seconds = 0

    def on_rows(self, rows: DataFrame, batch: int) -> None:
        """Add a batch to the tables; runs in the query's thread."""
        self._added.append((batch, absorb(self._keeping, rows)))

    def idle(self) -> None:
        """Report the added batches, and update the lag every ``REPORT_EVERY`` calls; called once a second."""
        while self._added:
            self._report(*self._added.popleft())
        self._seconds += 1
        if self._seconds % REPORT_EVERY == 0:
            self._behind.tell(self._keeping.manifest)

    def _report(self, batch: int, absorbed: Absorbed) -> None:
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
            batch=batch,
            lag_s=self._behind.tell(self._keeping.manifest),
            deadLetters=self.total.bad,
            last=True,
        )


def _source(run: Run, choices: Choices, manifest: TablesManifest, lives: dict[str, int]) -> dict[str, str]:
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
    """Return a new checkpoint folder, and remove those of earlier queries.

    Each query starts where the tables end, so no checkpoint is ever resumed.
    """
    folder = root.absolute() / CHECKPOINTS
    for each in folder.iterdir() if folder.is_dir() else ():
        if _CHECKPOINT.fullmatch(each.name):
            shutil.rmtree(each, ignore_errors=True)
    return folder / secrets.token_hex(8)


# --- lag -------------------------------------------------------------------------------------------

#: States of messages that committed readers skip.
_PASSED_OVER: Final = ("rolled-back", "invalid")
#: Page sizes of the search for the first waiting message, which is nearly always the very first.
_PAGES: Final = (1, 100, 1000, 1000)


class Lag:
    """Measures the age of the oldest message that is not in the tables yet.

    Args:
      ttls_s: by topic (``namespace:name``).
      quiet: records when a topic has no waiting message.
      uncommitted: the tables take messages of any transaction, so rolled back ones count, too.
    """

    def __init__(self, run: Run, client: Client, ttls_s: Mapping[str, int], quiet: Quiet, *, uncommitted: bool) -> None:
        self._run = run
        self._client = client
        self._ttls_s = ttls_s
        self._quiet = quiet
        self._uncommitted = uncommitted

    def tell(self, manifest: TablesManifest) -> float:
        """Set each topic's metrics; return the greatest age in seconds.

        Errors of the daemon leave a topic's metrics unchanged: metrics must not end a run.
        """
        ages_s = [0.0]
        for topic, ttl_s in self._ttls_s.items():
            name, asked_ms = topic.partition(":")[2], now_ms()
            try:
                age_s = self._age_s(name, manifest.through.get(topic))
            except PlainsongError:
                continue
            if age_s == 0:
                self._quiet.note(manifest, topic, asked_ms)
            self._run.metrics.set("lag_seconds", age_s, topic=name)
            self._run.metrics.set("ttl_used_ratio", age_s / ttl_s, topic=name)
            ages_s.append(age_s)
        self._run.metrics.write()
        return max(ages_s)

    def _age_s(self, topic: str, last: str | None) -> float:
        """Return the age of the oldest message after ``last`` that a run will take, even if undecided; 0 if none."""
        start = FIRST_BOUND if last is None else after(bytes.fromhex(last))
        seen: Sequence[Seen] = ()
        for limit in _PAGES:
            page = self._client.admin.messages(topic, start, limit=limit)
            for each in page:
                if self._uncommitted or each.state not in _PASSED_OVER:
                    return _age_s(each)
            if not page:
                return 0.0
            seen, start = page, after(bytes(page[-1].id))
        # None of these is taken, so a waiting message is younger than the last of them.
        return _age_s(seen[-1])


def _age_s(message: Seen) -> float:
    return max(0.0, (now_ms() - message.publish_time_ms) / 1000)


# --- quiet topics ----------------------------------------------------------------------------------

#: A file next to the manifest; without it a quiet topic may be reported as a loss.
NOTES: Final = "caught-up.json"


@dataclass
class Quiet:
    """Records when topics (``namespace:name``) were read to their end."""

    root: Path
    ttls_s: Mapping[str, int]
    _grace: Grace = field(default_factory=Grace)

    def note(self, manifest: TablesManifest, topic: str, asked_ms: int) -> None:
        """Record that at ``asked_ms`` the tables of ``manifest`` had all messages of the topic.

        Ignored if a later message could have been published and expired by then.
        """
        since_ms = self._since_ms(manifest, topic)
        if since_ms is not None and asked_ms - since_ms < self.ttls_s[topic] * 1000:
            noted = [manifest.lives.get(topic), manifest.through[topic], asked_ms]
            LocalFiles(self.root).write(NOTES, json.dumps({**self._notes(), topic: noted}).encode())

    def is_safe(self, manifest: TablesManifest) -> bool:
        """True if no message after the tables' end can have expired; otherwise the connector must detect losses."""
        complete = [(self._since_ms(manifest, topic), ttl_s * 1000) for topic, ttl_s in self.ttls_s.items()]
        # A topic without a time is read from its beginning.
        return self._grace.begin([(since, ttl) for since, ttl in complete if since is not None], now_ms())

    def _since_ms(self, manifest: TablesManifest, topic: str) -> int | None:
        """Return the time up to which the tables are known to be complete; None if they have no message of the topic."""
        last = manifest.through.get(topic)
        if last is None:
            return None
        published_ms = unpack_id(bytes.fromhex(last)).publish_ts_ms
        match self._notes().get(topic):
            case [life, known, int(asked_ms)] if (life, known) == (manifest.lives.get(topic), last):
                return max(published_ms, asked_ms)
        return published_ms

    def is_old(self, manifest: TablesManifest) -> bool:
        """True if the tables end at a position where the connector would report a loss."""
        return any(
            unpack_id(bytes.fromhex(manifest.through[topic])).publish_ts_ms < now_ms() - ttl_s * 1000
            for topic, ttl_s in self.ttls_s.items()
            if topic in manifest.through
        )

    def check(self) -> None:
        """Check the duration of a run that could not detect losses.

        Raises:
          CommandFailed: the run took so long that messages may have expired unread.
        """
        self._grace.check(now_ms(), "the run", "run it more often, or raise the ttl")

    def _notes(self) -> dict[str, Any]:
        try:
            found = json.loads(LocalFiles(self.root).read(NOTES) or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

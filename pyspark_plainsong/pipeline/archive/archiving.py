"""The commands of `archive`: append, compact, prune, verify and migrate, for each topic in turn or for all at once."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.options import chosen, is_pattern, show_time
from plainsong.cli.output import counted, show_bytes, show_messages
from plainsong.positions import now_ms
from plainsong.protocol.errors import PlainsongError
from pyspark_plainsong.options import ReadOptions
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.appending import AppendOptions, Subject
from pyspark_plainsong.pipeline.archive.migrating import Migration
from pyspark_plainsong.pipeline.archive.refilling import refill
from pyspark_plainsong.pipeline.archive.table import Batch, TopicTable, tables
from pyspark_plainsong.pipeline.archive.upkeep import Compaction, days_to_compact
from pyspark_plainsong.pipeline.archive.upkeep import prune as prune_table
from pyspark_plainsong.pipeline.archive.verification import Findings, Verification
from pyspark_plainsong.pipeline.archive.writing import Log
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.streams import watch_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.streaming.query import StreamingQuery

    from plainsong import Client
    from pyspark_plainsong.calls import Extent
    from pyspark_plainsong.pipeline.job import Run


def append(run: Run, topics: Sequence[str], root: str, *, every: str | None, **options: Any) -> list[str]:
    """Archive the present backlog; with ``every``, also follow the topics, and new ones that match a pattern.

    Args:
      every: the interval of following; None: do not follow.
      options: the fields of ``AppendOptions``.
    Returns:
      the topics where the archive's lag was too large, at the beginning or at the end.
    Raises:
      CommandFailed: a topic does not exist, or has an archive of an earlier version; nothing was done.
      Exception: any error of Spark or the daemon; committed batches are archived.
    """
    choices = AppendOptions(root, **options)
    with run.client(*topics) as client:
        names = chosen(client.topics(), topics)
        if run.dry_run:
            for name in names:
                report_waiting(run, Subject(run, client, name, choices))
            return []
        appends = _Appends(run, client, choices, every)
        begun = appends.begin(names)
        if every is not None:
            appends.follow(begun, every, [each for each in topics if is_pattern(each)])
        return appends.end()


class _Appends:
    """The topics of one run."""

    def __init__(self, run: Run, client: Client, choices: AppendOptions, every: str | None) -> None:
        self._run = run
        self._client = client
        self._choices = choices
        self._every = every
        self._begun: dict[str, Appending] = {}
        self._behind: set[str] = set()
        self._seconds = 0

    def begin(self, names: Sequence[str]) -> list[Appending]:
        """Prepare topics for following: refill gaps of their archives, and catch up where a position is too old.

        Raises:
          CommandFailed: an archive has lost messages that its topic no longer has.
        """
        subjects = [Subject(self._run, self._client, topic, self._choices) for topic in names]
        for subject in subjects:
            refill(subject)
        self._behind |= {subject.topic for subject in subjects if subject.warn_if_behind(subject.resumes_at)}
        begun = [Appending(self._run, subject) for subject in subjects]
        self._begun |= {each.subject.topic: each for each in begun}
        for each in begun:
            # A following query has to detect losses, which needs a start at a message that still exists. So if the
            # position is old, catch up first.
            if self._every is None or each.subject.is_quiet:
                _go(self._run, [each], None)
                each.subject.check_nothing_was_lost()
        return begun

    def follow(self, begun: Sequence[Appending], every: str, patterns: Sequence[str]) -> None:
        """Follow topics until the run is interrupted."""
        _go(self._run, begun, every, later=lambda: self._later(patterns))

    def end(self) -> list[str]:
        """Report the end of the run; return the topics where the lag was too large."""
        return sorted(self._behind | {topic for topic, each in self._begun.items() if each.end()})

    def _later(self, patterns: Sequence[str]) -> list[Appending]:
        """Begin with new topics that match a pattern. Called every second; searches every ``LOOK_EVERY`` seconds."""
        self._seconds += 1
        if not patterns or self._seconds % LOOK_EVERY:
            return []
        try:
            topics = self._client.topics()
        except PlainsongError:
            return []  # the queries wait for the daemon, or end with its error
        known = self._begun.keys()
        return self.begin(
            [name for name in topics if name not in known and any(fnmatchcase(name, each) for each in patterns)]
        )


def _go(
    run: Run, group: Sequence[Appending], every: str | None, later: Callable[[], Sequence[Appending]] = lambda: ()
) -> None:
    """Start the queries of these topics, and wait for them.

    Args:
      later: called every second; returns further topics to start.
    """
    run.session()  # start Spark before the rates begin to count
    run.progress.begin()
    started: list[Appending] = []
    queries: list[StreamingQuery] = []
    with ExitStack() as errors, ExitStack() as scratch:

        def start(some: Sequence[Appending]) -> None:
            for each in some:
                query, batches = each.subject.start(each.done, scratch, every=every)
                errors.enter_context(batches.own_error())
                started.append(each)
                queries.append(query)

        def tell() -> None:
            for each in started:
                each.tell(following=every is not None)
            start(later())

        start(group)
        watch_all(queries, idle=tell)


#: Seconds between searches for topics that match a pattern of a following run.
LOOK_EVERY = 10
#: Seconds between lag checks of a followed topic.
JUDGE_EVERY = 30


class Appending:
    """Reports one topic's batches in the command's thread; they end in the query's thread."""

    def __init__(self, run: Run, subject: Subject) -> None:
        self._run = run
        self.subject = subject
        self._written: deque[Batch] = deque()
        self._rows, self._bytes, self._batches = 0, 0, 0
        self._seconds = 0
        self._expected = expected(run, subject) if run.progress.is_visible else None

    def done(self, batch: Batch) -> None:
        """Record a written batch; runs in the query's thread."""
        self._written.append(batch)

    def tell(self, *, following: bool = False) -> None:
        """Report the batches written since the last call."""
        topic = self.subject.topic
        last = None
        while self._written:
            last = batch = self._written.popleft()
            self._rows += batch.rows
            self._bytes += batch.payload_bytes
            self._batches += 1
            self._run.metrics.add("rows_total", batch.rows, topic=topic)
            self._run.metrics.add("bytes_total", batch.payload_bytes, topic=topic)
            self._run.metrics.add("batches_total", topic=topic)
            bounds = {"start": batch.start.hex(), "end": batch.end.hex()}
            rows, batch_bytes = batch.rows, batch.payload_bytes
            self._run.progress.event(
                "batch", topic=topic, batch=batch.number, rows=rows, payloadBytes=batch_bytes, **bounds
            )
            self._run.metrics.write()
        if last is not None:
            lag_s = self.subject.waiting_s(last.end) if self._run.progress.is_visible else None
            of = None if following else self._expected
            self._run.progress.step(self._rows, of=of, what=topic, batch=last.number, lag_s=lag_s)
        self._seconds += 1
        if following and self._seconds % JUDGE_EVERY == 0:
            self.subject.warn_if_behind(self.subject.resumes_at)
            self._run.metrics.write()

    def end(self) -> bool:
        """Report the end of the run; True if the archive's lag is still too large."""
        self.tell()
        rows, size = self._rows, self._bytes
        end = self.subject.resumes_at
        text = f"{self.subject.topic}: {show_messages(rows)}, {show_bytes(size)} in {counted(self._batches, 'batch')}"
        figures = {"topic": self.subject.topic, "rows": rows, "payloadBytes": size, "batches": self._batches}
        self._run.progress.result(text, "archived", **figures, end=end.hex())
        return self.subject.warn_if_behind(end, is_complete=True)


def expected(run: Run, subject: Subject) -> int:
    """Return the number of messages to archive, those of open transactions included."""
    return _ahead(run, subject.topic, subject.resumes_at).messages


def report_waiting(run: Run, subject: Subject) -> None:
    """Report what ``append`` would do."""
    start = subject.resumes_at
    ahead = _ahead(run, subject.topic, start)
    since = "the oldest message" if start == bytes(20) else show_time(layout.time_of(start))
    run.progress.result(
        f"{subject.topic}: would archive {show_messages(ahead.messages)}, {show_bytes(ahead.size_bytes)}, since "
        f"{since}, into {subject.files.url(subject.log.folder)}",
        "foreseen",
        topic=subject.topic,
        messages=ahead.messages,
        bytes=ahead.size_bytes,
        start=start.hex(),
        folder=subject.files.url(subject.log.folder),
    )
    subject.warn_if_behind(start)


def _ahead(run: Run, topic: str, start: bytes) -> Extent:
    """Return the extent from ``start`` on. Uses the connector's client, which measures without fetching messages."""
    with closing(ReadOptions.parse(run.source(subscribe=topic), streaming=False).connection.calls()) as calls:
        return calls.offsets(topic, start=start)


def compact(
    run: Run, topics: Sequence[str], root: str, *, compression: str, today: bool = False, keep_ms: int = 0
) -> None:
    """Compact the tables of topics, and remove files that are no longer part of them.

    Raises:
      CommandFailed: the archive lacks a topic, a file is damaged, or another process compacts the same day.
    """
    for topic, table in _opened(run, topics, root):
        days = days_to_compact(table, today=today)
        if run.dry_run:
            for day, files in days.items():
                rows = sum(table.tally(each, day).rows for each in table.generations())
                text = f"{topic}: would write {day} from {counted(len(files), 'file')}"
                run.progress.result(text, "foreseen", topic=topic, day=day, files=len(files), rows=rows)
            continue
        compaction = Compaction(run.session(), table, compression=compression)
        total = 0
        for number, day in enumerate(days):
            rows = compaction.run(day)
            total += rows
            run.metrics.add("rows_total", rows, topic=topic)
            run.metrics.add("batches_total", topic=topic)
            run.progress.event("day", topic=topic, day=day, rows=rows)
            run.progress.step(total, what=f"{topic} {day}", batch=number)
        removed = compaction.vacuum(keep_ms)
        text = (
            f"{topic}: {counted(len(days), 'day')} of {show_messages(total)} written, {counted(removed, 'file')} "
            "removed"
        )
        run.progress.result(text, "compacted", topic=topic, days=len(days), rows=total, removed=removed)


def prune(run: Run, topics: Sequence[str], root: str, *, older_than_ms: int) -> None:
    """Take days that ended longer ago than ``older_than_ms`` out of the tables of topics.

    Raises:
      CommandFailed: the archive lacks a topic.
    """
    before = layout.day_of(max(0, now_ms() - older_than_ms))
    for topic, table in _opened(run, topics, root):
        gone = [each for each in table.all_files() if each.day < before]
        rows = sum(each.rows or 0 for each in gone)
        figures = {"topic": topic, "before": before, "files": len(gone), "rows": rows}
        if run.dry_run:
            run.progress.result(f"{topic}: would prune {show_messages(rows)} before {before}", "foreseen", **figures)
            continue
        prune_table(table, before)
        run.metrics.add("rows_total", rows, topic=topic)
        run.progress.result(f"{topic}: {show_messages(rows)} before {before} pruned", "pruned", **figures)


def migrate(run: Run, topics: Sequence[str], root: str, *, compression: str, may_lose: bool = False) -> None:
    """Make Delta tables of the archives that an earlier version wrote.

    Raises:
      CommandFailed: the archive lacks a topic, is damaged, or has a gap; what was copied stays.
    """
    files = open_files(root, run.session)
    there = [topic for namespace, topic in tables(files) if namespace == run.where.namespace]
    for topic in chosen(there, topics):
        migration = Migration(run, files, topic, compression=compression, may_lose=may_lose)
        waiting = migration.generations()
        if run.dry_run:
            for log in waiting:
                text = f"{topic}: would migrate generation {log.generation}"
                run.progress.result(text, "foreseen", topic=topic, generation=log.generation)
            continue
        rows = sum(migration.take_over(log) for log in waiting)
        text = f"{topic}: {show_messages(rows)} of {counted(len(waiting), 'generation')} migrated"
        run.progress.result(text, "migrated", topic=topic, rows=rows, generations=[log.generation for log in waiting])


def _opened(run: Run, topics: Sequence[str], root: str) -> list[tuple[str, TopicTable]]:
    """Open the tables of topics in the run's namespace. Raises CommandFailed: the archive lacks one."""
    files = open_files(root, run.session)
    there = [topic for namespace, topic in tables(files) if namespace == run.where.namespace]
    opened = [(topic, TopicTable.open(files, run.where.namespace, topic)) for topic in chosen(there, topics)]
    return [(topic, table) for topic, table in opened if table is not None]


def verify(run: Run, topic: str, root: str, start: bytes, end: bytes, isolation: str | None) -> Findings:
    """Compare a range of ids with the topic.

    Raises:
      CommandFailed: the topic or its archive does not exist.
      Exception: any error of Spark.
    """
    with run.client(topic) as client:
        properties = client.admin.properties(topic)
    log = Log(run.where.namespace, topic, int(properties["generation"]))
    source = run.source(subscribe=topic, **({} if isolation is None else {"isolation": isolation}))
    return _verification(run, log, root, start, end).run(source, int(properties["ttl"]))


def verify_files(run: Run, topic: str, generation: int, root: str, start: bytes, end: bytes) -> Findings:
    """Check an archive without its topic.

    Raises:
      CommandFailed: there is no archive.
      Exception: any error of Spark.
    """
    log = Log(run.where.namespace, topic, generation)
    table = TopicTable.open(open_files(root, run.session), log.namespace, topic)
    if table is None or generation not in table.generations():
        raise CommandFailed(f"there is no archive of {log.name} generation {generation} in {root}", code=Exit.NOT_FOUND)
    return _verification(run, log, root, start, end).run_alone()


def _verification(run: Run, log: Log, root: str, start: bytes, end: bytes) -> Verification:
    if start >= end:
        raise CommandFailed("--from is not before --to", code=Exit.USAGE)
    table = TopicTable.open(open_files(root, run.session), log.namespace, log.topic)
    if table is None:
        raise CommandFailed(f"there is no archive of {log.name} in {root}", code=Exit.NOT_FOUND)
    return Verification(run.session(), table, log, layout.Range(start, end))

"""The commands of `archive`: append, compact and verify, for each topic in turn or for all at once."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack, closing
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.options import chosen, is_pattern, show_time
from plainsong.cli.output import counted, show_bytes, show_count, show_messages
from plainsong.protocol.errors import PlainsongError
from pyspark_plainsong.options import ReadOptions
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.appending import AppendOptions, Subject, checkpoint_of, fill_holes
from pyspark_plainsong.pipeline.archive.compaction import Compaction, plan
from pyspark_plainsong.pipeline.archive.manifest import NOTHING, Range
from pyspark_plainsong.pipeline.archive.reading import load_manifests
from pyspark_plainsong.pipeline.archive.verification import Findings, Verification
from pyspark_plainsong.pipeline.archive.writing import Log
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.locks import Busy
from pyspark_plainsong.pipeline.streams import watch_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.streaming.query import StreamingQuery

    from plainsong import Client
    from pyspark_plainsong.calls import Extent
    from pyspark_plainsong.pipeline.archive.compaction import Day
    from pyspark_plainsong.pipeline.archive.manifest import Manifest
    from pyspark_plainsong.pipeline.job import Run


def append(run: Run, topics: Sequence[str], root: str, *, every: str | None, **options: Any) -> list[str]:
    """Archive the present backlog, or follow the topics, and those that match a pattern later.

    Args:
      every: the interval of following; None: do not follow.
      options: the fields of ``AppendOptions``.
    Returns:
      the topics where the archive's lag was too large, at the beginning or at the end.
    Raises:
      CommandFailed: a topic does not exist, or another process archives one, and nothing was done; or an archive has a
        hole that cannot be filled.
      Exception: any error of Spark or the daemon; batches with a manifest are archived.
    """
    choices = AppendOptions(root, **options)
    with run.client(*topics) as client, ExitStack() as holds:
        names = chosen(client.topics(), topics)
        if run.dry_run:
            for name in names:
                report_waiting(run, Subject(run, client, name, choices))
            return []
        appends = _Appends(run, client, choices, holds, every)
        begun = appends.begin(names)
        if every is not None:
            appends.follow(begun, every, [each for each in topics if is_pattern(each)])
        return appends.end()


class _Appends:
    """The topics of one run.

    Args:
      holds: holds the locks of their archives.
    """

    def __init__(self, run: Run, client: Client, choices: AppendOptions, holds: ExitStack, every: str | None) -> None:
        self._run = run
        self._client = client
        self._choices = choices
        self._holds = holds
        self._every = every
        self._begun: dict[str, Appending] = {}
        self._busy: set[str] = set()
        self._behind: set[str] = set()
        self._seconds = 0

    def begin(self, names: Sequence[str]) -> list[Appending]:
        """Lock the archives of topics, and bring them up to date as far as following does not do that.

        Raises:
          Busy: another process archives one of them; nothing was done.
          CommandFailed: an archive has a hole that cannot be filled.
        """
        subjects = [Subject(self._run, self._client, topic, self._choices) for topic in names]
        with ExitStack() as held:
            for subject in subjects:
                held.enter_context(subject.held())
            self._holds.push(held.pop_all())
        for subject in subjects:
            fill_holes(subject)
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
        """Begin with the topics that match a pattern by now; called every second, it looks every ``LOOK_EVERY``."""
        self._seconds += 1
        if not patterns or self._seconds % LOOK_EVERY:
            return []
        try:
            topics = self._client.topics()
        except PlainsongError:
            return []  # the queries wait for the daemon, or end with its error
        known = self._begun.keys() | self._busy
        names = [name for name in topics if name not in known and any(fnmatchcase(name, each) for each in patterns)]
        begun: list[Appending] = []
        for name in names:
            try:
                begun += self.begin([name])
            except Busy as error:
                self._busy.add(name)
                self._run.warn(f"{name} is left out: {error}", "busy", topic=name)
        return begun


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
    with ExitStack() as errors:

        def start(some: Sequence[Appending]) -> None:
            for each in some:
                query, batches = each.subject.start(each.done, every=every)
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
        self._written: deque[Manifest] = deque()
        self._total, self._batches = NOTHING, 0
        self._seconds = 0
        self._expected = expected(run, subject) if run.progress.is_visible else None

    def done(self, manifest: Manifest) -> None:
        """Record a written batch; runs in the query's thread."""
        self._written.append(manifest)

    def tell(self, *, following: bool = False) -> None:
        """Report the batches written since the last call."""
        topic = self.subject.topic
        last = None
        while self._written:
            last = manifest = self._written.popleft()
            self._total += manifest.stats
            self._batches += 1
            self._run.metrics.add("rows_total", manifest.stats.count, topic=topic)
            self._run.metrics.add("bytes_total", manifest.stats.payload_bytes, topic=topic)
            self._run.metrics.add("batches_total", topic=topic)
            bounds = {"start": manifest.start.hex(), "end": manifest.end.hex()}
            rows, batch_bytes = manifest.stats.count, manifest.stats.payload_bytes
            self._run.progress.event(
                "batch", topic=topic, batch=manifest.batch, rows=rows, payloadBytes=batch_bytes, **bounds
            )
            self._run.metrics.write()
        if last is not None:
            lag_s = self.subject.waiting_s(last.end) if self._run.progress.is_visible else None
            of = None if following else self._expected
            self._run.progress.step(self._total.count, of=of, what=topic, batch=last.batch, lag_s=lag_s)
        self._seconds += 1
        if following and self._seconds % JUDGE_EVERY == 0:
            self.subject.warn_if_behind(self.subject.resumes_at)
            self._run.metrics.write()

    def end(self) -> bool:
        """Report the end of the run; True if the archive still lags too far behind the topic."""
        self.tell()
        rows, size = self._total.count, self._total.payload_bytes
        end = self.subject.resumes_at
        text = f"{self.subject.topic}: {show_messages(rows)}, {show_bytes(size)} in {counted(self._batches, 'batch')}"
        figures = {"topic": self.subject.topic, "rows": rows, "payloadBytes": size, "batches": self._batches}
        self._run.progress.result(text, "archived", **figures, end=end.hex())
        return self.subject.warn_if_behind(end)


def expected(run: Run, subject: Subject) -> int:
    """Return the number of messages to archive, those of open transactions included."""
    return _ahead(run, subject.topic, subject.resumes_at).messages


def report_waiting(run: Run, subject: Subject) -> None:
    """Report what ``append`` would do."""
    start = subject.resumes_at
    ahead = _ahead(run, subject.topic, start)
    since = "the oldest message" if start == bytes(20) else show_time(layout.time_of(start))
    run.progress.result(
        f"{subject.topic}: would archive {show_count(ahead.messages)} messages, {show_bytes(ahead.size_bytes)}, "
        f"since {since}, into {subject.files.url(subject.log.folder)}",
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
    """Compact all generations of topics.

    Raises:
      CommandFailed: the archive lacks a topic, or another process compacts one.
    """
    files = open_files(root, run.session)
    entries = [each for each in load_manifests(files) if each.namespace == run.where.namespace]
    for topic in chosen(sorted({entry.topic for entry in entries}), topics):
        generations = sorted({each.generation for each in entries if each.topic == topic})
        logs = [Log(run.where.namespace, topic, generation) for generation in generations]
        if run.dry_run:
            for log in logs:
                _foresee_days(run, log, plan(load_manifests(files, log.folder), unfinished=today))
            continue

        def say(text: str, topic: str = topic) -> None:
            run.warn(text, "taken_over", topic=topic)

        path = layout.lock_file(run.where.namespace, topic, "compacting")
        with files.lock(path, f"days of {run.where.namespace}:{topic}", say) as hold:
            for log in logs:
                compaction = Compaction(run.session(), files, log, compression=compression, held=hold.check)
                _compact(run, log, compaction, today=today, keep_ms=keep_ms)


def _foresee_days(run: Run, log: Log, days: Sequence[Day]) -> None:
    for day in days:
        rows = sum(piece.entry.stats.count for piece in day.pieces)
        text = f"{log.topic}: would write {day.day} from {len(day.pieces)} entries"
        run.progress.result(text, "foreseen", topic=log.topic, day=day.day, entries=len(day.pieces), rows=rows)


def _compact(run: Run, log: Log, compaction: Compaction, *, today: bool, keep_ms: int) -> None:
    """Compact one generation; the caller holds the lock, under which its entries are listed."""
    days = plan(compaction.entries(), unfinished=today)
    rows = 0
    for number, day in enumerate(days):
        manifest = compaction.run(day)
        rows += manifest.stats.count
        run.metrics.add("rows_total", manifest.stats.count, topic=log.topic)
        run.metrics.add("batches_total", topic=log.topic)
        run.progress.event("day", topic=log.topic, day=day.day, rows=manifest.stats.count)
        run.progress.step(rows, what=f"{log.topic} {day.day}", batch=number)
    swept = compaction.sweep(keep_ms)
    text = f"{log.topic}: {len(days)} days of {show_count(rows)} messages written, {swept} folders removed"
    run.progress.result(text, "compacted", topic=log.topic, days=len(days), rows=rows, removed=swept)


def verify(
    run: Run, topic: str, root: str, start: bytes, end: bytes, isolation: str | None, *, checkpoint: str | None = None
) -> Findings:
    """Compare a range of ids with the topic.

    Raises:
      CommandFailed: the topic does not exist.
      Exception: any error of Spark.
    """
    with run.client(topic) as client:
        properties = client.admin.properties(topic)
    log = Log(run.where.namespace, topic, int(properties["generation"]))
    source = run.source(subscribe=topic, **({} if isolation is None else {"isolation": isolation}))
    verification = _verification(run, log, root, start, end, checkpoint)
    return verification.run(source, int(properties["ttl"]))


def verify_files(
    run: Run, topic: str, generation: int, root: str, start: bytes, end: bytes, *, checkpoint: str | None = None
) -> Findings:
    """Check an archive without its topic.

    Raises:
      CommandFailed: there is no archive.
      Exception: any error of Spark.
    """
    log = Log(run.where.namespace, topic, generation)
    if not load_manifests(open_files(root, run.session), log.folder):
        raise CommandFailed(f"there is no archive of {log.name} generation {generation} in {root}", code=Exit.NOT_FOUND)
    return _verification(run, log, root, start, end, checkpoint).run_alone()


def _verification(run: Run, log: Log, root: str, start: bytes, end: bytes, checkpoint: str | None) -> Verification:
    if start >= end:
        raise CommandFailed("--from is not before --to", code=Exit.USAGE)
    _, offsets = checkpoint_of(run, log, root, checkpoint)
    first, done = offsets.first(), offsets.done()
    reached = None if first is None or done is None else Range(first, done)
    files = open_files(root, run.session)
    return Verification(run.session(), files, log, Range(start, end), reached)

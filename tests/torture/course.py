"""One real daemon with active clients, a disk with controlled failures, and a verdict on what the clients saw.

The clients and the checker are those of the tests on real clusters; the checker tests the promises, not the code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import cast

import trio

from tests.cluster.course import at_last, create_topics, settle
from tests.cluster.harness import Cluster
from tests.cluster.history.checker import check
from tests.cluster.history.records import Anomaly, History, Write
from tests.cluster.readers import reader
from tests.cluster.voices import Stage, Voice
from tests.cluster.writers import plain_writer, producing_writer, publish, transactional_writer
from tests.daemon.harness import Daemon, DaemonEnded
from tests.torture.disk import Disk, Plan
from tests.torture.upkeep_load import BUSTLE, PAUSE_S, lost_since, read_singles

TOPICS = ["a", "b", "c"]
#: With these, cleaning is always in progress.
_SETTINGS = (
    *("storage.min_free_bytes=0", "retention.interval_s=0.1", "retention.step_rows=50", "retention.delete_grace_s=0"),
    "transactions.timeout_s=5",
)
#: Sizes of the store: the defaults, and the smallest documented ones; with the latter a volume has a few hundred
#: messages, and volumes are constantly sealed, rewritten and dropped.
SIZES: dict[str, tuple[str, ...]] = {
    "smallest sizes": (*_SETTINGS, "storage.write_buffer_bytes=65536", "storage.volume_bytes=65536"),
    "default sizes": _SETTINGS,
}
SMALLEST = "smallest sizes"
#: How often a daemon may fail to start on a failing disk before the disk is healed.
STARTS = 3
#: Maximum time for which a disk fails before it is healed.
UNDER_FAULTS_S = 8.0
#: Output of a daemon that cannot start, with the exit codes of docs/operations.md.
REFUSALS = ("ended with 1: error: ", "ended with 3: error: ")


@dataclass(slots=True, eq=False)
class Lone:
    """A standalone daemon with a cluster instance's interface for clients."""

    daemon: Daemon
    name: str = "alone"
    state: str = "down"

    @property
    def address(self) -> tuple[str, int]:
        return self.daemon.address


@dataclass(slots=True, eq=False)
class Alone:
    """The cluster's interface for clients when there is one daemon: just its list of instances."""

    instances: list[Lone]


def stage_of(lone: Lone, seed: int) -> Stage:
    """Return a stage on which a cluster's clients use one daemon."""
    return Stage(cast("Cluster", Alone([lone])), TOPICS, seed)


@dataclass(slots=True)
class Verdict:
    """The attacks on one daemon and their result."""

    what: str
    seed: int
    done: int = 0
    """Number of attacks."""
    calls: int = 0
    """Calls to the file system that were counted."""
    refused_starts: int = 0
    summary: str = ""
    messages: int = 0
    polls: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    anomalies: list[Anomaly] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    last_call: str = ""
    made: Counter[str] = field(default_factory=Counter)
    """Number of faults by kind, for attacks with several kinds."""

    @property
    def is_good(self) -> bool:
        return not self.anomalies and not self.surprises

    def __str__(self) -> str:
        good = "GOOD" if self.is_good else "BAD"
        lines = [f"{good}: {self.what}, seed {self.seed}, done {self.done} times, the last at {self.last_call or '-'}"]
        lines += [f"  {self.summary}; {self.refused_starts} starts refused; {dict(self.answers)}"]
        lines += [f"  {kind}: {text}" for kind, text in self.anomalies[:10]]
        lines += [f"  unexplained: {each}" for each in self.surprises[:10]]
        return "\n".join(lines)

    def judge(self, history: History) -> None:
        """Check the history for anomalies, and count the messages and polls judged."""
        self.anomalies += check(history)
        self.summary = history.summary()
        self.messages, self.polls = sum(map(len, history.logs.values())), len(history.polls)


async def start(lone: Lone, verdict: Verdict, disk: Disk | None = None) -> None:
    """Start the daemon; on a failing disk it may refuse with a known error; heal the disk after ``STARTS`` refusals."""
    lone.state = "down"
    for attempt in range(STARTS + 1):
        if attempt == STARTS and disk is not None:
            disk.heal()
        try:
            await trio.to_thread.run_sync(lone.daemon.start)
        except DaemonEnded as error:
            if disk is None or disk.made == 0 or attempt == STARTS:
                raise
            if not str(error).startswith(REFUSALS) or "Traceback" in str(error):
                verdict.surprises.append(f"a start {error}")
            verdict.refused_starts += 1
        else:
            lone.state = "up"
            return


async def keep_up(lone: Lone, verdict: Verdict, disk: Disk) -> None:
    """Restart a daemon that ended unexpectedly, and record a surprise."""
    while True:
        if lone.state == "up" and lone.daemon.ended:
            await trio.to_thread.run_sync(lone.daemon.wait)
            verdict.surprises.append(f"it ended by itself with {lone.daemon.returncode}: {lone.daemon.lines[-3:]}")
            await start(lone, verdict, disk)
        await trio.sleep(0.05)


async def clients(
    stage: Stage,
    rng: Random,
    work: Callable[[], Awaitable[None]],
    *,
    watch: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run writers and readers until ``work`` has returned and each writer has completed its last operation."""
    async with trio.open_nursery() as others:
        if watch is not None:
            others.start_soon(watch)
        for committed in stage.isolations:
            for waits in (True, False):
                read = partial(reader, committed=committed, waits=waits, pause_s=PAUSE_S)
                others.start_soon(read, stage, rng.randrange(1 << 30))
        async with trio.open_nursery() as writers:
            for at, writer in enumerate((plain_writer, producing_writer, transactional_writer)):
                writers.start_soon(writer, stage, f"w{at}", rng.randrange(1 << 30), PAUSE_S)
            for work_of_upkeep in BUSTLE:
                writers.start_soon(work_of_upkeep, stage, rng.randrange(1 << 30))
            await work()
            stage.over = True
        others.cancel_scope.cancel()


async def judge_twice(stage: Stage, lone: Lone, verdict: Verdict) -> None:
    """Decide open transactions, read everything and judge it; repeat after killing and restarting the daemon."""
    await settle(stage)
    await read_singles(stage)
    before = {topic: list(rows) for topic, rows in stage.history.logs.items()}
    await trio.to_thread.run_sync(lone.daemon.kill)
    await start(lone, verdict)
    await settle(stage)
    await read_singles(stage)
    for topic, rows in stage.history.logs.items():
        if list(rows) != before[topic]:
            verdict.anomalies.append(Anomaly("vanished", f"{topic} has other messages after a start"))
    await end(stage, verdict)
    verdict.answers += stage.answers
    verdict.surprises += stage.surprises


async def end(stage: Stage, verdict: Verdict) -> None:
    """Publish a last message to each topic, wait until readers have received it, and judge the history."""
    for topic in TOPICS:
        async with stage.voice(2) as voice:
            write = Write(topic, (b"the last of " + topic.encode(),), trio.current_time())
            stage.history.writes.append(write)
            await at_last(stage, partial(once_more, voice, write))
    await settle(stage)
    await read_singles(stage)
    verdict.judge(stage.history)


async def once_more(voice: Voice, write: Write) -> None:
    """Publish the message, unless an earlier attempt may have succeeded."""
    if not write.unanswered:
        await publish(voice, write)


@dataclass(slots=True)
class Attack:
    """The objects that a fault acts on."""

    lone: Lone
    disk: Disk
    stage: Stage
    rng: Random
    verdict: Verdict
    made: Counter[str] = field(default_factory=Counter)
    """The number of faults by name."""
    thread_writes: bool = False
    """True if the daemon's event loop never writes to the disk, so that it keeps running while the disk stalls."""


async def with_failing_calls(
    directory: Path, made: Path, plan: Plan, seed: int, acknowledged: int = 40, *, sizes: str = SMALLEST
) -> Verdict:
    """Run a new daemon from its first start on a disk whose calls fail as planned; then heal the disk and judge."""

    async def work(attack: Attack) -> None:
        await attack.stage.more(acknowledged)
        attack.verdict.calls = attack.disk.calls
        attack.disk.heal()
        await attack.stage.more(acknowledged // 2)

    return await life(directory, made, str(plan), seed, work, plan=plan, sizes=sizes)


async def life(
    directory: Path,
    made: Path,
    what: str,
    seed: int,
    work: Callable[[Attack], Awaitable[None]],
    *,
    plan: Plan | None = None,
    environ: Mapping[str, str] | None = None,
    sizes: str = SMALLEST,
) -> Verdict:
    """Run a new daemon with clients while ``work`` attacks it; then judge everything, twice.

    Args:
      plan: failures of calls from the first start on, for at most ``UNDER_FAULTS_S``.
      environ: additional environment variables.
      sizes: the sizes of its store, one of ``SIZES``.
    """
    verdict = Verdict(what, seed)
    disk = Disk(directory / "data", made)
    said = {**disk.environ, **(environ or {})}
    said["LD_PRELOAD"] = ":".join([disk.environ["LD_PRELOAD"], *filter(None, [(environ or {}).get("LD_PRELOAD")])])
    thread_writes = bool(seed % 2)
    settings = (*SIZES[sizes], "storage.inline_commit_s=0") if thread_writes else SIZES[sizes]
    rng, lone = Random(seed), Lone(Daemon(directory / "data", *settings, environ=said))
    try:
        if plan is not None:
            disk.fail(plan)
        await start(lone, verdict, disk)
        stage = stage_of(lone, seed)
        attack = Attack(lone, disk, stage, Random(rng.random()), verdict, thread_writes=thread_writes)
        async with trio.open_nursery() as nursery:
            if plan is not None:
                nursery.start_soon(_heal_later, disk)
            await create_topics(stage)
            await clients(stage, rng, partial(work, attack), watch=partial(keep_up, lone, verdict, disk))
            nursery.cancel_scope.cancel()
        verdict.done, verdict.last_call = disk.made or sum(attack.made.values()), disk.what
        verdict.made = attack.made
        await judge_twice(stage, lone, verdict)
    finally:
        lone.daemon.end()
        disk.close()
    return verdict


async def restarted(attack: Attack, end: Callable[[], object]) -> None:
    """End the daemon and start it again: everything acknowledged before must be present."""
    attack.lone.state = "down"
    ended_s = trio.current_time()
    await trio.to_thread.run_sync(end)
    await start(attack.lone, attack.verdict)
    lost = await lost_since(attack.stage, attack.stage.history, ended_s)
    attack.verdict.anomalies += [Anomaly("lost", f"{name}, after a restart") for name in lost]


async def _heal_later(disk: Disk) -> None:
    while not disk.made:  # noqa: ASYNC110 - another process counts them, and the first may take long
        await trio.sleep(0.05)
    await trio.sleep(UNDER_FAULTS_S)
    disk.heal()

"""A whole run: active clients, one fault after another, recovery, a full read at every instance, and a verdict."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from math import inf
from operator import itemgetter
from pathlib import Path
from random import Random
from typing import TypeVar

import trio

from tests.cluster.harness import Cluster
from tests.cluster.history.checker import check
from tests.cluster.history.records import Anomaly, Transaction
from tests.cluster.nemesis import Attack, Fault
from tests.cluster.readers import log_of, read_whole, reader
from tests.cluster.voices import BRISK_S, QUIET_S, Doubt, NotSent, Refused, Stage, Voice
from tests.cluster.writers import TX, decide, plain_writer, producing_writer, transactional_writer
from tests.daemon.talk import topic_path

T = TypeVar("T")
TOPICS = [f"topic-{number}" for number in range(6)]
#: Pause between two requests of a client. Most of a run is spent waiting for sessions to end: without pauses, clients
#: would fill that time with requests that find nothing new.
PAUSE_S = 0.1


@dataclass(slots=True)
class Report:
    """The faults, the counts, and all errors."""

    seed: int
    made: list[str]
    proxied: Counter[str]
    answers: Counter[str]
    summary: str
    anomalies: list[Anomaly]
    surprises: list[str]
    took_s: float
    states: Counter[str] = field(default_factory=Counter)

    @property
    def is_good(self) -> bool:
        return not self.anomalies and not self.surprises

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {self.took_s:.0f} s: {'GOOD' if self.is_good else 'BAD'}", "faults:"]
        lines += [f"  {each}" for each in self.made]
        lines += [
            f"calls and connections that proxies disturbed: {_said(self.proxied)}",
            f"answers: {_said(self.answers)}",
        ]
        kinds = Counter[str](kind for kind, _ in self.anomalies)
        lines += [f"history: {self.summary}", f"anomalies: {_said(kinds)}", *self._some_anomalies()]
        lines += [
            f"answers that nothing explains: {len(self.surprises)}",
            *(f"  {each}" for each in self.surprises[:20]),
        ]
        return "\n".join(lines)

    def _some_anomalies(self) -> Iterator[str]:
        """Return up to eight anomalies of each kind."""
        for kind, found in groupby(sorted(self.anomalies), itemgetter(0)):
            yield from (f"  {kind}: {text}" for _, text in islice(found, 8))

    def append_to(self, path: Path) -> None:
        """Append the report to the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{self}\n\n")


def _said(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


async def run(
    cluster: Cluster,
    faults: Sequence[Fault],
    seed: int,
    *,
    clients: int = 2,
    between: int = 20,
    plain: bool = False,
    quiet_s: float = QUIET_S,
    restless: bool = False,
) -> Report:
    """Cause one fault after another, with ``between`` acknowledgements before and after each; then check the history.

    Args:
      plain: True for a run without transactions.
      restless: True if clients do not pause longer during a fault.
    """
    begun_s = time.monotonic()
    stage, rng = Stage(cluster, TOPICS, seed, plain=plain, quiet_s=quiet_s), Random(seed)
    attack = Attack(stage, Random(rng.random()))
    await create_topics(stage)
    async with trio.open_nursery() as readers:
        async with trio.open_nursery() as writers:
            _start(stage, writers, readers, rng, clients)
            await stage.more(between)
            for fault in faults:
                if not restless:
                    stage.brisk_until_s = trio.current_time() + BRISK_S
                await fault(attack)
                stage.brisk_until_s = math.inf
                await stage.more(between, patience_s=stage.quiet_s)
            await cluster.heal()
            await stage.more(between, patience_s=stage.quiet_s)
            stage.over = True
        readers.cancel_scope.cancel()
    await settle(stage)
    anomalies = await trio.to_thread.run_sync(check, stage.history)
    proxied: Counter[str] = Counter()
    for proxy in (proxy for each in cluster.instances for proxy in each.proxies):
        proxied.update(proxy.faults)
    summary = stage.history.summary()
    took_s = time.monotonic() - begun_s
    return Report(seed, attack.made, proxied, stage.answers, summary, anomalies, stage.surprises, took_s)


def _start(stage: Stage, writers: trio.Nursery, readers: trio.Nursery, rng: Random, clients: int) -> None:
    for number in range(clients):
        for work in (
            (plain_writer, producing_writer) if stage.plain else (plain_writer, producing_writer, transactional_writer)
        ):
            writers.start_soon(work, stage, f"{work.__name__[:2]}{number}", rng.randrange(1 << 30), PAUSE_S)
    for _ in range(clients):
        for committed in stage.isolations:
            for waits in (True, False):
                readers.start_soon(_read, stage, rng.randrange(1 << 30), committed, waits)


async def _read(stage: Stage, seed: int, committed: bool, waits: bool) -> None:
    await reader(stage, seed, committed=committed, waits=waits, pause_s=PAUSE_S)


async def create_topics(stage: Stage) -> None:
    """Create all topics, at any instance."""
    async with stage.voice(0) as voice:
        for topic in stage.topics:
            await at_last(stage, partial(voice.tell, "PUT", topic_path(topic, "?ifNotExists=true"), {}))


async def settle(stage: Stage) -> None:
    """Decide open transactions, and read every topic at every instance, which ends the history."""
    async with stage.voice(1) as voice:
        for transaction in stage.history.transactions:
            await at_last(stage, partial(_decided, voice, transaction))
        for topic in stage.topics:
            for instance in stage.cluster.instances:
                for committed in stage.isolations:
                    await at_last(stage, partial(read_whole, voice, topic, instance, committed=committed))
            rows = await at_last(stage, partial(log_of, voice, topic, stage.cluster.instances[0]))
            stage.history.logs[topic] = rows


async def _decided(voice: Voice, transaction: Transaction) -> None:
    told = await voice.tell("GET", f"{TX}/{transaction.id}")
    while told["state"] not in ("committed", "aborted", "invalid"):
        if told["state"] == "unknown" and may_be_forgotten(voice.stage, transaction):
            told = {"state": "aborted"}
            break
        await decide(voice, transaction, "abort")
        told = await voice.tell("GET", f"{TX}/{transaction.id}")
    transaction.state = told["state"]


def may_be_forgotten(stage: Stage, transaction: Transaction) -> bool:
    """True if a crash may have lost the begin: with a single instance, before anything in it was acknowledged."""
    writes = (each for each in stage.history.writes if each.transaction is transaction)
    return (
        len(stage.cluster.instances) == 1
        and transaction.committed_s == inf
        and all(each.outcome != "acknowledged" for each in writes)
    )


async def at_last(stage: Stage, ask: Callable[[], Awaitable[T]]) -> T:
    """Retry until the call succeeds; no fault is left to explain an error."""
    with trio.move_on_after(stage.quiet_s):
        while True:
            try:
                return await ask()
            except (NotSent, Doubt, Refused):
                await trio.sleep(0.2)
    raise AssertionError(f"still refused {stage.quiet_s} s after all was well again: {list(stage.last)[-3:]}")

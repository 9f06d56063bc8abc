"""Power cuts of a real daemon: a history is recorded with all changes to its disk, and cut off at many moments.

A daemon starts on each image, completes open transactions, and is judged by its clients' records up to that moment:
acknowledged requests must hold, and requests not yet sent must have had no effect.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from random import Random

import trio

from tests.cluster.course import at_last, create_topics, may_be_forgotten, settle
from tests.cluster.history.cut import known_between
from tests.cluster.history.records import Anomaly, History, Transaction
from tests.cluster.voices import Stage, Voice
from tests.cluster.writers import TX
from tests.daemon.harness import Daemon, DaemonEnded
from tests.torture.course import SIZES, SMALLEST, Lone, Verdict, clients, end, stage_of
from tests.torture.disk import Disk
from tests.torture.power import Disk as Told
from tests.torture.power import Record, Style, read_log

#: The state of unsynced data after the cut, for the report.
LEFT: dict[Style, str] = {
    "lost": "is lost",
    "kept": "is there",
    "torn": "is there in part, its end torn",
    "holes": "is there with blocks of zeros",
}
#: Name of the folder of a volume that replaces others.
_SUCCESSOR = re.compile(rb"/\d{8}\.\d+$")


@dataclass(slots=True)
class Recording:
    """A history, and all changes to the disk during it."""

    root: Path
    history: History
    records: list[Record]
    offset_s: float
    """Difference between the history's clock and the records' clock."""
    ready: int
    """Number of records when all topics had been created."""
    sizes: str
    """Sizes of its store."""

    def moments(self) -> list[int]:
        """Return the possible moments of a cut, as numbers of records."""
        return list(range(1, len(self.records) + 1))

    @property
    def rewrites(self) -> int:
        """Number of volumes that replaced others."""
        return sum(each.kind == "mkdir" and bool(_SUCCESSOR.search(each.one)) for each in self.records)

    def known_at(self, moment: int) -> History:
        """Return the part of the history that clients had recorded after ``moment`` records."""
        return known_between(
            self.history,
            self.records[moment - 1].at_s + self.offset_s,
            (self.records[moment].at_s if moment < len(self.records) else inf) + self.offset_s,
        )


async def record(
    directory: Path, made: Path, seed: int, acknowledged: int = 150, *, sizes: str = SMALLEST
) -> Recording:
    """Record a daemon from its first start until it is killed, with active clients."""
    offset_s = trio.current_time() - time.monotonic()
    disk = Disk(directory / "data", made, log=True)
    assert disk.log is not None
    lone = Lone(Daemon(directory / "data", *SIZES[sizes], environ=disk.environ))
    try:
        await trio.to_thread.run_sync(lone.daemon.start)
        lone.state = "up"
        stage = stage_of(lone, seed)
        await create_topics(stage)
        ready_s = time.monotonic()

        async def work() -> None:
            await stage.more(acknowledged)
            while sizes == SMALLEST and not has_rewritten(directory / "data"):
                await stage.more(5)

        await clients(stage, Random(seed), work)
    finally:
        lone.daemon.end()
        disk.close()
    records = read_log(disk.log)
    ready = sum(each.at_s <= ready_s for each in records)
    return Recording(disk.root, stage.history, records, offset_s, ready, sizes)


def has_rewritten(data: Path) -> bool:
    """True if a volume in this directory has replaced others."""
    return any(re.fullmatch(r"\d{8}\.\d+", name) for name in os.listdir(data / "volumes"))


async def judge(
    recording: Recording,
    moment: int,
    style: Style,
    directory: Path,
    seed: int,
    *,
    lies: str = "",
) -> Verdict:
    """Cut the power after ``moment`` records, start the image, and check it.

    ``lies``: the disk has not synced files whose names end like this, although it reported that it had.
    """
    verdict = Verdict(f"power cut; what was not synced {LEFT[style]}", seed, done=1, last_call=f"record {moment}")
    told = Told.that_was_reported(recording.root, recording.records[:moment], lies)
    told.image(directory / "data", style, Random(seed))
    lone = Lone(Daemon(directory / "data", *SIZES[recording.sizes]))
    stage = stage_of(lone, seed)
    stage.history = recording.known_at(moment)
    try:
        await trio.to_thread.run_sync(lone.daemon.start)
        lone.state = "up"
        if moment >= recording.ready:
            await look_for_topics(stage, verdict)
        await create_topics(stage)
        await forget_lost_transactions(stage, verdict)
        await settle(stage)
        await end(stage, verdict)
    except DaemonEnded as error:
        verdict.anomalies.append(Anomaly("lost", f"the daemon does not start: {error}"))
    finally:
        lone.daemon.end()
    verdict.answers += stage.answers
    verdict.surprises += stage.surprises
    return verdict


async def look_for_topics(stage: Stage, verdict: Verdict) -> None:
    """Report acknowledged topics that do not exist as anomalies."""
    async with stage.voice(3) as voice:
        there = await at_last(stage, partial(voice.tell, "GET", "/v1/namespaces/ring/topics"))
    verdict.anomalies += [Anomaly("lost", f"topic {each} is not there") for each in stage.topics if each not in there]


async def forget_lost_transactions(stage: Stage, verdict: Verdict) -> None:
    """Report acknowledged transactions that are unknown now as anomalies, and drop them: they cannot be decided."""
    async with stage.voice(3) as voice:
        for each in list(stage.history.transactions):
            if await at_last(stage, partial(_is_unknown, voice, each)):
                if not may_be_forgotten(stage, each):
                    verdict.anomalies.append(Anomaly("lost", f"transaction {each.id} was begun, and is not known"))
                stage.history.transactions.remove(each)


async def _is_unknown(voice: Voice, transaction: Transaction) -> bool:
    told = await voice.tell("GET", f"{TX}/{transaction.id}")
    return bool(told["state"] == "unknown")

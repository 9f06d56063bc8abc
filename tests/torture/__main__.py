"""Injects faults into real daemons, and reports: ``python -m tests.torture --seconds 600 --report FILE``.

Without ``--seconds`` it ends once each call of a history has failed in each way.
"""

from __future__ import annotations

import argparse
import errno
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from random import Random

import pytest
import trio

from tests.storage.disks import small_disk
from tests.torture.course import Verdict, with_failing_calls
from tests.torture.cuts import judge, record
from tests.torture.disk import Plan, library, why_not
from tests.torture.faults import storm
from tests.torture.power import STYLES

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "build/torture/report.md"
FOR_EVER = 1 << 32
#: How a single call fails: errno, and True if half of a write is stored first.
WAYS = {"EIO": (errno.EIO, False), "EIO, torn": (errno.EIO, True), "ENOSPC, torn": (errno.ENOSPC, True)}
#: Number of disk images to test from each recording.
IMAGES = 12


@dataclass(slots=True)
class Line:
    """One line of the report."""

    done: int = 0
    histories: int = 0
    messages: int = 0
    polls: int = 0
    anomalies: int = 0


@dataclass(slots=True)
class Report:
    """The number of attacks of each kind, and their results."""

    seed: int
    lines: dict[str, Line] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    """Number of faults by kind, for attacks that combine several kinds."""
    last_call: int = 0
    """Number of calls in a history."""
    bad: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, name: str, verdict: Verdict) -> None:
        line = self.lines.setdefault(name, Line())
        line.done += verdict.done
        line.histories += 1
        line.messages += verdict.messages
        line.polls += verdict.polls
        line.anomalies += len(verdict.anomalies) + len(verdict.surprises)
        self.faults += verdict.made
        if not verdict.is_good:
            self.bad.append(str(verdict))

    def __str__(self) -> str:
        took_s, total = time.monotonic() - self.began_s, Line()
        for each in self.lines.values():
            total.histories += each.histories
            total.messages += each.messages
            total.polls += each.polls
            total.anomalies += each.anomalies
        said = [
            f"Commit {commit()}, seed {self.seed}, {took_s / 60:.0f} minutes on {os.cpu_count()} cores "
            f"({platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}).",
            "",
            "| what was done | times | histories checked | messages | pages | anomalies |",
            "|---|--:|--:|--:|--:|--:|",
            *(
                f"| {name} | {each.done:,} | {each.histories:,} | {each.messages:,} | {each.polls:,} | {each.anomalies} |"
                for name, each in sorted(self.lines.items())
            ),
            f"| **all** | | {total.histories:,} | {total.messages:,} | {total.polls:,} | **{total.anomalies}** |",
        ]
        if self.faults:
            said += ["", "Of the faults in turn:", "", "| fault | times |", "|---|--:|"]
            said += [f"| {name} | {times:,} |" for name, times in sorted(self.faults.items())]
        if self.last_call:
            said += ["", f"A history without faults had {self.last_call} calls; one that fails is one of these."]
        if self.bad:
            said += ["", "What is wrong:", "", "```", *self.bad, "```"]
        return "\n".join(said) + "\n"


def commit() -> str:
    """Return the checked-out commit, marked if there are uncommitted changes."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def single_calls(rng: Random, last: int) -> Iterator[tuple[str, Plan]]:
    """Yield a plan for each way in which each call of a history can fail, in random order."""
    all_of_them = [(way, number) for way in WAYS for number in range(1, last + 1)]
    rng.shuffle(all_of_them)
    for way, number in all_of_them:
        error, torn = WAYS[way]
        yield f"one call fails with {way}", Plan(number, error=error, torn=torn)


def main() -> int:
    """Return the exit status: 1 if a history is bad, 2 if attacks cannot run on this machine."""
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, help="end after this time; default: when each call has failed in each way"
    )
    parser.add_argument("--report", type=Path, default=REPORT, help="where the table goes (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=190)
    asked = parser.parse_args()
    lacking = why_not()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    report = Report(asked.seed)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torture-")))
        try:
            full = stack.enter_context(small_disk(scratch / "full", 64))
        except pytest.skip.Exception as skipped:
            print(skipped)
            full = None
        try:
            trio.run(partial(attack_all, scratch, full, report, asked.seconds))
        except KeyboardInterrupt:
            print("interrupted")
        finally:
            asked.report.parent.mkdir(parents=True, exist_ok=True)
            asked.report.write_text(str(report), encoding="utf-8")
            print(report)
    return bool(report.bad)


async def attack_all(scratch: Path, full: Path | None, report: Report, seconds: float | None) -> None:
    """Run attacks of all kinds in turn."""
    made, rng = library(scratch), Random(report.seed)
    until_s = trio.current_time() + seconds if seconds else float("inf")
    quiet = await with_failing_calls(empty(scratch / "quiet"), made, Plan(FOR_EVER), report.seed)
    report.add("nothing", quiet)
    report.last_call = quiet.calls
    single = single_calls(rng, quiet.calls)
    for number in count(report.seed):
        chosen = list(islice(single, 8))
        if not chosen and seconds is None:
            return
        async for name, verdict in turn(scratch, full, made, rng, number, chosen):
            report.add(name, verdict)
            print(f"{name}: {'good' if verdict.is_good else verdict}", flush=True)
            if trio.current_time() > until_s:
                return


async def turn(
    scratch: Path, full: Path | None, made: Path, rng: Random, seed: int, single: list[tuple[str, Plan]]
) -> AsyncIterator[tuple[str, Verdict]]:
    """Run the given attacks on single calls, then a few of each other kind."""
    for name, plan in single:
        yield name, await tried(with_failing_calls, empty(scratch / "data"), made, plan, seed)
    every = rng.choice((31, 67, 101, 149, 211))
    many = Plan(rng.randint(1, 150), FOR_EVER, every, rng.choice((errno.EIO, errno.ENOSPC)), torn=rng.random() < 0.5)
    yield "each so-many-th call fails", await tried(with_failing_calls, empty(scratch / "data"), made, many, seed)
    short = Plan(rng.randint(1, 50), FOR_EVER, rng.choice((1, 2, 3)), error=0)
    yield "writes are short", await tried(with_failing_calls, empty(scratch / "data"), made, short, seed)
    place = full if full is not None and seed % 2 else scratch / "data"
    yield "faults in turn", await tried(storm, empty(place), made, seed, clocks=seed % 4 == 0)
    recording = await record(empty(scratch / "recorded"), made, seed)
    for number in range(IMAGES):
        moment, style = rng.choice(recording.moments()), STYLES[number % len(STYLES)]
        verdict = await tried(judge, recording, moment, style, empty(scratch / "data"), seed + number)
        yield verdict.what, verdict


def empty(directory: Path) -> Path:
    """Remove a directory's contents; return the directory."""
    directory.mkdir(exist_ok=True)
    for each in directory.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    return directory


async def tried(make: Callable[..., object], *args: object, **more: object) -> Verdict:
    """Run an attack and return its verdict, which is bad if the attack raises an error."""
    try:
        return await make(*args, **more)  # type: ignore[misc,no-any-return]
    except (AssertionError, ExceptionGroup) as error:
        verdict = Verdict(f"{make.__name__} {args[2:]} {more}", 0)  # type: ignore[attr-defined]
        verdict.surprises.append(f"{error!r}")
        return verdict


if __name__ == "__main__":
    sys.exit(main())

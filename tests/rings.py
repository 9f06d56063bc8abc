"""Runs the rings of tests side by side, each in a pytest process of its own: ``python -m tests.rings [RING ...]``.

Most rings wait: for processes to start, for time-outs, for disks. A few compute. Several at once therefore take hardly
longer than the longest. A ring is never divided, so whatever its tests share for a session starts once.

What follows ``--`` goes to each pytest. Every ring's output and JUnit file are kept in ``build/tests``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

TESTS = Path(__file__).parent
ROOT = TESTS.parent
OUTPUT = ROOT / "build/tests"
#: More at once would want more memory than a small machine has: a ring may run two or three JVMs.
MOST_AT_ONCE = 6
#: How long an interrupted ring may take to end the processes that it has started.
GRACE_S = 20.0
#: How often it says what still runs.
SAY_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Ring:
    """A folder or file of tests, and what it took when it was last measured alone on two quiet cores."""

    name: str
    seconds: int
    cores: float
    """Of processor time, on average: what decides what may run beside it."""


#: Inner rings first: what they find explains what the outer ones would show.
RINGS = (
    Ring("test_house.py", 15, 1.0),
    Ring("protocol", 60, 1.0),
    Ring("actors", 60, 1.0),
    Ring("storage", 60, 1.0),
    Ring("peering", 60, 1.0),
    Ring("broker", 60, 1.0),
    Ring("client", 60, 1.0),
    Ring("cli", 60, 1.0),
    Ring("sql", 60, 1.0),
    Ring("daemon", 60, 1.0),
    Ring("hbase", 60, 1.0),
    Ring("cluster", 60, 1.0),
    Ring("spark", 60, 1.0),
    Ring("pipeline", 60, 1.0),
    Ring("examples", 60, 1.0),
    Ring("bench", 60, 1.0),
    Ring("test_docs.py", 5, 1.0),
    Ring("test_venv.py", 5, 1.0),
)


def all_rings() -> list[Ring]:
    """Those of the table that exist, in its order, and behind them whatever tests it does not name."""
    known = [ring for ring in RINGS if (TESTS / ring.name).exists()]
    names = {ring.name for ring in known}
    found = sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")})
    return known + [Ring(name, 30, 1.0) for name in found if name not in names]


@dataclass(slots=True)
class Run:
    """One ring's pytest, and what came of it."""

    ring: Ring
    process: subprocess.Popen[bytes]
    begun_s: float
    seconds: float = 0.0
    cores: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    @property
    def output(self) -> Path:
        return OUTPUT / f"{self.ring.name}.txt"

    @property
    def summary(self) -> str:
        return f"{self.ring.name:<14} {self.seconds:4.0f} s   {self.cores:4.2f} cores   {counts_of(self.counts)}"

    def finish(self, code: int, cpu_s: float) -> None:
        """Note how it ended, and read its JUnit file."""
        self.process.returncode = code
        self.seconds = time.monotonic() - self.begun_s
        self.cores = cpu_s / self.seconds
        with suppress(OSError, ElementTree.ParseError):
            for case in ElementTree.parse(self.output.with_suffix(".xml")).iter("testcase"):
                outcome = outcome_of(case)
                self.counts[outcome] += 1
                if outcome == "failed":
                    self.failed.append(f"{case.get('classname')}::{case.get('name')}")
        if code and not self.failed:
            # It did not get as far as a test that fails: a wrong command line, nothing collected, killed.
            self.counts["failed"] += 1
            self.failed.append(f"{self.ring.name} ended with {code}")


def outcome_of(case: ElementTree.Element) -> str:
    """Of one test in a JUnit file."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def counts_of(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


class Runner:
    """Starts rings as long as there are cores for them, the longest first, and waits for them."""

    def __init__(self, rings: Sequence[Ring], cores: float, options: Sequence[str]) -> None:
        self._waiting = sorted(rings, key=lambda ring: -ring.seconds)
        self._cores, self._options = cores, options
        self._running: dict[int, Run] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="plainsong-"))
        self._said_s = time.monotonic()
        self.ended: list[Run] = []

    def run(self) -> None:
        """Until all have ended. Whatever interrupts it ends those that run."""
        try:
            while self._waiting or self._running:
                self._start_some()
                if not self._reap():
                    self._say_what_runs()
                    time.sleep(0.1)
        except BaseException:
            self._end_all()
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        with suppress(OSError):  # a ring that failed has left its files there
            self._scratch.rmdir()

    def _start_some(self) -> None:
        for ring in list(self._waiting):
            busy = sum(run.ring.cores for run in self._running.values())
            if not self._running or (len(self._running) < MOST_AT_ONCE and busy + ring.cores <= self._cores):
                self._waiting.remove(ring)
                self._start(ring)

    def _start(self, ring: Ring) -> None:
        output = OUTPUT / f"{ring.name}.txt"
        junit = output.with_suffix(".xml")
        junit.unlink(missing_ok=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            f"tests/{ring.name}",
            "--durations=5",
            "-rs",
            "-p",
            "no:cacheprovider",
        ]
        command += [f"--junit-xml={junit}", f"--basetemp={self._scratch / ring.name}", *self._options]
        with output.open("wb") as file:
            # In a group of its own: Ctrl-C comes to this process alone, and it ends the rings in good order.
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        self._running[process.pid] = Run(ring, process, time.monotonic())

    def _reap(self) -> bool:
        """Whether a ring has ended; says what came of it."""
        pid, status, usage = os.wait4(-1, os.WNOHANG) if self._running else (0, 0, None)
        if usage is None or pid not in self._running:
            return False
        run = self._running.pop(pid)
        run.finish(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        self.ended.append(run)
        say(run.summary)
        if run.failed or not sys.stdout.isatty():
            say(run.output.read_text(encoding="utf-8", errors="replace"))
        if run.failed:
            say(f"alone: .venv/bin/python -m pytest tests/{run.ring.name}\n")
        else:
            shutil.rmtree(self._scratch / run.ring.name, ignore_errors=True)
        return True

    def _say_what_runs(self) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_EVERY_S:
            self._said_s = now_s
            running = ", ".join(f"{run.ring.name} {now_s - run.begun_s:.0f} s" for run in self._running.values())
            say(f"... running: {running}; waiting: {', '.join(ring.name for ring in self._waiting) or 'none'}")

    def _end_all(self) -> None:
        """SIGTERM, upon which pytest leaves its fixtures (conftest.py); these end daemons and servers."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        for run in self._running.values():
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                run.process.wait(max(0.0, deadline_s - time.monotonic()))
            with suppress(ProcessLookupError):  # what has not ended by itself
                os.killpg(run.process.pid, signal.SIGKILL)


def say(text: str) -> None:
    print(text, flush=True)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def estimate_s(rings: Sequence[Ring], cores: float) -> float:
    """No less than the longest, and than what the cores need; packing wastes some."""
    work_s = sum(ring.seconds * ring.cores for ring in rings)
    return max(*(ring.seconds for ring in rings), 1.15 * work_s / cores, 1.0)


def judge(runs: Sequence[Run], rings: Sequence[Ring]) -> int:
    """Say what failed, inner rings first, and what came of everything; the exit code."""
    total: Counter[str] = Counter()
    for run in sorted(runs, key=lambda run: rings.index(run.ring)):
        total.update(run.counts)
        if run.failed:
            say(f"\nfailed in {run.ring.name} (alone: .venv/bin/python -m pytest tests/{run.ring.name}):")
            say("\n".join(f"  {name}" for name in run.failed))
    say(counts_of(total))
    return 1 if total["failed"] else 0


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    known = {ring.name: ring for ring in all_rings()}
    available = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="python -m tests.rings", description=__doc__)
    parser.add_argument("ring", nargs="*", help=", ".join(known))
    parser.add_argument("--cores", type=float, default=available, help=f"how many to fill (default: {available})")
    given = parser.parse_args(arguments[:at])
    if unknown := set(given.ring) - known.keys():
        parser.error(f"no such ring: {', '.join(sorted(unknown))}")
    rings = [ring for name, ring in known.items() if not given.ring or name in given.ring]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    say(f"{len(rings)} rings of tests side by side: {', '.join(ring.name for ring in rings)}")
    about = minutes(estimate_s(rings, given.cores))
    say(f"about {about} on {given.cores:g} quiet cores; each ring's output: {OUTPUT.relative_to(ROOT)}/RING.txt\n")
    begun_s, runner = time.monotonic(), Runner(rings, given.cores, arguments[at + 1 :])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # SIGINT, too: a shell starts what runs in its background with it ignored, which rings would inherit.
        signal.signal(number, _interrupt)
    try:
        runner.run()
    except KeyboardInterrupt:
        say("interrupted; every ring was ended")
        return 130
    say(f"\nall rings ended after {minutes(time.monotonic() - begun_s)}")
    return judge(runner.ended, rings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

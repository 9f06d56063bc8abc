"""Runs rings of tests in parallel, each in its own pytest process: ``python -m tests.rings [RING ...]``.

A ring spends much of its time waiting for processes to start, for time-outs, and for disks. So two more rings than
there are cores run at once, the longest first, and further ones while cores are still idle and memory is free. A ring is
divided into two only if its tests share no session fixture, which each process would start again.

A test that fails while other rings run is run again, alone. If it then passes, it is reported as unstable: it depends
on the load or on luck, and must be repaired, but does not hide the result of the others. A failure is final at once in
the rings of rules, actors and stores, where nothing may depend on luck, if more than ``MOST_UNSTABLE`` rings failed,
and with ``--strict``.

Arguments after ``--`` are passed to each pytest. Every ring's output and JUnit file are in ``build/tests``.
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
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn
from xml.etree import ElementTree

TESTS = Path(__file__).parent
ROOT = TESTS.parent
OUTPUT = ROOT / "build/tests"
#: Beyond this, rings would disturb each other even on a machine with idle cores.
MOST_LANES = 8
#: A further ring starts only if this much memory is free: a ring runs up to four JVMs.
ROOM_BYTES = 3 << 30
#: The share of the cores that an estimate assumes rings to use, since the last ring runs alone.
FILLED = 0.9
#: A further ring starts when this many cores were idle on average for ``IDLE_FOR_S``, because each ring computes at its
#: start.
IDLE_CORES = 0.3
IDLE_FOR_S = 5.0
#: Time that an interrupted ring has to end the processes that it started.
GRACE_S = 20.0
#: Rings that search with the same examples each time and start hardly any processes, so that nothing may depend on
#: luck.
NEVER_BY_LUCK = frozenset(
    (
        *("small", "test_static.py"),
        *("protocol", "actors", "storage", "simulation", "fuzz"),
    )
)
LAST_FAILED = ("--last-failed", "--last-failed-no-failures=none")
#: If more rings than this have failed, the change or the machine is broken.
MOST_UNSTABLE = 2
#: Interval between lists of the rings that still run.
SAY_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Ring:
    """A folder or file of tests, or several, with its cost at the last measurement."""

    name: str
    """Name of the folder or file, unless ``files`` are given."""
    seconds: int
    """Duration from start to end, while other rings run."""
    cpu_s: int
    """Processor time, including processes that outlive their parents, such as Spark's JVMs, which no summary counts."""
    folder: str = ""
    files: tuple[str, ...] = ()
    """Files of ``folder`` that run in this ring; all others run in the ring with the folder's name. Without ``folder``:
    files and folders that share a ring."""

    @property
    def paths(self) -> list[str]:
        """The paths that pytest runs."""
        return ["/".join(filter(None, ("tests", self.folder, file))) for file in self.files or (self.name,)]

    @property
    def command(self) -> str:
        """The command that runs the ring alone."""
        return " ".join([".venv/bin/python -m pytest", *self.paths, *self.left_out])

    @property
    def left_out(self) -> list[str]:
        """Options that exclude the tests of other rings."""
        others = [ring for ring in RINGS if ring.folder == self.name]
        return [f"--ignore={path}" for ring in others for path in ring.paths]


#: Inner rings first, because their failures explain those of the outer ones.
RINGS = (
    Ring(
        # Starting pytest would take longer than each of these.
        "small",
        43,
        28,
        files=(
            "test_house.py",
            "test_docs.py",
            "test_promises.py",
            "test_site.py",
            "test_venv.py",
            "test_watching.py",
            "kept",
            "mutation",
        ),
    ),
    Ring("test_static.py", 40, 30),
    Ring("protocol", 40, 28),
    Ring("actors", 240, 58),
    Ring("storage", 140, 58),
    Ring("schedules", 45, 33),
    Ring("simulation", 42, 26),
    Ring("peering", 16, 6),
    Ring("security", 90, 27),
    Ring("traces", 25, 7),
    Ring("broker", 390, 135),
    Ring("fuzz", 35, 17),
    Ring("client", 370, 75),
    Ring("cli", 95, 42),
    Ring("console", 160, 105),
    Ring("sql", 155, 34),
    Ring("daemon", 385, 112),
    Ring(
        "daemon-copies",
        290,
        60,
        folder="daemon",
        files=("test_lost_machine.py", "test_replica_command.py", "test_taking_over.py"),
    ),
    Ring(
        "daemon-deaths",
        235,
        82,
        folder="daemon",
        files=(
            "test_backup_command.py",
            "test_backup_faults.py",
            "test_clock.py",
            "test_copy_command.py",
            "test_crash_ring.py",
            "test_damage_ring.py",
            "test_producer_ring.py",
            "test_producers_killed.py",
            "test_staging_killed.py",
            "test_transaction_client_deaths.py",
            "test_transaction_daemon_deaths.py",
            "test_transaction_faults.py",
            "test_transaction_ring.py",
        ),
    ),
    Ring("torture", 84, 35),
    Ring("hbase", 290, 130),
    Ring("cluster", 300, 120),
    Ring("spark", 230, 105),
    Ring(
        # Tests that need a standalone cluster, or an environment in which the wheels are installed.
        "spark-cluster",
        115,
        62,
        folder="spark",
        files=("test_jobs_on_cluster.py", "test_packaging.py", "test_write_on_cluster.py"),
    ),
    Ring("pipeline", 525, 290),
    Ring("examples", 45, 20),
    Ring("howto", 180, 42),
    Ring("bench", 235, 165),
    Ring("dist", 70, 36),
    Ring("test_rings.py", 12, 6),
)


def all_rings() -> list[Ring]:
    """Return the rings of the table that exist, in its order, and then those of tests that it does not name."""
    known = [ring for ring in RINGS if all((ROOT / path).exists() for path in ring.paths)]
    names = {Path(path).relative_to("tests").parts[0] for ring in known for path in ring.paths}
    found = sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")})
    return known + [Ring(name, 30, 30) for name in found if name not in names]


@dataclass(slots=True)
class Run:
    """One ring's pytest and its result."""

    ring: Ring
    process: subprocess.Popen[bytes]
    begun_s: float
    seconds: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    unstable: list[str] = field(default_factory=list)
    """Tests that failed while other rings ran, and passed alone."""

    @property
    def output(self) -> Path:
        return OUTPUT / f"{self.ring.name}.txt"

    @property
    def summary(self) -> str:
        return f"{self.ring.name:<14} {self.seconds:4.0f} s   {self.cpu_s:4.0f} s of a core   {counts_of(self.counts)}"

    def look_again(self, scratch: Path, options: Sequence[str]) -> None:
        """Run the failed tests alone. If all pass now, they are unstable; the output of their failure is kept."""
        self.output.replace(self.output.with_suffix(".first.txt"))
        again = Run(self.ring, start(self.ring, scratch, [*options, *LAST_FAILED]), time.monotonic())
        again.finish(again.process.wait(), 0.0)
        if not again.failed:
            self.counts["passed"] += self.counts.pop("failed")
            self.failed, self.unstable = [], self.failed

    def finish(self, code: int, cpu_s: float) -> None:
        """Record how the run ended, and read its JUnit file."""
        self.process.returncode = code
        self.seconds = time.monotonic() - self.begun_s
        self.cpu_s = cpu_s
        with suppress(OSError, ElementTree.ParseError):
            for case in ElementTree.parse(self.output.with_suffix(".xml")).iter("testcase"):
                outcome = outcome_of(case)
                self.counts[outcome] += 1
                if outcome == "failed":
                    self.failed.append(f"{case.get('classname')}::{case.get('name')}")
        if code and not self.failed:
            # It did not reach a failing test: a wrong command line, nothing collected, or a kill.
            self.counts["failed"] += 1
            self.failed.append(f"{self.ring.name} ended with {code}")


def start(ring: Ring, scratch: Path, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a ring's pytest; its output, its JUnit file and the names of its failed tests go to ``OUTPUT``."""
    output = OUTPUT / f"{ring.name}.txt"
    junit = output.with_suffix(".xml")
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *ring.paths, *ring.left_out, "--durations=5", "-rs", *options]
    command += [f"--override-ini=cache_dir={output.with_suffix('.cache')}"]
    command += [f"--junit-xml={junit}", f"--basetemp={scratch / ring.name}"]
    # Without bytecode files, each pytest would rewrite the assertions of hypothesis and its plugins, which takes a
    # second.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with output.open("wb") as file:
        # In its own process group, so that Ctrl-C reaches only this process, which ends the rings in order.
        return subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def outcome_of(case: ElementTree.Element) -> str:
    """Return the outcome of one test in a JUnit file."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def counts_of(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))


def cores_idle_s(cores: Set[int]) -> float:
    """Return the total idle time of these cores since boot; always 0 if the system does not report it."""
    ticks = 0
    with suppress(OSError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            name, *columns = line.split()
            if name in {f"cpu{core}" for core in cores}:
                ticks += int(columns[3]) + int(columns[4])  # idle, or only waiting for a disk
    return ticks / os.sysconf("SC_CLK_TCK")


def free_bytes() -> int:
    """Return the memory that processes can still use without swapping; a large number if the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return sys.maxsize


class Runner:
    """Starts rings while a lane is free, the longest first, and waits for them.

    Beyond its lanes it starts further rings, up to ``most`` at once, while ``idle_s`` shows that cores are idle, and
    ``free`` that there is memory for another one.
    """

    def __init__(
        self,
        rings: Sequence[Ring],
        lanes: int,
        options: Sequence[str],
        *,
        most: int = 0,
        idle_s: Callable[[], float] = lambda: 0.0,
        free: Callable[[], int] = free_bytes,
    ) -> None:
        self._waiting = sorted(rings, key=lambda ring: -ring.seconds)
        self._lanes, self._most, self._options = lanes, most, options
        self._idle_s, self._free = idle_s, free
        self._idle_since = time.monotonic(), idle_s()
        self._running: dict[int, Run] = {}
        self._scratch = Path(tempfile.mkdtemp(prefix="plainsong-"))
        self._said_s = time.monotonic()
        self.ended: list[Run] = []

    def run(self) -> None:
        """Run until all rings have ended. An interrupt ends the running rings."""
        try:
            while self._waiting or self._running:
                while self._waiting and (len(self._running) < self._lanes or self._cores_are_idle()):
                    self._start(self._waiting.pop(0))
                    self._idle_since = time.monotonic(), self._idle_s()
                if not self._reap():
                    self._say_what_runs()
                    time.sleep(0.1)
        except BaseException:
            self._end_all()
            shutil.rmtree(self._scratch, ignore_errors=True)
            raise
        with suppress(OSError):  # a failed ring leaves its files there
            self._scratch.rmdir()

    def _cores_are_idle(self) -> bool:
        """True if there is room for another ring, judged by idle time since the last start or check."""
        now_s, (then_s, idle_then_s) = time.monotonic(), self._idle_since
        if len(self._running) >= self._most or now_s - then_s < IDLE_FOR_S:
            return False
        self._idle_since = now_s, self._idle_s()
        return self._idle_since[1] - idle_then_s >= IDLE_CORES * (now_s - then_s) and self._free() >= ROOM_BYTES

    def look_again(self) -> None:
        """Run the failed tests of each ring alone, once, unless their failures are final."""
        failed = [run for run in self.ended if run.failed]
        if len(failed) > MOST_UNSTABLE or any(run.ring.name in NEVER_BY_LUCK for run in failed):
            return
        for run in failed:
            say(f"\nonce more, alone: what failed in {run.ring.name}")
            run.look_again(self._scratch, self._options)
            say(run.output.read_text(encoding="utf-8", errors="replace"))

    def _start(self, ring: Ring) -> None:
        shutil.rmtree(OUTPUT / f"{ring.name}.cache", ignore_errors=True)
        process = start(ring, self._scratch, self._options)
        self._running[process.pid] = Run(ring, process, time.monotonic())

    def _reap(self) -> bool:
        """Return True if a ring has ended, after printing its result."""
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
            say(f"alone: {run.ring.command}\n")
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
        """Send SIGTERM, at which pytest finishes its fixtures (conftest.py), which end daemons and servers."""
        for pid in self._running:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline_s = time.monotonic() + GRACE_S
        for run in self._running.values():
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                run.process.wait(max(0.0, deadline_s - time.monotonic()))
            with suppress(ProcessLookupError):  # if still running
                os.killpg(run.process.pid, signal.SIGKILL)


def say(text: str) -> None:
    print(text, flush=True)


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


def estimate_s(rings: Sequence[Ring], lanes: int, cores: int) -> float:
    """Return the longest of three bounds: the longest ring, the lanes, and the cores."""
    work_s = sum(ring.cpu_s for ring in rings)
    waits_s = sum(ring.seconds for ring in rings) / lanes
    return max(*(ring.seconds for ring in rings), work_s / cores / FILLED, waits_s, 1)


def judge(runs: Sequence[Run], rings: Sequence[Ring]) -> int:
    """Print the failures, inner rings first, and the totals; return the exit code."""
    total: Counter[str] = Counter()
    for run in sorted(runs, key=lambda run: rings.index(run.ring)):
        total.update(run.counts)
        if run.failed:
            say(f"\nfailed in {run.ring.name} (alone: {run.ring.command}):")
            say("\n".join(f"  {name}" for name in run.failed))
        if run.unstable:
            say(
                f"\nUNSTABLE in {run.ring.name}, to be repaired: failed next to other rings, passed alone. How each failed is"
            )
            say(f"in {run.output.with_suffix('.first.txt').name}; the ring alone: {run.ring.command}")
            say("\n".join(f"  {name}" for name in run.unstable))
    say(counts_of(total))
    return 1 if total["failed"] else 0


def _interrupt(number: int, _: object) -> NoReturn:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main(arguments: Sequence[str]) -> int:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    known = {ring.name: ring for ring in all_rings()}
    cores = os.sched_getaffinity(0)
    lanes = min(len(cores) + 2, MOST_LANES)
    parser = argparse.ArgumentParser(prog="python -m tests.rings", description=__doc__)
    parser.add_argument("ring", nargs="*", help=", ".join(known))
    several = f"{lanes} to {MOST_LANES}"
    parser.add_argument("--lanes", type=int, help=f"how many rings run at once (default: {several}, as cores are idle)")
    parser.add_argument("--strict", action="store_true", help="a test that has failed once has failed")
    given = parser.parse_args(arguments[:at])
    if unknown := set(given.ring) - known.keys():
        parser.error(f"no such ring: {', '.join(sorted(unknown))}")
    rings = [ring for ring in known.values() if not given.ring or {ring.name, ring.folder} & {*given.ring}]
    OUTPUT.mkdir(parents=True, exist_ok=True)
    lanes, most = (given.lanes, given.lanes) if given.lanes else (lanes, MOST_LANES)
    say(f"{len(rings)} rings of tests, {given.lanes or several} at once: {', '.join(ring.name for ring in rings)}")
    about = minutes(estimate_s(rings, most, len(cores)))
    say(
        f"about {about} if this machine is quiet ({len(cores)} cores); each ring's output: {OUTPUT.relative_to(ROOT)}/RING.txt\n"
    )
    idle_s = partial(cores_idle_s, cores)
    begun_s, runner = time.monotonic(), Runner(rings, lanes, arguments[at + 1 :], most=most, idle_s=idle_s)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Also for SIGINT: a shell starts background jobs with SIGINT ignored, which the rings would inherit.
        signal.signal(number, _interrupt)
    try:
        runner.run()
        if not given.strict:
            runner.look_again()
    except KeyboardInterrupt:
        say("interrupted; every ring was ended")
        return 130
    say(f"\nall rings ended after {minutes(time.monotonic() - begun_s)}")
    return judge(runner.ended, rings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

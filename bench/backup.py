"""Publish throughput and daemon memory during a backup, and the cost of a backup alone.

The backup client and the load generator share the machine with the daemon, as in a deployment on one machine.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.daemon import OWN, Daemon, cpu_s, daemon
from bench.generator import run_load
from bench.rounds import Row, Section, Spread
from bench.seed import seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from bench.profiles import Profile

CONNECTIONS = 16
SIZE = 100
TTL_S = 7 * 86_400
#: How long to wait after stopping the client: the daemon finishes the page of objects that it has begun.
SETTLE_S = 2.5
#: The backup without load copies this fraction of the messages.
ALONE_PART = 10
SAYS = """Durable publishes of one message of 100 B over 16 connections in a closed loop, in alternating intervals: in
one a backup runs, in the next its client is stopped. *÷ without* is the ratio of the two rates, pair by pair; *÷ sum*
is the ratio of all messages with a backup to all messages without one. The store has the messages of the first column
in one topic. *Anon MB* is the daemon's own memory (RssAnon) before, *peak MB* the highest value during the run. The
second row is one backup of a tenth of the messages without load: its seconds, and the processor time per GB of rows, of
the daemon and of the client."""


def measure_backup(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure pairs of rates, with and without a backup, then one backup without load."""
    section = Section("backup", "Backup", SAYS)
    data = scratch / "data"
    seed(data, "kept", profile.backed_up_messages, SIZE, int(time.time() * 1000) - 86_400_000, TTL_S)
    with daemon(data) as ours:
        ours.create("live")
        request = bodies.publish("live", 1, SIZE)

        def rate() -> float:
            return float(run_load(ours.port, CONNECTIONS, request, profile.backup_s)["requests_per_s"])

        rate()
        before_mb = ours.resident_mb(OWN)
        without: list[float] = []
        beside: list[float] = []
        backups = _Backups(ours, scratch / "backups")
        with backups, _peak(ours) as peak:
            for number in range(profile.backup_pairs):
                for works in (False, True) if number % 2 == 0 else (True, False):
                    with backups.working() if works else backups.stopped():
                        (beside if works else without).append(rate())
                say(
                    f"backup, pair {number + 1}: {beside[-1]:,.0f} ÷ {without[-1]:,.0f} = {beside[-1] / without[-1]:.2f}"
                )
        values = {
            "publishes/s": Spread.of(without),
            "÷ without": Spread.ratio(beside, without),
            "÷ sum": Spread.of([sum(beside) / sum(without)]),
            "anon MB": Spread.of([before_mb]),
            "peak MB": Spread.of([peak["mb"]]),
        }
        section.rows.append(Row({"messages": profile.backed_up_messages, "what": "publishes beside"}, values))
        say(f"backup: {sum(beside) / sum(without):.2f} of the rate, {before_mb:.0f} MB, at most {peak['mb']:.0f} MB")
    few = max(1, profile.backed_up_messages // ALONE_PART)
    seed(scratch / "few", "kept", few, SIZE, int(time.time() * 1000) - 86_400_000, TTL_S)
    with daemon(scratch / "few") as ours:
        alone = _alone(ours, scratch / "alone")
    section.rows.append(
        Row({"messages": few, "what": "alone"}, {name: Spread.of([value]) for name, value in alone.items()})
    )
    say("backup alone: " + ", ".join(f"{name} {value:.2f}" for name, value in alone.items()))
    return section


def _command(ours: Daemon, folder: Path) -> list[str]:
    program = str(Path(sys.executable).with_name("plainsong"))
    return [program, "backup", "create", str(folder), "--url", f"http://127.0.0.1:{ours.port}", "--json"]


def _alone(ours: Daemon, folder: Path) -> dict[str, float]:
    """Make one backup; return its duration, and processor time per GB of rows."""
    daemons_s, begun_s = ours.cpu_s(), time.monotonic()
    with subprocess.Popen(_command(ours, folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        clients_s = 0.0
        while process.poll() is None:
            with suppress(FileNotFoundError, ProcessLookupError):
                clients_s = max(clients_s, cpu_s(process.pid))
            time.sleep(0.2)
        said, why = process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"the backup ended with {process.returncode}: {why.decode().strip()}")
    done: dict[str, Any] = json.loads(said)
    gigabytes = done["bytes"] / 1e9
    return {
        "GB": gigabytes,
        "seconds": time.monotonic() - begun_s,
        "daemon s/GB": (ours.cpu_s() - daemons_s) / gigabytes,
        "client s/GB": clients_s / gigabytes,
    }


class _Backups:
    """Consecutive backups, each into its own folder; they run only inside ``working``.

    A backup that fails is an error at the end of the block.
    """

    def __init__(self, ours: Daemon, folders: Path) -> None:
        self._ours = ours
        self._folders = folders
        self._number = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._works = False
        self._failure: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> _Backups:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._process is not None and not self._has_ended(self._process):
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGINT)  # on SIGINT the client has the daemon end its cut
            self._process.communicate(timeout=60)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _go_on(self) -> None:
        while not self._over.wait(0.05):
            with self._lock:
                if self._works and (self._process is None or self._has_ended(self._process)) and self._failure is None:
                    self._number += 1
                    command = _command(self._ours, self._folders / str(self._number))
                    try:
                        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                    except OSError as error:
                        self._failure = f"backup {self._number}: {error}"

    def _has_ended(self, process: subprocess.Popen[bytes]) -> bool:
        """True if the backup has ended; its failure is recorded."""
        if process.poll() is None:
            return False
        if process.returncode != 0 and self._failure is None:
            said = process.communicate()[1].decode().strip()
            self._failure = f"backup {self._number} ended with {process.returncode}: {said}"
        return True

    def _signal(self, number: int) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Run backups in the block."""
        with self._lock:
            self._works = True
            self._signal(signal.SIGCONT)
        yield
        with self._lock:
            self._works = False

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Suspend the backup client in the block."""
        with self._lock:
            self._signal(signal.SIGSTOP)
        time.sleep(SETTLE_S)
        yield


@contextmanager
def _peak(ours: Daemon) -> Iterator[dict[str, float]]:
    """Record the daemon's highest RssAnon in the block, in MB, as ``mb``."""
    found = {"mb": 0.0}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.2):
            found["mb"] = max(found["mb"], ours.resident_mb(OWN))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()

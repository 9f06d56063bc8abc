"""Publish latencies at a fixed rate: alone, and while the daemon does other work.

The loop is open: requests are due at fixed times, and latency counts from the due time. A closed loop would hide a
pause of a second in the few requests then in flight.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.daemon import Daemon, daemon
from bench.generator import generator, loads_everywhere, run_everywhere
from bench.rounds import Row, Section, Spread
from bench.seed import seed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from bench.profiles import Profile

SIZE = 100
SHARES = (("1/4", 0.25), ("1/2", 0.5), ("3/4", 0.75))
#: Batches are spread across this many topics.
TOPICS = 10
PAGE = 10_000
READERS = 2
#: Readers get requests for the measured time plus this margin.
MARGIN_S = 5.0
LONG_TTL_S = 7 * 86_400
#: Interval at which the daemon searches for expired topics.
CLEANING_INTERVAL_S = 0.2
#: How long to wait, after the measured time, for the cleaning to finish.
CLEANING_TIMEOUT_S = 60.0
SAYS = """Waits of durable publishes in an open loop: requests are due at a fixed rate, a quarter, a half and three
quarters of the highest rate that a closed loop over the same number of connections reached just before. A wait counts
from when the request was due. *Singles* are one message of 100 B to one topic, *batches* 1000 of them over ten topics.
*Late* is the delay of the generator itself (99th percentile), *generator %* its share of one core. *Unsent* requests
had no answer ten seconds after the end: the daemon could not keep up. *Beside it* is the other work during the loop, in
messages a second: cleaned, read by two readers far behind, or copied from another store on the same disk (0: the
measurement ended before the first copy did)."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """One shape of load."""

    name: str
    messages: int
    connections: int
    topics: tuple[str, ...]

    def requests(self) -> list[bytes]:
        return [bodies.publish(topic, self.messages, SIZE) for topic in self.topics]


KINDS = (
    _Kind("singles", 1, 32, ("single",)),
    _Kind("batches", 1000, 8, tuple(f"batch-{number}" for number in range(TOPICS))),
)


def measure_evenness(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure both kinds of load under each condition, at each share of the highest rate found for it."""
    section = Section("evenness", "Evenness", SAYS)
    for kind in KINDS:
        home = scratch / f"evenness-{kind.name}"
        home.mkdir()
        conditions = _Conditions(profile, home)
        with daemon(home / "data", retention_interval_s=CLEANING_INTERVAL_S) as ours:
            for topic in kind.topics:
                ours.create(topic)
            requests = kind.requests()
            run_everywhere(ours.port, kind.connections, requests, profile.even_s / 4)
            highest = float(run_everywhere(ours.port, kind.connections, requests, profile.even_s / 2)["requests_per_s"])
            say(f"evenness, {kind.name}: at most {highest * kind.messages:,.0f} messages/s, generator in {generator()}")
            for name in profile.beside:
                for shown, share in SHARES:
                    with conditions.beside(name, ours) as noted:
                        result = run_everywhere(
                            ours.port, kind.connections, requests, profile.even_s, rate=highest * share
                        )
                    row = _row(kind, name, shown, result, noted)
                    section.rows.append(row)
                    say(f"evenness, {_line(row)}")
    return section


def _row(kind: _Kind, condition: str, share: str, result: dict[str, Any], noted: dict[str, float]) -> Row:
    values = {
        "messages/s": result["requests_per_s"] * kind.messages,
        **{f"{name} ms": result[f"{key}_ms"] for name, key in _PERCENTILES},
        "late p99 ms": result["late_p99_ms"],
        "generator %": 100 * result["cpu_s"] / result["seconds"],
        "unsent": float(result["unsent"]),
        **noted,
    }
    what: dict[str, str | int] = {"what": kind.name, "beside": condition, "of the highest": share}
    return Row(what, {name: Spread.of([value]) for name, value in values.items()})


_PERCENTILES = (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max"))


def _line(row: Row) -> str:
    at = row.values
    waits = " / ".join(f"{at[f'{name} ms'].median:.2f}" for name, _ in _PERCENTILES)
    unsent = f", {at['unsent'].median:,.0f} unsent" if at["unsent"].median else ""
    where = f"{row.what['what']} beside {row.what['beside']}, {row.what['of the highest']}"
    return f"{where}: {at['messages/s'].median:,.0f}/s, p50/p99/p99.9/max {waits} ms{unsent}"


class _Conditions:
    """Work that runs during the measured load, in the same daemon or on the same machine."""

    def __init__(self, profile: Profile, home: Path) -> None:
        self._profile = profile
        self._home = home
        self._rounds = 0
        self._firsts: dict[str, list[bytes]] = {}
        if not CONDITIONS.keys() >= set(profile.beside):
            raise ValueError(f"unknown condition; use one of {', '.join(CONDITIONS)}")
        if "readers" in profile.beside:
            self._seed("behind", profile.behind_messages)
            self._pages = bodies.NewPages("behind", self._firsts["behind"], PAGE)
        # A topic can expire only once: each share has its own.
        for number in range(len(SHARES) if "cleaning" in profile.beside else 0):
            self._seed(f"old-{number}", profile.cleaned_beside)
        if "copy" in profile.beside:
            seed(home / "other", "copied", profile.behind_messages, SIZE, _now_ms() - 3_600_000, LONG_TTL_S)

    def _seed(self, topic: str, messages: int) -> None:
        first_ms = _now_ms() - 86_400_000
        self._firsts[topic] = seed(self._home / "data", topic, messages, SIZE, first_ms, LONG_TTL_S)

    def beside(self, name: str, ours: Daemon) -> AbstractContextManager[dict[str, float]]:
        """Run the named condition inside the context; its own figures are available when the context ends."""
        return CONDITIONS[name](self, ours)

    @contextmanager
    def alone(self, ours: Daemon) -> Iterator[dict[str, float]]:
        yield {}

    @contextmanager
    def cleaning(self, ours: Daemon) -> Iterator[dict[str, float]]:
        topic = f"old-{self._rounds % len(SHARES)}"
        self._rounds += 1
        noted: dict[str, float] = {}
        begun_s = time.monotonic()
        ours.ask("PUT", bodies.path(topic, "properties"), {"ttl": 1})
        yield noted
        removed = 0
        with suppress(TimeoutError):  # the figure shows how much was removed
            while removed < self._profile.cleaned_beside:
                line = ours.wait_for("topic cleaned", CLEANING_TIMEOUT_S)
                if line["topic"].endswith(topic):
                    removed += int(line["expired"])
        noted["beside it"] = removed / (time.monotonic() - begun_s)

    @contextmanager
    def readers(self, ours: Daemon) -> Iterator[dict[str, float]]:
        """Run readers that request page after page; no page is cached or requested twice."""
        noted: dict[str, float] = {}
        least = int((self._profile.even_s + MARGIN_S) * bodies.MOST_PAGES / READERS)
        asked = [self._pages.take("avro", least) for _ in range(READERS)]
        with ExitStack() as running:
            loads = []
            for mine in asked:
                requests = [request for _, request in mine]
                loads.append(running.enter_context(loads_everywhere(ours.port, 1, requests, number=len(requests))))
            yield noted
            for mine, load in zip(asked, loads, strict=True):
                result = load.enough()
                messages = sum(limit for limit, _ in mine[: result["requests"]])
                # A reader without any answer in a short round has measured no time either.
                rate = messages / result["seconds"] if messages else 0.0
                noted["beside it"] = noted.get("beside it", 0.0) + rate

    @contextmanager
    def copy(self, ours: Daemon) -> Iterator[dict[str, float]]:
        """Repeated copies of another store: same disk and cores, different process."""
        noted: dict[str, float] = {}
        copies = _Copies(self._home / "other", self._home / f"copies-{self._rounds}")
        self._rounds += 1
        copies.start()
        begun_s = time.monotonic()
        try:
            yield noted
        finally:
            copies.stop()
        noted["beside it"] = copies.whole * self._profile.behind_messages / (time.monotonic() - begun_s)


#: Conditions by their names in a profile.
CONDITIONS: dict[str, Callable[[_Conditions, Daemon], AbstractContextManager[dict[str, float]]]] = {
    "alone": _Conditions.alone,
    "cleaning": _Conditions.cleaning,
    "readers": _Conditions.readers,
    "copy": _Conditions.copy,
}


class _Copies(threading.Thread):
    """Repeated ``plainsong copy`` from one directory into new ones, until stopped."""

    def __init__(self, source: Path, targets: Path) -> None:
        super().__init__(daemon=True)
        self._command = [str(Path(sys.executable).with_name("plainsong")), "copy", "--no-progress"]
        self._command += ["--from", f"leveldb:{source}", "--to"]
        self._targets = targets
        self._lock = threading.Lock()
        self._stopped = False
        self._running: subprocess.Popen[bytes] | None = None
        self._failure: Exception | None = None
        self.whole = 0

    def run(self) -> None:
        try:
            self._copy_repeatedly()
        except Exception as error:  # noqa: BLE001 - ``stop`` raises it
            self._failure = error

    def _copy_repeatedly(self) -> None:
        while (process := self._next()) is not None:
            said = process.communicate()[1]
            if process.returncode == 0:
                self.whole += 1
            elif not self._stopped:
                raise RuntimeError(f"the copy ended with {process.returncode}: {said.decode().strip()}")

    def _next(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._stopped:
                return None
            shutil.rmtree(self._targets, ignore_errors=True)
            command = [*self._command, f"leveldb:{self._targets}"]
            self._running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            return self._running

    def stop(self) -> None:
        """Kill the running copy and remove its target. Raises the error of a copy that failed."""
        with self._lock:
            self._stopped = True
            if self._running is not None:
                self._running.kill()
        self.join()
        shutil.rmtree(self._targets, ignore_errors=True)
        if self._failure is not None:
            raise self._failure


def _now_ms() -> int:
    return int(time.time() * 1000)

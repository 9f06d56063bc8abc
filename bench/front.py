"""Front ends compared with one process: durable single publishes, and processor time per publish and process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import Daemon, cpu_s, daemon
from bench.generator import run_load
from bench.raw import TOPIC
from bench.rounds import Row, Section, Spread, in_turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.profiles import Profile

SAYS = """Single publishes of 100 B a second, each acknowledged after it was synced, by one process and through two
front ends. CPU is the processor time of each process per publish, user and system, in µs. *÷ one process* is the
measured ratio, with a load generator on the same cores; *÷ by CPU* is the ratio that the processor times allow on two
otherwise idle cores: the work of one process, divided by half of the work of three. *feeds* is the number of front ends
that the owning process has time for."""

CONNECTIONS = (1, 64)
FRONT_ENDS = 2
MESSAGE_BYTES = 100


def measure_front(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure one connection, then many; both daemons run throughout and are measured alternately."""
    section = Section("front", "Front ends", SAYS)
    with daemon(scratch / "one") as one, daemon(scratch / "front", http_processes=FRONT_ENDS) as front:
        for each in (one, front):
            each.create(TOPIC)
        for connections in CONNECTIONS:
            row = _measure(profile, connections, one, front)
            section.rows.append(row)
            values = "  ".join(f"{name} {value.median:.2f}" for name, value in row.values.items())
            say(f"front ends, {connections} connections: {values}")
    return section


class _Side:
    """One daemon under load: its rates, median latency, and processor time per publish of its processes."""

    def __init__(self, running: Daemon, connections: int, seconds: float) -> None:
        self._running = running
        self._connections = connections
        self._seconds = seconds
        self._fronts = children(running.process.pid)
        self.p50_ms: list[float] = []
        self.owner_us: list[float] = []
        self.front_us: list[float] = []

    def rate(self) -> float:
        request = bodies.publish(TOPIC, 1, MESSAGE_BYTES)
        pids = [self._running.process.pid, *self._fronts]
        before = [cpu_s(pid) for pid in pids]
        result = run_load(self._running.port, self._connections, request, self._seconds)
        spent = [(cpu_s(pid) - earlier) * 1e6 / result["requests"] for pid, earlier in zip(pids, before, strict=True)]
        self.p50_ms.append(result["p50_ms"])
        self.owner_us.append(spent[0])
        self.front_us.append(sum(spent[1:]))
        return float(result["requests_per_s"])


def _measure(profile: Profile, connections: int, one: Daemon, front: Daemon) -> Row:
    seconds = 4 * profile.seconds  # processor time is counted in hundredths of a second
    sides = {"one process": _Side(one, connections, seconds), "front ends": _Side(front, connections, seconds)}
    rates = in_turns({name: side.rate for name, side in sides.items()}, profile.rounds)
    alone, shared = sides["one process"], sides["front ends"]
    values = {name: Spread.of(found) for name, found in rates.items()}
    values["÷ one process"] = Spread.ratio(rates["front ends"], rates["one process"])
    values["p50 ÷ one process"] = Spread.ratio(shared.p50_ms, alone.p50_ms)
    values["CPU of one process"] = Spread.of(alone.owner_us)
    values["CPU of the owner"] = Spread.of(shared.owner_us)
    values["CPU of the front ends"] = Spread.of(shared.front_us)
    all_us = [max(sum(each), 1.0) for each in zip(shared.owner_us, shared.front_us, strict=True)]
    values["÷ by CPU"] = Spread.ratio([2 * each for each in alone.owner_us], all_us)
    values["feeds"] = Spread.ratio(shared.front_us, [each or 1.0 for each in shared.owner_us])
    return Row({"messages": 1, "bytes": MESSAGE_BYTES, "connections": connections}, values)


def children(pid: int) -> list[int]:
    """Return the child processes of all threads of a process."""
    started = [path.read_text(encoding="ascii") for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(each) for line in started for each in line.split()]

"""Cost of a call, commit, request, poll and topic opening, per process: the input of ``bench/scale.py``.

Processor time of each process is read before and after; growth of the write-ahead log is read from its files.
"""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import cpu_s
from bench.generator import run_load
from bench.load import post
from bench.rounds import Row, Spread
from bench.wire import JSON_TYPE, Wire
from plainsong.protocol.ids import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.daemon import Daemon
    from bench.profiles import Profile
    from bench.thrift import RawCalls
    from tests.hbase_server import HBase

SIZE = 100


def call_costs(profile: Profile, hbase: HBase, raw: RawCalls) -> list[Row]:
    """Costs of Thrift calls and of the store's commits, for the region server and the gateway."""
    seconds = 2 * profile.seconds

    def cost(what: str, measured: Callable[[], float]) -> Row:
        measured()  # a cold JVM costs several times as much
        before, log = _used(hbase), _log_bytes(hbase)
        measured()
        used = {name: (after - before[name]) / raw.made * 1e6 for name, after in _used(hbase).items()}
        values = {"region µs": used["hbase"], "gateway µs": used["thrift"]}
        values["log B"] = max(0, _log_bytes(hbase) - log) / raw.made
        return _row(what, 1, values)

    return [
        cost("cost of a compare-and-set", lambda: raw.round_trips(SIZE, seconds)),
        cost("cost of a get", lambda: raw.get(seconds)),
        cost("cost of a commit of 1", lambda: raw.commit(1, SIZE, 1, seconds)),
        cost("cost of a commit of 1000", lambda: raw.commit(1000, SIZE, 1, seconds)),
    ]


def daemon_costs(profile: Profile, ours: Daemon, groups: str, singles: str) -> list[Row]:
    """Costs of publishes and polls, for the daemon, with its topics ``groups`` and ``singles``."""

    def cost(what: str, connections: int, request: bytes) -> Row:
        if profile.warms_up:
            run_load(ours.port, connections, request, profile.seconds)
        used, commits = ours.cpu_s(), _commits(ours)
        requests = run_load(ours.port, connections, request, 2 * profile.seconds)["requests"] + 2 * connections
        values = {"daemon µs": (ours.cpu_s() - used) / requests * 1e6}
        values["requests a commit"] = requests / max(1.0, _commits(ours) - commits)
        return _row(what, connections, values)

    poll_ends = bodies.poll(singles, "frames", b"\xff" * ID_BYTES, 100)
    return [
        cost("cost of a publish of 1", 1, bodies.publish(singles, 1, SIZE)),
        cost("cost of a publish of 1", 64, bodies.publish(singles, 1, SIZE)),
        cost("cost of a publish of 1000", 1, bodies.publish(groups, 1000, SIZE)),
        cost("cost of an empty poll", 1, poll_ends),
        cost("cost of an empty poll", 64, poll_ends),
        cost("cost of a cached poll of 1000", 1, bodies.poll(groups, "frames", _last_page(ours, groups), 1000)),
    ]


def open_costs(ours: Daemon, topics: list[str]) -> Row:
    """Cost per topic of the first request for it since the daemon's start: time, processor time, memory."""
    with Wire(ours.port) as wire:
        wire.send(bodies.poll(topics[0], "frames", bytes(ID_BYTES), 1))
        used, memory, begun_s = ours.cpu_s(), ours.resident_mb(), time.perf_counter()
        for topic in topics[1:]:
            wire.send(bodies.poll(topic, "frames", bytes(ID_BYTES), 1))
        took_s = time.perf_counter() - begun_s
    opened = len(topics) - 1
    values = {"ms": took_s / opened * 1e3, "daemon µs": (ours.cpu_s() - used) / opened * 1e6}
    values["resident MB"] = memory
    values["KiB"] = max(0.0, ours.resident_mb() - memory) * 1e6 / 1024 / opened
    return _row("cost of opening a topic", 1, values)


def _row(what: str, connections: int, values: dict[str, float]) -> Row:
    return Row({"what": what, "connections": connections}, {name: Spread.of([value]) for name, value in values.items()})


def _last_page(ours: Daemon, topic: str) -> bytes:
    """Publish 1000 messages in one request; return the first id."""
    messages = {"messages": [text.decode() for text in bodies.payloads(1000, SIZE)]}
    body = json.dumps(messages).encode()
    with Wire(ours.port) as wire:
        told = wire.send(post(bodies.path(topic, "publish"), body, [JSON_TYPE, "Prefer: return=representation"]))[1]
    return bytes.fromhex(json.loads(told)["firstId"])


def _commits(ours: Daemon) -> float:
    found = re.search(r"^plainsong_commit_requests_count (\S+)$", ours.ask("GET", "/metrics").decode(), re.MULTILINE)
    return float(found.group(1)) if found else 0.0


def _used(hbase: HBase) -> dict[str, float]:
    return {name: cpu_s(process.pid) for name, process in hbase.processes.items()}


def _log_bytes(hbase: HBase) -> int:
    logs = (hbase.directory / "data" / name for name in ("WALs", "oldWALs"))
    return sum(file.stat().st_size for log in logs for file in log.rglob("*") if file.is_file())

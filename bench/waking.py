"""Latency of waking parked polls by a publish, compared with a bare ASGI application that only sets an event."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.daemon import daemon
from bench.raw import TOPIC
from bench.rounds import Row, Section, Spread
from bench.servers import serve_waiting, server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SAYS = """Milliseconds from a durable publish's answer to a waiting poll's, both measured by the waiting process, which
reads one answer after the other. *Last*: until the last of all polls had its answer. *Waiting ASGI* is an application
on hypercorn's trio worker that sets one event, and stores and sends no message."""

_MEASURES = {"p50 ms": "p50_ms", "p99 ms": "p99_ms", "last ms": "all_ms"}


def measure_waking(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure each number of parked polls, alternating with the waiting application."""
    section = Section("wake", "Waking long polls", SAYS)
    with daemon(scratch / "wake") as ours, server(serve_waiting) as bare:
        ours.create(TOPIC)
        for polls in profile.parked:
            found: dict[str, list[dict[str, Any]]] = {"plainsong": [], "waiting ASGI": []}
            for _ in range(profile.rounds):
                for name, port in (("plainsong", ours.port), ("waiting ASGI", bare.port)):
                    found[name].append(_wake(port, polls, profile.wakes))
            for name, results in found.items():
                values = {label: Spread.of([result[key] for result in results]) for label, key in _MEASURES.items()}
                section.rows.append(Row({"server": name, "parked": polls}, values))
                say(f"wake {polls} parked, {name}: p99 {values['p99 ms'].median:.2f} ms")
    return section


def _wake(port: int, polls: int, wakes: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.parked", "--port", str(port), "--path", bodies.path(TOPIC)]
    # A single poll gives one value per wake-up, so do more of them.
    command += ["--polls", str(polls), "--wakes", str(wakes if polls > 1 else wakes * 20)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(out)
    return result

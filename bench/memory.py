"""The daemon's memory: at start, with many idle topics, with many parked polls, and after load."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import Daemon, daemon, resident_mb
from bench.doors import serve_bare
from bench.generator import run_load
from bench.raw import TOPIC
from bench.rounds import Row, Section, Spread
from bench.servers import server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SAYS = """Resident memory in MB, of one daemon step by step, at default settings. *Idle topics* are open, each with one
message. *Load* is publishes of 1000 messages of 100 B over 64 connections for ten seconds, which fill the scan
cache and LevelDB's buffers."""


def measure_memory(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure one daemon step by step, and a bare ASGI server for comparison."""
    section = Section("memory", "Memory", SAYS)

    def weighed(state: str, megabytes: float, **more: float) -> None:
        values = {"resident MB": Spread.of([megabytes])} | {name: Spread.of([value]) for name, value in more.items()}
        section.rows.append(Row({"state": state}, values))
        say(f"memory, {state}: {megabytes:.1f} MB")

    with server(serve_bare) as bare:
        weighed("bare ASGI server", resident_mb(bare.pid))
    with daemon(scratch / "memory") as ours:
        weighed("just started", ours.resident_mb())
        for number in range(profile.topics):
            ours.create(f"idle-{number}")
            ours.ask("POST", bodies.path(f"idle-{number}", "publish"), {"messages": ["one message"]})
        weighed(f"{profile.topics} idle topics", ours.resident_mb())
        polls = profile.parked[-1]
        ours.create(TOPIC)
        megabytes, busy_share = _parked(ours, polls, profile.parked_s)
        weighed(f"and {polls} parked polls", megabytes)
        section.rows[-1].values["processor %"] = Spread.of([busy_share * 100])
        run_load(ours.port, 64, bodies.publish(TOPIC, 1000, 100), profile.filled_s)
        weighed("after load", ours.resident_mb())
    return section


def _parked(ours: Daemon, polls: int, seconds: float) -> tuple[float, float]:
    """Return memory with parked polls, and the fraction of a core they use while parked."""
    command = [sys.executable, "-m", "bench.parked", "--port", str(ours.port), "--path", bodies.path(TOPIC)]
    command += ["--polls", str(polls), "--hold"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None  # a pipe was requested
        assert process.stdin is not None
        if process.stdout.readline() != "parked\n":
            raise RuntimeError("the polls were not parked")
        cpu_s, begun_s = ours.cpu_s(), time.monotonic()
        time.sleep(seconds)
        share = (ours.cpu_s() - cpu_s) / (time.monotonic() - begun_s)
        megabytes = ours.resident_mb()
        process.stdin.close()
    return megabytes, share

"""Latency from publish to committed reader with short transactions, alone and while one stores a million messages."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from bench.daemon import daemon
from bench.rounds import Row, Section, Spread

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SAYS = """Milliseconds from sending a publish to its delivery to a waiting reader with `isolation=committed`, at 3 000
messages a second from 16 writers with a transaction per 10 messages. *Hold* is the time from sending the stored
transaction's publish to the answer to its commit, during which every committed reader has to wait; *gap* is the longest
time during which the reader got none of the writers' messages."""
_MEASURES = {
    "p50 ms": "p50_ms",
    "p99 ms": "p99_ms",
    "max ms": "max_ms",
    "rate": "rate",
    "hold ms": "hold_ms",
    "gap ms": "gap_ms",
}


def measure_delivery(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure without and with the long transaction, each on a new daemon."""
    section = Section("delivery", "Delivery to a committed reader", SAYS)
    for stored in (0, profile.stored_messages):
        with daemon(scratch / f"delivery-{stored}") as ours:
            ours.create("t")
            found = _deliver(ours.port, profile.committed_s, stored)
        values = {label: Spread.of([found[key]]) for label, key in _MEASURES.items()}
        section.rows.append(Row({"stored at the same time": stored}, values))
        say(f"delivery, {stored} stored by the transaction: p50 {found['p50_ms']:.1f}, p99 {found['p99_ms']:.1f} ms")
    return section


def _deliver(port: int, seconds: float, stored: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.committing", "--port", str(port)]
    command += ["--seconds", str(seconds), "--stored", str(stored)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(out)
    return result

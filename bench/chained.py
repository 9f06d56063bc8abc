"""The cost of chaining for a small publish: chained and unchained topics in one daemon, measured in turn.

To run it alone, in about two minutes: ``nice -n -19 python -m bench chained``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.bodies import AVRO_TYPE, path, payloads
from bench.daemon import daemon
from bench.generator import run_load
from bench.load import post
from bench.rounds import Row, Section, Spread, in_turns
from plainsong.protocol.codec import AVRO
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.daemon import Daemon
    from bench.profiles import Profile

SAYS = """Single publishes of 100 B a second to a chained topic and to one without a chain, each acknowledged after it
was synced. Both topics are in one daemon and are measured in turn; *again* is a second topic without a chain: its
difference from the first is noise. CPU is the daemon's processor time per publish, user and system, in µs."""

MESSAGE_BYTES = 100
TOPICS = {"plain": "none", "again": "none", "chained": "sha256"}


def measure_chained(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure a row for each number of connections, each on a new daemon."""
    section = Section("chained", "Chained topics", SAYS)
    for connections in profile.connections:
        with daemon(scratch / f"chained-{connections}") as running:
            sides = {}
            for topic, chain in TOPICS.items():
                running.ask("PUT", path(topic), {"chain": chain})
                sides[topic] = _Side(running, topic, connections, profile.seconds)
            rates = in_turns({topic: side.rate for topic, side in sides.items()}, max(1, 10 * (profile.rounds - 1)))
        cpu_us = {topic: side.cpu_us for topic, side in sides.items()}
        values = {
            "plain": Spread.of(rates["plain"]),
            "chained": Spread.of(rates["chained"]),
            "÷ plain": Spread.ratio(rates["chained"], rates["plain"]),
            "CPU plain": Spread.of(cpu_us["plain"]),
            "CPU chained": Spread.of(cpu_us["chained"]),
            "CPU ÷ plain": Spread.ratio(cpu_us["chained"], cpu_us["plain"]),
            "again ÷ plain": Spread.ratio(cpu_us["again"], cpu_us["plain"]),
        }
        section.rows.append(Row({"connections": connections}, values))
        say(f"{connections} connections: " + "  ".join(f"{name} {value.median:.3f}" for name, value in values.items()))
    return section


class _Side:
    """Measures publishes to one topic: their rates, and the daemon's processor time per publish."""

    def __init__(self, running: Daemon, topic: str, connections: int, seconds: float) -> None:
        self._running, self._connections, self._seconds = running, connections, seconds
        body = AVRO.encode_publish(PublishRequest(payloads(1, MESSAGE_BYTES)))
        self._request = post(path(topic, "publish"), body, [AVRO_TYPE])
        #: One value per round.
        self.cpu_us: list[float] = []

    def rate(self) -> float:
        """Run one round; return its publishes per second."""
        before_s = self._running.cpu_s()
        result = run_load(self._running.port, self._connections, self._request, self._seconds)
        requests = result["requests"] + 2 * self._connections
        self.cpu_us.append((self._running.cpu_s() - before_s) / requests * 1e6)
        return float(result["requests_per_s"])

"""``python -m bench.peers.both``: operations that only the daemon and the original service share, one after the other.

    python -m bench.peers.both [--quick] [--rounds N] [--json] [--report DIR] [--scratch DIR]

``bench.peers`` has the loads that every broker supports. These are the loads that only these two support: publishes and
stores with a write pointer, polls of any size and empty ones, and requests about topics. Each peer runs alone: after
such loads the original compacts for minutes, which would slow down any other user of the disk. A round takes nine
minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench import bodies
from bench.bodies import AVRO_TYPE, payloads
from bench.daemon import end_on_sigterm
from bench.generator import compiled
from bench.load import post
from bench.peers.loads import BATCH, FULL, QUICK, SIZE, Comparison, Side, on_connections, overview_of, settled
from bench.peers.peer import Asked
from bench.peers.plainsong import Original, Plainsong
from bench.report import conclude, machine
from bench.rounds import Row, Section, Spread
from plainsong.protocol.codec import AVRO
from plainsong.protocol.requests import PollRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.peers.loads import PeersProfile
    from bench.peers.plainsong import Http

SAYS = """Requests a second, each peer alone, the generator in C; messages of 100 B. *÷* is Plainsong's rate divided by
the original's in the same round: above 1 Plainsong is faster. *Under a pointer* is a publish in a transaction, *store*
the first half of one that is published with its commit. Polls of a page request the same messages repeatedly; *nothing
there* polls after the topic's end. Topics are created and deleted by one client in Python, one after the other; the
list has those that earlier loads created."""
#: Messages in the polled topic.
READ = 20_000
#: Topics that one client creates, and then deletes.
CREATED = 1000


@dataclass(frozen=True, slots=True)
class Found:
    """The result of one load."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float


class Loads:
    """The loads for one running peer."""

    def __init__(self, peer: Http, side: Side, profile: PeersProfile) -> None:
        self._peer = peer
        self._side = side
        self._profile = profile
        #: The polled topic.
        self._reading = ""

    def all(self) -> dict[str, Callable[[], Found]]:
        """Return the loads, in order, by name; call ``prepare`` first."""
        found: dict[str, Callable[[], Found]] = {}
        few, many = ((1, 16), (1, 4)) if self._profile.name == QUICK.name else ((1, 16, 50), (1, 4))
        for verb, shown in (("publish", "publish under a pointer"), ("store", "store")):
            for messages in (1, 100, BATCH):
                for connections in few if messages == 1 else many:
                    name = f"{shown}, {_some(messages)}, {on_connections(connections)}"
                    found[name] = partial(self._write, verb, messages, connections)
        for limit, each in ((1, (1, 16)), (10, (1, 16)), (100, (1, 16)), (1000, (1, 4)), (READ, (1, 4))):
            for connections in each:
                found[f"poll, {_some(limit)}, {on_connections(connections)}"] = partial(self._poll, limit, connections)
        for connections in (1, 16):
            found[f"poll, nothing there, {on_connections(connections)}"] = partial(
                self._poll, 10, connections, behind=True
            )
        for shown, topic in (("a topic's properties", self._reading), ("the list of topics", "")):
            for connections in (1, 16):
                found[f"{shown}, {on_connections(connections)}"] = partial(self._get, topic, connections)
        found["create a topic"] = partial(self._each, "PUT", "made")
        found["delete a topic"] = partial(self._each, "DELETE", "made")
        return found

    def prepare(self) -> None:
        """Warm up the peer, and publish the messages to poll."""
        side, seconds = self._side, str(self._profile.warm_up_s)
        (topic,) = side.topic()
        side.load([side.peer.publish(topic, payloads(1, SIZE))], 16, 1, "--seconds", seconds)
        messages = payloads(BATCH, SIZE)
        (self._reading,) = side.topic()
        request = [side.peer.publish(self._reading, messages)]
        side.load(request, 1, BATCH, "--requests", str(READ // BATCH), "--seconds", "60")

    def _put(self, request: bytes, connections: int) -> Found:
        seconds = self._profile.seconds
        # An uncounted run of half the time first: a JVM compiles code on first use.
        self._side.load([Asked(request)], connections, 1, "--seconds", str(seconds / 2))
        result = self._side.load([Asked(request)], connections, 1, "--seconds", str(seconds)).result
        return Found(result["requests_per_s"], result["p50_ms"], result["p99_ms"])

    def _write(self, verb: str, messages: int, connections: int) -> Found:
        (topic,) = self._side.topic()
        request = PublishRequest(payloads(BATCH, SIZE)[:messages], self._peer.pointer(self._side.running))
        return self._put(post(bodies.path(topic, verb), AVRO.encode_publish(request), [AVRO_TYPE]), connections)

    def _poll(self, limit: int, connections: int, *, behind: bool = False) -> Found:
        # A time far in the future is after the end of any topic.
        asked = PollRequest(int(time.time() * 1000) + 10**8, limit=limit) if behind else PollRequest(limit=limit)
        return self._put(post(bodies.path(self._reading, "poll"), AVRO.encode_poll(asked), [AVRO_TYPE]), connections)

    def _get(self, topic: str, connections: int) -> Found:
        path = bodies.path(topic).rstrip("/")
        return self._put(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(), connections)

    def _each(self, method: str, name: str) -> Found:
        """Send one request for each of many topics, from one client."""
        number = max(30, round(CREATED * self._profile.seconds / FULL.seconds))
        connection = HTTPConnection("127.0.0.1", self._side.running.port, timeout=60)
        took_s = []
        for each in range(number):
            begun_s = time.perf_counter()
            connection.request(method, bodies.path(f"{name}-{each}"))
            with connection.getresponse() as answer:
                said = answer.read()
            took_s.append(time.perf_counter() - begun_s)
            if answer.status != 200:
                raise RuntimeError(f"{method} {name}-{each}: {answer.status} {said!r}")
        connection.close()
        cuts = quantiles(took_s, n=100)
        return Found(number / sum(took_s), cuts[49] * 1e3, cuts[98] * 1e3)


def measure(peers: Sequence[Http], profile: PeersProfile, home: Path, say: Callable[[str], None]) -> list[Section]:
    """Run all loads on each peer, one peer after the other in each round, each in a new directory."""
    found: dict[str, dict[str, list[Found]]] = {}
    lacking: dict[str, str] = {}
    sides: dict[str, Side] = {}
    for number in range(profile.rounds):
        for peer in peers if number % 2 == 0 else peers[::-1]:
            place = home / f"round-{number}"
            place.mkdir(exist_ok=True)
            with ExitStack() as ending:
                comparison = Comparison(profile, say)
                comparison.start([peer], place, ending)
                lacking |= comparison.lacking
                for side in comparison.sides:
                    sides[peer.name] = side
                    loads = Loads(peer, side, profile)
                    loads.prepare()
                    for load, put in loads.all().items():
                        settled()
                        measured = put()
                        found.setdefault(load, {}).setdefault(peer.name, []).append(measured)
                        say(
                            f"{load}: {peer.name} {measured.requests_per_s:,.0f}/s,"
                            f" p50 {measured.p50_ms:.2f} ms, p99 {measured.p99_ms:.2f}"
                        )
            settled()
    section = Section("peers-both", "What else both can do", SAYS)
    section.rows += [Row({"load": load}, _values(by_peer)) for load, by_peer in found.items()]
    return [overview_of(sides.values(), lacking), section]


def _values(by_peer: dict[str, list[Found]]) -> dict[str, Spread]:
    ordered = sorted(by_peer, key=lambda name: name == Plainsong.name)
    rates = {name: [each.requests_per_s for each in by_peer[name]] for name in ordered}
    values = {f"{name}/s": Spread.of(rates[name]) for name in ordered}
    if len(rates) == 2:
        other, ours = ordered
        values[f"÷ {other}"] = Spread.ratio(rates[ours], rates[other])
    values |= {f"{name} p50 ms": Spread.of([each.p50_ms for each in by_peer[name]]) for name in ordered}
    values |= {f"{name} p99 ms": Spread.of([each.p99_ms for each in by_peer[name]]) for name in ordered}
    return values


def _some(messages: int) -> str:
    return "1 message" if messages == 1 else f"{messages:,} messages"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.both", description="Compare what the daemon and the original can both do."
    )
    parser.add_argument("--quick", action="store_true", help="only check that it works; the numbers are not meaningful")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each measurement (1)")
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON; progress goes to standard error"
    )
    parser.add_argument("--report", type=Path, default=Path("bench/report/both"), help="directory of the report")
    parser.add_argument("--scratch", type=Path, default=Path(".cache/bench"), help="directory for temporary data")
    args = parser.parse_args()
    if compiled() is None:
        sys.exit("a C compiler is needed for the load generator (bench/loadgen): one in Python would be the bottleneck")
    say: Callable[[str], None] = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    profile = replace(QUICK if args.quick else FULL, rounds=args.rounds)
    args.scratch.mkdir(parents=True, exist_ok=True)
    facts = machine() | {"load before": f"{os.getloadavg()[0]:.2f}"}
    with TemporaryDirectory(prefix="both-", dir=args.scratch) as directory:
        sections = measure([Original(), Plainsong()], profile, Path(directory).resolve(), say)
    conclude(profile.name, facts, sections, args.report, say, as_json=args.json)


if __name__ == "__main__":
    end_on_sigterm()
    main()

"""Rate, memory, disk usage, start-up time and polls by time as messages, or topics, accumulate."""

from __future__ import annotations

import random
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.cleaning import size_mb
from bench.daemon import MAPPED, OWN, Daemon, daemon
from bench.generator import run_everywhere
from bench.rounds import Row, Section, Spread
from plainsong.protocol.codec import AVRO
from plainsong.protocol.requests import PollRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SIZE = 100
PER_REQUEST = 1000
#: Messages are spread across TOPICS topics and published over CONNECTIONS connections.
TOPICS = 50
CONNECTIONS = 4
#: Progress is printed every PIECE messages, with the longest wait among them.
PIECE = 1_000_000
#: Polls by time per size, each for PAGE messages; their median is reported.
POLLS = 40
PAGE = 100
#: One message per topic, so that no topic is empty.
_ONE = PublishRequest([b"one message"])
SAYS = """One daemon that is filled, stopped and started again at each size. *Messages*: 100 B each, over 50 topics, in
requests of 1000 on four connections; the rate and the waits are of the last million before that size (or of all, if
there are fewer), `÷ first size` is that rate divided by the first row's. *Topics*: each with one message, created and
published to one after the other on one connection. `anon MB` is the process's own memory (RssAnon), `mapped MB` its
mapped files (RssFile), which the system reclaims when it needs memory; `after start` is the same after a restart and
the polls. `start s` is from the start of the program until it serves, `poll ms` the median and the longest of 40 polls
for 100 messages from a random time on, each of a random topic, directly after that start."""


def measure_growth(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure both kinds of growth, each in its own data directory."""
    section = Section("growth", "Growth", SAYS)

    def found(row: Row) -> None:
        section.rows.append(row)
        at = row.values
        say(
            f"growth, {row.what['stored']:,} {row.what['what']}: {at['a second'].median:,.0f}/s,"
            f" anon {at['anon MB'].median:.0f} MB, disk {at['disk MB'].median:.0f} MB,"
            f" start {at['start s'].median:.2f} s, poll {at['poll p50 ms'].median:.1f} ms"
        )

    _grow("messages", profile.grown_messages, _Messages(say), scratch / "messages", found)
    _grow("topics", profile.grown_topics, _Topics(say), scratch / "topics", found)
    return section


def _grow(
    what: str, sizes: tuple[int, ...], filling: _Messages | _Topics, home: Path, found: Callable[[Row], None]
) -> None:
    first_rate = 0.0
    for stored in sizes:
        with daemon(home) as ours:
            values = filling.fill(ours, stored)
            values |= {"anon MB": ours.resident_mb(OWN), "mapped MB": ours.resident_mb(MAPPED)}
        first_rate = first_rate or values["a second"]
        values["÷ first size"] = values["a second"] / first_rate
        values["disk MB"] = size_mb(home)
        begun_s = time.monotonic()
        with daemon(home) as again:
            values["start s"] = time.monotonic() - begun_s
            values |= _polled(again, filling)
            values["anon MB after start"] = again.resident_mb(OWN)
            values["mapped MB after start"] = again.resident_mb(MAPPED)
        found(Row({"what": what, "stored": stored}, {name: Spread.of([value]) for name, value in values.items()}))


class _Messages:
    """Fills a fixed set of topics with an increasing number of messages."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._stored = 0
        self.first_ms = int(time.time() * 1000)
        self.topics = [f"grown-{number}" for number in range(TOPICS)]
        self._requests = [bodies.publish(topic, PER_REQUEST, SIZE) for topic in self.topics]

    def fill(self, ours: Daemon, stored: int) -> dict[str, float]:
        if not self._stored:
            for topic in self.topics:
                ours.create(topic)
        result: dict[str, Any] = {}
        longest_ms = 0.0
        while self._stored < stored:
            piece = min(PIECE, stored - self._stored)
            result = run_everywhere(ours.port, CONNECTIONS, self._requests, number=-(-piece // PER_REQUEST))
            self._stored += result["requests"] * PER_REQUEST
            longest_ms = max(longest_ms, result["max_ms"])
            self._say(
                f"  {self._stored:,} messages: {result['requests_per_s'] * PER_REQUEST:,.0f}/s, longest wait"
                f" {result['max_ms']:.0f} ms"
            )
        return {
            "a second": result["requests_per_s"] * PER_REQUEST,
            "p50 ms": result["p50_ms"],
            "p99 ms": result["p99_ms"],
            "longest ms since the last size": longest_ms,
        }


class _Topics:
    """Creates an increasing number of topics with one message each."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.first_ms = int(time.time() * 1000)
        self.topics: list[str] = []

    def fill(self, ours: Daemon, stored: int) -> dict[str, float]:
        connection = HTTPConnection("127.0.0.1", ours.port, timeout=60)
        begun_s = time.monotonic()
        before = len(self.topics)
        waits_ms = []
        for number in range(before, stored):
            name = f"topic-{number}"
            asked_s = time.monotonic()
            _ask(connection, "PUT", bodies.path(name), b"")
            _ask(connection, "POST", bodies.path(name, "publish"), AVRO.encode_publish(_ONE))
            waits_ms.append((time.monotonic() - asked_s) * 1e3)
            self.topics.append(name)
            if len(self.topics) % 1000 == 0:
                self._say(f"  {len(self.topics):,} topics")
        took_s = time.monotonic() - begun_s
        connection.close()
        waits_ms.sort()
        return {
            "a second": (stored - before) / took_s,
            "p50 ms": waits_ms[len(waits_ms) // 2],
            "p99 ms": waits_ms[len(waits_ms) * 99 // 100],
            "longest ms since the last size": waits_ms[-1],
        }


def _polled(ours: Daemon, filling: _Messages | _Topics) -> dict[str, float]:
    """Poll random topics from random times; return the median and the longest wait."""
    dice = random.Random(7)
    connection = HTTPConnection("127.0.0.1", ours.port, timeout=60)
    last_ms = int(time.time() * 1000)
    waits_ms = []
    for _ in range(POLLS):
        since_ms = dice.randint(filling.first_ms, last_ms)
        request = AVRO.encode_poll(PollRequest(since_ms, limit=PAGE))
        asked_s = time.monotonic()
        _ask(connection, "POST", bodies.path(dice.choice(filling.topics), "poll"), request)
        waits_ms.append((time.monotonic() - asked_s) * 1e3)
    connection.close()
    waits_ms.sort()
    return {"poll p50 ms": waits_ms[len(waits_ms) // 2], "poll max ms": waits_ms[-1]}


def _ask(connection: HTTPConnection, method: str, path: str, body: bytes) -> None:
    connection.request(method, path, body, {"Content-Type": "avro/binary"})
    answer = connection.getresponse()
    content = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{method} {path}: {answer.status} {content[:300]!r}")

"""Measures the gain of each mechanism that exists for speed alone: two daemons take turns, one of them without it.

    python -m bench.rent [MECHANISM ...] [--rounds 5] [--seconds 2] [--scratch DIR]

Prints a table in Markdown for ``docs/measurements/rent.md``. A mechanism that gains less than 5 % on every row is
removed, with its tests. *Rate* is the rate with the mechanism divided by the rate without it; *cpu* is the daemon's
processor time per message without it divided by the time with it. Both are above 1 if the mechanism pays. *Wait* is the
99.9th percentile of the latency without it divided by that with it, at a fixed rate.

A daemon without a mechanism is started as ``python -m bench.rent --off MECHANISM OPTION ...``.
"""

from __future__ import annotations

import argparse
import json
import runpy
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import Daemon, daemon
from bench.generator import loads_everywhere, run_load, started
from bench.seed import seed
from plainsong.protocol.ids import FIRST_BOUND
from storage.leveldb.volume_list import remove_volume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZE = 100
SEEDED = 200_000
#: Topics seeded before the daemon starts, and the number of messages in each of their commits.
SEEDS = {"small": 10, "large": 10_000}
#: Rate of the steady load: a third of what two cores can take, so that waits are the daemon's and not the queue's.
STEADY_PER_S = 6_000
STEADY_BYTES = 2_000
#: Maximum number of requests in one walk, since they are passed to the load generator as arguments.
MAX_REQUESTS = 4_000
#: The loads at that rate, and their topics' properties: in the second, a volume is dropped every few seconds.
LOADED: dict[str, dict[str, object]] = {"steady": {}, "expiring": {"ttl": 1}}
#: Small volumes and buffers, so that tables are written and files removed within a few seconds.
STEADY = {"storage_write_buffer_bytes": 4 << 20, "storage_volume_bytes": 32 << 20, "retention_interval_s": 1}


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Something that exists for speed alone."""

    title: str
    off: Callable[[], None]
    """Switches it off in this process, before the daemon starts."""
    rows: tuple[str, ...]
    """The loads it speeds up."""


def _set(place: str, value: object) -> None:
    """Set an existing attribute of a module or of a class in it, such as ``storage.x:Class.name``."""
    module, _, path = place.partition(":")
    owner: object = import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    getattr(owner, name)
    setattr(owner, name, value)


def _sets(*changes: tuple[str, object]) -> Callable[[], None]:
    def off() -> None:
        for place, value in changes:
            _set(place, value)

    return off


def _remove_at_once(path: Path) -> Iterator[float]:
    remove_volume(path)
    yield from ()


def _parse_each_head() -> None:
    from broker.http import http1

    data_arrived, cut_head = http1.Http1.data_arrived, http1.Http1._cut_head

    def arrived_without_head(self: http1.Http1) -> bool:
        self._last = http1._NO_HEAD
        return data_arrived(self)

    def cut_again(self: http1.Http1, pending: bytes) -> object:
        self._last = http1._NO_HEAD
        return cut_head(self, pending)

    _set("broker.http.http1:Http1.data_arrived", arrived_without_head)
    _set("broker.http.http1:Http1._cut_head", cut_again)


def _parse_each_head_with_h11() -> None:
    from broker.http import heads

    def hot_head(data: bytes, routes: heads.HotRoutes) -> heads.Head | None:
        plain = heads.plain_head(data)
        found = heads._route(plain.method, plain.target, routes)
        headers = heads._joined([(name.decode("latin-1"), value.decode("latin-1")) for name, value in plain.pairs])
        if found is None or headers is None:
            return None
        (endpoint, path), query = found
        length, keep_alive, chunks = plain.length, plain.keep_alive, plain.chunks
        return heads.Head(endpoint, path, query, headers, length, keep_alive, chunks, plain.expects_continue, None)

    _parse_each_head()
    _set("broker.http.http1:hot_head", hot_head)


PUBLISHES = ("single x1", "single x16", "single x50", "batch x1", "batch x4")
MECHANISMS: dict[str, Mechanism] = {
    "spinning": Mechanism(
        "the reactor asks the kernel again before it sleeps",
        _sets(("broker.http.reactor:QUICK_TURNS", 1 << 60)),
        ("single x1", "single x16", "page of 10 x1"),
    ),
    "loop-writes": Mechanism(
        "the event loop writes small commits itself",
        _sets(("storage.leveldb.group_commit:GroupCommit._may_write_inline", lambda self, work: False)),
        PUBLISHES,
    ),
    "work-while-syncing": Mechanism(
        "answers are prepared during the sync",
        _sets(("storage.leveldb.group_commit:GroupCommit._while_syncing", lambda self, group: None)),
        PUBLISHES,
    ),
    "early-sync": Mechanism(
        "the sync begins early",
        _sets(("storage.leveldb.engine.database:SYNCS_EARLY", False)),
        PUBLISHES,
    ),
    "longer-logs": Mechanism(
        "the log's file is kept longer than what was written to it; with it go zeros and the early sync",
        _sets(
            ("storage.leveldb.engine.newest_log:LARGE_BYTES", 0), ("storage.leveldb.engine.newest_log:SMALL_BYTES", 0)
        ),
        PUBLISHES,
    ),
    "zeros": Mechanism(
        "zeros are written ahead of small commits",
        _sets(("storage.leveldb.engine.newest_log:SMALL_BYTES", 0)),
        PUBLISHES,
    ),
    "niced-thread": Mechanism(
        "LevelDB's thread yields",
        _sets(("storage.leveldb.engine.background:BackgroundThread.find", lambda self, start: None)),
        ("steady",),
    ),
    "slow-removal": Mechanism(
        "the files of a dropped volume are shortened step by step before they are removed",
        _sets(("storage.leveldb.listed_volumes:remove_slowly", _remove_at_once)),
        ("expiring",),
    ),
    "packs": Mechanism(
        "32 messages or more of a commit share a row",
        _sets(("storage.leveldb.engine.packs:MIN_ROWS", 1 << 30)),
        ("batch x1", "batch x4", "walk by 1000", "walk by 10000"),
    ),
    "kept-pages": Mechanism(
        "a page that was read before is kept",
        _sets(("actors.pages:Pages._was_read", lambda *_: False)),
        ("page of 10000",),
    ),
    "read-ahead": Mechanism(
        "the next messages are read before a reader that walks asks for them",
        _sets(("actors.pages:Pages._begin", lambda *_: None)),
        ("walk by 10", "walk by 100", "walk by 1000", "walk by 10000"),
    ),
    "kept-answers": Mechanism(
        "the answer to a poll that is asked again is kept",
        _sets(("broker.api.messages.kept_answers:KeptAnswers.find", lambda *_: None)),
        ("page of 10 x1", "page of 10 x16", "page of 10000"),
    ),
    "kept-names": Mechanism(
        "the list of a namespace's topics is kept",
        _sets(("broker.api.topics.topics:KeptNames.get", lambda *_: None)),
        ("list of 1000 topics",),
    ),
    "kept-head": Mechanism(
        "a head that a client repeats is not parsed again, nor its sender admitted again",
        _parse_each_head,
        ("single x1", "single x16", "page of 10 x1", "page of 10 x16"),
    ),
    "quick-heads": Mechanism(
        "a parser in C, instead of h11, parses heads of hot routes; includes kept-head",
        _parse_each_head_with_h11,
        ("single x1", "single x16", "page of 10 x1", "page of 10 x16"),
    ),
    "quick-routes": Mechanism(
        "the listener calls handlers of short requests without messages itself, without the application",
        _sets(("broker.http.route:Route.is_direct", property(lambda self: self.hot))),
        ("show x1", "show x16"),
    ),
}


# --- the loads ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Found:
    """Results of one side in one turn."""

    per_s: float
    cpu_us: float
    wait_ms: float


class Side:
    """A daemon with its own store, and the loads for it."""

    KINDS = frozenset({"single", "batch", "steady", "expiring", "page", "walk", "list", "show"})

    def __init__(self, ours: Daemon, firsts: dict[str, Sequence[bytes]], seconds: float) -> None:
        self._ours = ours
        self._seconds = seconds
        self._topics = 0
        self._cached: bytes | None = None
        self._pages = {
            limit: bodies.NewPages(topic, firsts[topic], limit)
            for topic, limits in (("small", (10, 100)), ("large", (1000, 10_000)))
            for limit in limits
        }

    def measure(self, row: str) -> Found:
        """Measure one turn of the load with this name."""
        kind, *rest = row.split(" ")
        if kind in ("single", "batch"):
            return self._publish(int(rest[0][1:]), 1 if kind == "single" else 1000)
        if kind in LOADED:
            return self._steady(**LOADED[kind])
        if kind == "page":
            limit = int(rest[1])
            connections = int(rest[2][1:]) if len(rest) > 2 else 1
            return self._page(limit, connections)
        if kind == "walk":
            return self._walk(int(rest[1]))
        if kind == "show":
            return self._show(int(rest[0][1:]))
        return self._list(int(rest[1]))

    def _timed(self, run: Callable[[], dict[str, float]], each: float) -> Found:
        before_s = self._ours.cpu_s()
        result = run()
        count = result["requests"] * each
        return Found(
            count / result["seconds"], (self._ours.cpu_s() - before_s) / max(count, 1) * 1e6, result["p999_ms"]
        )

    def _topic(self, **properties: object) -> str:
        self._topics += 1
        name = f"t{self._topics}"
        self._ours.ask("PUT", bodies.path(name), properties)
        return name

    def _publish(self, connections: int, messages: int) -> Found:
        request = bodies.publish(self._topic(), messages, SIZE)
        return self._timed(lambda: run_load(self._ours.port, connections, request, self._seconds), messages)

    def _steady(self, **properties: object) -> Found:
        request = bodies.publish(self._topic(**properties), 1, STEADY_BYTES)
        options = ["--connections", "16", "--seconds", str(3 * self._seconds), "--rate", str(STEADY_PER_S)]

        def run() -> dict[str, float]:
            with started([request], [self._ours.port], *options) as running:
                return running.end()

        return self._timed(run, 1)

    def _page(self, limit: int, connections: int) -> Found:
        if limit < 1000:
            if self._cached is None:
                name = self._topic()
                run_load(self._ours.port, 1, bodies.publish(name, 1000, SIZE), 0.2)
                self._cached = bodies.poll(name, "avro", FIRST_BOUND, limit)
            request = self._cached
        else:
            request = self._pages[limit].take("avro", 1)[0][1]
        return self._timed(lambda: run_load(self._ours.port, connections, request, self._seconds), limit)

    def _walk(self, limit: int) -> Found:
        asked = self._pages[limit].take(
            "avro", min(MAX_REQUESTS, int(self._seconds * 2_000_000 / limit / (1 if limit >= 1000 else 10)))
        )
        requests = [request for _, request in asked]

        def run() -> dict[str, float]:
            with loads_everywhere(self._ours.port, 1, requests, self._seconds, number=len(requests)) as running:
                return running.end()

        return self._timed(run, limit)

    def _show(self, connections: int) -> Found:
        request = f"GET {bodies.path(self._topic())} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        return self._timed(lambda: run_load(self._ours.port, connections, request, self._seconds), 1)

    def _list(self, topics: int) -> Found:
        while self._topics < topics:
            self._topic()
        request = f"GET /v1/namespaces/{bodies.NAMESPACE}/topics HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        return self._timed(lambda: run_load(self._ours.port, 1, request, self._seconds), 1)


# --- the turns ---------------------------------------------------------------------------------------------------


def _seeded(directory: Path, without: str | None) -> dict[str, Sequence[bytes]]:
    """Fill a store in a separate process; return the first ids of each topic's milliseconds."""
    command = [sys.executable, "-m", "bench.rent", *(["--off", without] if without else []), "--seed", str(directory)]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return {topic: [bytes.fromhex(each) for each in ids] for topic, ids in found.items()}


def _seed(directory: Path) -> None:
    first_ms = int(time.time() * 1000) - 3_600_000
    found = {
        topic: seed(directory, topic, SEEDED, SIZE, first_ms, 7 * 86_400, commit_messages=messages)
        for topic, messages in SEEDS.items()
    }
    print(json.dumps({topic: [each.hex() for each in ids] for topic, ids in found.items()}))


def measure(name: str, rounds: int, seconds: float, scratch: Path) -> list[str]:
    """Return the rows of the table for one mechanism."""
    mechanism = MECHANISMS[name]
    found: dict[tuple[str, str], list[Found]] = {}
    settings = STEADY if LOADED.keys() & set(mechanism.rows) else {}
    with ExitStack() as running:
        sides: dict[str, Side] = {}
        for side, without in (("with", None), ("without", name)):
            directory = scratch / f"{name}-{side}"
            firsts = _seeded(directory, without)
            program = ("broker",) if without is None else ("bench.rent", "--off", without)
            ours = running.enter_context(daemon(directory, program, **settings))
            sides[side] = Side(ours, firsts, seconds)
        for number in range(rounds):
            for row in mechanism.rows:
                for side in list(sides) if number % 2 == 0 else reversed(list(sides)):
                    found.setdefault((row, side), []).append(sides[side].measure(row))
    lines = []
    for row in mechanism.rows:
        pairs = list(zip(found[row, "with"], found[row, "without"], strict=True))
        rate = sorted(ours.per_s / other.per_s for ours, other in pairs)
        cpu = median(other.cpu_us / ours.cpu_us for ours, other in pairs if ours.cpu_us)
        wait = median(other.wait_ms / ours.wait_ms for ours, other in pairs)
        lines.append(
            f"| {name} | {row} | {median(rate):.2f} ({rate[0]:.2f} to {rate[-1]:.2f}) | {cpu:.2f} |"
            f" {f'{wait:.2f}' if row in LOADED else ''} |"
        )
    return lines


def main() -> None:
    """Run the command line."""
    if "--off" in sys.argv[1:2]:
        MECHANISMS[sys.argv[2]].off()
        rest = sys.argv[3:]
        if rest[:1] != ["--seed"]:
            sys.argv = ["broker", *rest]
            runpy.run_module("broker", run_name="__main__")
            return
        sys.argv = ["bench.rent", *rest]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mechanisms", nargs="*", metavar="MECHANISM", help=f"all, or some of: {', '.join(MECHANISMS)}")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side (default 5)")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of one round (default 2)")
    parser.add_argument(
        "--scratch", type=Path, help="directory of the stores (default: the system's for temporary files)"
    )
    parser.add_argument("--seed", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seed is not None:
        _seed(options.seed)
        return
    unknown = set(options.mechanisms) - set(MECHANISMS)
    if unknown:
        parser.error(f"unknown mechanism {', '.join(sorted(unknown))}: {', '.join(MECHANISMS)}")
    print("| mechanism | load | rate | cpu | wait |\n|---|---|--:|--:|--:|", flush=True)
    for name in options.mechanisms or MECHANISMS:
        with TemporaryDirectory(prefix="rent-", dir=options.scratch) as scratch:
            for line in measure(name, options.rounds, options.seconds, Path(scratch)):
                print(line, flush=True)


if __name__ == "__main__":
    main()

"""Deduplicated and atomic publishes compared with plain ones; cost of replay, and memory per producer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from bench import bodies
from bench.daemon import daemon
from bench.generator import compiled, started
from bench.rounds import Row, Section, Spread, in_turns
from bench.sequenced import FIRST_ID, Kind

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.daemon import Daemon
    from bench.profiles import Profile

CONNECTIONS = 16
#: Requests to prepare per second, by messages per request: more than a daemon on two cores can answer.
_AT_MOST = {1: 40_000, 10: 30_000, 100: 15_000, 1000: 2_500}
#: Distance between the sequence ids of one run and those of the next.
_APART = 1 << 24
#: Results that the daemon keeps per producer.
_RESULTS = 5
SAYS = """Messages a second over 16 connections, each compared with plain requests of the same size in the same daemon
and round, sent by the same generator. *Deduplicated*: each connection is a producer, every message has a sequence id,
and the answer is a receipt; *÷ off* compares with the same requests to a topic that has deduplication switched off.
*Atomic*: without a producer. *Replay*: a topic is loaded after the daemon was killed, without a snapshot since the
first of this number of producers' requests. *Producers*: the growth of the daemon's resident memory after each producer
has published as often as the topic remembers."""


def measure_producers(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure rates in one daemon, replay and memory in one each."""
    section = Section("producers", "Producers", SAYS)
    with daemon(scratch / "producers") as ours:
        for what, messages, manner in (
            ("deduplicated 1", 1, {"producers": CONNECTIONS}),
            ("deduplicated 1000", 1000, {"producers": CONNECTIONS}),
            ("atomic 10", 10, {"atomic": True}),
            ("atomic 100", 100, {"atomic": True}),
        ):
            values = _compared_with_plain(ours, profile, messages, manner)
            section.rows.append(Row({"what": what}, values))
            ratios = ", ".join(f"{name} {value.median:.2f}" for name, value in values.items() if name[0] == "÷")
            say(f"producers, {what}: {values['messages/s'].median:,.0f} messages/s, {ratios}")
    replay_s, load_s = _replay(scratch / "replay", profile.stamped_requests)
    values = {"replay s a million": Spread.of([replay_s]), "load s a million": Spread.of([load_s])}
    section.rows.append(Row({"what": f"replay of {profile.stamped_requests}"}, values))
    say(f"producers, replay of {profile.stamped_requests}: {replay_s:.1f} s a million")
    megabytes = _memory(scratch / "memory", profile.producers)
    section.rows.append(Row({"what": f"{profile.producers} producers"}, {"MB per 10 000": Spread.of([megabytes])}))
    say(f"producers, {profile.producers} of them: {megabytes:.1f} MB per 10 000")
    return section


def _compared_with_plain(ours: Daemon, profile: Profile, messages: int, manner: dict[str, Any]) -> dict[str, Spread]:
    """Return the rate of requests of this kind, and its ratios."""
    firsts = count(FIRST_ID, _APART)

    def rate(topic: str, **how: Any) -> float:
        done = _run(ours, topic, messages, profile.seconds, next(firsts), **how)
        return float(done["requests_per_s"]) * messages

    kind = "atomic" if "atomic" in manner else "producers"
    topics = {side: f"{side}-{kind}-{messages}" for side in ("plain", "other", "off")}
    for side, topic in topics.items():
        properties = {"deduplication": "disabled"} if side == "off" else {}
        ours.ask("PUT", bodies.path(topic), properties)
    sides: dict[str, Callable[[], float]] = {
        "plain": partial(rate, topics["plain"]),
        "other": partial(rate, topics["other"], **manner),
    }
    if kind == "producers":
        sides["off"] = partial(rate, topics["off"], **manner)
    rates = in_turns(sides, profile.rounds)
    values = {"messages/s": Spread.of(rates["other"]), "÷ plain": Spread.ratio(rates["other"], rates["plain"])}
    if "off" in rates:
        values["÷ off"] = Spread.ratio(rates["other"], rates["off"])
    return values


def _run(
    ours: Daemon, topic: str, messages: int, seconds: float, first: int, *, producers: int = 0, atomic: bool = False
) -> dict[str, Any]:
    """Run requests over all connections, each a different producer or none, for ``seconds``."""
    if compiled() is None:
        requests = CONNECTIONS + int(_AT_MOST[messages] * seconds)
        return _send(
            ours,
            topic,
            producers=producers,
            atomic=atomic,
            messages=messages,
            requests=requests,
            seconds=seconds,
            first=first,
        )
    kind = Kind("p@@@@" if producers else None, messages, atomic)
    beginning = kind.beginning.replace(b"{topic}", topic.encode(), 1)
    options = ["--connections", str(CONNECTIONS), "--requests", str(1 << 30), "--seconds", str(seconds), "--number"]
    if producers:
        # Offset of the first byte that differs in the next request: the low bits of the first id.
        pairs = zip(kind.end(first), kind.end(first + 1), strict=True)
        at = len(beginning) + next(at for at, (here, there) in enumerate(pairs) if here != there)
        options += ["--sequence", str(at), "--sequences", str(messages)]
    with started([beginning + kind.end(first)], [ours.port], *options) as running:
        return running.end()


def _send(ours: Daemon, topic: str, *, producers: int = 0, atomic: bool = False, **how: Any) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.sequenced", "--port", str(ours.port), "--topic", topic]
    command += ["--connections", str(CONNECTIONS), "--producers", str(producers), *(["--atomic"] if atomic else [])]
    for name, value in how.items():
        command += [f"--{name}", str(value)]
    done: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return done


def _replay(data_dir: Path, requests: int) -> tuple[float, float]:
    """Return seconds of replay and of the whole load, per million requests of producers."""
    never = {
        "deduplication_snapshot_entries": 10_000_000,
        "deduplication_snapshot_interval_s": 86_400,
        "topic_checkpoint_rows": 1_000_000,
    }
    with daemon(data_dir, **never) as ours:
        ours.create("t")
        _send(ours, "t", producers=CONNECTIONS, requests=requests)
        ours.process.kill()
        ours.process.wait()
    with daemon(data_dir, **never) as ours:
        begun = time.monotonic()
        told = json.loads(ours.ask("GET", bodies.path("t", "producers")))
        took = time.monotonic() - begun
    entries = told["lastReplay"]["entries"]
    return told["lastReplay"]["ms"] / 1000 / entries * 1e6, took / entries * 1e6


def _memory(data_dir: Path, producers: int) -> float:
    """Return MB per 10 000 producers, each with as many results as the daemon keeps."""
    with daemon(data_dir, cache_max_bytes=1 << 16) as ours:
        for topic in ("t", "other"):
            ours.create(topic)
        # Send the same load with few producers first, so that the difference is the producers' and not the load's.
        _send(ours, "other", producers=CONNECTIONS, requests=producers * _RESULTS)
        before = ours.resident_mb()
        _send(ours, "t", producers=producers, requests=producers * _RESULTS)
        return max(0.0, ours.resident_mb() - before) / producers * 10_000

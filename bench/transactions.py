"""Transactional publishing and reading, compared with the same without transactions, in the same daemon."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from bench.daemon import daemon
from bench.generator import run_load
from bench.rounds import Row, Section, Spread, in_turns
from bench.stored import PLAIN, STORED, measure_stored, poll, under
from bench.wire import Wire, begin, decide

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SIZE = 100
CONNECTIONS = 16
#: Messages per transaction in the polled topic.
PER_TRANSACTION = 100
INSIDE, READ = "inside", "read"
SAYS = """Messages or requests a second, each compared with its plain counterpart in the same daemon and round.
*Inside*: under the write pointer of one open transaction. *Cycle*: begin, publish, commit by one client on one
connection; the ratio is its time divided by that of a plain publish. *Committed* polls read the same messages as
uncommitted ones, a hundred to a transaction. *With open* and *with invalid*: the same poll while that many other
transactions are in that state, divided by the poll before. *Stored*: a transaction's messages in the payload table,
published by one row; the ratio of *stored, publish* is its time divided by that of a plain publish, those of *store*
and *read* are rates divided by those of plain messages."""


def measure_transactions(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure everything but latencies, in two daemons one after the other."""
    section = Section("transactions", "Transactions", SAYS)

    def found(what: str, unit: str, rates: list[float], ratios: Spread) -> None:
        section.rows.append(Row({"what": what}, {unit: Spread.of(rates), "÷ plain": ratios}))
        say(f"transactions, {what}: {Spread.of(rates).median:,.1f} {unit}, ÷ plain {ratios.median:.2f}")

    with daemon(scratch / "transactions") as ours:
        for topic in (PLAIN, INSIDE, READ):
            ours.create(topic)
        with Wire(ours.port) as wire:
            _publishing(ours.port, wire, profile, found)
            _cycle(wire, profile, found)
            _polling(ours.port, wire, profile, found)
    # With almost no scan cache, so that both kinds of messages are read from disk.
    with daemon(scratch / "stored", cache_max_bytes=1 << 16) as ours:
        for topic in (PLAIN, STORED):
            ours.create(topic)
        with Wire(ours.port) as wire:
            measure_stored(wire, profile, found)
    return section


def _publishing(port: int, wire: Wire, profile: Profile, found: Callable[..., None]) -> None:
    for count in (1, 1000):
        pointer = begin(wire, "long")
        sides = {
            name: partial(_rate, port, under(name, "publish", stamp, count), count, profile.seconds)
            for name, stamp in ((PLAIN, None), (INSIDE, pointer))
        }
        rates = in_turns(sides, profile.rounds)
        found(f"publish {count} inside", "messages/s", rates[INSIDE], Spread.ratio(rates[INSIDE], rates[PLAIN]))
        decide(wire, pointer, "commit")


def _rate(port: int, request: bytes, messages: int, seconds: float) -> float:
    return float(run_load(port, CONNECTIONS, request, seconds)["requests_per_s"]) * messages


def _cycle(wire: Wire, profile: Profile, found: Callable[..., None]) -> None:
    plain = under(PLAIN, "publish", None, 1)

    def cycle() -> None:
        pointer = begin(wire)
        wire.send(under(INSIDE, "publish", pointer, 1))
        decide(wire, pointer, "commit")

    took = in_turns(
        {
            "plain": lambda: _each_s(lambda: wire.send(plain), profile.seconds),
            "cycle": lambda: _each_s(cycle, profile.seconds),
        },
        profile.rounds,
    )
    found("cycle", "a second", [1 / each for each in took["cycle"]], Spread.ratio(took["cycle"], took["plain"]))


def _each_s(work: Callable[[], object], seconds: float) -> float:
    """Return the average duration of ``work`` in seconds."""
    times = 0
    begun = time.perf_counter()
    while (busy := time.perf_counter() - begun) < seconds:
        work()
        times += 1
    return busy / times


def _polling(port: int, wire: Wire, profile: Profile, found: Callable[..., None]) -> None:
    page = profile.page_messages
    for _ in range(page // PER_TRANSACTION + 1):
        pointer = begin(wire)
        wire.send(under(READ, "publish", pointer, PER_TRANSACTION))
        decide(wire, pointer, "commit")
    requests = {name: poll(READ, page, committed=name == "committed") for name in ("uncommitted", "committed")}

    def sides() -> dict[str, Callable[[], float]]:
        return {
            name: lambda request=request: _rate(port, request, page, profile.seconds)  # type: ignore[misc]
            for name, request in requests.items()
        }

    before = in_turns(sides(), profile.rounds)
    found("committed poll", "messages/s", before["committed"], Spread.ratio(before["committed"], before["uncommitted"]))
    for state, number in (("open", profile.transactions), ("invalid", profile.transactions)):
        for _ in range(number):
            pointer = begin(wire, "long")
            if state == "invalid":
                decide(wire, pointer, "invalidate")
        after = in_turns({"committed": sides()["committed"]}, profile.rounds)["committed"]
        found(f"committed poll with {state}", "messages/s", after, Spread.ratio(after, before["committed"]))

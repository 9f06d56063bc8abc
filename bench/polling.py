"""Polling cached and cold pages, compared with a raw plyvel scan of the same rows."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from bench import bodies
from bench.bodies import BATCH_ROWS
from bench.daemon import daemon
from bench.generator import loads_everywhere, run_load
from bench.raw import TOPIC, raw_store, row_prefix, seed_raw
from bench.rounds import Row, Section, Spread, in_turns
from bench.seed import seed
from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SIZE = 100
TTL_S = 7 * 86_400
_SMALLS = "small"
#: Messages per request in the topic of small requests.
SMALL = 10
SAYS = f"""Messages a second in pages of 10 000 messages of 100 B. *Cached*: the newest, from the scan cache. *Cold*:
from far behind, read from LevelDB (whose files are in the system's memory, for both sides), of messages that were
published in large requests or in requests of {SMALL}: each reader walks through the topic, from the end of one page to
the next, and requests no page twice, since such pages are cached. *Raw* is one thread that iterates over a row for each
message with plyvel and the same read options, through the same messages, and discards them. `avro` is version 1."""


def measure_polling(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Measure cached and cold pages in every encoding."""
    home = scratch / "poll"
    home.mkdir()
    page, rounds, seconds = profile.page_messages, profile.rounds, profile.seconds
    messages = profile.behind_messages
    first_ms = int(time.time() * 1000) - 3_600_000
    firsts = {}
    for topic, commit_messages in ((TOPIC, BATCH_ROWS), (_SMALLS, SMALL)):
        firsts[topic] = seed(home / "data", topic, messages, SIZE, first_ms, TTL_S, commit_messages=commit_messages)
    seed_raw(home / "raw", messages, SIZE, firsts[TOPIC])
    section = Section("poll", "Polling", SAYS)
    with daemon(home / "data") as ours, raw_store(home / "raw") as raw:
        cached = _fill_cache(ours.port, page)
        start, stop = row_prefix() + FIRST_BOUND, row_prefix() + firsts[TOPIC][-1]
        cold = {topic: bodies.NewPages(topic, starts, page) for topic, starts in firsts.items()}
        for connections in profile.poll_connections:
            sides: dict[str, Callable[[], float]] = {"raw scan": lambda: raw.scan(start, stop, seconds)}
            for encoding in bodies.ENCODINGS:
                request = bodies.poll(TOPIC, encoding, cached, page)
                sides[f"cached {encoding}"] = partial(_rate, ours.port, connections, request, page, seconds)
            for what, topic, encodings in (
                ("cold", TOPIC, bodies.ENCODINGS),
                ("cold, small requests,", _SMALLS, ["avro"]),
            ):
                for encoding in encodings:
                    sides[f"{what} {encoding}"] = partial(
                        _cold_rate, ours.port, connections, cold[topic], encoding, seconds
                    )
            found = in_turns(sides, rounds)
            for name, rates in found.items():
                values = {"messages/s": Spread.of(rates), "÷ raw scan": Spread.ratio(rates, found["raw scan"])}
                section.rows.append(Row({"what": name, "connections": connections}, values))
                say(f"poll {name}, {connections} connections: {values['messages/s'].median:,.0f}/s")
    return section


def _fill_cache(port: int, page: int) -> bytes:
    """Publish more than a page, so that a page is cached; return the id at which it begins."""
    connection = HTTPConnection("127.0.0.1", port)
    firsts = []
    for _ in range(page // 1000 + 2):
        body = json.dumps({"messages": [text.decode() for text in bodies.payloads(1000, SIZE)]})
        headers = {"Content-Type": "application/json", "Prefer": "return=representation"}
        connection.request("POST", bodies.path(TOPIC, "publish"), body, headers)
        firsts.append(json.loads(connection.getresponse().read())["firstId"])
    connection.close()
    return bytes.fromhex(firsts[1])


def _rate(port: int, connections: int, request: bytes, page: int, seconds: float) -> float:
    result = run_load(port, connections, request, seconds)
    if result["received_bytes"] < result["requests"] * page * (SIZE + ID_BYTES):
        raise RuntimeError("pages are shorter than they should be")
    return float(result["requests_per_s"]) * page


def _cold_rate(port: int, connections: int, pages: bodies.NewPages, encoding: str, seconds: float) -> float:
    """Return messages per second of concurrent readers, one connection each, which read different pages."""
    asked = [pages.take(encoding, int(seconds * bodies.MOST_PAGES / connections)) for _ in range(connections)]
    with ExitStack() as running:
        loads = []
        for mine in asked:
            requests = [request for _, request in mine]
            loads.append(running.enter_context(loads_everywhere(port, 1, requests, seconds, number=len(requests))))
        results = [load.end() for load in loads]
    rate = 0.0
    for mine, result in zip(asked, results, strict=True):
        messages = sum(limit for limit, _ in mine[: result["requests"]])
        if result["received_bytes"] < messages * (SIZE + ID_BYTES):
            raise RuntimeError("pages are shorter than they should be")
        rate += messages / result["seconds"]
    return rate

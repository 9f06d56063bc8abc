"""Polling pages from the cache and from far behind, beside a raw plyvel scan of the same rows."""

from __future__ import annotations

import json
import time
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from bench import bodies
from bench.daemon import daemon
from bench.generator import run_load
from bench.raw import TOPIC, raw_store, row_prefix
from bench.rounds import Row, Section, Spread, in_turns
from bench.seed import BATCH_ROWS, FIRST_VOLUME, seed
from plainsong.protocol.ids import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bench.profiles import Profile

SIZE = 100
SAYS = """Messages a second in pages of 10 000 messages of 100 B. *Cached*: the newest, from the scan cache. *Cold*: from far
behind, read from LevelDB (whose files the system has in memory, for both sides). *Raw* is one thread that iterates
over the same rows with plyvel and the same read options, and does nothing with them. `avro` is version 1."""


def measure_polling(profile: Profile, scratch: Path, say: Callable[[str], None]) -> Section:
    """Cached and cold pages in every encoding."""
    home = scratch / "poll"
    home.mkdir()
    page, rounds, seconds = profile.page_messages, profile.rounds, profile.seconds
    first_ms = int(time.time() * 1000) - 3_600_000
    firsts = []
    for name in ("data", "raw"):
        firsts = seed(
            home / name,
            TOPIC,
            profile.behind_messages,
            SIZE,
            first_ms,
            ttl_s=7 * 86_400,
            one_volume=name == "raw",
        )
    cold = firsts[len(firsts) // 2]
    section = Section("poll", "Polling", SAYS)
    with daemon(home / "data") as ours, raw_store(home / "raw" / FIRST_VOLUME) as raw:
        cached = _fill_cache(ours.port, page)
        start, stop = _raw_range(cold, page)
        for connections in profile.poll_connections:
            sides: dict[str, Callable[[], float]] = {"raw scan": lambda: raw.scan(start, stop, seconds)}
            for where, since in (("cached", cached), ("cold", cold)):
                for encoding in bodies.ENCODINGS:
                    request = bodies.poll(TOPIC, encoding, since, page)
                    sides[f"{where} {encoding}"] = partial(_rate, ours.port, connections, request, page, seconds)
            found = in_turns(sides, rounds)
            for name, rates in found.items():
                values = {"messages/s": Spread.of(rates), "÷ raw scan": Spread.ratio(rates, found["raw scan"])}
                section.rows.append(Row({"what": name, "connections": connections}, values))
                say(f"poll {name}, {connections} connections: {values['messages/s'].median:,.0f}/s")
    return section


def _fill_cache(port: int, page: int) -> bytes:
    """Publish more than a page, so that it is in the cache; the id to read that page from."""
    connection = HTTPConnection("127.0.0.1", port)
    firsts = []
    for _ in range(page // 1000 + 2):
        body = json.dumps({"messages": [text.decode() for text in bodies.payloads(1000, SIZE)]})
        headers = {"Content-Type": "application/json", "Prefer": "return=representation"}
        connection.request("POST", bodies.path(TOPIC, "publish"), body, headers)
        firsts.append(json.loads(connection.getresponse().read())["firstId"])
    connection.close()
    return bytes.fromhex(firsts[1])


def _raw_range(first_id: bytes, page: int) -> tuple[bytes, bytes]:
    """The keys of the page's rows; seeded batches are a millisecond each."""
    ts_ms = int.from_bytes(first_id[:8], "big") + page // BATCH_ROWS
    prefix = row_prefix()
    return prefix + first_id[:10], prefix + ts_ms.to_bytes(8, "big")


def _rate(port: int, connections: int, request: bytes, page: int, seconds: float) -> float:
    result = run_load(port, connections, request, seconds)
    if result["received_bytes"] < result["requests"] * page * (SIZE + ID_BYTES):
        raise RuntimeError("pages are shorter than they should be")
    return float(result["requests_per_s"]) * page

"""A transaction with very many stored messages, compared with as many plain ones."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

from bench import bodies
from bench.load import post
from bench.rounds import Spread
from bench.wire import Wire, begin, decide
from plainsong.protocol.codec import AVRO, AVRO_2
from plainsong.protocol.ids import after
from plainsong.protocol.requests import PollRequest, PublishRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.profiles import Profile

PLAIN, STORED = "plain", "stored"
SIZE = 100
PER_REQUEST = 10_000
LAST_ID = re.compile(rb"plainsong-last-id: ([0-9a-f]{40})", re.IGNORECASE)


def under(topic: str, verb: str, pointer: int | None, count: int, size: int = SIZE) -> bytes:
    """Return a publish or store of ``count`` messages, with a write pointer or (None) without."""
    texts = bodies.payloads(count, size) if count else []
    body = AVRO.encode_publish(PublishRequest(texts, write_pointer=pointer))
    return post(bodies.path(topic, verb), body, [bodies.AVRO_TYPE])


def poll(topic: str, limit: int, *, committed: bool, since: bytes | None = None) -> bytes:
    """Return a poll that starts at an id (None: the oldest), with frames as the response."""
    request = PollRequest(since, limit=limit, isolation="committed" if committed else "uncommitted")
    headers = [f"Content-Type: {AVRO_2.content_type}", bodies.FRAMES]
    return post(bodies.path(topic, "poll"), AVRO_2.encode_poll(request), headers)


def measure_stored(wire: Wire, profile: Profile, found: Callable[[str, str, list[float], Spread], None]) -> None:
    """Store, publish and read a transaction of ``profile.stored_messages``."""
    count = profile.stored_messages
    plain_s = _sent_s(wire, under(PLAIN, "publish", None, PER_REQUEST), count // PER_REQUEST)
    pointer = begin(wire, "long")
    stored_s = _sent_s(wire, under(STORED, "store", pointer, PER_REQUEST), count // PER_REQUEST)
    found("stored, store", "messages/s", [count / stored_s], Spread.of([plain_s / stored_s]))
    single_s = _sent_s(wire, under(PLAIN, "publish", None, 1), 200) / 200
    publish_s = _sent_s(wire, under(STORED, "publish", pointer, 0), 1)
    found("stored, publish", "a second", [1 / publish_s], Spread.of([publish_s / single_s]))
    decide(wire, pointer, "commit")
    rates: dict[str, list[float]] = {PLAIN: [], STORED: []}
    for _ in range(profile.rounds):
        for topic, messages in rates.items():
            messages.append(count / _read_s(wire, topic, count, profile.page_messages))
    found("stored, read", "messages/s", rates[STORED], Spread.ratio(rates[STORED], rates[PLAIN]))


def _sent_s(wire: Wire, request: bytes, times: int) -> float:
    begun = time.perf_counter()
    for _ in range(times):
        wire.send(request)
    return time.perf_counter() - begun


def _read_s(wire: Wire, topic: str, count: int, page: int) -> float:
    """Return the seconds of reading the topic's first ``count`` messages page by page."""
    since: bytes | None = None
    begun = time.perf_counter()
    for _ in range(count // page):
        head, _ = wire.send(poll(topic, page, committed=True, since=since))
        last = LAST_ID.search(head)
        assert last is not None  # every page has messages
        since = after(bytes.fromhex(last.group(1).decode()))
    return time.perf_counter() - begun

"""The load while the daemon is killed: publishers and readers, each of which records what it saw."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

import trio

from plainsong.protocol.ids import FIRST_BOUND, after, bound_at
from plainsong.protocol.requests import PollRequest
from tests.daemon.history import Seen, Sent
from tests.daemon.talk import ENCODINGS, Answer, ConnectionLost, NotConnected, Talk, poll_call, publish_call
from tests.patience import PATIENCE_S

#: Kinds of publishes, repeated in this order.
KINDS = ("single", "batch", "empty", "single", "large", "own ttl", "single", "avro batch")
#: The time to live of messages that have their own.
OWN_TTL_S = 1


@dataclass(slots=True)
class History:
    """The records of one topic."""

    sent: list[Sent] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)


@dataclass(slots=True)
class Place:
    """The daemon's address and the progress of the load; publishers and readers wait here while it is down."""

    address: tuple[str, int] = ("", 0)
    up: trio.Event = field(default_factory=trio.Event)
    acknowledged: int = 0
    polled: int = 0
    news: trio.Event = field(default_factory=trio.Event)
    over: bool = False

    def opened(self, address: tuple[str, int]) -> None:
        self.address = address
        self.up.set()

    def closed(self) -> None:
        if self.up.is_set():
            self.up = trio.Event()

    def count(self, *, acknowledged: int = 0, polled: int = 0) -> None:
        self.acknowledged += acknowledged
        self.polled += polled
        self.news.set()
        self.news = trio.Event()

    async def more(self, acknowledged: int, polled: int) -> None:
        """Wait until this many more publishes have been acknowledged and this many more pages have been read.

        Raises trio.TooSlowError only if there is no progress for ``PATIENCE_S``.
        """
        goal = self.acknowledged + acknowledged, self.polled + polled
        while any(lacking := self._lacking(*goal)):
            with trio.fail_after(PATIENCE_S):
                while self._lacking(*goal) == lacking:
                    await self.news.wait()

    def _lacking(self, acknowledged: int, polled: int) -> tuple[int, int]:
        return max(0, acknowledged - self.acknowledged), max(0, polled - self.polled)

    @asynccontextmanager
    async def talk(self) -> AsyncIterator[Talk]:
        """Connect to the daemon as soon as it is up. Raises NotConnected if it goes down again before that succeeds."""
        await self.up.wait()
        address, up = self.address, self.up
        try:
            async with await Talk.to(address) as talk:
                yield talk
        except (ConnectionLost, NotConnected):
            if up is self.up:
                self.closed()  # it was killed; the test calls opened() with the next address
            raise


def short(payload: bytes) -> bytes:
    """Return a payload as histories store it: large ones as a digest."""
    return payload if len(payload) <= 64 else payload[:24] + blake2b(payload, digest_size=16).digest()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def messages_for(kind: str, name: str, rng: Random) -> list[bytes]:
    """Return the payloads of one request; all but the empty ones start with ``name``."""
    if kind == "single":
        return [name.encode()]
    if kind == "empty":
        return [b""]
    if kind == "large":
        return [name.encode() + rng.randbytes(rng.choice((70_000, 300_000)))]
    count = rng.choice((2, 10, 300))
    return [b"" if i % 7 == 3 else b"%b.%d" % (name.encode(), i) for i in range(count)]


async def publisher(
    place: Place, topic: str, name: str, history: History, rng: Random, topic_ttl_s: int | None
) -> None:
    """Publish until ``place.over``. Each request is sent once, and its outcome is recorded."""
    number = 0
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    number += 1
                    await _publish_once(place, talk, topic, f"{name}-{number}", number, history, rng, topic_ttl_s)
        except (ConnectionLost, NotConnected):
            await trio.lowlevel.checkpoint()


async def _publish_once(
    place: Place, talk: Talk, topic: str, name: str, number: int, history: History, rng: Random, topic_ttl_s: int | None
) -> None:
    kind = KINDS[number % len(KINDS)]
    messages = messages_for(kind, name, rng)
    ttl_s = OWN_TTL_S if kind == "own ttl" else None
    headers = ENCODINGS["avro"] if kind in ("avro batch", "large") else ENCODINGS["json"]
    shortest = min((ttl for ttl in (ttl_s, topic_ttl_s) if ttl is not None), default=None)
    ttl_ms = None if shortest is None else shortest * 1000
    kept, began_s = tuple(map(short, messages)), time.monotonic()
    try:
        answer = await talk.ask(*publish_call(topic, messages, headers, ttl_s))
    except ConnectionLost:
        history.sent.append(Sent(kept, "unknown", began_s, time.monotonic(), ttl_ms=ttl_ms))
        raise
    history.sent.append(_outcome(answer, kept, began_s, ttl_ms))
    place.count(acknowledged=answer.status == 200)
    if answer.status != 200:
        raise ConnectionLost(answer.code)  # the daemon is shutting down


def _outcome(answer: Answer, kept: tuple[bytes, ...], began_s: float, ttl_ms: int | None) -> Sent:
    ended_s = time.monotonic()
    if answer.status == 200:
        receipt = answer.receipt()
        return Sent(kept, "acknowledged", began_s, ended_s, receipt.first_id, receipt.last_id, ttl_ms)
    problem = answer.json()
    assert answer.code == "shutting_down", problem
    assert problem["outcome"] == "not-applied", problem
    return Sent(kept, "refused", began_s, ended_s, ttl_ms=ttl_ms)


@dataclass(slots=True)
class Manner:
    """The parameters of a reader."""

    name: str
    encoding: str
    limit: int | None = None
    inclusive: bool = False
    """True to start each page with the last message of the one before."""
    by_time: bool = False
    """True to go back, every few pages, to a time up to a few hundred milliseconds ago."""
    wait_ms: int = 0


MANNERS = (
    Manner("from the start, frames", "frames", limit=500),
    Manner("inclusive, avro", "avro", inclusive=True, wait_ms=20),
    Manner("by time, json", "json", by_time=True),
    Manner("long poll, avro 2", "avro2", wait_ms=5_000),
    Manner("limit 3, json", "json", limit=3, wait_ms=100),
)


async def reader(place: Place, topic: str, manner: Manner, history: History, rng: Random) -> None:
    """Read until ``place.over``; after the daemon was killed, continue at the same position."""
    position: bytes | int | None = None
    pages = 0
    while not place.over:
        try:
            async with place.talk() as talk:
                while not place.over:
                    pages += 1
                    if manner.by_time and pages % 8 == 0:
                        position = now_ms() - rng.randrange(400)
                    position = await read_page(place, talk, topic, manner, position, history)
                    # Like a real client, which pauses on an idle topic; an inclusive poll never waits, since the last
                    # message is there.
                    if not manner.wait_ms or manner.inclusive:
                        await trio.sleep(0.01)
        except (ConnectionLost, NotConnected):
            await trio.lowlevel.checkpoint()


async def read_page(
    place: Place, talk: Talk, topic: str, manner: Manner, position: bytes | int | None, history: History
) -> bytes | int | None:
    """Read one page into the history; return the position to continue from."""
    inclusive = manner.inclusive or not isinstance(position, bytes)
    request = PollRequest(position, inclusive=inclusive, limit=manner.limit)
    asked_ms = now_ms()
    answer = await talk.ask(*poll_call(topic, request, manner.encoding, manner.wait_ms))
    if answer.status != 200:
        assert answer.code in ("shutting_down", "storage_failed"), answer
        raise ConnectionLost(answer.code)
    place.count(polled=1)
    messages = tuple((message_id, short(payload)) for message_id, payload in answer.messages())
    last_id = answer.headers.get("plainsong-last-id")
    through = None if last_id is None else bytes.fromhex(last_id)
    cut = answer.headers.get("plainsong-end") == "more"
    since = since_of(position, inclusive=inclusive)
    history.seen.append(Seen(manner.name, messages, asked_ms, now_ms(), since, cut, through))
    if through is not None and not manner.inclusive:
        return through
    return messages[-1][0] if messages else position


def since_of(position: bytes | int | None, *, inclusive: bool) -> bytes:
    """Return the inclusive lower bound of a start position."""
    if position is None:
        return FIRST_BOUND
    if isinstance(position, int):
        return bound_at(position)
    return position if inclusive else after(position)


async def read_whole(talk: Talk, topic: str, name: str, limit: int | None, encoding: str) -> tuple[Seen, list[Seen]]:
    """Read the whole topic; return one record of the whole, and one for each page."""
    history, place = History(), Place()
    manner = Manner(name, encoding, limit=limit)
    position: bytes | int | None = None
    while True:
        position = await read_page(place, talk, topic, manner, position, history)
        if not history.seen[-1].cut:
            break
    pages = history.seen
    messages = tuple(message for page in pages for message in page.messages)
    return Seen(name, messages, pages[0].asked_ms, pages[-1].answered_ms), pages

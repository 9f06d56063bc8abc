"""What publishers sent and readers saw, and everything that can be wrong with it: a pure function over records.

The last reading of a topic, made when all is quiet, is its *log*. Every earlier page is held against it: a page from
a position to its last message must be exactly that stretch of the log, less what expired in between. Payloads must be
unlike each other, except empty ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND, unpack_id

Kind = Literal[
    "lost",  # acknowledged, and not there
    "doubled",  # an id, or a message, is there twice
    "unordered",  # ids do not strictly increase in a reading
    "backwards",  # a later request got smaller ids
    "resurrected",  # refused, and there all the same; or never sent
    "split",  # a part of a request is there, or was seen alone
    "appeared behind",  # a page lacks what the log has in its stretch
    "vanished",  # a page has what the log lacks
    "different orders",  # two readings give one message different ids
    "undead",  # returned after its time to live
    "expired early",  # acknowledged, and missing before its time was over
]


class Anomaly(NamedTuple):
    """One thing that must never be."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Sent:
    """One publish request and what became of it. Times are of one monotonic clock, in seconds."""

    payloads: tuple[bytes, ...]
    outcome: Literal["acknowledged", "refused", "unknown"]
    began_s: float
    ended_s: float
    first_id: bytes | None = None
    """From the receipt, when acknowledged."""
    last_id: bytes | None = None
    ttl_ms: int | None = None
    """The shortest time to live it was given, whose last millisecond still counts; None: it outlives the history."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One page: ``since`` is its inclusive start, the times are the wall clock around the request that found it."""

    reader: str
    messages: tuple[tuple[bytes, bytes], ...]
    asked_ms: int
    answered_ms: int
    since: bytes = FIRST_BOUND
    cut: bool = False
    """A bound may have ended it inside of a request."""
    through: bytes | None = None
    """Where it said to go on, exclusively; everything up to there has been passed."""


@dataclass(slots=True)
class _Log:
    """The last reading, and what is known of its messages."""

    reading: Seen
    sent: Sequence[Sent]
    order: list[bytes] = field(default_factory=list)
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    ids: dict[bytes, bytes] = field(default_factory=dict)
    request: dict[bytes, Sent] = field(default_factory=dict)
    mortal: list[tuple[bytes, int]] = field(default_factory=list)
    """``(id, when it expires)`` of acknowledged messages with a time to live, by id."""

    def __post_init__(self) -> None:
        self.order = [message_id for message_id, _ in self.reading.messages]
        self.payloads = dict(self.reading.messages)
        self.ids = {payload: message_id for message_id, payload in self.reading.messages if payload}
        self.request = {payload: request for request in self.sent for payload in request.payloads if payload}
        self.mortal = sorted(
            (message_id, unpack_id(message_id).publish_ts_ms + request.ttl_ms)
            for request in self.sent
            if request.ttl_ms is not None and request.outcome == "acknowledged"
            for message_id in (request.first_id, request.last_id)
            if message_id is not None
        )

    def has_expired(self, message_id: bytes, request: Sent | None) -> bool:
        """Whether the log may lack the message because its time was over."""
        if request is None or request.ttl_ms is None:
            return False
        return unpack_id(message_id).publish_ts_ms + request.ttl_ms < self.reading.answered_ms


def check(sent: Sequence[Sent], pages: Sequence[Seen], last: Seen) -> list[Anomaly]:
    """All that is wrong with the history of one topic.

    Args:
      sent: every request, in any order.
      pages: everything any reader saw.
      last: the whole topic, read after all that.
    """
    log = _Log(last, sent)
    found = [*_of_log(log), *_of_requests(log), *_of_time(sent)]
    for page in (*pages, last):
        found += _of_page(log, page)
    return found


def _of_log(log: _Log) -> Iterator[Anomaly]:
    once: set[bytes] = set()
    for message_id, payload in log.reading.messages:
        if payload and payload in once:
            yield Anomaly("doubled", f"{payload!r} is there twice")
        once.add(payload)
        request = log.request.get(payload)
        if payload and (request is None or request.outcome == "refused"):
            yield Anomaly(
                "resurrected", f"{payload!r} at {message_id.hex()} was {'refused' if request else 'not sent'}"
            )


def _of_requests(log: _Log) -> Iterator[Anomaly]:
    for request in log.sent:
        if request.outcome == "acknowledged":
            yield from _of_acknowledged(log, request)
        there = sum(payload in log.ids for payload in request.payloads if payload)
        if request.ttl_ms is None and 0 < there < sum(map(bool, request.payloads)):
            yield Anomaly("split", f"{there} of {len(request.payloads)} are there: {request.payloads[0]!r} …")


def _of_acknowledged(log: _Log, request: Sent) -> Iterator[Anomaly]:
    assert request.first_id is not None
    assert request.last_id is not None
    if log.has_expired(request.first_id, request):
        return
    stretch = _stretch(log, request.first_id, request.last_id)
    if tuple(log.payloads[message_id] for message_id in stretch) != request.payloads:
        where = f"{request.first_id.hex()} to {request.last_id.hex()}"
        yield Anomaly("lost", f"{len(request.payloads)} were acknowledged at {where}, {len(stretch)} are there")


def _of_time(sent: Sequence[Sent]) -> Iterator[Anomaly]:
    """Whoever sent after an acknowledgement gets higher ids than the acknowledged."""
    acknowledged = [request for request in sent if request.outcome == "acknowledged"]
    by_end = sorted(acknowledged, key=lambda request: request.ended_s)
    at, highest = 0, FIRST_BOUND
    for request in sorted(acknowledged, key=lambda request: request.began_s):
        while by_end[at].ended_s < request.began_s:
            highest = max(highest, by_end[at].last_id or b"")
            at += 1
        assert request.first_id is not None
        if request.first_id <= highest:
            yield Anomaly("backwards", f"{request.first_id.hex()} was given after {highest.hex()}")


def _of_page(log: _Log, page: Seen) -> Iterator[Anomaly]:
    ids = [message_id for message_id, _ in page.messages]
    if len(set(ids)) < len(ids):
        yield Anomaly("doubled", f"{page.reader} saw an id twice in a page")
    elif ids != sorted(ids) or (ids and ids[0] < page.since):
        yield Anomaly("unordered", f"{page.reader} saw a page out of order, or from before its start")
    else:
        yield from _of_stretch(log, page)
    for message_id, payload in page.messages:
        request = log.request.get(payload)
        if request and request.ttl_ms and unpack_id(message_id).publish_ts_ms + request.ttl_ms < page.asked_ms:
            yield Anomaly("undead", f"{page.reader} saw {message_id.hex()} after its time")
        if log.ids.get(payload, message_id) != message_id:
            yield Anomaly("different orders", f"{page.reader} saw {payload!r} as {message_id.hex()}, not where it is")
    if not page.cut:
        yield from _of_parts(log, page)


def _of_stretch(log: _Log, page: Seen) -> Iterator[Anomaly]:
    """The page against the log from its start to its last message, or to where it said to go on."""
    end = max([message_id for message_id, _ in page.messages[-1:]] + [page.through or FIRST_BOUND])
    there = dict(page.messages)
    for message_id in _stretch(log, page.since, end):
        if message_id not in there:
            yield Anomaly("appeared behind", f"{page.reader} passed {message_id.hex()} without seeing it")
    at, stop = bisect_left(log.mortal, (page.since, 0)), bisect_left(log.mortal, (end, 0))
    for message_id, expires_ms in log.mortal[at:stop]:
        if expires_ms >= page.answered_ms and message_id not in there:
            yield Anomaly("expired early", f"{page.reader} passed {message_id.hex()}, which was alive")
    for message_id, payload in page.messages:
        if log.payloads.get(message_id) == payload:
            continue
        if message_id in log.payloads or not log.has_expired(message_id, _owner(log, message_id, payload)):
            yield Anomaly("vanished", f"{page.reader} saw {payload!r} at {message_id.hex()}, where it is no more")


def _of_parts(log: _Log, page: Seen) -> Iterator[Anomaly]:
    """A page that no bound ended shows requests whole, from its start on."""
    seen = {payload for _, payload in page.messages}
    for _, payload in page.messages[-1:]:
        request = log.request.get(payload)
        missing = [other for other in request.payloads if other and other not in seen] if request else []
        behind_start = [other for other in missing if log.ids.get(other, page.since) < page.since]
        if request and request.ttl_ms is None and len(missing) > len(behind_start):
            yield Anomaly("split", f"{page.reader} saw a part of a request: {payload!r} without {missing[0]!r}")


def _owner(log: _Log, message_id: bytes, payload: bytes) -> Sent | None:
    """The request of a message; an empty one is found by its id."""
    if payload:
        return log.request.get(payload)
    holds = (
        each for each in log.sent if each.first_id and each.last_id and each.first_id <= message_id <= each.last_id
    )
    return next(holds, next((each for each in log.sent if each.ttl_ms and b"" in each.payloads), None))


def _stretch(log: _Log, first: bytes, last: bytes) -> list[bytes]:
    """The ids of the log from ``first`` to ``last``, both included."""
    return log.order[bisect_left(log.order, first) : bisect_right(log.order, last)]

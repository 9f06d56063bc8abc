"""Publishers' requests and readers' pages, and a pure function that finds their anomalies.

A topic's last read, made after all work has ended, is its *log*. Every earlier page is compared with it: a page
must be exactly the part of the log from its start to its last message, except for messages that expired in between.
Payloads must be unique, except empty ones.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND, unpack_id

Kind = Literal[
    "lost",  # acknowledged, but missing
    "doubled",  # an id or a message occurs twice
    "unordered",  # ids do not strictly increase in a read
    "backwards",  # a later request got lower ids
    "resurrected",  # refused or never sent, but there
    "split",  # only part of a request is present, or was seen
    "appeared behind",  # a message in the page's part of the log is missing from the page
    "vanished",  # a page has a message that is not in the log
    "different orders",  # a message has different ids in two reads
    "undead",  # returned after its TTL
    "expired early",  # acknowledged, but missing before its TTL was over
]


class Anomaly(NamedTuple):
    """An observation that must never happen."""

    kind: Kind
    text: str


@dataclass(frozen=True, slots=True)
class Sent:
    """A publish request and its outcome. Times are in seconds of one monotonic clock."""

    payloads: tuple[bytes, ...]
    outcome: Literal["acknowledged", "refused", "unknown"]
    began_s: float
    ended_s: float
    first_id: bytes | None = None
    """From the receipt, if acknowledged."""
    last_id: bytes | None = None
    ttl_ms: int | None = None
    """Its shortest TTL, whose last millisecond still counts; None if the messages outlive the history."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One page: ``since`` is its inclusive start; the times are of the wall clock, before and after its request."""

    reader: str
    messages: tuple[tuple[bytes, bytes], ...]
    asked_ms: int
    answered_ms: int
    since: bytes = FIRST_BOUND
    cut: bool = False
    """True if a limit may have ended the page within a request."""
    through: bytes | None = None
    """The exclusive position to continue from, according to the answer; the page has passed everything before it."""


@dataclass(slots=True)
class _Log:
    """The last read, with an index of its messages."""

    reading: Seen
    sent: Sequence[Sent]
    order: list[bytes] = field(default_factory=list)
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    ids: dict[bytes, bytes] = field(default_factory=dict)
    request: dict[bytes, Sent] = field(default_factory=dict)
    mortal: list[tuple[bytes, int]] = field(default_factory=list)
    """``(id, time of expiry)`` of acknowledged messages with a TTL, by id."""

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
        """True if the message may be missing from the log because it expired."""
        if request is None or request.ttl_ms is None:
            return False
        return unpack_id(message_id).publish_ts_ms + request.ttl_ms < self.reading.answered_ms


def check(sent: Sequence[Sent], pages: Sequence[Seen], last: Seen) -> list[Anomaly]:
    """Find all anomalies in one topic's history.

    Args:
      sent: every request, in any order.
      pages: every page that any reader got.
      last: the whole topic, read after all of these.
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
            yield Anomaly("doubled", f"{payload!r} is present twice")
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
            yield Anomaly("split", f"{there} of {len(request.payloads)} are present: {request.payloads[0]!r} …")


def _of_acknowledged(log: _Log, request: Sent) -> Iterator[Anomaly]:
    assert request.first_id is not None
    assert request.last_id is not None
    if log.has_expired(request.first_id, request):
        return
    stretch = _stretch(log, request.first_id, request.last_id)
    if tuple(log.payloads[message_id] for message_id in stretch) != request.payloads:
        where = f"{request.first_id.hex()} to {request.last_id.hex()}"
        yield Anomaly("lost", f"{len(request.payloads)} were acknowledged at {where}, {len(stretch)} are stored")


def _of_time(sent: Sequence[Sent]) -> Iterator[Anomaly]:
    """A request that is sent after an acknowledgement gets higher ids than those acknowledged."""
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
    """Compare a page with the log from its start to its last message, or to the position that it returned."""
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
            yield Anomaly("vanished", f"{page.reader} saw {payload!r} at {message_id.hex()}, where it no longer is")


def _of_parts(log: _Log, page: Seen) -> Iterator[Anomaly]:
    """A page that no limit ended has complete requests, from its start on."""
    seen = {payload for _, payload in page.messages}
    for _, payload in page.messages[-1:]:
        request = log.request.get(payload)
        missing = [other for other in request.payloads if other and other not in seen] if request else []
        behind_start = [other for other in missing if log.ids.get(other, page.since) < page.since]
        if request and request.ttl_ms is None and len(missing) > len(behind_start):
            yield Anomaly("split", f"{page.reader} saw a part of a request: {payload!r} without {missing[0]!r}")


def _owner(log: _Log, message_id: bytes, payload: bytes) -> Sent | None:
    """Return a message's request; the request of an empty message is found by id."""
    if payload:
        return log.request.get(payload)
    holds = (
        each for each in log.sent if each.first_id and each.last_id and each.first_id <= message_id <= each.last_id
    )
    return next(holds, next((each for each in log.sent if each.ttl_ms and b"" in each.payloads), None))


def _stretch(log: _Log, first: bytes, last: bytes) -> list[bytes]:
    """Return the log's ids from ``first`` to ``last``, inclusive."""
    return log.order[bisect_left(log.order, first) : bisect_right(log.order, last)]

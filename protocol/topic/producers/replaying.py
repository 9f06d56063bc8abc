"""Finding again, on load, what requests left behind the high-water mark say about producers and batches.

Rows of one request stand at consecutive positions, and of a commit that was cut off the last ones are missing. So
only the last request can be in parts: of a producer's the rows that are there count, and the positions of the others
are passed over, so that no later row is taken for one of them; an atomic one has to be taken away. Where the mark was
lost the topic is read from its first row, and rows may also be missing because they expired: what they said is in the
producers' rows, and nothing is taken away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.ids import SEQUENCES_PER_MS
from protocol.keys import DamagedRow
from protocol.rows import BATCH, HAS_EXTRAS, HAS_POINTER, HAS_TTL, NO_PAYLOAD, STAMP, Stamp, decode_row
from protocol.topic.producers.record import Producer, Result

if TYPE_CHECKING:
    from protocol.topic.state import TopicState

#: First keys of the extras of rows that begin a request, as msgpack has them.
_BEGINNINGS = (b"\xa1" + STAMP.encode(), b"\xa1" + BATCH.encode())


@dataclass(slots=True)
class _Request:
    """The request whose rows are being read."""

    first: int
    rows: int
    stamp: Stamp | None
    pointer: int
    atomic: bool
    seen: int = 1
    """Rows up to the last one found, counted by their positions."""
    keys: list[bytes] = field(default_factory=list)
    size: int = 0
    """Bytes of the rows behind ``keys``, as usage counts them."""


class Replay:
    """The rows of one load, in key order: ``take`` those with extras, then ``end``."""

    def __init__(self, state: TopicState) -> None:
        self._state = state
        self._open: _Request | None = None
        record = state.producers.record
        #: The position up to which no stamp counts; None: none counts at all.
        self._from = record.counts_from() if record is not None and record.on else None

    def take(self, key: bytes, value: bytes, size: int) -> None:
        """A row that has extras, or follows one; ``size`` as usage counts it."""
        if _begins(value):
            self._begin(key, value, size)
        elif self._open is not None:
            self._follow(self._open, key, size)

    def _begin(self, key: bytes, value: bytes, size: int) -> None:
        try:
            row = decode_row(value)
            stamp = Stamp.of(row)
        except DamagedRow:
            return  # it is told of by whoever reads it
        batch = row.extras.get(BATCH) if row.payload is not None else None
        atomic = isinstance(batch, int)
        if stamp is None and not atomic:
            return
        self.end()
        rows = stamp.rows if stamp is not None else int(str(batch))
        self._open = _Request(_ordinal(key), rows, stamp, abs(row.pointer or 0), atomic)
        self._open.keys.append(key)
        self._open.size = size

    def _follow(self, request: _Request, key: bytes, size: int) -> None:
        index = _ordinal(key) - request.first
        if index < request.rows:
            request.seen = index + 1
            if request.atomic:
                request.keys.append(key)
                request.size += size

    def end(self) -> None:
        """The request is over: take in what it says."""
        request, self._open = self._open, None
        if request is None:
            return
        state = self._state
        cut_off = request.seen < request.rows
        if cut_off:
            state.sequence.saw(*divmod(request.first + request.rows - 1, SEQUENCES_PER_MS))
        if cut_off and request.atomic and state.marked:
            state.torn = request.keys[::-1]
            state.torn_bytes = request.size
        elif request.stamp is not None:
            self._apply(request, request.stamp, request.seen)

    def _apply(self, request: _Request, stamp: Stamp, seen: int) -> None:
        """Take in the stamp, of which so many rows are there."""
        book, last = self._state.producers, request.first + seen - 1
        ts_ms = request.first // SEQUENCES_PER_MS
        first_position = _position(request.first)
        if self._from is None or first_position <= self._from or stamp.producer in book.damaged:
            return
        # Stored messages that are published before others have a row and no id.
        stored = len(stamp.ids) - (stamp.rows - seen)
        book.entries += 1
        book.replayed_entries += 1
        if stored <= 0:
            return
        producer = book.known.get(stamp.producer)
        if producer is None:
            producer = Producer(stamp.producer)
            book.add(producer)
        producer.epoch = max(producer.epoch, stamp.epoch)
        producer.active_ms = max(producer.active_ms, ts_ms)
        high = stamp.ids[stored - 1]
        if high > producer.pushed:
            producer.took(Result(stamp.ids[0], high, first_position, _position(last), request.pointer))
            producer.persisted = producer.pushed
            book.changed.add(producer.name)


def _begins(value: bytes) -> bool:
    """Whether a row may begin a request: a look at the first key of its extras."""
    flags = value[0] if value else 0
    if not flags & HAS_EXTRAS:
        return False
    if flags & NO_PAYLOAD:
        return True
    at = 5 + (8 if flags & HAS_POINTER else 0) + (4 if flags & HAS_TTL else 0)
    return value[at + 1 : at + 3] in _BEGINNINGS


def _ordinal(key: bytes) -> int:
    """The position at the end of a key as one number that grows by one from row to row of a request."""
    return int.from_bytes(key[-10:], "big")


def _position(ordinal: int) -> bytes:
    return ordinal.to_bytes(10, "big")

"""The way every reader takes through a topic's rows: what is visible, and where it has to stop.

    message row                       what becomes of it, in this order
      expired by a ttl of its own       passed over
      rolled back, invalid              passed over by those who read with a view
      undecided                         holds those who read with a view: nothing after it is theirs yet
      refers to stored messages         their payload rows follow in its place, winners only
      damaged                           ends what can be read before it

A walk is fed lists of rows, since deciding row by row would cost more than reading them: rows of payloads are
taken by the list, with one verdict for each pointer in it. ``scans`` says which rows it wants next; what it
finds visible it gives to ``_take``, which pages, extents and counts make something of.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from protocol.effects import Table
from protocol.ids import NO_PAYLOAD_PART
from protocol.keys import DamagedRow
from protocol.references import Stored
from protocol.rows import NO_PAYLOAD, decode_row
from protocol.topic.delivery import expires_ms_of
from protocol.topic.inline_rows import InlineDelivery
from protocol.topic.stored_rows import Reference
from protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from protocol.topic.asks import Span
    from protocol.transactions.view import View

    Rows = Sequence[tuple[bytes, bytes]]

_POSITION_BYTES = 10
#: Rows in the first list of a scan; lists grow from there.
_FIRST_CHUNK_ROWS = 256
_POINTER = struct.Struct(">q")


class Scan(NamedTuple):
    """Rows a walk wants: those with ``start <= key < stop``, in order, until ``feed`` says False."""

    table: Table
    start: bytes
    stop: bytes
    feed: Callable[[Rows], bool]
    reverse: bool = False
    """From the last row down."""


def key_range(span: Span) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the message keys that may hold, or refer to, messages of the span."""
    start, until = span.start, span.until
    # A bound inside a position is behind a row's own message, and among the messages it refers to.
    upper = until[:_POSITION_BYTES] + (b"" if until.endswith(NO_PAYLOAD_PART) else b"\x00")
    lower = start[:_POSITION_BYTES]
    return span.prefix + lower, span.prefix + max(lower, upper)


class Walk(InlineDelivery):
    """One reader on its way."""

    #: Walk from the newest message down. Holds, hidden messages and starts inside stored ones are for the way up.
    reverse = False

    def __init__(
        self, span: Span, view: View | None = None, *, with_pointers: bool = False, hidden_limit: int = 0
    ) -> None:
        """See ``Delivery``."""
        super().__init__(span, view, with_pointers=with_pointers, hidden_limit=hidden_limit)
        self._start = span.start
        self._starts_inside = not self._start.endswith(NO_PAYLOAD_PART)
        #: What was read behind the reference, and the last key of that.
        self._rest: Rows = ()
        self._last_key = b""

    @property
    def wanted(self) -> int:
        """Rows for the next scan to begin with."""
        return _FIRST_CHUNK_ROWS

    def scans(self) -> Iterator[Scan]:
        """The scans to make, one after the other: what one finds decides about the next."""
        start, stop = key_range(self.span)
        if self._start >= self.span.until:
            return
        while start < stop and not self.done:
            yield Scan(Table.MESSAGE, start, stop, self.feed_rows, self.reverse)
            if self.reference is None:
                return
            while self.reference is not None and not self.done:
                yield Scan(Table.PAYLOAD, self.reference.start, self.reference.stop, self.feed_payloads, self.reverse)
                self._go_on()
            if self.reverse:
                stop = self._last_key
            else:
                start = self._last_key + b"\x00"

    # --- message rows ---------------------------------------------------------------------------

    def feed_rows(self, rows: Rows) -> bool:
        """Take message rows, in order; False when enough is known, or payload rows have to come first.

        Raises:
          DamagedRow: the first row that would be visible cannot be read. Plain rows are taken at their word, since
            the store's own checksums vouch for their bytes.
        """
        if not rows:
            return not self.done
        self._last_key = rows[-1][0]
        if self._starts_inside and rows[0][0].endswith(self._start[:_POSITION_BYTES]):
            own_payload = not _flags(rows[0][1]) & NO_PAYLOAD
            rows = rows[own_payload:]  # its own message is before the start
        return self._feed(rows)

    def _feed(self, rows: Rows) -> bool:
        flags = {value[0] if value else -1 for _, value in rows}
        if not any(each & NO_PAYLOAD for each in flags):
            return self._feed_inline(rows, flags)
        at = 0
        for index in [index for index, (_, value) in enumerate(rows) if _flags(value) & NO_PAYLOAD]:
            if at < index and not self._feed_inline(rows[at:index], flags):
                return False
            at = index + 1
            if not self._refer(*rows[index]):
                self._rest = rows[at:]
                return False
        return self._feed_inline(rows[at:], flags) if at < len(rows) else True

    # --- stored messages ------------------------------------------------------------------------

    def _refer(self, key: bytes, value: bytes) -> bool:
        """Meet a reference; whether there is nothing of it to be read, and the walk goes on behind it."""
        position = key[-_POSITION_BYTES:]
        inside = self._starts_inside and self._start.startswith(position)
        try:
            row = decode_row(value)
            stored = Stored.of(row)
        except DamagedRow as damage:
            # Who starts inside has seen it, and wants what comes behind.
            return inside or self._damage(position + NO_PAYLOAD_PART, damage)
        first, stop = stored.first, stored.last + b"\x00"
        if inside:
            first = max(first, self._start[_POSITION_BYTES:])
        if self.span.until.startswith(position):
            stop = min(stop, self.span.until[_POSITION_BYTES:])
        if first >= stop:
            return True
        if 0 < expires_ms_of(position, row.ttl_s) < self.span.now_ms:
            self.expired += stored.messages
            return True
        verdict = self._verdict(row.pointer)
        if verdict is Verdict.SKIP:
            self.passed = True
            return True
        held_at = max(position + NO_PAYLOAD_PART, self._start) if verdict is Verdict.HOLD else None
        prefix = self.span.prefix + _POINTER.pack(stored.pointer_of_payloads(row))
        self.reference = Reference(
            position, row.pointer or 0, row.ttl_s, stored.segments, held_at, prefix + first, prefix + stop, row
        )
        return False

    def _go_on(self) -> None:
        """The payload rows have been read: take what had been read behind the reference."""
        self.reference = None
        rest, self._rest = self._rest, ()
        if rest and not self.done:
            self._feed(rest)


def _flags(value: bytes) -> int:
    return value[0] if value else -1

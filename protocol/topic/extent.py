"""Measuring what a bounded read would return, and where to cut it, without keeping any of it.

An extent ends exactly where a poll with the same bounds would: the same messages count, and the bytes are
those of their wire form. To cut it into equal parts it remembers where messages began, every so many bytes;
when that becomes too much, every other one is forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.ids import NO_PAYLOAD_PART, after
from protocol.keys import DamagedRow
from protocol.page import ITEM_HEAD_BYTES, length_prefix
from protocol.rows import PLAIN, PLAIN_GAP, decode_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.topic.asks import Span

#: Positions remembered at most; of a thousand parts each is then right to a sixteenth.
MAX_MARKS = 16_384
_POSITION_BYTES = 10
_PLAIN = bytes([PLAIN])
#: Bytes of a plain message's wire form beside its row's value.
_PLAIN_EXTRA_BYTES = 1 + _POSITION_BYTES + len(PLAIN_GAP)


def live_wire_bytes(key: bytes, value: bytes, now_ms: int) -> int | None:
    """The size of a row's message in wire form; None when it has outlived its own time to live.

    Raises:
      DamagedRow: the row cannot be read.
    """
    if value[:1] == _PLAIN:
        return _PLAIN_EXTRA_BYTES + len(value)
    row = decode_row(value)
    if row.ttl_s is not None and now_ms > int.from_bytes(key[-10:-2], "big") + row.ttl_s * 1000:
        return None
    if row.payload is None:
        raise DamagedRow(f"row {key.hex()} refers to the payload table, which this version does not read")
    return ITEM_HEAD_BYTES + len(length_prefix(len(row.payload))) + len(row.payload)


class Extent:
    """A bounded read while it is measured."""

    def __init__(self, span: Span, limit: int | None = None, max_bytes: int | None = None) -> None:
        self._span = span
        self._limit = limit
        self._max_bytes = max_bytes
        self.count = 0
        self.bytes = 0
        self._end: bytes | None = None
        self._last = b""
        #: ``(bytes before, position)`` of messages, at least ``_stride`` bytes apart.
        self._marks: list[tuple[int, bytes]] = []
        self._stride = 1

    def feed_rows(self, rows: Sequence[tuple[bytes, bytes]]) -> bool:
        """Take message rows, in order; False when a bound is reached.

        Raises:
          DamagedRow: the first message cannot be read; a later one ends the extent, as it ends a page.
        """
        for key, value in rows:
            try:
                size = live_wire_bytes(key, value, self._span.now_ms)
            except DamagedRow:
                if not self.count:
                    raise
                return self._cut()
            if size is None:
                continue
            if self._is_full(size):
                return self._cut()
            position = key[-_POSITION_BYTES:]
            self._mark(position)
            self.count += 1
            self.bytes += size
            self._last = position
        return True

    @property
    def end(self) -> bytes:
        """The exclusive bound of what was measured; the whole span's when no bound was reached."""
        return max(self._span.since, self._span.until) if self._end is None else self._end

    def splits(self, parts: int) -> list[bytes]:
        """At most ``parts - 1`` bounds, ascending, that cut the extent into parts of about equal bytes."""
        bounds: list[bytes] = []
        at = 0
        for part in range(1, parts):
            target = self.bytes * part / parts
            while at < len(self._marks) and self._marks[at][0] < target:
                at += 1
            if at == len(self._marks):
                break
            bound = self._marks[at][1] + NO_PAYLOAD_PART
            if bound > self._span.since and (not bounds or bound > bounds[-1]) and self._marks[at][0] > 0:
                bounds.append(bound)
        return bounds

    def _is_full(self, size: int) -> bool:
        if self._limit is not None and self.count >= self._limit:
            return True
        return self._max_bytes is not None and bool(self.count) and self.bytes + size > self._max_bytes

    def _cut(self) -> bool:
        self._end = after(self._last + NO_PAYLOAD_PART)
        return False

    def _mark(self, position: bytes) -> None:
        if self._marks and self.bytes < self._marks[-1][0] + self._stride:
            return
        self._marks.append((self.bytes, position))
        if len(self._marks) > MAX_MARKS:
            self._marks = self._marks[::2]
            self._stride = max(2 * self._stride, 2 * self.bytes // MAX_MARKS)

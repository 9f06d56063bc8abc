"""Measuring what a bounded read would return, and where to cut it, without keeping any of it.

An extent ends exactly where a poll with the same bounds and the same view would: the same messages count, and
the bytes are those of their wire form. To cut it into equal parts it remembers where messages began, every so
many bytes; when that becomes too much, every other one is forgotten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.ids import ID_BYTES, after
from protocol.topic.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.keys import DamagedRow
    from protocol.topic.asks import Span
    from protocol.transactions.view import View

#: Positions remembered at most; of a thousand parts each is then right to a sixteenth.
MAX_MARKS = 16_384


class Extent(Walk):
    """A bounded read while it is measured."""

    def __init__(
        self, span: Span, limit: int | None = None, max_bytes: int | None = None, view: View | None = None
    ) -> None:
        super().__init__(span, view)
        self._limit = limit
        self._max_bytes = max_bytes
        self.count = 0
        self.bytes = 0
        self._end: bytes | None = None
        self._last_id = b""
        #: ``(bytes before, id)`` of messages, at least ``_stride`` bytes apart.
        self._marks: list[tuple[int, bytes]] = []
        self._stride = 1

    @property
    def end(self) -> bytes:
        """The exclusive bound of what was measured: where it was cut or held, else the whole span's."""
        if self._end is not None:
            return self._end
        return max(self.span.since, self.span.until if self.held_by is None else self.held_at)

    def splits(self, parts: int) -> list[bytes]:
        """At most ``parts - 1`` bounds, ascending, that cut the extent into parts of about equal bytes.

        A bound may stand inside a stored transaction, which is then read by two.
        """
        bounds: list[bytes] = []
        at = 0
        for part in range(1, parts):
            target = self.bytes * part / parts
            while at < len(self._marks) and self._marks[at][0] < target:
                at += 1
            if at == len(self._marks):
                break
            before, bound = self._marks[at]
            if bound > self.span.since and (not bounds or bound > bounds[-1]) and before > 0:
                bounds.append(bound)
        return bounds

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        for item in items:
            size = len(item)
            if self._is_full(size):
                return self._cut()
            self._last_id = item[1 : 1 + ID_BYTES]
            self._mark(self._last_id)
            self.count += 1
            self.bytes += size
        return True

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        """As a page: raises when nothing is before it, and else ends there."""
        if not self.count:
            raise damage
        return self._cut()

    def _is_full(self, size: int) -> bool:
        if self._limit is not None and self.count >= self._limit:
            return True
        return self._max_bytes is not None and bool(self.count) and self.bytes + size > self._max_bytes

    def _cut(self) -> bool:
        self._end = after(self._last_id)
        return False

    def _mark(self, message_id: bytes) -> None:
        if self._marks and self.bytes < self._marks[-1][0] + self._stride:
            return
        self._marks.append((self.bytes, message_id))
        if len(self._marks) > MAX_MARKS:
            self._marks = self._marks[::2]
            self._stride = max(2 * self._stride, 2 * self.bytes // MAX_MARKS)

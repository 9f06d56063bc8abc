"""Cutting a page out of rows or cached items: what is visible, and where the page ends.

Both sources end in the same place, so that a page does not depend on where its messages came from: a page
ends at the span's end, at its limit of messages, or where the next message would pass its bytes; it always
has one message if there is one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from protocol.ids import ID_BYTES, NO_PAYLOAD_PART
from protocol.keys import DamagedRow
from protocol.page import ITEM_START, Page, item
from protocol.rows import PLAIN, PLAIN_GAP, MessageRow, decode_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.topic.asks import Span

_POSITION_BYTES = 10
#: A plain row's item, of position and value. Formatting makes one object where adding up makes three.
_PLAIN_ITEM = ITEM_START + b"%b" + PLAIN_GAP + b"%b"


def key_range(span: Span) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the message keys that may hold messages of the span."""
    start, until = span.start, span.until
    # A plain row's id ends in zeros, so a bound inside a position starts after the row.
    lower = start[:_POSITION_BYTES] + (b"" if start.endswith(NO_PAYLOAD_PART) else b"\x00")
    upper = until[:_POSITION_BYTES] + (b"" if until.endswith(NO_PAYLOAD_PART) else b"\x00")
    return span.prefix + lower, span.prefix + max(lower, upper)


class Paging:
    """A page while it grows."""

    def __init__(self, span: Span, limit: int, max_bytes: int) -> None:
        self._span = span
        self._room = limit
        self._bytes_room = max_bytes
        self._parts: list[bytes] = []
        self._count = 0
        self._bytes = 0
        self._last_id: bytes | None = None
        self._cut = False

    def feed_rows(self, rows: Sequence[tuple[bytes, bytes]]) -> bool:
        """Take message rows, in order; False when the page is full.

        Raises:
          DamagedRow: the first row that would be in the page cannot be read. Rows that say they are plain are
            taken at their word, since the store's own checksums vouch for their bytes.
        """
        if {value[0] if value else -1 for _, value in rows} == {PLAIN}:
            self.feed_items([_PLAIN_ITEM % (key[-_POSITION_BYTES:], value) for key, value in rows])
        else:
            self._feed_mixed(rows)
        return not self._cut

    def feed_items(self, items: Sequence[bytes]) -> bool:
        """Take visible messages in wire form, in order; False when the page is full."""
        taken = self._fitting(items)
        if taken < len(items):
            self._cut = True
            items = items[:taken]
        if items:
            self._add(b"".join(items), len(items), items[-1][1 : 1 + ID_BYTES])
        return not self._cut

    def feed_part(self, part: bytes, count: int, last_id: bytes) -> bool:
        """Take many visible messages as one part that fits; False when the page is full."""
        self._add(part, count, last_id)
        return True

    def fits(self, count: int, size: int) -> bool:
        """Whether ``count`` more messages of ``size`` bytes together are within the bounds."""
        return count <= self._room and size <= self._bytes_room

    def page(self) -> Page:
        """What has come together. It ends where the span does, unless a bound cut it."""
        last_id = self._last_id if self._last_id is not None else self._span.resume
        return Page(
            parts=self._parts,
            count=self._count,
            payload_bytes=self._bytes,
            last_id=last_id,
            end="more" if self._cut else "end",
        )

    def _add(self, part: bytes, count: int, last_id: bytes) -> None:
        self._parts.append(part)
        self._count += count
        self._bytes += len(part)
        self._room -= count
        self._bytes_room -= len(part)
        self._last_id = last_id

    def _fitting(self, items: Sequence[bytes]) -> int:
        taken = min(len(items), self._room)
        if sum(map(len, items)) <= self._bytes_room:
            return taken
        sizes = accumulate(map(len, items[:taken]))
        taken = next((index for index, size in enumerate(sizes) if size > self._bytes_room), taken)
        return taken if taken or self._count else min(1, self._room)

    def _feed_mixed(self, rows: Sequence[tuple[bytes, bytes]]) -> None:
        items: list[bytes] = []
        for key, value in rows:
            try:
                visible = self._item(key, decode_row(value))
            except DamagedRow:
                if not items and not self._count:
                    raise
                # What stands before it can still be read; the next page will say what is wrong.
                self.feed_items(items)
                self._cut = True
                return
            if visible is not None:
                items.append(visible)
        self.feed_items(items)

    def _item(self, key: bytes, row: MessageRow) -> bytes | None:
        position = key[-_POSITION_BYTES:]
        if row.ttl_s is not None:
            expires_ms = int.from_bytes(position[:8], "big") + row.ttl_s * 1000
            if self._span.now_ms > expires_ms:
                return None
        if row.payload is None:
            raise DamagedRow(f"row {key.hex()} refers to the payload table, which this version does not read")
        return item(position + NO_PAYLOAD_PART, row.payload)

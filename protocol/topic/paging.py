"""Cutting a page out of rows or cached items: where it ends, and where reading goes on.

Both sources end in the same place, so that a page does not depend on where its messages came from: a page
ends at the span's end, at the first undecided message, at its limit of messages, or where the next message
would pass its bytes; it always has one message if there is one.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from protocol.ids import ID_BYTES, before
from protocol.page import HIDDEN_COUNTED, Page
from protocol.topic.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.keys import DamagedRow
    from protocol.topic.asks import Span
    from protocol.transactions.view import View


class Paging(Walk):
    """A page while it grows."""

    with_attributes = True

    def __init__(
        self, span: Span, limit: int, max_bytes: int, view: View | None = None, *, with_pointers: bool = False
    ) -> None:
        super().__init__(span, view, with_pointers=with_pointers, hidden_limit=HIDDEN_COUNTED)
        self._room = limit
        self._bytes_room = max_bytes
        self._parts: list[bytes] = []
        self._pointers: dict[int, int] = {}
        self._attributes: dict[int, Mapping[str, str]] = {}
        self._count = 0
        self._bytes = 0
        self._last_id: bytes | None = None
        self._cut = False

    @property
    def wanted(self) -> int:
        """Rows for the next scan to begin with: one more than there is room for tells whether there is more."""
        return min(self._room + 1, super().wanted)

    def feed_items(
        self,
        items: Sequence[bytes],
        pointers: Sequence[int] | None = None,
        attributes: Mapping[int, Mapping[str, str]] | None = None,
    ) -> bool:
        """Take visible messages in wire form, in order; False when the page is full.

        ``attributes``: of those that have some, by the index of the item.
        """
        self.attributes = (
            {items[index][1 : 1 + ID_BYTES]: each for index, each in attributes.items()} if attributes else {}
        )
        return self._give(items, pointers)

    def feed_part(
        self,
        part: bytes,
        count: int,
        last_id: bytes,
        pointers: Sequence[int] | None = None,
        attributes: Mapping[int, Mapping[str, str]] | None = None,
    ) -> bool:
        """Take many visible messages as one part that fits; False when the page is full."""
        self.passed = False
        if attributes:
            self._attributes.update((self._count + index, each) for index, each in attributes.items())
        self._add(part, count, last_id, pointers)
        return True

    def fits(self, count: int, size: int) -> bool:
        """Whether ``count`` more messages of ``size`` bytes together are within the bounds."""
        return count <= self._room and size <= self._bytes_room

    def page(self) -> Page:
        """What has come together. It ends where the span does, unless something cut or held it."""
        page = Page(self._parts, self._count, self._bytes, self._last_id)
        page.attributes, page.pointers = self._attributes, self._pointers
        if self._cut:
            page.end = "more"
        elif self.held_by is not None:
            page.end, page.held = "held", self.held
            page.last_id = before(self.held_at)
        elif self._last_id is None or self.passed:
            # What was passed over will not be visible later: nobody needs to look at it again.
            page.last_id = self.span.resume
        return page

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        taken = self._fitting(items)
        if taken < len(items):
            self._cut = True
            items = items[:taken]
        if items:
            if self.attributes:
                self._name(items)
            self._add(b"".join(items), len(items), items[-1][1 : 1 + ID_BYTES], pointers)
        return not self._cut

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        if not self._count:
            raise damage
        # What stands before it can still be read; the next page will say what is wrong.
        self._cut = True
        return False

    def _name(self, items: Sequence[bytes]) -> None:
        known = self.attributes
        for index, item in enumerate(items, self._count):
            strings = known.get(item[1 : 1 + ID_BYTES])
            if strings is not None:
                self._attributes[index] = strings

    def _add(self, part: bytes, count: int, last_id: bytes, pointers: Sequence[int] | None) -> None:
        if pointers is not None:
            numbered = zip(range(self._count, self._count + count), pointers, strict=False)
            self._pointers.update((index, pointer) for index, pointer in numbered if pointer)
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

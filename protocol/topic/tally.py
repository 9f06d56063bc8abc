"""Counting messages instead of returning them, and finding the newest; both look at so many rows and no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.ids import ID_BYTES
from protocol.topic.walk import Walk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.keys import DamagedRow
    from protocol.topic.asks import Span
    from protocol.transactions.view import View

    Rows = Sequence[tuple[bytes, bytes]]

#: By how much an item is longer than a plain row's value and position, as usage counts them.
_ITEM_EXTRA_BYTES = 10


class Looking(Walk):
    """A walk that gives up after so many rows."""

    def __init__(self, span: Span, view: View | None, max_looks: int) -> None:
        super().__init__(span, view, hidden_limit=max_looks)
        self._looks_left = max_looks
        #: It has given up: there is more than was looked at.
        self.gave_up = False

    def feed_rows(self, rows: Rows) -> bool:
        """See ``Walk``."""
        return super().feed_rows(self._looked_at(rows)) and self._may_look()

    def feed_payloads(self, rows: Rows) -> bool:
        """See ``StoredDelivery``."""
        return super().feed_payloads(self._looked_at(rows)) and self._may_look()

    def _looked_at(self, rows: Rows) -> Rows:
        left = self._looks_left
        self._looks_left -= len(rows)
        return rows[:left] if left < len(rows) else rows

    def _may_look(self) -> bool:
        if self._looks_left < 0:
            self.gave_up = self.done = True
        return not self.done


class Tally(Looking):
    """How many messages a reader would get; ``hidden`` and ``expired`` count those it would not."""

    def __init__(self, span: Span, view: View | None, max_looks: int) -> None:
        super().__init__(span, view, max_looks)
        self.messages = 0
        self.bytes = 0

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        self.messages += len(items)
        self.bytes += sum(map(len, items)) - _ITEM_EXTRA_BYTES * len(items)
        return True

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        self.messages += 1  # it is there, whatever it is
        return True


class Newest(Looking):
    """The newest living message."""

    reverse = True

    def __init__(self, span: Span, max_looks: int) -> None:
        super().__init__(span, None, max_looks)
        self.message_id: bytes | None = None

    @property
    def wanted(self) -> int:
        """One row will do, mostly."""
        return 1

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        self.message_id = items[0][1 : 1 + ID_BYTES]
        return False

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        self.message_id = message_id
        return False

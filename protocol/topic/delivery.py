"""What a walk does with what it meets: give what is visible, count what is hidden, stop at what cannot be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.page import Held, item
from protocol.rows import attributes_in
from protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.keys import DamagedRow
    from protocol.rows import MessageRow
    from protocol.topic.asks import Span
    from protocol.transactions.view import View


class Found:
    """Visible messages taken one by one; the last two columns say 0 where there is nothing to say."""

    __slots__ = ("expiries", "items", "pointers")

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.pointers: list[int] = []
        self.expiries: list[int] = []

    def add(self, message_id: bytes, row: MessageRow, pointer: int, expires_ms: int) -> None:
        """One more."""
        assert row.payload is not None  # rows without are references
        self.items.append(item(message_id, row.payload))
        self.pointers.append(pointer)
        self.expiries.append(expires_ms)


class Delivery:
    """What one reader gets. Threads may take turns with it, but only one at a time."""

    #: Whether ``attributes`` is filled.
    with_attributes = False

    def __init__(
        self, span: Span, view: View | None = None, *, with_pointers: bool = False, hidden_limit: int = 0
    ) -> None:
        """Read ``span``.

        Args:
          view: what the reader may see; None: everything, undecided and rolled back.
          with_pointers: ``_take`` is to be told each message's write pointer.
          hidden_limit: messages to count behind one that holds the reader.
        """
        self.span = span
        self.view = view
        self.with_pointers = with_pointers
        #: Nothing more is wanted.
        self.done = False
        #: The write pointer that holds the reader, and the bound before its first undecided message.
        self.held_by: int | None = None
        self.held_at = b""
        #: Messages from there on that the reader would get next.
        self.hidden = 0
        #: Messages met that have outlived a time to live of their own.
        self.expired = 0
        #: Whether the last message met was passed over by the view.
        self.passed = False
        #: Id → attributes, of messages among the rows at hand that have some.
        self.attributes: dict[bytes, Mapping[str, str]] = {}
        self._hidden_limit = hidden_limit

    # --- what sinks make of it ------------------------------------------------------------------

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        """Visible messages in wire form, in topic order; False: nothing more is wanted.

        ``pointers`` is there when asked for, ``expiries`` (ms) when one of them has a time to live of its own.
        """
        raise NotImplementedError

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        """A row cannot be read; whether to go on behind it."""
        raise NotImplementedError

    @property
    def held(self) -> Held | None:
        """What holds the reader, once something does."""
        if self.held_by is None:
            return None
        return Held(self.held_by, int.from_bytes(self.held_at[:8], "big"), self.hidden)

    def _meet(self, message_id: bytes, row: MessageRow) -> None:
        """A message is met that is taken apart, visible or not. Raises DamagedRow."""
        if self.with_attributes and row.extras:
            strings = attributes_in(row.extras)
            if strings:
                self.attributes[message_id] = strings

    # --- what all of them do --------------------------------------------------------------------

    def hold(self, pointer: int, bound: bytes) -> bool:
        """The reader stops before ``bound``; False when nothing behind it is to be counted."""
        self.held_by, self.held_at = pointer, bound
        self.done = self._hidden_limit == 0
        return not self.done

    def hide(self, count: int) -> bool:
        """Count messages behind the one that holds; False when there are so many that it does not matter."""
        self.hidden = min(self.hidden + count, self._hidden_limit)
        self.done = self.hidden == self._hidden_limit
        return not self.done

    def _give(
        self, items: Sequence[bytes], pointers: Sequence[int] | None = None, expiries: Sequence[int] | None = None
    ) -> bool:
        if not items:
            return not self.done
        if self.held_by is not None:
            return self.hide(len(items))
        self.passed = False
        self.done = not self._take(items, pointers, expiries)
        return not self.done

    def _give_found(self, found: Found) -> bool:
        return self._give(found.items, found.pointers if self.with_pointers else None, found.expiries)

    def _damage(self, message_id: bytes, damage: DamagedRow) -> bool:
        self.done = self.held_by is not None or not self._damaged(message_id, damage)
        return not self.done

    def _verdict(self, pointer: int | None) -> Verdict:
        return Verdict.DELIVER if pointer is None or self.view is None else self.view.verdict(pointer)


def expires_ms_of(position: bytes, ttl_s: int | None) -> int:
    """When a message's own time to live ends; 0: it has none."""
    return 0 if ttl_s is None else int.from_bytes(position[:8], "big") + ttl_s * 1000

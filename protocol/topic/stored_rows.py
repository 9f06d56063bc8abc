"""Reading stored messages: the payload rows that a reference stands for, winners only, in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.keys import DamagedRow
from protocol.page import ITEM_HEAD_BYTES, ITEM_START
from protocol.rows import HAS_EXTRAS, PLAIN, SEGMENT, attributes_in, decode_row
from protocol.topic.delivery import Delivery, Found, expires_ms_of
from protocol.topic.row_starts import HEAD_STOP, Starts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from protocol.rows import MessageRow
    from protocol.topic.asks import Span
    from protocol.transactions.view import View

    Rows = Sequence[tuple[bytes, bytes]]

_POSITION_BYTES = 10
#: An item of the reference's position, the payload row's, and the payload with its length before it.
_STORED_ITEM = ITEM_START + b"%b%b%b"


@dataclass(slots=True)
class Reference:
    """A message row that stands for stored messages, while their payload rows are read."""

    position: bytes
    pointer: int
    """As the row has it: negative when rolled back; 0: it has none, they were staged."""
    ttl_s: int | None
    winners: frozenset[int] | None
    held_at: bytes | None
    """The bound before which the reader stops, once there is a message it would get; None: it does not stop here."""
    start: bytes
    stop: bytes
    """``[start, stop)`` of the payload keys."""
    row: MessageRow
    """The one that stands for them."""


class StoredDelivery(Delivery):
    """A delivery that may be at a reference."""

    def __init__(
        self, span: Span, view: View | None = None, *, with_pointers: bool = False, hidden_limit: int = 0
    ) -> None:
        super().__init__(span, view, with_pointers=with_pointers, hidden_limit=hidden_limit)
        #: Whose payload rows are to be read before anything else.
        self.reference: Reference | None = None

    def feed_payloads(self, rows: Rows) -> bool:
        """Take payload rows of ``reference``, in order; False when enough is known. Raises DamagedRow, as for others."""
        assert self.reference is not None  # else nobody asked for them
        if self.attributes:
            self.attributes = {}
        flags = {value[0] if value else -1 for _, value in rows}
        if flags == {PLAIN}:
            return self.reference.winners is not None or self._give_stored(rows, [value[1:] for _, value in rows])
        if flags == {HAS_EXTRAS}:
            return self._feed_extras_of_stored(rows)
        return self._feed_stored_one_by_one(rows)

    def _feed_extras_of_stored(self, rows: Rows) -> bool:
        """Payload rows with extras, told apart by the bytes of these, each decoded once."""
        starts = Starts()
        known: dict[bytes, tuple[bool, Mapping[str, str] | None]] = {}
        winning, payloads = [], []
        try:
            for row in rows:
                value = row[1]
                start = starts[value[1:HEAD_STOP]]
                head = value[:start]
                told = known.get(head)
                if told is None:
                    told = known[head] = self._told(head)
                if told[0]:
                    winning.append(row)
                    payloads.append(value[start:])
                    if told[1] and self.with_attributes:
                        assert self.reference is not None  # while payload rows are read
                        self.attributes[self.reference.position + row[0][-_POSITION_BYTES:]] = told[1]
        except DamagedRow:
            return self._feed_stored_one_by_one(rows)
        return self._give_stored(winning, payloads)

    def _told(self, head: bytes) -> tuple[bool, Mapping[str, str] | None]:
        """Whether rows that start so, up to their payload, are part of the topic, and their attributes.

        Raises DamagedRow.
        """
        row = decode_row(head + b"\x00")
        return self._is_winner(row), attributes_in(row.extras)

    def _is_winner(self, row: MessageRow) -> bool:
        assert self.reference is not None  # while payload rows are read
        winners = self.reference.winners
        return winners is None or row.extras.get(SEGMENT) in winners

    def _give_stored(self, rows: Rows, payloads: Sequence[bytes]) -> bool:
        """Payload rows, and of each the payload with its length before it."""
        assert self.reference is not None  # while payload rows are read
        position = self.reference.position
        items = [
            _STORED_ITEM % (position, row[0][-_POSITION_BYTES:], payload)
            for row, payload in zip(rows, payloads, strict=True)
        ]
        if items and min(map(len, items)) <= ITEM_HEAD_BYTES:
            return self._feed_stored_one_by_one(rows)  # one of them has no payload, not even an empty one
        expires_ms = expires_ms_of(position, self.reference.ttl_s)
        expiries = [expires_ms] * len(items) if expires_ms else None
        return self._give_of(items, [self.reference.pointer] * len(items), expiries)

    def _feed_stored_one_by_one(self, rows: Rows) -> bool:
        reference = self.reference
        assert reference is not None  # while payload rows are read
        found = Found()
        for key, value in rows:
            message_id = reference.position + key[-_POSITION_BYTES:]
            try:
                row = decode_row(value)
                if row.payload is None:
                    raise DamagedRow(f"payload row {key.hex()} has no payload")
                self._meet(message_id, row)
            except DamagedRow as damage:
                if not (
                    self._give_of(found.items, found.pointers, found.expiries) and self._damage(message_id, damage)
                ):
                    return False
                found = Found()
                continue
            ttls_s = [ttl_s for ttl_s in (row.ttl_s, reference.ttl_s) if ttl_s is not None]
            expires_ms = expires_ms_of(reference.position, min(ttls_s, default=None))
            if not self._is_winner(row):
                continue
            if 0 < expires_ms < self.span.now_ms:
                self.expired += 1
            else:
                found.add(message_id, row, reference.pointer, expires_ms)
        return self._give_of(found.items, found.pointers, found.expiries)

    def _give_of(self, items: Sequence[bytes], pointers: Sequence[int], expiries: Sequence[int] | None) -> bool:
        """Give messages of the reference, of which the first one may hold the reader."""
        assert self.reference is not None  # while payload rows are read
        held_at = self.reference.held_at
        if items and held_at is not None and self.held_by is None and not self.hold(self.reference.pointer, held_at):
            return False
        return self._give(items, pointers if self.with_pointers else None, expiries)

"""Visibility for one reader: rows become visible messages in wire form, a whole list at once if its rows are alike.

``Walk`` in ``reading.py`` decides which rows to read; a delivery decides what happens to each: visible messages go to
``_take``, hidden ones are counted, and the reader stops at the first undecided or unreadable one.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack

from plainsong.protocol.ids import NO_PAYLOAD_PART, POSITION_BYTES, published_ms
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import HIDDEN_COUNTED, ITEM_HEAD_BYTES, ITEM_START, Held, item
from plainsong.protocol.rows import (
    ATTRIBUTES,
    HAS_EXTRAS,
    HAS_POINTER,
    PLAIN,
    PLAIN_GAP,
    SEGMENT,
    attributes_in,
    decode_row,
    expires_ms_of,
)
from plainsong.protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plainsong.protocol.rows import MessageRow
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View

    Rows = Sequence[tuple[bytes, bytes]]


class Delivery:
    """Delivers messages to one reader. Different threads may use it, one at a time."""

    #: True to fill ``attributes``.
    with_attributes = False

    def __init__(
        self, span: Span, view: View | None = None, *, with_pointers: bool = False, hidden_limit: int = 0
    ) -> None:
        """Read ``span``.

        Args:
          view: the reader's snapshot; None: everything is visible, including undecided and rolled back messages.
          with_pointers: pass each message's write pointer to ``_take``.
          hidden_limit: how many messages to count at most after the one that blocks the reader.
        """
        self.span = span
        self.view = view
        self.with_pointers = with_pointers
        #: No more rows are needed.
        self.done = False
        #: The write pointer that holds the reader, and the bound before its first undecided message.
        self.held_by: int | None = None
        self.held_at = b""
        #: When that message expires by its own time to live; 0 if it has none.
        self.held_until_ms = 0
        #: The number of messages counted from ``held_at`` on, which the reader would get next.
        self.hidden = 0
        #: Messages skipped because their own time to live is over.
        self.expired = 0
        #: True if the view skipped the last message.
        self.passed = False
        #: Id → attributes, for the messages of the current list that have any.
        self.attributes: dict[bytes, Mapping[str, str]] = {}
        self._hidden_limit = hidden_limit

    # --- for subclasses to override -------------------------------------------------------------

    def _take(self, items: Sequence[bytes], pointers: Sequence[int] | None, expiries: Sequence[int] | None) -> bool:
        """Take visible messages in wire form, in topic order. Returns False when no more are needed.

        ``pointers`` is set with ``with_pointers``, ``expiries`` (ms) if a message has its own time to live.
        """
        raise NotImplementedError

    def _damaged(self, message_id: bytes, damage: DamagedRow) -> bool:
        """Handle a row that cannot be read. Returns True to continue after it."""
        raise NotImplementedError

    @property
    def held(self) -> Held | None:
        """The transaction that holds the reader, if any."""
        if self.held_by is None:
            return None
        since_ms = published_ms(self.held_at)
        return Held(self.held_by, since_ms, min(self.hidden, HIDDEN_COUNTED), self.hidden > HIDDEN_COUNTED)

    def _on_message(self, message_id: bytes, row: MessageRow) -> None:
        """Called for each message that is decoded row by row, visible or not. Raises DamagedRow."""
        if self.with_attributes and row.extras:
            strings = attributes_in(row.extras)
            if strings:
                self.attributes[message_id] = strings

    # --- holding and delivering -----------------------------------------------------------------

    def hold(self, pointer: int, bound: bytes, expires_ms: int = 0) -> bool:
        """Stop the reader before ``bound``. Returns False if later messages need not be counted.

        ``expires_ms``: when the message after ``bound`` expires by its own time to live; 0 if it has none.
        """
        self.held_by, self.held_at, self.held_until_ms = pointer, bound, expires_ms
        self.done = self._hidden_limit == 0
        return not self.done

    def hide(self, count: int) -> bool:
        """Count hidden messages after ``held_at``. Returns False at the limit."""
        self.hidden = min(self.hidden + count, self._hidden_limit)
        self.done = self.hidden == self._hidden_limit
        return not self.done

    def _deliver(
        self, items: Sequence[bytes], pointers: Sequence[int] | None = None, expiries: Sequence[int] | None = None
    ) -> bool:
        if not items:
            return not self.done
        if self.held_by is not None:
            return self.hide(len(items))
        self.passed = False
        self.done = not self._take(items, pointers, expiries)
        return not self.done

    def _deliver_found(self, found: VisibleMessages) -> bool:
        return self._deliver(found.items, found.pointers if self.with_pointers else None, found.expiries)

    def _damage(self, message_id: bytes, damage: DamagedRow) -> bool:
        self.done = self.held_by is not None or not self._damaged(message_id, damage)
        return not self.done

    def _verdict(self, pointer: int | None) -> Verdict:
        return Verdict.DELIVER if pointer is None or self.view is None else self.view.verdict(pointer)


class VisibleMessages:
    """Visible messages collected one by one; a pointer or expiry of 0 means none."""

    __slots__ = ("expiries", "items", "pointers")

    def __init__(self) -> None:
        self.items: list[bytes] = []
        self.pointers: list[int] = []
        self.expiries: list[int] = []

    def add(self, message_id: bytes, row: MessageRow, pointer: int, expires_ms: int) -> None:
        assert row.payload is not None  # rows without one are references
        self.items.append(item(message_id, row.payload))
        self.pointers.append(pointer)
        self.expiries.append(expires_ms)


# --- rows that refer to stored messages ------------------------------------------------------------
#
# A reference is replaced by its payload rows that are in winning segments.

#: An item: the position of the reference, that of the payload row, and the payload preceded by its length.
_STORED_ITEM = ITEM_START + b"%b%b%b"
#: Bytes of such an item before the payload's length.
STORED_OVERHEAD_BYTES = len(ITEM_START) + 2 * POSITION_BYTES


@dataclass(slots=True)
class Reference:
    """A message row that refers to stored messages, while their payload rows are read."""

    position: bytes
    pointer: int
    """The pointer in the row: negative if rolled back, 0 for staged messages."""
    ttl_s: int | None
    winners: frozenset[int] | None
    held_at: bytes | None
    """The bound before which the reader stops if the reference has a message for it; None if it does not stop."""
    start: bytes
    stop: bytes
    """``[start, stop)`` of the payload keys."""
    row: MessageRow
    """The reference row itself."""


class StoredDelivery(Delivery):
    """A delivery that reads the payload rows of references."""

    def __init__(
        self, span: Span, view: View | None = None, *, with_pointers: bool = False, hidden_limit: int = 0
    ) -> None:
        super().__init__(span, view, with_pointers=with_pointers, hidden_limit=hidden_limit)
        #: The reference whose payload rows are to be read next; None if message rows are next.
        self.reference: Reference | None = None

    def feed_payloads(self, rows: Rows) -> bool:
        """Take payload rows of ``reference``, in order. Returns and raises the same as ``feed_rows``."""
        assert self.reference is not None  # while payload rows are read
        if self.attributes:
            self.attributes = {}
        flags = {value[0] if value else -1 for _, value in rows}
        if flags == {PLAIN}:
            return self.reference.winners is not None or self._deliver_stored(rows, [value[1:] for _, value in rows])
        if flags == {HAS_EXTRAS}:
            return self._feed_extras_of_stored(rows)
        return self._feed_stored_one_by_one(rows)

    def _feed_extras_of_stored(self, rows: Rows) -> bool:
        """Take payload rows with extras; equal extras are decoded once."""
        starts = PayloadStarts()
        first = rows[0][1]
        start = starts[first[1:HEAD_STOP]]
        # A list usually has the rows of one request, which differ only in their payloads.
        if len({value[:start] for _, value in rows}) == 1:
            return self._feed_alike(rows, first[:start])
        known: dict[bytes, tuple[bool, Mapping[str, str] | None]] = {}
        winning, payloads = [], []
        try:
            for row in rows:
                value = row[1]
                start = starts[value[1:HEAD_STOP]]
                head = value[:start]
                decoded = known.get(head)
                if decoded is None:
                    decoded = known[head] = self._decode_head(head)
                if decoded[0]:
                    winning.append(row)
                    payloads.append(value[start:])
                    if decoded[1] and self.with_attributes:
                        assert self.reference is not None  # while payload rows are read
                        self.attributes[self.reference.position + row[0][-POSITION_BYTES:]] = decoded[1]
        except DamagedRow:
            return self._feed_stored_one_by_one(rows)
        return self._deliver_stored(winning, payloads)

    def _feed_alike(self, rows: Rows, head: bytes) -> bool:
        """Take payload rows that have the same bytes before their payloads."""
        try:
            is_winner, strings = self._decode_head(head)
        except DamagedRow:
            return self._feed_stored_one_by_one(rows)
        if not is_winner:
            return not self.done
        if strings and self.with_attributes:
            assert self.reference is not None  # while payload rows are read
            position = self.reference.position
            self.attributes = {position + key[-POSITION_BYTES:]: strings for key, _ in rows}
        start = len(head)
        return self._deliver_stored(rows, [value[start:] for _, value in rows])

    def _decode_head(self, head: bytes) -> tuple[bool, Mapping[str, str] | None]:
        """Decode the bytes before the payload of rows; return whether their segment won, and their attributes.

        Raises DamagedRow.
        """
        row = decode_row(head + b"\x00")
        return self._is_winner(row), attributes_in(row.extras)

    def _is_winner(self, row: MessageRow) -> bool:
        assert self.reference is not None  # while payload rows are read
        winners = self.reference.winners
        return winners is None or row.extras.get(SEGMENT) in winners

    def _deliver_stored(self, rows: Rows, payloads: Sequence[bytes]) -> bool:
        """Deliver payload rows, given their payloads, each preceded by its length."""
        assert self.reference is not None  # while payload rows are read
        position = self.reference.position
        items = [
            _STORED_ITEM % (position, row[0][-POSITION_BYTES:], payload)
            for row, payload in zip(rows, payloads, strict=True)
        ]
        if items and min(map(len, items)) <= ITEM_HEAD_BYTES:
            return self._feed_stored_one_by_one(rows)  # one of them has no payload, not even an empty one
        expires_ms = expires_ms_of(position, self.reference.ttl_s)
        expiries = [expires_ms] * len(items) if expires_ms else None
        return self._deliver_referenced(items, [self.reference.pointer] * len(items), expiries)

    def _feed_stored_one_by_one(self, rows: Rows) -> bool:
        reference = self.reference
        assert reference is not None  # while payload rows are read
        found = VisibleMessages()
        for key, value in rows:
            message_id = reference.position + key[-POSITION_BYTES:]
            try:
                row = decode_row(value)
                if row.payload is None:
                    raise DamagedRow(f"payload row {key.hex()} has no payload")
                self._on_message(message_id, row)
            except DamagedRow as damage:
                if not (
                    self._deliver_referenced(found.items, found.pointers, found.expiries)
                    and self._damage(message_id, damage)
                ):
                    return False
                found = VisibleMessages()
                continue
            ttls_s = [ttl_s for ttl_s in (row.ttl_s, reference.ttl_s) if ttl_s is not None]
            expires_ms = expires_ms_of(reference.position, min(ttls_s, default=None))
            if not self._is_winner(row):
                continue
            if 0 < expires_ms < self.span.now_ms:
                self.expired += 1
            else:
                found.add(message_id, row, reference.pointer, expires_ms)
        return self._deliver_referenced(found.items, found.pointers, found.expiries)

    def _deliver_referenced(
        self, items: Sequence[bytes], pointers: Sequence[int], expiries: Sequence[int] | None
    ) -> bool:
        """Deliver messages of the reference; the first of them may hold the reader."""
        assert self.reference is not None  # while payload rows are read
        held_at = self.reference.held_at
        if items and held_at is not None and self.held_by is None:
            expires_ms = expiries[0] if expiries else 0
            if not self.hold(self.reference.pointer, held_at, expires_ms):
                return False
        return self._deliver(items, pointers if self.with_pointers else None, expiries)


# --- rows that have their payload ------------------------------------------------------------------
#
# Lists are taken as a whole, with one verdict for each pointer in the list: to decide on each row would take longer
# than to read it.

#: Flags and pointer of a row that has only these before its payload.
_HEAD_BYTES = 9
_POINTER = struct.Struct(">q")
#: Flags of the rows of which lists are taken as a whole: without extras, and in general.
_BARE = frozenset({PLAIN, HAS_POINTER})
_BY_THE_LIST = frozenset({PLAIN, HAS_POINTER, HAS_EXTRAS, HAS_POINTER | HAS_EXTRAS})
_UNDER_POINTERS = frozenset({HAS_POINTER, HAS_POINTER | HAS_EXTRAS})
#: Items made from a position and the rest of the value, for a plain row and for a row under a pointer.
#: Formatting makes one object where concatenation makes three.
_PLAIN_ITEM = ITEM_START + b"%b" + PLAIN_GAP + b"%b"
_POINTER_ITEM = ITEM_START + b"%b" + NO_PAYLOAD_PART + b"%b"


class InlineDelivery(StoredDelivery):
    """A delivery that takes message rows other than references."""

    def _feed_inline(self, rows: Rows, flags: set[int]) -> bool:
        """Take rows that have their payload; ``flags`` includes all their flags, and perhaps more."""
        if self.attributes:
            self.attributes = {}
        if flags == {PLAIN}:
            return self._deliver_plain(rows)
        if not flags <= _BARE:
            flags = {value[0] for _, value in rows}  # ``flags`` may be of rows in other lists
        if flags <= _BARE:
            return self._feed_pointers(rows, mixed=PLAIN in flags)
        if flags <= _BY_THE_LIST:
            return self._feed_extras(rows, flags)
        return self._feed_one_by_one(rows)

    def _deliver_plain(self, rows: Rows) -> bool:
        """Deliver rows that have only a payload."""
        return self._deliver([_PLAIN_ITEM % (key[-POSITION_BYTES:], value) for key, value in rows])

    def _feed_extras(self, rows: Rows, flags: set[int]) -> bool:
        """Take rows, some with extras, without decoding the extras."""
        starts = PayloadStarts()
        if flags.isdisjoint(_UNDER_POINTERS):
            items = [
                _POINTER_ITEM % (key[-POSITION_BYTES:], value[starts[value[1:HEAD_STOP]] :])
                if value[0]
                else _PLAIN_ITEM % (key[-POSITION_BYTES:], value)
                for key, value in rows
            ]
            if min(map(len, items)) <= ITEM_HEAD_BYTES or not self._collect_attributes(rows, starts):
                return self._feed_one_by_one(rows)  # which reports the damage
            return self._deliver(items, [0] * len(rows) if self.with_pointers else None)
        bare = [(key, starts.without_extras(value)) for key, value in rows]
        if any(len(value) <= (_HEAD_BYTES if value[0] else 1) for _, value in bare):
            return self._feed_one_by_one(rows)
        if not self._collect_attributes(rows, starts):
            return self._feed_one_by_one(rows)
        return self._feed_pointers(bare, mixed=True)

    def _collect_attributes(self, rows: Rows, starts: PayloadStarts) -> bool:
        """Collect the attributes of rows that have any. Returns False if some cannot be read."""
        if not (self.with_attributes and starts.with_attributes):
            return True
        try:
            found = {key[-POSITION_BYTES:] + NO_PAYLOAD_PART: strings for key, strings in starts.attributes(rows)}
        except DamagedRow:
            return False
        self.attributes = found
        return True

    def _feed_pointers(self, rows: Rows, *, mixed: bool) -> bool:
        """Take rows that are plain or have only a pointer, with one verdict for each pointer."""
        values = [value for _, value in rows if value[0]] if mixed else [value for _, value in rows]
        if self.view is None or not values:
            return self._deliver_inline(rows, mixed=mixed)
        # Values begin with flags and pointer, so that as bytes they sort like their pointers, negative ones last.
        low, high = min(values), max(values)
        if min(len(low), len(high)) < _HEAD_BYTES:
            return self._feed_one_by_one(rows)  # which reports the damage
        if self.view.delivers_all(_pointer(low), _pointer(high), lambda: _pointers(values)):
            return self._deliver_inline(rows, mixed=mixed)
        heads = {value[:_HEAD_BYTES] for value in values}
        if min(map(len, heads)) < _HEAD_BYTES:
            return self._feed_one_by_one(rows)
        pointers = {head: _pointer(head) for head in heads}
        verdicts = {head: self.view.verdict(pointer) for head, pointer in pointers.items()}
        skipped = {head for head, verdict in verdicts.items() if verdict is Verdict.SKIP}
        if self.held_by is None:
            held = {head for head, verdict in verdicts.items() if verdict is Verdict.HOLD}
            at = next((i for i, (_, value) in enumerate(rows) if value[0] and value[:_HEAD_BYTES] in held), len(rows))
            if not self._deliver_except(rows[:at], skipped):
                return False
            if at == len(rows):
                return True
            key, value = rows[at]
            if not self.hold(pointers[value[:_HEAD_BYTES]], key[-POSITION_BYTES:] + NO_PAYLOAD_PART):
                return False
            rows = rows[at:]
        return self._deliver_except(rows, skipped)

    def _deliver_except(self, rows: Rows, skipped: set[bytes]) -> bool:
        if not rows:
            return True
        last = rows[-1][1]
        if skipped:
            rows = [row for row in rows if not row[1][0] or row[1][:_HEAD_BYTES] not in skipped]
        go_on = self._deliver_inline(rows, mixed=True)
        self.passed = bool(last[0]) and last[:_HEAD_BYTES] in skipped
        return go_on

    def _deliver_inline(self, rows: Rows, *, mixed: bool) -> bool:
        if not mixed:
            items = [_POINTER_ITEM % (key[-POSITION_BYTES:], value[_HEAD_BYTES:]) for key, value in rows]
        else:
            items = [
                _POINTER_ITEM % (key[-POSITION_BYTES:], value[_HEAD_BYTES:])
                if value[0]
                else _PLAIN_ITEM % (key[-POSITION_BYTES:], value)
                for key, value in rows
            ]
        if items and min(map(len, items)) <= ITEM_HEAD_BYTES:
            return self._feed_one_by_one(rows)  # one of them has no payload, not even an empty one
        pointers = [_pointer(value) if value[0] else 0 for _, value in rows] if self.with_pointers else None
        return self._deliver(items, pointers)

    def _feed_one_by_one(self, rows: Rows) -> bool:
        found = VisibleMessages()
        for key, value in rows:
            position = key[-POSITION_BYTES:]
            message_id = position + NO_PAYLOAD_PART
            try:
                row = decode_row(value)
                self._on_message(message_id, row)
            except DamagedRow as damage:
                if not (self._deliver_found(found) and self._damage(message_id, damage)):
                    return False
                found = VisibleMessages()
                continue
            expires_ms = expires_ms_of(position, row.ttl_s)
            if 0 < expires_ms < self.span.now_ms:
                self.expired += 1
                continue
            verdict = self._verdict(row.pointer)
            if verdict is Verdict.HOLD and self.held_by is None:
                if not self._deliver_found(found) or not self.hold(row.pointer or 0, message_id, expires_ms):
                    return False
                found = VisibleMessages()
            self.passed = verdict is Verdict.SKIP
            if verdict is not Verdict.SKIP:
                found.add(message_id, row, row.pointer or 0, expires_ms)
        passed = self.passed
        go_on = self._deliver_found(found)
        self.passed = passed
        return go_on


def _pointers(values: Sequence[bytes]) -> set[int]:
    """Return the pointers of rows that all have one, unpacked at once; arbitrary numbers if a row is too short."""
    heads = b"".join([value[1:_HEAD_BYTES] for value in values])
    return set(struct.unpack_from(f">{len(heads) // _POINTER.size}q", heads))


def _pointer(value: bytes) -> int:
    number: int = _POINTER.unpack_from(value, 1)[0]
    return number


# --- where the payload starts in a row with extras -------------------------------------------------
#
# Extras are stamps, indexes and attributes; only attributes have many lengths. So the first bytes of extras (their
# length, the head of the map, its first key) are the same in many rows. By these bytes one can look up, without
# decoding the row, where the payload starts, and whether there may be attributes, alone or after another key.

#: The end of the first bytes of the extras in a row without a pointer: flags, length, map, key of one letter.
HEAD_STOP = 8
_POINTER_BYTES = 8
_POINTER_STOP = 1 + _POINTER_BYTES
_LENGTH_BYTES = 4
_EXTRAS_START = 1 + _LENGTH_BYTES
#: The head and first key of the map in those bytes, and the head of a map of one key.
_MAP = slice(_LENGTH_BYTES, HEAD_STOP - 1)
_ONE_KEY = 0x81
_ONLY_ATTRIBUTES = bytes([_ONE_KEY]) + msgpack.packb(ATTRIBUTES)


class PayloadStarts(dict[bytes, int]):
    """The first bytes of a row's extras → where its payload's length starts, in a row without a pointer.

    Rows must have a payload, and no time to live of their own. Entries are computed at the first look-up.
    """

    __slots__ = ("with_attributes",)

    def __init__(self) -> None:
        super().__init__()
        #: The keys whose rows may have attributes.
        self.with_attributes: set[bytes] = set()

    def __missing__(self, head: bytes) -> int:
        start = self[head] = _EXTRAS_START + int.from_bytes(head[:_LENGTH_BYTES], "big")
        extras = head[_MAP]
        if extras == _ONLY_ATTRIBUTES or (extras and extras[0] > _ONE_KEY):
            self.with_attributes.add(head)
        return start

    def without_extras(self, value: bytes) -> bytes:
        """Return the value of a row without its extras."""
        flags = value[0]
        if not flags & HAS_EXTRAS:
            return value
        if not flags & HAS_POINTER:
            return b"\x00" + value[self[value[1:HEAD_STOP]] :]
        start = self[value[_POINTER_STOP : HEAD_STOP + _POINTER_BYTES]] + _POINTER_BYTES
        return b"\x01" + value[1:_POINTER_STOP] + value[start:]

    def attributes(self, rows: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, Mapping[str, str]]]:
        """Yield key and attributes of each row that has any. Raises DamagedRow."""
        known: dict[bytes, Mapping[str, str]] = {}
        wanted = self.with_attributes
        for key, value in rows:
            if not value[0] & HAS_EXTRAS:
                continue
            at = _POINTER_STOP if value[0] & HAS_POINTER else 1
            head = value[at : at + HEAD_STOP - 1]
            if head not in wanted:
                continue
            packed = value[at + _LENGTH_BYTES : at - 1 + self[head]]
            strings = known.get(packed)
            if strings is None:
                strings = known[packed] = _attributes(packed)
            if strings:
                yield key, strings


def _attributes(packed: bytes) -> Mapping[str, str]:
    """Decode the attributes in packed extras. Raises DamagedRow."""
    try:
        extras = msgpack.unpackb(packed, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedRow(f"a row's extras are garbled: {packed[:24].hex()}…") from error
    return attributes_in(extras) or {}

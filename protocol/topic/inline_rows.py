"""Reading message rows that have their payload: by the list, with one verdict for each pointer among them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from protocol.ids import NO_PAYLOAD_PART
from protocol.keys import DamagedRow
from protocol.page import ITEM_HEAD_BYTES, ITEM_START
from protocol.rows import HAS_EXTRAS, HAS_POINTER, PLAIN, PLAIN_GAP, decode_row
from protocol.topic.delivery import Found, expires_ms_of
from protocol.topic.row_starts import HEAD_STOP, Starts
from protocol.topic.stored_rows import StoredDelivery
from protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    Rows = Sequence[tuple[bytes, bytes]]

_POSITION_BYTES = 10
#: Flags and pointer of a row that has these two and a payload.
_HEAD_BYTES = 9
_POINTER = struct.Struct(">q")
#: Flags of rows that are taken by the list: those without extras, and all.
_BARE = frozenset({PLAIN, HAS_POINTER})
_BY_THE_LIST = frozenset({PLAIN, HAS_POINTER, HAS_EXTRAS, HAS_POINTER | HAS_EXTRAS})
_UNDER_POINTERS = frozenset({HAS_POINTER, HAS_POINTER | HAS_EXTRAS})
#: Items made of position and the rest of the value: of a plain row, and of a row under a pointer.
#: Formatting makes one object where adding up makes three.
_PLAIN_ITEM = ITEM_START + b"%b" + PLAIN_GAP + b"%b"
_POINTER_ITEM = ITEM_START + b"%b" + NO_PAYLOAD_PART + b"%b"


class InlineDelivery(StoredDelivery):
    """A delivery that is fed message rows, references not among them."""

    def _feed_inline(self, rows: Rows, flags: set[int]) -> bool:
        """Rows that have their payload; ``flags`` has at least theirs."""
        if self.attributes:
            self.attributes = {}
        if flags == {PLAIN}:
            return self._give([_PLAIN_ITEM % (key[-_POSITION_BYTES:], value) for key, value in rows])
        if not flags <= _BARE:
            flags = {value[0] for _, value in rows}  # perhaps it is others that have more
        if flags <= _BARE:
            return self._feed_pointers(rows, mixed=PLAIN in flags)
        if flags <= _BY_THE_LIST:
            return self._feed_extras(rows, flags)
        return self._feed_one_by_one(rows)

    def _feed_extras(self, rows: Rows, flags: set[int]) -> bool:
        """Rows of which some have extras, and which need not be taken apart for that."""
        starts = Starts()
        if flags.isdisjoint(_UNDER_POINTERS):
            items = [
                _POINTER_ITEM % (key[-_POSITION_BYTES:], value[starts[value[1:HEAD_STOP]] :])
                if value[0]
                else _PLAIN_ITEM % (key[-_POSITION_BYTES:], value)
                for key, value in rows
            ]
            if min(map(len, items)) <= ITEM_HEAD_BYTES or not self._meet_all(rows, starts):
                return self._feed_one_by_one(rows)  # which says what is wrong
            return self._give(items, [0] * len(rows) if self.with_pointers else None)
        bare = [(key, starts.without_extras(value)) for key, value in rows]
        if any(len(value) <= (_HEAD_BYTES if value[0] else 1) for _, value in bare):
            return self._feed_one_by_one(rows)
        if not self._meet_all(rows, starts):
            return self._feed_one_by_one(rows)
        return self._feed_pointers(bare, mixed=True)

    def _meet_all(self, rows: Rows, starts: Starts) -> bool:
        """Note the attributes of those that have some; False when one's cannot be read."""
        if not (self.with_attributes and starts.with_attributes):
            return True
        try:
            found = {key[-_POSITION_BYTES:] + NO_PAYLOAD_PART: strings for key, strings in starts.attributes(rows)}
        except DamagedRow:
            return False
        self.attributes = found
        return True

    def _feed_pointers(self, rows: Rows, *, mixed: bool) -> bool:
        """Rows that are plain, or have a pointer and nothing else: one verdict for each pointer among them."""
        values = [value for _, value in rows if value[0]] if mixed else [value for _, value in rows]
        if self.view is None or not values:
            return self._give_inline(rows, mixed=mixed)
        # Flags and pointer come first: as bytes, the values sort as their pointers do, negative ones last.
        low, high = min(values), max(values)
        if min(len(low), len(high)) < _HEAD_BYTES:
            return self._feed_one_by_one(rows)  # which says what is wrong
        if self.view.delivers_all(_pointer(low), _pointer(high), lambda: _pointers(values)):
            return self._give_inline(rows, mixed=mixed)
        heads = {value[:_HEAD_BYTES] for value in values}
        if min(map(len, heads)) < _HEAD_BYTES:
            return self._feed_one_by_one(rows)
        pointers = {head: _pointer(head) for head in heads}
        verdicts = {head: self.view.verdict(pointer) for head, pointer in pointers.items()}
        skipped = {head for head, verdict in verdicts.items() if verdict is Verdict.SKIP}
        if self.held_by is None:
            held = {head for head, verdict in verdicts.items() if verdict is Verdict.HOLD}
            at = next((i for i, (_, value) in enumerate(rows) if value[0] and value[:_HEAD_BYTES] in held), len(rows))
            if not self._give_but(rows[:at], skipped):
                return False
            if at == len(rows):
                return True
            key, value = rows[at]
            if not self.hold(pointers[value[:_HEAD_BYTES]], key[-_POSITION_BYTES:] + NO_PAYLOAD_PART):
                return False
            rows = rows[at:]
        return self._give_but(rows, skipped)

    def _give_but(self, rows: Rows, skipped: set[bytes]) -> bool:
        if not rows:
            return True
        last = rows[-1][1]
        if skipped:
            rows = [row for row in rows if not row[1][0] or row[1][:_HEAD_BYTES] not in skipped]
        go_on = self._give_inline(rows, mixed=True)
        self.passed = bool(last[0]) and last[:_HEAD_BYTES] in skipped
        return go_on

    def _give_inline(self, rows: Rows, *, mixed: bool) -> bool:
        if not mixed:
            items = [_POINTER_ITEM % (key[-_POSITION_BYTES:], value[_HEAD_BYTES:]) for key, value in rows]
        else:
            items = [
                _POINTER_ITEM % (key[-_POSITION_BYTES:], value[_HEAD_BYTES:])
                if value[0]
                else _PLAIN_ITEM % (key[-_POSITION_BYTES:], value)
                for key, value in rows
            ]
        if items and min(map(len, items)) <= ITEM_HEAD_BYTES:
            return self._feed_one_by_one(rows)  # one of them has no payload, not even an empty one
        pointers = [_pointer(value) if value[0] else 0 for _, value in rows] if self.with_pointers else None
        return self._give(items, pointers)

    def _feed_one_by_one(self, rows: Rows) -> bool:
        found = Found()
        for key, value in rows:
            position = key[-_POSITION_BYTES:]
            message_id = position + NO_PAYLOAD_PART
            try:
                row = decode_row(value)
                self._meet(message_id, row)
            except DamagedRow as damage:
                if not (self._give_found(found) and self._damage(message_id, damage)):
                    return False
                found = Found()
                continue
            expires_ms = expires_ms_of(position, row.ttl_s)
            if 0 < expires_ms < self.span.now_ms:
                self.expired += 1
                continue
            verdict = self._verdict(row.pointer)
            if verdict is Verdict.HOLD and self.held_by is None:
                if not self._give_found(found) or not self.hold(row.pointer or 0, message_id):
                    return False
                found = Found()
            self.passed = verdict is Verdict.SKIP
            if verdict is not Verdict.SKIP:
                found.add(message_id, row, row.pointer or 0, expires_ms)
        passed = self.passed
        go_on = self._give_found(found)
        self.passed = passed
        return go_on


def _pointers(values: Sequence[bytes]) -> set[int]:
    """The pointers of rows that have one, all cut out at once; anything, if one of them ends early."""
    heads = b"".join([value[1:_HEAD_BYTES] for value in values])
    return set(struct.unpack_from(f">{len(heads) // _POINTER.size}q", heads))


def _pointer(value: bytes) -> int:
    number: int = _POINTER.unpack_from(value, 1)[0]
    return number

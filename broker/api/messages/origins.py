"""Finds the request that a message was published in: its producer, its sequence id, its index in a batch.

Only the first row of a request has these. Rows of a request have consecutive positions, and the first row has their
number. So the requests of the messages shown are known from the first rows among them, and those of earlier messages
from one backward scan. Some rows have their index in the request, which gives the position of the first row: rows with
attributes or their own ttl, rows in a store that instances share, and rows written by version 0.1. Those take one read
of the store for each request.

A read that fails, or would take too long, leaves messages without an origin.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from broker.api.answers import off_loop
from plainsong.protocol.codec import JSON
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES, SEQUENCES_PER_MS, ordinal, position_at
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.rows import BATCH, HAS_EXTRAS, INDEX, Stamp, decode_row
from storage.base import StoreError, Unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.protocol.rows import MessageRow
    from storage.base import Row, Store

log = logging.getLogger(__name__)
#: Greater than all positions.
_NONE = b"\xff" * (POSITION_BYTES + 1)
#: Rows in the first chunk of a backward scan: usually one row shows that there is nothing to find.
_FIRST_ROWS = 4
#: Bounds of a backward scan, in rows and in their bytes.
MOST_PASSED = 1 << 17
MOST_PASSED_BYTES = 16 << 20


class Origin(NamedTuple):
    """The origin of a message; fields are None if the request had none, or its first row is gone."""

    producer: str | None = None
    sequence_id: int | None = None
    """Also None for a stored message: the ids of stores are not kept."""
    batch: tuple[int, int] | None = None
    """For an atomic batch: the message's index, and the number of messages."""


#: For messages without an origin.
NO_ORIGIN = Origin()


class _First(NamedTuple):
    """The first row of a request."""

    stamp: Stamp | None = None
    batch: int | None = None
    is_reference: bool = False
    """True if it refers to stored messages. The request's own messages follow; the sequence ids are theirs."""

    def origin(self, index: int) -> Origin:
        """Return the origin of the message in the row ``index``."""
        number = index - self.is_reference
        stamp = self.stamp
        if stamp is not None and (index >= stamp.rows or number >= len(stamp.ids)):
            stamp = None
        batch = (number, self.batch) if self.batch is not None and number < self.batch else None
        if stamp is None:
            return Origin(batch=batch)
        return Origin(stamp.producer, stamp.ids[number], batch)


class Origins:
    """Collects the rows of messages, and finds their origins."""

    def __init__(self) -> None:
        #: Message id → the row's index in its request, 0 for first rows; None if the row does not have it.
        self._indexes: dict[bytes, int | None] = {}
        #: Position (10 bytes) → the content of a first row; None if it is gone or has none.
        self._firsts: dict[bytes, _First | None] = {}
        #: The lowest position so far, and whether its row determines its request.
        self._lowest = b"\xff" * POSITION_BYTES
        self._lowest_says = True

    def meet(self, message_id: bytes, row: MessageRow, reference: MessageRow | None) -> None:
        """Add a visible message; ``reference``: the row that refers to it, if it was stored."""
        row = row if reference is None else reference
        position = message_id[:POSITION_BYTES]
        says, index = reference is not None, None
        if row.extras:
            try:
                index = _number_in(row, INDEX)
                first = None if index else self._firsts.get(position) or _first(row)
            except DamagedRow:
                first, says = None, True  # only the extras are damaged, not the message
            if first is not None:
                self._firsts[position], index = first, 0
        if position < self._lowest:
            self._lowest, self._lowest_says = position, says or index is not None
        if index is not None or not says:
            self._indexes[message_id] = index

    def forget(self, message_id: bytes) -> None:
        """Remove a message that is not shown after all."""
        self._indexes.pop(message_id, None)

    async def find(self, store: Store, prefix: bytes) -> dict[bytes, Origin]:
        """Return message id → origin, for all known origins."""
        await self._look_back(store, prefix)
        await self._look_up(store, prefix)
        firsts = sorted(position for position, first in self._firsts.items() if first is not None)
        found = {}
        for message_id, index in self._indexes.items():
            at = message_id[:POSITION_BYTES]
            if index is None:
                before = bisect_right(firsts, at)
                if not before:
                    continue
                position: bytes | None = firsts[before - 1]
                index = ordinal(at) - ordinal(firsts[before - 1])
            else:
                position = _position_before(at, index)
            first = None if position is None else self._firsts.get(position)
            if first is None:
                continue
            if first.is_reference and index == 0:
                found[message_id] = Origin(None if first.stamp is None else first.stamp.producer)
            else:
                found[message_id] = first.origin(index)
        return found

    async def _look_back(self, store: Store, prefix: bytes) -> None:
        """Find the first row of the request that the first messages may belong to, if it was not added."""
        unknown = [message_id[:POSITION_BYTES] for message_id, index in self._indexes.items() if index is None]
        if self._lowest_says or not unknown or min(self._firsts, default=_NONE) <= min(unknown):
            return
        look = _LookBack(ordinal(self._lowest))
        start, stop = prefix + bytes(POSITION_BYTES), prefix + self._lowest
        try:
            await store.scan(Table.MESSAGE, start, stop, look.feed, reverse=True, first_chunk=_FIRST_ROWS)
        except StoreError as error:
            _log_without(error)
            return
        if look.found is not None:
            self._firsts[look.position] = look.found

    async def _look_up(self, store: Store, prefix: bytes) -> None:
        """Read the first rows that indexes lead to, each once. A damaged one affects only its own request."""
        for message_id, index in self._indexes.items():
            position = None if index is None else _position_before(message_id[:POSITION_BYTES], index)
            if position is None or position in self._firsts:
                continue
            try:
                self._firsts[position] = await _looked_up(store, prefix + position)
            except Unreadable as error:
                self._firsts[position] = None
                _log_without(error)
            except StoreError as error:
                _log_without(error)
                return


class _LookBack:
    """A backward scan for the first row of a request."""

    def __init__(self, behind: int) -> None:
        """``behind``: the position before which the scan begins, as a number."""
        self._behind = behind
        self._rows, self._bytes = MOST_PASSED, MOST_PASSED_BYTES
        self.found: _First | None = None
        self.position = b""
        """Position of the row that was found."""

    def feed(self, rows: Sequence[Row]) -> bool:
        """Take rows in descending order; False: stop."""
        return all(map(self._passes, rows))

    def _passes(self, row: Row) -> bool:
        """True if the first row may be before this one."""
        position, value = row[0][-POSITION_BYTES:], row[1]
        at, behind = ordinal(position), self._behind
        if at + 1 != behind and at // SEQUENCES_PER_MS != behind // SEQUENCES_PER_MS:
            return False  # a request fills a millisecond before it continues in the next
        self._behind = at
        self._rows, self._bytes = self._rows - 1, self._bytes - len(value)
        if not value or not value[0] & HAS_EXTRAS:
            return self._rows > 0 and self._bytes > 0
        try:
            decoded = decode_row(value)
            if decoded.payload is not None and INDEX in decoded.extras:
                return False
            self.found, self.position = _first(decoded), position
        except DamagedRow:
            return False
        return self.found is None and self._rows > 0 and self._bytes > 0


def _log_without(error: StoreError) -> None:
    log.warning("messages are shown without their producers", extra={"why": str(error)})


async def _looked_up(store: Store, key: bytes) -> _First | None:
    value = await store.get(Table.MESSAGE, key)
    # A list of ids may be as long as the largest request.
    return None if value is None else await off_loop(len(value), JSON, partial(_read, value))


def _read(value: bytes) -> _First | None:
    try:
        return _first(decode_row(value))
    except DamagedRow:
        return None


def _first(row: MessageRow) -> _First | None:
    """Return the content of a first row; None if the row is not one. Raises DamagedRow."""
    is_reference = row.payload is None
    # In a reference the same key counts bytes.
    first = _First(Stamp.of(row), None if is_reference else _number_in(row, BATCH), is_reference)
    return None if first.stamp is None and first.batch is None else first


def _number_in(row: MessageRow, key: str) -> int | None:
    """Return a positive number among a row's extras; None if it is missing. Raises DamagedRow."""
    number = row.extras.get(key)
    if number is None:
        return None
    if type(number) is not int or number < 1:
        raise DamagedRow(f"a row's {key!r} is not a number above 0")
    return number


def _position_before(position: bytes, count: int) -> bytes | None:
    """Return the position ``count`` before; None if there is none.

    Positions of a request have no gaps: the last one of a millisecond is followed by the first of the next.
    """
    at = ordinal(position) - count
    return None if at < 0 else position_at(at)

"""Which request a message came with: its producer, its sequence id, its place in a batch.

Only the first row of a request says so; the others have their index in it, which leads back to the first. That one
is nearly always among the messages shown; if not, it is one look at the store, for each request once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from broker.handlers.publish import off_loop
from protocol.codec import JSON
from protocol.effects import Table
from protocol.keys import DamagedRow
from protocol.rows import BATCH, INDEX, Stamp, decode_row

if TYPE_CHECKING:
    from protocol.rows import MessageRow
    from storage.base import Store

_POSITION_BYTES = 10


class Origin(NamedTuple):
    """What is known of a message's request; None where there was none of it, or the first row is gone."""

    producer: str | None = None
    sequence_id: int | None = None
    """None too for a stored message: the ids of its stores are not kept."""
    batch: tuple[int, int] | None = None
    """Of an atomic batch: the message's index, and how many there are."""


#: Of messages without any.
NO_ORIGIN = Origin()


class _First(NamedTuple):
    """The first row of a request."""

    stamp: Stamp | None = None
    batch: int | None = None
    is_reference: bool = False
    """It stands for stored messages; the request's own follow, and theirs are the sequence ids."""

    def origin(self, index: int) -> Origin:
        """Of the message in the row ``index``."""
        number = index - self.is_reference
        stamp = self.stamp if self.stamp is not None and number < len(self.stamp.ids) else None
        batch = (number, self.batch) if self.batch is not None and number < self.batch else None
        if stamp is None:
            return Origin(batch=batch)
        return Origin(stamp.producer, stamp.ids[number], batch)


@dataclass(slots=True)
class Origins:
    """What the rows of some messages say of their requests."""

    #: Message id → the row's index in its request; 0 for first rows.
    _indexes: dict[bytes, int] = field(default_factory=dict)
    #: Position (10 bytes) → what stands in a first row; None: it is gone, or says nothing.
    _firsts: dict[bytes, _First | None] = field(default_factory=dict)

    def meet(self, message_id: bytes, row: MessageRow, reference: MessageRow | None) -> None:
        """A message is shown; ``reference``: the row that refers to it, when it was stored."""
        row = row if reference is None else reference
        if not row.extras:
            return
        position = message_id[:_POSITION_BYTES]
        try:
            index = _number_in(row, INDEX) or 0
            if not index and position not in self._firsts:
                self._firsts[position] = _first(row)
        except DamagedRow:
            return  # the message itself is whole
        if index or self._firsts[position] is not None:
            self._indexes[message_id] = index

    async def find(self, store: Store, prefix: bytes) -> dict[bytes, Origin]:
        """Message id → origin, of all that have one.

        Raises:
          StoreError: a first row could not be read.
        """
        found = {}
        for message_id, index in self._indexes.items():
            position = _position_before(message_id[:_POSITION_BYTES], index)
            if position is None:
                continue
            if position not in self._firsts:
                self._firsts[position] = await _looked_up(store, prefix + position)
            first = self._firsts[position]
            if first is None:
                continue
            if first.is_reference and index == 0:
                found[message_id] = Origin(None if first.stamp is None else first.stamp.producer)
            else:
                found[message_id] = first.origin(index)
        return found


async def _looked_up(store: Store, key: bytes) -> _First | None:
    value = await store.get(Table.MESSAGE, key)
    # A list of ids may be long: as many as one request may have messages.
    return None if value is None else await off_loop(len(value), JSON, partial(_read, value))


def _read(value: bytes) -> _First | None:
    try:
        return _first(decode_row(value))
    except DamagedRow:
        return None


def _first(row: MessageRow) -> _First | None:
    """What a row says, if it is a first one. Raises DamagedRow."""
    is_reference = row.payload is None
    # On a reference the same letter counts bytes.
    first = _First(Stamp.of(row), None if is_reference else _number_in(row, BATCH), is_reference)
    return None if first.stamp is None and first.batch is None else first


def _number_in(row: MessageRow, key: str) -> int | None:
    """A number from 1 on among a row's extras; None where there is none. Raises DamagedRow."""
    number = row.extras.get(key)
    if number is None:
        return None
    if type(number) is not int or number < 1:
        raise DamagedRow(f"a row's {key!r} is no number from 1 on")
    return number


def _position_before(position: bytes, count: int) -> bytes | None:
    """So many positions before; None: there are not so many.

    Those of a request have no holes, and the one after the last of a millisecond is the first of the next.
    """
    at = int.from_bytes(position, "big") - count
    return None if at < 0 else at.to_bytes(_POSITION_BYTES, "big")

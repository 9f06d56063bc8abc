"""Reading past damage: where the rows end that can be read, and where they begin again.

Only what is ``Unreadable`` is damage. A store that fails in another way, or is away, says nothing of its rows: that error
passes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES, topic_prefix
from storage.base import Unreadable, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from storage.base import Reads, Row

_TAIL_BYTES = {Table.MESSAGE: MESSAGE_TAIL_BYTES, Table.PAYLOAD: PAYLOAD_TAIL_BYTES}
#: Of a table whose keys have no fixed length.
_OTHER_TAIL_BYTES = 16


class Gap(NamedTuple):
    """A place where nothing can be read: ``[start, stop)`` of keys."""

    start: bytes
    stop: bytes
    why: str


async def read_around(
    store: Reads, table: Table, start: bytes, stop: bytes, end: bytes, take: Callable[[Sequence[Row]], object]
) -> list[Gap]:
    """Give all rows of ``[start, stop)`` that can be read to ``take``; the answer are the places that cannot be.

    Args:
      end: how far the end of the last such place is looked for, ``stop`` or beyond.
    Raises:
      StoreError: the store could not be read, for another reason than damage.
    """
    gaps: list[Gap] = []

    def taken(rows: Sequence[Row]) -> bool:
        nonlocal start
        take(rows)
        start = rows[-1][0] + b"\x00"
        return True

    while start < stop:
        try:
            await store.scan(table, start, stop, taken, first_chunk=100)
            break
        except Unreadable as error:
            start = await approach(store, table, start, stop, taken)
            if start >= stop:
                break  # what cannot be read comes behind the range
            good = await behind(store, table, start, end)
            gaps.append(Gap(start, end if good is None else good, error.detail))
            start = gaps[-1].stop
    return gaps


async def approach(
    store: Reads, table: Table, start: bytes, stop: bytes, look: Callable[[Sequence[Row]], object]
) -> bytes:
    """Read row by row up to the first that cannot be, since of a list that failed none came; where that is.

    Raises StoreError.
    """
    while True:
        try:
            rows = await read_rows(store, table, start, stop, limit=1)
        except Unreadable:
            return start
        if not rows:
            return start
        look(rows)
        start = rows[-1][0] + b"\x00"


async def behind(store: Reads, table: Table, bad: bytes, stop: bytes) -> bytes | None:
    """The first key behind a damaged block from which on rows can be read; None: there is none before ``stop``.

    It is looked for in steps that double, then by halves: one block, or many, cost a few dozen reads.
    Raises StoreError.
    """
    # Keys of the length that those of the table have: the one before the answer may then be the last that is unreadable.
    prefix = topic_prefix(bad) or stop
    tail_bytes = _TAIL_BYTES.get(table)
    width = max(len(bad), len(stop)) + _OTHER_TAIL_BYTES if tail_bytes is None else len(prefix) + tail_bytes
    low, end = _number(bad, width), _number(stop, width) + (len(stop) > width)
    step = 1
    while low + step < end and not await _can_read(store, table, _key(low + step, width), stop):
        step *= 2
    # Nothing is read from the end on, so what the last step went past is looked through like any other.
    bad_at, good_at = low + step // 2, min(low + step, end)
    while good_at - bad_at > 1:
        middle = (bad_at + good_at) // 2
        if await _can_read(store, table, _key(middle, width), stop):
            good_at = middle
        else:
            bad_at = middle
    return None if good_at == end else _key(good_at, width)


def last_before(table: Table, good: bytes) -> bytes:
    """The last key that may be unreadable before one from ``behind``."""
    if table not in _TAIL_BYTES and good.endswith(b"\x00"):
        return good[:-1]  # keys have any length: one that ends sooner stands before it
    return _key(_number(good, len(good)) - 1, len(good))


def shown_place(table: Table, key: bytes) -> str:
    """A place among messages as an id, which need not be a message's; any other in hex."""
    at = len(topic_prefix(key))
    if table is not Table.MESSAGE or not at:
        return key.hex()
    position = key[at + 4 : at + MESSAGE_TAIL_BYTES].ljust(MESSAGE_TAIL_BYTES - 4, b"\x00")
    behind = len(key) > at + MESSAGE_TAIL_BYTES
    return position.hex() + "0" * 19 + ("1" if behind else "0")


async def _can_read(store: Reads, table: Table, start: bytes, stop: bytes) -> bool:
    try:
        await read_rows(store, table, start, stop, limit=1)
    except Unreadable:
        return False
    return True


def _number(key: bytes, width: int) -> int:
    return int.from_bytes(key[:width].ljust(width, b"\x00"), "big")


def _key(number: int, width: int) -> bytes:
    return number.to_bytes(width, "big")

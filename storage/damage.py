"""Reading past damage: where the rows end that can be read, and where they begin again.

Only what is ``Unreadable`` is damage. A store that fails in another way, or is away, says nothing of its rows: that error
passes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES
from storage.base import Unreadable, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable

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
    store: Reads, table: Table, start: bytes, stop: bytes, end: bytes, take: Callable[[list[Row]], object]
) -> list[Gap]:
    """Give all rows of ``[start, stop)`` that can be read to ``take``; the answer are the places that cannot be.

    Args:
      end: how far the end of the last such place is looked for, ``stop`` or beyond.
    Raises:
      StoreError: the store could not be read, for another reason than damage.
    """
    gaps: list[Gap] = []

    def taken(rows: list[Row]) -> bool:
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
            good = await behind(store, table, start, end)
            gaps.append(Gap(start, end if good is None else good, error.detail))
            start = gaps[-1].stop
    return gaps


async def approach(store: Reads, table: Table, start: bytes, stop: bytes, look: Callable[[list[Row]], object]) -> bytes:
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
    tail_bytes = _TAIL_BYTES.get(table)
    width = max(len(bad), len(stop)) + _OTHER_TAIL_BYTES if tail_bytes is None else len(stop) + tail_bytes
    low, end = _number(bad, width), _number(stop, width)
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


def key_before(key: bytes) -> bytes:
    """The key before one from ``behind``, of the same length."""
    return _key(_number(key, len(key)) - 1, len(key))


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

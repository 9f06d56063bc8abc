"""Reads past damage: finds where readable rows end and where they begin again.

Only ``Unreadable`` counts as damage. Other errors of a store, such as being unreachable, say nothing about its rows:
they propagate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES, topic_prefix
from storage.base import Unreadable, read_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from storage.base import Reads, Row

#: Bytes after the topic in the keys of a table; keys of the metadata have no fixed length.
TAIL_BYTES = {Table.MESSAGE: MESSAGE_TAIL_BYTES, Table.PAYLOAD: PAYLOAD_TAIL_BYTES}
#: For a table whose keys have no fixed length.
_OTHER_TAIL_BYTES = 16


class Gap(NamedTuple):
    """A range of keys, ``[start, stop)``, in which nothing can be read."""

    start: bytes
    stop: bytes
    why: str


async def read_around(
    store: Reads, table: Table, start: bytes, stop: bytes, end: bytes, take: Callable[[Sequence[Row]], object]
) -> list[Gap]:
    """Pass the readable rows of ``[start, stop)`` to ``take``; return the unreadable gaps.

    Args:
      end: how far to search for the end of the last gap: ``stop`` or beyond.
    Raises:
      StoreError: the store could not be read, for a reason other than damage.
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
                break  # the damage is after the range
            good = await behind(store, table, start, end)
            gaps.append(Gap(start, end if good is None else good, error.detail))
            start = gaps[-1].stop
    return gaps


async def approach(
    store: Reads, table: Table, start: bytes, stop: bytes, look: Callable[[Sequence[Row]], object]
) -> bytes:
    """Read row by row, since a failed scan yields no rows. Returns the key where the unreadable part begins.

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
    """Return the first readable key after a damaged block; None if there is none before ``stop``.

    The search doubles its steps, then halves them: any number of blocks costs a few dozen reads. Raises StoreError.
    """
    # Search among keys of the table's own length, so that the key before the result may be the last unreadable one.
    prefix = topic_prefix(bad) or stop
    tail_bytes = TAIL_BYTES.get(table)
    width = max(len(bad), len(stop)) + _OTHER_TAIL_BYTES if tail_bytes is None else len(prefix) + tail_bytes
    low, end = _number(bad, width), _number(stop, width) + (len(stop) > width)
    step = 1
    while low + step < end and not await _can_read(store, table, _key(low + step, width), stop):
        step *= 2
    # The search never starts from the end, so rows that the last step skipped are also found.
    bad_at, good_at = low + step // 2, min(low + step, end)
    while good_at - bad_at > 1:
        middle = (bad_at + good_at) // 2
        if await _can_read(store, table, _key(middle, width), stop):
            good_at = middle
        else:
            bad_at = middle
    return None if good_at == end else _key(good_at, width)


def last_before(table: Table, good: bytes) -> bytes:
    """Return the last key before the result of ``behind`` that may be unreadable."""
    if table not in TAIL_BYTES and good.endswith(b"\x00"):
        return good[:-1]  # keys vary in length: the same key without its last zero byte precedes it
    return _key(_number(good, len(good)) - 1, len(good))


def shown_place(table: Table, key: bytes) -> str:
    """Return a key of the message table as a message id, which need not exist; any other key in hex."""
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

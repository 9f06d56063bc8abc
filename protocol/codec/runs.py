"""Consecutive numbers as Avro writes them, made without a step for each: what most lists of sequence ids are.

64 numbers that differ in their last six bits alone have all bytes but the first in common, so that joining the
first ones by the others writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.page import varint

if TYPE_CHECKING:
    from protocol.codec.cursor import Cursor

_BLOCK = 64
#: First bytes of the numbers of a block, where others follow.
_FIRST = [bytes([0x80 | number << 1]) for number in range(_BLOCK)]
#: Shorter lists are read number by number: recognising them would cost more.
_MIN_RUN = 8


def consecutive(first: int, count: int) -> bytes:
    """The varints of ``count`` numbers from ``first`` on, which is 0 or more."""
    out: list[bytes] = []
    number, stop = first, first + count
    while number < stop:
        end = min(stop, (number | _BLOCK - 1) + 1)
        low = number & _BLOCK - 1
        high = number >> 6
        if high:
            rest = _unsigned(high)
            out += (rest.join(_FIRST[low : low + end - number]), rest)
        else:
            out.append(bytes(range(number << 1, end << 1, 2)))
        number = end
    return b"".join(out)


def _unsigned(number: int) -> bytes:
    """A varint without a sign: that of half of it, when it is even."""
    return varint(number >> 1) if not number & 1 else bytes([varint(number >> 1)[0] | 1]) + varint(number >> 1)[1:]


def read_run(cursor: Cursor) -> range | None:
    """The array of longs that begins here, if its numbers are consecutive and in one block; else nothing is read.

    Raises MalformedBody for what is no array of longs, as reading it otherwise would.
    """
    begin, data = cursor.at, cursor.data
    count, stop = cursor.block()
    if count >= _MIN_RUN and stop is None:
        at = cursor.at
        first = cursor.long()
        # The numbers that follow are no shorter, so nothing is made that could not be there.
        if first >= 0 and first + count <= 1 << 63 and count * (cursor.at - at) <= len(data) - at:
            run = consecutive(first, count)
            end = at + len(run)
            if data.startswith(run, at) and data[end : end + 1] == b"\x00":
                cursor.take_room(count)
                cursor.at = end + 1
                return range(first, first + count)
    cursor.at = begin
    return None

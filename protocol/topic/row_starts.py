"""Where the payload starts in rows with extras, told without taking them apart.

Extras are stamps, indexes and attributes, and all but the last are of a few lengths only. So the bytes that begin
them (their length, the head of the map, its first key) recur from row to row, and what follows from them is
looked up: where the payload starts, and whether there may be attributes, alone or behind another key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgpack

from protocol.keys import DamagedRow
from protocol.rows import ATTRIBUTES, HAS_EXTRAS, HAS_POINTER, attributes_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

#: Where the bytes that begin the extras end, in a row without pointer: flags, length, map, key of one letter.
HEAD_STOP = 8
_POINTER_BYTES = 8
_POINTER_STOP = 1 + _POINTER_BYTES
_LENGTH_BYTES = 4
_EXTRAS_START = 1 + _LENGTH_BYTES
#: Where head and first key of the map stand in those bytes, and how a map of one key looks.
_MAP = slice(_LENGTH_BYTES, HEAD_STOP - 1)
_ONE_KEY = 0x81
_ONLY_ATTRIBUTES = bytes([_ONE_KEY]) + msgpack.packb(ATTRIBUTES)


class Starts(dict[bytes, int]):
    """The bytes that begin a row's extras → where its payload's length starts, in a row without pointer.

    For rows that have a payload and no time to live of their own. It grows by being asked.
    """

    __slots__ = ("with_attributes",)

    def __init__(self) -> None:
        super().__init__()
        #: The beginnings of rows that may have attributes.
        self.with_attributes: set[bytes] = set()

    def __missing__(self, head: bytes) -> int:
        start = self[head] = _EXTRAS_START + int.from_bytes(head[:_LENGTH_BYTES], "big")
        extras = head[_MAP]
        if extras == _ONLY_ATTRIBUTES or (extras and extras[0] > _ONE_KEY):
            self.with_attributes.add(head)
        return start

    def without_extras(self, value: bytes) -> bytes:
        """The same row without them."""
        flags = value[0]
        if not flags & HAS_EXTRAS:
            return value
        if not flags & HAS_POINTER:
            return b"\x00" + value[self[value[1:HEAD_STOP]] :]
        start = self[value[_POINTER_STOP : HEAD_STOP + _POINTER_BYTES]] + _POINTER_BYTES
        return b"\x01" + value[1:_POINTER_STOP] + value[start:]

    def attributes(self, rows: Sequence[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, Mapping[str, str]]]:
        """The key of each row that has attributes, and these. Raises DamagedRow."""
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
    """Those of packed extras. Raises DamagedRow."""
    try:
        extras = msgpack.unpackb(packed, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise DamagedRow(f"a row's extras are garbled: {packed[:24].hex()}…") from error
    return attributes_in(extras) or {}

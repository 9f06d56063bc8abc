"""Frames: the answer for bulk readers that needs no decoding to speak of, and its decoder.

    message    id:20  [pointer:i64]  size:u32  payload  [size:u32  attributes]     pointer with fields=pointer,
    end        ff × 20  count:u32                                                  attributes with version=2

Numbers are big-endian, the attributes a msgpack map of strings. No id is all ones, since no timestamp has
its sign bit set. This file needs the standard library alone: it also runs where nothing else is installed.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

FRAMES_TYPE = "application/vnd.plainsong.frames"
FRAMES_END = b"\xff" * 20
#: Attributes of a message that has none.
NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})

_SIZE = struct.Struct(">I")
_POINTER_AND_SIZE = struct.Struct(">qI")


class BrokenFrames(ValueError):
    """The body is cut off, or no frames: an error of the answer, never the end of the topic."""


class Frame(NamedTuple):
    """One message."""

    message_id: bytes
    payload: bytes
    pointer: int = 0
    """Its write pointer; 0 none (or not asked for), negative rolled back."""
    attributes: Mapping[str, str] = NO_ATTRIBUTES


def decode_frames(data: bytes, *, pointers: bool = False, attributes: bool = False) -> list[Frame]:
    """All messages of a whole body, in topic order.

    Args:
      pointers: the answer's type has ``fields=pointer``.
      attributes: the answer's type has ``version=2``.
    Raises:
      BrokenFrames: the end is missing, the count is another one, or bytes follow.
    """
    found: list[Frame] = []
    at = 0
    try:
        while (message_id := data[at : at + 20]) != FRAMES_END:
            pointer = 0
            named = NO_ATTRIBUTES
            if pointers:
                pointer, size = _POINTER_AND_SIZE.unpack_from(data, at + 20)
                start = at + 32
            else:
                (size,) = _SIZE.unpack_from(data, at + 20)
                start = at + 24
            at = start + size
            payload = data[start:at]
            if attributes:
                (size,) = _SIZE.unpack_from(data, at)
                start = at + 4
                at = start + size
                named = _attributes(data[start:at]) if size > 1 else NO_ATTRIBUTES
            found.append(Frame(message_id, payload, pointer, named))
        (count,) = _SIZE.unpack_from(data, at + 20)
    except struct.error:
        raise BrokenFrames(f"cut off: {len(data)} bytes hold {len(found)} messages and no end") from None
    if count != len(found) or at + 24 != len(data):
        raise BrokenFrames(f"the end at byte {at} counts {count} messages, {len(found)} came before it")
    return found


def _attributes(packed: bytes) -> dict[str, str]:
    """A msgpack map of strings."""
    try:
        count, at = _head(packed, 0, fixed=0x80, fixed_mask=0x0F, sized={0xDE: 2, 0xDF: 4})
        found: dict[str, str] = {}
        for _ in range(count):
            key, at = _string(packed, at)
            found[key], at = _string(packed, at)
    except (IndexError, UnicodeDecodeError):
        raise BrokenFrames("attributes that are no map of strings") from None
    if at != len(packed):
        raise BrokenFrames(f"{len(packed) - at} bytes after the attributes of a message")
    return found


def _string(packed: bytes, at: int) -> tuple[str, int]:
    size, at = _head(packed, at, fixed=0xA0, fixed_mask=0x1F, sized={0xD9: 1, 0xDA: 2, 0xDB: 4})
    stop = at + size
    if stop > len(packed):
        raise IndexError
    return packed[at:stop].decode(), stop


def _head(packed: bytes, at: int, *, fixed: int, fixed_mask: int, sized: Mapping[int, int]) -> tuple[int, int]:
    """The number in a msgpack head, and where its content starts."""
    first = packed[at]
    if first & ~fixed_mask == fixed:
        return first & fixed_mask, at + 1
    width = sized.get(first)
    if width is None or at + 1 + width > len(packed):
        raise IndexError
    return int.from_bytes(packed[at + 1 : at + 1 + width], "big"), at + 1 + width

"""Frames: the encoding of answers for bulk readers, which costs next to nothing to decode, and its decoder.

    message    id:20  [pointer:i64]  size:u32  payload  [size:u32  attributes]     pointer with fields=pointer,
    end        ff × 20  count:u32                                                  attributes with version=2

Numbers are big-endian, the attributes a msgpack map of strings. No id is all ones, since no timestamp has
its sign bit set. This file needs only the standard library: Spark's executors import it without anything else.
"""

from __future__ import annotations

import struct
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

T = TypeVar("T")
FRAMES_TYPE = "application/vnd.plainsong.frames"
FRAMES_END = b"\xff" * 20
#: Attributes of a message that has none.
NO_ATTRIBUTES: Mapping[str, str] = MappingProxyType({})
#: The length and the bytes of an empty msgpack map.
NO_ATTRIBUTES_PACKED = b"\x00\x00\x00\x01\x80"
_SIZE = struct.Struct(">I")
_END_BYTES = 24
#: Shorter bodies are decoded message by message: checking for equal lengths would cost more.
_MIN_ALIKE_BYTES = 512
_POINTER_AND_SIZE = struct.Struct(">qI")


class BrokenFrames(ValueError):
    """The body is truncated or has the wrong format: an error of the answer, never the end of the topic."""


class Frame(NamedTuple):
    """One message."""

    message_id: bytes
    payload: bytes
    pointer: int = 0
    """Its write pointer; 0: none (or not requested), negative: rolled back."""
    attributes: Mapping[str, str] = NO_ATTRIBUTES


@overload
def decode_frames(data: bytes, *, pointers: bool = False, attributes: bool = False) -> list[Frame]: ...


@overload
def decode_frames(
    data: bytes, make: Callable[..., T], *, pointers: bool = False, attributes: bool = False
) -> list[T]: ...


def decode_frames(
    data: bytes, make: Callable[..., Any] = Frame, *, pointers: bool = False, attributes: bool = False
) -> list[Any]:
    """Return all messages of a complete body, in topic order.

    Args:
      make: called with the fields of a ``Frame``; the last two are left out where they have their defaults.
      pointers: the answer's type has ``fields=pointer``.
      attributes: the answer's type has ``version=2``.
    Raises:
      BrokenFrames: the end is missing, the count differs, or bytes follow.
    """
    alike = None if pointers else _messages_alike(data, NO_ATTRIBUTES_PACKED if attributes else b"")
    if alike is not None:
        return [make(message_id, payload) for message_id, payload in alike]
    found: list[Any] = []
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
                named = decode_attributes(data[start:at]) if size > 1 else NO_ATTRIBUTES
            found.append(make(message_id, payload, pointer, named))
        (count,) = _SIZE.unpack_from(data, at + 20)
    except struct.error:
        raise BrokenFrames(f"cut off: {len(data)} bytes hold {len(found)} messages and no end") from None
    if count != len(found) or at + 24 != len(data):
        raise BrokenFrames(f"the end at byte {at} counts {count} messages, but {len(found)} precede it")
    return found


def _messages_alike(data: bytes, tail: bytes) -> Iterable[tuple[bytes, bytes]] | None:
    """Return ids and payloads of a body whose messages all have the same length; None for any other body.

    Such a body is sliced like a table, twice as fast as decoding it message by message.
    """
    body_size = len(data) - _END_BYTES
    if body_size < _MIN_ALIKE_BYTES:
        return None
    size = _SIZE.unpack_from(data, 20)[0]
    count, rest = divmod(body_size, 24 + size + len(tail))
    if rest or data[body_size:] != FRAMES_END + _SIZE.pack(count):
        return None
    stride = 24 + size + len(tail)
    same = [*enumerate(data[20:24], 20), *enumerate(tail, 24 + size)]
    if any(data[column:body_size:stride] != bytes([value]) * count for column, value in same):
        return None
    if data.find(FRAMES_END, 0, body_size) >= 0 and any(
        data[at : at + 20] == FRAMES_END for at in range(0, body_size, stride)
    ):
        return None
    return cast(
        "Iterable[tuple[bytes, bytes]]", struct.iter_unpack(f">20s4x{size}s{len(tail)}x", memoryview(data)[:body_size])
    )


def decode_attributes(packed: bytes) -> dict[str, str]:
    """Decode a msgpack map of strings. Raises BrokenFrames."""
    try:
        count, at = _head(packed, 0, fixed=0x80, fixed_mask=0x0F, sized={0xDE: 2, 0xDF: 4})
        found: dict[str, str] = {}
        for _ in range(count):
            key, at = _string(packed, at)
            found[key], at = _string(packed, at)
    except (IndexError, UnicodeDecodeError):
        raise BrokenFrames("attributes that are not a map of strings") from None
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

"""Thrift's binary protocol, read strictly, and its framed transport.

The bytes come from untrusted clients. Every count is checked against the remaining bytes before anything is allocated,
every type must be one of the format's, containers nest no deeper than ``MAX_DEPTH``, and fields and skipped items are
bounded; so a few megabytes of empty structs do not cost seconds. Numbers are big-endian. A struct consists of its fields,
each ``type:u8 id:i16 value``, and a zero byte.
"""

from __future__ import annotations

from struct import Struct, pack, unpack_from
from struct import error as StructError  # noqa: N812  # a class

STOP, BOOL, BYTE, DOUBLE, I16, I32, I64, STRING, STRUCT, MAP, SET, LIST = 0, 2, 3, 4, 6, 8, 10, 11, 12, 13, 14, 15
#: How deep containers may nest; Tephra's own nest three deep.
MAX_DEPTH = 32
#: The maximum number of fields, and of items skipped one by one. Lists of numbers are read and skipped in one step.
MAX_VALUES = 10_000
#: The maximum number of byte strings in one list.
MAX_BINARIES = 200_000
_SIZES = {BOOL: 1, BYTE: 1, DOUBLE: 8, I16: 2, I32: 4, I64: 8}
#: The smallest size of a value of each type, in bytes, to check the count of a container against the remaining bytes.
_LEAST = {**_SIZES, STRING: 4, STRUCT: 1, MAP: 6, SET: 5, LIST: 5}
_I32, _I64, _FIELD = Struct(">i"), Struct(">q"), Struct(">Bh")
_STOP = bytes([STOP])


class MalformedThrift(ValueError):
    """The bytes violate the format; the text says where."""


class ThriftReader:
    """A cursor; every method reads one value and advances past it, or raises ``MalformedThrift``."""

    __slots__ = ("_room", "at", "data")

    def __init__(self, data: bytes, at: int = 0, *, room: int = MAX_VALUES) -> None:
        self.data = data
        self.at = at
        self._room = room

    def field(self) -> tuple[int, int] | None:
        """Return ``(type, id)`` of the next field of a struct; None after the last."""
        self._room -= 1
        if self._room < 0:
            raise self._too_many()
        at = self.at
        if self.data[at : at + 1] == _STOP:
            self.at = at + 1
            return None
        try:
            found: tuple[int, int] = _FIELD.unpack_from(self.data, at)
        except StructError:
            raise self._cut_off(_FIELD.size) from None
        self.at = at + _FIELD.size
        return found

    def i32(self) -> int:
        try:
            number: int = _I32.unpack_from(self.data, self.at)[0]
        except StructError:
            raise self._cut_off(4) from None
        self.at += 4
        return number

    def i64(self) -> int:
        try:
            number: int = _I64.unpack_from(self.data, self.at)[0]
        except StructError:
            raise self._cut_off(8) from None
        self.at += 8
        return number

    def octets(self) -> bytes:
        """A length and as many bytes: a string, or a binary."""
        size = self.i32()
        start, stop = self.at, self.at + size
        if not start <= stop <= len(self.data):
            raise self._cut_off(size)
        self.at = stop
        return self.data[start:stop]

    def text(self) -> str:
        at = self.at
        try:
            return self.octets().decode()
        except UnicodeDecodeError:
            raise MalformedThrift(f"invalid UTF-8 at byte {at}") from None

    def boolean(self) -> bool:
        """One byte; 1 is true."""
        return self._byte() == 1

    def longs(self) -> tuple[int, ...]:
        """A list or set of 64-bit numbers, in order."""
        at = self.at
        kind, count = self._byte(), self.i32()
        if kind != I64 and count:
            raise MalformedThrift(f"a list of type {kind}, where numbers of 64 bits are expected, at byte {at}")
        start = self._take(8, count)
        return unpack_from(f">{count}q", self.data, start)

    def binaries(self) -> tuple[bytes, ...]:
        """A list or set of byte strings, in order; at most ``MAX_BINARIES``."""
        at = self.at
        kind, count = self._byte(), self.i32()
        if kind != STRING and count:
            raise MalformedThrift(f"a set of type {kind}, where byte strings are expected, at byte {at}")
        if count > MAX_BINARIES:
            raise MalformedThrift(f"{count} byte strings, more than {MAX_BINARIES}, at byte {at}")
        self.at = self._take(4, count)
        return tuple(self.octets() for _ in range(count))

    def skip(self, kind: int, depth: int = 1) -> None:
        """Skip a value of a type."""
        size = _SIZES.get(kind)
        if size is not None:
            self._take(size)
        elif kind == STRING:
            self._take(self.i32())
        elif depth > MAX_DEPTH:
            raise MalformedThrift(f"containers nest more than {MAX_DEPTH} deep at byte {self.at}")
        elif kind == STRUCT:
            while (field := self.field()) is not None:
                self.skip(field[0], depth + 1)
        elif kind in (LIST, SET):
            self._skip_items((self._byte(),), depth)
        elif kind == MAP:
            self._skip_items((self._byte(), self._byte()), depth)
        else:
            raise MalformedThrift(f"type {kind} before byte {self.at}")

    def _skip_items(self, kinds: tuple[int, ...], depth: int) -> None:
        count = self.i32()
        if not count:
            return
        least = 0
        for kind in kinds:
            if kind not in _LEAST:
                raise MalformedThrift(f"items of type {kind} before byte {self.at}")
            least += _LEAST[kind]
        start = self._take(least, count)
        if all(kind in _SIZES for kind in kinds):
            return
        self.at = start
        self._room -= count
        if self._room < 0:
            raise self._too_many()
        for _ in range(count):
            for kind in kinds:
                self.skip(kind, depth + 1)

    def _too_many(self) -> MalformedThrift:
        return MalformedThrift(f"more values than are accepted, at byte {self.at}")

    def _cut_off(self, size: int) -> MalformedThrift:
        left = len(self.data) - self.at
        return MalformedThrift(f"{size} bytes are expected at byte {self.at}, where {left} are left")

    def _byte(self) -> int:
        return self.data[self._take(1)]

    def _take(self, size: int, count: int = 1) -> int:
        """Skip ``count`` values of ``size`` bytes; return where they start."""
        start = self.at
        stop = start + count * size
        if not start <= stop <= len(self.data):
            raise self._cut_off(count * size)
        self.at = stop
        return start


# --- framed transport: a length of 32 bits, then as many bytes -------------------------------------


#: The largest frame, as in Tephra's server.
MAX_FRAME_BYTES = 16 << 20
_HEAD_BYTES = 4


class ThriftFrameTooLarge(ValueError):
    """A frame announces a length that is not accepted: the connection has to end."""


def framed(message: bytes) -> bytes:
    """A message, preceded by its length."""
    return pack(">i", len(message)) + message


class ThriftFrames:
    """Splits the bytes of one connection into messages; buffers at most ``max_bytes`` and the last piece."""

    __slots__ = ("_buffer", "_max_bytes")

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._max_bytes = max_bytes

    @property
    def is_empty(self) -> bool:
        """True if there is no part of a message."""
        return not self._buffer

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._buffer += data

    def take(self) -> bytes | None:
        """The next complete message; None: more bytes are needed.

        Raises:
          ThriftFrameTooLarge: its length is not positive, or over the bound; nothing was allocated for it.
        """
        if len(self._buffer) < _HEAD_BYTES:
            return None
        size: int = _I32.unpack_from(self._buffer)[0]
        if not 0 < size <= self._max_bytes:
            raise ThriftFrameTooLarge(f"a frame of {size} bytes, where 1 to {self._max_bytes} are accepted")
        stop = _HEAD_BYTES + size
        if len(self._buffer) < stop:
            return None
        message = bytes(self._buffer[_HEAD_BYTES:stop])
        del self._buffer[:stop]
        return message

"""Objects of a backup: rows in key order between two bounds, in one encoding, named by its hash.

    object   key length:u32  key  value length:u32  value  …      named by its SHA-256, stored as one zlib stream

Two backups share an object if its rows are the same, so bounds must not depend on earlier backups. They are fixed
points in the space of keys: an object spans the largest aligned window (of a power of two) whose rows fit. Rows that
are added, removed or rolled back change the object of their own window, and neighbouring ones only if windows join or
split.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from plainsong.protocol.errors import StorageFailed
from plainsong.protocol.ids import POSITION_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from storage.base import Row

_LENGTH = struct.Struct(">I")
#: The largest object, unless it is a single row.
MAX_OBJECT_BYTES = 16 << 20
#: The maximum number of bytes of rows in a window. Smaller objects mean more files; larger ones mean more to send when
#: a row changes.
WINDOW_BYTES = 4 << 20
#: The best level for a busy machine: level 2 takes twice the time and saves 5 % of the space.
_LEVEL = 1
#: The time in the key of a message or stored payload.
_TIME = slice(-10, -2)


class DamagedObject(StorageFailed):
    """The bytes of an object do not match its name."""

    title = "An object of a backup is damaged"


def encode_row(row: Row) -> bytes:
    """Encode a row for an object."""
    key, value = row
    return b"".join((_LENGTH.pack(len(key)), key, _LENGTH.pack(len(value)), value))


def decode_rows(data: bytes) -> list[Row]:
    """Decode the rows of an object. Raises DamagedObject."""
    rows: list[Row] = []
    at, end = 0, len(data)
    try:
        while at < end:
            (size,) = _LENGTH.unpack_from(data, at)
            key = data[at + 4 : at + 4 + size]
            at += 4 + size
            (size,) = _LENGTH.unpack_from(data, at)
            rows.append((key, data[at + 4 : at + 4 + size]))
            at += 4 + size
    except struct.error:
        at = -1
    if at != end:
        raise DamagedObject("an object ends within a row")
    return rows


def name_of(data: bytes) -> str:
    """Return the name of an object: the SHA-256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def compress(data: bytes) -> bytes:
    """Compress an object for its file."""
    return zlib.compress(data, _LEVEL)


def decompress(kept: bytes, name: str) -> bytes:
    """Decompress and check the object ``name``.

    Some bits of a compressed stream carry no information, so a flip of one of them goes undetected here; the manifest's
    digest detects it.

    Raises DamagedObject.
    """
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(kept)
    except zlib.error as error:
        raise DamagedObject(f"object {name} cannot be decompressed: {error}") from error
    if not inflating.eof or inflating.unused_data or name_of(data) != name:
        raise DamagedObject(f"object {name} has bytes that do not match its name")
    return data


# --- windows ---------------------------------------------------------------------------------------


class WindowedRows:
    """Splits the rows under one prefix into windows: ``feed`` them in key order, then take ``windows``.

    Args:
      prefix: common prefix of all keys; the rest of a key is a number of ``tail_bytes``.
      floor: lower bound of the first window: the end of the previous one.
      largest_bits: a window spans at most ``2**largest_bits`` numbers.
    """

    def __init__(self, prefix: bytes, tail_bytes: int, largest_bits: int, floor: int = 0) -> None:
        self._prefix = prefix
        self._tail_bytes = tail_bytes
        self._largest_bits = largest_bits
        self.floor = floor
        self._keys: list[bytes] = []
        self._rows: list[bytes] = []
        self._ends: list[int] = []
        """End of each row, in bytes from the first row ever fed."""
        self._begin = 0
        """Start of the first of these rows, in the same bytes."""
        self._end = 0

    def feed(self, rows: Iterable[Row]) -> None:
        """Add rows. May be called in any thread, but not concurrently."""
        for row in rows:
            encoded = encode_row(row)
            self._keys.append(row[0])
            self._rows.append(encoded)
            self._end += len(encoded)
            self._ends.append(self._end)

    @property
    def is_due(self) -> bool:
        """True if the next window is final, whatever rows follow: a row after those that fit bounds it."""
        return len(self._keys) > 1 and self._end - self._begin > WINDOW_BYTES

    def windows(self, *, complete: bool) -> Iterator[Window]:
        """Yield the windows that no further row can change; all of them if ``complete``, that is, if no row follows."""
        while self._keys and (self.is_due or complete):
            yield self._next()

    def _next(self) -> Window:
        fitting = bisect_right(self._ends, self._begin + WINDOW_BYTES) or 1
        first = self._tail(self._keys[0])
        bits = self._largest_bits
        if fitting < len(self._keys):
            # The largest window that contains the first row, but not the first row that does not fit.
            bits = min(bits, (first ^ self._tail(self._keys[fitting])).bit_length() - 1)
        while (begin := first >> bits << bits) < self.floor:
            bits -= 1
        end = begin + (1 << bits)
        count = len(self._keys)
        if end < 1 << 8 * self._tail_bytes:
            count = bisect_left(self._keys, self._prefix + end.to_bytes(self._tail_bytes, "big"))
        data = b"".join(self._rows[:count])
        window = Window(self._keys[0], self._keys[count - 1], count, data, self._times_ms(count))
        self._begin = self._ends[count - 1]
        del self._keys[:count], self._rows[:count], self._ends[:count]
        self.floor = end
        return window

    def _times_ms(self, count: int) -> tuple[int, int]:
        """Return the first and last time in the first ``count`` keys. Positions ascend with time; other keys do not."""
        keys = (self._keys[0], self._keys[count - 1]) if self._tail_bytes == POSITION_BYTES else self._keys[:count]
        times = [key[_TIME] for key in keys]
        return int.from_bytes(min(times), "big"), int.from_bytes(max(times), "big")

    def _tail(self, key: bytes) -> int:
        return int.from_bytes(key[len(self._prefix) :], "big")


class Window:
    """The rows of an object."""

    __slots__ = ("count", "data", "first", "last", "times_ms")

    def __init__(
        self, first: bytes, last: bytes, count: int, data: bytes, times_ms: tuple[int, int] | tuple[None, None]
    ) -> None:
        self.first = first
        self.last = last
        self.count = count
        self.data = data
        #: The first and the last publish or store time; None for metadata.
        self.times_ms = times_ms


def keyed_windows(rows: Iterable[Row]) -> Iterator[Window]:
    """Yield objects of metadata rows, whose keys are not numbers. The hash of a key decides if one begins there."""
    held: list[bytes] = []
    first = last = b""
    size = 0
    for row in rows:
        encoded = encode_row(row)
        full = size + len(encoded) > WINDOW_BYTES
        if held and (full or (size >= WINDOW_BYTES // 4 and zlib.crc32(row[0]) % 1024 == 0)):
            yield Window(first, last, len(held), b"".join(held), (None, None))
            held, size = [], 0
        first, last = first if held else row[0], row[0]
        held.append(encoded)
        size += len(encoded)
    if held:
        yield Window(first, last, len(held), b"".join(held), (None, None))

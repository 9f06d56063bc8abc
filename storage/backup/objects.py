"""Objects of a backup: rows in key order between two bounds, in one encoding, named by the hash of it.

    object   key length:u32  key  value length:u32  value  …      named by its SHA-256, kept as one zlib stream

Two backups share an object when its rows are the same, so bounds must not depend on what was backed up before. They are
fixed points on the line of keys: an object spans the largest aligned window (of a power of two) whose rows fit. Rows
that come, go or are rolled back change the object of their own window, and those of its neighbours only where windows
join or part.
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
#: No object is larger, but one of a single row that is.
MAX_OBJECT_BYTES = 16 << 20
#: Rows of a window that fits. Smaller objects are more files; larger ones are more to send again when a row changes.
WINDOW_BYTES = 4 << 20
#: The best that fits a busy machine: a level more costs twice the time for a twentieth of the space.
_LEVEL = 1
#: Where a key of a message or a stored payload has its time.
_TIME = slice(-10, -2)


class DamagedObject(StorageFailed):
    """The bytes of an object are not those that its name says."""

    title = "An object of a backup is damaged"


def encode_row(row: Row) -> bytes:
    """One row as it stands in an object."""
    key, value = row
    return b"".join((_LENGTH.pack(len(key)), key, _LENGTH.pack(len(value)), value))


def decode_rows(data: bytes) -> list[Row]:
    """The rows of an object. Raises DamagedObject."""
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
    """The name of an object: the SHA-256 of its bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def compress(data: bytes) -> bytes:
    """An object as it is kept."""
    return zlib.compress(data, _LEVEL)


def decompress(kept: bytes, name: str) -> bytes:
    """The bytes of the object ``name``, checked.

    A few bits of a compressed stream say nothing, so this does not tell every flip; the digest in a manifest does.

    Raises DamagedObject.
    """
    inflating = zlib.decompressobj()
    try:
        data = inflating.decompress(kept)
    except zlib.error as error:
        raise DamagedObject(f"object {name} cannot be decompressed: {error}") from error
    if not inflating.eof or inflating.unused_data or name_of(data) != name:
        raise DamagedObject(f"object {name} has other bytes than its name says")
    return data


# --- windows ---------------------------------------------------------------------------------------


class WindowedRows:
    """Parts the rows under one prefix into windows: ``feed`` them in key order, then take ``windows``.

    Args:
      prefix: what all keys begin with; the rest of a key has ``tail_bytes``, and is a number.
      floor: where the first window may begin: the end of the one before it.
      largest_bits: a window spans at most two to the power of this.
    """

    def __init__(self, prefix: bytes, tail_bytes: int, largest_bits: int, floor: int = 0) -> None:
        self._prefix = prefix
        self._tail_bytes = tail_bytes
        self._largest_bits = largest_bits
        self.floor = floor
        self._keys: list[bytes] = []
        self._rows: list[bytes] = []
        self._ends: list[int] = []
        """Where each row ends, in bytes from the first row that was ever taken."""
        self._begin = 0
        """Where the first of these rows begins."""
        self._end = 0

    def feed(self, rows: Iterable[Row]) -> None:
        """Take more rows. For any thread, one at a time."""
        for row in rows:
            encoded = encode_row(row)
            self._keys.append(row[0])
            self._rows.append(encoded)
            self._end += len(encoded)
            self._ends.append(self._end)

    @property
    def is_due(self) -> bool:
        """Whether a window is certain, whatever rows follow."""
        return self._end - self._begin > WINDOW_BYTES

    def windows(self, *, complete: bool) -> Iterator[Window]:
        """The windows that are certain; with ``complete`` all of them, since no row follows."""
        while self._keys and (self.is_due or complete):
            yield self._next()

    def _next(self) -> Window:
        fitting = bisect_right(self._ends, self._begin + WINDOW_BYTES) or 1
        first = self._tail(self._keys[0])
        bits = self._largest_bits
        if fitting < len(self._keys):
            # The largest window that has the first row and not the one that is too much.
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
        """The first and the last time in the first ``count`` keys; where a key is a position, they rise with it."""
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
        #: The first and the last publish time, or time of a store; none of metadata.
        self.times_ms = times_ms


def keyed_windows(rows: Iterable[Row]) -> Iterator[Window]:
    """Rows of metadata, whose keys are no numbers, as objects; they end at keys that their own hash chooses."""
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

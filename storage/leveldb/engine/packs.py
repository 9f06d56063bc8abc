"""Packs: many small messages of one request as one row of LevelDB.

A row costs LevelDB the same whether it has a hundred bytes or a thousand: a `put`, an entry in its memory, one in a
table. A request of a thousand messages of 100 B takes half the processor time if it is stored as four packs. Higher
layers do not see packs: a volume is read and written row by row; ``ranges`` takes packs apart, and ``row_edits``
changes rows in them.

    pack    key of its LAST row   90  tail:u8  rows:u16  length:u32  [length:u32 of each]  [tail of each key]  values

    tail    number of bytes at the end of the keys that differ; the bytes before them are those of the pack's key
    length  size of every value; ff ff ff ff: sizes differ, and are listed

A pack has the key of its last row, so that a seek to a row finds its pack. No other row of the table is between the
first and the last row of a pack: rows are packed only if they come after all others of their topic, and a change of a
row inside writes the whole pack again, in the same batch. The first byte of a message's own value is never 90, because
of its bit 80 (``plainsong.protocol.rows``); a value that begins with 90 anyway is stored as a pack of one.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left, bisect_right
from itertools import accumulate, groupby, islice, pairwise, repeat
from operator import lt
from typing import TYPE_CHECKING, Any

import plyvel

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import MESSAGE_TAIL_BYTES, topic_prefix
from plainsong.protocol.page import ITEM_START, cut_rows
from plainsong.protocol.rows import HAS_TTL, PLAIN, PLAIN_GAP, PLAIN_OVERHEAD_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from storage.base import Row

#: The first byte of a pack.
MARK = b"\x90"
#: The table that has packs. Payloads arrive late, and not in the order of their keys.
PACKED_TABLE = Table.MESSAGE
#: A pack has between this and twice this size, unless the request is smaller. Each is then a separate block in
#: LevelDB's tables, whose bytes are read together, and lost together if one of them is damaged.
PACK_BYTES = 16 << 10
#: Fewer rows than this are not packed: writing a pack of sixteen takes as long as writing the rows, and reading it
#: takes twice as long.
MIN_ROWS = 32
#: Nor are rows that are larger on average, because the cost of a row is small compared with its bytes.
MAX_MEAN_BYTES = 1 << 10
#: Nor are rows if one of them is larger: readers of its neighbours would have to read it too.
MAX_VALUE_BYTES = PACK_BYTES // 2
_HEAD = struct.Struct(">BBHI")
_LENGTH_BYTES = 4
_LENGTHS_DIFFER = (1 << 32) - 1
#: With at most this many rows of another length, packs of equal row counts have almost equal sizes.
_FEW_OTHERS = 1
#: Keys with a longer tail are not packed, since the tail's length has one byte.
_MAX_TAIL_BYTES = 255
_HAS_TTL = bytes([HAS_TTL])
#: Plain rows (a payload and nothing else) by their first bytes; a run is used if it is long enough to save work.
_PLAIN_RUN = re.compile(b"%b{8,}" % re.escape(bytes([PLAIN])))


# --- making ----------------------------------------------------------------------------------------


def are_many(values: Sequence[bytes]) -> bool:
    """True if there are enough rows to pack."""
    return len(values) >= MIN_ROWS


def packs_of(
    prefix: bytes, suffixes: Sequence[bytes], values: Sequence[bytes], *, may_expire: bool = True
) -> list[Row] | None:
    """Return the packs of rows ``prefix + suffix``, in key order; None if the rows are not to be packed.

    Args:
      may_expire: True if messages may have their own times to live.
    """
    if not are_many(values) or len(suffixes) != len(values):
        return None
    lengths = list(map(len, values))
    if sum(lengths) > MAX_MEAN_BYTES * len(lengths) or max(lengths) > MAX_VALUE_BYTES:
        return None
    if may_expire and _any_has_ttl(values):
        # Such rows are removed one by one as they expire, and each time the pack would be written again.
        return None
    width = len(suffixes[0])
    if width > _MAX_TAIL_BYTES or set(map(len, suffixes)) != {width} or not _ascend(suffixes):
        return None
    return list(split(prefix, suffixes, values, lengths))


def _any_has_ttl(values: Sequence[bytes]) -> bool:
    """True if a message has its own time to live."""
    high = max(values)
    if high < _HAS_TTL:
        return False
    if min(values)[:1] == high[:1]:  # they all begin alike, as in one transaction
        return bool(high[0] & HAS_TTL)
    return any(value[:1] >= _HAS_TTL and value[0] & HAS_TTL for value in values)


def _ascend(values: Sequence[Any]) -> bool:
    return all(map(lt, values, islice(values, 1, None)))


def split(prefix: bytes, suffixes: Sequence[bytes], values: Sequence[bytes], lengths: Sequence[int]) -> Iterator[Row]:
    """Yield the packs of rows ``prefix + suffix``, of about the same size; all suffixes have one length."""
    rows = len(lengths)
    total = sum(lengths) + _LENGTH_BYTES * rows
    count = min(total // PACK_BYTES, rows)
    if count <= 1:
        ends: Iterable[int] = (rows,)
    elif rows - lengths.count(lengths[-1]) <= _FEW_OTHERS:  # such as the first row of a producer's request
        ends = [rows * part // count for part in range(1, count + 1)]
    else:
        sums = list(accumulate(lengths))
        # A set, because one row may be larger than a part.
        ends = sorted({_first_beyond(sums, total * part // count) + 1 for part in range(1, count + 1)})
    start = 0
    for stop in ends:
        yield _pack(prefix, suffixes[start:stop], values[start:stop], lengths[start:stop])
        start = stop


def _first_beyond(sums: Sequence[int], size: int) -> int:
    """Return the index of the row at which rows and lengths reach ``size``; ``sums`` has those of the rows alone."""
    found: int = bisect_left(range(len(sums)), size, key=lambda index: sums[index] + _LENGTH_BYTES * (index + 1))
    return found


def _pack(prefix: bytes, suffixes: Sequence[bytes], values: Sequence[bytes], lengths: Sequence[int]) -> Row:
    width, length = len(suffixes[0]), lengths[0]
    shared = 0 if len(suffixes) > 1 else width
    while shared < width and suffixes[0][shared] == suffixes[-1][shared]:
        shared += 1
    # The prefix that the first and the last of ascending keys share is common to all.
    tail = width - shared
    joined, tails = b"".join(suffixes), bytearray(tail * len(suffixes))
    for column in range(tail):
        tails[column::tail] = joined[shared + column :: width]
    if lengths.count(length) == len(lengths):
        head = _HEAD.pack(MARK[0], tail, len(lengths), length)
    else:
        head = _HEAD.pack(MARK[0], tail, len(lengths), _LENGTHS_DIFFER) + struct.pack(f">{len(lengths)}I", *lengths)
    return prefix + suffixes[-1], b"".join((head, tails, *values))


def stored(value: bytes) -> bytes:
    """Return the value that LevelDB stores for an unpacked row."""
    return _HEAD.pack(MARK[0], 0, 1, len(value)) + value if value[:1] == MARK else value


def is_of_topic(key: bytes) -> bool:
    """True if a key is that of a topic's message. Only these are packed."""
    return len(key) == len(topic_prefix(key)) + MESSAGE_TAIL_BYTES


def laid_out(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows as LevelDB should store them. The input is adjacent rows of the packed table, in key order."""
    # Only rows of one generation of a topic are packed together.
    for _, run in groupby(rows, lambda row: (len(row[0]), row[0][:-POSITION_BYTES])):
        some = list(run)
        prefix, packs = some[0][0][:-POSITION_BYTES], None
        if is_of_topic(some[0][0]):
            packs = packs_of(prefix, [key[len(prefix) :] for key, _ in some], [value for _, value in some])
        yield from packs if packs is not None else ((key, stored(value)) for key, value in some)


# --- taking apart ----------------------------------------------------------------------------------


class Pack:
    """A decoded pack."""

    __slots__ = ("_bounds", "_prefix", "_tail", "_tails_at", "_value", "count", "key")

    count: int
    """Number of rows."""

    def __init__(self, key: bytes, value: bytes) -> None:
        """Decode a key without the table's byte, and a value that begins with ``MARK``.

        Raises plyvel's error for damage: the lengths in it do not add up.
        """
        self.key, self._value = key, value
        at = _HEAD.size
        #: Offset of each value, and the end of the last one; a range if the values have one length, which is not 0.
        self._bounds: range | list[int]
        try:
            _, self._tail, count, length = _HEAD.unpack_from(value)
            if length == _LENGTHS_DIFFER:
                lengths = struct.unpack_from(f">{count}I", value, at)
                at += count * _LENGTH_BYTES
                self._bounds = list(accumulate(lengths, initial=at + self._tail * count))
            else:
                begin = at + self._tail * count
                end = begin + length * count
                self._bounds = range(begin, end + 1, length) if length else [begin] * (count + 1)
        except struct.error:
            raise _damaged(key) from None
        self.count, self._tails_at = count, at
        self._prefix = key[: len(key) - self._tail]
        has_keys = count == 1 or (count > 1 and 0 < self._tail <= len(key))
        if len(value) != self._bounds[-1] or not has_keys or self.key_at(count - 1) != key:
            raise _damaged(key)

    def key_at(self, index: int) -> bytes:
        """Return the key of a row."""
        at = self._tails_at + index * self._tail
        return self._prefix + self._value[at : at + self._tail]

    def index(self, key: bytes) -> int:
        """Return the number of its rows before a key."""
        if key > self.key:
            return self.count
        if key <= self.key_at(0):
            return 0
        found: int = bisect_left(range(self.count), key, key=self.key_at)
        return found

    def get(self, key: bytes) -> bytes | None:
        """Return the value of one of its rows; None if there is no such row."""
        index = self.index(key)
        return None if index == self.count or self.key_at(index) != key else self.value_at(index)

    def value_at(self, index: int) -> bytes:
        """Return the value of a row."""
        return self._value[self._bounds[index] : self._bounds[index + 1]]

    def rows(self, first: int = 0, stop: int | None = None, *, values: bool = True) -> list[Row]:
        """Return its rows from index ``first`` to before ``stop``, in key order.

        Args:
          values: False: every value is ``b""``.
        """
        stop = self.count if stop is None else stop
        if stop <= first:
            return []
        keys: Iterable[bytes] = (self.key,)
        if self._tail:
            at = self._tails_at
            tails = self._value[at + first * self._tail : at + stop * self._tail]
            keys = map(self._prefix.__add__, cut_rows(tails, f"{self._tail}s"))
        return list(zip(keys, self.values(first, stop) if values else repeat(b"", stop - first), strict=True))

    def stretches(self, first: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Split its rows from one index to another into plain stretches and others. Yields (first, stop, is_plain).

        The rows of a plain stretch have a payload and nothing else, and keys that differ only in their positions.
        """
        flags = self._flags() if self._tail <= POSITION_BYTES else None
        if flags is None or stop <= first:
            yield first, stop, False
            return
        at = first
        for found in _PLAIN_RUN.finditer(flags, first, stop):
            if at < found.start():
                yield at, found.start(), False
            yield *found.span(), True
            at = found.end()
        if at < stop:
            yield at, stop, False

    @property
    def is_plain(self) -> bool:
        """True if all of it is one plain stretch."""
        flags = self._flags() if self._tail <= POSITION_BYTES else None
        return flags is not None and flags.count(PLAIN) == self.count

    def _flags(self) -> bytes | None:
        """Return the first byte of each value; None if a value is empty."""
        value, bounds = self._value, self._bounds
        if isinstance(bounds, range):
            return value[bounds.start :: bounds.step]
        # For an empty value this would be the first byte of the next one.
        return bytes(map(value.__getitem__, islice(bounds, self.count))) if _ascend(bounds) else None

    def values(self, first: int, stop: int) -> Iterable[bytes]:
        """Return the values of its rows from one index to another."""
        value, bounds = self._value, self._bounds
        if isinstance(bounds, range):
            return cut_rows(memoryview(value)[bounds[first] : bounds[stop]], f"{bounds.step}s")
        return [value[low:high] for low, high in pairwise(bounds[first : stop + 1])]

    def wire(self, first: int, stop: int) -> bytes:
        """Return the wire form of plain rows from one index to another."""
        # Repeat the bytes before a value for each row, then fill in the tails column by column.
        tail, rows = self._tail, stop - first
        shared = self.key[-POSITION_BYTES : len(self.key) - tail]
        heads = bytearray((ITEM_START + shared + bytes(tail) + PLAIN_GAP) * rows)
        at = self._tails_at + first * tail
        for column in range(tail):
            tails = self._value[at + column : at + rows * tail : tail]
            heads[len(ITEM_START) + len(shared) + column :: PLAIN_OVERHEAD_BYTES] = tails
        parts = [b""] * (2 * rows)
        parts[::2], parts[1::2] = cut_rows(memoryview(heads), f"{PLAIN_OVERHEAD_BYTES}s"), self.values(first, stop)
        return b"".join(parts)

    def wire_bytes(self, first: int, stop: int) -> int:
        """Return the size of the wire form of rows from one index to another, if they are plain."""
        return PLAIN_OVERHEAD_BYTES * (stop - first) + self._bounds[stop] - self._bounds[first]

    def wire_sizes(self, first: int, stop: int) -> list[int]:
        """Return the size of the wire form of each row from one index to another, if they are plain."""
        bounds = self._bounds
        if isinstance(bounds, range):
            return [PLAIN_OVERHEAD_BYTES + bounds.step] * (stop - first)
        return [PLAIN_OVERHEAD_BYTES + high - low for low, high in pairwise(bounds[first : stop + 1])]

    def within(self, first: int, stop: int, most_bytes: int) -> int:
        """Return how many plain rows from ``first`` on have a wire form of at most ``most_bytes``, up to ``stop``."""
        if isinstance(self._bounds, range):
            return max(0, min(stop - first, most_bytes // (PLAIN_OVERHEAD_BYTES + self._bounds.step)))
        if self.wire_bytes(first, stop) <= most_bytes:
            return stop - first
        found: int = bisect_right(
            range(first + 1, stop + 1), most_bytes, key=lambda after: self.wire_bytes(first, after)
        )
        return found


def _damaged(key: bytes) -> Exception:
    error: Exception = plyvel.CorruptionError(
        b"Corruption: a pack's lengths differ from those in its header: " + key.hex().encode()
    )
    return error

"""Reads a range of a LevelDB, row by row or in lists, joining rows and unpacking packs.

plyvel's iterators end without an error at a damaged block, so each end is checked (``look_for_damage``,
``look_behind``).
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import stop_after
from plainsong.protocol.rows import JOINED_VALUE, PLAIN, PLAIN_GAP, PlainItems
from storage.base import GROWTH
from storage.leveldb.engine.errors import FOREIGN
from storage.leveldb.engine.packs import MARK, PACK_BYTES, Pack
from storage.leveldb.engine.plain_parts import PlainPart, PlainParts

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from plainsong.protocol.rows import PlainRows
    from storage.base import Row

S = TypeVar("S")
_KEY, _VALUE = itemgetter(0), itemgetter(1)
#: Rows of LevelDB that are read at once without checking their sizes, if no bound is known.
TOGETHER = 16
#: Larger rows are read one at a time.
_TOGETHER_BYTES = 4 << 10
#: A list's maximum number of rows, and its approximate maximum size. If a page ends within a list, the rest of the list
#: was read for nothing; on the other hand, each list costs its reader a few microseconds.
LIST_ROWS = 500
_LIST_BYTES = 256 << 10
#: Minimum number of plain rows in a list for which they are joined.
JOINED_ROWS = 16
#: Minimum number of a pack's rows in its first list, for readers that want only a few.
_FEW_ROWS = 16
_PLAIN = bytes([PLAIN])
_flags_of = itemgetter(JOINED_VALUE)


@dataclass(frozen=True, slots=True)
class RangeScan:
    """The range to read: the rows of a table with ``start <= key < stop``."""

    database: Any
    """plyvel's database over all tables."""
    rows: Any
    """plyvel's database of this table alone."""
    byte: bytes
    """The table's prefix of keys in ``database``."""
    start: bytes
    stop: bytes
    values: bool = True
    """False: every value is ``b""``, which is cheaper."""
    cache: bool = False
    """True: keep the blocks in memory."""
    packed: bool = True
    """True if there may be packs among the rows."""
    wanted: int = 0
    """About how many rows the caller wants; 0 if unknown."""
    largest: int = 0
    """Upper bound of the size of a row's value; 0 if unknown. Lists are sized by it, and pages rely on it."""

    def stored(self, rows: Any = None, **bounds: Any) -> Any:
        """Return plyvel's iterator over stored rows, of this table or of ``rows``."""
        return (rows or self.rows).iterator(verify_checksums=True, fill_cache=self.cache, **bounds)

    def look_for_damage(self, *, reverse: bool = False, stop: bytes | None = None) -> None:
        """See ``look_for_damage``. ``stop`` is a whole key; the default is the end of the range."""
        stop = self.byte + self.stop if stop is None else stop
        look_for_damage(self.database, self.byte + self.start, stop, reverse=reverse)

    def look_behind(self, *, reverse: bool = False, stop: bytes | None = None) -> None:
        """See ``look_behind``. ``stop`` is a whole key; the default is the end of the range."""
        stop = self.byte + self.stop if stop is None else stop
        look_behind(self.database, self.byte + self.start, stop, reverse=reverse)


# --- row by row ------------------------------------------------------------------------------------


@contextmanager
def one_by_one(scan: RangeScan, *, reverse: bool = False) -> Iterator[Iterable[Row]]:
    """Yield the rows as LevelDB stores them; none may be a pack. Iterating raises plyvel's errors."""
    # Downwards, plyvel 1.5.1 finds nothing if the only key of a range is its start.
    start = None if reverse else scan.start
    # Closed here rather than by the garbage collector: an iterator keeps table files and the handle open.
    with closing(scan.stored(start=start, stop=scan.stop, reverse=reverse, include_value=scan.values)) as iterator:
        first = next(iterator, None)
        if first is None:
            scan.look_for_damage(reverse=reverse)
            yield ()
            return
        found = chain((first,), iterator, _nothing_behind(scan, reverse=reverse))
        rows = found if scan.values else zip(found, repeat(b""))
        yield takewhile(lambda row: row[0] >= scan.start, rows) if reverse else rows


def _nothing_behind(scan: RangeScan, *, reverse: bool) -> Iterator[Row]:
    """Yield no rows; raise if the block after them is damaged."""
    scan.look_behind(reverse=reverse)
    yield from ()


# --- lists -----------------------------------------------------------------------------------------


def lists_up(scan: RangeScan, prefix: bytes) -> Generator[Sequence[Row], None, None]:
    """Yield the rows of a range upwards, in lists. Iterating raises plyvel's errors.

    Args:
      prefix: the common part of all keys before the position, which plyvel strips; empty if there may be none.
    """
    rows = scan.rows.prefixed_db(prefix) if prefix else scan.rows
    bounds, end = {"start": scan.start[len(prefix) :]}, scan.byte + scan.stop
    if scan.packed:
        end = stop_after(scan.byte + prefix)  # the pack with the last row of a range may end after the range
    else:
        bounds["stop"] = scan.stop[len(prefix) :]
    with closing(scan.stored(rows, **bounds)) as pairs:
        first: Row | None = next(pairs, None)
        if first is None:
            scan.look_for_damage(stop=end)
            return
        yield from _lists(scan, prefix, _Stored(scan, pairs, first, end))


class _Stored:
    """Stored rows, read some at a time."""

    def __init__(self, scan: RangeScan, pairs: Iterator[Row], first: Row, end: bytes) -> None:
        """``first`` is the row before ``pairs``; ``end`` is the whole key where these end."""
        self._scan = scan
        self._first = [first]
        self._pairs = pairs
        self._joined = map(PLAIN_GAP.join, pairs)
        self._end = end
        #: Rows that may be read without checking their sizes; 0 if unknown.
        together = _LIST_BYTES // scan.largest if scan.largest and not scan.packed else 0
        self._together = together if together > TOGETHER else 0
        #: Rows to read before the next check.
        self._step = _step_behind(len(first[1]))
        self.has_ended = False
        self.failed: BaseException | None = None
        """The error that ended the rows; to be raised after them."""

    def pairs(self, most: int) -> list[Row]:
        """Return the next rows, at most ``most``."""
        some, self._first = self._first, []
        return self._take(self._pairs, some, most, _value_bytes)[0]

    def items(self, most: int) -> tuple[list[bytes], int | None]:
        """Return the next rows joined as in ``PlainItems``, and an upper bound of their size, None if unknown."""
        some, self._first = [PLAIN_GAP.join(row) for row in self._first], []
        return self._take(self._joined, some, most, len)

    def _take(
        self, rows: Iterator[S], some: list[S], most: int, bytes_of: Callable[[S], int]
    ) -> tuple[list[S], int | None]:
        size = read = 0
        try:
            if self._together:
                self._extend(some, rows, min(most, self._together))
                return some, len(some) * (JOINED_VALUE + self._scan.largest)
            while read < most and size < _LIST_BYTES and not self.has_ended:
                self._extend(some, rows, min(read + self._step, most))
                size += sum(map(bytes_of, some[read:]))
                read = len(some)
                if some:
                    self._step = _step_behind(bytes_of(some[-1]))
        except FOREIGN as error:
            self.failed, self.has_ended = error, True
            return some, None
        return some, size

    def _extend(self, some: list[S], rows: Iterator[S], length: int) -> None:
        """Extend a list to ``length`` rows, or to the end. Rows before an error are added."""
        some.extend(islice(rows, length - len(some)))
        if len(some) < length:
            self.has_ended = True
            self._scan.look_behind(stop=self._end)


def _lists(scan: RangeScan, prefix: bytes, stored: _Stored) -> Iterator[Sequence[Row]]:
    """Yield lists of rows: see ``lists_up``.

    Plain rows are joined as they are read, without making a pair, a key or a slice of each. That would be wasted on
    other rows, so after some of these, pairs are read until a whole list of them is plain. How many packs are read at
    a time depends on the size of the largest.
    """
    until = scan.stop[len(prefix) :]
    joins = bool(prefix) and not scan.packed
    size, left = 1 if scan.packed else max(1, min(scan.wanted, LIST_ROWS)), scan.wanted
    last: bytes | None = b""
    while last is not None and last < until and not stored.has_ended:
        before, most, last = left, LIST_ROWS, None
        if joins:
            items, item_bytes = stored.items(size)
            read, plain = len(items), _plain_before(items)
            if plain:
                last = items[plain - 1][:POSITION_BYTES]
                left -= plain
                yield from _up_to(scan.stop, PlainItems(prefix, items if plain == read else items[:plain], item_bytes))
            some = [(item[:POSITION_BYTES], item[JOINED_VALUE:]) for item in items[plain:]]
            joins = not some
        else:
            some = stored.pairs(size)
            read = len(some)
            joins = bool(prefix) and read >= JOINED_ROWS and _are_plain(some)
        if some:
            last = some[-1][0]
            if not scan.packed or max(map(_VALUE, some)) < MARK:
                found = _of_rows(some, scan, prefix)
            else:
                found = _taken_apart(some, scan, prefix)
                most = max(1, 2 * PACK_BYTES * len(some) // sum(map(_value_bytes, some)))
            for rows in found:
                left -= len(rows)
                yield rows
        size = min(size * GROWTH, most)
        if left > 0:
            # Reading more rows than the caller wants would be wasted.
            size = min(size, -(-left * read // max(1, before - left))) if scan.packed else min(left, LIST_ROWS)
    if stored.failed is not None and (last is None or last < until):  # otherwise the damage is after the range
        raise stored.failed


def _up_to(stop: bytes, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Yield the rows before a key."""
    if rows[-1][0] >= stop:
        rows = rows[: bisect_left(rows, stop, key=_KEY)]
    if rows:
        yield rows


def _of_rows(some: list[Row], scan: RangeScan, prefix: bytes) -> Iterator[Sequence[Row]]:
    """Yield those of the given rows that are in the range; none of them may be a pack."""
    rows: Sequence[Row]
    if prefix and len(some) >= JOINED_ROWS and _are_plain(some):
        rows = PlainItems(prefix, list(map(PLAIN_GAP.join, some)))
    else:
        rows = _whole(some, prefix, values=scan.values)
    yield from _up_to(scan.stop, rows)


def _taken_apart(some: list[Row], scan: RangeScan, prefix: bytes) -> Iterator[Sequence[Row]]:
    """Yield the rows that are in the range from stored rows, some of which are packs."""
    for is_pack, run in groupby(some, _is_pack):
        if not is_pack:
            rows = list(run)
            yield from _of_rows(rows, scan, prefix)
            if prefix + rows[-1][0] >= scan.stop:
                return
            continue
        parts: list[PlainPart] = []
        for key, value in run:
            try:
                pack = Pack(prefix + key, value)
            except FOREIGN:
                yield from _together(parts)  # the rows before the damage
                raise
            first = pack.key_at(0)
            if first >= scan.stop:
                yield from _together(parts)
                return
            if scan.values and pack.is_plain and scan.start <= first and pack.key < scan.stop:
                parts.append(PlainPart(pack, 0, pack.count))
                continue
            yield from _together(parts)
            parts = []
            yield from _of_pack(pack, scan)
        yield from _together(parts)


def _together(parts: list[PlainPart]) -> Iterator[PlainRows]:
    """Yield the rows of packs as one list."""
    if parts:
        yield parts[0] if len(parts) == 1 else PlainParts(parts)


def lists_down(scan: RangeScan) -> Generator[Sequence[Row], None, None]:
    """Yield the rows of a range downwards, in lists; some may be in packs."""
    with closing(scan.stored(start=scan.stop)) as iterator:
        above = next(iterator, None)
    if above is not None and _is_pack(above):
        yield from _of_pack(Pack(*above), scan, reverse=True)
    with closing(scan.stored(stop=scan.stop, reverse=True)) as iterator:
        begin = next(iterator, None)
        if begin is None:
            scan.look_for_damage(reverse=True)
            return
        for row in chain((begin,), iterator, _nothing_behind(scan, reverse=True)):
            if _is_pack(row):
                yield from _of_pack(Pack(*row), scan, reverse=True)
            elif row[0] >= scan.start:
                yield [row if scan.values else (row[0], b"")]
            if row[0] < scan.start:
                return


def _of_pack(pack: Pack, scan: RangeScan, *, reverse: bool = False) -> Iterator[Sequence[Row]]:
    """Yield the rows of a pack that are in the range. If the caller wants only a few, the first list has only those."""
    low, end = pack.index(scan.start), pack.index(scan.stop)
    part = max(scan.wanted, _FEW_ROWS) if scan.wanted else end - low
    if reverse:
        if part < end - low:
            yield pack.rows(end - part, end, values=scan.values)[::-1]
            end -= part
        yield pack.rows(low, end, values=scan.values)[::-1]
    elif scan.values:
        for first, after, is_plain in pack.stretches(low, end):
            if is_plain:
                yield PlainPart(pack, first, after)
                continue
            few = min(first + part, after)
            yield pack.rows(first, few)
            if few < after:
                yield pack.rows(few, after)
    else:
        if part < end - low:
            yield pack.rows(low, low + part, values=False)
            low += part
        yield pack.rows(low, end, values=False)


def _whole(some: list[Row], prefix: bytes, *, values: bool) -> list[Row]:
    """Return rows with whole keys."""
    if not values:
        return [(prefix + key, b"") for key, _ in some]
    return [(prefix + key, value) for key, value in some] if prefix else some


def _is_pack(row: Row) -> bool:
    return row[1][:1] == MARK


def _value_bytes(row: Row) -> int:
    return len(row[1])


def _step_behind(size: int) -> int:
    """Return how many rows to read at once after a row of this size."""
    return TOGETHER if size <= _TOGETHER_BYTES else 1


def _plain_before(items: list[bytes]) -> int:
    """Return the number of joined rows before the first one that is not plain."""
    try:
        if not any(map(_flags_of, items)):  # PLAIN is 0
            return len(items)
    except IndexError:
        pass  # an empty value
    return next(index for index, item in enumerate(items) if item[JOINED_VALUE : JOINED_VALUE + 1] != _PLAIN)


def _are_plain(rows: list[Row]) -> bool:
    """True if all of them have a payload and nothing else."""
    return all(map(_VALUE, rows)) and max(map(_VALUE, rows))[0] == PLAIN


# --- damage at the ends --------------------------------------------------------------------------


def look_for_damage(database: Any, start: bytes, stop: bytes, *, reverse: bool = False) -> None:
    """Raise LevelDB's error if no rows were found in a range because it cannot be read where reading began.

    plyvel's iterators (1.5.1) end without an error if the block they begin in is damaged and is the last one. Its raw
    iterators check each step.
    """
    with closing(database.raw_iterator(verify_checksums=True, fill_cache=False)) as raw:
        _seek_to_first(raw, start, stop, reverse=reverse)


def _seek_to_first(raw: Any, start: bytes, stop: bytes, *, reverse: bool) -> None:
    """Seek to the row at which an iterator over the range begins, in its direction."""
    if not reverse:
        raw.seek(start)
        return
    raw.seek(stop)
    if raw.valid():
        raw.prev()
    else:
        raw.seek_to_last()


def look_behind(database: Any, start: bytes, stop: bytes, *, reverse: bool = False) -> None:
    """Raise LevelDB's error if the rows of a range after the last one that an iterator found cannot be read.

    plyvel's iterators (1.5.1) also end without an error if the next block is damaged and is the last one.
    """
    with closing(database.raw_iterator(verify_checksums=True, fill_cache=False)) as raw:
        try:
            raw.seek(start if reverse else stop)
            if reverse and raw.valid():
                raw.prev()
            if raw.valid():
                return  # a row after the range: the iterator got there, so it was checked
            if reverse:
                raw.seek_to_first()
            else:
                raw.seek_to_last()
        except FOREIGN:
            # Only reading the rows of the range shows whether the damage is in it.
            _seek_to_first(raw, start, stop, reverse=reverse)
            while raw.valid() and (raw.key() >= start if reverse else raw.key() < stop):
                raw.prev() if reverse else raw.next()

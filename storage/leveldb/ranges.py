"""Reading a range of a LevelDB: row by row, or in lists, in which rows are joined or taken out of their packs.

plyvel's iterators do not tell of damage at the ends of what they find, so that is looked for besides.
"""

from __future__ import annotations

from bisect import bisect_left
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.protocol.keys import stop_after
from plainsong.protocol.rows import JOINED_VALUE, PLAIN, PLAIN_GAP, PlainItems
from storage.base import GROWTH
from storage.leveldb.errors import FOREIGN
from storage.leveldb.packs import MARK, Pack, PlainPart

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from storage.base import Row

S = TypeVar("S")
_KEY, _VALUE = itemgetter(0), itemgetter(1)
#: Rows of LevelDB that are read together without a look at what they take, where nothing is known of it.
TOGETHER = 16
#: Unless they are larger.
_TOGETHER_BYTES = 4 << 10
#: The longest list of rows, and about how many bytes it has at most. A page that ends within one has read the rest for
#: nothing, and each list costs whoever takes it some microseconds.
LIST_ROWS = 500
_LIST_BYTES = 256 << 10
#: Rows in a list that is all plain, at least, before others are joined.
JOINED_ROWS = 16
#: Rows of a pack that are made before the others, at least, for who wants a few first.
_FEW_ROWS = 16
_PLAIN = bytes([PLAIN])
_flags_of = itemgetter(JOINED_VALUE)


@dataclass(frozen=True, slots=True)
class RangeScan:
    """What to read: the rows of a table with ``start <= key < stop``."""

    database: Any
    """plyvel's database, with all tables."""
    rows: Any
    """plyvel's database of this table alone."""
    byte: bytes
    """What the keys of this table begin with where all are."""
    start: bytes
    stop: bytes
    values: bool = True
    """False: every value is ``b""``, which is cheaper."""
    cache: bool = False
    """Whether to keep the blocks in memory."""
    packed: bool = True
    """Whether there may be packs among them."""
    wanted: int = 0
    """About how many rows are asked for; 0: that is not known."""
    largest: int = 0
    """No row's value has more bytes; 0: that is not known. It decides how much memory a list may take, and no more."""

    def stored(self, rows: Any = None, **bounds: Any) -> Any:
        """plyvel's iterator over rows as LevelDB has them; of this table, or of these."""
        return (rows or self.rows).iterator(verify_checksums=True, fill_cache=self.cache, **bounds)

    def look_for_damage(self, *, reverse: bool = False, stop: bytes | None = None) -> None:
        """See ``look_for_damage``; ``stop``: of the whole key, where it is not the range's."""
        stop = self.byte + self.stop if stop is None else stop
        look_for_damage(self.database, self.byte + self.start, stop, reverse=reverse)

    def look_behind(self, *, reverse: bool = False, stop: bytes | None = None) -> None:
        """See ``look_behind``; ``stop``: of the whole key, where it is not the range's."""
        stop = self.byte + self.stop if stop is None else stop
        look_behind(self.database, self.byte + self.start, stop, reverse=reverse)


# --- row by row ------------------------------------------------------------------------------------


@contextmanager
def one_by_one(scan: RangeScan, *, reverse: bool = False) -> Iterator[Iterable[Row]]:
    """The rows as LevelDB has them; none of them is a pack. Iterating raises plyvel's errors."""
    # plyvel 1.5.1 finds nothing on the way down when the only key of a range is its start.
    start = None if reverse else scan.start
    # Closed here and not by the garbage collector: an iterator holds table files, and the handle.
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
    """No rows, but the damage behind them."""
    scan.look_behind(reverse=reverse)
    yield from ()


# --- lists of them ---------------------------------------------------------------------------------


class ListsUp:
    """The rows of a range upwards, some at a time, of which some may be in packs. Iterating raises plyvel's errors.

    plyvel takes off a prefix that all keys have, and each row that is plain is joined as it comes: no pair, no key and no
    slice is made of it. Among rows that are not plain that would be work for nothing: behind them come pairs again, until
    a whole list of them is plain.
    """

    def __init__(self, scan: RangeScan, prefix: bytes) -> None:
        """``prefix``: what all keys have before the position; empty: that may differ, and nothing is joined."""
        self._scan = scan
        self._prefix = prefix
        self._joins = bool(prefix) and not scan.packed
        #: The whole key where plyvel's iterator ends: the pack that has the last row of a range ends behind the range.
        self._end = stop_after(scan.byte + prefix) if scan.packed else scan.byte + scan.stop
        #: How many rows may be read without a look at their sizes; 0: that is not known.
        together = _LIST_BYTES // scan.largest if scan.largest and not scan.packed else 0
        self._together = together if together > TOGETHER else 0
        #: How many are read before the next look.
        self._step = 1
        #: What ended the rows; it is raised behind those that came before it.
        self._failed: BaseException | None = None
        self._has_ended = False

    def lists(self) -> Generator[Sequence[Row], None, None]:
        """The lists, in order; each row once."""
        scan, prefix = self._scan, self._prefix
        rows = scan.rows.prefixed_db(prefix) if prefix else scan.rows
        bounds = {"start": scan.start[len(prefix) :]}
        if not scan.packed:
            bounds["stop"] = scan.stop[len(prefix) :]
        with closing(scan.stored(rows, **bounds)) as pairs:
            first: Row | None = next(pairs, None)
            if first is None:
                scan.look_for_damage(stop=self._end)
                return
            self._step = _step_behind(len(first[1]))
            joined = map(PLAIN_GAP.join, pairs)
            size, left = 1 if scan.packed else max(1, min(scan.wanted, LIST_ROWS)), scan.wanted
            ahead = [first]
            while not self._has_ended:
                block: Sequence[Row] = ()
                some: list[Row] = []
                if self._joins:
                    block, some = self._parted(*self._take(joined, [PLAIN_GAP.join(row) for row in ahead], size, len))
                else:
                    some, _ = self._take(pairs, ahead, size, _value_bytes)
                    self._joins = bool(prefix) and len(some) >= JOINED_ROWS and _are_plain(some)
                    if prefix:
                        some = [(prefix + key, value) for key, value in some]
                ahead = []
                left -= len(block) + len(some)
                # Those that nobody wants are read for nothing.
                size = min(left if left > 0 and not scan.packed else size * GROWTH, LIST_ROWS)
                if block:
                    yield from _up_to(scan.stop, block)
                if some:
                    block = some
                    if not scan.packed or max(map(_VALUE, some)) < MARK:
                        yield from _up_to(scan.stop, some if scan.values else [(key, b"") for key, _ in some])
                    else:
                        yield from _taken_apart(some, scan)
                        size = 1
                if block and block[-1][0] >= scan.stop:
                    return
            if self._failed is not None:
                raise self._failed

    def _take(
        self, stored: Iterator[S], some: list[S], most: int, bytes_of: Callable[[S], int]
    ) -> tuple[list[S], int | None]:
        """``some`` and the rows behind it: so many at most; and how many bytes they are at most, if that is known.

        Where an error ends them, it is ``_failed``, and what came before it is there.
        """
        size = read = 0
        try:
            if self._together:
                self._extend(some, stored, min(most, self._together))
                return some, len(some) * (JOINED_VALUE + self._scan.largest)
            while read < most and size < _LIST_BYTES and not self._has_ended:
                self._extend(some, stored, min(read + self._step, most))
                size += sum(map(bytes_of, some[read:]))
                read = len(some)
                if some:
                    self._step = _step_behind(bytes_of(some[-1]))
        except FOREIGN as error:
            self._failed, self._has_ended = error, True
            return some, None
        return some, size

    def _extend(self, some: list[S], stored: Iterator[S], length: int) -> None:
        """Add rows to a list until it has so many, or there are no more. Those before an error are added."""
        some.extend(islice(stored, length - len(some)))
        if len(some) < length:
            self._has_ended = True
            self._scan.look_behind(stop=self._end)

    def _parted(self, items: list[bytes], item_bytes: int | None) -> tuple[Sequence[Row], list[Row]]:
        """The plain ones of joined rows, and those from the first one on that is not."""
        plain = _plain_before(items)
        if plain == len(items):
            return PlainItems(self._prefix, items, item_bytes), []
        self._joins = False
        return PlainItems(self._prefix, items[:plain]), list(PlainItems(self._prefix, items[plain:]))


def lists_down(scan: RangeScan) -> Generator[Sequence[Row], None, None]:
    """The rows of a range from the last one down, some at a time, of which some are in packs."""
    with closing(scan.stored(start=scan.stop)) as iterator:
        above = next(iterator, None)
    if above is not None and above[1][:1] == MARK:
        yield from _taken_apart([above], scan, reverse=True)
    with closing(scan.stored(stop=scan.stop, reverse=True)) as iterator:
        begin = next(iterator, None)
        if begin is None:
            scan.look_for_damage(reverse=True)
            return
        for row in chain((begin,), iterator, _nothing_behind(scan, reverse=True)):
            yield from _taken_apart((row,), scan, reverse=True)
            if row[0] < scan.start:
                return


def _value_bytes(row: Row) -> int:
    return len(row[1])


def _step_behind(size: int) -> int:
    """How many rows are read together behind one of so many bytes."""
    return TOGETHER if size <= _TOGETHER_BYTES else 1


def _plain_before(items: list[bytes]) -> int:
    """How many joined rows are plain before the first one that is not."""
    try:
        if not any(map(_flags_of, items)):  # PLAIN is 0
            return len(items)
    except IndexError:
        pass  # a value without a byte
    return next(index for index, item in enumerate(items) if item[JOINED_VALUE : JOINED_VALUE + 1] != _PLAIN)


def _are_plain(rows: list[Row]) -> bool:
    """Whether all of them have a payload and nothing else."""
    return all(map(_VALUE, rows)) and max(map(_VALUE, rows))[0] == PLAIN


def _up_to(stop: bytes, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Those before a key."""
    if rows[-1][0] >= stop:
        rows = rows[: bisect_left(rows, stop, key=_KEY)]
    if rows:
        yield rows


def _taken_apart(stored: Iterable[Row], scan: RangeScan, *, reverse: bool = False) -> Iterator[Sequence[Row]]:
    """The rows of a range in rows as LevelDB has them, in the order in which these come."""
    start, stop, values, wanted = scan.start, scan.stop, scan.values, scan.wanted
    plain: list[Row] = []
    for key, value in stored:
        if value[:1] != MARK:
            if start <= key < stop:
                plain.append((key, value if values else b""))
            continue
        if plain:
            yield plain
            plain = []
        pack = Pack(key, value)
        low, end = pack.index(start), pack.index(stop)
        part = max(wanted, _FEW_ROWS) if wanted else end - low
        if reverse:
            if part < end - low:
                yield pack.rows(end - part, end, values=values)[::-1]
                end -= part
            yield pack.rows(low, end, values=values)[::-1]
        elif values:
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
    if plain:
        yield plain


# --- damage at the ends --------------------------------------------------------------------------


def look_for_damage(database: Any, start: bytes, stop: bytes, *, reverse: bool = False) -> None:
    """Raise what LevelDB has against the rows at an end of a range in which none were found.

    plyvel's iterators (1.5.1) end without an error where the block they begin in is damaged and the last one there is;
    in its raw iterators each step is checked.
    """
    with closing(database.raw_iterator(verify_checksums=True, fill_cache=False)) as raw:
        _seek_to_first(raw, start, stop, reverse=reverse)


def _seek_to_first(raw: Any, start: bytes, stop: bytes, *, reverse: bool) -> None:
    """To the row at which an iterator over the range begins, in its direction."""
    if not reverse:
        raw.seek(start)
        return
    raw.seek(stop)
    if raw.valid():
        raw.prev()
    else:
        raw.seek_to_last()


def look_behind(database: Any, start: bytes, stop: bytes, *, reverse: bool = False) -> None:
    """Raise what LevelDB has against the rows of a range behind the last one that an iterator found, in its direction.

    plyvel's iterators (1.5.1) end without an error, too, where the next block is damaged and the last one there is.
    """
    with closing(database.raw_iterator(verify_checksums=True, fill_cache=False)) as raw:
        try:
            raw.seek(start if reverse else stop)
            if reverse and raw.valid():
                raw.prev()
            if raw.valid():
                return  # a row behind the range: the iterator came to it, and was checked there
            if reverse:
                raw.seek_to_first()
            else:
                raw.seek_to_last()
        except FOREIGN:
            # Whether that is in the range, only its own rows tell.
            _seek_to_first(raw, start, stop, reverse=reverse)
            while raw.valid() and (raw.key() >= start if reverse else raw.key() < stop):
                raw.prev() if reverse else raw.next()

"""Chunks: consecutive messages of a topic in wire form, in the memory of the scan cache and of kept chunks."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from plainsong.protocol.ids import ID_BYTES
from plainsong.protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plainsong.protocol.transactions.view import View

#: Memory of a chunk in addition to its bytes, measured with tracemalloc.
CHUNK_OVERHEAD_BYTES = 900
#: Memory of an item's attributes in addition to their characters, and of each attribute; measured likewise.
ATTRIBUTES_OVERHEAD_BYTES = 350
ATTRIBUTE_OVERHEAD_BYTES = 110
#: Memory of an item in an open chunk in addition to its bytes: a ``bytes`` object and a list slot.
ITEM_OVERHEAD_BYTES = 41


class Chunk:
    """Consecutive items; open (a list that grows) or sealed (one ``bytes``)."""

    __slots__ = ("_items", "_offsets", "_wire", "attributes", "cost", "expiries", "first", "runs", "size")

    def __init__(self, first: bytes) -> None:
        #: Id of the first item.
        self.first = first
        self.size = 0
        self.cost = CHUNK_OVERHEAD_BYTES
        #: Index → when its own time to live ends (ms), for items that have one.
        self.expiries: dict[int, int] = {}
        #: Index → attributes, for items that have any.
        self.attributes: dict[int, Mapping[str, str]] = {}
        #: The items that have a write pointer.
        self.runs = PointerRuns()
        self._items: list[bytes] | None = []
        self._wire = b""
        self._offsets: array[int] | range = range(1)

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._items is None else len(self._items)

    @property
    def is_sealed(self) -> bool:
        """True once no more items can be added."""
        return self._items is None

    def hold(
        self,
        wire: bytes,
        offsets: array[int] | range,
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Set the items of an empty chunk, and seal it; return the cost added."""
        self._wire, self._offsets, self._items = wire, offsets, None
        self.size = len(wire)
        grown = len(wire) + (offsets.itemsize * (len(offsets) - 1) if isinstance(offsets, array) else 0)
        grown += self._add_columns(0, expiries, pointer_runs, attributes)
        self.cost += grown
        return grown

    def append(
        self,
        items: Sequence[bytes],
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Add items to an open chunk; return the cost added."""
        assert self._items is not None  # only the last chunk of a topic is appended to, while it is open
        base = len(self._items)
        self._items += items
        added = sum(map(len, items))
        self.size += added
        grown = added + ITEM_OVERHEAD_BYTES * len(items)
        grown += self._add_columns(base, expiries, pointer_runs, attributes)
        self.cost += grown
        return grown

    def _add_columns(
        self,
        base: int,
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Add expiries, write pointers and attributes of the items from ``base`` on; return their memory."""
        for index, expiry in expiries.items():
            self.expiries[base + index] = expiry
        grown = 100 * len(expiries)
        if pointer_runs:
            had = len(self.runs)
            for start, stop, pointer in pointer_runs:
                self.runs.add(base + start, base + stop, pointer)
            grown += RUN_BYTES * (len(self.runs) - had)
        for index, strings in attributes.items():
            self.attributes[base + index] = strings
            grown += _cost(strings)
        return grown

    def seal(self) -> int:
        """Join the items into one ``bytes``; return the cost saved."""
        if self._items is None:
            return 0
        offsets = array("Q", accumulate(map(len, self._items), initial=0))
        self._offsets = offsets
        self._wire = b"".join(self._items)
        saved = (ITEM_OVERHEAD_BYTES - offsets.itemsize) * len(self._items)
        self._items = None
        self.cost -= saved
        return saved

    def roll_back(self, pointer: int, start: int, stop: int) -> int:
        """Invert the sign of ``pointer`` in the items ``start`` to ``stop``, exclusive; return the cost added."""
        had = len(self.runs)
        self.runs.roll_back(pointer, start, stop)
        grown = RUN_BYTES * (len(self.runs) - had)
        self.cost += grown
        return grown

    def find(self, bound: bytes) -> int:
        """Return the index of the first item with an id from ``bound`` on; the number of items if there is none."""
        count = len(self)
        if bound <= self.first:
            return 0
        if bound > self.id_at(count - 1):  # the common case for the end of a span
            return count
        return bisect_left(range(count), bound, key=self.id_at)

    def id_at(self, index: int) -> bytes:
        if self._items is not None:
            return self._items[index][1 : 1 + ID_BYTES]
        at = self._offsets[index] + 1
        return self._wire[at : at + ID_BYTES]

    def size_to(self, start: int, stop: int) -> int:
        """Return the bytes of the items ``start`` to ``stop``, exclusive."""
        if self._items is not None:
            return sum(map(len, self._items[start:stop]))
        return self._offsets[stop] - self._offsets[start]

    def attributes_to(self, start: int, stop: int) -> dict[int, Mapping[str, str]]:
        """Return the attributes of the items ``start`` to ``stop``, exclusive; ``start`` has index 0."""
        if stop - start < len(self.attributes):
            return {at - start: self.attributes[at] for at in range(start, stop) if at in self.attributes}
        return {at - start: strings for at, strings in self.attributes.items() if start <= at < stop}

    def slice(self, start: int, stop: int) -> bytes:
        """Return the items ``start`` to ``stop``, exclusive, as one ``bytes``."""
        if self._items is not None:
            return b"".join(self._items[start:stop])
        if start == 0 and stop == len(self):
            return self._wire
        return self._wire[self._offsets[start] : self._offsets[stop]]


def _cost(strings: Mapping[str, str]) -> int:
    """Return the memory of attributes; a character of non-ASCII text counts as four bytes."""
    size = sum(
        4 * (len(name) + len(text)) if not (name + text).isascii() else len(name) + len(text)
        for name, text in strings.items()
    )
    return ATTRIBUTES_OVERHEAD_BYTES + ATTRIBUTE_OVERHEAD_BYTES * len(strings) + size


# --- runs of items under one write pointer ---------------------------------------------------------
#
# Three columns of numbers, 16 bytes per run: a chunk of single-message transactions has a run for each item, and a
# tuple would cost more than the message.


#: Memory of one run, including what growing arrays reserve.
RUN_BYTES = 18


class PointerRuns:
    """Disjoint runs of item indexes, ascending; items outside all runs have no pointer."""

    __slots__ = ("_highest", "_lowest", "_pointers", "_starts", "_stops")

    def __init__(self) -> None:
        self._starts: array[int] = array("I")
        self._stops: array[int] = array("I")
        self._pointers: array[int] = array("q")
        self._lowest = self._highest = 0

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Yield ``(start, stop, pointer)`` of each run; the pointer is negative if rolled back, as in the rows."""
        return zip(self._starts, self._stops, self._pointers, strict=True)

    def add(self, start: int, stop: int, pointer: int) -> None:
        """Add the items ``start`` to ``stop``, exclusive, which must follow all existing runs."""
        if self._stops and self._stops[-1] == start and self._pointers[-1] == pointer:
            self._stops[-1] = stop
            return
        self._insert(len(self), start, stop, pointer)

    def roll_back(self, pointer: int, start: int, stop: int) -> None:
        """Invert the sign of ``pointer`` in the items ``start`` to ``stop``, exclusive, that carry it."""
        index = bisect_right(self._stops, start)
        while index < len(self) and self._starts[index] < stop:
            if self._pointers[index] == pointer:
                index = self._turn(index, start, stop)
            index += 1

    def pieces(self, start: int, stop: int, view: View | None) -> list[tuple[int, int, Verdict, int]]:
        """Return items ``start`` to ``stop`` as ``(start, stop, verdict, pointer)``; those to deliver are joined."""
        if view is None or not self._starts or self._all_delivered(view):
            return [(start, stop, Verdict.DELIVER, 0)]
        out = []
        at = start
        for index in range(bisect_right(self._stops, start), len(self)):
            first, last = max(self._starts[index], start), min(self._stops[index], stop)
            if first >= stop:
                break
            pointer = self._pointers[index]
            verdict = view.verdict(pointer)
            if verdict is Verdict.DELIVER:
                continue
            if at < first:
                out.append((at, first, Verdict.DELIVER, 0))
            out.append((first, last, verdict, pointer))
            at = last
        if at < stop:
            out.append((at, stop, Verdict.DELIVER, 0))
        return out

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs within ``start`` to ``stop``, cut to that range."""
        for index in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            yield max(self._starts[index], start), min(self._stops[index], stop), self._pointers[index]

    def _all_delivered(self, view: View) -> bool:
        return self._lowest > 0 and view.delivers_all(self._lowest, self._highest, lambda: self._pointers)

    def _turn(self, index: int, start: int, stop: int) -> int:
        """Split a run, and invert the part within the range; return the index of that part."""
        first, last, pointer = self._starts[index], self._stops[index], self._pointers[index]
        if first < start:
            self._stops[index] = start
            index += 1
            self._insert(index, start, last, pointer)
        if stop < last:
            self._starts[index] = stop
            self._insert(index, max(first, start), stop, pointer)
        self._pointers[index] = -pointer
        self._lowest = min(self._lowest, -pointer)
        return index

    def _insert(self, index: int, start: int, stop: int, pointer: int) -> None:
        if not self._starts:
            self._lowest = self._highest = pointer
        self._starts.insert(index, start)
        self._stops.insert(index, stop)
        self._pointers.insert(index, pointer)
        self._lowest, self._highest = min(self._lowest, pointer), max(self._highest, pointer)

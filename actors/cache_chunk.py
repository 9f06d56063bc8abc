"""A chunk of the scan cache: consecutive messages of a topic in wire form, and what is known of each besides."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from actors.pointer_runs import RUN_BYTES, PointerRuns
from protocol.ids import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: What a chunk and its bookkeeping cost beside its bytes, measured with tracemalloc.
CHUNK_OVERHEAD_BYTES = 900
#: What an item's attributes cost beside their characters, and each of them: measured likewise.
ATTRIBUTES_OVERHEAD_BYTES = 350
ATTRIBUTE_OVERHEAD_BYTES = 110
#: What an item costs beside its bytes: in an open chunk, a ``bytes`` object and a list slot.
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
        #: Index → attributes, for items that have some.
        self.attributes: dict[int, Mapping[str, str]] = {}
        #: Which items have a write pointer.
        self.runs = PointerRuns()
        self._items: list[bytes] | None = []
        self._wire = b""
        self._offsets: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._items is None else len(self._items)

    def append(
        self,
        items: Sequence[bytes],
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Add items to an open chunk; returns by how much it costs more."""
        assert self._items is not None  # only the last chunk of a topic, while open, is appended to
        base = len(self._items)
        for index, expiry in expiries.items():
            self.expiries[base + index] = expiry
        had = len(self.runs)
        for start, stop, pointer in pointer_runs:
            self.runs.add(base + start, base + stop, pointer)
        self._items += items
        added = sum(map(len, items))
        self.size += added
        grown = added + ITEM_OVERHEAD_BYTES * len(items) + 100 * len(expiries)
        grown += RUN_BYTES * (len(self.runs) - had)
        if attributes:
            for index, strings in attributes.items():
                self.attributes[base + index] = strings
                grown += _cost(strings)
        self.cost += grown
        return grown

    def seal(self) -> int:
        """Make it one ``bytes``; returns by how much it costs less."""
        if self._items is None:
            return 0
        self._offsets = array("Q", accumulate(map(len, self._items), initial=0))
        self._wire = b"".join(self._items)
        saved = (ITEM_OVERHEAD_BYTES - self._offsets.itemsize) * len(self._items)
        self._items = None
        self.cost -= saved
        return saved

    def roll_back(self, pointer: int, start: int, stop: int) -> int:
        """Turn the sign of ``pointer`` in the items ``start`` to ``stop``, exclusive; by how much it costs more."""
        had = len(self.runs)
        self.runs.roll_back(pointer, start, stop)
        grown = RUN_BYTES * (len(self.runs) - had)
        self.cost += grown
        return grown

    def find(self, bound: bytes) -> int:
        """Index of the first item whose id is not before ``bound``."""
        return bisect_left(range(len(self)), bound, key=self.id_at)

    def id_at(self, index: int) -> bytes:
        """The id of an item."""
        if self._items is not None:
            return self._items[index][1 : 1 + ID_BYTES]
        at = self._offsets[index] + 1
        return self._wire[at : at + ID_BYTES]

    def size_to(self, start: int, stop: int) -> int:
        """Bytes of the items ``start`` to ``stop``, exclusive."""
        if self._items is not None:
            return sum(map(len, self._items[start:stop]))
        return self._offsets[stop] - self._offsets[start]

    def attributes_to(self, start: int, stop: int) -> dict[int, Mapping[str, str]]:
        """Those of the items ``start`` to ``stop``, exclusive; the first of these is number 0."""
        if stop - start < len(self.attributes):
            return {at - start: self.attributes[at] for at in range(start, stop) if at in self.attributes}
        return {at - start: strings for at, strings in self.attributes.items() if start <= at < stop}

    def slice(self, start: int, stop: int) -> bytes:
        """The items ``start`` to ``stop``, exclusive, as one ``bytes``."""
        if self._items is not None:
            return b"".join(self._items[start:stop])
        if start == 0 and stop == len(self):
            return self._wire
        return self._wire[self._offsets[start] : self._offsets[stop]]


def _cost(strings: Mapping[str, str]) -> int:
    """What attributes take in memory; four bytes a character, since one may need as many."""
    size = sum(
        4 * (len(name) + len(text)) if not (name + text).isascii() else len(name) + len(text)
        for name, text in strings.items()
    )
    return ATTRIBUTES_OVERHEAD_BYTES + ATTRIBUTE_OVERHEAD_BYTES * len(strings) + size

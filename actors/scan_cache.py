"""The scan cache: each topic's recent messages in wire form, under one memory budget over all topics.

A commit is appended as its items, after it is durable and before anybody is told. Small commits gather in
an open chunk; at 64 KiB it is sealed into one ``bytes`` and the offsets of its items, so that a page of
thousands is a few slices. Chunks are dropped oldest first, whatever topic they are of. A topic's chunks
hold everything from the first of them to its watermark, without holes, or nothing at all: a reader who
starts inside touches no disk.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from itertools import accumulate
from typing import TYPE_CHECKING

from protocol.ids import FIRST_BOUND, ID_BYTES, after

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: Bytes at which an open chunk is sealed: large enough to slice well, small enough to drop finely.
SEAL_BYTES = 64 * 1024
#: What a chunk and its bookkeeping cost beside its bytes, measured with tracemalloc.
CHUNK_OVERHEAD_BYTES = 600
#: What an item costs beside its bytes: in an open chunk, a ``bytes`` object and a list slot.
ITEM_OVERHEAD_BYTES = 41


class Chunk:
    """Consecutive items; open (a list that grows) or sealed (one ``bytes``)."""

    __slots__ = ("_items", "_offsets", "_wire", "cost", "expiries", "first", "size")

    def __init__(self, first: bytes) -> None:
        #: Id of the first item.
        self.first = first
        self.size = 0
        self.cost = CHUNK_OVERHEAD_BYTES
        #: Index → when its own time to live ends (ms), for items that have one.
        self.expiries: dict[int, int] = {}
        self._items: list[bytes] | None = []
        self._wire = b""
        self._offsets: array[int] = array("Q")

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._items is None else len(self._items)

    def append(self, items: Sequence[bytes], expiries: Mapping[int, int]) -> int:
        """Add items to an open chunk; returns by how much it costs more."""
        assert self._items is not None  # only the last chunk of a topic, while open, is appended to
        base = len(self._items)
        for index, expiry in expiries.items():
            self.expiries[base + index] = expiry
        self._items += items
        added = sum(map(len, items))
        self.size += added
        grown = added + ITEM_OVERHEAD_BYTES * len(items) + 100 * len(expiries)
        self.cost += grown
        return grown

    @property
    def full(self) -> bool:
        """Whether it is time to seal."""
        return self.size >= SEAL_BYTES

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

    def slice(self, start: int, stop: int) -> bytes:
        """The items ``start`` to ``stop``, exclusive, as one ``bytes``."""
        if self._items is not None:
            return b"".join(self._items[start:stop])
        if start == 0 and stop == len(self):
            return self._wire
        return self._wire[self._offsets[start] : self._offsets[stop]]


class CacheBudget:
    """The memory all topics' chunks may take together, and who has to give some back."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self._chunks: OrderedDict[int, tuple[TopicCache, Chunk]] = OrderedDict()

    def opened(self, cache: TopicCache, chunk: Chunk) -> None:
        """A chunk is there."""
        self._chunks[id(chunk)] = (cache, chunk)
        self.bytes += chunk.cost

    def changed(self, by: int) -> None:
        """Chunks cost ``by`` more than before; drops the oldest until all is within the budget."""
        self.bytes += by
        while self.bytes > self.max_bytes and self._chunks:
            cache, _ = next(iter(self._chunks.values()))
            cache.drop_oldest()

    def closed(self, chunk: Chunk) -> None:
        """A chunk is gone."""
        del self._chunks[id(chunk)]
        self.bytes -= chunk.cost


class TopicCache:
    """One topic's chunks, oldest first."""

    def __init__(self, budget: CacheBudget) -> None:
        self.budget = budget
        self.prefix = b""
        #: The bound from which on everything is here; counts only while there are chunks.
        self.since = FIRST_BOUND
        self.chunks: list[Chunk] = []

    def __repr__(self) -> str:
        return f"<TopicCache {sum(map(len, self.chunks))} messages in {len(self.chunks)} chunks>"

    def append(self, prefix: bytes, items: Sequence[bytes], expiries: Mapping[int, int], since: bytes) -> None:
        """Add the items of a commit of the generation whose keys start with ``prefix``.

        Args:
          since: the bound from which on these items are all there is; used when nothing else is here.
        """
        if prefix != self.prefix:
            self.clear()
            self.prefix = prefix
        if not self.chunks:
            self.since = since
        if not self.chunks or self.chunks[-1].full:
            chunk = Chunk(items[0][1 : 1 + ID_BYTES])
            self.chunks.append(chunk)
            self.budget.opened(self, chunk)
        chunk = self.chunks[-1]
        grown = chunk.append(items, expiries)
        if chunk.full:
            grown -= chunk.seal()
        self.budget.changed(grown)

    def covers(self, prefix: bytes, bound: bytes) -> bool:
        """Whether everything from ``bound`` on is here."""
        return bool(self.chunks) and prefix == self.prefix and bound >= self.since

    def chunks_from(self, bound: bytes) -> list[Chunk]:
        """The chunks in which messages from ``bound`` on stand."""
        return self.chunks[max(0, bisect_right(self.chunks, bound, key=_first_of) - 1) :]

    def drop_oldest(self) -> None:
        """Give the oldest chunk's memory back."""
        chunk = self.chunks.pop(0)
        self.since = after(chunk.id_at(len(chunk) - 1))
        self.budget.closed(chunk)

    def clear(self) -> None:
        """Forget everything: after a fall, a deletion, a re-creation."""
        while self.chunks:
            self.drop_oldest()


def _first_of(chunk: Chunk) -> bytes:
    return chunk.first

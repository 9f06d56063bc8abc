"""The scan cache: each topic's recent messages in wire form, under one memory budget over all topics.

A commit is appended as its items, after it is durable and before anybody is told. Small commits gather in
an open chunk; at 64 KiB it is sealed into one ``bytes`` and the offsets of its items, so that a page of
thousands is a few slices. Chunks are dropped oldest first, whatever topic they are of. A topic's chunks
hold everything from the first of them to its watermark, without holes, or nothing at all: a reader who
starts inside touches no disk.

Messages of transactions stand here like all others, with runs of write pointers beside them. A row that refers
to stored messages does not: the topic clears its cache there, and starts anew behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.cache_chunk import Chunk
from protocol.ids import FIRST_BOUND, ID_BYTES, NO_PAYLOAD_PART, after

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

#: No item has attributes.
NONE: Mapping[int, Mapping[str, str]] = MappingProxyType({})
#: Bytes at which an open chunk is sealed: large enough to slice well, small enough to drop finely.
SEAL_BYTES = 64 * 1024


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

    def append(
        self,
        prefix: bytes,
        items: Sequence[bytes],
        expiries: Mapping[int, int],
        since: bytes,
        pointer_runs: Sequence[tuple[int, int, int]] = (),
        attributes: Mapping[int, Mapping[str, str]] = NONE,
    ) -> None:
        """Add the items of a commit of the generation whose keys start with ``prefix``.

        Args:
          expiries: index of an item → when its own time to live ends (ms).
          since: the bound from which on these items are all there is; used when nothing else is here.
          pointer_runs: ``(start, stop, pointer)`` for items that have a write pointer, by index, ascending.
          attributes: index of an item → its attributes, for items that have some.
        """
        if prefix != self.prefix:
            self.clear()
            self.prefix = prefix
        if not self.chunks:
            self.since = since
        if not self.chunks or self.chunks[-1].size >= SEAL_BYTES:
            chunk = Chunk(items[0][1 : 1 + ID_BYTES])
            self.chunks.append(chunk)
            self.budget.opened(self, chunk)
        chunk = self.chunks[-1]
        grown = chunk.append(items, expiries, pointer_runs, attributes)
        if chunk.size >= SEAL_BYTES:
            grown -= chunk.seal()
        self.budget.changed(grown)

    def roll_back(self, prefix: bytes, pointer: int, first: bytes, last: bytes) -> None:
        """Turn the sign of ``pointer`` in the items that carry it, from position ``first`` to ``last`` (10 bytes each).

        Both are included. Done again, or where nothing of it is here, it changes nothing.
        """
        if prefix != self.prefix:
            return
        start, stop = first + NO_PAYLOAD_PART, last + b"\xff" * len(NO_PAYLOAD_PART)
        grown = 0
        for chunk in self.chunks_from(start):
            if chunk.first > stop:
                break
            grown += chunk.roll_back(pointer, chunk.find(start), chunk.find(stop))
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

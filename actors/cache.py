"""The scan cache: recent messages of each topic in wire form, under one memory budget for all topics.

The topic actor appends a commit's items once it is durable, and before it answers. Small commits are collected in an
open chunk. At 64 KiB it is sealed into one ``bytes`` and the offsets of its items, so that a page of thousands of
messages is a few slices. The oldest chunk of all topics is dropped first. A topic's chunks are contiguous up to its
watermark, so a reader that starts within them reads nothing from disk.

Messages of transactions are cached like all others; runs of write pointers are stored separately. A row that refers to
stored messages is not cached: the topic drops its chunks there, and starts new ones after it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.chunks import Chunk
from actors.kept_chunks import KeptChunks
from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES, NO_PAYLOAD_PART, after

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.reading import Paging

#: No item has attributes.
NONE: Mapping[int, Mapping[str, str]] = MappingProxyType({})
#: Bytes at which an open chunk is sealed: large enough to slice well, small enough to drop in small steps.
SEAL_BYTES = 64 * 1024


#: Kept chunks may take 1/KEPT_PART of the budget.
KEPT_PART = 8


class CacheBudget:
    """The memory for the chunks of all topics, recent and kept ones; the oldest recent ones are dropped beyond it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        #: Messages from the store that are likely to be read again or next.
        self.kept = KeptChunks(max_bytes // KEPT_PART)
        self.hits = 0
        self.misses = 0
        #: Number of changes to cached messages in all topics; the source of ``TopicCache.revision``.
        self.revisions = 0
        self._chunks: OrderedDict[int, tuple[TopicCache, Chunk]] = OrderedDict()

    def opened(self, cache: TopicCache, chunk: Chunk) -> None:
        """Count a new chunk."""
        self._chunks[id(chunk)] = (cache, chunk)
        self.bytes += chunk.cost

    def changed(self, by: int) -> None:
        """Add ``by`` bytes to the cost of chunks, then drop the oldest chunks beyond the budget."""
        self.bytes += by
        while self.bytes > self.max_bytes and self._chunks:
            cache, _ = next(iter(self._chunks.values()))
            cache.drop_oldest()

    def closed(self, chunk: Chunk) -> None:
        """Stop counting a dropped chunk."""
        del self._chunks[id(chunk)]
        self.bytes -= chunk.cost


class TopicCache:
    """One topic's chunks, oldest first."""

    def __init__(self, budget: CacheBudget) -> None:
        self.budget = budget
        self.prefix = b""
        #: The cache is complete from this bound on; valid only while there are chunks.
        self.since = FIRST_BOUND
        self.chunks: list[Chunk] = []
        #: Key prefixes of generations that may have kept chunks.
        self._prefixes: set[bytes] = set()
        #: Changes whenever messages that were read before may have changed; unique across all caches.
        self.revision = 0
        self._revise()

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
        """Add the items of a commit to the generation with the key prefix ``prefix``.

        Args:
          expiries: index of an item → when its own time to live ends (ms).
          since: the items are complete from this bound on; used if the cache is empty.
          pointer_runs: ``(start, stop, pointer)`` for items that have a write pointer, by index, ascending.
          attributes: index of an item → its attributes, for items that have any.
        """
        if prefix != self.prefix:
            self.clear()
            self.prefix = prefix
        if not self.chunks:
            self.since = since
        if not self.chunks or self.chunks[-1].is_sealed:
            chunk = Chunk(items[0][1 : 1 + ID_BYTES])
            self.chunks.append(chunk)
            self.budget.opened(self, chunk)
        chunk = self.chunks[-1]
        grown = chunk.append(items, expiries, pointer_runs, attributes)
        if chunk.size >= SEAL_BYTES:
            grown -= chunk.seal()
        self.budget.changed(grown)

    def append_wire(
        self,
        prefix: bytes,
        wire: bytes,
        offsets: array[int] | range,
        expiries: Mapping[int, int],
        since: bytes,
        pointer_runs: Sequence[tuple[int, int, int]] = (),
        attributes: Mapping[int, Mapping[str, str]] = NONE,
    ) -> None:
        """Add many items that are one ``bytes`` already, as a separate chunk; see ``append``.

        Args:
          offsets: where each item begins in ``wire``, then the end of the last one.
        """
        if prefix != self.prefix:
            self.clear()
            self.prefix = prefix
        if not self.chunks:
            self.since = since
        elif not self.chunks[-1].is_sealed:
            self.budget.changed(-self.chunks[-1].seal())
        chunk = Chunk(wire[1 : 1 + ID_BYTES])
        self.chunks.append(chunk)
        self.budget.opened(self, chunk)
        self.budget.changed(chunk.hold(wire, offsets, expiries, pointer_runs, attributes))

    def roll_back(self, prefix: bytes, pointer: int, first: bytes, last: bytes) -> None:
        """Invert the sign of ``pointer`` in the items that carry it, from position ``first`` to ``last``.

        Positions have 10 bytes; both are included. Idempotent; does nothing if no cached item carries the pointer.
        """
        self._revise()
        if prefix != self.prefix:
            return
        start, stop = first + NO_PAYLOAD_PART, last + b"\xff" * len(NO_PAYLOAD_PART)
        grown = 0
        for chunk in self.chunks_from(start):
            if chunk.first > stop:
                break
            grown += chunk.roll_back(pointer, chunk.find(start), chunk.find(stop))
        self.budget.changed(grown)

    def _revise(self) -> None:
        self.budget.revisions += 1
        self.revision = self.budget.revisions

    def has_expiries(self, bound: bytes) -> bool:
        """True if a chunk with messages from ``bound`` on has any with their own time to live."""
        return any(chunk.expiries for chunk in self.chunks_from(bound))

    def covers(self, prefix: bytes, bound: bytes) -> bool:
        """True if the cache is complete from ``bound`` on."""
        return bool(self.chunks) and prefix == self.prefix and bound >= self.since

    def chunks_from(self, bound: bytes) -> list[Chunk]:
        """Return the chunks with messages from ``bound`` on."""
        return self.chunks[max(0, bisect_right(self.chunks, bound, key=_first_of) - 1) :]

    def keep(self, paging: Paging, page: Page, turn: int, *, is_ahead: bool = False) -> bool:
        """Keep the messages of a page from the store, and return True if it was kept; see ``KeptChunks.keep``."""
        grown = self.budget.kept.keep(paging, page, turn, is_ahead=is_ahead)
        if grown is None:
            return False
        self._prefixes.add(paging.span.prefix)
        self.budget.changed(grown)
        return True

    def drop_oldest(self) -> None:
        """Drop the oldest chunk."""
        chunk = self.chunks.pop(0)
        self.since = after(chunk.id_at(len(chunk) - 1))
        self.budget.closed(chunk)

    def clear(self) -> None:
        """Drop all chunks, kept ones too: after a fall, a deletion, a re-creation."""
        self._revise()
        self.start_over()
        self.budget.changed(self.budget.kept.forget(self._prefixes))
        self._prefixes.clear()

    def start_over(self) -> None:
        """Drop the chunks: they are followed by messages that are not cached."""
        while self.chunks:
            self.drop_oldest()


def _first_of(chunk: Chunk) -> bytes:
    return chunk.first

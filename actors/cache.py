"""The scan cache: recent messages of each topic in wire form, under one memory budget over all topics.

The topic actor appends a commit's items once it is durable, and before it answers. Small commits gather in an open
chunk; at 64 KiB it is sealed into one ``bytes`` and the offsets of its items, so that a page of thousands is a few
slices. The oldest chunk is dropped first, whichever topic it belongs to. A topic's chunks have everything from the
first of them to its watermark, without holes, or there are none: a reader that starts inside touches no disk.

Messages of transactions are cached like all others, with runs of write pointers beside them. A row that refers to
stored messages is not: the topic clears its cache there, and starts anew behind it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.chunks import Chunk
from actors.kept_pages import KeptPages
from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES, NO_PAYLOAD_PART, after
from plainsong.protocol.page import offsets_in

if TYPE_CHECKING:
    from array import array
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.topic.reading import Paging

#: No item has a time to live of its own.
NO_EXPIRIES: Mapping[int, int] = MappingProxyType({})
#: No item has attributes.
NONE: Mapping[int, Mapping[str, str]] = MappingProxyType({})
#: Bytes at which an open chunk is sealed: large enough to slice well, small enough to drop finely.
SEAL_BYTES = 64 * 1024


#: The part of the budget that pages of the store may take.
PAGES_PART = 8


class CacheBudget:
    """The memory that the chunks and pages of all topics may take together; drops the oldest chunks beyond it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        #: Pages of the store that are asked for again, or soon; what they take counts like chunks.
        self.pages = KeptPages(max_bytes // PAGES_PART)
        self.hits = 0
        self.misses = 0
        #: How often something that was cached has become something else.
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
        #: The cache has everything from this bound on; valid only while there are chunks.
        self.since = FIRST_BOUND
        self.chunks: list[Chunk] = []
        #: The generations of which pages may be kept.
        self._prefixes: set[bytes] = set()
        #: Changes whenever messages that were read before may have changed; no two caches ever share one.
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
        """Add the items of a commit of the generation whose keys start with ``prefix``.

        Args:
          expiries: index of an item → when its own time to live ends (ms).
          since: these items are everything from this bound on; used if the cache is empty.
          pointer_runs: ``(start, stop, pointer)`` for items that have a write pointer, by index, ascending.
          attributes: index of an item → its attributes, for items that have some.
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
        """As ``append``, of many items that are one ``bytes`` already: they become a chunk of their own.

        Args:
          offsets: where in ``wire`` each item begins, and its end.
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

        Positions have 10 bytes; both are included. A second call, or one without such items here, changes nothing.
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
        """Whether a chunk with messages from ``bound`` on has some with a time to live of their own."""
        return any(chunk.expiries for chunk in self.chunks_from(bound))

    def covers(self, prefix: bytes, bound: bytes) -> bool:
        """Whether the cache has everything from ``bound`` on."""
        return bool(self.chunks) and prefix == self.prefix and bound >= self.since

    def chunks_from(self, bound: bytes) -> list[Chunk]:
        """The chunks with messages from ``bound`` on."""
        return self.chunks[max(0, bisect_right(self.chunks, bound, key=_first_of) - 1) :]

    def kept_page(self, span: Span, limit: int, max_bytes: int) -> Page | None:
        """A page of the store that is kept; counts whether there is one."""
        pages = self.budget.pages
        before = pages.bytes
        page = pages.find(span, limit, max_bytes)
        if page is None:
            self.budget.misses += 1
        else:
            self.budget.hits += 1
            self.budget.changed(pages.bytes - before)
        return page

    def offer_page(
        self, paging: Paging, page: Page, limit: int, max_bytes: int, turn: int, *, ahead: bool = False
    ) -> None:
        """Keep a page from the store if it is worth it; see ``KeptPages.offer``."""
        self._kept(paging, self.budget.pages.offer(paging, page, limit, max_bytes, turn, ahead=ahead))

    def offer_stretch(self, paging: Paging, page: Page, turn: int) -> bool:
        """Keep the messages of a page as a stretch, if it may be one; see ``KeptPages.offer_stretch``."""
        if not page.count:
            return False
        wire = b"".join(page.parts)
        chunk = Chunk(wire[1 : 1 + ID_BYTES])
        chunk.hold(wire, offsets_in(wire), NO_EXPIRIES, (), NONE)
        return self._kept(paging, self.budget.pages.offer_stretch(paging, page, chunk, turn))

    def _kept(self, paging: Paging, grown: int | None) -> bool:
        if grown is None:
            return False
        self._prefixes.add(paging.span.prefix)
        self.budget.changed(grown)
        return True

    def drop_oldest(self) -> None:
        """Give the oldest chunk's memory back."""
        chunk = self.chunks.pop(0)
        self.since = after(chunk.id_at(len(chunk) - 1))
        self.budget.closed(chunk)

    def clear(self) -> None:
        """Forget everything: after a fall, a deletion, a re-creation."""
        self._revise()
        self.begin_anew()
        self.budget.changed(self.budget.pages.forget(self._prefixes))
        self._prefixes.clear()

    def begin_anew(self) -> None:
        """Forget the chunks: there are messages behind them that are not cached."""
        while self.chunks:
            self.drop_oldest()


def _first_of(chunk: Chunk) -> bytes:
    return chunk.first

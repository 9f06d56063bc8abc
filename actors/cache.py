"""The scan cache: recent messages of each topic in wire form, under one memory budget over all topics.

The topic actor appends a commit's items once it is durable, and before it answers. Small commits gather in an open
chunk; at 64 KiB it is sealed into one ``bytes`` and the offsets of its items, so that a page of thousands is a few
slices. The oldest chunk is dropped first, whichever topic it belongs to. A topic's chunks have everything from the
first of them to its watermark, without holes, or there are none: a reader that starts inside touches no disk.

Messages of transactions are cached like all others, with runs of write pointers beside them. A row that refers to
stored messages is not: the topic clears its cache there, and starts anew behind it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.kept_pages import KeptPages
from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES, NO_PAYLOAD_PART, after
from plainsong.protocol.page import offsets_in
from plainsong.protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.topic.reading import Paging
    from plainsong.protocol.transactions.view import View

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
        self.begin_anew()
        self.budget.changed(self.budget.pages.forget(self._prefixes))
        self._prefixes.clear()

    def begin_anew(self) -> None:
        """Forget the chunks: there are messages behind them that are not cached."""
        while self.chunks:
            self.drop_oldest()


def _first_of(chunk: Chunk) -> bytes:
    return chunk.first


# --- chunks: consecutive messages of a topic in wire form ------------------------------------------


#: Memory of a chunk beside its bytes, measured with tracemalloc.
CHUNK_OVERHEAD_BYTES = 900
#: Memory of an item's attributes beside their characters, and of each attribute; measured likewise.
ATTRIBUTES_OVERHEAD_BYTES = 350
ATTRIBUTE_OVERHEAD_BYTES = 110
#: Memory of an item beside its bytes in an open chunk: a ``bytes`` object and a list slot.
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
        self._offsets: array[int] | range = range(1)

    def __len__(self) -> int:
        return len(self._offsets) - 1 if self._items is None else len(self._items)

    @property
    def is_sealed(self) -> bool:
        """Whether no more items are added."""
        return self._items is None

    def hold(
        self,
        wire: bytes,
        offsets: array[int] | range,
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Hold these items and no others; returns the cost added."""
        self._wire, self._offsets, self._items = wire, offsets, None
        self.size = len(wire)
        grown = len(wire) + (offsets.itemsize * (len(offsets) - 1) if isinstance(offsets, array) else 0)
        grown += self._add_beside(0, expiries, pointer_runs, attributes)
        self.cost += grown
        return grown

    def append(
        self,
        items: Sequence[bytes],
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Add items to an open chunk; returns the cost added."""
        assert self._items is not None  # only the last chunk of a topic, while open, is appended to
        base = len(self._items)
        self._items += items
        added = sum(map(len, items))
        self.size += added
        grown = added + ITEM_OVERHEAD_BYTES * len(items)
        grown += self._add_beside(base, expiries, pointer_runs, attributes)
        self.cost += grown
        return grown

    def _add_beside(
        self,
        base: int,
        expiries: Mapping[int, int],
        pointer_runs: Sequence[tuple[int, int, int]],
        attributes: Mapping[int, Mapping[str, str]],
    ) -> int:
        """Add what some of the items from ``base`` on have beside; returns its memory."""
        for index, expiry in expiries.items():
            self.expiries[base + index] = expiry
        had = len(self.runs)
        for start, stop, pointer in pointer_runs:
            self.runs.add(base + start, base + stop, pointer)
        grown = 100 * len(expiries) + RUN_BYTES * (len(self.runs) - had)
        for index, strings in attributes.items():
            self.attributes[base + index] = strings
            grown += _cost(strings)
        return grown

    def seal(self) -> int:
        """Join the items into one ``bytes``; returns the cost saved."""
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
        """Invert the sign of ``pointer`` in the items ``start`` to ``stop``, exclusive; returns the cost added."""
        had = len(self.runs)
        self.runs.roll_back(pointer, start, stop)
        grown = RUN_BYTES * (len(self.runs) - had)
        self.cost += grown
        return grown

    def find(self, bound: bytes) -> int:
        """The index of the first item whose id is not before ``bound``."""
        count = len(self)
        if bound <= self.first:
            return 0
        if bound > self.id_at(count - 1):  # the end of what may be read mostly is
            return count
        return bisect_left(range(count), bound, key=self.id_at)

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
        """The attributes of the items ``start`` to ``stop``, exclusive; indexes begin at 0 with ``start``."""
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
    """Memory of attributes; four bytes for each character of non-ASCII text."""
    size = sum(
        4 * (len(name) + len(text)) if not (name + text).isascii() else len(name) + len(text)
        for name, text in strings.items()
    )
    return ATTRIBUTES_OVERHEAD_BYTES + ATTRIBUTE_OVERHEAD_BYTES * len(strings) + size


# --- runs of items under one write pointer ---------------------------------------------------------
#
# Three columns of numbers, 16 bytes a run: a chunk of single-message transactions has a run for every item, and a tuple
# for each would cost more than the message.


#: Memory of one run, with the room that growing arrays reserve.
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
        """``(start, stop, pointer)`` of each run; the pointer is negative if rolled back, as in the rows."""
        return zip(self._starts, self._stops, self._pointers, strict=True)

    def add(self, start: int, stop: int, pointer: int) -> None:
        """Add the items ``start`` to ``stop``, exclusive, which come after all runs so far."""
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
        """The items ``start`` to ``stop`` as ``(start, stop, verdict, pointer)``; those to deliver are joined."""
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
        """The runs within ``start`` to ``stop``, cut to that range."""
        for index in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            yield max(self._starts[index], start), min(self._stops[index], stop), self._pointers[index]

    def _all_delivered(self, view: View) -> bool:
        return self._lowest > 0 and view.delivers_all(self._lowest, self._highest, lambda: self._pointers)

    def _turn(self, index: int, start: int, stop: int) -> int:
        """Split a run, and invert the part within the range; returns the index of that part."""
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

"""Kept chunks: messages from the store that are likely to be read again, or next; within one bound for all topics.

Consumers that replay a topic request the same messages, and a reader that walks through one requests those that follow
(``actors.pages`` decides what is kept). Any page that kept chunks cover is cut from them, as from the scan cache. Only
plain messages are kept: they are the same for every reader until they expire, whatever is published, committed or
rolled back.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from types import MappingProxyType
from typing import TYPE_CHECKING

from actors.chunks import CHUNK_OVERHEAD_BYTES, Chunk
from plainsong.protocol.ids import ID_BYTES, after
from plainsong.protocol.page import offsets_in

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong.protocol.page import Page
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.topic.reading import Paging

#: Memory of a kept chunk in addition to its items: that of a chunk, and its places in the maps.
KEPT_OVERHEAD_BYTES = CHUNK_OVERHEAD_BYTES + 600
#: Memory of an item in addition to its bytes, once pages have been cut from its chunk: its offset.
_OFFSET_BYTES = 8


class KeptChunk:
    """Consecutive plain messages: all of their generation from ``since`` to ``last_id``."""

    __slots__ = ("_chunk", "count", "first", "is_ahead", "last_id", "next_id", "next_size", "since", "wire")

    def __init__(self, paging: Paging, page: Page, *, is_ahead: bool) -> None:
        assert page.last_id is not None  # the page has messages
        self.wire = page.parts[0] if len(page.parts) == 1 else b"".join(page.parts)
        self.count = page.count
        self.since = paging.span.start
        self.first = self.wire[1 : 1 + ID_BYTES]
        self.last_id = page.last_id
        following = paging.following
        #: The id and the size of the message that follows; an empty id if none was read. It shows where a page ends
        #: because of its limits, although the chunk ends there too.
        self.next_id, self.next_size = following[1 : 1 + ID_BYTES], len(following)
        #: True if it was read before a reader requested it.
        self.is_ahead = is_ahead
        self._chunk: Chunk | None = None

    @property
    def cost(self) -> int:
        """Its memory in bytes."""
        return len(self.wire) + _OFFSET_BYTES * self.count + KEPT_OVERHEAD_BYTES

    @property
    def chunk(self) -> Chunk:
        """Its messages, to be cut. Made on first use: an answer with the whole chunk does not need its items."""
        if self._chunk is None:
            self._chunk = Chunk(self.first)
            self._chunk.hold(self.wire, offsets_in(self.wire), MappingProxyType({}), (), MappingProxyType({}))
        return self._chunk

    def is_nearly_read(self, last_id: bytes) -> bool:
        """True if a page that ended at ``last_id`` was beyond the middle."""
        return last_id >= self.last_id or last_id > self.chunk.id_at(self.count // 2)


class KeptChunks:
    """The kept chunks; beyond the bound the least recently used are dropped.

    Chunks of a generation may overlap, but none is inside another.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        #: By prefix of the generation's keys, and first id. Least recently used first.
        self._chunks: OrderedDict[tuple[bytes, bytes], KeptChunk] = OrderedDict()
        #: By prefix, the first ids, ascending. The last ids ascend too.
        self._firsts: dict[bytes, list[bytes]] = {}
        #: Grows whenever chunks are dropped because their messages may change: what was read before is not kept.
        self.turn = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def from_start(self, span: Span) -> Iterator[KeptChunk]:
        """Yield the chunk that covers the start of ``span``, and those that continue it without a gap."""
        prefix, start = span.prefix, span.start
        firsts = self._firsts.get(prefix)
        if firsts is None or span.set_aside:
            return
        for at in range(max(0, bisect_right(firsts, start) - 1), len(firsts)):
            key = prefix, firsts[at]
            kept = self._chunks[key]
            if kept.since > start:
                return
            if start <= kept.last_id:
                self._chunks.move_to_end(key)
                yield kept
                start = after(kept.last_id)

    def covers(self, span: Span) -> bool:
        """True if the message at the start of ``span`` is kept."""
        return next(self.from_start(span), None) is not None

    def keep(self, paging: Paging, page: Page, turn: int, *, is_ahead: bool = False) -> int | None:
        """Keep the messages of a page that was read from the store.

        Args:
          turn: the value of ``KeptChunks.turn`` when its span was made.
          is_ahead: no reader has requested them yet.

        Returns:
          The growth of the kept chunks in bytes; None if the page cannot be kept: it may change, is empty or too large.
        """
        prefix = paging.span.prefix
        if not page.count or not paging.is_plain or paging.span.set_aside or turn != self.turn:
            return None
        kept = KeptChunk(paging, page, is_ahead=is_ahead)
        if kept.cost > self.max_bytes:
            return None
        before = self.bytes
        firsts = self._firsts.get(prefix, [])
        at = bisect_right(firsts, kept.first) - 1
        if at >= 0 and (other := self._chunks[prefix, firsts[at]]).last_id > kept.last_id:
            if other.first == kept.first:
                other.since = min(other.since, kept.since)
            return 0  # the other chunk has all of its messages
        at = bisect_left(firsts, kept.first)
        while at < len(firsts) and (other := self._chunks[prefix, firsts[at]]).last_id <= kept.last_id:
            if other.first == kept.first:
                kept.since = min(kept.since, other.since)
            self._drop((prefix, other.first))
        insort(self._firsts.setdefault(prefix, []), kept.first)
        self._chunks[prefix, kept.first] = kept
        self.bytes += kept.cost
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._chunks)))
        return self.bytes - before

    def forget(self, prefixes: set[bytes]) -> int:
        """Drop the chunks of generations; return the growth of the kept chunks in bytes, which is at most 0."""
        self.turn += 1
        before = self.bytes
        for prefix in prefixes:
            for first in tuple(self._firsts.get(prefix, ())):
                self._drop((prefix, first))
        return self.bytes - before

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        self.bytes -= self._chunks.pop(key).cost
        prefix, first = key
        firsts = self._firsts[prefix]
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._firsts[prefix]

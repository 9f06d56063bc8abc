"""Pages of the store that are likely to be read again, or next; cached under one bound over all topics.

Readers that begin at the same position with the same limits, such as the consumers of a group that replay a topic,
request the same pages; a page is kept from the second time on. A page that was read ahead (``actors.pages``) is kept
until its reader requests it. A page of plain messages that ended at a limit is the same for every reader until its
first message expires, whatever is published, committed or rolled back.

A **stretch** replaces many small pages for a reader that walks through a topic: consecutive plain messages, from which
pages with any start and limits can be cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from plainsong.protocol.ids import ID_BYTES, after
from plainsong.protocol.page import Page

if TYPE_CHECKING:
    from actors.chunks import Chunk
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.topic.reading import Paging

K = TypeVar("K")
V = TypeVar("V")
#: How many recent pages to remember, to detect rereads.
REMEMBERED = 1024
#: Memory of a page in addition to its bytes.
PAGE_OVERHEAD_BYTES = 700


class Remembered(Generic[K, V]):
    """A map of bounded size that drops the oldest entry."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def add(self, key: K, value: V) -> V | None:
        """Add a value as the newest; return the previous value of this key, if any."""
        old = self._values.pop(key, None)
        self._values[key] = value
        if len(self._values) > self._most:
            self._values.popitem(last=False)
        return old

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if it is not remembered."""
        return self._values.get(key)

    def forget(self, key: K) -> V | None:
        """Remove a key; return its value, or None if it was not remembered."""
        return self._values.pop(key, None)


class PageKind(NamedTuple):
    """Determines, together with the first message, where a page ends."""

    prefix: bytes
    """The prefix of the generation's keys."""
    limit: int
    max_bytes: int


@dataclass(slots=True)
class KeptPage:
    """A page, for any span that begins between ``since`` and its first message, and ends at ``until`` or later."""

    since: bytes
    until: bytes
    page: Page
    cost: int
    ahead: bool = False
    """Read ahead for one reader: the page is dropped once it is used."""
    chunk: Chunk | None = None
    """The messages of a stretch."""


def stretch_kind(prefix: bytes) -> PageKind:
    """Return the kind of all stretches of a generation."""
    return PageKind(prefix, 0, 0)


class KeptPages:
    """The kept pages; beyond the bound the least recently used are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        #: Least recently used first.
        self._pages: OrderedDict[tuple[PageKind, bytes], KeptPage] = OrderedDict()
        #: The ids of the pages' first messages, ascending.
        self._firsts: dict[PageKind, list[bytes]] = {}
        self._read: Remembered[tuple[PageKind, bytes], bool] = Remembered(REMEMBERED)
        #: Grows whenever pages are dropped for a change: pages that were read before are not kept any more.
        self.turn = 0

    def __len__(self) -> int:
        return len(self._pages)

    def find(self, span: Span, limit: int, max_bytes: int) -> Page | None:
        """Return the page that begins at the start of ``span``; None if it is not kept."""
        key = self._key(span, limit, max_bytes)
        if key is None:
            return None
        kept = self._pages[key]
        page = kept.page
        if kept.ahead:
            self._drop(key)
            self._read.add(key, True)
        else:
            self._pages.move_to_end(key)
        return Page(page.parts, page.count, page.payload_bytes, page.last_id, page.end)

    def bytes_of(self, span: Span, limit: int, max_bytes: int) -> int | None:
        """Return the bytes of the page that begins at the start of ``span``; None if it is not kept."""
        key = self._key(span, limit, max_bytes)
        return None if key is None else self._pages[key].page.payload_bytes

    def _key(self, span: Span, limit: int, max_bytes: int) -> tuple[PageKind, bytes] | None:
        kind = PageKind(span.prefix, limit, max_bytes)
        firsts = self._firsts.get(kind)
        if firsts is None or span.set_aside:
            return None
        start = span.start
        at = bisect_left(firsts, start)
        if at == len(firsts):
            return None
        key = kind, firsts[at]
        kept = self._pages[key]
        return None if kept.since > start or kept.until > span.until else key

    def may_keep(self, kind: PageKind, page: Page) -> bool:
        """Return True if a page was offered or found recently, so that the next one may be worth keeping too."""
        return page.end == "more" and page.count > 0 and (kind, page.parts[0][1 : 1 + ID_BYTES]) in self._read

    def offer(
        self, paging: Paging, page: Page, limit: int, max_bytes: int, turn: int, *, ahead: bool = False
    ) -> int | None:
        """Keep a page that was read from the store, if it was read before and cannot change.

        Args:
          turn: ``KeptPages.turn`` from before the read.
          ahead: the page was read ahead: keep it for its reader, even if it was not read before.

        Returns:
          The growth of the kept pages in bytes; None if the page is not kept.
        """
        span = paging.span
        size = page.payload_bytes + PAGE_OVERHEAD_BYTES
        if page.end != "more" or not self._takes(paging, size, turn):
            return None
        kind, first = PageKind(span.prefix, limit, max_bytes), page.parts[0][1 : 1 + ID_BYTES]
        key = kind, first
        is_known = key in self._read if ahead else self._read.add(key, True) is not None
        if not (ahead or is_known):
            return None
        # A page that is sent repeatedly is faster to send as one part.
        ahead &= not is_known
        parts = page.parts if ahead else (b"".join(page.parts),)
        kept = Page(parts, page.count, page.payload_bytes, page.last_id, page.end)
        return self._keep(key, KeptPage(span.start, span.until, kept, size, ahead))

    def offer_stretch(self, paging: Paging, page: Page, chunk: Chunk, turn: int) -> int | None:
        """Keep the messages of a page as a stretch; see ``offer``."""
        span = paging.span
        if not self._takes(paging, chunk.cost, turn):
            return None
        key = stretch_kind(span.prefix), chunk.first
        ends = Page((), page.count, page.payload_bytes, page.last_id, page.end)  # the chunk has the messages
        return self._keep(key, KeptPage(span.start, span.until, ends, chunk.cost, chunk=chunk))

    def _takes(self, paging: Paging, cost: int, turn: int) -> bool:
        """Return True if the page is the same for every reader, is still current, and fits."""
        return paging.is_plain and not paging.span.set_aside and cost <= self.max_bytes and turn == self.turn

    def stretch(self, span: Span) -> list[Chunk]:
        """Return the stretch that covers the start of ``span``, and those that continue it; at most three, or none."""
        kind = stretch_kind(span.prefix)
        firsts = self._firsts.get(kind)
        if firsts is None or span.set_aside:
            return []
        start = span.start
        at = max(0, bisect_right(firsts, start) - 1)
        found: list[Chunk] = []
        for first in firsts[at : at + 3]:
            key = kind, first
            kept = self._pages[key]
            chunk, last_id = kept.chunk, kept.page.last_id
            assert chunk is not None  # as of every stretch
            assert last_id is not None  # it has a message
            if kept.since <= start <= last_id:
                self._pages.move_to_end(key)
                found.append(chunk)
                start = after(last_id)
            elif found:
                break
        return found

    def _keep(self, key: tuple[PageKind, bytes], kept: KeptPage) -> int:
        """Keep a page, in place of one with the same key; return the growth of the kept pages in bytes."""
        before = self.bytes
        old = self._pages.pop(key, None)
        if old is None:
            insort(self._firsts.setdefault(key[0], []), key[1])
        else:
            self.bytes -= old.cost
        self._pages[key] = kept
        self.bytes += kept.cost
        while self.bytes > self.max_bytes:
            self._drop(next(iter(self._pages)))
        return self.bytes - before

    def forget(self, prefixes: set[bytes]) -> int:
        """Drop the pages of generations; return the growth of the kept pages in bytes, which is at most 0."""
        self.turn += 1
        before = self.bytes
        for key in [key for key in self._pages if key[0].prefix in prefixes] if prefixes else ():
            self._drop(key)
        return self.bytes - before

    def _drop(self, key: tuple[PageKind, bytes]) -> None:
        self.bytes -= self._pages.pop(key).cost
        kind, first = key
        firsts = self._firsts[kind]
        del firsts[bisect_left(firsts, first)]
        if not firsts:
            del self._firsts[kind]

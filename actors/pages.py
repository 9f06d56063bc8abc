"""Reads pages of topics, and reads ahead: while a catching-up reader handles one page, the next one is read.

Such a reader requests page after page, each from the end of the last one. Without reading ahead either the store idles,
while a page is sent and handled, or the reader does, while the store reads. So from the second page of a walk on, the
page after it is read before it is requested, and kept (``actors.kept_pages``). If the request arrives during the read,
it waits for the result instead of reading again.

    a walk     page 1     page 2        page 3     page 4
    the store  reads 1    reads 2, 3    reads 4    reads 5

A reader that asks again at once gains nothing: its request and the read compete for the interpreter's lock. At the end
of a walk one page is read for nothing. Only one page is read ahead at a time, since several readers keep the store busy
anyway. Only pages that are the same for every reader are kept: pages of plain messages that ended at a limit.

For a page of a few messages, most of the store's time is spent on starting the read. So after small pages of a walk a
*stretch* of hundreds of messages is read, from which pages of any limits are cut; the next stretch is read once half of
it was requested.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from actors.kept_pages import PageKind, Remembered, stretch_kind
from actors.reading import feed_cached, feed_chunk, read_page, walk_rows
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, after
from plainsong.protocol.page import Page
from plainsong.protocol.topic.reading import Paging
from plainsong.protocol.transactions.view import AsOfView

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.cache import TopicCache
    from actors.directory import Directory
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.transactions.view import View
    from storage.base import Store

    #: Identifies a page before it is read: its kind, and the bound where it begins.
    _Start = tuple[PageKind, bytes]

log = logging.getLogger(__name__)
#: Concurrent reads ahead.
AT_ONCE = 1
#: The smallest page, in bytes, after which the next page is read ahead. For smaller ones reading ahead costs more than
#: reading: a stretch is read instead.
LEAST_BYTES = 64 << 10
#: Read ahead only for readers that take at least this long from one page to the next request. A load generator in C
#: takes 0.6 ms for 10 000 messages of 100 bytes, the Python client 6 ms.
LEAST_PAUSE_S = 0.001
#: The maximum of a stretch, in bytes and messages.
STRETCH_BYTES, STRETCH_MESSAGES = 256 << 10, 5_000
#: How many ends of pages to remember, to detect readers that continue there.
REMEMBERED = 1024


class Pages:
    """Reads pages of topics, from the scan cache or the store, and the next ones ahead while ``run`` is running."""

    def __init__(self, store: Store, directory: Directory, *, clock: Callable[[], float] = perf_counter) -> None:
        """``clock``: a monotonic clock, in seconds."""
        self._store = store
        self._directory = directory
        self._clock = clock
        self._nursery: trio.Nursery | None = None
        #: For the start of a next page: when the page before it was read.
        self._ends: Remembered[_Start, float] = Remembered(REMEMBERED)
        #: By generation prefix, the last range from which no stretch could be made.
        self._not_kept: Remembered[bytes, tuple[bytes, bytes]] = Remembered(REMEMBERED)
        #: Set when a read ahead ends, successful or not.
        self._under_way: dict[_Start, trio.Event] = {}

    async def run(self) -> None:
        """Read ahead, until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def read(
        self,
        name: TopicName,
        span: Span,
        *,
        limit: int,
        max_bytes: int,
        view: View | None = None,
        with_pointers: bool = False,
    ) -> Page:
        """Return the next messages of a span; see ``actors.reading.read_page``. Raises StoreError."""
        cache = self._directory.cache(name)
        bounds = {"limit": limit, "max_bytes": max_bytes}
        from_store = partial(read_page, self._store, cache, span, **bounds, view=view, with_pointers=with_pointers)
        if cache is None or isinstance(view, AsOfView):
            return await from_store()
        arrived_s, turn = self._clock(), cache.budget.pages.turn
        kind = PageKind(span.prefix, limit, max_bytes)
        for each in (kind, stretch_kind(span.prefix)) if self._under_way else ():
            under_way = self._under_way.get((each, span.start))
            if under_way is not None:
                await under_way.wait()
        page = self._of_stretch(cache, span, Paging(span, limit, max_bytes, view, with_pointers=with_pointers))
        if page is not None:
            cache.budget.hits += 1
        else:
            page = await from_store()
            self._go_on(cache, kind, span, page, arrived_s, turn)
        return page

    def read_now(
        self,
        name: TopicName,
        span: Span,
        *,
        limit: int,
        max_bytes: int,
        at_once_bytes: int,
        view: View | None,
        with_pointers: bool = False,
    ) -> Page | None:
        """Return the page that ``read`` would return if it is in memory and small, else None.

        Args:
          at_once_bytes: the maximum of a small page in wire bytes.
          view: not an ``AsOfView``.
        """
        if span.start >= span.until:
            return Page(last_id=span.resume)
        cache = self._directory.cache(name)
        if cache is None:
            return None
        paging = Paging(span, limit, min(max_bytes, at_once_bytes), view, with_pointers=with_pointers)
        if feed_cached(cache, span, paging):
            page: Page | None = paging.page()
        elif (size := cache.budget.pages.bytes_of(span, limit, max_bytes)) is not None:
            return cache.kept_page(span, limit, max_bytes) if size <= at_once_bytes else None
        else:
            page = self._of_stretch(cache, span, paging)
        if page is None or page.payload_bytes > at_once_bytes:  # a page has at least one message, of any size
            return None
        if page.end == "more" and page.count < limit and at_once_bytes < max_bytes:
            return None  # it was cut at at_once_bytes
        cache.budget.hits += 1
        return page

    def _of_stretch(self, cache: TopicCache, span: Span, paging: Paging) -> Page | None:
        """Return a page that kept stretches cover completely, else None; reads the next stretch ahead if it is time."""
        chunks = cache.budget.pages.stretch(span)
        if not chunks or cache.covers(span.prefix, span.start):
            return None
        rest = span
        for chunk in chunks:
            if not feed_chunk(chunk, rest, paging):
                break
            rest = replace(
                span, since=after(chunk.id_at(len(chunk) - 1))
            )  # the next one may begin before this one ends
        page = paging.page()
        if page.end != "more" or page.last_id is None:
            return None  # it may continue after the stretch
        if len(chunks) == 1 and page.last_id > chunk.id_at(len(chunk) // 2):
            behind = replace(span, since=after(chunk.id_at(len(chunk) - 1)))
            self._begin(cache, stretch_kind(span.prefix), behind, cache.budget.pages.turn)
        return page

    def _go_on(self, cache: TopicCache, kind: PageKind, span: Span, page: Page, arrived_s: float, turn: int) -> None:
        """Remember where a page ended, and begin to read ahead if its reader walks through the topic, and not too fast.

        Args:
          arrived_s: when the page was requested.
          turn: ``KeptPages.turn`` of when the span was made: pages dropped since must not be kept again.
        """
        pages = cache.budget.pages
        if page.last_id is None or not pages.may_keep(kind, page):
            return
        begun_s = self._ends.forget((kind, span.start))
        behind = replace(span, since=after(page.last_id))
        self._ends.add((kind, behind.start), self._clock())
        if begun_s is None:
            return
        if page.payload_bytes < LEAST_BYTES:
            self._begin(cache, stretch_kind(span.prefix), behind, turn)
        elif arrived_s - begun_s >= LEAST_PAUSE_S and page.payload_bytes <= pages.max_bytes // 2:
            # The next page may be larger, but will probably fit.
            self._begin(cache, kind, behind, turn)

    def _begin(self, cache: TopicCache, kind: PageKind, span: Span, turn: int) -> None:
        """Begin to read a page or stretch ahead, unless it is in memory, or another one is being read ahead."""
        start, pages = (kind, span.start), cache.budget.pages
        if (
            self._nursery is None
            or len(self._under_way) >= AT_ONCE
            or span.start >= span.until
            or cache.covers(span.prefix, span.start)
        ):
            return
        if kind.limit:
            if pages.bytes_of(span, kind.limit, kind.max_bytes) is not None:
                return
        else:
            first, last = self._not_kept.get(span.prefix) or (LAST_BOUND, FIRST_BOUND)
            if first <= span.start <= last or pages.stretch(span):
                return
        self._nursery.start_soon(self._read, cache, start, span, turn)
        self._under_way[start] = trio.Event()

    async def _read(self, cache: TopicCache, start: _Start, span: Span, turn: int) -> None:
        kind, _ = start
        try:
            most_bytes = min(kind.max_bytes or STRETCH_BYTES, cache.budget.pages.max_bytes)
            paging = Paging(span, kind.limit or STRETCH_MESSAGES, most_bytes)
            cache.budget.misses += 1
            await walk_rows(self._store, paging)
            page = paging.page()
            if not kind.limit:
                if not cache.offer_stretch(paging, page, turn) and turn == cache.budget.pages.turn:
                    self._not_kept.add(span.prefix, (span.start, page.last_id or span.until))
            elif most_bytes == kind.max_bytes or page.count == kind.limit:  # else it may have been cut too early
                cache.offer_page(paging, page, kind.limit, kind.max_bytes, turn, ahead=True)
        except PlainsongError as error:
            # The reader's own request will meet the error, and report it.
            log.debug("nothing was read ahead", extra={"why": error.detail})
        except Exception:  # a bug; nothing depends on this read, so it must not take the daemon down
            log.exception("nothing was read ahead")
        finally:
            self._under_way.pop(start).set()

"""Pages of topics, and reading ahead: the next page of a reader far behind is read while it takes in the one before.

Such a reader asks for page after page, each from where the last one ended. Meanwhile either the store rests, while an
answer is sent, decoded and acted upon, or the reader does, while the store reads. So the page behind the second one of
a walk, and behind each that follows, is read before anybody asks for it, and kept for whoever does
(``actors.kept_pages``). A reader that comes while it is being read waits for it, instead of reading it once more.

    a walk     page 1     page 2        page 3     page 4
    the store  reads 1    reads 2, 3    reads 4    reads 5

A reader that is back at once gains nothing by it: what it asks for, and what is read for it, want the interpreter's lock
at the same time. Where a walk ends, one page has been read in vain. One page is read ahead at a time: several readers
keep the store at work without. Only pages that are the same for every reader are kept: of plain messages, ended by a
limit.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from actors.kept_pages import PageKind, Remembered
from actors.reading import feed_cached, read_page, walk_rows
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import after
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

    #: A page before it is read: what kind it is, and the bound where it begins.
    _Start = tuple[PageKind, bytes]

log = logging.getLogger(__name__)
#: Pages that are read ahead at a time.
AT_ONCE = 1
#: The least page, in bytes, behind which one is read ahead. To read a shorter one takes less than to do it ahead.
LEAST_BYTES = 64 << 10
#: How long a reader has to have taken for a page, from when it was read until the next one is asked for, to have the one
#: behind read ahead. For 10 000 messages of 100 bytes a load generator in C takes 0.6 ms, the Python client 6.
LEAST_PAUSE_S = 0.001
#: Ends of pages that are remembered, so that a reader who goes on behind one can be told.
REMEMBERED = 1024


class Pages:
    """Reads pages of topics, from the scan cache or the store, and the next ones ahead while ``run`` is running."""

    def __init__(self, store: Store, directory: Directory, *, clock: Callable[[], float] = perf_counter) -> None:
        """``clock``: seconds from some moment on."""
        self._store = store
        self._directory = directory
        self._clock = clock
        self._nursery: trio.Nursery | None = None
        #: When the page before each of these starts was there.
        self._ends: Remembered[_Start, float] = Remembered(REMEMBERED)
        #: What is set once a page that is being read ahead is there, or will not be.
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
        """The next messages of a span, as ``actors.reading.read_page`` reads them. Raises StoreError."""
        cache = self._directory.cache(name)
        turn = 0 if cache is None else cache.budget.pages.turn
        came_s = self._clock()
        as_of = isinstance(view, AsOfView)
        if self._under_way and not as_of:
            under_way = self._under_way.get((PageKind(span.prefix, limit, max_bytes), span.start))
            if under_way is not None:
                await under_way.wait()
        page = await read_page(
            self._store, cache, span, limit=limit, max_bytes=max_bytes, view=view, with_pointers=with_pointers
        )
        if page.payload_bytes >= LEAST_BYTES and cache is not None and not as_of:
            self._go_on(cache, PageKind(span.prefix, limit, max_bytes), span, page, came_s, turn)
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
        """The page that ``read`` would return, if it is in memory, and small; None: that takes longer.

        Args:
          at_once_bytes: a small page has no more wire bytes than these.
          view: none of a moment.
        """
        if span.start >= span.until:
            return Page(last_id=span.resume)
        cache = self._directory.cache(name)
        if cache is None:
            return None
        paging = Paging(span, limit, min(max_bytes, at_once_bytes), view, with_pointers=with_pointers)
        if feed_cached(cache, span, paging):
            page = paging.page()
            is_cut = page.end == "more" and page.count < limit and at_once_bytes < max_bytes
            # A page has one message, however large that is.
            return None if is_cut or page.payload_bytes > at_once_bytes else page
        size = cache.budget.pages.bytes_of(span, limit, max_bytes)
        return None if size is None or size > at_once_bytes else cache.kept_page(span, limit, max_bytes)

    def _go_on(self, cache: TopicCache, kind: PageKind, span: Span, page: Page, came_s: float, turn: int) -> None:
        """Remember where a page ended, and begin to read the next one if its reader walks, and takes its time.

        Args:
          came_s: when it was asked for.
          turn: ``KeptPages.turn`` when the span was new: what has been forgotten since may not be kept again.
        """
        pages = cache.budget.pages
        if page.last_id is None or not pages.may_keep(kind, page):
            return
        begun_s = self._ends.forget((kind, span.start))
        next_span = replace(span, since=after(page.last_id))
        start = kind, next_span.start
        self._ends.add(start, self._clock())
        if (
            begun_s is not None
            and came_s - begun_s >= LEAST_PAUSE_S
            and self._nursery is not None
            and len(self._under_way) < AT_ONCE
            and page.payload_bytes <= pages.max_bytes // 2  # the next one, which may be larger, is probably kept
            and not cache.covers(next_span.prefix, next_span.start)
            and not pages.has(next_span, kind.limit, kind.max_bytes)
        ):
            self._nursery.start_soon(self._read, cache, start, next_span, turn)
            self._under_way[start] = trio.Event()

    async def _read(self, cache: TopicCache, start: _Start, span: Span, turn: int) -> None:
        kind, _ = start
        try:
            most_bytes = min(kind.max_bytes, cache.budget.pages.max_bytes)
            paging = Paging(span, kind.limit, most_bytes)
            cache.budget.misses += 1
            await walk_rows(self._store, paging)
            page = paging.page()
            if most_bytes == kind.max_bytes or page.count == kind.limit:  # else it may have ended too early
                cache.offer_page(paging, page, kind.limit, kind.max_bytes, turn, ahead=True)
        except PlainsongError as error:
            # Its reader meets that again, and is told.
            log.debug("a page was not read ahead", extra={"why": error.detail})
        except Exception:  # a bug: nobody waits for this page, so nobody has to fall with it
            log.exception("a page was not read ahead")
        finally:
            self._under_way.pop(start).set()

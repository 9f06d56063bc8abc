"""Reads pages of topics, and decides which messages of the store to keep, and which to read ahead.

Everything that is kept for reading is in one cache (``actors.cache``): the recent messages of each topic, and chunks of
older ones (``actors.kept_chunks``). A page is kept when it is read for the second time, since consumers that replay a
topic request the same pages.

A reader that catches up requests page after page, each from the end of the last one. Without reading ahead the store
idles while a page is sent and handled, and the reader idles while the store reads. So from the second page of a walk
on, the messages after a page are read before they are requested, and kept. If the request arrives during the read, it
waits for the result instead of reading again.

    a walk     page 1     page 2        page 3     page 4
    the store  reads 1    reads 2, 3    reads 4    reads 5

For a page of a few messages, most of the store's time is spent on starting the read. So after a small page hundreds of
messages are read ahead, and the next chunk is read once half of them have been requested. After a large page one more
page is read ahead, and only for a reader that pauses: otherwise the read would compete with the reader's next request
for the interpreter's lock. At the end of a walk one chunk is read for nothing. Only one is read ahead at a time, since
several readers keep the store busy anyway.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from actors.reading import feed_cached, feed_kept, read_page, read_stored, walk_rows
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES, LAST_BOUND, after
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

    #: A position of a generation: the prefix of its keys, and a bound.
    _Place = tuple[bytes, bytes]
    #: The limits of a page, in messages and bytes.
    _Bounds = tuple[int, int]

K = TypeVar("K")
V = TypeVar("V")
log = logging.getLogger(__name__)
#: Concurrent reads ahead.
AT_ONCE = 1
#: After a page of at least this many bytes, a whole page is read ahead, up to the same limits.
LARGE_BYTES = 64 << 10
#: Such a page is read ahead for readers that take at least this long from one page to the next request. A load
#: generator in C takes 0.6 ms for 10 000 messages of 100 bytes, the Python client 6 ms.
LEAST_PAUSE_S = 0.001
#: Maximum number of messages and bytes to read ahead after a smaller page.
AHEAD = 5_000, 256 << 10
#: How many starts and ends of recent pages to remember, to detect rereads, and readers that walk.
REMEMBERED = 1024


class Remembered(Generic[K, V]):
    """A map of bounded size that drops the oldest entry."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

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


class Pages:
    """Reads pages of topics, from the cache or the store, and the next ones ahead while ``run`` is running."""

    def __init__(self, store: Store, directory: Directory, *, clock: Callable[[], float] = perf_counter) -> None:
        """``clock``: a monotonic clock, in seconds."""
        self._store = store
        self._directory = directory
        self._clock = clock
        self._nursery: trio.Nursery | None = None
        #: The first messages of recent pages.
        self._firsts: Remembered[_Place, bool] = Remembered(REMEMBERED)
        #: Where recent pages ended, and when they were returned.
        self._ends: Remembered[_Place, float] = Remembered(REMEMBERED)
        #: By generation prefix, the last range that was read ahead and could not be kept.
        self._not_kept: Remembered[bytes, tuple[bytes, bytes]] = Remembered(REMEMBERED)
        #: By start; set when a read ahead ends, successful or not.
        self._under_way: dict[_Place, trio.Event] = {}

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
        if cache is None or isinstance(view, AsOfView) or span.start >= span.until:
            # Kept chunks cannot serve a view as of an earlier moment.
            return await read_page(
                self._store, cache, span, limit=limit, max_bytes=max_bytes, view=view, with_pointers=with_pointers
            )
        arrived_s, turn = self._clock(), cache.budget.kept.turn
        under_way = self._under_way.get((span.prefix, span.start))
        if under_way is not None:
            await under_way.wait()
        bounds = limit, max_bytes
        paging = partial(Paging, span, *bounds, view, with_pointers=with_pointers)
        page = self._in_memory(cache, span, paging())
        if page is not None:
            cache.budget.hits += 1
            if page.end == "more" and page.payload_bytes >= LARGE_BYTES:
                self._follow(cache, span, page, bounds, arrived_s, turn)
            return page
        cache.budget.misses += 1
        walk = await read_stored(self._store, paging)
        page = walk.page()
        if page.end == "more" and page.count and walk.is_plain:
            if self._was_read(span.prefix, page):
                cache.keep(walk, page, turn)
            self._follow(cache, span, page, bounds, arrived_s, turn)
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
          at_once_bytes: the maximum size of a small page, in wire bytes.
          view: not an ``AsOfView``.
        """
        if span.start >= span.until:
            return Page(last_id=span.resume)
        cache = self._directory.cache(name)
        if cache is None:
            return None
        if not cache.covers(span.prefix, span.start):
            kept = next(cache.budget.kept.from_start(span), None)
            if kept is not None and kept.count <= limit and at_once_bytes < len(kept.wire) <= max_bytes:
                return None  # the page includes the whole chunk, so it is not small
        paging = Paging(span, limit, min(max_bytes, at_once_bytes), view, with_pointers=with_pointers)
        page = self._in_memory(cache, span, paging)
        if page is None or page.payload_bytes > at_once_bytes:  # a page has at least one message, of any size
            return None
        if page.end == "more" and page.count < limit and at_once_bytes < max_bytes:
            return None  # it was cut at at_once_bytes
        cache.budget.hits += 1
        return page

    def _in_memory(self, cache: TopicCache, span: Span, paging: Paging) -> Page | None:
        """Return a page if it is in memory, else None. If it is near the end of the chunk, begin to read the next."""
        if feed_cached(cache, span, paging):
            return paging.page()
        kept = feed_kept(cache, span, paging)
        if kept is None:
            return None
        page = paging.page()
        assert page.last_id is not None  # the page has messages
        if kept.is_ahead and page.payload_bytes < LARGE_BYTES and kept.is_nearly_read(page.last_id):
            self._begin(cache, replace(span, since=after(kept.last_id)), AHEAD, cache.budget.kept.turn)
        return page

    def _follow(self, cache: TopicCache, span: Span, page: Page, bounds: _Bounds, arrived_s: float, turn: int) -> None:
        """Remember where a page ended, and read ahead if its reader walks through the topic.

        Args:
          bounds: the page's bounds.
          arrived_s: when it was requested.
          turn: the value of ``KeptChunks.turn`` when the span was made.
        """
        assert page.last_id is not None  # the page has messages
        following = replace(span, since=after(page.last_id))
        ended_s = self._ends.forget((span.prefix, span.start))
        self._ends.add((span.prefix, following.start), self._clock())
        if ended_s is None:
            return
        if page.payload_bytes < LARGE_BYTES:
            self._begin(cache, following, AHEAD, turn)
        elif arrived_s - ended_s >= LEAST_PAUSE_S and page.payload_bytes <= cache.budget.kept.max_bytes // 2:
            # The next page may be larger, but will probably fit.
            self._begin(cache, following, bounds, turn)

    def _was_read(self, prefix: bytes, page: Page) -> bool:
        """True if a page with the same first message was read recently; remembers this one."""
        return self._firsts.add((prefix, page.parts[0][1 : 1 + ID_BYTES]), True) is not None

    def _begin(self, cache: TopicCache, span: Span, bounds: _Bounds, turn: int) -> None:
        """Begin to read ahead from the start of ``span``, unless that is in memory, or another read is under way."""
        if self._nursery is None or len(self._under_way) >= AT_ONCE or span.start >= span.until:
            return
        kept = cache.budget.kept
        first, last = self._not_kept.get(span.prefix) or (LAST_BOUND, FIRST_BOUND)
        if first <= span.start <= last or cache.covers(span.prefix, span.start) or kept.covers(span):
            return
        messages, most_bytes = bounds
        start = span.prefix, span.start
        walk = Paging(span, messages, min(most_bytes, kept.max_bytes))
        self._under_way[start] = trio.Event()
        self._nursery.start_soon(self._read_ahead, cache, start, walk, turn)

    async def _read_ahead(self, cache: TopicCache, start: _Place, walk: Paging, turn: int) -> None:
        try:
            cache.budget.misses += 1
            await walk_rows(self._store, walk)
            page = walk.page()
            if not cache.keep(walk, page, turn, is_ahead=True) and turn == cache.budget.kept.turn:
                self._not_kept.add(walk.span.prefix, (walk.span.start, page.last_id or walk.span.until))
        except PlainsongError as error:
            # The reader's own request will run into the error and report it.
            log.debug("nothing was read ahead", extra={"why": error.detail})
        except Exception:  # a bug; nothing depends on this read, so it must not take the daemon down
            log.exception("nothing was read ahead")
        finally:
            self._under_way.pop(start).set()

"""Reading pages, outside the actor: below the read watermark nothing moves, so nobody needs to be asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.page import Page
from protocol.topic.paging import Paging, key_range

if TYPE_CHECKING:
    from actors.cache_chunk import Chunk
    from actors.scan_cache import TopicCache
    from protocol.topic.asks import Span
    from storage.base import Store

#: Rows in the first list from the store, for a reader who wants many.
FIRST_CHUNK_ROWS = 256


async def read_page(store: Store, cache: TopicCache | None, span: Span, *, limit: int, max_bytes: int) -> Page:
    """The next messages of ``span``, from memory when all of them are there.

    Args:
      limit: messages at most, at least 1.
      max_bytes: wire bytes at most, but one message always.
    Raises:
      StoreError: the store could not be read; nothing else is affected.
    """
    if span.start >= span.until:
        return Page(last_id=span.resume)
    if cache is not None and cache.covers(span.prefix, span.start):
        cache.budget.hits += 1
        return _from_cache(cache, span, Paging(span, limit, max_bytes))
    if cache is not None:
        cache.budget.misses += 1
    paging = Paging(span, limit, max_bytes)
    start, stop = key_range(span)
    await store.scan(Table.MESSAGE, start, stop, paging.feed_rows, first_chunk=min(limit + 1, FIRST_CHUNK_ROWS))
    return paging.page()


def _from_cache(cache: TopicCache, span: Span, paging: Paging) -> Page:
    for chunk in cache.chunks_from(span.start):
        if chunk.first >= span.until or not _feed_chunk(chunk, span, paging):
            break
    return paging.page()


def _feed_chunk(chunk: Chunk, span: Span, paging: Paging) -> bool:
    start, stop = chunk.find(span.start), chunk.find(span.until)
    if start >= stop:
        return True
    expired = [index for index, expires_ms in chunk.expiries.items() if expires_ms < span.now_ms]
    if not expired and paging.fits(stop - start, chunk.size_to(start, stop)):
        return paging.feed_part(chunk.slice(start, stop), stop - start, chunk.id_at(stop - 1))
    gone = set(expired)
    return paging.feed_items([chunk.slice(i, i + 1) for i in range(start, stop) if i not in gone])

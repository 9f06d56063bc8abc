"""Reads outside the actor: pages below the read watermark, and producers of purged generations.

Below the read watermark only the signs of write pointers change, so pages need no turn of the actor.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import GenerationChanged, ProducerExpired, ProducerNotFound
from plainsong.protocol.ids import after
from plainsong.protocol.keys import PRODUCER, PRODUCERS, system_key
from plainsong.protocol.page import Page
from plainsong.protocol.topic.asks import GetProducer
from plainsong.protocol.topic.producer_sessions import old_producer_view
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.topic.reading import Paging
from plainsong.protocol.transactions.view import AsOfView, Verdict
from storage.base import Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.cache import TopicCache
    from actors.chunks import Chunk
    from actors.directory import Directory
    from actors.kept_chunks import KeptChunk
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import ProducerView, Span
    from plainsong.protocol.topic.reading import Rows, Walk
    from plainsong.protocol.transactions.view import View
    from storage.base import Row, Store


async def read_page(
    store: Store,
    cache: TopicCache | None,
    span: Span,
    *,
    limit: int,
    max_bytes: int,
    view: View | None = None,
    with_pointers: bool = False,
) -> Page:
    """Return the next messages of ``span``, from the scan cache if it has all of them.

    Args:
      limit: maximum number of messages, at least 1.
      max_bytes: maximum of wire bytes, although a page always has at least one message.
      view: what the reader may see; None: everything, including undecided and rolled back messages.
      with_pointers: fill ``Page.pointers``.
    Raises:
      StoreError: see ``read_stored``.
    """
    if span.start >= span.until:
        return Page(last_id=span.resume)
    paging = partial(Paging, span, limit, max_bytes, view, with_pointers=with_pointers)
    if cache is not None:
        cached = paging()
        if feed_cached(cache, span, cached):
            cache.budget.hits += 1
            return cached.page()
        cache.budget.misses += 1
    return (await read_stored(store, paging)).page()


async def read_stored(store: Store, paging: Callable[[], Paging]) -> Paging:
    """Return a walk of ``paging`` that has read its page from the store.

    Raises:
      StoreError: the store could not be read; nothing else is affected. A page ends before a damaged block; the next
        page begins at the block, and raises Unreadable.
    """
    walk = paging()
    try:
        await walk_rows(store, walk)
    except Unreadable:
        walk = paging()
        await _walk_to_damage(store, walk)
    return walk


async def _walk_to_damage(store: Store, paging: Paging) -> None:
    """Feed a page with all rows before a damaged block. Raises StoreError if there are none."""
    for table, start, stop, feed, _ in paging.scans():
        try:
            await _feed_to_damage(store, table, start, stop, feed)
        except Unreadable:
            if not paging.cut_by_damage():
                raise
            return


async def _feed_to_damage(store: Store, table: Table, start: bytes, stop: bytes, feed: Callable[[Rows], bool]) -> None:
    """Scan, with a first chunk of one row, and again after each failure: a chunk that fails delivers no row."""

    def fed(rows: Sequence[Row]) -> bool:
        nonlocal start
        start = rows[-1][0] + b"\x00"
        return feed(rows)

    while True:
        before = start
        try:
            await store.scan(table, start, stop, fed, first_chunk=1)
            return
        except Unreadable:
            if start == before:
                raise


async def walk_rows(store: Store, walk: Walk) -> None:
    """Feed a walk from the store until it is complete. Raises StoreError."""
    for table, start, stop, feed, reverse in walk.scans():
        await store.scan(table, start, stop, feed, first_chunk=walk.wanted, reverse=reverse)


def feed_cached(cache: TopicCache, span: Span, paging: Paging) -> bool:
    """Feed a page from the cache; return False, without feeding anything, if the cache does not have all of it."""
    if not cache.covers(span.prefix, span.start):
        return False
    for chunk in cache.chunks_from(span.start):
        if chunk.first >= span.until or not feed_chunk(chunk, span, paging):
            break
    return True


def feed_kept(cache: TopicCache, span: Span, paging: Paging) -> KeptChunk | None:
    """Feed a page from kept chunks; return the last of them, or None if they do not have all of the page.

    Such a page ends at its limits, and its messages are plain.
    """
    last = None
    rest = span
    for kept in cache.budget.kept.from_start(span):
        last = kept
        is_whole = rest.start <= kept.first and kept.last_id < span.until
        if is_whole and paging.fits(kept.count, len(kept.wire)):
            paging.feed_part(kept.wire, kept.count, kept.last_id)
        elif not feed_chunk(kept.chunk, rest, paging):
            break
        rest = replace(span, since=after(kept.last_id))  # chunks may overlap
    if last is not None and not paging.done and last.next_id:
        paging.end_before(last.next_id, last.next_size)
    return last if paging.done else None


def feed_chunk(chunk: Chunk, span: Span, paging: Paging) -> bool:
    """Feed a page with the messages of a chunk that are in the span; return False once the page is complete."""
    start, stop = chunk.find(span.start), chunk.find(span.until)
    if start >= stop:
        return True
    expired = sorted(i for i, expires_ms in chunk.expiries.items() if expires_ms < span.now_ms and start <= i < stop)
    for first, last, verdict, pointer in _pieces(chunk, start, stop, paging.view):
        gone = set(expired[bisect_left(expired, first) : bisect_left(expired, last)]) if expired else ()
        living = next((index for index in range(first, last) if index not in gone), None)
        if living is None:
            continue
        if verdict is Verdict.SKIP:
            paging.passed = True
            continue
        if verdict is Verdict.HOLD and paging.held_by is None:
            expires_ms = chunk.expiries.get(living, 0)
            if not paging.hold(pointer, chunk.id_at(living), expires_ms):
                return False
        if paging.held_by is not None:
            if not paging.hide(last - first - len(gone)):
                return False
        elif not _feed_piece(chunk, first, last, gone, paging):
            return False
    return True


def _pieces(chunk: Chunk, start: int, stop: int, view: View | None) -> list[tuple[int, int, Verdict, int]]:
    """See ``PointerRuns.pieces``. As of a moment, messages without a pointer are invisible after that moment."""
    if not isinstance(view, AsOfView):
        return chunk.runs.pieces(start, stop, view)
    at = min(max(start, chunk.find(view.bound)), stop)
    pieces = chunk.runs.pieces(start, at, view) if start < at else []
    for first, last, pointer in chunk.runs.between(at, stop):
        if at < first:
            pieces.append((at, first, Verdict.SKIP, 0))
        pieces.append((first, last, view.verdict(pointer), pointer))
        at = last
    return [*pieces, (at, stop, Verdict.SKIP, 0)] if at < stop else pieces


def _feed_piece(chunk: Chunk, start: int, stop: int, gone: set[int] | tuple[()], paging: Paging) -> bool:
    """Feed visible messages of a chunk: those that fit as one part, then one more, to show that there are more."""
    if gone:
        living = (index for index in range(start, stop) if index not in gone)
        return _feed_each(chunk, list(islice(living, paging.room + 1)), paging)
    whole = stop
    if not paging.fits(stop - start, chunk.size_to(start, stop)):
        whole = start + min(stop - start, paging.room)
        if not paging.fits(whole - start, chunk.size_to(start, whole)):  # usually the message limit is reached first
            ends = range(start + 1, whole + 1)
            fit = bisect_left(ends, True, key=lambda end: not paging.fits(end - start, chunk.size_to(start, end)))
            whole = start + fit
    if start < whole:
        pointers = _pointers(chunk, start, whole) if paging.with_pointers else None
        attributes = chunk.attributes_to(start, whole) if chunk.attributes else None
        paging.feed_part(chunk.slice(start, whole), whole - start, chunk.id_at(whole - 1), pointers, attributes)
    # A page has at least one message, of any size.
    return whole == stop or _feed_each(chunk, range(whole, min(whole + 2, stop)), paging)


def _feed_each(chunk: Chunk, indices: Sequence[int], paging: Paging) -> bool:
    items = [chunk.slice(index, index + 1) for index in indices]
    pointers = None
    if paging.with_pointers:
        pointers = [_pointers(chunk, index, index + 1)[0] for index in indices]
    known = chunk.attributes
    attributes = {at: known[index] for at, index in enumerate(indices) if index in known} if known else None
    return paging.feed_items(items, pointers, attributes)


def _pointers(chunk: Chunk, start: int, stop: int) -> list[int]:
    """Return the write pointer of each item, 0 for items without one."""
    out = [0] * (stop - start)
    for first, last, pointer in chunk.runs.between(start, stop):
        out[first - start : last - start] = [pointer] * (last - first)
    return out


async def producer_of(
    directory: Directory, store: Store, name: TopicName, producer: str, generation: int | None
) -> ProducerView:
    """Return a producer of a topic's generation, or of a purged one while the rows about its producers remain.

    Raises:
      TopicNotFound, GenerationChanged (there is no such generation yet), DamagedRow, StoreError.
      ProducerNotFound: the generation never had this producer.
      ProducerExpired: the generation's rows about producers are gone, or it never had any. The two cannot be
        distinguished, and after ProducerNotFound a producer might send its messages twice.
    """
    try:
        return await directory.ask(name, GetProducer(producer, generation))
    except GenerationChanged:
        state = directory.peek(name)
        if generation is None or state is None or generation > state.living_or_last().generation:
            raise
    value = await store.get(Table.METADATA, system_key(PRODUCERS, name, generation))
    if value is None:
        raise ProducerExpired(
            f"generation {generation} of topic {name} has been removed or never existed: its producers are not known",
            hint="the outcome of its last messages is no longer known",
        )
    row = await store.get(Table.METADATA, system_key(PRODUCER, name, generation, producer.encode()))
    if row is None:
        raise ProducerNotFound(f"generation {generation} of topic {name} had no producer {producer!r}")
    return old_producer_view(Producer.decode(producer, row), DeduplicationRecord.decode(value), generation)

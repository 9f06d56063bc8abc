"""Counting messages from a position on: slices as the topic counted them, and a look at the few it cannot vouch for.

The topic counts messages while it writes them, in slices of time. A slice is exact unless a part of it has
expired or lies before the position; only then are its rows looked at, and never more than ``MAX_LOOKS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.ids import NO_PAYLOAD_PART, bound_at
from protocol.keys import DamagedRow
from protocol.topic.asks import Slice
from protocol.topic.extent import live_wire_bytes
from protocol.topic.paging import key_range
from protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.topic.asks import Span, TopicStats
    from storage.base import Row, Store

#: Rows that one question may look at.
MAX_LOOKS = 100_000


@dataclass(slots=True)
class Count:
    """How much there is; ``estimated``: at most so much, since looking closer would have taken too long."""

    messages: int = 0
    bytes: int = 0
    expired: int = 0
    """Messages among those looked at whose own time to live is over."""
    estimated: bool = False


async def count_from(store: Store, stats: TopicStats, since: bytes) -> Count:
    """The living messages from the bound ``since`` on. Raises StoreError."""
    count = Count()
    room = MAX_LOOKS
    for counted in _apart(stats.slices):
        if bound_at(counted.last_ms + 1) <= since:
            continue
        if _is_exact(counted, stats, since) or counted.messages > room:
            count.messages += counted.messages
            count.bytes += counted.bytes
            count.estimated |= not _is_exact(counted, stats, since)
            continue
        room -= counted.messages
        span = replace(stats.span, since=max(since, bound_at(counted.first_ms)))
        span.until = min(span.until, bound_at(counted.last_ms + 1))
        if span.start < span.until:
            await _look(store, span, count)
    return count


async def expired_from(store: Store, span: Span, since: bytes) -> tuple[int, bool]:
    """Rows from ``since`` on that have outlived the topic's time to live and are not removed yet.

    The bool says that there are more of them than were counted. Raises StoreError.
    """
    below = replace(span, since=since, until=min(span.until, bound_at(span.oldest_ms)), oldest_ms=0)
    if below.start >= below.until:
        return 0, False
    start, stop = key_range(below)
    counted = 0

    def take(rows: list[Row]) -> bool:
        nonlocal counted
        counted += len(rows)
        return counted <= MAX_LOOKS

    await store.scan(Table.MESSAGE, start, stop, take, first_chunk=1000, values=False)
    return min(counted, MAX_LOOKS), counted > MAX_LOOKS


async def newest_from(store: Store, span: Span) -> bytes | None:
    """The id of the newest living message; None when there is none among the last ``MAX_LOOKS``."""
    if span.start >= span.until:
        return None
    start, stop = key_range(span)
    found: bytes | None = None
    looks = 0

    def take(rows: list[Row]) -> bool:
        nonlocal found, looks
        looks += len(rows)
        living = next((key for key, value in rows if not _has_expired(key, value, span.now_ms)), None)
        found = None if living is None else living[-10:] + NO_PAYLOAD_PART
        return found is None and looks < MAX_LOOKS

    await store.scan(Table.MESSAGE, start, stop, take, reverse=True, first_chunk=1)
    return found


def _apart(slices: Iterable[Slice]) -> list[Slice]:
    """Slices that share no millisecond, as neighbours may after a shorter time to live made them shorter."""
    apart: list[Slice] = []
    for one in slices:
        if apart and one.first_ms <= apart[-1].last_ms:
            had = apart.pop()
            expiries = [each for each in (had.own_expiry_ms, one.own_expiry_ms) if each]
            one = Slice(
                had.first_ms,
                max(had.last_ms, one.last_ms),
                had.messages + one.messages,
                had.bytes + one.bytes,
                min(expiries, default=0),
            )
        apart.append(one)
    return apart


def _is_exact(counted: Slice, stats: TopicStats, since: bytes) -> bool:
    span = stats.span
    none_expired = counted.first_ms >= span.oldest_ms and not 0 < counted.own_expiry_ms < span.now_ms
    return none_expired and bound_at(counted.first_ms) >= since


async def _look(store: Store, span: Span, count: Count) -> None:
    def take(rows: list[Row]) -> bool:
        for key, value in rows:
            if _has_expired(key, value, span.now_ms):
                count.expired += 1
            else:
                count.messages += 1
                count.bytes += len(value) + ROW_BYTES
        return True

    start, stop = key_range(span)
    await store.scan(Table.MESSAGE, start, stop, take, first_chunk=1000)


def _has_expired(key: bytes, value: bytes, now_ms: int) -> bool:
    try:
        return live_wire_bytes(key, value, now_ms) is None
    except DamagedRow:
        return False  # it is there, whatever it is

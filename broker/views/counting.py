"""Counting messages from a position on: slices as the topic counted them, and a look at the few it cannot vouch for.

The topic counts messages while it writes them, in slices of time. A slice is exact unless a part of it has
expired or lies before the position; only then are its rows looked at, and never more than ``MAX_LOOKS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.reading import walk_rows
from protocol.ids import NO_PAYLOAD_PART, bound_at
from protocol.topic.asks import Slice
from protocol.topic.tally import Newest, Tally
from protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from protocol.topic.asks import Span, TopicStats
    from protocol.topic.pointer_asks import PointerView
    from protocol.transactions.view import View
    from storage.base import Store

#: Rows that one question may look at, and bytes of them.
MAX_LOOKS = 100_000
MAX_LOOK_BYTES = 64 << 20


@dataclass(slots=True)
class Count:
    """How much there is; ``estimated``: about so much, since looking closer would have taken too long."""

    messages: int = 0
    bytes: int = 0
    expired: int = 0
    """Messages among those looked at whose own time to live is over."""
    hidden: int = 0
    """Messages behind the first undecided one."""
    estimated: bool = False


async def count_from(store: Store, stats: TopicStats, since: bytes) -> Count:
    """The living messages from the bound ``since`` on, undecided and rolled back ones included. Raises StoreError."""
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
        await _look(store, span, None, count)
    return count


async def count_for_reader(
    store: Store, stats: TopicStats, since: bytes, view: View, undecided: Sequence[PointerView]
) -> Count:
    """What a transactional reader at the bound ``since`` would get, and what is hidden from it.

    Exact where it is little enough to be looked at. Else the topic's own counts are taken: those know where the
    first undecided row is, and not which messages have been rolled back. Raises StoreError.
    """
    ahead = [counted for counted in stats.slices if bound_at(counted.last_ms + 1) > since]
    few = sum(counted.messages for counted in ahead) <= MAX_LOOKS
    count = Count()
    if few and sum(counted.bytes for counted in ahead) <= MAX_LOOK_BYTES:
        await _look(store, replace(stats.span, since=since), view, count)
        return count
    count = await count_from(store, stats, since)
    hidden = 0
    for each in undecided:
        # What is before the reader cannot be undecided: it would not have been passed.
        ahead_of_reader = each.first is not None and each.first + NO_PAYLOAD_PART >= since
        if ahead_of_reader and view.verdict(each.pointer) is Verdict.HOLD:
            hidden = max(hidden, each.hidden)
    count.hidden = min(hidden, count.messages)
    count.messages -= count.hidden
    count.estimated = True
    return count


async def expired_from(store: Store, span: Span, since: bytes, view: View | None) -> tuple[int, bool]:
    """Messages from ``since`` on that have outlived the topic's time to live and are not removed yet.

    The bool says that there are more of them than were counted. Raises StoreError.
    """
    below = replace(span, since=since, until=min(span.until, bound_at(span.oldest_ms)), oldest_ms=0)
    tally = Tally(below, view, MAX_LOOKS)
    await walk_rows(store, tally)
    return tally.messages + tally.hidden + tally.expired, tally.gave_up


async def newest_from(store: Store, span: Span) -> bytes | None:
    """The id of the newest living message; None when there is none among the last ``MAX_LOOKS``. Raises StoreError."""
    newest = Newest(span, MAX_LOOKS)
    await walk_rows(store, newest)
    return newest.message_id


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


async def _look(store: Store, span: Span, view: View | None, count: Count) -> None:
    tally = Tally(span, view, MAX_LOOKS)
    await walk_rows(store, tally)
    count.messages += tally.messages
    count.bytes += tally.bytes
    count.expired += tally.expired
    count.hidden += tally.hidden
    count.estimated |= tally.gave_up

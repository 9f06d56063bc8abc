"""Counts of one topic: statistics, offsets for parallel readers, and bounds for a cleaning job."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import trio

from actors.reading import walk_rows
from broker.api.answers import json_answer
from broker.api.messages.poll import EVERY_POINTER, CommittedReader, view_for
from broker.api.messages.readers import NamedReader
from broker.api.transactions.transactions import longs
from broker.http.messages import whole_number
from plainsong.protocol.answers.topics import ReaderLags
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.codec.json_values import parse_position
from plainsong.protocol.errors import InvalidParameter, NotFound, PlainsongError, TopicNotFound, TransactionsUnavailable
from plainsong.protocol.ids import (
    FIRST_BOUND,
    NO_PAYLOAD_PART,
    after,
    behind_position,
    bound_at,
    parse_id,
    unpack_position,
)
from plainsong.protocol.names import reader_name
from plainsong.protocol.page import items_in
from plainsong.protocol.requests import PollRequest, check_poll
from plainsong.protocol.topic.asks import (
    Describe,
    ListPointers,
    ListProducers,
    ListReaders,
    Look,
    PlanCleaning,
    Slice,
    Stats,
)
from plainsong.protocol.topic.reading import Extent, Newest, Tally
from plainsong.protocol.transactions.view import Verdict, View

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.directory import Directory
    from actors.ownership import Ownership
    from actors.pages import Pages
    from broker.api.messages.holding import Holds
    from broker.api.messages.readers import NamedReaders
    from broker.authority import Transactions
    from broker.http.messages import Answer, Request
    from broker.metrics import Rates
    from plainsong.protocol.answers.topics import Maintenance, Offsets, ReaderLag, ReaderStats, TopicStats
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import PointerView, Span, StatsView
    from storage.base import Store

#: Most parts that one request can split a range into.
MAX_SPLITS = 1_000
#: Readers on a page of lags.
MAX_LAG_PAGE = 1_000
_POSITION = values.nullable(parse_position)
_INT = values.nullable(values.int64, "int", "long")
_OFFSETS = {
    "start": ("start_from", _POSITION),
    "end": ("end", _POSITION),
    "maxMessages": ("limit", _INT),
    "maxBytes": ("max_bytes", _INT),
    "splits": ("splits", _INT),
    "isolation": ("isolation", values.nullable(values.text, "Isolation")),
    "transaction": ("transaction", values.nullable(values.binary)),
    "waitMs": ("wait_ms", _INT),
    "asOfMs": ("as_of_ms", _INT),
}


@dataclass(frozen=True, slots=True)
class Counting:
    """The routes that count messages of one topic, without returning payloads."""

    directory: Directory
    store: Store
    pages: Pages
    transactions: Transactions
    holds: Holds
    rates: Rates
    named_readers: NamedReaders
    stopping: trio.Event
    max_wait_ms: int
    delete_grace_ms: int
    ownership: Ownership | None
    """None if there is only this instance."""

    async def stats(self, request: Request) -> Answer:
        """Return the topic's current figures; with ``reader=<id>`` also what a reader at that id has not read.

        Raises:
          TopicNotFound, InvalidMessageId, StoreError: reading changes nothing.
        """
        name = request.name
        parameters = request.parameters("reader")
        reader = parse_id(parameters["reader"]) if "reader" in parameters else None
        found = await self.directory.ask(name, Stats())
        span, now_s = found.span, trio.current_time()
        count = await count_from(self.store, found, FIRST_BOUND)
        undecided = await self.directory.ask(name, ListPointers())
        producers = await self.directory.ask(name, ListProducers(limit=1))
        described = await self.directory.ask(name, Describe())
        delays = self.rates.delivery.of(name)
        oldest_id, newest_id = await self._oldest(name, span), await newest_from(self.store, span)
        numbers: TopicStats = {
            "messages": count.messages,
            "bytes": count.bytes,
            "estimated": count.estimated,
            "oldestId": None if oldest_id is None else oldest_id.hex(),
            "newestId": None if newest_id is None else newest_id.hex(),
            "end": span.until.hex(),
            "oldestAgeMs": None if oldest_id is None else max(0, span.now_ms - unpack_position(oldest_id[:10])[0]),
            "publishPerSecond": round(self.rates.publishing.per_second(name, now_s), 3),
            "pollPerSecond": round(self.rates.polling.per_second(name, now_s), 3),
            "endToEndMs": {"p50": delays.p50_ms, "p99": delays.p99_ms},
            "openTransactions": sum(not each.rolled_back for each in undecided),
            "producers": producers.total,
            "enabledFrom": behind_position(producers.enabled_from),
            "owner": None if self.ownership is None else self.ownership.me.address,
            "parkedPolls": self._parked(name),
            "generation": span.generation,
            "createdMs": described.metadata.created_ms,
        }
        if reader is not None:
            numbers["reader"] = await self.before_reader(found, after(reader), undecided)
        return json_answer(numbers)

    async def _oldest(self, name: TopicName, span: Span) -> bytes | None:
        page = await self.pages.read(name, span, limit=1, max_bytes=1)
        return next((message_id for part in page.parts for message_id, _ in items_in(part)), None)

    async def before_reader(
        self, found: StatsView, since: bytes, undecided: Sequence[PointerView], max_looks: int | None = None
    ) -> ReaderStats:
        """Count what a committed reader has not read; without a transaction service, one that reads everything.

        Args:
          max_looks: rows that may be read; None: ``MAX_LOOKS``.
        """
        try:
            await self.transactions.fresh()
            view = view_for(self.transactions, "committed", None)
        except TransactionsUnavailable:
            view = None
        if view is None:
            count = await count_from(self.store, found, since, max_looks)
        else:
            count = await count_for_reader(self.store, found, since, view, undecided, max_looks)
        expired, more = await expired_from(self.store, found.span, since, view, max_looks)
        return {
            "visible": count.messages,
            "hidden": count.hidden,
            "expiredUnread": expired + count.expired,
            "estimated": count.estimated or more,
        }

    async def lag(self, request: Request) -> Answer:
        """Return the lag of stored and of named readers, or of one of them.

        With ``limit`` it returns a page, sorted by name: counting takes time for each reader.

        Raises:
          TopicNotFound, InvalidName, InvalidParameter, NotFound, StoreError: reading changes nothing.
        """
        name = request.name
        parameters = request.parameters("reader", "limit", "after")
        wanted, limit = parameters.get("reader"), whole_number(parameters, "limit")
        if wanted is not None:
            reader_name(wanted)
        if limit is not None and not 1 <= limit <= MAX_LAG_PAGE:
            raise InvalidParameter(f"limit is {limit}", hint=f"use 1 to {MAX_LAG_PAGE}")
        found = await self.directory.ask(name, Stats())
        undecided = await self.directory.ask(name, ListPointers())
        kept = {
            view.name: NamedReader(view.reader.position, view.reader.changed_ms, "")
            for view in await self.directory.ask(name, ListReaders())
        }
        # A stored position takes precedence.
        readers = dict(sorted(self.named_readers.of(name, found.span.now_ms).items())) | kept
        chosen = [*kept, *(each for each in readers if each not in kept)]
        if limit is not None:
            behind = [each for each in sorted(readers) if each > parameters.get("after", "")]
            chosen = behind[:limit]
        if wanted is not None:
            chosen = [wanted] if wanted in readers else []
        # Readers that keep up share a few positions.
        counted: dict[bytes, tuple[ReaderStats, int]] = {}
        shown = [await self._lag_of(name, found, undecided, each, readers[each], counted) for each in chosen]
        if wanted is None and limit is None:
            return json_answer(ReaderLags(readers=shown))
        if wanted is None:
            following = chosen[-1] if len(behind) > len(chosen) else None
            return json_answer(ReaderLags(readers=shown, total=len(readers), next=following))
        if not shown:
            raise NotFound(
                f"topic {name} has no reader {wanted}",
                hint="PUT its position, or send Plainsong-Reader with its polls",
            )
        return json_answer(shown[0])

    async def _lag_of(
        self,
        name: TopicName,
        found: StatsView,
        undecided: Sequence[PointerView],
        reader: str,
        at: NamedReader,
        counted: dict[bytes, tuple[ReaderStats, int]],
    ) -> ReaderLag:
        """Return the row of a reader. ``counted`` caches the figures by position."""
        if at.position not in counted:
            counted[at.position] = await self._before(name, found, undecided, after(at.position))
        numbers, lag_ms = counted[at.position]
        return {
            "name": reader,
            "kind": "named" if at.by else "kept",
            "position": at.position.hex(),
            **numbers,
            "lagMs": lag_ms,
            "lastSeenMs": at.seen_ms,
            "by": at.by or None,
        }

    async def _before(
        self, name: TopicName, found: StatsView, undecided: Sequence[PointerView], since: bytes
    ) -> tuple[ReaderStats, int]:
        """Count what a reader has not read, and return it with the age of the oldest such message."""
        numbers = await self.before_reader(found, since, undecided)
        lag_ms = 0
        if numbers["visible"]:
            span = replace(found.span, since=max(since, found.span.since))
            oldest = await self._oldest(name, span)
            if oldest is not None:
                lag_ms = max(0, span.now_ms - unpack_position(oldest[:10])[0])
        return numbers, lag_ms

    def _parked(self, name: TopicName) -> int:
        core = self.directory.entry(name).actor.core
        return 0 if core is None else len(core.parking)

    async def offsets(self, request: Request) -> Answer:
        """Return the exclusive end, the count and the bytes of a bounded read, and bounds that split it.

        Raises:
          TopicNotFound, InvalidParameter, TransactionsUnavailable: nothing happened.
        """
        name = request.name
        request.parameters()
        given = request.fields(_OFFSETS)
        parts = given.pop("splits", None)
        if parts is not None and not 1 <= parts <= MAX_SPLITS:
            raise InvalidParameter(f"splits is {parts}", hint=f"use 1 to {MAX_SPLITS} parts")
        end = given.pop("end", None)
        read = PollRequest(**given, end_before=bound_at(end) if isinstance(end, int) else end)
        if read.isolation not in (None, "uncommitted", "committed"):
            raise InvalidParameter(
                f"isolation is {str(read.isolation)[:80]!r}", hint="use one of: uncommitted, committed"
            )
        check_poll(read)
        span, extent, expired = await self._measured(name, read, request.waited_ms)
        found: Offsets = {
            "end": extent.end.hex(),
            "count": extent.count,
            "bytes": extent.bytes,
            "splits": [bound.hex() for bound in extent.splits(parts or 1)],
            "earliest": bound_at(span.oldest_ms).hex(),
            "expired": expired,
            "generation": span.generation,
        }
        return json_answer(found)

    async def _measured(self, name: TopicName, read: PollRequest, waited_ms: int = 0) -> tuple[Span, Extent, bool]:
        """Return an extent with messages; an empty one after the deadline, or when waiting cannot help.

        The bool is True if messages had expired between the start and the end of all that was read.
        """
        since = read.since
        deadline_s = None
        if read.as_of_ms is not None:
            moment = await self.transactions.as_of(read.as_of_ms)
            span = await self.directory.ask(name, Look(since, read.end_before, as_of_ms=read.as_of_ms))
            extent = Extent(span, read.limit, read.max_bytes, moment.view())
            await walk_rows(self.store, extent)
            return span, extent, span.expired
        if read.wait_ms:
            wait_ms = min(read.wait_ms, self.max_wait_ms) - waited_ms
            deadline_s = trio.current_time() + wait_ms / 1000
        expired = False
        parks = read.isolation != "committed"
        reader = None if parks else CommittedReader(self.transactions)
        while True:
            # The same order as in a poll: all messages of transactions that the view shows lie in the span.
            mark = self.holds.mark
            view = view_for(self.transactions, None, read.transaction) if reader is None else await reader.view()
            alone = reader is not None and view is None
            look = Look(since, read.end_before, deadline_s if parks else None, EVERY_POINTER if alone else 0)
            span = await self.directory.ask(name, look)
            expired |= span.expired
            extent = Extent(span, read.limit, read.max_bytes, View.without_service(span.undecided) if alone else view)
            await walk_rows(self.store, extent)
            if reader is not None and not extent.count and extent.held is not None:
                reader.refuse_if_away()
            if extent.count or deadline_s is None or self.stopping.is_set() or trio.current_time() >= deadline_s:
                return span, extent, expired
            if extent.held is not None:
                if read.transaction is not None:
                    return span, extent, expired  # a snapshot is fixed: the decision would not change it
                await self.holds.wait(name, extent.held, extent.held_until_ms, mark, deadline_s)
                if self.stopping.is_set():
                    return span, extent, expired
            elif parks and span.since >= span.until:
                return span, extent, expired  # the topic waited until the deadline, and nothing arrived
            elif not parks:
                later = await self.directory.ask(name, Look(extent.end, read.end_before, deadline_s))
                if later.since >= later.until:
                    return span, extent, expired
            # Everything up to here is expired, rolled back, or was held until now.
            since = extent.end

    async def maintain(self, request: Request) -> Answer:
        """Return the time before which messages have expired, the invalid pointers, and the snapshot of producers.

        The topic first writes its high-water mark and its snapshot of producers, so the answer stays true.

        Raises:
          TopicNotFound, StoreError: remove nothing.
        """
        name = request.name
        as_number = longs(request.parameters("longs"))
        with suppress(TransactionsUnavailable):  # then ``invalid`` is null
            await self.transactions.fresh()
        described = await self.directory.ask(name, Describe())
        plan = await self.directory.ask(name, PlanCleaning(self.delete_grace_ms))
        pointers = await self.directory.ask(name, ListPointers())
        producers = await self.directory.ask(name, ListProducers(limit=1))
        if plan.expired is None:
            raise TopicNotFound(f"topic {name} was deleted during the request")
        expired_before_ms, _ = unpack_position(plan.expired[1][len(plan.prefix) :])
        invalid = self._invalid(pointers)
        found: Maintenance = {
            "generation": described.metadata.generation,
            "expiredBefore": expired_before_ms,
            "invalid": None if invalid is None else [as_number(pointer) for pointer in invalid],
            "snapshotPosition": behind_position(producers.snapshot.position),
        }
        return json_answer(found)

    def _invalid(self, pointers: Sequence[PointerView]) -> list[int] | None:
        """Return the pointers of invalid transactions among the topic's; None if unknown."""
        try:
            return sorted(each.pointer for each in pointers if self.transactions.standing(each.pointer) == "invalid")
        except TransactionsUnavailable:
            return None


def offsets_wait_ms(request: Request) -> int:
    """Return the wait that a request asks for; 0 if it cannot be decoded, which the handler refuses."""
    try:
        given: Any = request.json()
    except PlainsongError:
        return 0
    wait_ms = given.get("waitMs") if isinstance(given, dict) else None
    return wait_ms if isinstance(wait_ms, int) else 0


# --- counting --------------------------------------------------------------------------------------
#
# Messages from a position on are counted by slices, and by reading rows of the few slices that are not exact.
#
# The topic counts messages as it writes them, in slices of time. A slice is exact unless a part of it has expired or
# lies before the position. Only then are its rows read, and never more than ``MAX_LOOKS``.


#: Rows, and their bytes, that one request may read.
MAX_LOOKS = 100_000
MAX_LOOK_BYTES = 64 << 20


@dataclass(slots=True)
class Count:
    """A count; ``estimated``: approximate, because an exact one would take too long."""

    messages: int = 0
    bytes: int = 0
    expired: int = 0
    """Messages, of those read, that have outlived their own ttl."""
    hidden: int = 0
    """Messages from the first undecided one on."""
    estimated: bool = False


async def count_from(store: Store, stats: StatsView, since: bytes, max_looks: int | None = None) -> Count:
    """Count living messages from the bound ``since``, undecided and rolled-back ones included. Raises StoreError."""
    count = Count()
    room = _looks(max_looks)
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
    store: Store,
    stats: StatsView,
    since: bytes,
    view: View,
    undecided: Sequence[PointerView],
    max_looks: int | None = None,
) -> Count:
    """Count what a committed reader at the bound ``since`` would get, and what is hidden from it.

    Exact if there are few enough rows ahead to read them all. Otherwise estimated from the topic's own counts, which
    know the first undecided row, but not which messages were rolled back. Raises StoreError.
    """
    ahead = [counted for counted in stats.slices if bound_at(counted.last_ms + 1) > since]
    few = sum(counted.messages for counted in ahead) <= _looks(max_looks)
    count = Count()
    if few and sum(counted.bytes for counted in ahead) <= MAX_LOOK_BYTES:
        await _look(store, replace(stats.span, since=since), view, count)
        return count
    count = await count_from(store, stats, since, max_looks)
    hidden = 0
    for each in undecided:
        # Undecided messages are never before the reader: it would not have passed them.
        ahead_of_reader = each.first is not None and each.first + NO_PAYLOAD_PART >= since
        if ahead_of_reader and view.verdict(each.pointer) is Verdict.HOLD:
            hidden = max(hidden, each.hidden)
    count.hidden = min(hidden, count.messages)
    count.messages -= count.hidden
    count.estimated = True
    return count


async def expired_from(
    store: Store, span: Span, since: bytes, view: View | None, max_looks: int | None = None
) -> tuple[int, bool]:
    """Count messages from ``since`` on that have outlived the topic's ttl and are not removed yet.

    The bool is True if there are more than were counted. Raises StoreError.
    """
    below = replace(span, since=since, until=min(span.until, bound_at(span.oldest_ms)), oldest_ms=0)
    tally = Tally(below, view, _looks(max_looks))
    await walk_rows(store, tally)
    return tally.messages + tally.hidden + tally.expired, tally.gave_up


async def newest_from(store: Store, span: Span) -> bytes | None:
    """Return the id of the newest living message; None if none is among the last ``MAX_LOOKS``. Raises StoreError."""
    newest = Newest(span, MAX_LOOKS)
    await walk_rows(store, newest)
    return newest.message_id


def _looks(most: int | None) -> int:
    return MAX_LOOKS if most is None else most


def _apart(slices: Iterable[Slice]) -> list[Slice]:
    """Merge slices that share a millisecond, as neighbours may once a shorter ttl has made slices shorter."""
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


def _is_exact(counted: Slice, stats: StatsView, since: bytes) -> bool:
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

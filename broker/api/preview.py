"""What a change of a topic would do, counted at its owner."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from broker.api.dry_run import NOTHING, preview
from broker.api.topic_stats import MAX_LOOKS, count_from, expired_from, newest_from
from plainsong.protocol.ids import FIRST_BOUND, bound_at, unpack_position
from plainsong.protocol.page import items_in
from plainsong.protocol.topic.asks import (
    Create,
    Describe,
    ListPointers,
    ListProducers,
    ListReaders,
    Remove,
    SetProperties,
    Slice,
    Span,
    Stats,
    TopicStats,
    Undelete,
)

if TYPE_CHECKING:
    from actors.directory import Directory
    from broker.api.poll import Pages
    from broker.http.messages import Answer
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.records import Metadata
    from plainsong.protocol.topic.state import TopicState
    from storage.base import Store


@dataclass(frozen=True, slots=True)
class TopicPreviews:
    """Previews of changes of topics, made at their owner."""

    directory: Directory
    store: Store
    pages: Pages
    delete_grace_ms: int

    async def create(self, name: TopicName, ask: Create) -> Answer:
        """Raises as the creation."""
        description = await self.directory.ask(name, replace(ask, dry_run=True))
        return preview("topic.create", str(name), None, _properties(description.metadata))

    async def set_properties(self, name: TopicName, ask: SetProperties) -> Answer:
        """Raises as the change."""
        old = (await self.directory.ask(name, Describe())).metadata
        new = (await self.directory.ask(name, replace(ask, dry_run=True))).metadata
        found = await self.directory.ask(name, Stats())
        effect, warnings = {}, []
        oldest_ms = found.span.now_ms - new.properties.ttl_ms
        if new.properties.ttl_ms < old.properties.ttl_ms:
            effect["hides"] = await self._messages(name, _until(found, oldest_ms))
        elif new.properties.ttl_ms > old.properties.ttl_ms:
            expired, more = await expired_from(self.store, found.span, FIRST_BOUND, None)
            if expired:
                warnings.append(f"{_some(expired, more=more)} that have expired stay expired")
        limit = new.properties.max_bytes
        held = sum(each.bytes for each in found.slices)
        if limit is not None and held >= limit:
            warnings.append(f"the topic holds {held} bytes: publishes are refused until it holds less than {limit}")
        if new.properties.deduplication == "disabled" != old.properties.deduplication:
            producers = (await self.directory.ask(name, ListProducers(limit=1))).total
            warnings.append(f"what is known of {producers} producers is forgotten")
        before, after = _properties(old), _properties(new)
        return preview("topic.properties", str(name), before, after, effect=effect, warnings=warnings, etag=old.etag)

    async def remove(self, name: TopicName, ask: Remove) -> Answer:
        """Raises as the deletion."""
        old = (await self.directory.ask(name, Describe())).metadata
        await self.directory.ask(name, replace(ask, dry_run=True))
        found = await self.directory.ask(name, Stats())
        core = self.directory.entry(name).actor.core
        undecided = await self.directory.ask(name, ListPointers())
        readers = await self.directory.ask(name, ListReaders())
        effect = {
            "removes": await self._messages(name, found),
            "undeleteUntilMs": found.span.now_ms + self.delete_grace_ms,
            "readers": len(readers),
            "producers": (await self.directory.ask(name, ListProducers(limit=1))).total,
            "openTransactions": sum(not each.rolled_back for each in undecided),
            "parkedPolls": 0 if core is None else len(core.parking),
        }
        return preview("topic.delete", str(name), _properties(old), None, effect=effect, etag=old.etag)

    async def undelete(self, name: TopicName) -> Answer:
        """Raises as the change."""
        description = await self.directory.ask(name, Undelete(dry_run=True))
        state = self.directory.peek(name)
        effect = {}
        if state is not None:
            effect["returns"] = await self._messages(name, _stats_of_last(state))
        return preview("topic.undelete", str(name), None, _properties(description.metadata), effect=effect)

    async def _messages(self, name: TopicName, found: TopicStats) -> dict[str, object]:
        """How much a span holds: exact where it is little enough to be looked at."""
        span = found.span
        if span.start >= span.until:
            return dict(NOTHING)
        count = await count_from(self.store, found, FIRST_BOUND)
        if not count.messages:
            return dict(NOTHING)
        page = await self.pages.read(name, span, limit=1, max_bytes=1)
        first = next((each for part in page.parts for each, _ in items_in(part)), None)
        last = await newest_from(self.store, span)
        return {
            "messages": count.messages,
            "bytes": count.bytes,
            "estimated": count.estimated,
            "oldestMs": None if first is None else unpack_position(first[:10])[0],
            "newestMs": None if last is None else unpack_position(last[:10])[0],
        }


def _properties(metadata: Metadata) -> dict[str, str]:
    """As ``GET`` shows them, without what no change of them can change."""
    shown = metadata.properties.shown(metadata.generation)
    del shown["generation"]
    return shown


def _until(found: TopicStats, before_ms: int) -> TopicStats:
    """What was published before a time."""
    bound = bound_at(max(0, before_ms))
    span = replace(found.span, until=min(found.span.until, bound))
    slices = []
    for one in found.slices:
        if one.last_ms < before_ms:
            slices.append(one)
        elif one.first_ms < before_ms:
            # How much of it is meant only a look can tell; without one, at most all of it.
            slices.append(one._replace(last_ms=before_ms - 1, own_expiry_ms=1))
    return TopicStats(span, tuple(slices))


def _stats_of_last(state: TopicState) -> TopicStats:
    """Of the last generation, which is deleted."""
    span = Span(
        generation=state.living_or_last().generation,
        prefix=state.prefix,
        since=FIRST_BOUND,
        until=state.until,
        now_ms=state.time_ms,
        oldest_ms=state.oldest_ms,
        watermark=state.watermark,
    )
    living = [each for each in state.usage.stored() if each[1] >= state.oldest_ms]
    return TopicStats(span, tuple(Slice._make(each) for each in living))


def _some(count: int, *, more: bool) -> str:
    number = f"more than {MAX_LOOKS}" if more else str(count)
    return f"{number} message" if count == 1 else f"{number} messages"

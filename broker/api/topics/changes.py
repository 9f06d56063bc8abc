"""Changes of a topic at its owner, and their dry runs: both count the effect in the same way."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from broker.api.change import NOT_COUNTED, NOTHING, change_answer
from broker.api.topics.stats import MAX_LOOKS, count_from, expired_from, newest_from
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND, bound_at, unpack_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.page import items_in
from plainsong.protocol.plurals import counted
from plainsong.protocol.topic.asks import ListPointers, ListProducers, ListReaders, StatsView
from storage.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from actors.directory import Directory
    from actors.pages import Pages
    from broker.http.messages import Answer
    from plainsong.protocol.answers.topics import MessageCount
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.records import Metadata
    from plainsong.protocol.topic.asks import Create, Remove, SetProperties, TopicChange, Undelete
    from storage.base import Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TopicChanges:
    """Changes of topics, at their owner.

    The topic returns its contents as of the step that makes the change, and the rows are counted afterwards, so no
    publish can arrive between the count and the change. Rows that a change hides stay in the store until the janitor
    removes them.
    """

    directory: Directory
    store: Store
    pages: Pages
    delete_grace_ms: int

    async def would_create(self, name: TopicName, ask: Create) -> Answer:
        """Do a dry run of a creation. Raises the same errors."""
        description = await self.directory.ask(name, replace(ask, dry_run=True))
        return change_answer("topic.create", str(name), None, _properties(description.metadata))

    async def set_properties(self, name: TopicName, ask: SetProperties) -> Answer:
        """Raises TopicNotFound, PreconditionFailed, InvalidProperty: nothing happened."""
        producers = (await self.directory.ask(name, ListProducers(limit=1))).total
        change = await self.directory.ask(name, ask)
        effect: dict[str, Any] = {}
        warnings: list[str] = []
        try:
            effect = await self._shorter(name, change)
            warnings = await self._warnings(change, producers)
        except (PlainsongError, StoreError, DamagedRow) as error:
            warnings = [_not_counted(name, error, dry_run=ask.dry_run)]
        before, after = _properties(change.before), _properties(change.after)
        etag = (change.before if ask.dry_run else change.after).etag
        return change_answer(
            "topic.properties",
            str(name),
            before,
            after,
            dry_run=ask.dry_run,
            effect=effect,
            warnings=warnings,
            etag=etag,
        )

    async def _shorter(self, name: TopicName, change: TopicChange) -> dict[str, Any]:
        ttl_ms = change.after.properties.ttl_ms
        if ttl_ms >= change.before.properties.ttl_ms:
            return {}
        return {"hides": await self._messages(name, _until(change.found, change.found.span.now_ms - ttl_ms))}

    async def _warnings(self, change: TopicChange, producers: int) -> list[str]:
        old, new = change.before.properties, change.after.properties
        warnings = []
        if new.ttl_ms > old.ttl_ms:
            expired, more = await expired_from(self.store, change.found.span, FIRST_BOUND, None)
            if expired:
                warnings.append(
                    f"{_some(expired, more=more)} already expired; a longer ttl does not bring expired messages back"
                )
        held = sum(each.bytes for each in change.found.slices)
        if new.max_bytes is not None and held >= new.max_bytes:
            warnings.append(
                f"the topic holds {held} bytes: publishes are refused until it holds less than {new.max_bytes}"
            )
        if new.deduplication == "disabled" != old.deduplication:
            warnings.append(f"the topic forgets {counted(producers, 'producer')}")
        return warnings

    async def remove(self, name: TopicName, ask: Remove) -> Answer:
        """Raises TopicNotFound, PreconditionFailed: nothing happened."""
        core = self.directory.entry(name).actor.core
        undecided = await self.directory.ask(name, ListPointers())
        readers = await self.directory.ask(name, ListReaders())
        effect: dict[str, Any] = {
            "readers": len(readers),
            "producers": (await self.directory.ask(name, ListProducers(limit=1))).total,
            "openTransactions": sum(not each.rolled_back for each in undecided),
            "parkedPolls": 0 if core is None else len(core.parking),
        }
        change = await self.directory.ask(name, ask)
        effect["undeleteUntilMs"] = change.found.span.now_ms + self.delete_grace_ms
        warnings = await self._count(name, change, effect, "removes", dry_run=ask.dry_run)
        return change_answer(
            "topic.delete",
            str(name),
            _properties(change.before),
            None,
            dry_run=ask.dry_run,
            effect=effect,
            warnings=warnings,
            etag=change.before.etag,
        )

    async def undelete(
        self, name: TopicName, ask: Undelete, shown: Callable[[Metadata], Mapping[str, object]]
    ) -> Answer:
        """Raises TopicExists, TopicNotFound, PartlyCleaned, PreconditionFailed: nothing happened."""
        change = await self.directory.ask(name, ask)
        effect: dict[str, Any] = {}
        warnings = await self._count(name, change, effect, "returns", dry_run=ask.dry_run)
        etag = (change.before if ask.dry_run else change.after).etag
        return change_answer(
            "topic.undelete",
            str(name),
            None,
            _properties(change.after),
            dry_run=ask.dry_run,
            effect=effect,
            warnings=warnings,
            etag=etag,
            more=None if ask.dry_run else shown(change.after),
        )

    async def _count(
        self, name: TopicName, change: TopicChange, effect: dict[str, Any], what: str, *, dry_run: bool
    ) -> list[str]:
        """Count the messages that a change removes or returns, into ``effect``; return warnings."""
        try:
            effect[what] = await self._messages(name, change.found)
        except (PlainsongError, StoreError, DamagedRow) as error:
            return [_not_counted(name, error, dry_run=dry_run)]
        return []

    async def _messages(self, name: TopicName, found: StatsView) -> MessageCount:
        """Count the messages of a span; exact if few enough to read them."""
        span = found.span
        if span.start >= span.until:
            return NOTHING
        count = await count_from(self.store, found, FIRST_BOUND)
        if not count.messages:
            return NOTHING
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


def _not_counted(name: TopicName, error: Exception, *, dry_run: bool) -> str:
    """Return the warning for a change whose rows could not be counted. Raises ``error`` for a dry run."""
    if dry_run:
        raise error
    log.warning("a change could not be counted", extra={"topic": str(name), "why": str(error)})
    return NOT_COUNTED


def _properties(metadata: Metadata) -> dict[str, str]:
    """Return the properties as ``GET`` shows them, without the generation, which a change of properties keeps."""
    shown = metadata.properties.shown(metadata.generation)
    del shown["generation"]
    return shown


def _until(found: StatsView, before_ms: int) -> StatsView:
    """Return the part that was published before a time."""
    bound = bound_at(max(0, before_ms))
    span = replace(found.span, until=min(found.span.until, bound))
    slices = []
    for one in found.slices:
        if one.last_ms < before_ms:
            slices.append(one)
        elif one.first_ms < before_ms:
            # Only reading the slice shows which of its messages are older; an estimate counts all of it.
            slices.append(one._replace(last_ms=before_ms - 1, own_expiry_ms=1))
    return StatsView(span, tuple(slices))


def _some(count: int, *, more: bool) -> str:
    return f"more than {MAX_LOOKS} messages" if more else counted(count, "message")

"""The janitor: removes rows that readers can no longer see, in bounded steps, and reclaims disk space.

It checks every topic of this instance in turn, and opens only those with something to remove. The topic makes a plan,
which ensures that removed rows stay invisible after any restart; the janitor then removes the rows without the topic's
actor. After a crash the remaining rows are still invisible, and the next round removes them.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import (
    HIGH_WATER,
    POINTER,
    PRODUCERS,
    READER,
    generation_prefix,
    generations_range,
    stop_after,
    system_key,
    topic_of,
)
from plainsong.protocol.keys import topic_range as all_topics
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.topic.asks import Cleaned, CleaningPlan, PlanCleaning
from plainsong.protocol.topic.usage import Usage
from storage.base import pages_of_rows, read_rows
from storage.cleaning import Sweep, is_message, is_payload

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.directory import Directory
    from actors.invalid_list import InvalidPass
    from actors.observe import Clock, Observer
    from actors.settings import RetentionConfig
    from plainsong.protocol.names import TopicName
    from storage.base import Row, Store

log = logging.getLogger(__name__)


class Janitor:
    """Cleans all topics, one after the other."""

    def __init__(
        self,
        store: Store,
        directory: Directory,
        clock: Clock,
        observer: Observer,
        settings: RetentionConfig,
        invalid_pass: InvalidPass | None = None,
    ) -> None:
        """``invalid_pass``: runs after each round; None if there are no transactions."""
        self._store = store
        self._directory = directory
        self._clock = clock
        self._observer = observer
        self._settings = settings
        self._invalid_pass = invalid_pass
        self._sweep = Sweep(store, settings.step_rows)
        #: The first key that a topic may have, so that a check does not scan the tombstones of removed rows.
        self._first_keys: dict[TopicName, bytes] = {}
        #: Completed passes over all topics.
        self.rounds = 0

    async def run(self) -> None:
        """Pause, clean, tidy the store, run the invalid pass, and repeat.

        A failed part is logged and tried again in the next round; the other parts still run. If the disk is full, only
        tidying may make the room that cleaning needs. And a failure to tidy must not keep pointers on the invalid list:
        once that is full, no transaction can begin.
        """
        while True:
            await trio.sleep(self._settings.interval_s)
            await _attempt(self.clean_all, "cleaning stopped, trying again later")
            await _attempt(self._store.tidy, "tidying stopped, trying again later")
            if self._invalid_pass is not None:
                await _attempt(self._invalid_pass.run_once, "invalid pass stopped, trying again later")

    async def clean_all(self) -> int:
        """Clean all topics once; return the number of rows removed."""
        removed = 0
        seen: set[TopicName] = set()
        async with aclosing(pages_of_rows(self._store, Table.METADATA, *all_topics())) as pages:
            async for rows in pages:
                for row in rows:
                    removed += await self._clean_row(row, seen)
        for name in self._first_keys.keys() - seen:
            del self._first_keys[name]  # the topic was removed, or has another owner now
        self.rounds += 1
        return removed

    async def _clean_row(self, row: Row, seen: set[TopicName]) -> int:
        try:
            name, _ = topic_of(row[0])
            if not self._directory.environment.ownership.is_mine(name):
                return 0  # its owner cleans it
            seen.add(name)
            metadata = Metadata.decode(row[1])
            if not await self._is_due(name, metadata):
                return 0
            return await self.clean(name)
        except PlainsongError as error:
            # A topic that cannot be cleaned must not stop the round.
            log.warning("topic not cleaned", extra={"key": row[0].hex(), "why": str(error)})
            return 0

    async def _is_due(self, name: TopicName, metadata: Metadata) -> bool:
        """Return True if the topic has anything to remove; takes a few reads, and does not open it."""
        now_ms = self._clock.now_ms()
        if await self._has_remains(name, metadata, now_ms):
            return True
        if await self._has_dead_messages(name, metadata, now_ms):
            return True
        if metadata.deleted_ms is not None:
            return False
        return await self._own_expiry_is_due(name, metadata, now_ms)

    async def _has_dead_messages(self, name: TopicName, metadata: Metadata, now_ms: int) -> bool:
        """Return True if there are expired messages, or messages of purged generations."""
        start, stop = generations_range(name, 1, metadata.generation)
        if metadata.deleted_ms is None:
            oldest_ms = max(metadata.floor_ms, now_ms - metadata.properties.ttl_ms)
            stop = generation_prefix(name, metadata.generation) + pack_position(max(0, oldest_ms), 0)
        elif now_ms <= metadata.deleted_ms + self._settings.delete_grace_s * 1000:
            stop = generation_prefix(name, metadata.generation)
        start = max(start, self._first_keys.get(name, start))
        if not self._store.may_have(Table.MESSAGE, start, stop):
            return False
        if self._store.traits.drops_ranges:
            return True
        rows = await read_rows(self._store, Table.MESSAGE, start, stop, limit=1, values=False)
        if rows:
            self._first_keys[name] = rows[0][0]
        return bool(rows)

    async def _has_remains(self, name: TopicName, metadata: Metadata, now_ms: int) -> bool:
        """Return True if the topic has undecided write pointers, or rows of purged generations other than messages."""
        if await self._has_row(
            Table.METADATA, system_key(POINTER, name, 1), system_key(POINTER, name, metadata.generation)
        ):
            return True
        if await self._has_old_producers(name, metadata, now_ms):
            return True
        last = metadata.generation
        if metadata.deleted_ms is None or now_ms <= metadata.deleted_ms + self._settings.delete_grace_s * 1000:
            last -= 1
        if last < 1:
            return False
        if await self._has_row(Table.METADATA, system_key(READER, name, 1), system_key(READER, name, last)):
            return True
        start, stop = generations_range(name, 1, last)
        if not self._store.may_have(Table.PAYLOAD, start, stop):
            return False
        return bool(await read_rows(self._store, Table.PAYLOAD, start, stop, limit=1, values=False))

    async def _has_old_producers(self, name: TopicName, metadata: Metadata, now_ms: int) -> bool:
        """Return True if a purged generation has rows about producers that clients can no longer ask about."""
        last, grace_ms = metadata.generation, self._settings.delete_grace_s * 1000
        if metadata.deleted_ms is None or now_ms <= metadata.deleted_ms + grace_ms:
            last -= 1
            if now_ms <= metadata.created_ms + grace_ms:
                return False
        return last > 0 and await self._has_row(
            Table.METADATA, system_key(PRODUCERS, name, 1), system_key(PRODUCERS, name, last)
        )

    async def _has_row(self, table: Table, first: bytes, last: bytes) -> bool:
        """Return True if there is a row from ``first`` to the last one with the prefix ``last``."""
        return bool(await read_rows(self._store, table, first, stop_after(last), limit=1, values=False))

    async def _own_expiry_is_due(self, name: TopicName, metadata: Metadata, now_ms: int) -> bool:
        state = self._directory.peek(name)
        if state is not None:
            return 0 < state.usage.own_expiry_ms() < now_ms
        value = await self._store.get(Table.METADATA, system_key(HIGH_WATER, name, metadata.generation))
        if value is None:
            return False
        return 0 < Usage(HighWater.decode(value).buckets).own_expiry_ms() < now_ms

    async def clean(self, name: TopicName) -> int:
        """Remove the removable rows of one topic; return their number."""
        plan = await self._directory.ask(name, PlanCleaning(self._settings.delete_grace_s * 1000))
        expired = purged = 0
        if plan.purge is not None:
            purged = await self._purge(name, *plan.purge)
            self._first_keys[name] = generations_range(name, *plan.purge)[1]
        if plan.expired is not None:
            start, stop = plan.expired
            expired = await self._sweep.remove_messages(max(start, self._first_keys.get(name, start)), stop)
            self._first_keys[name] = stop
        if plan.entries is not None:
            await self._sweep.remove_entries(*plan.entries)
        if plan.due or plan.orphans:
            expired += await self._clean_parts(name, plan)
        if plan.forget is not None:
            await self._sweep.remove_producers(name, *plan.forget)
        if expired or purged:
            self._observer.cleaned(expired, purged)
            log.info("topic cleaned", extra={"topic": str(name), "expired": expired, "purged": purged})
        return expired + purged

    async def _purge(self, name: TopicName, first: int, last: int) -> int:
        """Remove all rows of purged generations: messages, payloads, readers, write pointers."""
        start, stop = generations_range(name, first, last)
        removed = await self._sweep.remove(Table.MESSAGE, start, stop, is_message)
        removed += await self._sweep.remove(Table.PAYLOAD, start, stop, is_payload)
        await self._sweep.remove_readers(name, first, last)
        pointers = await self._sweep.remove_pointers(name, first, last)
        state = self._directory.peek(name)
        if state is not None and pointers:
            # The current generation may have rows of the same pointers.
            gone = [pointer for pointer in pointers if pointer not in state.pending]
            self._directory.environment.pointers.drop(name, gone)
        return removed

    async def _clean_parts(self, name: TopicName, plan: CleaningPlan) -> int:
        """Remove messages past their own time to live, and stored payloads that will never be published."""
        done = [
            await self._sweep.remove_due(plan.prefix, first_ms, last_ms, plan.now_ms) for first_ms, last_ms in plan.due
        ]
        removed = sum(slice_.messages for slice_ in done)
        for _, start, stop in plan.orphans:
            removed += await self._sweep.remove(Table.PAYLOAD, start, stop, is_payload)
        await self._directory.ask(name, Cleaned(plan.prefix, done, tuple(orphan[0] for orphan in plan.orphans)))
        return removed


async def _attempt(part: Callable[[], Awaitable[object]], failed: str) -> None:
    """Run a part of a round; log a failure with the text ``failed``."""
    try:
        await part()
    except PlainsongError as error:
        log.warning(failed, extra={"why": str(error)})

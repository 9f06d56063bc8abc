"""A daemon's actors, transaction service and janitor's pass; tests can stop, kill and restart it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from actors_in_process import START_MS, Harness, SetClock, actors
from asked_service import AskedService

from actors.invalid_list import InvalidPass
from actors.pointers import PointerIndex
from actors.reading import read_page
from actors.settings import RetentionConfig
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.topic.asks import Look
from plainsong.protocol.topic.state import TopicLimits
from plainsong.protocol.transactions.ledger import TransactionSettings
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS

LIFETIME_MS = 1_000_000
STEPS = RetentionConfig(step_rows=3)


class Cut(Exception):
    """The power is cut."""


class OneClock(SetClock):
    """A wall clock that advances with trio's clock, and can also be set."""

    def __init__(self):
        super().__init__()
        self._since_s = trio.current_time()

    def now_ms(self):
        return self.ms + int((trio.current_time() - self._since_s) * 1000)


@dataclass
class Daemon:
    """The parts that tests use."""

    harness: Harness
    service: AskedService
    index: PointerIndex
    invalid_pass: InvalidPass

    async def clean(self):
        """Clean like one round of the janitor; return the pass's report."""
        await self.harness.janitor.clean_all()
        return await self.invalid_pass.run_once()

    async def read(self, name, view=None, limit=10**6):
        """Return all payloads that a reader of ``name`` gets page by page, and the pointer that blocks it."""
        payloads, since = [], FIRST_BOUND
        while True:
            span = await self.harness.ask(Look(since), name)
            cache = self.harness.directory.cache(name)
            page = await read_page(self.harness.store, cache, span, limit=limit, max_bytes=10**9, view=view)
            found = list(page.messages())
            payloads += [payload for _, payload in found]
            if page.held is not None or len(found) < limit:
                return payloads, None if page.held is None else page.held.write_pointer
            since = after(found[-1][0])


@asynccontextmanager
async def daemon(disk, clock, *, lifetime_ms=LIFETIME_MS, timeout_ms=30_000, prune=True, janitor=STEPS):
    """Run a daemon on ``disk``; it closes in an orderly way, or at once if the body raises ``Cut``."""
    index = PointerIndex()
    await index.load(disk)
    around = []
    settings = TransactionSettings(
        timeout_ms=timeout_ms, max_lifetime_ms=lifetime_ms, prune=prune, abort_deadline_s=2.0, max_outcomes=50
    )

    async def ask_topic(name, ask):
        return await around[0].ask(ask, name)

    service = AskedService(disk, clock, index, ask_topic, settings)
    limits = TopicLimits(max_lifetime_ms=lifetime_ms, checkpoint_rows=5)
    inside = actors(
        disk, clock=clock, limits=limits, janitor=janitor, pointers=index, authority=service, cache_bytes=1 << 14
    )
    async with inside as harness, trio.open_nursery() as nursery:
        around.append(harness)
        loaded = trio.Event()
        nursery.start_soon(service.run, loaded.set)
        await loaded.wait()
        yield Daemon(harness, service, index, InvalidPass(harness.directory, service))
        harness.store.release_all()
        harness.directory.close()
        await harness.directory.drained()
        service.close()


def first_pointer():
    """Return the lowest pointer that can be issued at the tests' time."""
    return START_MS * POINTERS_PER_MS

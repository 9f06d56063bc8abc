"""Actors assembled as in the daemon, with an in-memory store that fails on request and a clock that tests set."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio

from actors.cache import CacheBudget
from actors.directory import Directory
from actors.janitor import Janitor
from actors.observe import NoObserver, SpaceGuard
from actors.pages import Pages
from actors.reading import read_page
from actors.settings import RetentionConfig, TopicConfig
from actors.topic import TopicEnvironment
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, Look, Publish
from plainsong.protocol.topic.state import TopicLimits
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

NAME = TopicName("ns", "t")
START_MS = 1_700_000_000_000


class SetClock:
    """A clock that advances only when it is set."""

    regressions = 0

    def __init__(self):
        self.ms = START_MS

    def now_ms(self):
        return self.ms


class Watch(NoObserver):
    """Counts the actors' events."""

    def __init__(self):
        self.count = Counter()
        self.loads = Counter()

    def committed(self, requests, messages, write_s):
        self.count["commits"] += 1
        self.count["requests"] += requests
        self.count["messages"] += messages

    def fell(self, name, error):
        self.count["falls"] += 1

    def loaded(self, name, load_s):
        self.loads[name] += 1

    def cleaned(self, expired, purged):
        self.count["expired"] += expired
        self.count["purged"] += purged


@dataclass
class Harness:
    """The actors and their environment, for tests to use and inspect."""

    store: FaultyStore
    clock: SetClock
    space: SpaceGuard
    directory: Directory
    watch: Watch
    janitor: Janitor
    claims: Counter = field(default_factory=Counter)

    def __post_init__(self):
        self.pages = Pages(self.store, self.directory)

    def entry(self, name=NAME):
        return next((each for each in self.directory if each.name == name), None)

    def core(self, name=NAME):
        return self.entry(name).actor.core

    def ask(self, ask, name=NAME):
        return self.directory.ask(name, ask)

    async def create(self, name=NAME, **properties):
        return await self.ask(Create(TopicProperties(**properties)), name)

    async def publish(self, *payloads, name=NAME, **more):
        """Publish these messages in one request; return its receipt."""
        request = PublishRequest([each if isinstance(each, bytes) else each.encode() for each in payloads], **more)
        return await self.ask(Publish(request, sum(map(len, request.messages))), name)

    async def look(self, since=FIRST_BOUND, wait_s=None, name=NAME, end_before=None):
        """Return the span for a poll that waits up to ``wait_s``."""
        deadline_s = None if wait_s is None else trio.current_time() + wait_s
        return await self.ask(Look(since, end_before, deadline_s), name)

    async def page(self, since=FIRST_BOUND, limit=10**6, max_bytes=10**9, name=NAME, cached=True):
        """Return the page of a poll; without ``cached`` it is read from the store."""
        span = await self.look(since, name=name)
        if not cached:
            return await read_page(self.store, None, span, limit=limit, max_bytes=max_bytes)
        return await self.pages.read(name, span, limit=limit, max_bytes=max_bytes)

    async def read(self, since=FIRST_BOUND, name=NAME, cached=True):
        """Return all payloads."""
        return [payload for _, payload in (await self.page(since, name=name, cached=cached)).messages()]

    async def end(self, name=NAME):
        """Return the bound after all messages."""
        return (await self.look(name=name)).until

    def rows(self, table=Table.MESSAGE):
        return len(self.store.inner.tables[table].rows)


def after_receipt(receipt):
    return after(receipt.last_id)


@asynccontextmanager
async def actors(
    store=None,
    *,
    cache_bytes=1 << 20,
    mailbox_requests=1_000,
    mailbox_bytes=1 << 20,
    max_open=100,
    idle_s=60.0,
    limits=None,
    janitor=None,
    clock=None,
    sweeping=False,
    **around,
):
    """Run a harness. It ends as the daemon does: closed and drained, or cut off if the body raises."""
    store = store or FaultyStore(MemoryStore())
    clock, watch = clock or SetClock(), Watch()
    space = SpaceGuard(store, 1)
    async with trio.open_nursery() as nursery:
        directory = Directory(
            nursery,
            TopicEnvironment(store, clock, space, limits or TopicLimits(), observer=watch, **around),
            CacheBudget(cache_bytes),
            TopicConfig(
                mailbox_requests=mailbox_requests, mailbox_bytes=mailbox_bytes, max_open=max_open, idle_s=idle_s
            ),
        )
        if sweeping:
            nursery.start_soon(directory.run_sweeper)
        yield Harness(
            store, clock, space, directory, watch, Janitor(store, directory, clock, watch, janitor or RetentionConfig())
        )
        store.release_all()
        directory.close()
        await directory.drained()
        nursery.cancel_scope.cancel()

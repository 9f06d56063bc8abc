"""The transaction service as in the daemon, on a store that fails on request, with topics that can be blocked."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio
from actors_in_process import SetClock
from asked_service import AskedService

from actors.observe import NoTransactionObserver
from actors.pointers import PointerIndex
from plainsong.protocol.errors import TransactionNotInProgress
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import ListPointers, PointerView, RollBackPointer
from plainsong.protocol.transactions.ledger import TransactionSettings
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

TOPIC, OTHER = TopicName("ns", "t"), TopicName("ns", "u")


class Topics:
    """Topics as the service sees them: each holds pointers; a write or a rollback may be blocked, or fail."""

    def __init__(self, index):
        self.index = index
        self.rows = {}
        self.rolled_back = set()
        self.asked = []
        #: Topics that do not answer until the event is set, and those that raise.
        self.stuck = {}
        self.failing = {}

    async def ask(self, name, ask):
        await trio.lowlevel.checkpoint()
        if name in self.stuck:
            await self.stuck[name].wait()
        if name in self.failing:
            raise self.failing[name]
        if isinstance(ask, ListPointers):
            return [PointerView(each, 0, b"", 1, 1, 0, 0, False, 7) for each in self.rows.get(name, ())]
        assert isinstance(ask, RollBackPointer)
        assert not ask.by_client
        self.asked.append((name, ask.pointer))
        self.rolled_back.add((name, ask.pointer))
        return None

    def put(self, pointer, name=TOPIC):
        """Add a row of a pointer."""
        self.index.begin(name, (pointer,))
        self.index.end((pointer,))
        self.rows.setdefault(name, set()).add(pointer)

    async def publish(self, service, pointer, written, name=TOPIC):
        """Publish as a topic's actor does: ask the authority, then write until ``written`` is set."""
        if service.standing(pointer) not in ("in_progress", "unknown"):
            raise TransactionNotInProgress("refused")
        self.index.begin(name, (pointer,))
        try:
            await written.wait()
        finally:
            self.index.end((pointer,))
        self.rows.setdefault(name, set()).add(pointer)


class Counts(NoTransactionObserver):
    """Records the service's events."""

    def __init__(self):
        self.decisions = []
        self.falls = 0
        self.conflicts = 0
        self.time_outs = 0

    def conflicted(self):
        self.conflicts += 1

    def timed_out(self, count):
        self.time_outs += count

    def decided(self, state, count):
        self.decisions += [state] * count

    def fell(self, error):
        self.falls += 1


class Harness:
    """The service and its environment."""

    def __init__(self, store, clock, **settings):
        self.store, self.clock = store, clock
        self.index = PointerIndex()
        self.topics = Topics(self.index)
        self.counts = Counts()
        self.loads = 0
        self.loaded = trio.Event()
        self.service = AskedService(
            store, clock, self.index, self.topics.ask, TransactionSettings(**settings), self.counts
        )

    def on_loaded(self):
        self.loads += 1
        self.loaded.set()
        self.loaded = trio.Event()

    async def new(self, **more):
        return (await self.service.begin(**more)).transaction.transaction_id

    def verdict(self, pointer):
        return self.service.view().verdict(pointer).name.lower()


@asynccontextmanager
async def serving(store=None, clock=None, rows=(), **settings):
    """Run a harness with the service loaded; it ends as the daemon does. ``rows``: pointers that have rows before."""
    harness = Harness(store or FaultyStore(MemoryStore()), clock or SetClock(), **settings)
    for pointer in rows:
        harness.topics.put(pointer)
    async with trio.open_nursery() as nursery:
        first = harness.loaded
        nursery.start_soon(harness.service.run, harness.on_loaded)
        await first.wait()
        yield harness
        harness.service.close()


async def settle():
    """Wait until all tasks are blocked."""
    await trio.testing.wait_all_tasks_blocked()

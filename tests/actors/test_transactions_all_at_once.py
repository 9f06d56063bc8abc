"""Real topics and the transaction service under concurrent load, on a failing store: readers see all or nothing.

Clients begin, checkpoint, publish to several topics, and commit or abort while some of these requests are in progress;
or they disconnect, and the time-out applies. Readers of committed messages follow each topic. Clients and readers
record their answers, and in the end all records must agree.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
import trio
from actors_in_process import SetClock, actors
from asked_service import AskedService
from hypothesis import settings
from pointers_in_process import publish, store

from actors.pointers import PointerIndex
from actors.reading import read_page
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.names import TopicName
from plainsong.protocol.transactions.ledger import TransactionSettings
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

NAMES = [TopicName("ns", each) for each in "abc"]
#: Runs of each kind; ``make torture`` does many more.
SEEDS = 3 if settings.get_current_profile_name() == "house" else 100


class GoingClock(SetClock):
    """A wall clock that advances with the event loop's."""

    def __init__(self):
        super().__init__()
        self.begun_s = trio.current_time()

    def now_ms(self):
        return self.ms + int((trio.current_time() - self.begun_s) * 1000)


class SlowStore(FaultyStore):
    """Delays writes, so that other work runs during them."""

    def __init__(self, random):
        super().__init__(MemoryStore())
        self.random = random

    async def write(self, commit, **more):
        with trio.CancelScope(shield=True):
            await trio.sleep(self.random.choice([0, 0.01, 0.1]))
            await super().write(commit, **more)


@dataclass
class Tx:
    """One client's record of a transaction."""

    id: int
    pointer: int
    fate: str = "in_progress"
    acknowledged: set = field(default_factory=set)
    unknown: set = field(default_factory=set)


class House:
    """The daemon's actors, and all clients' and readers' records."""

    def __init__(self, harness, service, index, random):
        self.harness, self.service, self.index, self.random = harness, service, index, random
        self.transactions = []
        self.read = defaultdict(list)
        self.done = trio.Event()
        #: The messages of all topics as shown by one view, and the topics that were read to their end.
        self.snapshots = []

    async def sure(self, call, *args):
        """Return the answer, after any number of attempts; None if the call is refused permanently."""
        while True:
            try:
                return await call(*args)
            except PlainsongError as error:
                if error.retry_after_s is None and error.outcome == "not-applied":
                    return None
            await trio.sleep(self.random.random())

    # --- clients ----------------------------------------------------------------------------------

    async def client(self, who, count):
        for number in range(count):
            begun = await self.sure(self.service.begin)
            tx = Tx(begun.transaction.transaction_id, begun.transaction.write_pointer)
            self.transactions.append(tx)
            async with trio.open_nursery() as nursery:
                for part in range(self.random.randint(0, 4)):
                    nursery.start_soon(self.publish, tx, f"{who}.{number}.{part}")
                    await trio.sleep(self.random.choice([0, 0.1]))
                if self.random.random() < 0.2:
                    later = await self.sure(self.service.checkpoint, tx.id, begun.transaction)
                    tx.pointer = tx.pointer if later is None else later.transaction.write_pointer
                    await self.publish(tx, f"{who}.{number}.after")
                await trio.sleep(self.random.choice([0, 0.01, 0.2]))
                await self.decide(tx)
            await trio.sleep(self.random.random())

    async def publish(self, tx, what):
        name, harness = self.random.choice(NAMES), self.harness
        await trio.sleep(self.random.choice([0, 0.01, 0.1]))
        payload, pointer = (name, what), tx.pointer
        try:
            if self.random.random() < 0.3:
                await store(harness, pointer, f"{tx.id} {what}", name=name)
                await publish(harness, pointer, name=name)
            else:
                await publish(harness, pointer, f"{tx.id} {what}", name=name)
            tx.acknowledged.add(payload)
        except PlainsongError:
            tx.unknown.add(payload)  # refused, lost, or stored and published by another request of this transaction

    async def decide(self, tx):
        draw = self.random.random()
        if draw < 0.6:
            await self.sure(self.service.commit, tx.id)
        elif draw < 0.85:
            await self.sure(self.service.abort, tx.id)
        elif draw < 0.95:
            await self.sure(self.service.invalidate, tx.id)

    # --- readers ----------------------------------------------------------------------------------

    async def reader(self, name):
        """Read like a poll of committed messages: first the span, then the view; if blocked, wait for the pointer."""
        since = FIRST_BOUND
        while True:
            ended = self.done.is_set()
            try:
                mark = self.index.mark
                page = await self.page(name, since, self.random.randint(1, 7))
            except PlainsongError:
                await trio.sleep(0.05)
                continue
            self.read[name] += page.messages()
            since = after(page.last_id) if page.last_id is not None else since
            if page.end == "held":
                with trio.move_on_after(5):
                    await self.index.wait(page.held.write_pointer, mark)
            elif not page.count:
                if ended:
                    return
                await trio.sleep(0.05)

    async def page(self, name, since=FIRST_BOUND, limit=10**6, view=None):
        harness = self.harness
        span = await harness.look(since, name=name)
        view = view or self.service.view()
        return await read_page(
            harness.store, harness.directory.cache(name), span, limit=limit, max_bytes=10**6, view=view
        )

    async def snapshot(self):
        """Read all topics with one view, which is taken first: everything written before a commit must be found."""
        while not self.done.is_set():
            await trio.sleep(self.random.random() / 4)
            try:
                view = self.service.view()
                pages = {name: await self.page(name, view=view) for name in NAMES}
            except PlainsongError:
                continue
            shown = {(name, each.decode()) for name, page in pages.items() for _, each in page.messages()}
            self.snapshots.append((shown, {name for name, page in pages.items() if page.end == "end"}))

    async def faults(self, crashes):
        while not self.done.is_set():
            await trio.sleep(0.2 + self.random.random())
            if crashes and self.random.random() < 0.3:
                self.harness.store.crash(keep_rows=self.random.randint(0, 6))
            else:
                self.harness.store.fail_next("write", applied=self.random.randint(0, 4))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("failing", [False, True])
async def test_committed_readers_see_all_or_nothing_in_any_race(seed, failing, autojump_clock):
    random = Random(seed)
    faulty, clock, index = SlowStore(random), GoingClock(), PointerIndex()
    topics = []

    def ask_topic(name, ask):
        return topics[0].ask(name, ask)

    service = AskedService(faulty, clock, index, ask_topic, TransactionSettings(timeout_ms=4_000))
    async with (
        actors(faulty, clock=clock, pointers=index, authority=service) as harness,
        trio.open_nursery() as nursery,
    ):
        topics.append(harness.directory)
        loaded = trio.Event()
        nursery.start_soon(service.run, loaded.set)
        await loaded.wait()
        for name in NAMES:
            await harness.create(name)
        house = House(harness, service, index, random)
        async with trio.open_nursery() as everybody:
            for name in NAMES:
                everybody.start_soon(house.reader, name)
            everybody.start_soon(house.snapshot)
            if failing:
                everybody.start_soon(house.faults, seed % 2 == 0)
            async with trio.open_nursery() as clients:
                for who in range(6):
                    clients.start_soon(house.client, who, 12)
            await trio.sleep(5)  # undecided transactions time out
            house.done.set()
        await agree(house)
        service.close()


async def agree(house):
    """Check every promise about transactional readers against the records."""
    shown = {(name, each.decode()) for name, messages in house.read.items() for _, each in messages}
    for tx in house.transactions:
        tx.fate = (await house.sure(house.service.look, tx.id)).state
        for name, what in tx.acknowledged | tx.unknown:
            there = (name, f"{tx.id} {what}") in shown
            assert not there or tx.fate == "committed", "promise 4"
            assert there or (name, what) in tx.unknown or tx.fate != "committed", "committed, but no reader saw it"
    fates = {tx.fate for tx in house.transactions}
    assert fates == {"committed", "aborted", "invalid"}
    assert house.snapshots
    for part, whole in house.snapshots:
        ids = {each.split()[0] for _, each in part}
        assert part >= {(name, each) for name, each in shown if name in whole and each.split()[0] in ids}, "promise 5"
    for name in NAMES:
        ids = [each for each, _ in house.read[name]]
        assert ids == sorted(set(ids)), "each once, in order"
        again = list((await house.sure(house.page, name)).messages())
        assert again == house.read[name], "nothing appears behind a reader"

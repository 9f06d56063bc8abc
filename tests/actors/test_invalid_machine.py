"""No schedule of crashes, cleaning and pruning shows an undecided or lost transaction, or loses a committed message.

Topic actors, the transaction service, the janitor and its pass run on a disk that tears commits at any row and loses
power at any call. A reader of committed messages always

    sees nothing of a transaction whose commit was never requested, or was refused
    sees everything acknowledged in a transaction whose commit was acknowledged
    sees all or nothing, in all topics alike, of a transaction whose commit got no answer
    sees nothing twice
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

import trio
from actors_in_process import START_MS
from daemon_in_process import LIFETIME_MS, Cut, OneClock, daemon
from hypothesis import given
from hypothesis import strategies as st
from pointers_in_process import publish, store
from trio.testing import MockClock

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import OutcomeUnknown, PlainsongError, TransactionConflict, TransactionNotInProgress
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import decode_row
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

NAMES = [TopicName("ns", "a"), TopicName("ns", "b")]
SLOTS = 3


@dataclass
class Tx:
    """A client's record of one of its transactions."""

    number: int
    pointer: int
    pointers: list[int] = field(default_factory=list)
    acknowledged: set[tuple[TopicName, bytes]] = field(default_factory=set)
    doubtful: set[tuple[TopicName, bytes]] = field(default_factory=set)
    """Messages whose publish has an unknown outcome."""
    stored: dict[TopicName, list[bytes]] = field(default_factory=dict)
    """By topic, the stored messages that a publish must deliver; removed once the publish was requested."""
    outcome: str = "open"
    """``open``, ``committed``, ``maybe`` (a commit without answer), ``lost`` (never visible)."""
    sent: int = 0


class Course:
    """One example: slots with transactions, and all transactions so far."""

    def __init__(self, clock):
        self.clock = clock
        self.disk = FaultyStore(MemoryStore())
        self.all = []
        self.slots = [None] * SLOTS
        self.it = None

    async def act(self, what, slot, topic, count):
        """Do one action; failures are recorded as its client would see them."""
        with suppress(PlainsongError):  # refused or unanswered; recorded where it matters
            await getattr(self, what)(self.slots[slot], slot, NAMES[topic], count)

    async def begin(self, tx, slot, name, count):
        begun = await self.it.service.begin()
        pointer = begun.transaction.write_pointer
        self.slots[slot] = Tx(len(self.all), pointer, [pointer])
        self.all.append(self.slots[slot])

    async def checkpoint(self, tx, slot, name, count):
        if tx is not None:
            pointer = (await self.it.service.checkpoint(tx.pointers[0])).transaction.write_pointer
            tx.pointer = pointer
            tx.stored.clear()

    async def publish(self, tx, slot, name, count):
        if tx is None:
            return
        payloads = self.payloads(tx, count)
        brings = tx.stored.pop(name, [])
        messages = {(name, payload.encode()) for payload in [*payloads, *brings]}
        try:
            await publish(self.it.harness, tx.pointer, *payloads, name=name)
        except OutcomeUnknown:
            tx.doubtful |= messages
            raise
        except PlainsongError:
            tx.stored[name] = brings
            raise
        tx.acknowledged |= messages

    async def store(self, tx, slot, name, count):
        if tx is None or not count:
            return
        payloads = self.payloads(tx, count)
        try:
            await store(self.it.harness, tx.pointer, *payloads, name=name)
        except OutcomeUnknown:
            tx.doubtful |= {(name, payload.encode()) for payload in payloads}
            raise
        tx.stored.setdefault(name, []).extend(payloads)

    async def plain(self, tx, slot, name, count):
        await self.it.harness.publish("plain", name=name)

    async def commit(self, tx, slot, name, count):
        if tx is None:
            return
        before, tx.outcome = tx.outcome, "maybe"
        try:
            await self.it.service.commit(tx.pointers[0])
        except (TransactionNotInProgress, TransactionConflict):
            tx.outcome = "lost" if before in ("open", "maybe") else before
            raise
        except OutcomeUnknown:
            tx.outcome = before if before == "committed" else "maybe"
            raise
        except PlainsongError:
            tx.outcome = before
            raise
        tx.outcome = "committed"

    async def abort(self, tx, slot, name, count):
        if tx is not None:
            await self.it.service.abort(tx.pointers[0])

    async def invalidate(self, tx, slot, name, count):
        if tx is not None:
            await self.it.service.invalidate(tx.pointers[0])

    async def truncate(self, tx, slot, name, count):
        await self.it.service.truncate(self.it.service.invalids())

    async def truncate_safe(self, tx, slot, name, count):
        """Truncate like an operator who trusts the figures."""
        bound = self.it.service.pruning().safe_bound
        if bound is not None:
            self.check_unreferenced(bound)

    async def clean(self, tx, slot, name, count):
        await self.it.clean()

    async def clock_jumps(self, tx, slot, name, count):
        """Jump by less or more than a transaction's lifetime, forwards or back."""
        self.clock.ms += (count - 1) * 3 * LIFETIME_MS // 4

    async def time_out(self, tx, slot, name, count):
        await trio.sleep(31)

    async def grow_old(self, tx, slot, name, count):
        await trio.sleep(LIFETIME_MS / 1000)

    def payloads(self, tx, count):
        tx.sent += count
        return [f"{tx.number} {tx.sent - index}" for index in range(count)]

    # --- invariants ---

    def check_unreferenced(self, bound):
        """Check that no row has a prunable pointer, that is, one that was on the list when the pass began."""
        invalid = [pointer for pointer in self.it.service.invalids() if pointer <= bound]
        carried = {decode_row(value).pointer for value in self.disk.inner.tables[Table.MESSAGE].rows.values()}
        assert not carried.intersection(invalid)

    async def check(self):
        """Check the messages that committed readers get, in pages of three and in one page."""
        await self.wait_until_all_is_loaded()
        view = self.it.service.view()
        seen, held = {}, False
        for name in NAMES:
            payloads, by = await self.it.read(name, view, limit=3)
            assert payloads == (await self.it.read(name, view))[0]
            assert len(payloads) - payloads.count(b"plain") == len({*payloads} - {b"plain"})
            held = held or by is not None
            for payload in payloads:
                if payload != b"plain":
                    seen.setdefault(int(payload.split()[0]), set()).add((name, payload))
        for tx in self.all:
            found = seen.get(tx.number, set())
            if tx.outcome in ("open", "lost"):
                assert not found, f"{tx} is visible"
            elif not held:
                whole = tx.acknowledged <= found <= tx.acknowledged | tx.doubtful
                assert whole or (tx.outcome == "maybe" and not found), f"{tx} is not whole: {found}"
        return held

    async def wait_until_all_is_loaded(self):
        """Wait until everything that failed in the last step is loaded again."""
        for _ in range(50):
            try:
                self.it.service.view()
                for name in NAMES:
                    await self.it.harness.look(name=name)
                return
            except PlainsongError:
                await trio.sleep(0.1)
        raise AssertionError("something does not recover")

    async def check_to_the_end(self):
        """Have everything decided, cleaned and pruned; results must stay the same, and no reader may be blocked."""
        await trio.sleep(31)
        for _ in range(2):
            await self.it.clean()
            assert not await self.check()
        for age in (LIFETIME_MS / 1000, 0, 3 * 90_000):
            await trio.sleep(age)
            report = await self.it.clean()
            assert report is not None
            assert report.complete
            assert not await self.check()
        assert self.it.service.invalids() == ()
        self.check_unreferenced(1 << 62)


ACTIONS = st.tuples(
    st.sampled_from(
        ["begin"] * 3
        + ["publish"] * 5
        + ["store"] * 2
        + ["commit"] * 3
        + ["abort", "abort", "invalidate", "checkpoint", "plain", "truncate", "truncate_safe"]
        + ["clean", "clean", "clean", "time_out", "grow_old", "clock_jumps"]
    ),
    st.integers(0, SLOTS - 1),
    st.integers(0, len(NAMES) - 1),
    st.integers(0, 3),
)
#: The call to the store that fails (counted from now on), and the number of its rows that are written.
FAULTS = st.none() | st.tuples(
    st.sampled_from(["write", "write", "discard", "scan"]), st.integers(0, 3), st.integers(0, 6) | st.just(True)
)
STEPS = st.tuples(
    st.lists(ACTIONS, min_size=1, max_size=3),
    FAULTS,
    st.booleans(),
    st.sampled_from(["", "", "", "", "cut", "restart"]),
    st.integers(0, 4),
)


def one_writer_a_slot(actions):
    """Drop concurrent actions of a client after its first publish, store or checkpoint; it may still commit."""
    writing = set()
    for action in actions:
        if action[0] in ("publish", "store", "checkpoint"):
            if action[1] in writing:
                continue
            writing.add(action[1])
        yield action


@given(st.lists(STEPS, min_size=4, max_size=14))
def test_no_schedule_shows_an_uncommitted_message_or_loses_a_committed_one(steps):
    async def run():
        clock = OneClock()
        course = Course(clock)
        rest = list(steps)
        first = True
        while first or rest:
            try:
                async with daemon(course.disk, clock) as course.it:
                    if first:
                        for name in NAMES:
                            await course.it.harness.create(name, ttl_s=10**8)
                        for slot in range(SLOTS):
                            await course.act("begin", slot, 0, 0)
                    first = False
                    await one_life(course, rest)
            except* Cut:
                course.disk.crash(keep_discards=keep)
        clock.ms = max(clock.ms, START_MS)
        async with daemon(course.disk, clock) as course.it:
            await course.check_to_the_end()
        async with daemon(course.disk, clock) as course.it:
            assert not await course.check()

    async def one_life(course, rest):
        nonlocal keep
        while rest:
            actions, fault, looks, after, keep = rest.pop(0)
            if fault is not None:
                course.disk.fail_next(fault[0], after=fault[1], applied=fault[2])
            async with trio.open_nursery() as nursery:
                for action in one_writer_a_slot(actions):
                    nursery.start_soon(course.act, *action)
            course.disk.fail_no_more()
            if looks:  # not always, since checking loads every topic
                await course.check()
            if after == "cut":
                raise Cut
            if after == "restart":
                return

    keep = 0
    trio.run(run, clock=MockClock(autojump_threshold=0))

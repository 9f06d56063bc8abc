"""The topic actor and write pointers: durable before answers, reloaded after crashes, in step with cache and index."""

from __future__ import annotations

import pytest
from actors_in_process import NAME, actors
from trio.testing import wait_all_tasks_blocked

from actors.pointers import PointerIndex
from plainsong.protocol import errors
from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import pointer_key
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import decode_row
from plainsong.protocol.topic.asks import ListPointers, PublishUnder, Remove, RollBackPointer, StoreUnder, Undelete
from plainsong.protocol.transactions.transaction import NoAuthority
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

P, Q = 1_700_000_000_000_000_000, 1_700_000_000_000_000_001


class Standings(NoAuthority, dict):
    """An authority with preset answers."""

    def standing(self, pointer):
        return self.get(pointer, "unknown")


class Under:
    """Requests about pointers, in one harness."""

    def __init__(self, harness):
        self.harness = harness

    async def publish(self, pointer, *messages, **more):
        return await self.harness.ask(PublishUnder(PublishRequest(messages, pointer, **more), 1))

    async def keep(self, pointer, *messages, **more):
        await self.harness.ask(StoreUnder(PublishRequest(messages, pointer, **more), 1))

    async def roll_back(self, pointer, within=None):
        await self.harness.ask(RollBackPointer(pointer, within))

    async def views(self):
        return await self.harness.ask(ListPointers())

    def signs(self):
        """Return the pointers in the stored message rows, negative if rolled back."""
        rows = sorted(self.harness.store.inner.tables[Table.MESSAGE].rows.items())
        return [decode_row(value).pointer for _, value in rows]

    def pointer_rows(self):
        rows = self.harness.store.inner.tables[Table.METADATA].rows
        return [pointer for pointer in (P, Q) if pointer_key(NAME, 1, pointer) in rows]


@pytest.fixture
def store():
    """A store that outlives its actors."""
    inner = MemoryStore()
    tables = inner.tables

    def again():
        fresh = MemoryStore()
        fresh.tables = tables
        return FaultyStore(fresh)

    return again


async def test_uncommitted_readers_see_stored_and_inline_messages_in_order_from_cache_and_disk_alike():
    async with actors() as harness:
        await harness.create()
        under = Under(harness)
        await harness.publish("plain")
        await under.keep(P, b"stored 1", b"stored 2")
        assert await harness.read() == [b"plain"]
        await under.publish(P, b"inline")
        await under.publish(Q, b"other")
        wanted = [b"plain", b"stored 1", b"stored 2", b"inline", b"other"]
        assert await harness.read() == await harness.read(cached=False) == wanted
        await under.roll_back(P)
        assert await harness.read() == await harness.read(cached=False) == wanted
        assert under.signs() == [None, -P, -P, Q]


async def test_pointer_state_of_a_topic_is_the_same_after_a_restart(store):
    async with actors(store()) as harness:
        await harness.create()
        under = Under(harness)
        await under.keep(P, b"s")
        answer = await under.publish(P, b"1")
        await under.keep(Q, b"t", segment="a")
        before = await under.views()
    async with actors(store()) as harness:
        under = Under(harness)
        assert await under.views() == before
        assert await under.publish(P) == answer
        await under.keep(Q, b"u", segment="b")
        await under.publish(Q, segments=["b"])
        assert await harness.read() == [b"s", b"1", b"u"]
        with pytest.raises(errors.AlreadyPublished):
            await under.keep(P, b"late")


@pytest.mark.parametrize("applied", [0, 1, True])
async def test_after_a_failed_commit_the_pointer_state_matches_the_disk(applied):
    async with actors() as harness:
        await harness.create()
        under = Under(harness)
        await under.publish(P, b"1")
        harness.store.fail_next("write", applied=applied)
        with pytest.raises(errors.OutcomeUnknown):
            await under.publish(P, b"2")
        (view,) = await under.views()
        there = await harness.read(cached=False)
        assert there in ([b"1"], [b"1", b"2"])
        assert view.messages == view.hidden == len(there)
        await under.roll_back(P)
        assert under.signs() == [-P] * len(there)


async def test_a_row_left_by_a_torn_commit_is_in_the_index_after_the_load():
    index = PointerIndex()
    async with actors(pointers=index) as harness:
        await harness.create()
        harness.store.fail_next("write", applied=1)
        with pytest.raises(errors.OutcomeUnknown):
            await Under(harness).publish(P, b"1")
        assert [view.pointer for view in await Under(harness).views()] == [P]
        assert index.topics_of([P]) == {NAME}


async def test_a_decision_waits_for_the_write_in_progress(nursery):
    index = PointerIndex()
    async with actors(pointers=index) as harness:
        await harness.create()
        harness.store.stall("write")
        nursery.start_soon(Under(harness).publish, P, b"1")
        await harness.store.stalled("write")
        assert index.busy([P])
        assert index.topics_of([P]) == {NAME}
        quiet = []

        async def decide():
            await index.quiet([P])
            quiet.append(Under(harness).signs())

        nursery.start_soon(decide)
        await wait_all_tasks_blocked()
        assert not quiet
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert quiet == [[P]]


async def test_a_failed_write_leaves_no_pointer_busy():
    index = PointerIndex()
    async with actors(pointers=index) as harness:
        await harness.create()
        harness.store.fail_next("write")
        with pytest.raises(errors.OutcomeUnknown):
            await Under(harness).publish(P, b"1")
        assert not index.busy([P])


async def test_a_durable_rollback_wakes_waiters_for_the_pointer(nursery):
    index = PointerIndex()
    async with actors(pointers=index) as harness:
        await harness.create()
        under = Under(harness)
        await under.publish(P, b"1")
        woken = []

        async def wait():
            await index.wait(P)
            woken.append(under.signs())

        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        harness.store.stall("write")
        nursery.start_soon(under.roll_back, P)
        await harness.store.stalled("write")
        await wait_all_tasks_blocked()
        assert not woken
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert woken == [[-P]]


async def test_the_row_of_a_decided_pointer_is_removed_with_the_next_commit_or_when_the_topic_is_closed(store):
    index, standings = PointerIndex(), Standings({P: "in_progress", Q: "in_progress"})
    async with actors(first := store(), pointers=index, authority=standings) as harness:
        await harness.create()
        under = Under(harness)
        await under.publish(P, b"1")
        await under.publish(Q, b"2")
        standings[P] = "committed"
        index.decided([P])
        assert [view.pointer for view in await under.views()] == [Q]
        assert under.pointer_rows() == [P, Q]
        await harness.publish("next")
        assert under.pointer_rows() == [Q]
        standings[Q] = "committed"
        index.decided([Q])
        assert first.calls["write"]
    async with actors(store(), pointers=PointerIndex(), authority=standings) as harness:
        under = Under(harness)
        assert await under.views() == []
        assert under.pointer_rows() == []
        assert await harness.read() == [b"1", b"2", b"next"]


async def test_decisions_made_while_a_topic_was_closed_are_applied_by_its_load(store):
    standings = Standings()
    async with actors(store(), authority=standings) as harness:
        await harness.create()
        await Under(harness).publish(P, b"1")
        await Under(harness).keep(Q, b"2")
    standings.update({P: "committed", Q: "aborted"})
    async with actors(store(), authority=standings) as harness:
        assert await Under(harness).views() == []
        with pytest.raises(errors.TransactionNotInProgress):
            await Under(harness).publish(P, b"3")
        await harness.publish("next")
        assert Under(harness).pointer_rows() == [Q]  # the messages stored under it must be removed first


async def test_a_deleted_topic_keeps_its_pointers_for_undelete(store):
    index = PointerIndex()
    async with actors(store(), pointers=index) as harness:
        await harness.create()
        await Under(harness).publish(P, b"1")
        await harness.ask(Remove())
        await harness.ask(RollBackPointer(P, by_client=False))
    async with actors(store()) as harness:
        await harness.ask(Undelete())
        (view,) = await Under(harness).views()
        assert (view.pointer, view.rolled_back) == (P, True)
        assert Under(harness).signs() == [-P]


async def test_a_damaged_pointer_row_is_kept_and_its_messages_can_still_be_rolled_back(store, caplog):
    async with actors(store()) as harness:
        await harness.create()
        await Under(harness).publish(P, b"1")
        await Under(harness).publish(Q, b"2")
    broken = store()
    damaged = put_one(Table.METADATA, pointer_key(NAME, 1, P), b"\x01garbled")
    await broken.inner.write([damaged], claim=await broken.inner.claim(NAME))
    async with actors(broken) as harness:
        under = Under(harness)
        assert await harness.read() == [b"1", b"2"]
        assert "pointer row unreadable" in caplog.text
        with pytest.raises(errors.StorageFailed):
            await under.publish(P, b"3")
        await under.roll_back(P)
        assert under.signs() == [-P, Q]
        assert isinstance(damaged, Put)
        assert harness.store.inner.tables[Table.METADATA].rows[damaged.prefix] == b"\x01garbled"


async def test_a_rolled_back_range_leaves_rows_of_other_pointers(nursery):
    async with actors() as harness:
        await harness.create()
        under = Under(harness)
        harness.store.stall("write")
        nursery.start_soon(harness.publish, "first")
        await harness.store.stalled("write")
        for pointer, message in ((P, b"1"), (Q, b"2"), (P, b"3")):
            nursery.start_soon(under.publish, pointer, message)
            await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        await under.roll_back(P, (bytes(10), pack_position(2**62, 0)))
        assert under.signs() == [None, -P, Q, -P]
        assert (await under.publish(P, b"4")).write_pointer == P
        assert [(view.pointer, view.hidden) for view in await under.views()] == [(Q, 3), (P, 1)]


async def test_commits_count_all_published_messages_including_stored_ones():
    async with actors() as harness:
        await harness.create()
        await Under(harness).keep(P, *[b"s"] * 7)
        assert harness.watch.count["messages"] == 0
        await Under(harness).publish(P, b"1")
        assert (harness.watch.count["messages"], harness.watch.count["requests"]) == (8, 1)


async def test_plain_requests_are_served_whatever_the_authority_does():
    class Broken:
        def standing(self, pointer):
            raise errors.TransactionsUnavailable("down")

    async with actors(authority=Broken()) as harness:
        await harness.create()
        await harness.publish("plain")
        assert await harness.read() == [b"plain"]
        with pytest.raises(errors.TransactionsUnavailable):
            await Under(harness).publish(P, b"1")
        await harness.publish("more")
        assert await harness.read() == [b"plain", b"more"]

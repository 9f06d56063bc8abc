"""Real actors of two instances on one HBase: a topic moves from one to the other during a request."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError, Unavailable
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import INDEX, decode_row
from plainsong.protocol.topic.asks import Publish, PublishStaged, PublishUnder, StoreStaged, StoreUnder
from tests.actors.actors_in_process import NAME, START_MS, SetClock, actors
from tests.hbase.held_calls import Held, puts_to
from tests.storage.faulty import FaultyStore

POINTER = START_MS * 1_000_000


@asynccontextmanager
async def instances(store, others, behind_ms=0):
    """Three instances; the second one's clock is behind by ``behind_ms``."""
    clock = SetClock()
    clock.ms -= behind_ms
    async with (
        actors(FaultyStore(store)) as first,
        actors(FaultyStore(others[0]), clock=clock) as second,
        actors(FaultyStore(others[1])) as third,
    ):
        yield first, second, third


async def unanswered(call):
    """Expect the call to fail: its topic has moved."""
    with pytest.raises(PlainsongError):
        await call()


async def certainly(call):
    """Retry at once until there is an answer: an instance that has lost the topic claims it back."""
    for _ in range(20):
        try:
            return await call()
        except Unavailable:
            continue
    raise AssertionError("no answer")


async def said_twice(first, second, ask, where):
    """Send ``ask`` to the first instance, and hold it there while the second one serves it."""
    held = Held(first.store.inner, puts_to(where))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(unanswered, lambda: ask(first))
        await held.arrived()
        await certainly(lambda: ask(second))
        held.release()


async def test_each_row_of_a_request_has_its_index_since_an_owner_of_version_0_1_counts_no_others(store, others):
    async with instances(store, others) as (first, _, _):
        await first.create()
        await first.publish("a", "b", "c", producer="p", sequence_ids=[0, 1, 2])
        await first.ask(Publish(PublishRequest([b"d", b"e"], atomic=True), 1))
        prefix, rows = generation_prefix(NAME, 1), []
        await store.scan(Table.MESSAGE, prefix, stop_after(prefix), lambda some: rows.extend(some) or True)
        assert [decode_row(value).extras.get(INDEX) for _, value in rows] == [None, 1, 2, None, 1]


@pytest.mark.parametrize("behind_ms", [0, 7])
@pytest.mark.parametrize("where", ["messages", "heads"])
async def test_a_publish_served_by_two_instances_is_stored_once_and_known_to_a_third(store, others, where, behind_ms):
    async def say(harness, number):
        return await harness.publish(f"m{number}", producer="p", sequence_ids=[number])

    async with instances(store, others, behind_ms) as (first, second, third):
        await first.create()
        await say(first, 0)
        await said_twice(first, second, lambda harness: say(harness, 1), where)
        await certainly(lambda: say(second, 2))
        for harness in (second, third):
            receipt = await certainly(lambda: say(harness, 1))  # noqa: B023
            assert receipt.duplicate
            assert await certainly(lambda: harness.read(cached=False)) == [b"m0", b"m1", b"m2"]  # noqa: B023


@pytest.mark.parametrize("behind_ms", [0, 7])
@pytest.mark.parametrize("where", ["payloads", "metadata", "heads"])
async def test_messages_staged_twice_on_two_instances_are_published_once(store, others, where, behind_ms):
    async def stage(harness, number):
        request = PublishRequest([b"m%d" % number], producer="p", segment="s", sequence_ids=[number])
        await harness.ask(StoreStaged(request, 2))

    async with instances(store, others, behind_ms) as (first, second, third):
        await first.create()
        await stage(first, 0)
        await said_twice(first, second, lambda harness: stage(harness, 1), where)
        await certainly(lambda: stage(second, 2))
        batch = PublishStaged(PublishRequest([], producer="p", sequence_ids=[0], segments=["s"]), 0)
        await certainly(lambda: second.ask(batch))
        for harness in (second, third):
            assert await certainly(lambda: harness.read(cached=False)) == [b"m0", b"m1", b"m2"]  # noqa: B023


@pytest.mark.parametrize("where", ["payloads", "metadata", "heads"])
async def test_messages_stored_twice_under_a_write_pointer_are_published_once(store, others, where):
    """Without ids the second store cannot be recognized as a duplicate; the first never took effect."""

    async def keep(harness, payload):
        await harness.ask(StoreUnder(PublishRequest([payload], POINTER), len(payload)))

    async with instances(store, others, behind_ms=7) as (first, second, third):
        await first.create()
        await said_twice(first, second, lambda harness: keep(harness, b"stored"), where)
        await certainly(lambda: keep(second, b"more"))
        await certainly(lambda: second.ask(PublishUnder(PublishRequest([b"published"], POINTER), 9)))
        for harness in (second, third):
            assert await certainly(lambda: harness.read(cached=False)) == [b"stored", b"more", b"published"]  # noqa: B023

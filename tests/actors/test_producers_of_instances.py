"""Producers whose topic changes hands: a retry is stored once, and no owner that was replaced says how far one came."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import NAME
from owners_in_process import instances, say
from trio.testing import wait_all_tasks_blocked

from actors.janitor import JanitorSettings
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, ProducerFenced
from plainsong.protocol.keys import PRODUCER, system_key
from plainsong.protocol.topic.asks import GetProducer, OpenProducer, RemoveProducer
from plainsong.protocol.topic.state import TopicLimits

#: All that is known of producers is written with every commit.
EAGER = TopicLimits(snapshot_entries=1)


def send(world, *ids, producer="p", **more):
    payloads = [f"{producer}{each}" for each in ids]
    return world.publish(*payloads, producer=producer, sequence_ids=list(ids), **more)


def snapshots(world):
    """The rows that say how far each producer came."""
    start = system_key(PRODUCER, NAME, 1)
    rows = world.store._shared.memory.tables[Table.METADATA].rows
    return {key: value for key, value in rows.items() if key.startswith(start)}


async def replaced(call, *args):
    """What an owner that was replaced says: that it is not the one, or that nobody knows."""
    with pytest.raises((NoOwner, OutcomeUnknown)) as caught:
        await call(*args)
    return caught.value


async def test_a_retry_at_the_next_owner_is_a_duplicate():
    async with instances("a", "b") as worlds:
        await worlds["a"].create()
        first = await send(worlds["a"], 1, 2)
        say(worlds, "b")
        again = await send(worlds["b"], 1, 2)
        assert again.duplicate
        assert again.last_id == first.last_id
        assert not (await send(worlds["b"], 3)).duplicate
        assert await worlds["b"].read() == [b"p1", b"p2", b"p3"]


async def test_a_retry_at_an_owner_that_came_after_a_snapshot_is_a_duplicate_too():
    async with instances("a", "b", limits=EAGER) as worlds:
        await worlds["a"].create()
        await send(worlds["a"], 1)
        await send(worlds["a"], 2)
        assert snapshots(worlds["a"])
        say(worlds, "b")
        assert (await send(worlds["b"], 2)).duplicate
        assert (await worlds["b"].ask(GetProducer("p"))).last_sequence_id == 2


@pytest.mark.parametrize("ask", [GetProducer("p"), OpenProducer("p")], ids=["get", "open"])
async def test_how_far_a_producer_came_is_said_by_an_owner_that_is_the_one(ask):
    async with instances("a", "b") as worlds:
        await worlds["a"].create()
        await send(worlds["a"], 1)
        say({"b": worlds["b"]}, "b")
        await send(worlds["b"], 2)
        # a was frozen, say: it has not heard of b, and its topic is still open.
        assert worlds["a"].core().state.producers is not None
        await replaced(worlds["a"].ask, ask)
        say({"a": worlds["a"]}, "b")
        assert (await worlds["b"].ask(GetProducer("p"))).last_sequence_id == 2


async def test_the_late_snapshot_of_an_owner_that_was_replaced_replaces_no_newer_one():
    async with instances("a", "b", limits=EAGER) as worlds:
        await worlds["a"].create()
        await send(worlds["a"], 1)
        store = worlds["a"].store
        store.reachable = type(store.reachable)()
        errors = []

        async def late():
            try:
                await send(worlds["a"], 2)
            except PlainsongError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(late)
            await wait_all_tasks_blocked()
            say({"b": worlds["b"]}, "b")
            await send(worlds["b"], 2)
            await send(worlds["b"], 3)
            newer = snapshots(worlds["b"])
            store.reachable.set()
        assert len(errors) == 1
        assert snapshots(worlds["b"]) == newer
        say({"a": worlds["a"]}, "b")
        assert (await worlds["b"].ask(GetProducer("p"))).last_sequence_id == 3
        assert await worlds["b"].read() == [b"p1", b"p2", b"p3"]


async def test_an_owner_that_lets_a_replaced_topic_go_leaves_what_the_next_one_wrote():
    async with instances("a", "b", limits=EAGER) as worlds:
        await worlds["a"].create()
        await send(worlds["a"], 1)
        say({"b": worlds["b"]}, "b")
        await send(worlds["b"], 2)
        newer = snapshots(worlds["b"])
        say({"a": worlds["a"]}, "b")  # it writes its mark and its snapshot as it leaves, which nobody takes
        await wait_all_tasks_blocked()
        assert worlds["a"].entry() is None
        assert snapshots(worlds["b"]) == newer


async def test_a_session_opened_at_the_next_owner_fences_those_that_were_opened_before():
    async with instances("a", "b") as worlds:
        await worlds["a"].create()
        epoch = (await worlds["a"].ask(OpenProducer("p"))).epoch
        say(worlds, "b")
        assert (await worlds["b"].ask(OpenProducer("p"))).epoch == epoch + 1
        with pytest.raises(ProducerFenced):
            await send(worlds["b"], 1, producer_epoch=epoch)


async def test_a_producer_that_was_removed_is_gone_for_the_next_owner():
    async with instances("a", "b") as worlds:
        await worlds["a"].create()
        await send(worlds["a"], 1)
        await worlds["a"].ask(RemoveProducer("p"))
        say(worlds, "b")
        assert not (await send(worlds["b"], 1)).duplicate


async def test_what_is_cleaned_away_is_in_a_snapshot_before():
    """The next owner has no message to read it from: a retry is a duplicate all the same."""
    async with instances("a", "b", janitor=JanitorSettings()) as worlds:
        await worlds["a"].create(ttl_s=10)
        await send(worlds["a"], 1)
        worlds["a"].clock.ms += 11_000
        worlds["b"].clock.ms += 11_000
        await worlds["a"].janitor.clean_all()
        assert worlds["a"].store._shared.memory.tables[Table.MESSAGE].rows == {}
        assert snapshots(worlds["a"])
        say(worlds, "b")
        assert (await send(worlds["b"], 1)).duplicate

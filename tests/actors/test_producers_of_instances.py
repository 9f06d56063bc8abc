"""Producers whose topic changes hands: a retry is stored once, and a replaced owner reports no producer's progress."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import NAME
from owners_in_process import instances, say
from trio.testing import wait_all_tasks_blocked

from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, ProducerFenced
from plainsong.protocol.keys import PRODUCER, system_key
from plainsong.protocol.topic.asks import GetProducer, OpenProducer, RemoveProducer
from plainsong.protocol.topic.state import TopicLimits

#: Write all state of producers with every commit.
EAGER = TopicLimits(snapshot_entries=1)


def send(harness, *ids, producer="p", **more):
    payloads = [f"{producer}{each}" for each in ids]
    return harness.publish(*payloads, producer=producer, sequence_ids=list(ids), **more)


def snapshots(harness):
    """Return the rows with each producer's progress."""
    start = system_key(PRODUCER, NAME, 1)
    rows = harness.store._shared.memory.tables[Table.METADATA].rows
    return {key: value for key, value in rows.items() if key.startswith(start)}


async def replaced(call, *args):
    """Return a replaced owner's error: it is not the owner, or the outcome is unknown."""
    with pytest.raises((NoOwner, OutcomeUnknown)) as caught:
        await call(*args)
    return caught.value


async def test_a_retry_at_the_next_owner_is_a_duplicate():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        first = await send(harnesses["a"], 1, 2)
        say(harnesses, "b")
        again = await send(harnesses["b"], 1, 2)
        assert again.duplicate
        assert again.last_id == first.last_id
        assert not (await send(harnesses["b"], 3)).duplicate
        assert await harnesses["b"].read() == [b"p1", b"p2", b"p3"]


async def test_a_retry_at_an_owner_that_loaded_a_snapshot_is_a_duplicate_too():
    async with instances("a", "b", limits=EAGER) as harnesses:
        await harnesses["a"].create()
        await send(harnesses["a"], 1)
        await send(harnesses["a"], 2)
        assert snapshots(harnesses["a"])
        say(harnesses, "b")
        assert (await send(harnesses["b"], 2)).duplicate
        assert (await harnesses["b"].ask(GetProducer("p"))).last_sequence_id == 2


@pytest.mark.parametrize("ask", [GetProducer("p"), OpenProducer("p")], ids=["get", "open"])
async def test_only_the_current_owner_reports_a_producers_progress(ask):
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        await send(harnesses["a"], 1)
        say({"b": harnesses["b"]}, "b")
        await send(harnesses["b"], 2)
        # a was frozen, for instance: it does not know of b, and its topic is still open.
        assert harnesses["a"].core().state.producers is not None
        await replaced(harnesses["a"].ask, ask)
        say({"a": harnesses["a"]}, "b")
        assert (await harnesses["b"].ask(GetProducer("p"))).last_sequence_id == 2


async def test_the_late_snapshot_of_an_owner_that_was_replaced_replaces_no_newer_one():
    async with instances("a", "b", limits=EAGER) as harnesses:
        await harnesses["a"].create()
        await send(harnesses["a"], 1)
        store = harnesses["a"].store
        store.reachable = type(store.reachable)()
        errors = []

        async def late():
            try:
                await send(harnesses["a"], 2)
            except PlainsongError as error:
                errors.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(late)
            await wait_all_tasks_blocked()
            say({"b": harnesses["b"]}, "b")
            await send(harnesses["b"], 2)
            await send(harnesses["b"], 3)
            newer = snapshots(harnesses["b"])
            store.reachable.set()
        assert len(errors) == 1
        assert snapshots(harnesses["b"]) == newer
        say({"a": harnesses["a"]}, "b")
        assert (await harnesses["b"].ask(GetProducer("p"))).last_sequence_id == 3
        assert await harnesses["b"].read() == [b"p1", b"p2", b"p3"]


async def test_a_replaced_owner_that_releases_a_topic_leaves_the_rows_of_the_next_one():
    async with instances("a", "b", limits=EAGER) as harnesses:
        await harnesses["a"].create()
        await send(harnesses["a"], 1)
        say({"b": harnesses["b"]}, "b")
        await send(harnesses["b"], 2)
        newer = snapshots(harnesses["b"])
        say({"a": harnesses["a"]}, "b")  # as it leaves it writes mark and snapshot, which the store rejects
        await wait_all_tasks_blocked()
        assert harnesses["a"].entry() is None
        assert snapshots(harnesses["b"]) == newer


async def test_a_session_opened_at_the_next_owner_fences_those_that_were_opened_before():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        epoch = (await harnesses["a"].ask(OpenProducer("p"))).epoch
        say(harnesses, "b")
        assert (await harnesses["b"].ask(OpenProducer("p"))).epoch == epoch + 1
        with pytest.raises(ProducerFenced):
            await send(harnesses["b"], 1, producer_epoch=epoch)


async def test_a_removed_producer_is_absent_at_the_next_owner():
    async with instances("a", "b") as harnesses:
        await harnesses["a"].create()
        await send(harnesses["a"], 1)
        await harnesses["a"].ask(RemoveProducer("p"))
        say(harnesses, "b")
        assert not (await send(harnesses["b"], 1)).duplicate


async def test_a_snapshot_covers_messages_before_they_are_cleaned():
    """The next owner cannot derive it from a message, but still detects a retry as a duplicate."""
    async with instances("a", "b", janitor=RetentionConfig()) as harnesses:
        await harnesses["a"].create(ttl_s=10)
        await send(harnesses["a"], 1)
        harnesses["a"].clock.ms += 11_000
        harnesses["b"].clock.ms += 11_000
        await harnesses["a"].janitor.clean_all()
        assert harnesses["a"].store._shared.memory.tables[Table.MESSAGE].rows == {}
        assert snapshots(harnesses["a"])
        say(harnesses, "b")
        assert (await send(harnesses["b"], 1)).duplicate

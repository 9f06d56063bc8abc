"""Actors and producers: one outcome for all waiting requests, retries stored once, namespace policies, generations."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import NAME, actors
from trio.testing import wait_all_tasks_blocked

from actors.namespaces import Namespaces
from actors.reading import producer_of
from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import (
    GenerationChanged,
    InvalidProperty,
    OutcomeUnknown,
    PlainsongError,
    ProducerExpired,
    ProducerNotFound,
    Recovering,
    StorageFailed,
)
from plainsong.protocol.keys import PRODUCER, PRODUCERS, DamagedRow, namespace_key, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.topic.asks import Create, GetProducer, ListProducers, OpenProducer, Remove, RemoveProducer
from plainsong.protocol.topic.producer_state import NamespacePolicy
from plainsong.protocol.topic.state import TopicLimits
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore


def send(harness, ids, producer="p", **more):
    return harness.publish(*(f"{producer}{each}" for each in ids), producer=producer, sequence_ids=ids, **more)


async def outcomes(calls):
    """Make all calls at once; return each one's answer or error."""
    found = [None] * len(calls)

    async def run(index, call):
        try:
            found[index] = await call()
        except PlainsongError as error:
            found[index] = error

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(run, index, call)
            await wait_all_tasks_blocked()
    return found


@pytest.mark.parametrize("applied", [False, True, 3])
async def test_e18_requests_of_one_failed_commit_share_its_outcome_and_are_stored_once_when_sent_again(applied):
    async with actors() as harness:
        await harness.create()
        await send(harness, [0])
        harness.store.stall("write")
        harness.store.fail_next("write", applied=applied, after=1)

        async def release():
            await harness.store.stalled("write")
            await wait_all_tasks_blocked()
            harness.store.release("write")

        calls = [lambda each=each: send(harness, [each]) for each in range(1, 11)]
        first, *rest, _ = await outcomes([*calls, release])
        assert first.duplicate is False
        assert {type(each) for each in rest} == {OutcomeUnknown}
        for each in range(1, 11):
            assert (await send(harness, [each])).last_sequence_id >= each
        assert await harness.read() == [b"p%d" % each for each in range(11)]


async def test_e13_a_request_sent_twice_while_the_store_is_slow_is_one_commit_with_equal_answers():
    async with actors() as harness:
        await harness.create()
        harness.store.stall("write")

        async def release():
            await harness.store.stalled("write")
            harness.store.release("write")

        one, other, _ = await outcomes([lambda: send(harness, [0, 1]), lambda: send(harness, [0, 1]), release])
        assert [one.duplicate, other.duplicate] == [False, True]
        assert (one.first_id, one.last_id) == (other.first_id, other.last_id)
        assert await harness.read() == [b"p0", b"p1"]


async def test_e20_the_last_id_is_not_reported_before_it_is_durable():
    async with actors() as harness:
        await harness.create()
        await send(harness, [0])
        harness.store.stall("write")
        harness.store.fail_next("write")

        async def release():
            await harness.store.stalled("write")
            await wait_all_tasks_blocked()
            assert harness.directory.peek(NAME).producers.known["p"].persisted == 0
            harness.store.release("write")

        lost, told, _ = await outcomes([lambda: send(harness, [1]), lambda: harness.ask(GetProducer("p")), release])
        assert type(lost) is OutcomeUnknown
        assert told.last_sequence_id == 0


async def test_a_failed_opening_may_be_repeated():
    async with actors() as harness:
        await harness.create()
        await harness.ask(OpenProducer("p"))
        harness.store.fail_next("write", applied=True)
        with pytest.raises(OutcomeUnknown):
            await harness.ask(OpenProducer("p"))
        assert (await harness.ask(OpenProducer("p"))).epoch == 3


async def test_e26_a_failed_snapshot_is_written_by_the_next_commit():
    async with actors(limits=TopicLimits(snapshot_entries=2)) as harness:
        await harness.create()
        await send(harness, [0])
        harness.store.fail_next("write")
        with pytest.raises(OutcomeUnknown):
            await send(harness, [1])
        await send(harness, [1])
        assert (await harness.ask(ListProducers())).snapshot.entries_since == 0


async def test_e28_e29_a_topic_that_cannot_be_loaded_accepts_nothing_and_then_recovers():
    async with actors() as harness:
        await harness.create()
        await send(harness, [0])
        for _ in range(3):
            harness.store.fail_next("get")
        harness.store.fail_next("write")
        with pytest.raises(OutcomeUnknown):
            await send(harness, [1])
        with pytest.raises((StorageFailed, Recovering)):
            await send(harness, [1])
        while True:
            try:
                receipt = await send(harness, [0, 1])
                break
            except (StorageFailed, Recovering):
                await trio.sleep(0.01)
        assert receipt.dropped == [0]
        assert await harness.read() == [b"p0", b"p1"]


async def test_an_unreadable_producer_row_blocks_only_that_producer_until_it_is_deleted():
    store = FaultyStore(MemoryStore())
    async with actors(store) as harness:
        await harness.create()
        await harness.ask(OpenProducer("p"))
        await send(harness, [0], "q")
    store = FaultyStore(store.inner)
    claim = await store.claim(NAME)
    await store.write([put_one(Table.METADATA, system_key(PRODUCER, NAME, 1, b"p"), b"\x09")], claim=claim)
    async with actors(store) as harness:
        with pytest.raises(DamagedRow) as told:
            await send(harness, [0])
        assert "delete" in told.value.hint
        assert (await send(harness, [0], "q")).duplicate
        assert [each.damaged for each in (await harness.ask(ListProducers())).producers] == [True, False]
        await harness.ask(RemoveProducer("p"))
        assert (await send(harness, [0])).duplicate is False


async def test_nothing_is_accepted_unchecked_while_the_row_about_all_producers_is_unreadable():
    store = FaultyStore(MemoryStore())
    async with actors(store) as harness:
        await harness.create()
        await send(harness, [0])
    store = FaultyStore(store.inner)
    claim = await store.claim(NAME)
    await store.write([put_one(Table.METADATA, system_key(PRODUCERS, NAME, 1), b"\x09")], claim=claim)
    async with actors(store) as harness:
        with pytest.raises(StorageFailed):
            await send(harness, [0])


async def test_e58_a_removed_generation_answers_for_its_producers_during_the_grace_period():
    async with actors(janitor=RetentionConfig(delete_grace_s=10)) as harness:
        await harness.create()
        await send(harness, [0, 1])
        await harness.ask(Remove())
        known = await producer_of(harness.directory, harness.store, NAME, "p", 1)
        assert known.last_sequence_id == 1
        await harness.ask(Create(TopicProperties()))
        await harness.janitor.clean_all()
        assert (await producer_of(harness.directory, harness.store, NAME, "p", 1)).recent == known.recent
        with pytest.raises(ProducerNotFound):
            await producer_of(harness.directory, harness.store, NAME, "other", 1)
        with pytest.raises(GenerationChanged):
            await producer_of(harness.directory, harness.store, NAME, "p", 3)
        harness.clock.ms += 10_001
        await harness.janitor.clean_all()
        with pytest.raises(ProducerExpired):
            await producer_of(harness.directory, harness.store, NAME, "p", 1)


# --- namespaces -----------------------------------------------------------------------------------


async def test_properties_of_a_namespace_are_durable_and_in_force_at_once():
    store = FaultyStore(MemoryStore())
    namespaces = Namespaces(store)
    async with actors(store, policies=namespaces.policies) as harness:
        await harness.create()
        await send(harness, [0])
        assert await namespaces.put("ns", {"deduplication": "disabled"}) == {"deduplication": "disabled"}
        assert (await send(harness, [0])).deduplicated is False
        again = Namespaces(store)
        await again.load()
        assert again.policy("ns") == namespaces.policy("ns") == NamespacePolicy(enabled=False, switched=1)
        await namespaces.put("ns", None)
        assert namespaces.policy("ns") == NamespacePolicy(enabled=None, switched=1)
        assert (await send(harness, [0])).deduplicated


async def test_properties_that_were_not_written_are_not_in_force():
    store = FaultyStore(MemoryStore())
    namespaces = Namespaces(store)
    store.fail_next("write")
    with pytest.raises(StorageFailed):
        await namespaces.put("ns", {"deduplication": "enabled"})
    assert namespaces.policy("ns") == NamespacePolicy()
    await namespaces.put("ns", {"deduplication": "enabled"})
    assert namespaces.properties("ns") == {"deduplication": "enabled"}


@pytest.mark.parametrize("given", [[], {"dedupe": "enabled"}, {"deduplication": "on"}, {"deduplication": None}])
async def test_other_properties_are_refused(given):
    with pytest.raises(InvalidProperty):
        await Namespaces(MemoryStore()).put("ns", given)


async def test_an_unreadable_row_of_a_namespace_has_no_effect():
    store = MemoryStore()
    claim = await store.claim(NAME)
    await store.write([put_one(Table.METADATA, namespace_key("ns"), b"\x09")], claim=claim)
    namespaces = Namespaces(store)
    await namespaces.load()
    assert namespaces.policy("ns") == NamespacePolicy()


async def test_namespaces_have_a_live_topic_or_properties():
    async with actors() as harness:
        for name in ("b", "a1", "a", "gone"):
            await harness.create(TopicName(name, "t"))
        await harness.ask(Remove(), TopicName("gone", "t"))
        namespaces = Namespaces(harness.store)
        await namespaces.put("only_properties", {"deduplication": "enabled"})
        assert await namespaces.names() == ["a", "a1", "b", "only_properties"]

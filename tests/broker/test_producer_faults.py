"""Producers over HTTP when something fails: failing and stalling stores, concurrent duplicates, bounds, damage."""

from __future__ import annotations

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process
from test_committed_polls import begin

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import PRODUCER, system_key
from plainsong.protocol.names import TopicName
from tests.patience import PATIENCE_S

PRODUCERS = f"{TOPICS}/t/producers"
PUBLISH = f"{TOPICS}/t/publish"
NAME = TopicName("ns", "t")


async def send(daemon, ids, *, producer="p", status=200, code=None, **more):
    """Publish one message for each id."""
    body = {"messages": [f"m{number}" for number in ids], "producer": producer, "sequenceIds": list(ids), **more}
    return await daemon.call("POST", PUBLISH, json=body, status=status, code=code)


async def payloads(daemon):
    return [message["payload"] for message in await daemon.poll()]


async def until_asked(daemon, asks):
    """Wait until ``asks`` requests are in the topic's mailbox."""
    entry = daemon.service.directory.entry(NAME)
    with trio.fail_after(PATIENCE_S):
        while len(entry.mailbox) < asks:
            await trio.lowlevel.checkpoint()


def event(daemon, word):
    registry = daemon.service.metrics.registry
    return registry.get_sample_value("plainsong_producer_events_total", {"event": word}) or 0


# --- concurrent duplicates ---------------------------------------------------------------------------


@pytest.mark.parametrize("in_transaction", [False, True])
async def test_copies_that_arrive_while_the_first_is_written_get_its_answer(daemon, in_transaction):
    await daemon.create()
    more = {"transactionWritePointer": (await begin(daemon))["writePointer"]} if in_transaction else {}
    answers = []

    async def one():
        answers.append((await send(daemon, [0, 1], **more)).json())

    daemon.store.stall("write")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one)
        await daemon.store.stalled("write")
        for _ in range(4):
            nursery.start_soon(one)
        await until_asked(daemon, 1)
        assert answers == []
        daemon.store.release("write")
    assert sorted(answer.pop("duplicate") for answer in answers) == [False, True, True, True, True]
    assert all(answer == answers[0] for answer in answers)
    assert await payloads(daemon) == ["m0", "m1"]


async def test_the_last_sequence_id_is_reported_only_when_it_is_durable(daemon):
    await daemon.create()
    await send(daemon, [0])
    told = []

    async def look():
        told.append((await daemon.call("GET", f"{PRODUCERS}/p")).json()["lastSequenceId"])

    daemon.store.stall("write")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, daemon, [1])
        await daemon.store.stalled("write")
        nursery.start_soon(look)
        await until_asked(daemon, 1)
        assert told == []
        daemon.store.release("write")
    assert told == [1]


async def test_a_session_opened_while_an_older_publish_is_written_reports_its_outcome(daemon):
    await daemon.create()
    old = (await daemon.call("PUT", f"{PRODUCERS}/p")).json()
    sessions = []

    async def open_again():
        sessions.append((await daemon.call("PUT", f"{PRODUCERS}/p")).json())

    daemon.store.stall("write")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: send(daemon, [0], producerEpoch=old["epoch"]))
        await daemon.store.stalled("write")
        nursery.start_soon(open_again)
        await until_asked(daemon, 1)
        daemon.store.release("write")
    assert sessions[0]["lastSequenceId"] == 0
    await send(daemon, [1], producerEpoch=old["epoch"], status=409, code="producer_fenced")


# --- a store that fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [0, 1, 2, 3, 100])
async def test_a_retry_after_a_failed_write_completes_it_and_stores_nothing_twice(daemon, applied):
    await daemon.create()
    await send(daemon, [0])
    daemon.store.fail_next("write", applied=applied)
    await send(daemon, [1, 2], status=503, code="outcome_unknown")
    again = await send(daemon, [1, 2])
    assert again.json()["lastSequenceId"] == 2
    assert await payloads(daemon) == ["m0", "m1", "m2"]


@pytest.mark.parametrize("applied", [0, 1, 2, 3, 100])
async def test_an_atomic_batch_whose_write_failed_is_whole_or_absent(daemon, applied):
    await daemon.create()
    await send(daemon, [0])
    daemon.store.fail_next("write", applied=applied)
    await send(daemon, [1, 2, 3], status=503, code="outcome_unknown", atomic=True)
    assert await payloads(daemon) in (["m0"], ["m0", "m1", "m2", "m3"])
    await send(daemon, [1, 2, 3], atomic=True)
    assert await payloads(daemon) == ["m0", "m1", "m2", "m3"]


async def test_a_refused_request_leaves_others_of_its_group_alone(daemon):
    await daemon.create()
    await send(daemon, [5], producer="b")
    daemon.store.stall("write")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(send, daemon, [0])
        await daemon.store.stalled("write")
        nursery.start_soon(lambda: send(daemon, [0], producer="a"))
        refused = {"producer": "b", "atomic": True, "status": 409, "code": "partial_duplicate"}
        nursery.start_soon(lambda: send(daemon, [5, 6], **refused))
        nursery.start_soon(lambda: send(daemon, [0], producer="c"))
        await until_asked(daemon, 3)
        daemon.store.release("write")
    assert len(await payloads(daemon)) == 4


# --- bounds and memory -------------------------------------------------------------------------------


async def test_the_longest_idle_producer_makes_room_for_a_new_one():
    async with in_process(deduplication__max_producers=3) as daemon:
        await daemon.create()
        for number, name in enumerate("abc"):
            daemon.clock.ms = START_MS + number
            await send(daemon, [0], producer=name)
        daemon.clock.ms = START_MS + 3_600_000
        await send(daemon, [1], producer="a")
        await send(daemon, [0], producer="d")
        names = [each["producer"] for each in (await daemon.call("GET", PRODUCERS)).json()["producers"]]
        assert "b" not in names
        assert {"a", "d"} < {*names, "c"}
        assert event(daemon, "evicted") == 1
        assert (await send(daemon, [1], producer="a")).json()["duplicate"]


async def test_producers_evicted_by_their_number_are_counted():
    async with in_process(deduplication__max_producers=1) as daemon:
        await daemon.create()
        await send(daemon, [0], producer="a")
        await send(daemon, [0], producer="b", status=503, code="too_many_producers")
        assert event(daemon, "too_many_producers") == 1
        await daemon.call("PUT", f"{PRODUCERS}/b", status=503, code="too_many_producers")
        assert event(daemon, "too_many_producers") == 2


async def test_an_atomic_request_has_one_routing_key(daemon):
    await daemon.create()
    keys = [{"routingKey": "a"}, {"routingKey": "b"}]
    two = {"messages": ["m", "n"], "atomic": True}
    refused = {"status": 400, "code": "invalid_parameter"}
    await daemon.call("POST", PUBLISH, json={**two, "attributes": keys}, **refused)
    await send(daemon, [0, 1], atomic=True, attributes=keys, **refused)
    pointer = (await begin(daemon))["writePointer"]
    await send(daemon, [0, 1], atomic=True, attributes=keys, transactionWritePointer=pointer, **refused)
    assert await payloads(daemon) == []
    await send(daemon, [0, 1], atomic=True, attributes=[keys[0], {"routingKey": "a"}])
    await send(daemon, [2, 3], attributes=keys)
    assert await payloads(daemon) == ["m0", "m1", "m2", "m3"]


async def test_long_retentions_are_bounded():
    async with in_process(deduplication__max_long_producers=1) as daemon:
        await daemon.create()
        month = {"retentionSeconds": 30 * 86_400}
        await daemon.call("PUT", f"{PRODUCERS}/a", json=month)
        await daemon.call("PUT", f"{PRODUCERS}/a", json=month)
        await daemon.call("PUT", f"{PRODUCERS}/b", status=503, code="too_many_producers", json=month)
        await daemon.call("PUT", f"{PRODUCERS}/b")


async def test_when_deduplication_is_off_many_producers_leave_no_trace():
    async with in_process(deduplication__default=False, deduplication__max_producers=10) as daemon:
        await daemon.create()
        for number in range(50):
            await send(daemon, [0], producer=f"p{number}")
        assert (await daemon.call("GET", PRODUCERS)).json()["count"] == 0
        assert not [key for key in daemon.store.inner.tables[Table.METADATA].rows if key.startswith(b"\x00" + PRODUCER)]


async def test_a_producer_forgotten_for_idleness_stays_so_after_a_restart(daemon):
    await daemon.create()
    await send(daemon, [0])
    daemon.clock.ms += daemon.service.config.deduplication.producer_retention_s * 1000 + 1
    await daemon.call("GET", f"{PRODUCERS}/p", status=404, code="producer_not_found")
    assert event(daemon, "expired") == 1
    async with in_process(store=daemon.store) as again:
        await again.call("GET", f"{PRODUCERS}/p", status=404, code="producer_not_found")


async def test_a_damaged_row_blocks_only_its_own_producer_until_it_is_deleted(daemon):
    await daemon.create()
    for name in ("p", "q"):
        await daemon.call("PUT", f"{PRODUCERS}/{name}")
    daemon.store.inner.apply([put_one(Table.METADATA, system_key(PRODUCER, NAME, 1, b"p"), b"\xff?")])
    async with in_process(store=daemon.store) as again:
        refused = await send(again, [0], status=503, code="storage_failed")
        assert "delete" in refused.json()["hint"]
        await send(again, [0], producer="q")
        listed = (await again.call("GET", PRODUCERS)).json()["producers"]
        assert [(each["producer"], each["damaged"]) for each in listed] == [("p", True), ("q", False)]
        await again.call("DELETE", f"{PRODUCERS}/p")
        await send(again, [0])

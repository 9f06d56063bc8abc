"""Server-sent events through an instance that does not own their topic, and while the topic changes owners."""

from __future__ import annotations

import pytest

from tests.broker.cluster.in_process import TOPICS, cluster
from tests.broker.event_source import event_source, take
from tests.waiting import until

EVENTS = f"{TOPICS}/t/events"


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c", transactions__service="embedded") as running:
        running.move("ns:t", "b")
        await running["b"].create()
        yield running


def following(node, query="", **headers):
    return event_source(f"http://{node.address}", EVENTS + query, **headers)


def payloads(found):
    return [event.value["payload"] for event in found]


async def test_events_arrive_through_any_instance(nodes):
    async with following(nodes["a"]) as source:
        await until(lambda: nodes["b"].parked("ns:t"))
        for number in range(3):
            await nodes["c"].publish("t", str(number))
            assert payloads(await take(source, 1)) == [str(number)]
    await until(lambda: not nodes["b"].parked("ns:t"))
    await until(lambda: not any(node.service.answers.reserved_bytes for node in nodes.values()))


async def test_the_owner_checks_where_a_stream_begins(nodes):
    _, last = await nodes["b"].publish("t", "one", "two")
    refused = {"status": 400, "code": "invalid_message_id"}
    await nodes["a"].call("GET", EVENTS, headers={"Last-Event-ID": "x"}, **refused)
    await nodes["b"].publish("t", "three")
    async with following(nodes["a"], **{"Last-Event-ID": last}) as source:
        assert payloads(await take(source, 1)) == ["three"]


async def test_the_transaction_that_holds_a_committed_stream_is_reported_through_any_instance(nodes):
    begun = (await nodes["c"].call("POST", "/v1/transactions")).json()
    async with following(nodes["a"], "?isolation=committed") as source:
        await until(lambda: nodes["b"].parked("ns:t"))
        body = {"messages": ["undecided"], "transactionWritePointer": begun["writePointer"]}
        await nodes["a"].call("POST", f"{TOPICS}/t/publish", json=body)
        (held,) = await take(source, 1)
        assert (held.kind, held.value["heldBy"]) == ("held", str(begun["id"]))
        await nodes["c"].call("POST", f"/v1/transactions/{begun['id']}/commit")
        assert payloads(await take(source, 1)) == ["undecided"]


@pytest.mark.parametrize("asked", ["a", "b", "c"])
async def test_a_stream_ends_when_its_topic_changes_hands_and_resumes_at_the_next_owner(nodes, asked):
    await nodes["a"].publish("t", "one")
    async with following(nodes[asked], "?from=0") as source:
        assert payloads(await take(source, 1)) == ["one"]
        await until(lambda: nodes["b"].parked("ns:t"))
        nodes.move("ns:t", "c")
        assert [event.kind async for event in source] == ["end"]
    await nodes["a"].publish("t", "two")
    async with following(nodes[asked], **{"Last-Event-ID": source.last_event_id}) as source:
        assert payloads(await take(source, 1)) == ["two"]


async def test_a_stream_whose_owner_dies_breaks_off_without_an_end_event(nodes):
    async with following(nodes["a"]) as source:
        await until(lambda: nodes["b"].parked("ns:t"))
        nodes["b"].kill()
        with pytest.raises(Exception):  # noqa: B017, PT011 - h11 has a class of its own for it
            await take(source, 1)
        assert not source.body.ended

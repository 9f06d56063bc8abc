"""A poll of topics with several owners returns what one instance would, and wakes when any topic has messages."""

from __future__ import annotations

import json
import time

import pytest
import trio

from plainsong.protocol.errors import NoOwner, OutcomeUnknown, TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.topic.asks import Create, Describe, Look
from tests.broker.cluster.in_process import cluster
from tests.waiting import until

POLL = "/v1/namespaces/ns/poll"
TOPICS = ("t-a", "t-b", "t-c", "u-a", "u-b")


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c") as running:
        for topic in TOPICS:
            running.move(f"ns:{topic}", topic[-1])
            await running["a"].create(topic)
        yield running


async def poll(node, *topics, status=200, **body):
    """Return the result for each topic, and the answer."""
    answer = await node.call("POST", POLL, json={"topics": {topic: {} for topic in topics}, **body}, status=status)
    return json.loads(answer.content)["topics"], answer


def payloads(told):
    return {topic: [message["payload"] for message in each["messages"]] for topic, each in told.items()}


async def test_one_answer_has_all_topics_of_all_owners(nodes):
    for topic in TOPICS:
        await nodes["a"].publish(topic, f"{topic}-1", f"{topic}-2")
    wanted = {topic: [f"{topic}-1", f"{topic}-2"] for topic in TOPICS}
    answers = [(await poll(node, *TOPICS))[0] for node in nodes.values()]
    assert [payloads(each) for each in answers] == [wanted] * 3
    assert answers[0] == answers[1] == answers[2]


async def test_topics_of_one_owner_are_requested_from_it_in_one_poll(nodes):
    await nodes["a"].publish("t-b", "one")
    told, answer = await poll(nodes["a"], "t-b", "u-b")
    assert payloads(told) == {"t-b": ["one"], "u-b": []}
    assert answer.headers["plainsong-owner"] == nodes["b"].address
    _, answer = await poll(nodes["a"], "t-b", "u-a")
    assert "plainsong-owner" not in answer.headers


async def test_a_missing_topic_is_reported_in_its_place(nodes):
    nodes.move("ns:gone", "c")
    told, _ = await poll(nodes["a"], "t-b", "gone")
    assert told["gone"]["error"]["code"] == "topic_not_found"
    assert told["t-b"]["messages"] == []


async def test_limits_hold_over_all_owners_and_every_topic_gets_a_turn(nodes):
    for topic in TOPICS:
        await nodes["a"].publish(topic, *["x" * 100] * 50)
    told, _ = await poll(nodes["b"], *TOPICS, limit=25)
    assert {topic: len(each) for topic, each in payloads(told).items()} == dict.fromkeys(TOPICS, 5)
    told, _ = await poll(nodes["b"], *TOPICS, maxBytes=1000)
    assert sum(len(each) for each in payloads(told).values()) <= 10
    assert all(payloads(told).values())


@pytest.mark.parametrize("topic", TOPICS)
async def test_a_wait_ends_when_any_topic_has_a_message(nodes, topic):
    async with trio.open_nursery() as nursery:
        found = {}

        async def wait():
            found.update((await poll(nodes["c"], *TOPICS, waitMs=20_000))[0])

        nursery.start_soon(wait)
        await until(lambda: sum(nodes[each[-1]].parked(f"ns:{each}") for each in TOPICS) == len(TOPICS))
        await nodes["b"].publish(topic, "late")
    assert payloads(found) == {each: ["late"] if each == topic else [] for each in TOPICS}
    await until(lambda: sum(nodes[each[-1]].parked(f"ns:{each}") for each in TOPICS) == 0)


async def test_a_wait_without_messages_lasts_as_long_as_requested(nodes):
    begun_s = time.monotonic()
    told, _ = await poll(nodes["a"], *TOPICS, waitMs=300)
    assert time.monotonic() - begun_s >= 0.3
    assert payloads(told) == {topic: [] for topic in TOPICS}


async def test_a_wait_survives_the_death_of_one_owner(nodes):
    async with trio.open_nursery() as nursery:
        found = {}

        async def wait():
            found.update((await poll(nodes["a"], *TOPICS, waitMs=20_000))[0])

        nursery.start_soon(wait)
        await until(lambda: sum(nodes[each[-1]].parked(f"ns:{each}") for each in TOPICS) == len(TOPICS))
        nodes["b"].kill()
        await nodes["b"].ended.wait()
        for topic in ("t-b", "u-b"):
            nodes.move(f"ns:{topic}", "c", seen_by="ac")
        await nodes["a"].publish("u-b", "after")
    assert payloads(found)["u-b"] == ["after"]


async def test_a_wait_at_one_owner_survives_its_death(nodes):
    async with trio.open_nursery() as nursery:
        found = {}

        async def wait():
            found.update((await poll(nodes["a"], "t-b", "u-b", waitMs=20_000))[0])

        nursery.start_soon(wait)
        await until(lambda: nodes["b"].parked("ns:t-b") == 1)
        nodes["b"].kill()
        await nodes["b"].ended.wait()
        for topic in ("t-b", "u-b"):
            nodes.move(f"ns:{topic}", "c", seen_by="ac")
        await nodes["a"].publish("u-b", "after")
    assert payloads(found) == {"t-b": [], "u-b": ["after"]}


async def test_a_topic_without_an_owner_is_reported_in_its_place_and_the_others_are_read(nodes, monkeypatch):
    monkeypatch.setattr("broker.cluster.forward.PATIENCE_S", 0.2)
    nodes.move("ns:u-b", None)
    await nodes["a"].publish("t-b", "one")
    told, _ = await poll(nodes["a"], "t-b", "u-b")
    assert told["u-b"]["error"]["code"] == "no_owner"
    assert told["u-b"]["error"]["outcome"] == "not-applied"
    assert payloads({"t-b": told["t-b"]}) == {"t-b": ["one"]}


async def test_a_poll_makes_at_most_one_hop_when_instances_disagree_about_owners(nodes, monkeypatch):
    monkeypatch.setattr("broker.cluster.forward.PATIENCE_S", 0.2)
    for topic in ("t-b", "u-b"):
        nodes.move(f"ns:{topic}", "c", seen_by="b")  # c has not received the new view yet
    told, _ = await poll(nodes["a"], "t-b", "u-b")
    assert {each["error"]["code"] for each in told.values()} == {"no_owner"}
    assert nodes["c"].metric("plainsong_forwarded_requests_total", direction="in") == 1  # from the creation of t-c


async def test_many_topics_of_one_owner_are_one_call(nodes):
    more = [f"more-{number}" for number in range(40)]
    for topic in more:
        nodes.move(f"ns:{topic}", "b")
        await nodes["a"].create(topic)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: poll(nodes["a"], "t-a", *more, waitMs=20_000))
        await until(lambda: all(nodes["b"].parked(f"ns:{topic}") for topic in more))
        assert [link.under_way for _, link in nodes["a"].cluster.links if link.under_way] == [1]
        await nodes["c"].publish(more[7], "one")


# --- asks that are not requests --------------------------------------------------------------------


async def test_an_ask_is_answered_wherever_the_topic_is(nodes):
    for name in "abc":
        asking = nodes[name].cluster.asks
        for topic in TOPICS:
            assert (await asking.ask(TopicName("ns", topic), Describe())).metadata.generation == 1
        with pytest.raises(TopicNotFound):
            await asking.ask(TopicName("ns", "nothing"), Describe())


async def test_a_query_keeps_its_deadline_over_a_link(nodes):
    asking = nodes["a"].cluster.asks
    begun_s = trio.current_time()
    span = await asking.ask(TopicName("ns", "t-b"), Look(FIRST_BOUND, deadline_s=begun_s + 0.3))
    assert span.since >= span.until
    assert trio.current_time() - begun_s > 0.25


async def test_an_ask_without_an_owner_is_refused_and_one_in_doubt_reports_that(nodes, monkeypatch):
    monkeypatch.setattr("broker.cluster.owners.PATIENCE_S", 0.2)
    asking = nodes["a"].cluster.asks
    nodes.move("ns:t-b", None)
    with pytest.raises(NoOwner):
        await asking.ask(TopicName("ns", "t-b"), Describe(), patience_s=0.2)
    nodes.move("ns:new", "c")
    nodes["c"].store.reachable = trio.Event()
    async with trio.open_nursery() as nursery:

        async def ask():
            with pytest.raises(OutcomeUnknown):
                await asking.ask(TopicName("ns", "new"), Create(TopicProperties()))

        nursery.start_soon(ask)
        await until(lambda: any(entry.name.topic == "new" for entry in nodes["c"].service.directory))
        nodes["a"].cut_links()
    nodes["c"].store.reachable.set()


async def test_rows_set_aside_are_counted_at_every_owner_and_through_every_instance(nodes):
    for topic in TOPICS:
        first_id, last_id = await nodes["a"].publish(topic, "one", "two")
        where = f"/v1/namespaces/ns/topics/{topic}"
        await nodes["a"].call("POST", f"{where}/set-aside", json={"from": first_id, "to": last_id})
        await nodes["a"].publish(topic, "three")
    wanted = dict.fromkeys(TOPICS, 2)
    for node in nodes.values():
        told, _ = await poll(node, *TOPICS)
        assert {topic: each["setAside"] for topic, each in told.items()} == wanted

"""Topics change owners under load, and instances disagree about owners: messages are stored once, and none is refused."""

from __future__ import annotations

import json
import random
from collections import Counter

import httpx
import pytest
import trio

from plainsong import AsyncClient
from tests.broker.cluster.in_process import TOPICS, cluster, named
from tests.patience import PATIENCE_S
from tests.waiting import until

PUBLISH = f"{TOPICS}/t/publish"
RECEIPT = {"Prefer": "return=representation"}


class Said:
    """The outcome of each publish, as its client received it."""

    def __init__(self):
        self.acknowledged = {}
        self.refused = set()
        self.unknown = set()

    async def publish(self, node, payload):
        """Publish one message through an instance and record its outcome."""
        try:
            answer = await node.http.post(PUBLISH, json={"messages": [payload]}, headers=RECEIPT)
        except httpx.TransportError:
            self.unknown.add(payload)
            return
        if answer.status_code == 200:
            self.acknowledged[payload] = answer.json()["firstId"]
        elif answer.json()["outcome"] == "not-applied":
            self.refused.add(payload)
        else:
            self.unknown.add(payload)

    def check(self, messages):
        """Compare the outcomes with ``messages``: payload and id of every stored message, in order."""
        times = Counter(payload for payload, _ in messages)
        assert {payload for payload, count in times.items() if count > 1} == set()
        assert set(self.acknowledged.items()) <= set(messages)
        assert not self.refused & times.keys()
        assert times.keys() <= self.acknowledged.keys() | self.unknown
        ids = [message_id for _, message_id in messages]
        assert ids == sorted(ids)


async def all_of(node):
    """Return the payload and id of every message."""
    found, since = [], None
    while True:
        body = {"startFrom": since, "inclusive": False} if since else {}
        answer = await node.call("POST", f"{TOPICS}/t/poll", json=body)
        found += [(message["payload"], message["id"]) for message in json.loads(answer.content)]
        if answer.headers["plainsong-end"] == "end":
            return found
        since = answer.headers["plainsong-last-id"]


async def publishing(nodes, said, writers, messages, between):
    """Run writers, each of which rotates through all instances, while ``between`` runs."""

    async def write(writer):
        for number in range(messages):
            node = list(nodes.values())[(writer + number) % len(nodes)]
            await said.publish(node, f"{writer}-{number}")

    async with trio.open_nursery() as disturbing:
        disturbing.start_soon(between)
        async with trio.open_nursery() as nursery:
            for writer in range(writers):
                nursery.start_soon(write, writer)
        disturbing.cancel_scope.cancel()


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c") as running:
        running.move("ns:t", "b")
        await running["b"].create()
        yield running


async def test_a_topic_that_changes_hands_repeatedly_loses_and_doubles_nothing(nodes, monkeypatch):
    monkeypatch.setattr("broker.cluster.owners.PATIENCE_S", PATIENCE_S)  # a stalled machine must not cause refusals
    said, moves = Said(), 0

    async def move():
        nonlocal moves
        while True:
            await trio.sleep(0.02)
            moves += 1
            nodes.move("ns:t", "abc"[moves % 3])

    await publishing(nodes, said, 6, 60, move)
    said.check(await all_of(nodes["a"]))
    assert moves > 5
    # Every client was redirected: no publish was refused or has an unknown outcome.
    assert len(said.acknowledged) == 360


async def test_instances_that_disagree_about_owners_for_a_while_lose_and_double_nothing(nodes, monkeypatch):
    monkeypatch.setattr("broker.cluster.owners.PATIENCE_S", 0.2)
    said, chance = Said(), random.Random(8)

    async def contradict():
        while True:
            await trio.sleep(0.02)
            for node in nodes.values():
                node.view.set(named("ns:t"), chance.choice(["a", "b", "c", None]))

    await publishing(nodes, said, 6, 40, contradict)
    nodes.move("ns:t", None)  # an instance that has the topic open, or is about to open it, closes it
    for node in nodes.values():
        await node.service.directory.handed_over()
        await node.service.directory.drained()
    nodes.move("ns:t", "c")
    said.check(await all_of(nodes["a"]))
    assert said.acknowledged


async def test_links_that_keep_breaking_cause_unknown_outcomes_only(nodes):
    said, chance = Said(), random.Random(8)

    async def cut():
        while True:
            await trio.sleep(0.01)
            nodes[chance.choice("abc")].cut_links()

    await publishing(nodes, said, 6, 60, cut)
    said.check(await all_of(nodes["a"]))
    assert len(said.acknowledged) > 100


async def test_killing_an_owner_loses_and_doubles_nothing(nodes):
    said = Said()

    async def kill():
        await until(lambda: len(said.acknowledged) > 50)
        nodes["b"].kill()
        await nodes["b"].ended.wait()
        nodes.move("ns:t", "c", seen_by="ac")

    living = {name: nodes[name] for name in "ac"}
    await publishing(living, said, 6, 60, kill)
    said.check(await all_of(nodes["a"]))
    assert len(said.acknowledged) > 300
    assert len(said.unknown) <= 6


async def test_a_frozen_owner_that_wakes_acknowledges_nothing_and_serves_no_stale_read(nodes):
    await nodes["b"].publish("t", "before")
    nodes["b"].store.reachable = trio.Event()
    async with trio.open_nursery() as nursery:
        said, read = Said(), []

        async def poll():
            answer = await nodes["b"].http.post(f"{TOPICS}/t/poll", json={})
            read.append([message["payload"] for message in answer.json()])

        nursery.start_soon(said.publish, nodes["b"], "frozen")
        nursery.start_soon(poll)
        await until(lambda: not all(entry.actor.is_idle for entry in nodes["b"].service.directory))
        nodes.move("ns:t", "c", seen_by="ac")
        await nodes["a"].publish("t", "after")
        nodes["b"].store.reachable.set()
        nodes.move("ns:t", "c")
    messages = await all_of(nodes["a"])
    said.check([each for each in messages if each[0] not in ("before", "after")])
    assert "after" in read[0]


# --- our own client --------------------------------------------------------------------------------


async def test_the_client_follows_the_owner_directly_and_finds_the_next_one(nodes):
    async with AsyncClient(f"http://{nodes['a'].address}", namespace="ns") as client:
        for owner in "bcab":
            nodes.move("ns:t", owner)
            await client.publish("t", b"x")
            before = {
                name: nodes[name].metric("plainsong_requests_total", route="publish", status="200") for name in "abc"
            }
            await client.publish("t", b"y")
            after = {
                name: nodes[name].metric("plainsong_requests_total", route="publish", status="200") for name in "abc"
            }
            assert {name for name in "abc" if after[name] > before[name]} == {owner}
        assert len(await client.poll("t")) == 8


async def test_the_client_survives_the_death_of_the_owner_it_follows(nodes):
    urls = [f"http://{nodes[name].address}" for name in "ac"]
    async with AsyncClient(urls, namespace="ns") as client:
        await client.publish("t", b"one")
        await client.publish("t", b"two")
        nodes["b"].kill()
        await nodes["b"].ended.wait()
        nodes.move("ns:t", "c", seen_by="ac")
        await client.publish("t", b"three")
        assert [message.payload for message in await client.poll("t")] == [b"one", b"two", b"three"]


async def test_a_stream_of_the_client_follows_its_owner_too(nodes):
    async with AsyncClient(f"http://{nodes['a'].address}", namespace="ns") as client:
        for owner, forwarded in (("b", 1), ("b", 1), ("c", 1)):
            nodes.move("ns:t", owner)
            async with client.stream("t") as stream:
                assert (await (await stream.publish(b"x"))).first_id is not None
            assert nodes["a"].metric("plainsong_forwarded_requests_total", direction="out") == forwarded

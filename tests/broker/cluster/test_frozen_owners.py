"""Requests in progress at an owner that freezes are sent to the next owner, or get 503 outcome_unknown; never late."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial

import pytest
import trio

import broker.cluster.serve
from broker.cluster import forward, owners
from broker.link.client import Link
from broker.link.flow import LinkBroken
from broker.link.wire import LinkBounds
from plainsong.protocol import requests
from tests.broker.cluster.in_process import TOPICS, cluster, named
from tests.broker.cluster.relay import ways
from tests.patience import PATIENCE_S
from tests.waiting import until

#: Longer than any test, so that a request that ends sooner has not waited for the link's silence limit.
SILENCE_S = 600.0
#: A wait longer than the tests' patience: a poll that does not continue fails the test.
LONG_WAIT_MS = 3_600_000
MANY = "/v1/namespaces/ns/poll"


@pytest.fixture(params=[0.5])
async def frozen(request, monkeypatch):
    """Three instances; b owns ns:t and ns:u, has published one message to each, and can be frozen."""
    bounds = partial(LinkBounds, silence_s=SILENCE_S, parting_s=request.param)
    monkeypatch.setattr(broker.cluster.serve, "LinkBounds", bounds)
    monkeypatch.setattr(requests, "MAX_WAIT_MS", LONG_WAIT_MS)
    async with cluster("a", "b", "c", poll__max_wait_ms=LONG_WAIT_MS) as nodes, ways(nodes, "b") as way:
        for topic in "tu":
            nodes.move(f"ns:{topic}", "b")
            await nodes["a"].create(topic)
            await nodes["a"].publish(topic, "one")
        nodes.freeze = way.freeze
        yield nodes


async def sent(nodes, number=1):
    """Wait until ``number`` calls from a are in progress."""
    await until(lambda: sum(link.under_way for _, link in nodes["a"].cluster.links) == number)


LOOKS = {
    "poll": ("POST", f"{TOPICS}/t/poll", {}),
    "offsets": ("POST", f"{TOPICS}/t/offsets", {}),
    "properties": ("GET", f"{TOPICS}/t", None),
    "stats": ("GET", f"{TOPICS}/t/stats", None),
    "poll of many at one owner": ("POST", MANY, {"topics": {"t": {}, "u": {}}}),
    "poll of many at several owners": ("POST", MANY, {"topics": {"t": {}, "v": {}}}),
}


@asynccontextmanager
async def asked(frozen, look):
    """Run a read-only request on a topic whose owner is frozen; it gets its answer before the block ends."""
    frozen.move("ns:v", "a")
    await frozen["a"].create("v")
    method, path, body = LOOKS[look]
    frozen.freeze()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(frozen["a"].call, method, path, json=body))
            await sent(frozen)
            yield


@pytest.mark.parametrize("look", LOOKS)
async def test_reads_are_repeated_at_the_next_owner_as_soon_as_there_is_one(frozen, look):
    async with asked(frozen, look):
        for name in ("ns:t", "ns:u"):
            frozen.move(name, "c", seen_by="ac")
    with trio.fail_after(PATIENCE_S):
        await sent(frozen, 0)


@pytest.mark.parametrize("look", ["poll", "poll of many at several owners"])
async def test_the_search_for_the_next_owner_begins_when_the_previous_one_is_lost(frozen, look, monkeypatch):
    for module in (owners, forward):
        monkeypatch.setattr(module, "PATIENCE_S", 4.0)  # the test waits longer; the search for the next owner gets 4 s
    async with asked(frozen, look):
        await trio.sleep(owners.PATIENCE_S + 0.1)  # longer than a search for an owner may take
        frozen.move("ns:t", "c", seen_by="a")
        await until(lambda: frozen["a"].metric("plainsong_forward_retries_total") >= 2)
        frozen.move("ns:t", "c", seen_by="c")


async def test_a_held_poll_continues_at_the_next_owner_for_the_rest_of_its_wait(frozen):
    frozen.move("ns:empty", "b")
    await frozen["a"].create("empty")
    polled = []

    async def poll():
        polled.extend(await frozen["a"].poll("empty", waitMs=LONG_WAIT_MS))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            await until(lambda: frozen["b"].parked("ns:empty") == 1)
            frozen.freeze()
            frozen.move("ns:empty", "c", seen_by="ac")
            await until(lambda: frozen["c"].parked("ns:empty") == 1)
            await frozen["c"].publish("empty", "late")
    assert polled == ["late"]


async def test_a_poll_waits_for_a_topic_that_its_frozen_owner_keeps_while_another_topic_moves(frozen):
    told = []

    async def poll(topic):
        told.append((topic, await frozen["a"].poll(topic)))

    frozen.freeze()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll, "t")
            nursery.start_soon(poll, "u")
            await sent(frozen, 2)
            frozen.move("ns:t", "c", seen_by="ac")
            await until(lambda: told == [("t", ["one"])])
            await sent(frozen, 1)
            nursery.cancel_scope.cancel()


async def test_a_write_is_unknown_as_soon_as_its_silent_owner_is_gone(frozen):
    frozen.freeze()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:

            async def publish():
                refused = {"status": 503, "code": "outcome_unknown"}
                answer = await frozen["a"].call("POST", f"{TOPICS}/t/publish", json={"messages": ["two"]}, **refused)
                assert answer.json()["outcome"] == "unknown"

            nursery.start_soon(publish)
            await sent(frozen)
            frozen.there.remove("b")
            frozen.move("ns:t", "c", seen_by="ac")
        assert await frozen["a"].poll() == ["one"]


@pytest.mark.parametrize("frozen", [2.0], indirect=True)
async def test_an_owner_that_stops_cleanly_answers_the_requests_that_it_accepted(frozen, monkeypatch):
    proved, probe = [], Link.probe

    async def noted(link, within_s):
        await probe(link, within_s)
        proved.append(link)

    monkeypatch.setattr(Link, "probe", noted)
    reachable = frozen["b"].store.reachable = trio.Event()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(frozen["a"].publish, "t", "two")
            await until(lambda: reachable.statistics().tasks_waiting)  # b has received the request
            frozen.there.remove("b")
            frozen.move("ns:t", "c")
            await until(lambda: proved)
            reachable.set()
        assert await frozen["a"].poll() == ["one", "two"]


async def test_an_owner_change_while_a_link_is_dialled_is_noticed_before_waiting_for_the_answer(frozen):
    looking, name = frozen["a"].cluster.handover._owners, named("ns:t")
    owner = looking.remote_owner(name)
    frozen.move("ns:t", "c")
    with trio.fail_after(PATIENCE_S), pytest.raises(LinkBroken):
        await looking.while_owner((name,), owner, trio.Event().wait())

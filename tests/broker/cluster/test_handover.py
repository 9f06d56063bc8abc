"""After a hand-over the next owner opens the topics before a request needs them, and claims no others."""

from __future__ import annotations

import pytest
import trio

from broker.cluster import handover
from plainsong.protocol.errors import BadRequest
from plainsong.protocol.names import TopicName
from tests.broker.cluster.in_process import cluster, named
from tests.patience import PATIENCE_S
from tests.waiting import until

NAMES = [f"t{number}" for number in range(5)]


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c") as running:
        for name in NAMES:
            running.move(f"ns:{name}", "b")
            await running["b"].create(name)
        yield running


def opened(node):
    """Return the topics of these tests that are open and loaded at ``node``."""
    return {name for name in NAMES if node.service.directory.peek(named(f"ns:{name}")) is not None}


async def call(node, to, kind, value):
    """Make a call to another instance over ``node``'s link."""
    link = await node.cluster.links.to(to.address)
    return await link.call(kind, value)


async def test_released_topics_are_open_at_their_next_owners_before_the_first_request(nodes):
    for name in NAMES:
        nodes.move(f"ns:{name}", "c" if name == "t0" else "a")
    with trio.fail_after(PATIENCE_S):
        await nodes["b"].service.directory.handed_over()
    assert (opened(nodes["a"]), opened(nodes["b"]), opened(nodes["c"])) == ({"t1", "t2", "t3", "t4"}, set(), {"t0"})
    assert await nodes["b"].poll("t1") == []


async def test_a_next_owner_that_receives_the_change_late_opens_its_topics_then(nodes):
    nodes.move("ns:t1", "a", seen_by="bc")
    async with trio.open_nursery() as nursery:
        handed = trio.Event()

        async def wait():
            await nodes["b"].service.directory.handed_over()
            handed.set()

        nursery.start_soon(wait)
        await until(lambda: nodes["a"].cluster.handover.waiting)
        assert not handed.is_set()
        assert opened(nodes["a"]) == set()
        nodes.move("ns:t1", "a")
        with trio.fail_after(PATIENCE_S):
            await handed.wait()
    assert opened(nodes["a"]) == {"t1"}


async def test_topics_of_another_instance_are_neither_claimed_nor_waited_for_forever(nodes, monkeypatch):
    monkeypatch.setattr(handover, "VIEW_S", 0.05)
    with trio.fail_after(PATIENCE_S):
        await call(nodes["a"], nodes["c"], "topics.open", [["ns", name] for name in NAMES])
    assert opened(nodes["c"]) == set()
    assert opened(nodes["b"]) == set(NAMES)


async def test_an_instance_waiting_for_released_topics_is_notified(nodes):
    nodes["a"].store.reachable = trio.Event()
    nodes.move("ns:t1", "a")
    async with trio.open_nursery() as nursery:
        answered = trio.Event()

        async def ask():
            await call(nodes["a"], nodes["b"], "topics.given", ["a", 64])
            answered.set()

        nursery.start_soon(ask)
        await until(lambda: nodes["a"].service.directory.peek(TopicName("ns", "t1")) is None)
        assert not answered.is_set()
        nodes["a"].store.reachable.set()
        with trio.fail_after(PATIENCE_S):
            await answered.wait()
    assert opened(nodes["a"]) == {"t1"}


async def test_an_unreachable_next_owner_delays_nothing(nodes):
    nodes["a"].kill()
    await nodes["a"].ended.wait()
    nodes.move("ns:t1", "a", seen_by="bc")
    with trio.fail_after(PATIENCE_S):
        await nodes["b"].service.directory.handed_over()


async def test_names_over_the_bound_of_a_call_are_refused_and_sent_in_several_calls(nodes, monkeypatch):
    monkeypatch.setattr(handover, "MAX_NAMES", 2)
    with pytest.raises(BadRequest):
        await call(nodes["a"], nodes["c"], "topics.open", [["ns", name] for name in NAMES])
    for name in NAMES:
        nodes["b"].view._owners[named(f"ns:{name}")] = nodes["a"].view._owners[named(f"ns:{name}")] = "a"
    nodes.move("ns:t0", "a")
    with trio.fail_after(PATIENCE_S):
        await nodes["b"].service.directory.handed_over()
    assert opened(nodes["a"]) == set(NAMES)


async def test_topics_that_do_not_exist_are_not_opened(nodes):
    nodes.move("ns:missing", "b")
    await nodes["b"].call("GET", "/v1/namespaces/ns/topics/missing", status=404)
    assert nodes["b"].service.directory.peek(named("ns:missing")) is not None
    nodes.move("ns:missing", "a")
    with trio.fail_after(PATIENCE_S):
        await nodes["b"].service.directory.handed_over()
    assert nodes["a"].service.directory.peek(named("ns:missing")) is None

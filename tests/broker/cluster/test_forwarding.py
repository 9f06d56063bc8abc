"""Any instance answers any request: the request runs once, at the owner, and the answer names the owner."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import trio

import broker.cluster.forward
import broker.cluster.owners
import broker.cluster.remote_stream
from broker.http.messages import Request
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.handling import subject_of
from tests.patience import PATIENCE_S
from tests.waiting import until

PUBLISH = f"{TOPICS}/t/publish"
POLL = f"{TOPICS}/t/poll"
ONE = {"messages": ["one"]}


@pytest.fixture
async def nodes():
    async with cluster("a", "b", "c") as running:
        running.move("ns:t", "b")
        yield running


@pytest.fixture
def briefly(monkeypatch):
    """Shorten the search for an owner to the given number of seconds."""
    for module in (broker.cluster.owners, broker.cluster.forward, broker.cluster.remote_stream):
        monkeypatch.setattr(module, "PATIENCE_S", 0.3)
    return 0.3


# --- forwarded, once -------------------------------------------------------------------------------


async def test_messages_published_at_one_instance_are_read_at_every_other(nodes):
    await nodes["a"].create()
    await nodes["c"].publish("t", "one", "two")
    for node in nodes.values():
        assert await node.poll() == ["one", "two"]
    assert [len(node.service.directory) for node in nodes.values()] == [0, 1, 0]


async def test_only_a_forwarded_answer_names_the_owner(nodes):
    await nodes["b"].create()
    for name in "abc":
        answer = await nodes[name].call("POST", PUBLISH, json=ONE)
        assert answer.headers.get("plainsong-owner") == (None if name == "b" else nodes["b"].address)
    refused = await nodes["a"].call("PUT", f"{TOPICS}/t", json={}, status=409)
    assert refused.headers["plainsong-owner"] == nodes["b"].address


async def test_a_request_is_forwarded_once_and_never_further(nodes, briefly):
    await nodes["b"].create()
    nodes.move("ns:t", "c", seen_by="b")  # neither a nor c has the new view yet
    answer = await nodes["a"].call("POST", PUBLISH, json=ONE, status=503, code="no_owner")
    assert answer.json()["outcome"] == "not-applied"
    assert answer.headers["retry-after"] == "1"
    assert "plainsong-owner" not in answer.headers
    assert nodes["c"].metric("plainsong_forwarded_requests_total", direction="in") == 0
    nodes.move("ns:t", "c", seen_by="ac")
    assert await nodes["a"].poll() == []


async def test_without_an_owner_nothing_happens_and_the_answer_says_when_to_retry(nodes, briefly):
    await nodes["b"].create()
    nodes.move("ns:t", None)
    for method, path in (("POST", PUBLISH), ("POST", POLL), ("GET", f"{TOPICS}/t"), ("DELETE", f"{TOPICS}/t")):
        begun_s = time.monotonic()
        answer = await nodes["a"].call(method, path, json=ONE if path == PUBLISH else {}, status=503, code="no_owner")
        assert time.monotonic() - begun_s >= briefly
        assert answer.headers["retry-after"] == "1"
        assert answer.json()["outcome"] == "not-applied"
    assert nodes["a"].metric("plainsong_no_owner_answers_total") == 4
    nodes.move("ns:t", "c")
    assert await nodes["a"].poll() == []


async def test_an_owner_that_appears_in_time_answers(nodes, monkeypatch):
    monkeypatch.setattr(broker.cluster.owners, "PATIENCE_S", PATIENCE_S)
    await nodes["b"].create()
    nodes.move("ns:t", None)
    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(nodes[name].publish, "t", name)
        await until(lambda: all(node.metric("plainsong_forward_retries_total") for node in nodes.values()))
        nodes.move("ns:t", "c")
    assert sorted(await nodes["a"].poll()) == ["a", "b", "c"]


async def test_a_former_owner_forwards_to_the_current_one(nodes):
    await nodes["b"].create()
    await nodes["b"].publish("t", "one")
    nodes.move("ns:t", "c")
    await nodes["b"].publish("t", "two")
    assert await nodes["b"].poll() == ["one", "two"]


async def test_bodies_are_bounded_and_decompressed_where_they_arrive(nodes):
    async with cluster("x", "y", http__max_body_bytes=1000) as small:
        small.move("ns:t", "y")
        await small["y"].create()
        await small["x"].call("POST", PUBLISH, content=b"x" * 1001, status=413)
        gzipped = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        await small["x"].call("POST", PUBLISH, content=b"no gzip", headers=gzipped, status=400)
        # The owner was asked only whether the topic exists, so it inflated no body.
        assert small["x"].metric("plainsong_forwarded_requests_total", direction="out") == 1


async def test_large_bodies_travel_both_ways(nodes):
    await nodes["b"].create()
    large = ["x" * 1_000_000 + str(number) for number in range(3)]
    await nodes["a"].publish("t", *large)
    assert await nodes["c"].poll() == large


class Spawned(trio.abc.Instrument):
    """The names of the tasks that were started."""

    def __init__(self):
        self.names = []

    def task_spawned(self, task):
        self.names.append(task.name)


async def test_an_owner_answers_publishes_and_plain_polls_without_a_task(nodes):
    await nodes["b"].create()
    await nodes["a"].publish("t", "one")
    spawned = Spawned()
    trio.lowlevel.add_instrument(spawned)
    await nodes["a"].publish("t", "two")
    assert await nodes["a"].poll() == ["one", "two"]
    trio.lowlevel.remove_instrument(spawned)
    assert spawned.names, "the instance that forwards has some"
    assert not [name for name in spawned.names if name.startswith("broker.link.server.")]


# --- links that break ------------------------------------------------------------------------------


async def test_a_write_whose_link_breaks_has_an_unknown_outcome(nodes):
    await nodes["b"].create()
    nodes["b"].store.reachable = trio.Event()
    async with trio.open_nursery() as nursery:

        async def publish():
            answer = await nodes["a"].call("POST", PUBLISH, json=ONE, status=503, code="outcome_unknown")
            assert answer.json()["outcome"] == "unknown"
            assert "plainsong-owner" not in answer.headers

        nursery.start_soon(publish)
        await until(lambda: nodes["b"].metric("plainsong_forwarded_requests_total", direction="in") == 1)
        nodes["a"].cut_links()
    nodes["b"].store.reachable.set()
    assert await nodes["a"].poll() in ([], ["one"])


async def test_a_poll_whose_link_breaks_is_repeated(nodes):
    await nodes["b"].create()
    async with trio.open_nursery() as nursery:

        async def poll():
            assert await nodes["a"].poll(waitMs=20_000) == ["late"]

        nursery.start_soon(poll)
        await until(lambda: nodes["b"].parked("ns:t") == 1)
        nodes["a"].cut_links()
        await until(lambda: nodes["b"].metric("plainsong_forwarded_requests_total", direction="in") == 2)
        await until(lambda: nodes["b"].parked("ns:t") == 1)
        await nodes["c"].publish("t", "late")


async def test_requests_that_were_never_sent_go_to_the_next_owner(nodes):
    await nodes["b"].create()
    nodes["b"].kill()
    await nodes["b"].ended.wait()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(nodes["a"].publish, "t", "one")
        await until(lambda: nodes["a"].metric("plainsong_forward_retries_total"))
        nodes.move("ns:t", "c", seen_by="ac")
    assert await nodes["a"].poll() == ["one"]


async def test_a_request_to_a_departed_owner_did_not_happen(nodes, briefly):
    await nodes["b"].create()
    nodes["b"].kill()
    await nodes["b"].ended.wait()
    answer = await nodes["a"].call("POST", PUBLISH, json=ONE, status=503, code="no_owner")
    assert answer.json()["outcome"] == "not-applied"


# --- long polls ------------------------------------------------------------------------------------


async def test_a_long_poll_is_answered_when_its_topic_moves_and_a_forwarded_one_finds_the_owner(nodes):
    await nodes["b"].create()
    polled = {}
    async with trio.open_nursery() as nursery:
        for name in "abc":

            async def poll(name=name):
                polled[name] = await nodes[name].poll(waitMs=20_000)

            nursery.start_soon(poll)
        await until(lambda: nodes["b"].parked("ns:t") == 3)
        nodes.move("ns:t", "c", seen_by="acb")
        await until(lambda: polled == {"b": []} and nodes["c"].parked("ns:t") == 2)
        await nodes["a"].publish("t", "one")
    assert polled == {"a": ["one"], "b": [], "c": ["one"]}
    assert await nodes["b"].poll(waitMs=20_000) == ["one"]


async def test_a_long_poll_whose_owner_dies_continues_at_the_next_for_the_rest_of_its_wait(nodes):
    await nodes["b"].create()
    waited_ms, kinds = [], nodes["c"].cluster.dispatcher.kinds
    answer = kinds["request"]

    def heard(call, reply):
        waited_ms.append(call.value[5])
        answer(call, reply)

    kinds["request"] = heard
    begun_s, emptied = time.monotonic(), trio.Event()
    async with trio.open_nursery() as nursery:

        async def empty():
            assert await nodes["a"].poll(waitMs=4_000) == []
            emptied.set()

        async def filled():
            assert await nodes["a"].poll(waitMs=20_000) == ["one"]

        nursery.start_soon(empty)
        nursery.start_soon(filled)
        await until(lambda: nodes["b"].parked("ns:t") == 2)
        await trio.sleep(0.3)
        nodes["b"].kill()
        await nodes["b"].ended.wait()
        nodes.move("ns:t", "c", seen_by="ac")
        await until(lambda: len(waited_ms) == 2)  # not until both are parked there: that may end before this task runs
        with trio.fail_after(PATIENCE_S):
            await emptied.wait()
        assert time.monotonic() - begun_s > 3.9
        assert min(waited_ms) >= 300
        await nodes["c"].publish("t", "one")


async def test_a_long_poll_looks_for_an_owner_until_its_wait_ends(nodes, briefly):
    await nodes["b"].create()
    nodes.move("ns:t", None)
    begun_s = time.monotonic()
    await nodes["a"].call("POST", POLL, json={"waitMs": 700}, status=503, code="no_owner")
    await nodes["a"].call("POST", f"{TOPICS}/t/offsets", json={"waitMs": 700}, status=503, code="no_owner")
    assert time.monotonic() - begun_s > 1.4


async def test_a_client_that_leaves_ends_its_poll_at_the_owner(nodes):
    await nodes["b"].create()
    with trio.CancelScope() as client:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes["a"].poll, "t")
            nursery.start_soon(lambda: nodes["a"].poll(waitMs=20_000))
            await until(lambda: nodes["b"].parked("ns:t") == 1)
            client.cancel()
    await until(lambda: nodes["b"].parked("ns:t") == 0)
    # The parked poll is sent again without a wait, since the client may have closed only its sending half.
    await until(lambda: sum(link.under_way for _, link in nodes["a"].cluster.links) == 0)


# --- metrics, logs and statistics ------------------------------------------------------------------


async def test_requests_are_counted_at_the_instance_of_the_client(nodes):
    await nodes["b"].create()
    await nodes["a"].publish("t", "one")
    assert nodes["a"].metric("plainsong_requests_total", route="publish", status="200") == 1
    assert nodes["b"].metric("plainsong_requests_total", route="publish", status="200") == 0
    assert nodes["a"].metric("plainsong_forwarded_requests_total", direction="out") == 1
    assert nodes["b"].metric("plainsong_forwarded_requests_total", direction="in") == 1
    assert nodes["a"].metric("plainsong_links_open") == 1


async def test_the_access_log_names_the_owner(caplog):
    caplog.set_level(logging.INFO, "plainsong.access")
    async with cluster("a", "b", log__access=True) as nodes:
        nodes.move("ns:t", "b")
        await nodes["a"].create()
        await nodes["a"].publish("t", "one")
        await nodes["b"].publish("t", "two")
        owner = nodes["b"].address
    owners = [(record.route, getattr(record, "owner", None)) for record in caplog.records if hasattr(record, "route")]
    assert owners == [("create_topic", owner), ("publish", owner), ("publish", None)]


async def test_a_bug_at_the_owner_is_logged_there_under_the_clients_request_id(nodes, caplog, monkeypatch):
    await nodes["b"].create()

    def broken(name, ask, settled):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(nodes["b"].service.directory, "put", broken)
    answer = await nodes["a"].call("GET", f"{TOPICS}/t", status=500, headers={"X-Request-Id": "find-me"})
    assert "secret" not in answer.text
    assert answer.headers["plainsong-owner"] == nodes["b"].address
    assert [record.request_id for record in caplog.records if record.levelname == "ERROR"] == ["find-me"]


async def test_stats_name_the_owner(nodes):
    await nodes["b"].create()
    assert (await nodes["a"].call("GET", f"{TOPICS}/t/stats")).json()["owner"] == nodes["b"].address


async def test_readyz_names_needed_instances_that_cannot_be_reached(nodes, briefly):
    await nodes["b"].create()
    me, view = nodes["a"], nodes["a"].view
    told = {
        "me": view.me,
        "instances": view.instances,
        "connected": True,
        "since_ms": 5,
        "taken_by": None,
        "kept_out_by": None,
    }
    (readyz,) = [subject_of(each) for each in me.service.endpoints if each.route.name == "readyz"]
    health = replace(readyz, membership=SimpleNamespace(entered=True, **told))
    assert json.loads((await health.readyz(Request({}, "", {}))).body)["cluster"]["unreachable"] == []
    nodes["b"].kill()
    await nodes["b"].ended.wait()
    await me.call("POST", PUBLISH, json=ONE, status=503, code="no_owner")
    ready = json.loads((await health.readyz(Request({}, "", {}))).body)
    assert ready["ready"]
    assert ready["cluster"] == {"instance": "a", "instances": 3, "zookeeper": True, "since": 5, "unreachable": ["b"]}
    nodes.there.remove("b")
    nodes.move("ns:t", "c", seen_by="ac")
    assert me.cluster.links.unreachable == {}  # the instance is gone, and no more requests go to it

"""Transactions, namespaces and Tephra's clients work through any instance, over HTTP and over links."""

from __future__ import annotations

import time

import pytest
import trio
import trio.testing

import actors.replica
import broker.cluster.owners
from broker.cluster.transactions import RoutedTephraMethods
from plainsong.protocol import requests
from plainsong.protocol.names import TopicName
from plainsong.protocol.tephra.rpc import ApplicationError, decode_reply, encode_call
from storage.base import NAMESPACES_NAME, SERVICE_NAME
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.daemon.harness import PLAINSONG, clean_environ
from tests.patience import PATIENCE_S
from tests.waiting import until

SERVICE = "/v1/transactions"


#: Waits and deadlines longer than the tests' patience: a call that is not woken fails the test.
LONG_WAIT_MS = 3_600_000
LONG = {
    "poll__max_wait_ms": LONG_WAIT_MS,
    "transactions__commit_deadline_s": 2 * PATIENCE_S,
    "transactions__abort_deadline_s": 2 * PATIENCE_S,
}


@pytest.fixture(params=[{}], ids=[""])
async def nodes(request):
    """Instance a owns the service; b and c own one topic each."""
    async with cluster("a", "b", "c", transactions__service="embedded", **request.param) as running:
        running.move(SERVICE_NAME, "a")
        running.move(NAMESPACES_NAME, "a")
        running.move("ns:t", "b")
        running.move("ns:u", "c")
        await running["a"].create("t")
        await running["a"].create("u")
        await known(running)
        yield running


async def known(nodes):
    """Wait until every instance has the current view."""
    await until(lambda: nodes["a"].service.authority.embedded is not None)
    for node in nodes.values():
        await node.service.authority.transactions.fresh()


async def begin(node):
    return (await node.call("POST", SERVICE)).json()["id"]


async def publish_under(node, topic, pointer, *payloads, **more):
    body = {"messages": list(payloads), "transactionWritePointer": pointer}
    return await node.call("POST", f"{TOPICS}/{topic}/publish", json=body, **more)


async def commit(node, pointer, **more):
    return await node.call("POST", f"{SERVICE}/{pointer}/commit", **more)


async def committed(node, topic):
    answer = await node.call("POST", f"{TOPICS}/{topic}/poll?isolation=committed", json={})
    return [message["payload"] for message in answer.json()]


async def test_a_commit_through_one_instance_is_polled_at_once_through_any(nodes):
    for turn in range(10):
        through = list(nodes.values())[turn % 3]
        pointer = await begin(through)
        await publish_under(through, "t", pointer, f"t{turn}")
        await publish_under(through, "u", pointer, f"u{turn}")
        answer = await commit(through, pointer)
        assert answer.json()["state"] == "committed"
        for node in nodes.values():
            assert (await committed(node, "t"))[-1] == f"t{turn}"
            assert (await committed(node, "u"))[-1] == f"u{turn}"


@pytest.mark.parametrize("nodes", [LONG], ids=[""], indirect=True)
async def test_a_poll_held_by_a_transaction_continues_when_another_instance_commits_it(nodes, monkeypatch):
    monkeypatch.setattr(requests, "MAX_WAIT_MS", LONG_WAIT_MS)
    pointer = await begin(nodes["c"])
    await publish_under(nodes["c"], "t", pointer, "one")
    polled = []

    async def poll():
        answer = await nodes["c"].call("POST", f"{TOPICS}/t/poll?isolation=committed&wait_ms={LONG_WAIT_MS}", json={})
        polled.extend(message["payload"] for message in answer.json())

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            await until(lambda: nodes["b"].service.pointers.waiters == 1)
            await commit(nodes["b"], pointer)
    assert polled == ["one"]


async def test_a_held_poll_moves_with_its_topic_to_the_next_owner(nodes):
    name = TopicName("ns", "t")
    pointer = await begin(nodes["c"])
    await publish_under(nodes["c"], "t", pointer, "one")
    polled = []

    async def poll():
        answer = await nodes["a"].call("POST", f"{TOPICS}/t/poll?isolation=committed&wait_ms=60000", json={})
        polled.extend(message["payload"] for message in answer.json())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(poll)
        await until(lambda: nodes["b"].service.pointers.waiting(name))
        nodes.move("ns:t", "c")
        await until(lambda: nodes["c"].service.pointers.waiting(name))
        assert not nodes["b"].service.pointers.waiting(name)
        await commit(nodes["b"], pointer)
    assert polled == ["one"]


async def test_nothing_is_written_after_a_commit_or_an_abort(nodes):
    first, second = await begin(nodes["b"]), await begin(nodes["b"])
    await publish_under(nodes["b"], "t", first, "one")
    await publish_under(nodes["b"], "u", second, "two")
    await commit(nodes["c"], first)
    await nodes["c"].call("POST", f"{SERVICE}/{second}/abort")
    for topic, pointer in (("t", first), ("u", first), ("t", second), ("u", second)):
        await publish_under(nodes["a"], topic, pointer, "late", status=409, code="transaction_not_in_progress")
    assert await committed(nodes["a"], "t") == ["one"]
    assert await committed(nodes["a"], "u") == []


async def test_transactions_continue_at_the_next_owner_of_the_service(nodes):
    pointer = await begin(nodes["b"])
    await publish_under(nodes["b"], "t", pointer, "one")
    nodes.move(SERVICE_NAME, "c")
    await until(
        lambda: nodes["c"].service.authority.embedded is not None and nodes["a"].service.authority.embedded is None
    )
    await publish_under(nodes["b"], "u", pointer, "two")
    assert await begin(nodes["a"]) > pointer
    assert (await commit(nodes["a"], pointer)).json()["state"] == "committed"
    for node in nodes.values():
        assert await committed(node, "t") == ["one"]
        assert await committed(node, "u") == ["two"]


async def test_requests_to_the_next_owner_are_answered_while_it_loads_the_service(nodes):
    nodes["b"].store.reachable = trio.Event()
    nodes.move(SERVICE_NAME, "b")
    begun = []

    async def begins(node):
        begun.append(await begin(node))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for node in nodes.values():
                nursery.start_soon(begins, node)
            await until(lambda: nodes["b"].service.authority.routed.home is not None)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert begun == []
            nodes["b"].store.reachable.set()
    assert len(set(begun)) == 3


@pytest.mark.parametrize("nodes", [LONG], ids=[""], indirect=True)
@pytest.mark.parametrize(("verb", "state"), [("commit", "committed"), ("abort", "aborted")])
async def test_a_decision_takes_effect_at_the_next_owner_of_a_topic_while_the_previous_one_is_frozen(
    nodes, monkeypatch, verb, state
):
    pointer = await begin(nodes["c"])
    await publish_under(nodes["c"], "t", pointer, "one")
    asked = trio.Event()

    def frozen(name, ask, settled):
        asked.set()

    monkeypatch.setattr(nodes["b"].service.directory, "put", frozen)
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decided, nodes["c"], pointer, verb, state)
            await asked.wait()
            nodes.move("ns:t", "c")
    assert await committed(nodes["a"], "t") == (["one"] if verb == "commit" else [])


async def test_requests_wait_for_the_service_while_it_moves(nodes):
    pointer, other = await begin(nodes["b"]), await begin(nodes["b"])
    await publish_under(nodes["b"], "t", pointer, "one")
    nodes["c"].store.reachable = trio.Event()
    nodes.move(SERVICE_NAME, "c")
    await until(lambda: nodes["a"].service.authority.embedded is None)
    polled = []

    async def poll(node):
        polled.append(await committed(node, "t"))

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(begin, nodes["a"])
            nursery.start_soon(begin, nodes["c"])
            nursery.start_soon(publish_under, nodes["b"], "t", other, "two")
            nursery.start_soon(poll, nodes["a"])
            nursery.start_soon(poll, nodes["c"])
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert polled == []
            nodes["c"].store.reachable.set()
    assert polled == [[], []]
    assert (await commit(nodes["a"], pointer)).json()["state"] == "committed"


async def test_a_commit_whose_service_moves_while_topics_close_is_made_at_the_next_owner(nodes, monkeypatch):
    pointer = await begin(nodes["b"])
    await publish_under(nodes["b"], "t", pointer, "one")
    directory, held = nodes["b"].service.directory, []
    put = directory.put
    monkeypatch.setattr(directory, "put", lambda *asked: held.append(asked))
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decided, nodes["b"], pointer, "commit", "committed")
            await until(lambda: held)
            nodes.move(SERVICE_NAME, "c")
            await until(lambda: nodes["c"].service.authority.embedded is not None)
            monkeypatch.setattr(directory, "put", put)
            for asked in held:
                put(*asked)
    assert await committed(nodes["a"], "t") == ["one"]


async def decided(node, pointer, verb, state):
    assert (await node.call("POST", f"{SERVICE}/{pointer}/{verb}")).json()["state"] == state


async def test_without_the_service_plain_requests_are_served_and_transactional_ones_refused(nodes, monkeypatch):
    pointer = await begin(nodes["b"])
    nodes["a"].kill()
    await nodes["a"].ended.wait()
    await nodes["b"].publish("t", "plain")
    assert await nodes["c"].poll("t") == ["plain"]
    refused = {"status": 503, "code": "transactions_unavailable"}
    with monkeypatch.context() as patch:
        patch.setattr(actors.replica, "PATIENCE_S", 0.2)
        await publish_under(nodes["b"], "t", pointer, "one", **refused)
        assert await committed(nodes["c"], "t") == ["plain"]
    nodes.move(SERVICE_NAME, "b")
    await until(lambda: nodes["b"].service.authority.embedded is not None)
    await publish_under(nodes["c"], "t", pointer, "one")
    await commit(nodes["c"], pointer)
    assert await committed(nodes["c"], "t") == ["plain", "one"]


async def test_a_client_may_roll_back_uncommitted_messages_through_any_instance(nodes):
    pointer, other = await begin(nodes["b"]), await begin(nodes["b"])
    detail = (await publish_under(nodes["a"], "t", pointer, "one")).json()
    await publish_under(nodes["a"], "t", other, "two")
    await nodes["c"].call("POST", f"{TOPICS}/t/rollback", json=detail)
    await commit(nodes["c"], pointer)
    await commit(nodes["a"], other)
    assert await committed(nodes["a"], "t") == ["two"]
    await nodes["c"].call("POST", f"{TOPICS}/t/rollback", json=detail, status=409, code="transaction_not_in_progress")


async def test_a_poll_of_many_topics_shows_all_of_a_transaction_or_nothing(nodes):
    pointer = await begin(nodes["b"])
    await publish_under(nodes["b"], "t", pointer, "one")
    await publish_under(nodes["b"], "u", pointer, "two")

    async def poll(node):
        body = {"topics": {"t": {}, "u": {}}}
        topics = (await node.call("POST", "/v1/namespaces/ns/poll?isolation=committed", json=body)).json()["topics"]
        return [len(topics[each]["messages"]) for each in "tu"]

    assert [await poll(node) for node in nodes.values()] == [[0, 0]] * 3
    await commit(nodes["c"], pointer)
    assert [await poll(node) for node in nodes.values()] == [[1, 1]] * 3


async def test_namespace_properties_are_in_force_at_every_instance_when_the_change_is_answered(nodes):
    for chosen in ("disabled", "enabled", "inherit"):
        await nodes["c"].call("PUT", "/v1/namespaces/ns/properties", json={"deduplication": chosen})
        for node in nodes.values():
            assert node.service.namespaces.properties("ns") == {"deduplication": chosen}


async def test_tephras_clients_are_answered_at_any_instance(nodes):
    begun = []
    for number, node in enumerate(nodes.values()):
        answer = await RoutedTephraMethods(node.service.authority, node.cluster.owners).answer(
            encode_call("startShort", number)
        )
        begun.append(decode_reply(answer, "startShort", number).transaction_id)
    assert begun == sorted(set(begun))
    assert nodes["a"].service.authority.embedded.figures().open == 3


async def test_tephra_clients_get_an_error_when_the_service_cannot_be_reached(nodes, monkeypatch):
    monkeypatch.setattr(broker.cluster.owners, "PATIENCE_S", 0.1)
    nodes.move(SERVICE_NAME, None)
    await until(lambda: nodes["a"].service.authority.embedded is None)
    answer = await RoutedTephraMethods(nodes["b"].service.authority, nodes["b"].cluster.owners).answer(
        encode_call("startShort", 1)
    )
    with pytest.raises(ApplicationError, match="no instance owns"):
        decode_reply(answer, "startShort", 1)


async def past(at_ms):
    """Wait until the system clock, which all instances use, is past this time."""
    await until(lambda: time.time_ns() // 1_000_000 > at_ms)


async def shown(node, topic, at_ms, **more):
    return await node.poll(topic, asOfMs=at_ms, **more)


async def test_a_poll_as_of_a_moment_is_the_same_through_every_instance_in_every_topic(nodes):
    # Long transactions do not time out on a slow machine.
    early, late = [(await nodes[name].call("POST", SERVICE, json={"type": "long"})).json()["id"] for name in "ab"]
    for topic in "tu":
        await publish_under(nodes["c"], topic, late, "late")
        await publish_under(nodes["a"], topic, early, "early")
    decided_ms = []
    for pointer in (early, late):
        await commit(nodes["c"], pointer)
        told = (await nodes["b"].call("GET", f"{SERVICE}/{pointer}")).json()
        decided_ms.append(told["decidedMs"])
        await past(told["decidedMs"])
        # After this poll, no decision gets a time at or before the moment that it read.
        assert len(await shown(nodes["b"], "u", told["decidedMs"])) == len(decided_ms)
    assert decided_ms[0] < decided_ms[1]
    for node in nodes.values():
        for topic in "tu":
            assert await shown(node, topic, decided_ms[0] - 1) == []
            assert await shown(node, topic, decided_ms[0]) == ["early"]
            assert await shown(node, topic, decided_ms[1] - 1) == ["early"]
            assert await shown(node, topic, decided_ms[1]) == ["late", "early"]


async def test_a_future_moment_is_refused_through_every_instance(nodes):
    body = {"asOfMs": time.time_ns() // 1_000_000 + 86_400_000}
    for node in nodes.values():
        for topic in "tu":
            await node.call("POST", f"{TOPICS}/{topic}/poll", json=body, status=400, code="invalid_parameter")


async def test_moments_are_unavailable_if_the_owner_of_the_service_does_not_know_them(nodes, monkeypatch):
    del nodes["a"].cluster.dispatcher.kinds["tx.as_of"]
    body = {"asOfMs": 1}
    with monkeypatch.context() as patch:
        patch.setattr(actors.replica, "PATIENCE_S", 0.2)
        await nodes["b"].call("POST", f"{TOPICS}/t/poll", json=body, status=503, code="transactions_unavailable")
    assert await committed(nodes["b"], "t") == []


async def test_check_at_any_one_instance_reports_an_old_transaction_wherever_the_service_is(nodes):
    # A long transaction does not time out on a slow machine.
    await nodes["a"].call("POST", SERVICE, json={"type": "long"})
    for node in nodes.values():
        line = [str(PLAINSONG), "check", "--url", f"http://{node.address}", "--max-transaction-age", "1s"]
        with trio.fail_after(PATIENCE_S):
            while True:
                done = await trio.run_process(line, capture_stdout=True, check=False, env=clean_environ())
                if done.returncode:
                    break
        assert done.returncode == 1
        assert b"a transaction has been open for" in done.stdout

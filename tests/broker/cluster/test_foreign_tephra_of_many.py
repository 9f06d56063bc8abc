"""Several instances with one external Tephra: each applies its decisions, and one runs the passes for all."""

from __future__ import annotations

from functools import partial

import pytest
import trio

from actors.observe import SystemClock
from actors.pointers import PointerIndex
from broker.config.config import config_of
from broker.http.budgets import BodyBudget
from broker.http.reactor import open_reactor
from broker.thrift import TephraMethods, serve_thrift
from plainsong.protocol.transactions.ledger import TransactionSettings
from storage.base import SERVICE_NAME
from storage.memory import MemoryStore
from tests.asked_service import AskedService
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.patience import PATIENCE_S
from tests.waiting import until

SERVICE = "/v1/transactions"


async def a_tephra(nursery):
    """Start a separate transaction service with Tephra's interface and no topics; return it and its address."""

    async def no_topic(name, ask):
        raise AssertionError(f"{name} was asked {ask}")

    service = AskedService(MemoryStore(), SystemClock(), PointerIndex(), no_topic, TransactionSettings())
    loaded = trio.Event()
    nursery.start_soon(service.run, loaded.set)
    await loaded.wait()
    settings = config_of({}).http

    async def serve(task_status):
        async with open_reactor(settings.keep_alive_s) as reactor:
            await serve_thrift(
                "127.0.0.1:0",
                TephraMethods(service),
                budget=BodyBudget(1 << 20),
                stop=trio.Event(),
                grace_s=1,
                settings=settings,
                reactor=reactor,
                task_status=task_status,
            )

    (address,) = await nursery.start(serve)
    return service, address


@pytest.fixture
async def harness(nursery, monkeypatch):
    """The Tephra, and instances a, b and c with one topic each (``at_a`` and so on); a runs the passes."""
    monkeypatch.setattr("actors.tephra.STALE_AFTER", 2_000)  # a state that is refreshed often does not become stale
    tephra, address = await a_tephra(nursery)
    settings = {"service": "tephra", "tephra": address, "tephra_refresh_s": 0.05, "max_lifetime_s": 0}
    given = {f"transactions__{name}": value for name, value in settings.items()}
    async with cluster("a", "b", "c", **given, retention__interval_s=1) as nodes:
        nodes.move(SERVICE_NAME, "a")
        for name in "abc":
            nodes.move(f"ns:at_{name}", name)
            await nodes[name].create(f"at_{name}")
        yield tephra, nodes
    tephra.close()
    nursery.cancel_scope.cancel()


async def publish_under(node, topic, pointer, *payloads, **more):
    body = {"messages": list(payloads), "transactionWritePointer": pointer}
    return await node.call("POST", f"{TOPICS}/{topic}/publish", json=body, **more)


async def committed(node, topic):
    """Return what a committed reader gets; None if the node has no state of the Tephra yet."""
    answer = await node.http.post(f"{TOPICS}/{topic}/poll?isolation=committed", json={})
    return [each["payload"] for each in answer.json()] if answer.status_code == 200 else None


async def soon(ask, wanted):
    """Wait for as many refreshes as necessary."""
    with trio.fail_after(PATIENCE_S):
        while await ask() != wanted:  # noqa: ASYNC110 - there is no notification of a refresh
            await trio.sleep(0.01)


async def test_decisions_of_the_tephra_arrive_through_any_instance(harness):
    tephra, nodes = harness
    done, undone, doing = [(await tephra.begin()).transaction.write_pointer for _ in range(3)]
    for name in "abc":
        for pointer, payload in ((done, "done"), (undone, "undone"), (doing, "doing")):
            await publish_under(nodes["b"], f"at_{name}", pointer, payload)
    await tephra.commit(done)
    await tephra.invalidate(undone)
    for name in "abc":
        for node in nodes.values():
            await soon(partial(committed, node, f"at_{name}"), ["done"])
    await soon(partial(refused, nodes["c"], "at_b", undone), "transaction_not_in_progress")


async def refused(node, topic, pointer):
    body = {"messages": ["late"], "transactionWritePointer": pointer}
    return (await node.http.post(f"{TOPICS}/{topic}/publish", json=body)).json().get("code")


async def test_a_decision_holds_at_the_next_owner_of_a_topic(harness):
    tephra, nodes = harness
    first, second = [(await tephra.begin()).transaction.write_pointer for _ in range(2)]
    await publish_under(nodes["a"], "at_b", first, "one")
    await publish_under(nodes["a"], "at_b", second, "two")
    nodes.move("ns:at_b", "c")
    await tephra.commit(second)
    await soon(partial(committed, nodes["b"], "at_b"), [])
    await publish_under(nodes["b"], "at_b", first, "three")
    await tephra.commit(first)
    for node in nodes.values():
        await soon(partial(committed, node, "at_b"), ["one", "two", "three"])


async def test_one_instance_rolls_back_invalid_messages_in_the_topics_of_all(harness):
    tephra, nodes = harness
    pointer = (await tephra.begin()).transaction.write_pointer
    for name in "abc":
        await publish_under(nodes["c"], f"at_{name}", pointer, "never")
    for node in nodes.values():
        figures = (await node.call("GET", f"{SERVICE}/pruning")).json()
        assert figures["safeBound"] is None
    await tephra.invalidate(pointer)

    async def undecided():
        return [
            (await nodes["a"].call("GET", f"{TOPICS}/at_{name}/stats")).json()["openTransactions"] for name in "abc"
        ]

    await soon(undecided, [0, 0, 0])
    await until(lambda: nodes["a"].service.authority.foreign.pruning().last_pass_ms)
    for node in nodes.values():
        figures = (await node.call("GET", f"{SERVICE}/pruning")).json()
        assert figures["oldestInvalid"] == pointer
        assert {each["topic"] for each in figures["oldestByTopic"]} == {"ns:at_a", "ns:at_b", "ns:at_c"}
    assert [name for name in "abc" if nodes[name].service.authority.invalids] == ["a"]

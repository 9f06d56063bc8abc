"""Several instances on one HBase whose transactions are decided elsewhere: by Tephra, or by an unknown service."""

from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest
import trio

from actors.tephra import TephraClient
from plainsong.protocol.tephra.state import encode_transaction
from plainsong.protocol.transactions.transaction import Transaction
from tests.cluster.harness import Cluster, Instance, open_cluster
from tests.daemon.harness import Daemon, free_port
from tests.daemon.talk import JSON_HEADERS, Answer, ConnectionLost, NotConnected, Talk, topic_path
from tests.patience import PATIENCE_S

#: Instances are killed here, HBase is not: a stall of the machine must not look like its failure.
CALM = ("cluster.session_timeout_s=10", "storage.hbase.timeout_s=30")
#: Errors after which a client retries.
LATER = ("no_owner", "recovering", "transactions_unavailable", "overloaded", "shutting_down")


@pytest.fixture
def tephra(tmp_path):
    """The Thrift port of a daemon that serves Tephra's clients, independent of the cluster."""
    port = free_port()
    with Daemon(tmp_path / "tephra", f"transactions.thrift=127.0.0.1:{port}", "storage.min_free_bytes=0"):
        yield port


async def ask(instance: Instance, method: str, path: str, value: Any = None) -> Answer:
    """Return the first answer that is not a request to try again."""
    body = b"" if value is None else json.dumps(value).encode()
    with trio.fail_after(PATIENCE_S):
        while True:
            try:
                async with await Talk.to(instance.address) as talk:
                    answer = await talk.ask(method, path, body, JSON_HEADERS)
            except (ConnectionLost, NotConnected):
                pass
            else:
                if answer.code not in LATER:
                    return answer
            await trio.sleep(0.05)


async def publish(instance: Instance, topic: str, payload: str, pointer: int) -> None:
    body = {"messages": [payload], "transactionWritePointer": pointer}
    answer = await ask(instance, "POST", topic_path(topic, "/publish"), body)
    assert answer.status == 200, answer


async def committed(instance: Instance, topic: str, wanted: list[str], snapshot: bytes | None = None) -> None:
    """Wait until a committed reader, or one with a snapshot, gets exactly these messages."""
    body: dict[str, Any] = {"isolation": "committed"}
    if snapshot is not None:
        body = {"transaction": base64.b64encode(snapshot).decode()}
    found: list[str] | None = None
    with trio.fail_after(PATIENCE_S):
        while found != wanted:
            answer = await ask(instance, "POST", topic_path(topic, "/poll"), body)
            assert answer.status == 200, answer
            found = [each["payload"] for each in answer.json()]


async def owner_of(cluster: Cluster, topic: str) -> Instance:
    """Return the topic's owner according to the first instance that is up."""
    while True:
        instance = cluster.up[0]
        shown = (await ask(instance, "GET", f"/v1/cluster?topic=ring:{topic}")).json()["topic"]["owner"]
        found = [each for each in cluster.up if each.name == shown]
        if found:
            return found[0]
        await trio.sleep(0.05)


async def test_decisions_of_a_tephra_hold_while_a_topic_changes_hands(hbase, tmp_path, tephra):
    settings = ["transactions.service=tephra", f"transactions.tephra=127.0.0.1:{tephra}"]
    client = TephraClient("127.0.0.1", tephra, timeout_s=30)
    async with open_cluster(hbase, tmp_path, 2, *CALM, *settings, "transactions.tephra_refresh_s=0.1") as cluster:
        await ask(cluster[0], "PUT", topic_path("t"), {})
        done, undone, doing = [await client.call("startShortTimeout", 600) for _ in range(3)]
        for number, tx in enumerate((done, undone, doing)):
            await publish(cluster[number % 2], "t", f"{number}", tx.write_pointer)
        owner = await owner_of(cluster, "t")
        await owner.kill()
        assert await client.call("canCommitTx", done, set())
        assert await client.call("commitTx", done)
        await client.call("invalidateTx", undone.transaction_id)
        (other,) = cluster.up
        await committed(other, "t", ["0"])
        await publish(other, "t", "3", doing.write_pointer)
        reader = await client.call("startShort")
        await committed(other, "t", ["0"], encode_transaction(reader))
        await owner.start()
        assert await client.call("canCommitTx", doing, set())
        assert await client.call("commitTx", doing)
        for each in cluster.instances:
            await committed(each, "t", ["0", "2", "3"])
    await client.aclose()


async def test_without_a_service_clients_manage_pointers_themselves(hbase, tmp_path):
    first, second = [time.time_ns() + number for number in range(2)]
    seen = Transaction(read_pointer=second + 2, transaction_id=second + 1, write_pointer=second + 1, invalids=(second,))
    async with open_cluster(hbase, tmp_path, 2, *CALM, "transactions.service=off") as cluster:
        await ask(cluster[0], "PUT", topic_path("t"), {})
        await publish(cluster[0], "t", "first", first)
        await publish(cluster[1], "t", "second", second)
        for each in cluster.instances:
            await committed(each, "t", ["first"], encode_transaction(seen))
        owner = await owner_of(cluster, "t")
        await owner.stop()
        (other,) = cluster.up
        assert (
            await ask(other, "POST", topic_path("t", "/rollback"), {"transactionWritePointer": first})
        ).status == 200
        await committed(other, "t", [], encode_transaction(seen))
        async with await Talk.to(other.address) as talk:
            answer = await talk.ask("POST", topic_path("t", "/poll?isolation=committed"), b"{}", JSON_HEADERS)
        assert (answer.status, answer.code) == (503, "transactions_unavailable")

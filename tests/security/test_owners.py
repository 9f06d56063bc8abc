"""The instance that gets the request authenticates it; the topic's owner authorizes it by its own grants."""

from __future__ import annotations

from contextlib import asynccontextmanager
from hashlib import sha256

import pytest
import trio

from broker.api.messages.poll_many import Since
from broker.cluster.forward import _RoutedTopics
from broker.security.grants import parse_grants
from broker.security.identity import Identity
from plainsong.cli.cluster import security_differences
from plainsong.protocol.errors import Forbidden, Unauthenticated
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.names import TopicName
from storage.base import SERVICE_NAME
from tests.broker.cluster.in_process import TOPICS, cluster
from tests.security.named import GRANTS, Files
from tests.waiting import until

HERE, THERE = TopicName("ns", "here"), TopicName("ns", "there")
ONLY_HERE = GRANTS.replace('"ns:a", "shop:x-*"', '"ns:here"')
BOTH = GRANTS.replace('"ns:a", "shop:x-*"', '"ns:here", "ns:there"')


@asynccontextmanager
async def instances(folder):
    """Instance ``a`` gets all requests; ``b`` owns one of two topics with one message each, and grants less."""
    files = Files(folder)
    files.grant(BOTH)
    async with cluster("a", "b", **files.settings) as nodes:
        nodes.move(HERE, "a")
        nodes.move(THERE, "b")
        for name in (HERE, THERE):
            operator = files.header("operator")
            await nodes["a"].call("PUT", f"{TOPICS}/{name.topic}", json={}, headers=operator)
            body = {"messages": [f"of {name.topic}"]}
            await nodes["a"].call("POST", f"{TOPICS}/{name.topic}/publish", json=body, headers=operator)
        yield nodes, files


async def polled(nodes, files, name, **body):
    body = {"topics": {"here": {}, "there": {}}, **body}
    answer = await nodes["a"].call("POST", "/v1/namespaces/ns/poll", json=body, headers=files.header(name))
    return {
        topic: each.get("error", {}).get("code") or each["messages"] for topic, each in answer.json()["topics"].items()
    }


async def test_of_many_topics_each_owner_refuses_its_own(tmp_path):
    async with instances(tmp_path) as (nodes, files):
        each = await polled(nodes, files, "narrow")
        assert [each[topic][0]["payload"] for topic in ("here", "there")] == ["of here", "of there"]
        nodes["b"].service.security.guard.replace(grants=parse_grants(ONLY_HERE.encode()))
        for body in ({}, {"waitMs": 1000}):
            each = await polled(nodes, files, "narrow", **body)
            assert (each["here"][0]["payload"], each["there"]) == ("of here", "forbidden")
        each = await polled(nodes, files, "reader")
        assert each["there"][0]["payload"] == "of there"


async def test_an_owner_gives_no_page_and_no_span_to_a_name_that_it_does_not_know(tmp_path):
    async with instances(tmp_path) as (nodes, _):
        owners, local = nodes["a"].cluster.owners, None
        there = Since(THERE, FIRST_BOUND)
        (span,) = await _RoutedTopics(local, owners, Identity("reader", "token")).look([there])
        for who, refusal in ((Identity("stranger", "token"), Forbidden), (Identity("anonymous"), Unauthenticated)):
            access = _RoutedTopics(local, owners, who)
            for found in (await access.look([there]), await access.wait([there], trio.current_time() + 5)):
                assert type(found[0]) is refusal
            with pytest.raises(refusal):
                await access.page(THERE, span, 10, 1 << 20, None)


async def test_no_other_name_rolls_back_a_transaction_at_an_owner_that_does_not_have_the_service(tmp_path):
    files = Files(tmp_path)
    async with cluster("a", "b", **files.settings, transactions__service="embedded") as nodes:
        nodes.move(SERVICE_NAME, "a")
        nodes.move(THERE, "b")
        await until(lambda: nodes["a"].is_deciding and nodes["b"].is_deciding)

        async def ask(name, path, body=None, status=200, at="a", method="POST"):
            return await nodes[at].call(method, path, json=body, status=status, headers=files.header(name))

        await ask("operator", f"{TOPICS}/there", {}, method="PUT")
        pointer = (await ask("owner", "/v1/transactions")).json()["writePointer"]
        body = {"transactionWritePointer": pointer}
        await ask("owner", f"{TOPICS}/there/publish", {**body, "messages": ["m"]})
        for at in ("a", "b"):
            await ask("writer", f"{TOPICS}/there/rollback", body, 403, at)
            await ask("other", f"{TOPICS}/there/rollback", body, 403, at)
        await ask("owner", f"/v1/transactions/{pointer}/commit")


async def test_the_cluster_shows_instances_whose_security_files_differ(tmp_path):
    async with instances(tmp_path) as (nodes, files):

        async def shown(at):
            answer = await nodes[at].call("GET", "/v1/cluster", headers=files.header("operator"))
            return {each["name"]: each["security"] for each in answer.json()["instances"]}

        before = await shown("a")
        assert before["a"] == before["b"] == (await shown("b"))["a"]
        assert before["a"]["grants"] == sha256(files.grants_path.read_bytes()).hexdigest()[:12]
        ids = "\n".join(sorted(entry.id for entry in files.entries))
        assert before["a"]["tokens"] == sha256(ids.encode()).hexdigest()[:12]
        files.grant(ONLY_HERE)
        files.change("stranger", revoked_ms=1)
        for what, path in (("grants", files.grants_path), ("tokens", files.tokens_path)):
            await nodes["b"].service.security.files._look_at(what, path)
        for at in ("a", "b"):
            after = await shown(at)
            assert after["a"] == before["a"]
            assert after["b"]["grants"] == sha256(ONLY_HERE.encode()).hexdigest()[:12]
            assert after["b"]["tokens"] != before["b"]["tokens"]
        (of_grants, of_tokens) = security_differences(
            [{"name": name, "security": each} for name, each in after.items()]
        )
        assert of_grants.startswith(
            "warning: the grants of the instances differ, so a name has different rights at different instances"
        )
        assert "at a; " in of_tokens or of_tokens.endswith("at a")


def test_instances_whose_files_are_the_same_or_unknown_cause_no_warning():
    same = {"grants": "12" * 6, "tokens": "ab" * 6}
    assert not security_differences([{"name": "a", "security": same}, {"name": "b", "security": dict(same)}])
    assert not security_differences([{"name": "a", "security": same}, {"name": "b", "security": None}, {"name": "c"}])

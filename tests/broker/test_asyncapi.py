"""The AsyncAPI description of topics has one channel for each topic that the caller may see."""

from __future__ import annotations

import json
import re

import pytest
from broker_in_process import TOPICS

from broker.api.description import asyncapi
from broker.api.description.asyncapi import describe_topics
from broker.security.rights import EVERYTHING
from plainsong.protocol.names import TopicName
from tests.security.named import named

ROUTE = "/asyncapi.json"


async def test_each_topic_is_a_channel_and_each_permitted_action_an_operation(daemon):
    await daemon.create("orders")
    await daemon.call("PUT", "/v1/namespaces/other/topics/orders", json={})
    found = (await daemon.call("GET", ROUTE)).json()
    assert found["asyncapi"] == "3.0.0"
    assert list(found["channels"]) == ["ns:orders", "other:orders"]
    assert found["channels"]["ns:orders"]["address"] == f"{TOPICS}/orders"
    assert {
        (operation["action"], operation["summary"])
        for operation in found["operations"].values()
        if operation["channel"]["$ref"] == "#/channels/ns:orders"
    } == {
        ("receive", f"POST {TOPICS}/orders/publish"),
        ("send", f"POST {TOPICS}/orders/poll"),
        ("send", f"GET {TOPICS}/orders/events"),
    }
    assert found["servers"]["daemon"]["protocol"] == "http"


async def test_match_selects_the_topics(daemon):
    for topic in ("orders", "orders-eu", "refunds"):
        await daemon.create(topic)
    found = (await daemon.call("GET", f"{ROUTE}?match=ns:orders*")).json()
    assert list(found["channels"]) == ["ns:orders", "ns:orders-eu"]
    await daemon.call("GET", f"{ROUTE}?match=orders", status=400, code="invalid_parameter")


async def test_a_document_is_bounded_and_says_how_to_stay_within_the_bound(daemon, monkeypatch):
    monkeypatch.setattr(asyncapi, "MAX_CHANNELS", 2)
    for topic in ("a", "b", "c"):
        await daemon.create(topic)
    answer = await daemon.call("GET", ROUTE, status=400, code="invalid_parameter")
    assert "match=" in answer.json()["hint"]
    assert list((await daemon.call("GET", f"{ROUTE}?match=ns:a,ns:b")).json()["channels"]) == ["ns:a", "ns:b"]


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_a_caller_gets_its_own_topics_and_permissions(tmp_path, listener):
    async with named(tmp_path, listener=listener) as daemon:
        for topic in ("a", "b"):
            assert (await daemon.ask("operator", "PUT", f"{TOPICS}/{topic}", json={})).status_code == 200

        async def seen(name):
            found = (await daemon.ask(name, "GET", ROUTE)).json()
            return list(found["channels"]), sorted(found["operations"])

        assert await seen("stranger") == ([], [])
        assert await seen("narrow") == (["ns:a"], ["follow ns:a", "poll ns:a"])
        assert await seen("writer") == (["ns:a", "ns:b"], ["publish ns:a", "publish ns:b"])
        assert await seen("watcher") == (["ns:a", "ns:b"], [])
        assert (await daemon.ask(None, "GET", ROUTE)).status_code == 401


def test_every_reference_resolves():
    document = describe_topics([TopicName("ns", "t-1")], EVERYTHING, "1.2.3", "localhost:7420", is_tls=True)
    assert document["servers"]["daemon"] == {"host": "localhost:7420", "protocol": "https"}
    references = re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document))
    assert len(references) == 4
    for reference in references:
        found = document
        for part in reference.split("/"):
            found = found[part]

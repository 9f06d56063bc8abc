"""Definitions over HTTP: one document of namespaces and topics, checked as a whole, and the same after a second time."""

from __future__ import annotations

import pytest

PATH = "/v1/definitions"
ORDERS = {"ttl": 60, "transactional": "optional", "deduplication": "enabled", "max_bytes": 1000}
WANTED = {
    "format": 1,
    "namespaces": {"shop": {"deduplication": "disabled"}},
    "topics": {"shop:orders": ORDERS, "ns:t": {"ttl": 5}},
}
NOTHING = {"created": [], "changed": [], "deleted": [], "unchanged": []}


async def put(daemon, document, query="", **more):
    return (await daemon.call("PUT", PATH + query, json=document, **more)).json()


async def test_an_import_makes_what_the_document_says_and_twice_changes_nothing(daemon):
    await daemon.create("t", ttl=60)
    await daemon.create("kept")
    done = await put(daemon, WANTED)
    paths = ["namespaces/shop", "topics/shop:orders"]
    assert done == {"created": paths, "changed": ["topics/ns:t"], "deleted": [], "unchanged": []}
    assert await put(daemon, WANTED) == NOTHING | {
        "unchanged": ["namespaces/shop", "topics/ns:t", "topics/shop:orders"]
    }
    found = (await daemon.call("GET", PATH)).json()
    assert found["topics"]["shop:orders"] == ORDERS
    assert found["topics"]["ns:t"]["ttl"] == 5
    assert set(found["topics"]) == {"ns:kept", "ns:t", "shop:orders"}
    assert found["namespaces"] == {"shop": {"deduplication": "disabled"}}
    assert not (await put(daemon, found))["changed"]


async def test_what_is_not_named_is_deleted_only_when_that_is_asked_for(daemon):
    await daemon.create("t")
    await daemon.create("gone")
    await put(daemon, WANTED)
    document = {"format": 1, "topics": {"ns:t": {"ttl": 5}}}
    assert (await put(daemon, document))["deleted"] == []
    done = await put(daemon, document, "?prune=true")
    assert done["deleted"] == ["namespaces/shop", "topics/ns:gone", "topics/shop:orders"]
    found = (await daemon.call("GET", PATH)).json()
    assert (set(found["topics"]), found["namespaces"]) == ({"ns:t"}, {})


async def test_a_dry_run_says_what_would_happen_and_nothing_does(daemon):
    await daemon.create("t", ttl=60)
    before = (await daemon.call("GET", PATH)).json()
    would = await put(daemon, WANTED, "?dryRun=true&prune=true")
    assert would["dryRun"]
    assert (would["action"], would["target"]) == ("definitions.import", "service")
    assert would["effect"]["created"] == ["namespaces/shop", "topics/shop:orders"]
    assert would["changed"] == ["namespaces/shop", "topics/ns:t", "topics/shop:orders"]
    assert would["before"]["topics/ns:t"]["ttl"] == 60
    assert would["after"]["topics/ns:t"]["ttl"] == 5
    assert would["warnings"] == ["topic ns:t gets a shorter ttl, which hides older messages"]
    assert (await daemon.call("GET", PATH)).json() == before


@pytest.mark.parametrize(
    ("document", "code"),
    [
        (None, "invalid_parameter"),
        ({}, "invalid_parameter"),
        ({"format": 2}, "invalid_parameter"),
        ({"format": 1, "topic": {}}, "invalid_parameter"),
        ({"format": 1, "topics": []}, "invalid_parameter"),
        ({"format": 1, "topics": {"orders": {}}}, "invalid_parameter"),
        ({"format": 1, "topics": {"a:b": {}, "a:c/d": {}}}, "invalid_name"),
        ({"format": 1, "topics": {"a:b": {}, "a:c": {"ttl": 0}}}, "invalid_property"),
        ({"format": 1, "topics": {"a:b": {}}, "namespaces": {"a": {"x": 1}}}, "invalid_property"),
        ({"format": 1, "pins": {"a:b": 7}}, "invalid_parameter"),
    ],
)
async def test_a_document_that_is_wrong_anywhere_changes_nothing(daemon, document, code):
    await daemon.call("PUT", PATH, json=document, status=400, code=code)
    assert (await daemon.call("GET", PATH)).json()["topics"] == {}


async def test_pins_need_a_cluster_and_topics_of_the_system_are_its_own(daemon):
    await put(daemon, {"format": 1, "pins": {"a:b": "host-1"}}, status=409, code="conflict")
    document = {"format": 1, "topics": {"a:b": {}, "system:audit": {}}}
    await put(daemon, document, status=403, code="forbidden")
    assert (await daemon.call("GET", PATH)).json()["topics"] == {}


async def test_toml_is_read_as_json_is(daemon):
    text = '[topics."shop:orders"]\nttl = 60\n'
    toml = {"Content-Type": "application/toml"}
    done = await daemon.call("PUT", PATH, content=b"format = 1\n" + text.encode(), headers=toml)
    assert done.json()["created"] == ["topics/shop:orders"]
    await daemon.call("PUT", PATH, content=b"format = ", headers=toml, status=400, code="malformed_body")

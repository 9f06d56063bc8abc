"""Definitions over HTTP: one document with namespaces and topics, checked as a whole and safe to import twice."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS

from broker.api.change import NOTHING

PATH = "/v1/definitions"
ORDERS = {"ttl": 60, "transactional": "optional", "deduplication": "enabled", "max_bytes": 1000}
WANTED = {
    "format": 1,
    "namespaces": {"shop": {"deduplication": "disabled"}},
    "topics": {"shop:orders": ORDERS, "ns:t": {"ttl": 5}},
}
LISTS = {"created": [], "changed": [], "deleted": [], "unchanged": []}


async def put(daemon, document, query="", **more):
    return (await daemon.call("PUT", PATH + query, json=document, **more)).json()


def lists(done):
    return {verdict: done[verdict] for verdict in LISTS}


async def test_an_import_applies_the_document_and_a_second_one_changes_nothing(daemon):
    await daemon.create("t", ttl=60)
    await daemon.create("kept")
    done = await put(daemon, WANTED)
    paths = ["namespaces/shop", "topics/shop:orders"]
    assert lists(done) == {"created": paths, "changed": ["topics/ns:t"], "deleted": [], "unchanged": []}
    assert lists(await put(daemon, WANTED)) == LISTS | {
        "unchanged": ["namespaces/shop", "topics/ns:t", "topics/shop:orders"]
    }
    found = (await daemon.call("GET", PATH)).json()
    assert found["topics"]["shop:orders"] == ORDERS
    assert found["topics"]["ns:t"]["ttl"] == 5
    assert set(found["topics"]) == {"ns:kept", "ns:t", "shop:orders"}
    assert found["namespaces"] == {"shop": {"deduplication": "disabled"}}
    assert not (await put(daemon, found))["changed"]


async def test_topics_missing_from_the_document_are_deleted_only_on_request(daemon):
    await daemon.create("t")
    await daemon.create("gone")
    await put(daemon, WANTED)
    document = {"format": 1, "topics": {"ns:t": {"ttl": 5}}}
    assert (await put(daemon, document))["deleted"] == []
    done = await put(daemon, document, "?prune=true")
    assert done["deleted"] == ["namespaces/shop", "topics/ns:gone", "topics/shop:orders"]
    found = (await daemon.call("GET", PATH)).json()
    assert (set(found["topics"]), found["namespaces"]) == ({"ns:t"}, {})


async def test_a_prune_of_one_namespace_deletes_only_topics_there(daemon):
    await daemon.create("gone")
    await put(daemon, WANTED)
    document = {"format": 1, "topics": {"ns:t": {"ttl": 5}}}
    done = await put(daemon, document, "?prune=true&namespace=ns")
    assert done["deleted"] == ["topics/ns:gone"]
    found = (await daemon.call("GET", PATH)).json()
    assert (set(found["topics"]), set(found["namespaces"])) == ({"ns:t", "shop:orders"}, {"shop"})
    await daemon.call("PUT", PATH + "?namespace=ns", json=document, status=400, code="invalid_parameter")


async def test_a_dry_run_reports_the_changes_and_makes_none(daemon):
    await daemon.create("t", ttl=60)
    before = (await daemon.call("GET", PATH)).json()
    would = await put(daemon, WANTED, "?dryRun=true&prune=true")
    assert would["dryRun"]
    assert (would["action"], would["target"]) == ("definitions.import", "service")
    assert would["effect"]["created"] == ["namespaces/shop", "topics/shop:orders"]
    assert would["changed"] == ["namespaces/shop", "topics/ns:t", "topics/shop:orders"]
    # Every preview shows properties in the form in which clients read and set them.
    shown = (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]
    del shown["generation"]
    alone = (await daemon.call("PUT", f"{TOPICS}/t/properties?dryRun=true", json={"ttl": 5})).json()
    assert would["before"]["topics/ns:t"] == alone["before"] == shown
    assert would["after"]["topics/ns:t"] == alone["after"]
    assert would["after"]["topics/shop:orders"]["max_bytes"] == "1000"
    assert would["warnings"] == []
    assert (await daemon.call("GET", PATH)).json() == before


async def test_an_import_counts_hidden_and_removed_messages_like_its_dry_run(daemon):
    await daemon.create("t", ttl=60)
    await daemon.create("gone")
    await daemon.publish("a", "b", ms=START_MS)
    await daemon.publish("c", topic="gone", ms=START_MS + 1)
    await daemon.publish("d", ms=START_MS + 10_000)
    would = await put(daemon, WANTED, "?dryRun=true&prune=true")
    assert len(await daemon.poll()) == 3
    hides, removes = would["effect"]["hides"], would["effect"]["removes"]
    assert (hides["messages"], hides["oldestMs"], hides["newestMs"]) == (2, START_MS, START_MS)
    assert (removes["messages"], removes["oldestMs"]) == (1, START_MS + 1)
    assert [(each["topic"], *sorted(each)) for each in would["effect"]["topics"]] == [
        ("ns:gone", "removes", "topic"),
        ("ns:t", "hides", "topic"),
    ]
    assert would["warnings"] == [
        "topic ns:gone is deleted with 1 message",
        "topic ns:t gets a shorter ttl, which hides 2 messages",
    ]
    done = await put(daemon, WANTED, "?prune=true")
    assert (done["dryRun"], done["effect"]) == (False, would["effect"])
    assert done["warnings"] == [
        "topic ns:gone was deleted with 1 message",
        "topic ns:t got a shorter ttl, which hides 2 messages",
    ]
    assert [each["payload"] for each in await daemon.poll()] == ["d"]
    again = await put(daemon, WANTED, "?prune=true")
    assert (again["effect"]["hides"], again["effect"]["topics"], again["warnings"]) == (dict(NOTHING), [], [])


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
async def test_a_document_with_any_error_changes_nothing(daemon, document, code):
    await daemon.call("PUT", PATH, json=document, status=400, code=code)
    assert (await daemon.call("GET", PATH)).json()["topics"] == {}


async def test_pins_need_a_cluster_and_system_topics_cannot_be_imported(daemon):
    await put(daemon, {"format": 1, "pins": {"a:b": "host-1"}}, status=409, code="conflict")
    document = {"format": 1, "topics": {"a:b": {}, "system:audit": {}}}
    await put(daemon, document, status=403, code="forbidden")
    assert (await daemon.call("GET", PATH)).json()["topics"] == {}


async def test_toml_is_read_like_json(daemon):
    text = '[topics."shop:orders"]\nttl = 60\n'
    toml = {"Content-Type": "application/toml"}
    done = await daemon.call("PUT", PATH, content=b"format = 1\n" + text.encode(), headers=toml)
    assert done.json()["created"] == ["topics/shop:orders"]
    await daemon.call("PUT", PATH, content=b"format = ", headers=toml, status=400, code="malformed_body")


@pytest.mark.parametrize(
    "value", ["0x" + "f" * 6000, "{a" + ".a" * 1000 + " = 1}", "inf", "1979-05-27"], ids=["long", "deep", "inf", "date"]
)
@pytest.mark.parametrize("name", ["topics.'ns:t'.ttl", "topics.'ns:t'.chain", "namespaces.ns.deduplication"])
async def test_a_toml_value_that_python_cannot_print_is_refused(daemon, name, value):
    text = f"format = 1\n{name} = {value}\n"
    answer = await daemon.http.put(PATH, content=text, headers={"Content-Type": "application/toml"})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_property")


@pytest.mark.parametrize(
    "text",
    ["topics" + ".a" * 20_000 + " = 1", "[topics" + ".a" * 20_000 + "]", ("x" + ".a" * 500 + " = 1\n") * 30],
    ids=["key", "table", "lines"],
)
async def test_toml_whose_keys_would_take_the_parser_very_long_is_refused_unparsed(daemon, text, monkeypatch):
    monkeypatch.setattr("tomllib.loads", lambda _: pytest.fail("it was parsed"))
    answer = await daemon.http.put(PATH, content=f"format = 1\n{text}\n", headers={"Content-Type": "application/toml"})
    assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body")
    assert "nested too deeply" in answer.json()["detail"]

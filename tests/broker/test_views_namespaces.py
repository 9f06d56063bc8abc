"""Namespaces over HTTP: listing, and settings for their topics: durable, in force at once, overridden by topics."""

from __future__ import annotations

import pytest
from broker_in_process import TOPICS, in_process

NAMESPACES = "/v1/namespaces"
PROPERTIES = f"{NAMESPACES}/ns/properties"


async def enabled(daemon, topic="t"):
    """Return whether a topic deduplicates, and the level that decides it."""
    told = (await daemon.call("GET", f"{TOPICS}/{topic}")).json()["deduplication"]
    return told["enabled"], told["level"]


async def set_namespace(daemon, value):
    return (await daemon.call("PUT", PROPERTIES, json={"deduplication": value})).json()


async def test_namespaces_are_those_with_topics_or_properties(daemon):
    assert (await daemon.call("GET", NAMESPACES)).json() == []
    for namespace in ("b", "a", "gone"):
        await daemon.call("PUT", f"{NAMESPACES}/{namespace}/topics/t")
    await daemon.call("DELETE", f"{NAMESPACES}/gone/topics/t")
    await set_namespace(daemon, "disabled")
    assert (await daemon.call("GET", NAMESPACES)).json() == ["a", "b", "ns"]
    await set_namespace(daemon, "inherit")
    assert (await daemon.call("GET", NAMESPACES)).json() == ["a", "b"]


async def test_an_unconfigured_namespace_has_the_defaults(daemon):
    assert (await daemon.call("GET", PROPERTIES)).json() == {
        "name": "ns",
        "properties": {"deduplication": "inherit"},
        "deduplication": {"enabled": True, "level": "service"},
    }


async def test_the_topic_overrides_its_namespace_and_that_overrides_the_service(daemon):
    await daemon.create()
    assert await enabled(daemon) == (True, "service")
    assert (await set_namespace(daemon, "disabled"))["properties"] == {"deduplication": "disabled"}
    assert await enabled(daemon) == (False, "namespace")
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"deduplication": "enabled"})
    assert await enabled(daemon) == (True, "topic")
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"deduplication": "disabled"})
    assert await enabled(daemon) == (False, "topic")
    await daemon.call("PUT", f"{TOPICS}/t/properties")
    await daemon.call("PUT", PROPERTIES)
    assert await enabled(daemon) == (True, "service")


async def test_the_default_of_the_service_may_be_off():
    async with in_process(deduplication__default=False) as daemon:
        await daemon.create()
        assert await enabled(daemon) == (False, "service")
        await set_namespace(daemon, "enabled")
        assert await enabled(daemon) == (True, "namespace")


async def test_topics_in_namespace_system_do_not_deduplicate_unless_their_own_properties_enable_it(daemon):
    path = f"{NAMESPACES}/system/topics/t"
    await daemon.call("PUT", path)
    await daemon.call("PUT", f"{NAMESPACES}/system/properties", json={"deduplication": "enabled"})
    assert (await daemon.call("GET", path)).json()["deduplication"] == {"enabled": False, "level": "service"}
    await daemon.call("PUT", f"{path}/properties", json={"deduplication": "enabled"})
    assert (await daemon.call("GET", path)).json()["deduplication"] == {"enabled": True, "level": "topic"}


async def test_properties_of_a_namespace_survive_a_restart(daemon):
    await set_namespace(daemon, "disabled")
    async with in_process(store=daemon.store) as again:
        assert (await again.call("GET", PROPERTIES)).json()["properties"] == {"deduplication": "disabled"}
        await again.create()
        assert await enabled(again) == (False, "namespace")


@pytest.mark.parametrize(
    "body", [b"[]", b'{"deduplication": "maybe"}', b'{"deduplication": null}', b'{"deduplicate": "enabled"}', b"5"]
)
async def test_invalid_properties_are_refused(daemon, body):
    answer = await daemon.call("PUT", PROPERTIES, status=400, code="invalid_property", content=body)
    assert answer.json()["hint"]
    assert (await daemon.call("GET", PROPERTIES)).json()["properties"] == {"deduplication": "inherit"}


async def test_invalid_namespace_names_are_refused(daemon):
    await daemon.call("GET", f"{NAMESPACES}/n-s/properties", status=400, code="invalid_name")
    await daemon.call("PUT", f"{NAMESPACES}/n-s/properties", status=400, code="invalid_name", json={})


async def test_when_the_store_fails_the_outcome_is_unknown_and_nothing_changes(daemon):
    daemon.store.fail_next("write")
    await daemon.call("PUT", PROPERTIES, status=503, json={"deduplication": "disabled"})
    assert (await daemon.call("GET", PROPERTIES)).json()["deduplication"]["enabled"]
    await set_namespace(daemon, "disabled")

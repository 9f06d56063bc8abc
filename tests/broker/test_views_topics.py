"""Topics over HTTP: create, change, show, list, delete and restore."""

from __future__ import annotations

import pytest
from broker_in_process import TOPICS, in_process
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import metadata_key
from plainsong.protocol.names import TopicName

DEFAULTS = {"ttl": "604800", "generation": "1", "transactional": "optional", "deduplication": "inherit"}


async def test_a_topic_is_created_shown_and_all_its_properties_are_strings(daemon):
    answer = await daemon.call("PUT", f"{TOPICS}/t")
    assert answer.content == b""
    shown = (await daemon.call("GET", f"{TOPICS}/t")).json()
    assert shown == {"name": "t", "properties": DEFAULTS, "deduplication": {"enabled": True, "level": "service"}}


async def test_the_body_of_a_put_needs_no_content_type(daemon):
    await daemon.call("PUT", f"{TOPICS}/t", content=b'{"ttl": "60", "max_bytes": 1000}')
    shown = (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]
    assert shown == DEFAULTS | {"ttl": "60", "max_bytes": "1000"}


async def test_the_default_ttl_is_the_configured_one_at_creation_and_at_replacement():
    async with in_process(topic__default_ttl_s=77) as daemon:
        await daemon.create()
        assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["ttl"] == "77"
        await daemon.call("PUT", f"{TOPICS}/t/properties", content=b'{"ttl": 5}')
        await daemon.call("PUT", f"{TOPICS}/t/properties")
        assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["ttl"] == "77"


async def test_flat_topic_properties_answers_the_bare_map():
    async with in_process(http__flat_topic_properties=True) as daemon:
        await daemon.create()
        assert (await daemon.call("GET", f"{TOPICS}/t")).json() == DEFAULTS


async def test_a_second_creation_is_refused_unless_it_is_equal_and_allowed(daemon):
    await daemon.create(ttl=60)
    await daemon.call("PUT", f"{TOPICS}/t", status=409, code="topic_exists", json={"ttl": 60})
    await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", json={"ttl": 60})
    await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", status=409, code="topic_exists", json={"ttl": 61})
    await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=yes", status=400, code="invalid_parameter")
    await daemon.call("PUT", f"{TOPICS}/t?ifNotExist=true", status=400, code="invalid_parameter")


async def test_a_declared_topic_is_compared_in_the_given_properties(daemon):
    await daemon.create(ttl=60, max_bytes=100)
    for body in (None, {}, {"ttl": "60"}, {"max_bytes": 100}, {"transactional": "optional"}):
        await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", json=body)
    for body in ({"max_bytes": 101}, {"ttl": 60, "transactional": "disabled"}):
        await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", status=409, code="topic_exists", json=body)
    shown = (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]
    assert (shown["ttl"], shown["max_bytes"]) == ("60", "100")


async def test_a_generation_among_the_properties_is_accepted_and_ignored(daemon):
    await daemon.create()
    given = (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]
    await daemon.call("PUT", f"{TOPICS}/t/properties", json=given)
    await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", json=given)
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.call("PUT", f"{TOPICS}/t", json=given)
    assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["generation"] == "2"
    for other in (1, 7, "9", -1, None, "x", [3]):
        await daemon.call("PUT", f"{TOPICS}/t/properties", json={"generation": other, "ttl": 60})
        await daemon.call("PUT", f"{TOPICS}/t?ifNotExists=true", json={"generation": other, "ttl": 60})
    shown = (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]
    assert (shown["generation"], shown["ttl"]) == ("2", "60")
    await daemon.call("PUT", f"{TOPICS}/new", json={"generation": 5})
    assert (await daemon.call("GET", f"{TOPICS}/new")).json()["properties"]["generation"] == "1"


async def test_a_deleted_topic_is_gone_and_can_be_undeleted_with_its_messages(daemon):
    await daemon.create()
    await daemon.publish("a", "b")
    assert (await daemon.call("DELETE", f"{TOPICS}/t")).json()["effect"]["removes"]["messages"] == 2
    for method, path in (("GET", "t"), ("DELETE", "t"), ("GET", "t/stats"), ("PUT", "t/properties")):
        await daemon.call(method, f"{TOPICS}/{path}", status=404, code="topic_not_found")
    back = (await daemon.call("POST", f"{TOPICS}/t/undelete")).json()
    assert back["properties"]["generation"] == "1"
    assert [message["payload"] for message in await daemon.poll()] == ["a", "b"]
    await daemon.call("POST", f"{TOPICS}/t/undelete", status=409, code="topic_exists")
    await daemon.call("POST", f"{TOPICS}/never/undelete", status=404, code="topic_not_found")


async def test_recreation_raises_the_generation_and_restores_nothing(daemon):
    await daemon.create()
    await daemon.publish("old")
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.create()
    assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["generation"] == "2"
    assert await daemon.poll() == []


async def test_the_list_is_sorted_by_name_and_has_only_the_live_topics_of_this_namespace(daemon):
    assert (await daemon.call("GET", TOPICS)).json() == []
    names = ["a", "a-b", "a1", "aB", "a_", "B", "z" * 255, "gone"]
    for name in names:
        await daemon.create(name)
    await daemon.call("DELETE", f"{TOPICS}/gone")
    await daemon.call("PUT", "/v1/namespaces/ns2/topics/other")
    assert (await daemon.call("GET", TOPICS)).json() == sorted(set(names) - {"gone"})
    assert (await daemon.call("GET", "/v1/namespaces/ns2/topics")).json() == ["other"]


async def test_a_topic_whose_metadata_is_damaged_is_listed_and_reports_it_on_request(daemon):
    name = TopicName("ns", "broken")
    daemon.store.inner.apply([put_one(Table.METADATA, metadata_key(name), b"\xff?")])
    assert (await daemon.call("GET", TOPICS)).json() == ["broken"]
    await daemon.call("GET", f"{TOPICS}/broken", status=503, code="storage_failed")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", "malformed_body"),
        (b"\xff", "malformed_body"),
        (b'{"ttl": 1, "ttl": 2}', "malformed_body"),
        (b'{"ttl": NaN}', "malformed_body"),
        (b'{"ttl": 1} 2', "malformed_body"),
        (b"[" * 50_000, "malformed_body"),
        (b"[]", "invalid_property"),
        (b'"ttl"', "invalid_property"),
        (b'{"ttl": 0}', "invalid_property"),
        (b'{"ttl": null}', "invalid_property"),
        (b'{"ttl": 1.5}', "invalid_property"),
        (b'{"ttl": true}', "invalid_property"),
        (b'{"tttl": 1}', "invalid_property"),
        (b'{"transactional": "maybe"}', "invalid_property"),
        (b'{"max_bytes": -1}', "invalid_property"),
    ],
)
async def test_invalid_properties_are_refused_and_nothing_is_created(daemon, body, code):
    answer = await daemon.call("PUT", f"{TOPICS}/t", status=400, code=code, content=body)
    assert answer.json()["outcome"] == "not-applied"
    assert answer.json()["detail"]
    await daemon.call("GET", f"{TOPICS}/t", status=404, code="topic_not_found")


async def test_an_unknown_property_names_the_nearest_known_one(daemon):
    answer = await daemon.call("PUT", f"{TOPICS}/t", status=400, json={"maxbytes": 1})
    assert "max_bytes" in answer.json()["hint"]


@pytest.mark.parametrize("sent", ["announced", "in chunks"])
async def test_a_body_over_the_bound_of_its_route_is_refused(daemon, sent):
    body = b" " * (64 << 10) + b"{}"

    async def chunks():
        yield body[:1000]
        yield body[1000:]

    content = body if sent == "announced" else chunks()
    await daemon.call("PUT", f"{TOPICS}/t", status=413, code="body_too_large", content=content)
    await daemon.call("PUT", f"{TOPICS}/t", content=body[2:])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/namespaces/n-s/topics",
        "/v1/namespaces/n.s/topics/t",
        f"/v1/namespaces/{'n' * 256}/topics/t",
        f"{TOPICS}/{'t' * 256}",
        f"{TOPICS}/a.b",
        f"{TOPICS}/a%20b",
        f"{TOPICS}/%C3%A9",
        f"{TOPICS}/t%0A",
    ],
)
async def test_invalid_topic_and_namespace_names_are_refused(daemon, path):
    await daemon.call("GET", path, status=400, code="invalid_name")


@given(body=st.binary(max_size=40))
async def test_no_body_causes_an_internal_error(body):
    async with in_process() as daemon:
        answer = await daemon.http.request("PUT", f"{TOPICS}/t", content=body)
        assert answer.status_code in (200, 400)


async def test_a_store_that_fails_during_a_creation_is_an_unknown_outcome(daemon):
    daemon.store.fail_next("write")
    answer = await daemon.call("PUT", f"{TOPICS}/t", status=503, code="outcome_unknown")
    assert answer.json()["outcome"] == "unknown"
    assert answer.headers["retry-after"] == "1"
    await daemon.create()


# --- etags -----------------------------------------------------------------------------------------


async def etag_of(daemon):
    return (await daemon.call("GET", f"{TOPICS}/t")).headers["etag"]


async def test_the_etag_changes_with_each_change_and_only_then(daemon):
    await daemon.create(ttl=60)
    seen = [await etag_of(daemon)]
    await daemon.publish("a")
    assert await etag_of(daemon) == seen[0]
    for ms, properties in enumerate([{"ttl": 61}, {"ttl": 60}, {"ttl": 60}], 1):
        daemon.clock.ms += ms
        await daemon.call("PUT", f"{TOPICS}/t/properties", json=properties)
        seen.append(await etag_of(daemon))
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.create(ttl=60)
    seen.append(await etag_of(daemon))
    assert len(set(seen)) == len(seen)


async def test_a_conditional_change_is_refused_once_the_topic_has_changed(daemon):
    await daemon.create(ttl=60)
    old = {"If-Match": await etag_of(daemon)}
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": 61}, headers=old)
    refused = {"status": 412, "code": "precondition_failed"}
    answer = await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": 1}, headers=old, **refused)
    assert answer.json()["outcome"] == "not-applied"
    await daemon.call("DELETE", f"{TOPICS}/t", headers=old, **refused)
    assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["ttl"] == "61"
    either = {"If-Match": f'{old["If-Match"]} , "other", {await etag_of(daemon)}'}
    await daemon.call("PUT", f"{TOPICS}/t/properties", json={"ttl": 62}, headers=either)
    weak = {"If-Match": "W/" + await etag_of(daemon)}
    await daemon.call("DELETE", f"{TOPICS}/t", headers=weak, **refused)
    await daemon.call("DELETE", f"{TOPICS}/t", headers={"If-Match": "*"})


@pytest.mark.parametrize("given", ["unquoted", '"open', '"a" "b"', '"a",, x'])
async def test_an_if_match_that_is_not_an_etag_is_refused(daemon, given):
    await daemon.create()
    for method, path in (("PUT", "/properties"), ("DELETE", "")):
        refused = {"status": 400, "code": "invalid_parameter"}
        await daemon.call(method, f"{TOPICS}/t{path}", headers={"If-Match": given}, **refused)


async def test_a_missing_topic_is_not_found_whatever_the_etag(daemon):
    refused = {"status": 404, "code": "topic_not_found"}
    await daemon.call("DELETE", f"{TOPICS}/t", headers={"If-Match": '"1-0"'}, **refused)

"""Rules of every route: methods, slashes, request ids, compression, and no HTML pages."""

from __future__ import annotations

import re

import pytest
from broker_in_process import TOPICS, in_process

from broker.api.routes import ROUTES


def filled(path):
    return re.sub(r"{(\w+)}", lambda name: {"namespace": "ns"}.get(name[1], "x"), path)


PATHS = sorted({filled(route.path) for route in ROUTES})
#: GET parses this as a transaction with the id "truncate", which is not an id.
ALSO_AN_ID = "/v1/transactions/truncate"
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "TRACE", "PROPFIND")


def allowed_at(path):
    return {route.method for route in ROUTES if filled(route.path) == path}


async def test_other_methods_are_405_and_name_the_allowed_ones(daemon):
    for path in PATHS:
        if path == ALSO_AN_ID:
            continue
        allowed = allowed_at(path)
        for method in set(METHODS) - allowed:
            answer = await daemon.call(method, path, status=405, code="method_not_allowed")
            named = set(answer.headers["allow"].split(", "))
            assert named == allowed | {"OPTIONS"} | ({"HEAD"} if "GET" in allowed else set()), (method, path)


async def test_options_names_the_allowed_methods(daemon):
    for path in PATHS:
        answer = await daemon.call("OPTIONS", path)
        assert allowed_at(path) < set(answer.headers["allow"].split(", ")), path
        assert answer.content == b"", path


@pytest.mark.parametrize("path", ["/ping", "/version", TOPICS, f"{TOPICS}/t/stats"])
async def test_head_returns_the_head_of_get(daemon, path):
    await daemon.create()
    got, head = await daemon.call("GET", path), await daemon.call("HEAD", path)
    assert head.headers["content-type"] == got.headers["content-type"]


#: A producer or a file may be called ``x/``; users type ``/console/``.
ANY_NAME = {f"{TOPICS}/x/producers/x", "/console/x", "/console", "/console/"}


@pytest.mark.parametrize("method", ["GET", "POST", "PUT"])
async def test_a_trailing_slash_and_unknown_paths_are_not_found_and_never_redirected(daemon, method):
    for path in (
        *(path for path in PATHS if path.strip("/") and path not in ANY_NAME),
        "/v1",
        "/v1/namespaces",
        "/static/x",
        TOPICS.replace("v1", "v2"),
    ):
        answer = await daemon.call(method, path + "/", status=404, code="not_found", headers={"Accept": "text/html"})
        assert "location" not in answer.headers, path


async def test_doubled_slashes_are_not_found(daemon):
    await daemon.call("GET", TOPICS.replace("/ns/", "//"), status=404, code="not_found")
    await daemon.call("GET", "//ping", status=404, code="not_found")


async def test_every_answer_carries_a_request_id_and_echoes_that_of_the_client(daemon):
    for path in ("/ping", TOPICS, "/nothing", f"{TOPICS}/a.b"):
        assert (await daemon.http.get(path)).headers["x-request-id"]
        assert (await daemon.http.get(path, headers={"X-Request-Id": "mine"})).headers["x-request-id"] == "mine"


async def test_large_answers_are_compressed_when_the_client_takes_gzip():
    async with in_process() as daemon:
        names = [letter * 220 for letter in "stuvw"]  # more than 1 KiB together
        for name in names[:-1]:
            await daemon.create(name)
        assert "content-encoding" not in (await daemon.call("GET", TOPICS)).headers
        await daemon.create(names[-1])
        packed = await daemon.call("GET", TOPICS)
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.json() == names
        plain = await daemon.call("GET", TOPICS, headers={"Accept-Encoding": "identity"})
        assert "content-encoding" not in plain.headers


async def test_a_body_may_be_compressed_and_is_bounded_decompressed(daemon):
    import gzip

    headers = {"Content-Encoding": "gzip"}
    await daemon.call("PUT", f"{TOPICS}/t", content=gzip.compress(b'{"ttl": 5}'), headers=headers)
    assert (await daemon.call("GET", f"{TOPICS}/t")).json()["properties"]["ttl"] == "5"
    bomb = gzip.compress(b" " * (1 << 20))
    assert len(bomb) < 64 << 10
    await daemon.call("PUT", f"{TOPICS}/u", status=413, code="body_too_large", content=bomb, headers=headers)
    await daemon.call("PUT", f"{TOPICS}/u", status=400, code="malformed_body", content=b"{}", headers=headers)
    await daemon.call(
        "PUT",
        f"{TOPICS}/u",
        status=415,
        code="unsupported_media_type",
        content=b"{}",
        headers={"Content-Encoding": "br"},
    )


async def test_an_unknown_query_parameter_is_refused(daemon):
    await daemon.create("x")
    for route in ROUTES:
        if route.tag == "daemon" or route.name in ("store", "rollback"):
            continue  # store and rollback refuse the whole request
        answer = await daemon.http.request(
            route.method,
            filled(route.path) + "?colour=red",
            json=(route.body and route.body.example) or {"messages": ["m"]},
        )
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_parameter"), route.name


async def test_the_hot_routes_are_served_by_the_application_too(daemon):
    await daemon.create()
    first, last = await daemon.publish("a", "b")
    assert [message["id"] for message in await daemon.poll()] == [first, last]
    begun = (await daemon.call("POST", "/v1/transactions")).json()
    under = {"transactionWritePointer": begun["id"]}
    await daemon.call("POST", f"{TOPICS}/t/store", json={**under, "messages": ["c"]})
    await daemon.call("POST", f"{TOPICS}/t/rollback", json=under)
    for verb in ("prepare", "commit", "abort"):
        await daemon.call("POST", f"/v1/transactions/{begun['id']}/{verb}", status=409 if verb == "abort" else 200)

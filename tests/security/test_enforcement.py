"""With authentication, every request at every listener needs a name with the right verb; errors reveal no names."""

from __future__ import annotations

import base64
import json
import time

import h2.config
import h2.connection
import h2.events
import pytest
import trio

from broker.api.routes import ROUTES
from broker.http.websocket import _ROUTE
from broker.security.guard import OPEN
from broker.security.identity import VERBS
from storage.backup.objects import decode_rows
from tests.documents import DOCUMENTS
from tests.patience import PATIENCE_S
from tests.security.named import GRANTS, Files, named
from tests.waiting import until

T = "/v1/namespaces/ns/topics"
LISTENERS = ["hot", "application"]


@pytest.fixture(params=LISTENERS)
async def daemon(request, tmp_path):
    async with named(tmp_path, listener=request.param) as running:
        await running.ask("operator", "PUT", f"{T}/a", json={})
        await running.ask("operator", "PUT", f"{T}/b", json={})
        yield running


def problem(answer, status, code):
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.json()["outcome"] == "not-applied"
    assert answer.headers["content-type"] == "application/problem+json"
    return answer


# --- identity --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", f"{T}/a/publish"), ("GET", f"{T}/a"), ("GET", "/nothing"), ("DELETE", f"{T}/a/publish")],
)
async def test_without_a_name_everything_is_401_even_missing_resources(daemon, method, path):
    answer = problem(await daemon.ask(None, method, path), 401, "unauthenticated")
    assert answer.headers["www-authenticate"] == 'Bearer realm="plainsong"'


@pytest.mark.parametrize(
    "credential",
    [
        "Bearer psg_PlainsongPlainsongPlainsongPlainsong00001Kckda",
        "Bearer psg_short",
        "Bearer",
        "Basic Zm9vOmJhcg==",
        "Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.",
        "Bearer " + "x" * 9000,
        "Bearer a, Bearer b",
    ],
)
@pytest.mark.parametrize("path", [f"{T}/a/publish", "/v1/namespaces"])
async def test_a_bad_credential_is_401_and_is_not_repeated(daemon, credential, path):
    method = "POST" if path.endswith("publish") else "GET"
    answer = await daemon.daemon.http.request(method, path, headers={"Authorization": credential})
    problem(answer, 401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith('Bearer realm="plainsong", error="invalid_token", ')
    token = credential.partition(" ")[2]
    assert len(token) < 3 or token not in answer.text + answer.headers["www-authenticate"]


@pytest.mark.parametrize("name", ["token", "access_token"])
@pytest.mark.parametrize("path", [f"{T}/a/publish", "/v1/namespaces"])
async def test_a_token_in_a_url_is_400_and_is_not_repeated(daemon, name, path):
    token = daemon.files.tokens["operator"]
    method = "POST" if path.endswith("publish") else "GET"
    for who in ("operator", None):
        answer = problem(await daemon.ask(who, method, f"{path}?{name}={token}"), 400, "invalid_parameter")
        assert token not in answer.text
        assert "www-authenticate" not in answer.headers


async def test_health_needs_no_name_and_shows_nothing_but_its_status(daemon):
    for path in ("/ping", "/livez", "/readyz"):
        for headers in ({}, {"Authorization": "Bearer nonsense"}):
            assert (await daemon.daemon.http.get(path, headers=headers)).status_code == 200
    assert (await daemon.ask(None, "GET", "/readyz")).json() == {"ready": True}
    assert (await daemon.ask("writer", "GET", "/readyz")).json() == {"ready": True}
    assert "transactions" in (await daemon.ask("watcher", "GET", "/readyz")).json()


def test_the_listener_leaves_open_exactly_the_routes_declared_open():
    for route in ROUTES:
        path = route.path.replace("{", "").replace("}", "")
        assert OPEN.needs_no_name(path) is (route.on == "nobody"), route.name
    stream = next(route for route in ROUTES if route.name == "stream")
    assert (stream.name, stream.verbs, stream.on) == tuple(_ROUTE)


async def test_each_name_sees_its_own_part_of_a_kept_list(daemon):
    async def seen_by(*names):
        return [(await daemon.ask(name, "GET", T)).json() for name in names]

    part, whole = ["a"], ["a", "b"]
    assert await seen_by("narrow", "watcher", "watcher", "narrow", "operator") == [part, whole, whole, part, whole]
    problem(await daemon.ask("stranger", "GET", T), 403, "forbidden")
    daemon.files.grant(GRANTS.replace('["inspect"]\non = ["ns:*", "service"]', '["inspect"]\non = ["ns:b", "service"]'))
    await daemon.reload()
    assert await seen_by("watcher", "operator", "watcher", "narrow") == [["b"], whole, ["b"], part]


async def test_whoami_describes_each_name_to_itself(daemon):
    told = (await daemon.ask("narrow", "GET", "/v1/whoami")).json()
    entry = next(each for each in daemon.files.entries if each.name == "narrow")
    assert told == {
        "name": "narrow",
        "via": "token",
        "credential": entry.id,
        "expires": None,
        "groups": [],
        "grants": [{"verbs": ["poll"], "on": ["ns:a", "shop:x-*"]}],
    }
    problem(await daemon.ask(None, "GET", "/v1/whoami"), 401, "unauthenticated")


@pytest.mark.parametrize("listener", LISTENERS)
async def test_open_metrics_are_public_and_those_of_topics_stay_closed(tmp_path, listener):
    for is_open in (False, True):
        folder = tmp_path / str(is_open)
        folder.mkdir()
        async with named(folder, listener=listener, metrics__open=is_open) as daemon:
            for who in (None, "stranger"):
                status = (await daemon.ask(who, "GET", "/metrics")).status_code
                assert status == (200 if is_open else 403 if who else 401)
                problem(
                    await daemon.ask(who, "GET", "/metrics/topics"),
                    *((403, "forbidden") if who else (401, "unauthenticated")),
                )
            bad = await daemon.daemon.http.get("/metrics", headers={"Authorization": "Bearer nonsense"})
            assert bad.status_code == (200 if is_open else 401)


async def test_a_refused_request_about_a_topic_is_counted_once(daemon):
    await daemon.ask("reader", "DELETE", f"{T}/a")
    await daemon.ask("stranger", "GET", f"{T}/a")
    await daemon.ask("writer", "PUT", f"{T}/a/properties", json={})
    text = (await daemon.ask("operator", "GET", "/metrics")).text
    for route in ("delete_topic", "get_topic", "set_properties"):
        assert f'plainsong_requests_total{{route="{route}",status="403"}} 1.0' in text


# --- rights ----------------------------------------------------------------------------------------


async def test_a_verb_permits_its_own_operations_and_nothing_else(daemon):
    message = {"json": {"messages": ["m"]}}
    assert (await daemon.ask("writer", "POST", f"{T}/a/publish", **message)).status_code == 200
    assert (await daemon.ask("reader", "POST", f"{T}/a/poll", json={})).json()[0]["payload"] == "m"
    for who in ("reader", "watcher", "narrow", "stranger"):
        answer = problem(await daemon.ask(who, "POST", f"{T}/a/publish", **message), 403, "forbidden")
        assert answer.headers["www-authenticate"] == (
            'Bearer realm="plainsong", error="insufficient_scope", scope="publish ns:a"'
        )
    for who in ("writer", "watcher", "stranger"):
        problem(await daemon.ask(who, "POST", f"{T}/a/poll", json={}), 403, "forbidden")
    assert (await daemon.ask("narrow", "POST", f"{T}/a/poll", json={})).status_code == 200
    problem(await daemon.ask("narrow", "POST", f"{T}/b/poll", json={}), 403, "forbidden")
    problem(await daemon.ask("writer", "DELETE", f"{T}/a"), 403, "forbidden")


def bare(answer):
    """Return an answer without the headers that always differ."""
    kept = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return answer.status_code, kept, answer.content


@pytest.mark.parametrize(
    ("method", "verb"), [("POST", "/publish"), ("POST", "/poll"), ("GET", ""), ("GET", "/stats"), ("DELETE", "")]
)
async def test_a_refusal_is_the_same_whether_the_topic_exists_or_not(daemon, method, verb):
    there = bare(await daemon.ask("stranger", method, f"{T}/a{verb}"))
    assert there[0] == 403
    await daemon.ask("operator", "DELETE", f"{T}/a")
    assert bare(await daemon.ask("stranger", method, f"{T}/a{verb}")) == there
    body = {"/publish": {"messages": ["m"]}, "/poll": {}}.get(verb)
    gone = await daemon.ask("operator", method, f"{T}/a{verb}", json=body)
    assert gone.status_code == 404


async def test_a_refusal_precedes_the_checks_of_content_type_and_body(daemon):
    wrong = {"content": b"{", "headers": {"Content-Type": "text/nonsense"}}
    problem(await daemon.ask("stranger", "POST", f"{T}/a/publish", **wrong), 403, "forbidden")
    problem(await daemon.ask("stranger", "PUT", f"{T}/a/properties", **wrong), 403, "forbidden")
    assert (await daemon.ask("writer", "POST", f"{T}/a/publish", **wrong)).status_code == 415


async def test_a_large_body_is_not_read_for_a_refused_name(daemon):
    url = daemon.daemon.http.base_url
    head = "\r\n".join(
        [
            f"POST {T}/a/publish HTTP/1.1",
            "Host: localhost",
            f"Authorization: Bearer {daemon.files.tokens['stranger']}",
            "Content-Length: 1000000",
            "",
            "",
        ]
    )
    async with await trio.open_tcp_stream(url.host, url.port) as stream:
        await stream.send_all(head.encode())
        with trio.fail_after(PATIENCE_S):
            answer = await stream.receive_some()  # before any byte of the body is sent
    assert answer.startswith(b"HTTP/1.1 403 ")


async def test_a_refusal_keeps_the_connection_if_the_body_had_arrived(daemon):
    for _ in range(3):
        assert (await daemon.ask("stranger", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 403
        assert (await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 200


async def test_one_connection_serves_many_names_and_each_has_its_own_rights(daemon):
    for who, status in (("writer", 200), ("reader", 403), (None, 401), ("writer", 200), ("stranger", 403)) * 3:
        answer = await daemon.ask(who, "POST", f"{T}/a/publish", json={"messages": ["m"]})
        assert answer.status_code == status


async def test_no_name_may_write_the_audit(daemon):
    await daemon.daemon.service.audit.create()
    path = "/v1/namespaces/system/topics/audit"
    for method, more in (
        ("PUT", ""),
        ("POST", "/undelete"),
        ("POST", "/publish"),
        ("POST", "/store"),
        ("POST", "/rollback"),
        ("PUT", "/properties"),
        ("DELETE", ""),
    ):
        said = problem(await daemon.ask("operator", method, path + more, json={"messages": ["m"]}), 403, "forbidden")
        assert "ttl" in said.json()["hint"]
    assert (await daemon.ask("operator", "POST", f"{path}/poll", json={})).status_code == 200


async def test_an_invalid_name_is_not_repeated_in_a_header(daemon):
    answer = await daemon.ask("stranger", "POST", "/v1/namespaces/ns/topics/%22%0d%0aX-Evil%3A1/publish", json={})
    assert answer.status_code in (403, 404)
    assert "x-evil" not in answer.headers


# --- every route, every verb -----------------------------------------------------------------------

PLACES = {"namespace": "ns", "topic": "a", "reader": "r", "producer": "p", "transaction": "17", "instance": "i"}
RESOURCE = {"topic": "ns:a", "topics": "ns:a", "namespace": "ns:*", "within": "ns:a", "service": "service"}


@pytest.mark.parametrize("listener", LISTENERS)
async def test_each_route_is_open_to_its_verbs_and_closed_to_all_others(tmp_path, listener):
    grants = ["format = 1"]
    for resource in sorted(set(RESOURCE.values())):
        grants += [
            f'[[grant]]\nto = ["{verb}@{resource.replace(":", "/").replace("*", "all")}"]\nverbs = ["{verb}"]\non = ["{resource}"]'
            for verb in VERBS
        ]
    files = Files(tmp_path)
    async with named(tmp_path, listener=listener) as daemon:
        daemon.files.grant("\n".join(grants))
        names = [
            f"{verb}@{resource.replace(':', '/').replace('*', 'all')}"
            for verb in VERBS
            for resource in set(RESOURCE.values())
        ]
        _give_tokens(daemon.files, names)
        await daemon.reload()
        for route in ROUTES:
            if route.on in ("name", "nobody"):
                continue
            path = route.path
            for place, value in PLACES.items():
                path = path.replace(f"{{{place}}}", value)
            for verb in VERBS:
                name = f"{verb}@{RESOURCE[route.on].replace(':', '/').replace('*', 'all')}"
                more = {"json": {"topics": {"a": {}}}} if route.on == "topics" else {}
                answer = await daemon.head_of(name, route.method, path, **more)
                if route.on == "topics":
                    refused = answer.json()["topics"]["a"].get("error", {}).get("code") == "forbidden"
                else:
                    refused = answer.status_code == 403
                assert refused is (verb not in route.verbs), (route.name, verb, answer.status_code, answer.text)
            assert (await daemon.head_of("stranger", route.method, path)).status_code in (
                (403,) if route.on != "topics" else (200, 400)
            )
    del files


def _give_tokens(files, names):
    import random

    from broker.security.tokens import TokenEntry, hash_of, id_of, new_token

    source = random.Random(17)
    for name in names:
        files.tokens[name] = new_token(source.choice)
        hashed = hash_of(files.tokens[name])
        files.entries.append(TokenEntry(id_of(hashed), name, hashed, 0, None))
    files.write()


# --- changes ---------------------------------------------------------------------------------------


async def test_a_revoked_token_is_refused_on_the_connection_that_it_opened(daemon):
    assert (await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 200
    daemon.files.change("writer", revoked_ms=1)
    await daemon.reload()
    answer = await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})
    problem(answer, 401, "unauthenticated")
    assert 'error_description="the token is revoked"' in answer.headers["www-authenticate"]


async def test_an_expired_token_is_reported_as_expired(daemon):
    daemon.files.change("writer", expires_ms=1)
    await daemon.reload()
    answer = await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})
    assert 'error_description="the token is expired"' in answer.headers["www-authenticate"]


async def test_a_token_that_expires_is_refused_on_its_connection_and_in_a_parked_poll(daemon):
    now_ms = time.time_ns() // 1_000_000
    daemon.files.change("reader", expires_ms=now_ms + 60_000)
    await daemon.reload()
    answers = []

    async def poll():
        answers.append(await daemon.ask("reader", "POST", f"{T}/a/poll", json={"waitMs": 30000}))

    guard = daemon.daemon.service.security.guard
    async with trio.open_nursery() as nursery:
        assert (await daemon.ask("reader", "POST", f"{T}/a/poll", json={})).status_code == 200
        nursery.start_soon(poll)
        await until(lambda: guard.holds == 1)
        guard._now_ms = lambda: now_ms + 60_000
        guard.expire_ended()  # as the daemon does every second
        with trio.fail_after(PATIENCE_S):
            await until(lambda: answers)
    problem(answers[0], 401, "unauthenticated")
    problem(await daemon.ask("reader", "POST", f"{T}/a/poll", json={}), 401, "unauthenticated")


async def test_a_parked_poll_is_answered_when_its_token_is_revoked_and_when_its_grant_is_removed(daemon):
    answers = {}

    async def poll(who):
        answers[who] = await daemon.ask(who, "POST", f"{T}/a/poll", json={"waitMs": 30000})

    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            for who in ("reader", "narrow", "owner"):
                nursery.start_soon(poll, who)
            guard = daemon.daemon.service.security.guard
            await until(lambda: guard.holds == 3)
            daemon.files.change("reader", revoked_ms=1)
            await daemon.reload()
            await until(lambda: "reader" in answers)
            assert set(answers) == {"reader"}
            daemon.files.grant(daemon.files.grants_path.read_text().replace('"ns:a", "shop', '"shop'))
            await daemon.reload()
            await until(lambda: "narrow" in answers)
            assert "owner" not in answers
            await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})
    problem(answers["reader"], 401, "unauthenticated")
    problem(answers["narrow"], 403, "forbidden")
    assert answers["owner"].json()[0]["payload"] == "m"
    assert guard.holds == 0


async def test_a_stream_of_events_ends_with_an_error_when_its_token_is_revoked(daemon):
    headers = daemon.files.header("reader")
    with trio.fail_after(PATIENCE_S):
        async with daemon.daemon.http.stream("GET", f"{T}/a/events", headers=headers) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})
            while "event: message" not in await anext(lines):
                pass
            daemon.files.change("reader", revoked_ms=1)
            await daemon.reload()
            rest = [line async for line in lines]
    assert "event: error" in rest
    told = json.loads(
        next(line for line in rest if line.startswith("data: ") and "code" in line).removeprefix("data: ")
    )
    assert (told["code"], told["status"]) == ("unauthenticated", 401)
    assert daemon.daemon.service.security.guard.holds == 0


async def test_a_waiting_poll_of_many_topics_returns_nothing_of_a_topic_whose_grant_is_gone(daemon):
    answers = []

    async def poll():
        body = {"topics": {"a": {}, "b": {}}, "waitMs": 30000}
        answers.append(await daemon.ask("narrow", "POST", "/v1/namespaces/ns/poll", json=body))

    both = GRANTS.replace('"ns:a", "shop:x-*"', '"ns:a", "ns:b"')
    daemon.files.grant(both)
    await daemon.reload()
    with trio.fail_after(PATIENCE_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(poll)
            guard = daemon.daemon.service.security.guard
            await until(lambda: guard.holds == 1)
            daemon.files.grant(both.replace('"ns:a", "ns:b"', '"ns:b"'))
            await daemon.reload()
            await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["secret"]})
            await daemon.ask("writer", "POST", f"{T}/b/publish", json={"messages": ["m"]})
    topics = answers[0].json()["topics"]
    assert topics["a"]["error"]["code"] == "forbidden"
    assert "error" not in topics["b"]
    assert "secret" not in answers[0].text


async def test_events_of_all_topics_leave_out_topics_whose_grant_is_gone(daemon):
    headers, seen = daemon.files.header("narrow"), []
    with trio.fail_after(PATIENCE_S):
        path = "/v1/events?kinds=topics&topics=ns:a,ns:b"
        async with daemon.daemon.http.stream("GET", path, headers=headers) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: ["):
                    continue
                seen.append([each["name"] for each in json.loads(line.removeprefix("data: "))])
                if seen[-1]:
                    daemon.files.grant(GRANTS.replace('"ns:a", "shop:x-*"', '"shop:x-*"'))
                else:
                    daemon.files.change("narrow", revoked_ms=1)  # ends the stream
                await daemon.reload()
    assert seen == [["a"], []]


async def test_a_websocket_over_http_2_is_refused_before_anything_else_handles_it(daemon, caplog):
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    url, head, told = daemon.daemon.http.base_url, {}, b""
    with trio.fail_after(PATIENCE_S):
        async with await trio.open_tcp_stream(url.host, url.port) as stream:
            await stream.send_all(client.data_to_send())
            while ":status" not in head or b"}" not in told:
                for event in client.receive_data(await stream.receive_some()):
                    if isinstance(event, h2.events.RemoteSettingsChanged):
                        opening = {":method": "CONNECT", ":protocol": "websocket", ":scheme": "http"}
                        there = {":path": f"{T}/a/stream", ":authority": "evil.example", "sec-websocket-version": "13"}
                        client.send_headers(1, [*opening.items(), *there.items()])
                    elif isinstance(event, h2.events.ResponseReceived):
                        head = {name.decode(): value.decode() for name, value in event.headers}
                    elif isinstance(event, h2.events.DataReceived):
                        told += event.data
                await stream.send_all(client.data_to_send())
    assert (head[":status"], head["content-type"]) == ("400", "application/problem+json")
    assert json.loads(told)["detail"] == "WebSockets are not supported over HTTP/2"
    assert not [each for each in caplog.records if each.name != "plainsong.audit"]


async def test_whoami_shows_the_groups_of_the_file_in_force(daemon):
    daemon.files.grant('format = 1\n[groups]\ndesk = ["stranger"]\n')
    await daemon.reload()
    assert (await daemon.ask("stranger", "GET", "/v1/whoami")).json()["groups"] == ["desk"]


async def test_a_bad_file_changes_nothing_and_is_reported(daemon):
    daemon.files.tokens_path.write_text("{")
    daemon.files.grant('format = 1\n[[grant]]\nto = ["stranger"]\nverbs = ["all"]')
    await daemon.reload()
    assert (await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 200
    problem(await daemon.ask("stranger", "POST", f"{T}/a/publish", json={"messages": ["m"]}), 403, "forbidden")
    ready = await daemon.ask("operator", "GET", "/readyz")
    assert ready.status_code == 200
    assert (ready.json()["security"]["grants"], ready.json()["security"]["tokens"]) == ("stale", "stale")
    assert "line 2, column 1: on is missing" in ready.json()["security"]["why"]
    found = next(
        each for each in (await daemon.ask("operator", "GET", "/v1/attention")).json() if each["kind"] == "reload"
    )
    assert found["severity"] == "warning"
    assert "line 2, column 1: on is missing" in found["text"]
    assert "plainsong_security_reload_failures_total 2.0" in (await daemon.ask("watcher", "GET", "/metrics")).text
    daemon.files.write()
    daemon.files.grant(GRANTS_OF_STRANGER)
    await daemon.reload()
    assert "security" not in (await daemon.ask("stranger", "GET", "/readyz")).json()
    assert (await daemon.ask("stranger", "POST", f"{T}/a/publish", json={"messages": ["m"]})).status_code == 200


GRANTS_OF_STRANGER = 'format = 1\n[[grant]]\nto = ["stranger"]\nverbs = ["all"]\non = ["*:*", "service"]\n'


async def test_while_authentication_is_off_every_request_is_allowed_as_anonymous():
    from tests.broker.broker_in_process import in_process

    async with in_process() as daemon:
        told = (await daemon.call("GET", "/v1/whoami", headers={"Authorization": "Bearer nonsense"})).json()
        assert (told["name"], told["via"], told["credential"]) == ("anonymous", "none", None)
        assert told["grants"] == [{"verbs": list(VERBS), "on": ["*:*", "system:*", "service"]}]
        assert json.loads((await daemon.call("GET", "/readyz")).text)["transactions"]


async def test_definitions_need_admin_on_everything_they_name_and_operate_for_what_only_operators_see(daemon):
    daemon.files.grant(GRANTS + '[[grant]]\nto = ["owner"]\nverbs = ["admin"]\non = ["ns:*", "shop:x"]\n')
    await daemon.reload()

    async def put(topics, query="", **more):
        document = {"format": 1, "topics": {name: {"ttl": 60} for name in topics}, **more}
        return await daemon.ask("owner", "PUT", f"/v1/definitions{query}", json=document)

    assert (await put(["ns:a", "shop:x"])).json()["created"] == ["topics/shop:x"]
    # The request is refused as a whole, whether or not the foreign topic exists or would change.
    for name in ("shop:y", "other:exists", "system:audit"):
        refused = problem(await put(["ns:c", name]), 403, "forbidden")
        assert refused.json()["detail"].startswith(f"topics/{name}")
    problem(await put([], namespaces={"shop": {"deduplication": "disabled"}}), 403, "forbidden")
    problem(await put([], pins={"ns:a": "a"}), 403, "forbidden")
    problem(await put(["ns:a"], "?prune=true"), 403, "forbidden")
    problem(await put(["ns:a"], "?prune=true&namespace=shop"), 403, "forbidden")
    assert (await put(["ns:a"], "?prune=true&namespace=ns")).json()["deleted"] == ["topics/ns:b"]
    assert (await daemon.ask("operator", "GET", "/v1/definitions")).json()["topics"].keys() == {"ns:a", "shop:x"}


async def test_rights_reach_as_far_as_the_page_about_security_says(tmp_path):
    """``operate`` can read payloads through a backup; rows that ``admin`` sets aside outlive the topic's deletion."""
    grants = '[[grant]]\nto = ["watcher"]\nverbs = ["operate"]\non = ["service"]\n'
    grants += '[[grant]]\nto = ["writer"]\nverbs = ["admin"]\non = ["ns:*"]\n'
    (tmp_path / "data").mkdir()
    async with named(tmp_path, storage__data_dir=tmp_path / "data") as daemon:
        daemon.files.grant(GRANTS + grants)
        await daemon.reload()
        assert (await daemon.ask("writer", "PUT", f"{T}/a", json={})).status_code == 200
        await daemon.ask("writer", "POST", f"{T}/a/publish", json={"messages": ["a secret"]})
        problem(await daemon.ask("watcher", "POST", f"{T}/a/poll", json={}), 403, "forbidden")
        begun = (await daemon.ask("watcher", "POST", "/v1/backups")).json()
        listed = await daemon.ask("watcher", "GET", f"/v1/backups/{begun['id']}/objects", params={"topic": "ns:a"})
        read = [
            (await daemon.ask("watcher", "GET", f"/v1/backups/{begun['id']}/objects/{each['sha256']}")).content
            for each in listed.json()["objects"]
        ]
        assert any(b"a secret" in row for data in read for _, row in decode_rows(data))
        (message,) = (await daemon.ask("operator", "GET", f"{T}/a/messages")).json()
        range_ = {"from": message["id"], "to": message["id"]}
        assert (await daemon.ask("writer", "POST", f"{T}/a/set-aside", json=range_)).status_code == 200
        assert (await daemon.ask("writer", "DELETE", f"{T}/a")).status_code == 200
        (kept,) = (tmp_path / "data" / "set-aside").iterdir()
        _, row = map(json.loads, kept.read_text().splitlines())
        assert b"a secret" in base64.b64decode(row["value"])
    page = DOCUMENTS["docs/security.md"]
    assert "`operate` on `service` can read every payload" in page
    assert "stays there when the topic is deleted" in page

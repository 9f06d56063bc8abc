"""The audit: every change and every refusal is recorded, and a flood of refusals is a few records."""

from __future__ import annotations

import json

import pytest
import trio

from broker.api.routes import ROUTES
from broker.audit import ACTIONS, GATHER_S
from tests.security.named import named

T = "/v1/namespaces/ns/topics"
AUDIT = "/v1/namespaces/system/topics/audit"


async def records(daemon):
    answer = await daemon.ask("operator", "POST", f"{AUDIT}/poll", json={})
    return [json.loads(each["payload"]) for each in answer.json()]


@pytest.fixture
async def daemon(tmp_path, nursery):
    async with named(tmp_path) as running:
        await running.daemon.service.audit.create()
        nursery.start_soon(running.daemon.service.audit.run)
        yield running
        nursery.cancel_scope.cancel()


async def gathered(daemon, count):
    with trio.fail_after(10):
        while len(found := await records(daemon)) < count:  # noqa: ASYNC110 - nobody tells
            await trio.sleep(0.02)
    return found


async def test_a_change_is_recorded_before_it_is_answered(daemon):
    await daemon.ask("operator", "PUT", f"{T}/a", json={"ttl": 60}, headers={"X-Request-Id": "r-1"})
    (record,) = await records(daemon)
    entry = next(each for each in daemon.files.entries if each.name == "operator")
    assert record == {
        "v": 1,
        "at": record["at"],
        "instance": record["instance"],
        "name": "operator",
        "via": "token",
        "credential": entry.id,
        "remote": record["remote"],
        "requestId": "r-1",
        "action": "topic.create",
        "target": "ns:a",
        "outcome": "applied",
        "status": 200,
        "code": None,
        "before": None,
        "after": {"ttl": 60},
        "repeated": 1,
    }
    await daemon.ask("operator", "PUT", f"{T}/a/properties", json={"ttl": 90})
    await daemon.ask("operator", "DELETE", f"{T}/a")
    await daemon.ask("operator", "DELETE", f"{T}/a")
    _, changed, deleted, refused = await records(daemon)
    assert (changed["action"], changed["before"]["ttl"], changed["after"]) == ("topic.properties", "60", {"ttl": 90})
    assert (deleted["action"], deleted["outcome"]) == ("topic.delete", "applied")
    assert (refused["outcome"], refused["status"], refused["code"]) == ("refused", 404, "topic_not_found")


async def test_ending_ones_own_transaction_is_everyday_work_and_anothers_is_recorded(daemon):
    first, second = [(await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"] for _ in range(2)]
    await daemon.ask("owner", "POST", f"/v1/transactions/{first}/abort")
    assert await records(daemon) == []
    await daemon.ask("operator", "POST", f"/v1/transactions/{second}/abort")
    (record,) = await records(daemon)
    assert (record["action"], record["target"], record["name"]) == ("transaction.abort", str(second), "operator")


async def test_whoever_may_not_operate_is_recorded_when_it_tries_to_end_anothers_transaction(daemon):
    theirs = (await daemon.ask("other", "POST", "/v1/transactions")).json()["id"]
    assert (await daemon.ask("owner", "POST", f"/v1/transactions/{theirs}/abort")).status_code == 403
    assert (await daemon.ask("owner", "POST", "/v1/transactions/17/abort")).status_code == 404
    (record,) = await records(daemon)
    assert (record["action"], record["name"], record["outcome"]) == ("transaction.abort", "owner", "refused")


@pytest.mark.parametrize("query", ["?dryRun=true", "?dryRun=tru%65"])
async def test_a_dry_run_changes_nothing_and_is_not_recorded(daemon, query):
    assert (await daemon.ask("operator", "PUT", f"{T}/a{query}", json={})).status_code == 200
    assert await records(daemon) == []


@pytest.mark.parametrize("query", ["?dryRun=false", "?dryRun=true&dryRun=false", "?dryRun=true&x=1"])
async def test_nothing_else_passes_for_a_dry_run(daemon, query):
    done = (await daemon.ask("operator", "PUT", f"{T}/a{query}", json={})).status_code == 200
    (record,) = await records(daemon)
    assert record["outcome"] == ("applied" if done else "refused")


async def test_refusals_of_a_kind_are_one_record_with_their_number(daemon):
    for _ in range(50):
        await daemon.ask("stranger", "POST", f"{T}/a/publish")
    (record,) = await gathered(daemon, 1)
    assert (record["action"], record["name"], record["target"]) == ("security.refused", "stranger", "ns:a")
    assert (record["status"], record["code"], record["repeated"]) == (403, "forbidden", 1)
    audit = daemon.daemon.service.audit
    for each in audit._refusals.values():
        each.since_s -= GATHER_S
    _, again = await gathered(daemon, 2)
    assert again["repeated"] == 49


@pytest.mark.parametrize("listener", ["lane", "hypercorn"])
@pytest.mark.parametrize("path", [f"{T}/a/publish", f"{T}/a/properties"])
async def test_a_request_without_a_name_is_recorded(tmp_path, nursery, listener, path):
    async with named(tmp_path, listener=listener) as daemon:
        await daemon.daemon.service.audit.create()
        nursery.start_soon(daemon.daemon.service.audit.run)
        assert (await daemon.ask(None, "POST", path)).status_code == 401
        (record,) = await gathered(daemon, 1)
        assert (record["action"], record["status"], record["name"]) == ("security.refused", 401, None)
        assert record["remote"].startswith("127.0.0.1:")
        nursery.cancel_scope.cancel()


async def test_a_name_of_a_transaction_that_is_no_number_is_refused_and_no_fault_of_the_daemon(daemon):
    for name in ("%C2%B2", "9" * 5000, "x"):
        answer = await daemon.ask("operator", "POST", f"/v1/transactions/{name}/abort")
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_parameter")


async def test_a_flood_of_refusals_of_many_kinds_is_few_records_and_little_memory(daemon):
    audit = daemon.daemon.service.audit
    for number in range(300):
        await daemon.ask("stranger", "POST", f"{T}/t{number}/publish")
    assert len(audit._waiting) + len(await records(daemon)) < 100
    assert len(audit._refusals) == 300
    assert "plainsong_audit_lost_total 0.0" not in (await daemon.ask("operator", "GET", "/metrics")).text


async def test_no_record_has_a_credential_in_it(daemon):
    token = daemon.files.tokens["operator"]
    await daemon.ask("operator", "PUT", f"{T}/{token}", json={})
    await daemon.daemon.http.get(f"{T}/a", headers={"Authorization": f"Bearer {token}x"})
    await daemon.daemon.http.get(f"{T}/a?token={token}")
    found = json.dumps(await gathered(daemon, 2))
    assert token not in found


async def test_a_change_that_cannot_be_recorded_happens_and_is_counted(tmp_path):
    async with named(tmp_path) as running:  # whose audit has no topic
        assert (await running.ask("operator", "PUT", f"{T}/a", json={})).status_code == 200
        assert "plainsong_audit_lost_total 1.0" in (await running.ask("operator", "GET", "/metrics")).text


async def test_where_the_audit_is_required_such_a_change_is_not_made(tmp_path):
    async with named(tmp_path, security__audit="required") as running:
        answer = await running.ask("operator", "PUT", f"{T}/a", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "audit_unavailable")
        assert (await running.ask("operator", "GET", f"{T}/a")).status_code == 404
        await running.daemon.service.audit.create()
        assert (await running.ask("operator", "PUT", f"{T}/a", json={})).status_code == 200


async def test_a_reload_is_recorded_with_the_digests(daemon):
    daemon.files.grant(daemon.files.grants_path.read_text() + "# more\n")
    await daemon.reload()
    (record,) = await gathered(daemon, 1)
    assert (record["action"], record["target"], record["name"]) == ("security.reload", "grants", None)
    assert len(record["before"]["sha256"]) == len(record["after"]["sha256"]) == 64


def test_every_action_is_of_a_route_that_changes_something():
    routes = {route.name: route for route in ROUTES}
    for name in set(ACTIONS) & set(routes):
        assert not routes[name].reads_only
    assert {"create_topic", "delete_topic", "truncate", "abort"} <= set(routes)

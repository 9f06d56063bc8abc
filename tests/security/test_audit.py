"""The audit: every change and every refusal is recorded, and a flood of refusals becomes a few records."""

from __future__ import annotations

import json

import pytest
import trio
import trio.testing

from broker.api.routes import ROUTES
from broker.audit import ACTIONS, LOSS_SHOWN_MS, PROPERTIES, RECORDS_PER_S, WRITE_TIMEOUT_S, Audit
from broker.refusals import EVERYTHING_ELSE, GATHER_S, MAX_KINDS, WAITING_EACH
from broker.security.guard import RefusedRequest
from broker.security.identity import NO_IDENTITY, Identity
from broker.security.peer import Peer
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import AuditUnavailable, Forbidden, LowSpace
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.topic.asks import Create, Describe, Publish
from storage.copy_parts import COPY_KEY, DONE, CopyRow
from tests.broker.broker_in_process import in_process
from tests.patience import PATIENCE_S
from tests.security.named import named

T = "/v1/namespaces/ns/topics"
AUDIT = "/v1/namespaces/system/topics/audit"
AUDIT_TOPIC_NAME = TopicName("system", "audit")


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


async def gathered(daemon, count, clock=None):
    """Return the records once there are ``count``; with a mock clock, advance it with each look."""
    with trio.fail_after(PATIENCE_S):
        while len(found := await records(daemon)) < count:
            if clock is None:
                await trio.sleep(0.02)
            else:
                clock.jump(0.1)
    return found


class Clock:
    def now_ms(self):
        return 1_700_000_000_000


def audit_of():
    """Return an audit whose topic collects published records in ``written``."""

    async def ask(name, asked):
        if isinstance(asked, Publish):
            made.written += [json.loads(each) for each in asked.request.messages]

    made = Audit(ask, Clock(), instance="i", required=False)
    made.written = []
    return made


async def written(audit, count):
    """Run the audit until it has written ``count`` records; check that no batch exceeds its bound."""
    with trio.fail_after(PATIENCE_S):
        while len(audit.written) < count:
            before = len(audit.written)
            own, audit._own = audit._own, []
            for record in own:
                await audit._write(record)
            await audit._write_gathered()
            assert len(audit.written) - before - len(own) <= RECORDS_PER_S
            await trio.sleep(0 if len(audit.written) >= count else 1.0)


def refuse(audit, name, target):
    audit.refused(RefusedRequest(Forbidden(), Identity(name, "token", "c"), Peer("10.0.0.7:1"), target))


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


async def test_ending_ones_own_transaction_is_not_recorded_and_ending_another_names_is(daemon):
    first, second = [(await daemon.ask("owner", "POST", "/v1/transactions")).json()["id"] for _ in range(2)]
    await daemon.ask("owner", "POST", f"/v1/transactions/{first}/abort")
    assert await records(daemon) == []
    await daemon.ask("operator", "POST", f"/v1/transactions/{second}/abort")
    (record,) = await records(daemon)
    assert (record["action"], record["target"], record["name"]) == ("transaction.abort", str(second), "operator")


async def test_an_attempt_to_end_another_names_transaction_without_operate_is_recorded(daemon):
    theirs = (await daemon.ask("other", "POST", "/v1/transactions")).json()["id"]
    assert (await daemon.ask("owner", "POST", f"/v1/transactions/{theirs}/abort")).status_code == 403
    assert (await daemon.ask("owner", "POST", "/v1/transactions/17/abort")).status_code == 404
    (record,) = await records(daemon)
    assert (record["action"], record["name"], record["outcome"]) == ("transaction.abort", "owner", "refused")


@pytest.mark.parametrize("verb", ["prepare", "commit", "checkpoint"])
async def test_an_attempt_to_decide_another_names_transaction_is_recorded(daemon, verb):
    theirs = (await daemon.ask("other", "POST", "/v1/transactions")).json()["id"]
    assert (await daemon.ask("owner", "POST", f"/v1/transactions/{theirs}/{verb}")).status_code == 403
    (record,) = await gathered(daemon, 1)
    assert (record["action"], record["target"], record["name"]) == ("security.refused", str(theirs), "owner")
    assert (record["outcome"], record["status"], record["code"]) == ("refused", 403, "forbidden")


async def test_a_refusal_by_a_handler_is_recorded_once(daemon):
    await daemon.ask("operator", "PUT", f"{T}/a", json={})
    theirs = (await daemon.ask("other", "POST", "/v1/transactions")).json()["id"]
    body = {"transactionWritePointer": theirs}
    assert (await daemon.ask("writer", "POST", f"{T}/a/rollback", json=body)).status_code == 403
    assert (await daemon.ask("watcher", "GET", f"{T}/a/messages?filter=x")).status_code == 403
    assert (await daemon.ask("owner", "POST", f"/v1/transactions/{theirs}/abort")).status_code == 403
    found = await gathered(daemon, 4)
    assert sorted((each["name"], each["action"], each["target"]) for each in found) == [
        ("operator", "topic.create", "ns:a"),
        ("owner", "transaction.abort", str(theirs)),
        ("watcher", "security.refused", "ns:a"),
        ("writer", "security.refused", "ns:a"),
    ]


@pytest.mark.parametrize("query", ["?dryRun=true", "?dryRun=tru%65"])
async def test_a_dry_run_changes_nothing_and_is_not_recorded(daemon, query):
    assert (await daemon.ask("operator", "PUT", f"{T}/a{query}", json={})).status_code == 200
    assert await records(daemon) == []


@pytest.mark.parametrize("query", ["?dryRun=false", "?dryRun=true&dryRun=false", "?dryRun=true&x=1"])
async def test_nothing_else_counts_as_a_dry_run(daemon, query):
    done = (await daemon.ask("operator", "PUT", f"{T}/a{query}", json={})).status_code == 200
    (record,) = await records(daemon)
    assert record["outcome"] == ("applied" if done else "refused")


async def test_refusals_of_a_kind_are_one_record_with_their_count(daemon, mock_clock):
    await daemon.ask("stranger", "POST", f"{T}/a/publish")
    (record,) = await gathered(daemon, 1, mock_clock)
    for _ in range(49):
        await daemon.ask("stranger", "POST", f"{T}/a/publish")
    assert (record["action"], record["name"], record["target"]) == ("security.refused", "stranger", "ns:a")
    assert (record["status"], record["code"], record["repeated"]) == (403, "forbidden", 1)
    mock_clock.jump(GATHER_S)
    _, again = await gathered(daemon, 2, mock_clock)
    assert again["repeated"] == 49


@pytest.mark.parametrize("listener", ["hot", "application"])
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


async def test_a_transaction_id_that_is_not_a_number_is_refused_without_an_internal_error(daemon):
    for name in ("%C2%B2", "9" * 5000, "x"):
        answer = await daemon.ask("operator", "POST", f"/v1/transactions/{name}/abort")
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_parameter")


async def test_a_flood_of_refusals_of_many_kinds_makes_few_records_and_uses_little_memory(daemon, mock_clock):
    del mock_clock  # the fixture stops the time, however slow the machine: no further records
    audit = daemon.daemon.service.audit
    for number in range(300):
        await daemon.ask("stranger", "POST", f"{T}/t{number}/publish")
    assert audit._of_names.waiting <= WAITING_EACH + 1
    found = await records(daemon)
    assert len(found) <= RECORDS_PER_S
    others = next(each for kind, each in audit._of_names._kinds.items() if kind.target == EVERYTHING_ELSE)
    assert others.record["name"] == "stranger"
    assert sum(each.repeated for each in audit._of_names._kinds.values()) + len(found) == 300
    assert "plainsong_audit_lost_total 0.0" in (await daemon.ask("operator", "GET", "/metrics")).text


async def test_names_with_a_thousand_refusals_hide_neither_those_of_other_names_nor_a_reload(autojump_clock):
    made = audit_of()
    for who in ("greedy", "greedier", "greediest"):
        for number in range(1_000):
            refuse(made, who, f"ns:t{number}")
    refuse(made, "other", "ns:secret")
    made.reloaded("grants", "a", "b")
    await written(made, 2 * RECORDS_PER_S)
    # The reload is first, and a name with one request is not delayed by names with thousands.
    assert made.written[0]["action"] == "security.reload"
    assert ("other", "ns:secret") in [(each["name"], each["target"]) for each in made.written[: 1 + RECORDS_PER_S]]
    await written(made, 1 + 3 * (WAITING_EACH + 1) + 1)
    assert {each["name"] for each in made.written if each["target"] == EVERYTHING_ELSE} == {
        "greedy",
        "greedier",
        "greediest",
    }
    assert sum(each["repeated"] for each in made.written) == 3 * 1_000 + 2
    assert made.lost_records == 0


async def test_many_networks_without_a_name_hide_no_refusal_of_a_name(autojump_clock):
    made = audit_of()
    for number in range(2 * MAX_KINDS):
        peer = Peer(f"10.{number >> 8}.{number & 255}.7:1")
        made.refused(RefusedRequest(Forbidden(), NO_IDENTITY, peer, "service"))
    assert made.lost_records == MAX_KINDS
    refuse(made, "other", "ns:secret")
    await written(made, RECORDS_PER_S)
    assert ("other", "ns:secret") in [(each["name"], each["target"]) for each in made.written]
    assert made.lost_records == MAX_KINDS


async def test_a_reload_does_not_wait_for_the_next_round_of_refusals(mock_clock):
    del mock_clock  # the fixture stops the time
    made = audit_of()
    for number in range(100):
        refuse(made, f"n{number}", "ns:t")
    await written(made, RECORDS_PER_S)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run)
        await trio.testing.wait_all_tasks_blocked()
        made.reloaded("grants", "a", "b")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert [each["action"] for each in made.written].count("security.reload") == 1
    assert len(made.written) == RECORDS_PER_S + 1


def test_pending_refusals_are_bounded_and_written_in_time(monkeypatch):
    made = audit_of()
    monkeypatch.setattr(trio, "current_time", lambda: now_s)
    now_s = 0.0
    for number in range(3 * MAX_KINDS):
        refuse(made, f"n{number}", "ns:t")
    kept = made._of_names
    assert len(kept) == MAX_KINDS == sum(kept._of.values()) == kept.waiting
    assert made.lost_records == 2 * MAX_KINDS
    while made._turn(now_s):
        pass
    assert len(kept) == MAX_KINDS
    now_s += GATHER_S
    kept.close(now_s)
    assert (len(kept), len(kept._of), len(kept._queues)) == (0, 0, 0)


async def test_counts_of_refusals_are_written_as_space_permits_and_none_is_lost(autojump_clock):
    made = audit_of()
    for number in range(45):
        for _ in range(10):
            refuse(made, f"n{number}", "ns:t")
        await written(made, number + 1)
    for number in range(45):
        for _ in range(10):
            refuse(made, f"n{number}", "ns:t")
    await written(made, 90)
    assert sum(each["repeated"] for each in made.written) == 2 * 45 * 10
    assert made.lost_records == 0


async def test_no_record_contains_a_credential(daemon):
    token = daemon.files.tokens["operator"]
    await daemon.ask("operator", "PUT", f"{T}/{token}", json={})
    await daemon.daemon.http.get(f"{T}/a", headers={"Authorization": f"Bearer {token}x"})
    await daemon.daemon.http.get(f"{T}/a?token={token}")
    found = json.dumps(await gathered(daemon, 2))
    assert token not in found


@pytest.fixture
def no_commit_is_slow(monkeypatch):
    """Raise the limit, so that a commit delayed by a stalled machine is not listed as needing attention."""
    monkeypatch.setattr("broker.metrics.SLOW_COMMIT_S", 600.0)


@pytest.mark.usefixtures("no_commit_is_slow")
async def test_a_change_that_cannot_be_recorded_happens_and_is_counted(tmp_path):
    async with named(tmp_path) as running:  # its audit has no topic
        assert (await running.ask("operator", "PUT", f"{T}/a", json={})).status_code == 200
        assert "plainsong_audit_lost_total 1.0" in (await running.ask("operator", "GET", "/metrics")).text
        (found,) = (await running.ask("operator", "GET", "/v1/attention")).json()
        assert (found["kind"], found["severity"], found["subject"]) == ("audit", "warning", "system:audit")
        assert "1 audit record could not be written since the start" in found["text"]
        running.daemon.clock.ms += LOSS_SHOWN_MS + 1
        assert (await running.ask("operator", "GET", "/v1/attention")).json() == []


@pytest.mark.usefixtures("no_commit_is_slow")
async def test_a_large_audit_needs_attention(daemon, monkeypatch):
    await daemon.ask("operator", "PUT", f"{T}/a", json={"x": 1})
    assert (await daemon.ask("operator", "GET", "/v1/attention")).json() == []
    monkeypatch.setattr("broker.audit.LARGE_BYTES", 10)
    (found,) = (await daemon.ask("operator", "GET", "/v1/attention")).json()
    assert (found["kind"], found["severity"], found["subject"]) == ("audit", "warning", "system:audit")
    assert "plainsong audit" in found["text"]


async def test_where_the_audit_is_required_a_change_that_cannot_be_recorded_is_not_made(tmp_path):
    async with named(tmp_path, security__audit="required") as running:
        answer = await running.ask("operator", "PUT", f"{T}/a", json={})
        assert (answer.status_code, answer.json()["code"]) == (503, "audit_unavailable")
        assert (await running.ask("operator", "GET", f"{T}/a")).status_code == 404
        await running.daemon.service.audit.create()
        assert (await running.ask("operator", "PUT", f"{T}/a", json={})).status_code == 200


async def test_where_the_audit_is_required_a_nearly_full_disk_refuses_every_change(tmp_path):
    async with named(tmp_path, security__audit="required") as running:
        service = running.daemon.service
        await service.audit.create()
        assert (await running.ask("operator", "PUT", f"{T}/a", json={})).status_code == 200
        theirs = (await running.ask("other", "POST", "/v1/transactions")).json()["id"]
        before = await records(running)
        service.space.low = True
        changes = [
            ("PUT", f"{T}/b", {}),
            ("PUT", f"{T}/a/properties", {"ttl": 90}),
            ("DELETE", f"{T}/a", None),
            ("PUT", f"{T}/a/readers/r", {"position": "0" * 40}),
            ("DELETE", f"{T}/a/readers/r", None),
            ("PUT", "/v1/namespaces/ns/properties", {"deduplication": True}),
            ("POST", f"/v1/transactions/{theirs}/abort", None),
        ]
        for method, path, body in changes:
            refused = await running.ask("operator", method, path, json=body)
            problem = refused.json()
            assert (refused.status_code, problem["code"], problem["outcome"]) == (503, "low_space", "not-applied"), path
            assert "system:audit" in problem["detail"]
        with pytest.raises(LowSpace):
            await service.audit.refuse_unless_writable()  # a Thrift call
        assert (await running.ask("operator", "GET", f"{T}/b")).status_code == 404
        assert (await running.ask("operator", "GET", f"{T}/a")).json()["properties"]["ttl"] != "90"
        assert await records(running) == before
        assert service.audit.lost_records == 0
        service.space.low = False
        assert (await running.ask("operator", "DELETE", f"{T}/a")).status_code == 200


async def test_where_the_audit_is_required_a_change_waits_for_the_check_no_longer_than_for_a_record(autojump_clock):
    async def ask(name, asked):
        await trio.sleep_forever()

    audit = Audit(ask, Clock(), instance="i", required=True)
    with trio.fail_after(10 * WRITE_TIMEOUT_S), pytest.raises(AuditUnavailable, match="cannot be written"):
        await audit.refuse_unless_writable()
    assert trio.current_time() == pytest.approx(WRITE_TIMEOUT_S)


async def test_a_reload_is_recorded_with_the_digests(daemon):
    daemon.files.grant(daemon.files.grants_path.read_text() + "# more\n")
    await daemon.reload()
    (record,) = await gathered(daemon, 1)
    assert (record["action"], record["target"], record["name"]) == ("security.reload", "grants", None)
    assert len(record["before"]["sha256"]) == len(record["after"]["sha256"]) == 64


async def test_resetting_a_reader_is_recorded_and_its_progress_is_not(daemon, mock_clock):
    await daemon.ask("operator", "PUT", f"{T}/a", json={})
    await daemon.ask("operator", "POST", f"{T}/a/publish", json={"messages": ["m"] * 3})
    first, second, third = (
        each["id"] for each in (await daemon.ask("operator", "POST", f"{T}/a/poll", json={})).json()
    )

    async def put(body, status=200, query=""):
        answer = await daemon.ask("reader", "PUT", f"{T}/a/readers/r{query}", json=body)
        assert answer.status_code == status

    async def resets():
        return [each for each in await records(daemon) if each["action"] == "reader.reset"]

    await put({"position": first})  # no position was stored before
    await put({"position": second, "expected": first})
    await put({"position": second})
    await put({"position": first}, query="?dryRun=true")
    assert await resets() == []
    await put({"position": first})
    (record,) = await resets()
    assert (record["name"], record["target"], record["outcome"]) == ("reader", "ns:a/r", "applied")
    assert (record["before"], record["after"]) == ({"position": second}, {"position": first})
    await put({"position": third})
    await put({"position": second})
    assert len(await resets()) == 1
    mock_clock.jump(GATHER_S)
    with trio.fail_after(PATIENCE_S):
        while len(found := await resets()) < 2:
            mock_clock.jump(0.1)
    assert (found[1]["repeated"], found[1]["after"]) == (2, {"position": second})


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", f"{T}/new", {}),
        ("PUT", f"{T}/a/properties", {"ttl": 90}),
        ("PUT", "/v1/namespaces/ns/properties", {"deduplication": "disabled"}),
        ("DELETE", f"{T}/a", None),
    ],
    ids=["create", "properties", "namespace", "delete"],
)
async def test_a_dry_run_names_the_action_and_the_target_like_the_audit(daemon, method, path, body):
    await daemon.ask("operator", "PUT", f"{T}/a", json={"ttl": 60})
    more = {} if body is None else {"json": body}
    said = (await daemon.ask("operator", method, f"{path}?dryRun=true", **more)).json()
    assert (await daemon.ask("operator", method, path, **more)).status_code == 200
    *_, record = await records(daemon)
    assert (said["action"], said["target"]) == (record["action"], record["target"])


async def test_an_import_of_definitions_is_one_record_with_its_changes(daemon):
    await daemon.ask("operator", "PUT", f"{T}/a", json={"ttl": 60})
    document = {"format": 1, "topics": {"ns:a": {"ttl": 90}, "ns:b": {}}, "namespaces": {}, "pins": {}}
    assert (await daemon.ask("operator", "PUT", "/v1/definitions", json=document)).status_code == 200
    _, record = await records(daemon)
    assert (record["action"], record["target"], record["outcome"]) == ("definitions.import", "service", "applied")
    assert record["after"] == {"created": ["topics/ns:b"], "changed": ["topics/ns:a"], "deleted": []}


async def test_a_restored_store_is_recorded_once(tmp_path, nursery):
    async with named(tmp_path) as running:
        store, audit = running.daemon.store, running.daemon.service.audit
        topics, ended_ms = ("ns:a",), 1_700_000_000_000
        row = CopyRow("backup 20261122T055514Z-abcdef at 17", topics, state=DONE, ended_ms=ended_ms)
        claim = await store.claim(TopicName("", "restored"))
        await store.write([put_one(Table.METADATA, COPY_KEY, row.encode())], claim=claim)
        for _ in range(2):  # as at two starts
            async with trio.open_nursery() as starts:
                starts.start_soon(audit.run)
                await gathered(running, 1)
                await trio.testing.wait_all_tasks_blocked()
                starts.cancel_scope.cancel()
        (record,) = await records(running)
        assert (record["action"], record["target"]) == ("backup.restore", "20261122T055514Z-abcdef")
        assert record["after"] == {"endedAt": "2023-11-14T22:13:20Z", "chosen": "at 17", "topics": ["ns:a"]}


def test_every_action_belongs_to_a_route_that_changes_something():
    routes = {route.name: route for route in ROUTES}
    for name in set(ACTIONS) & set(routes):
        assert not routes[name].reads_only
    assert {"create_topic", "delete_topic", "truncate", "abort"} <= set(routes)


# --- the chain of the audit ---------------------------------------------------------------------------


async def test_the_audit_is_chained_and_its_records_are_verified(daemon):
    await daemon.ask("operator", "PUT", "/v1/namespaces/shop/topics/orders", json={})
    await gathered(daemon, 1)
    head = (await daemon.ask("operator", "GET", f"{AUDIT}/chain")).json()
    page = (await daemon.ask("operator", "GET", f"{AUDIT}/chain/entries")).json()
    assert head["topic"] == "system:audit"
    assert page["head"]["count"] == head["count"] == len(page["entries"])
    assert len(page["messages"]) == len(page["entries"]) - 1


@pytest.mark.parametrize(
    "planted",
    [
        TopicProperties(ttl_s=7),
        TopicProperties(ttl_s=7, chain="sha256"),
        TopicProperties(max_bytes=1, chain="sha256"),
        TopicProperties(transactional="required"),
    ],
)
async def test_the_audit_has_its_own_properties_again_after_a_start(tmp_path, planted):
    async with named(tmp_path) as running:
        service = running.daemon.service
        await service.directory.ask(AUDIT_TOPIC_NAME, Create(planted))
        await service.audit.create()
        properties = (await service.directory.ask(AUDIT_TOPIC_NAME, Describe())).metadata.properties
        assert properties == PROPERTIES
        (record,) = service.audit._own
        assert (record["action"], record["before"]) == ("topic.properties", planted.stored())
        await service.audit.create()
        assert len(service.audit._own) == 1


@pytest.mark.parametrize("listener", ["hot", "application"])
async def test_only_the_daemon_writes_the_audit_even_while_authentication_is_off(listener):
    async with in_process(listener=listener) as daemon:
        for method, more in (
            ("PUT", ""),
            ("POST", "/publish"),
            ("POST", "/store"),
            ("POST", "/rollback"),
            ("PUT", "/properties"),
            ("DELETE", ""),
            ("POST", "/undelete"),
        ):
            await daemon.call(method, f"{AUDIT}{more}", json={}, status=403, code="forbidden")
            other = AUDIT.replace("audit", "other")
            assert (await daemon.http.request(method, f"{other}{more}", json={})).status_code != 403
        assert (await daemon.http.get(AUDIT)).status_code == 404

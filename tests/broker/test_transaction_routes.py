"""The transaction service over HTTP: shapes, errors and bounds of its routes, through both listeners."""

from __future__ import annotations

from base64 import b64decode, b64encode

import pytest
import trio
from broker_in_process import START_MS, TOPICS, in_process

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.names import TopicName
from plainsong.protocol.tephra.state import decode_transaction
from plainsong.protocol.transactions.ledger_rows import HEAD, service_key
from plainsong.protocol.transactions.transaction import TransactionType
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

TX = "/v1/transactions"
every_listener = pytest.mark.parametrize("listener", [None, "hot", "application"])


async def begin(daemon, **body):
    return (await daemon.call("POST", TX, json=body)).json()


async def post(daemon, transaction, verb, *, status=200, code=None, **body):
    path = f"{TX}/{transaction['id'] if isinstance(transaction, dict) else transaction}/{verb}"
    return (await daemon.call("POST", path, status=status, code=code, **({"json": body} if body else {}))).json()


async def publish_under(daemon, transaction, *payloads, topic="t", **more):
    body = {"transactionWritePointer": transaction["writePointer"], "messages": list(payloads)}
    return await daemon.call("POST", f"{TOPICS}/{topic}/publish", json=body, **more)


async def committed(daemon, topic="t"):
    return [message["payload"] for message in await daemon.poll(topic, isolation="committed")]


def changes(*keys):
    return [b64encode(key).decode() for key in keys]


# --- begin -----------------------------------------------------------------------------------------


@every_listener
async def test_an_empty_body_begins_a_short_transaction_of_thirty_seconds(listener):
    async with in_process(listener=listener) as daemon:
        answer = await daemon.call("POST", TX)
        begun = answer.json()
        assert answer.headers["content-type"] == "application/json"
        assert set(begun) == {"id", "writePointer", "readPointer", "snapshot", "expires", "service"}
        assert begun["id"] == begun["writePointer"] >= START_MS * 1_000_000
        assert begun["expires"] == START_MS + 30_000
        snapshot = decode_transaction(b64decode(begun["snapshot"]))
        assert (snapshot.transaction_id, snapshot.read_pointer) == (begun["id"], begun["readPointer"])
        assert snapshot.type is TransactionType.SHORT
        listed = (await daemon.call("GET", TX)).json()
        assert [(one["id"], one["clientId"], one["type"]) for one in listed] == [(begun["id"], "unknown", "short")]


@every_listener
async def test_type_timeout_and_client_are_as_requested(listener):
    async with in_process(listener=listener) as daemon:
        short = await begin(daemon, timeoutSeconds=7, clientId="billing")
        assert short["expires"] == START_MS + 7_000
        long = await begin(daemon, type="long", clientId="batch")
        assert long["expires"] == START_MS + 86_400_000
        shown = (await daemon.call("GET", f"{TX}/{short['id']}")).json()
        assert shown == {
            "id": short["id"],
            "writePointer": short["id"],
            "type": "short",
            "clientId": "billing",
            "state": "in_progress",
            "startedMs": START_MS,
            "expiresMs": START_MS + 7_000,
            "decidedMs": None,
            "topics": [],
            "hiddenMessages": 0,
            "keptUntilMs": None,
            "service": short["service"],
        }


@every_listener
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"timeoutSeconds": 0}', "invalid_parameter"),
        (b'{"timeoutSeconds": 3601}', "invalid_parameter"),
        (b'{"type": "medium"}', "malformed_body"),
        (b'{"timeout": 5}', "unknown_field"),
        (b'{"clientId": 5}', "malformed_body"),
        (b"[]", "malformed_body"),
        (b"{", "malformed_body"),
    ],
)
async def test_an_invalid_begin_is_refused(listener, body, code):
    async with in_process(listener=listener) as daemon:
        await daemon.call("POST", TX, status=400, code=code, content=body)


async def test_pointers_are_strings_because_numbers_end_at_2_to_the_53(daemon):
    begun = (await daemon.call("POST", TX + "?longs=string")).json()
    assert begun["id"].isdigit()
    for name in ("writePointer", "readPointer"):
        assert isinstance(begun[name], str)
    (listed,) = (await daemon.call("GET", TX + "?longs=string")).json()
    assert listed["id"] == begun["id"]
    assert (await daemon.call("POST", f"{TX}/{begun['id']}/commit?longs=string")).json()["id"] == begun["id"]
    await daemon.call("POST", TX + "?longs=maybe", status=400, code="invalid_parameter")
    await daemon.call("POST", TX + "?long=string", status=400, code="invalid_parameter")


async def test_open_transactions_are_bounded():
    async with in_process(transactions__max_open=2) as daemon:
        await begin(daemon)
        first = await begin(daemon)
        await daemon.call("POST", TX, status=503, code="overloaded")
        await post(daemon, first, "commit")
        await begin(daemon)


# --- prepare, commit, abort ------------------------------------------------------------------------


@every_listener
async def test_a_commit_makes_the_messages_of_all_topics_visible_and_may_be_repeated(listener):
    async with in_process(listener=listener) as daemon:
        await daemon.create("a")
        await daemon.create("b")
        begun = await begin(daemon)
        await publish_under(daemon, begun, "one", topic="a")
        await publish_under(daemon, begun, "two", topic="b")
        assert await committed(daemon, "a") == await committed(daemon, "b") == []
        assert (await post(daemon, begun, "prepare", changes=changes(b"k"))) == {
            "id": begun["id"],
            "state": "in_progress",
        }
        for _ in range(2):
            assert await post(daemon, begun, "commit") == {"id": begun["id"], "state": "committed"}
        assert (await committed(daemon, "a"), await committed(daemon, "b")) == (["one"], ["two"])
        await publish_under(daemon, begun, "late", topic="a", status=409, code="transaction_not_in_progress")
        shown = (await daemon.call("GET", f"{TX}/{begun['id']}")).json()
        assert (shown["state"], shown["keptUntilMs"]) == ("committed", START_MS + 90_000_000)
        (listed,) = (await daemon.call("GET", f"{TX}?state=committed")).json()
        assert shown["decidedMs"] == listed["decidedMs"] == START_MS


@every_listener
async def test_an_abort_rolls_back_every_topic_before_it_is_answered(listener):
    async with in_process(listener=listener) as daemon:
        await daemon.create("a")
        await daemon.create("b")
        begun = await begin(daemon)
        await publish_under(daemon, begun, "one", topic="a")
        await publish_under(daemon, begun, "two", topic="b")
        for _ in range(2):
            assert await post(daemon, begun, "abort") == {"id": begun["id"], "state": "aborted"}
        later = await begin(daemon)
        for topic in ("a", "b"):
            assert await committed(daemon, topic) == []
            assert await daemon.poll(topic, transaction=later["snapshot"]) == []
            assert len(await daemon.poll(topic)) == 1
        await publish_under(daemon, begun, "late", topic="a", status=409)
        await post(daemon, begun, "commit", status=409, code="transaction_not_in_progress")


@every_listener
async def test_a_conflict_names_the_key_and_the_other_client(listener):
    async with in_process(listener=listener) as daemon:
        mine, theirs = await begin(daemon, clientId="mine"), await begin(daemon, clientId="theirs")
        await post(daemon, theirs, "prepare", changes=changes(b"row-1", b"\x00"))
        await post(daemon, theirs, "commit")
        refused = await post(
            daemon, mine, "prepare", status=409, code="transaction_conflict", changes=changes(b"\x00", b"row-2")
        )
        assert "\\x00" in refused["detail"]
        assert "'theirs'" in refused["detail"]
        metrics = (await daemon.call("GET", "/metrics")).text
        assert "plainsong_transaction_conflicts_total 1.0" in metrics


@every_listener
async def test_unknown_ids_are_404_and_invalid_ids_are_400(listener):
    async with in_process(listener=listener) as daemon:
        for verb in ("prepare", "commit", "abort", "invalidate", "checkpoint"):
            await post(daemon, 5, verb, status=404, code="transaction_not_found")
            for odd in ("x", "0", "-5", "9" * 20, str(1 << 63), "%C2%B2"):
                await post(daemon, odd, verb, status=400, code="invalid_parameter")
        unknown = (await daemon.call("GET", f"{TX}/5")).json()
        assert (unknown["id"], unknown["state"], unknown["type"], unknown["keptUntilMs"]) == (5, "unknown", None, None)
        await daemon.call("GET", f"{TX}/x", status=400, code="invalid_parameter")


@every_listener
async def test_a_change_set_that_is_not_base64_or_too_large_is_refused(listener):
    async with in_process(listener=listener, transactions__max_change_set_bytes=1024) as daemon:
        begun = await begin(daemon)
        await post(daemon, begun, "prepare", status=400, code="malformed_body", changes=["é"])
        await post(daemon, begun, "prepare", status=400, code="malformed_body", changes="a2V5")
        await post(daemon, begun, "prepare", status=413, code="transaction_too_large", changes=changes(b"x" * 1025))
        await post(daemon, begun, "prepare", changes=changes(b"x" * 1024))


@every_listener
async def test_commit_and_abort_take_no_fields(listener):
    async with in_process(listener=listener) as daemon:
        begun = await begin(daemon)
        await post(daemon, begun, "commit", status=400, code="unknown_field", writePointer=begun["id"])
        await post(daemon, begun, "abort", status=400, code="unknown_field", x=1)
        await daemon.call("POST", f"{TX}/{begun['id']}/commit", content=b"{}")


@every_listener
async def test_bodies_of_control_requests_have_a_small_bound(listener):
    async with in_process(listener=listener) as daemon:
        begun = await begin(daemon)
        large = b'{"clientId": "%b"}' % (b"x" * (64 << 10))
        for path in (TX, *(f"{TX}/{begun['id']}/{verb}" for verb in ("commit", "abort", "invalidate"))):
            await daemon.call("POST", path, status=413, code="body_too_large", content=large)


async def test_an_invalidation_hides_forever_without_touching_any_row(daemon):
    await daemon.create()
    begun = await begin(daemon)
    await publish_under(daemon, begun, "hidden")
    await daemon.publish("behind")
    assert await committed(daemon) == []
    for _ in range(2):
        assert await post(daemon, begun, "invalidate") == {"id": begun["id"], "state": "invalid"}
    assert await committed(daemon) == ["behind"]
    (listed,) = (await daemon.call("GET", TX + "?state=invalid")).json()
    assert listed["id"] == begun["id"]


async def test_a_checkpoint_gives_a_new_pointer_of_the_same_transaction(daemon):
    await daemon.create()
    begun = await begin(daemon)
    await publish_under(daemon, begun, "one")
    further = await post(daemon, begun, "checkpoint")
    assert further["id"] == begun["id"]
    assert further["writePointer"] > begun["writePointer"]
    assert further["readPointer"] == begun["readPointer"]
    await publish_under(daemon, further, "two")
    again = await post(daemon, begun, "checkpoint", snapshot=further["snapshot"])
    assert decode_transaction(b64decode(again["snapshot"])).checkpoint_write_pointers[0] == further["writePointer"]
    assert await post(daemon, further["writePointer"], "commit") == {"id": begun["id"], "state": "committed"}
    assert await committed(daemon) == ["one", "two"]


async def test_hidden_messages_of_a_transaction_are_counted_in_all_its_topics(daemon):
    begun = await begin(daemon)
    for topic, count in (("t", 5), ("u", 3)):
        await daemon.create(topic)
        await publish_under(daemon, begun, *(["m"] * count), topic=topic)
    (listed,) = (await daemon.call("GET", TX)).json()
    assert (listed["topics"], listed["hiddenMessages"]) == (["ns:t", "ns:u"], 8)
    assert (await daemon.call("GET", f"{TX}/{begun['id']}")).json()["hiddenMessages"] == 8


async def listed_in_pages(daemon, query=""):
    found, after = [], ""
    while page := (await daemon.call("GET", f"{TX}?limit=2{query}{after}")).json():
        found += [each["id"] for each in page]
        after = f"&after={found[-1]}"
    return found


async def test_the_list_of_transactions_has_pages(daemon):
    ids = [(await begin(daemon))["id"] for _ in range(7)]
    assert await listed_in_pages(daemon) == ids
    first, second, *rest = ids
    await daemon.call("POST", f"{TX}/{second}/abort")
    await daemon.call("POST", f"{TX}/{first}/abort")
    await daemon.call("POST", f"{TX}/{rest[-1]}/invalidate")
    assert await listed_in_pages(daemon) == rest
    assert await listed_in_pages(daemon, "&state=in_progress") == rest[:-1]
    assert await listed_in_pages(daemon, "&state=aborted") == [second, first]
    assert [each["id"] for each in (await daemon.call("GET", f"{TX}?after={first}")).json()] == rest
    await daemon.call("GET", f"{TX}?after=x", status=400, code="invalid_parameter")


@pytest.mark.parametrize("verb", ["abort", "invalidate"])
async def test_the_pointer_reported_to_a_held_reader_names_the_transaction(daemon, verb):
    await daemon.create()
    begun = await begin(daemon)
    further = await post(daemon, begun, "checkpoint")
    await publish_under(daemon, further, "undecided")
    held = await daemon.call("POST", f"{TOPICS}/t/poll", json={"isolation": "committed"})
    pointer = held.headers["plainsong-held-by"]
    assert pointer == str(further["writePointer"])
    previewed = (await daemon.call("POST", f"{TX}/{pointer}/{verb}?dryRun=true")).json()
    assert previewed["target"] == str(begun["id"])
    ended = (await daemon.call("POST", f"{TX}/{pointer}/{verb}")).json()
    assert ended == {"id": begun["id"], "state": previewed["after"]["state"]}
    assert (await daemon.call("GET", f"{TX}/{pointer}")).json()["id"] == begun["id"]
    assert (await daemon.poll(isolation="committed")) == []
    if verb == "invalidate":
        removed = (await daemon.call("POST", f"{TX}/truncate", json={"ids": [pointer]})).json()["removed"]
        assert removed == 2


@pytest.mark.parametrize("verb", ["prepare", "checkpoint"])
async def test_the_pointer_of_a_checkpoint_prepares_and_checkpoints_its_transaction(daemon, verb):
    begun = await begin(daemon)
    further = await post(daemon, begun, "checkpoint")
    more = changes(b"k") if verb == "prepare" else further["snapshot"]
    field = "changes" if verb == "prepare" else "snapshot"
    assert (await post(daemon, further["writePointer"], verb, **{field: more}))["id"] == begun["id"]


async def test_after_a_checkpoint_a_transaction_cannot_write_to_a_recreated_topic(daemon):
    await daemon.create()
    begun, other = await begin(daemon), await begin(daemon)
    await publish_under(daemon, begun, "one")
    further = await post(daemon, begun, "checkpoint")
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.create()
    refused = await publish_under(daemon, further, "two", status=409)
    assert refused.json()["code"] == "generation_changed"
    await publish_under(daemon, other, "another transaction's")
    await post(daemon, begun, "abort")
    await post(daemon, other, "commit")
    assert await committed(daemon) == ["another transaction's"]


async def test_a_checkpoint_refuses_the_snapshot_of_another_transaction(daemon):
    begun, other = await begin(daemon), await begin(daemon)
    await post(daemon, begun, "checkpoint", status=400, code="invalid_parameter", snapshot=other["snapshot"])
    await post(daemon, begun, "checkpoint", status=400, code="malformed_transaction", snapshot="AAAA")


async def test_a_time_out_is_a_deadline(autojump_clock, daemon):
    await daemon.create()
    begun = await begin(daemon, timeoutSeconds=1)
    await publish_under(daemon, begun, "late")
    await trio.sleep(1)
    await post(daemon, begun, "commit", status=409, code="transaction_not_in_progress")
    assert (await daemon.call("GET", f"{TX}/{begun['id']}")).json()["state"] == "invalid"
    assert "plainsong_transaction_timeouts_total 1.0" in (await daemon.call("GET", "/metrics")).text


# --- what blocks readers ---------------------------------------------------------------------------


async def test_the_list_shows_what_each_transaction_hides_and_where(daemon):
    await daemon.create("a")
    await daemon.create("b")
    first = await begin(daemon, clientId="first")
    await publish_under(daemon, first, "x", topic="a")
    await daemon.publish("behind", topic="a")
    await publish_under(daemon, first, "x", topic="b")
    daemon.clock.ms += 5
    second = await begin(daemon, clientId="second")
    listed = (await daemon.call("GET", TX)).json()
    assert [one["clientId"] for one in listed] == ["first", "second"]
    assert listed[0]["topics"] == ["ns:a", "ns:b"]
    assert listed[0]["hiddenMessages"] == 3
    assert (listed[1]["topics"], listed[1]["hiddenMessages"]) == ([], 0)
    assert [one["id"] for one in (await daemon.call("GET", TX + "?limit=1")).json()] == [first["id"]]
    assert (await daemon.call("GET", TX + "?state=committed")).json() == []
    for wrong in ("state=open", "limit=0", "limit=1001", "x=1"):
        await daemon.call("GET", f"{TX}?{wrong}", status=400, code="invalid_parameter")
    await post(daemon, second, "commit")
    (done,) = (await daemon.call("GET", TX + "?state=committed")).json()
    assert done["id"] == second["id"]


async def test_truncation_accepts_ids_or_a_time_and_counts_removed_pointers(daemon):
    await daemon.create()
    begun = await begin(daemon)
    await publish_under(daemon, begun, "x")
    await post(daemon, begun, "invalidate")
    for body in ({}, {"ids": [1], "beforeMs": 1}):
        await daemon.call("POST", TX + "/truncate", status=400, code="invalid_parameter", json=body)
    truncated = await daemon.call("POST", TX + "/truncate", json={"ids": [str(begun["id"]), 5]})
    assert truncated.json()["removed"] == 1
    assert await committed(daemon) == []
    other = await begin(daemon)
    await post(daemon, other, "invalidate")
    assert (await daemon.call("POST", TX + "/truncate", json={"beforeMs": START_MS + 1})).json()["removed"] == 1


async def test_pruning_figures_name_topics_bounds_and_why_nothing_is_pruned():
    async with in_process(transactions__prune=False) as daemon:
        await daemon.create()
        begun = await begin(daemon)
        await publish_under(daemon, begun, "x")
        await post(daemon, begun, "invalidate")
        figures = (await daemon.call("GET", TX + "/pruning")).json()
        assert figures["invalid"] == 1
        assert figures["oldestInvalid"] == begun["id"]
        assert figures["topics"] == 1
        assert figures["oldestByTopic"] == [{"topic": "ns:t", "oldestPointer": begun["id"]}]
        assert (figures["safeBound"], figures["lastPassMs"]) == (None, None)
        assert figures["maxLifetimeMs"] == 90_000_000
        assert "transactions.prune" in figures["keptBecause"]
    async with in_process() as daemon:
        assert (await daemon.call("GET", TX + "/pruning?limit=1")).json()["keptBecause"] is None
    async with in_process(transactions__max_lifetime_s=0) as daemon:
        assert "max_lifetime_s" in (await daemon.call("GET", TX + "/pruning")).json()["keptBecause"]


# --- without the service ---------------------------------------------------------------------------


@every_listener
async def test_when_switched_off_everything_but_the_service_and_committed_polls_is_served(listener):
    async with in_process(listener=listener, transactions__service="off") as daemon:
        await daemon.create()
        await daemon.publish("plain")
        pointer = START_MS * 1_000_000
        await publish_under(daemon, {"writePointer": pointer}, "under")
        assert [message["payload"] for message in await daemon.poll()] == ["plain", "under"]
        body = {"isolation": "committed"}
        path = f"{TOPICS}/t/poll"
        await daemon.call("POST", path, status=503, code="transactions_unavailable", json=body)
        asked = [("GET", TX), ("POST", TX), ("GET", f"{TX}/5"), ("GET", TX + "/pruning")]
        asked += [("POST", f"{TX}/5/{verb}") for verb in ("prepare", "commit", "abort", "invalidate", "checkpoint")]
        for method, path in asked:
            refused = await daemon.call(method, path, status=503, code="transactions_unavailable")
            assert "transactions.service" in refused.json()["hint"]


async def test_a_service_that_cannot_be_loaded_does_not_affect_plain_requests(autojump_clock):
    store = FaultyStore(MemoryStore())
    async with in_process(store=store) as daemon:
        await daemon.create()
        begun = await begin(daemon)
        await publish_under(daemon, begun, "under")
    claim = await store.claim(TopicName("", "test"))
    await store.write([Put(Table.METADATA, b"", [service_key(HEAD)], [b"garbage"])], claim=claim)
    async with in_process(store=store) as daemon:
        await daemon.publish("plain")
        assert [message["payload"] for message in await daemon.poll()] == ["under", "plain"]
        refused = {"status": 503, "code": "transactions_unavailable"}
        await publish_under(daemon, begun, "under", **refused)
        await daemon.call("POST", TX, **refused)
        await daemon.call("POST", f"{TOPICS}/t/poll", json={"isolation": "committed"}, **refused)
        metrics = (await daemon.call("GET", "/metrics")).text
        assert "plainsong_transactions_open " not in metrics
        assert "plainsong_undecided_pointers 1.0" in metrics


async def test_the_access_log_names_the_transaction(caplog):
    caplog.set_level("INFO", logger="plainsong.access")
    async with in_process(log__access=True) as daemon:
        begun = await begin(daemon)
        await post(daemon, begun, "commit")
        await daemon.call("GET", f"{TX}/{begun['id']}")
    lines = [(line.route, line.target, line.status) for line in caplog.records if line.getMessage() == "answered"]
    assert lines == [
        ("begin", "", 200),
        ("commit", str(begun["id"]), 200),
        ("get_transaction", f"{TX}/{begun['id']}", 200),
    ]


@pytest.mark.parametrize("body", [{"type": None}, {"clientId": None, "timeoutSeconds": None}])
async def test_a_null_field_equals_an_absent_one(daemon, body):
    answer = await daemon.call("POST", TX, json=body)
    assert answer.status_code == 200
    (shown,) = (await daemon.call("GET", TX)).json()
    assert (shown["type"], shown["clientId"]) == ("short", "unknown")

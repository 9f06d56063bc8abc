"""Producer sessions over HTTP: open, fence, show, list in pages, delete; and topics with deduplication switched off."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from broker_in_process import START_MS, TOPICS, in_process
from test_committed_polls import begin

PRODUCERS = f"{TOPICS}/t/producers"
PUBLISH = f"{TOPICS}/t/publish"
LISTENERS = (None, "hot", "application")
WEEK_MS = 7 * 86_400_000


@pytest.fixture(params=LISTENERS)
async def daemon(request):
    """A daemon without a listener, and with each of the two."""
    async with in_process(listener=request.param) as running:
        yield running


async def opened(daemon, name="p", **body):
    return (await daemon.call("PUT", f"{PRODUCERS}/{quote(name, safe='')}", json=body)).json()


async def send(daemon, ids, *, producer="p", status=200, code=None, **more):
    """Publish one message for each id."""
    messages = [f"m{number}" for number in ids]
    body = {"messages": messages, "producer": producer, "sequenceIds": list(ids), **more}
    return await daemon.call("POST", PUBLISH, json=body, status=status, code=code)


async def listed(daemon, query=""):
    return (await daemon.call("GET", PRODUCERS + query)).json()


# --- sessions ----------------------------------------------------------------------------------------


async def test_a_new_name_begins_without_an_id_and_every_opening_has_a_higher_epoch(daemon):
    await daemon.create()
    first = await opened(daemon)
    assert first == {
        "producer": "p",
        "epoch": first["epoch"],
        "lastSequenceId": -1,
        "generation": 1,
        "enabledFrom": None,
        "activeMs": START_MS,
        "expiresMs": START_MS + WEEK_MS,
        "recent": [],
    }
    assert (await opened(daemon))["epoch"] > first["epoch"] > 0


async def test_a_session_without_a_name_gets_an_unused_one(daemon):
    await daemon.create()
    names = {(await daemon.call("POST", PRODUCERS)).json()["producer"] for _ in range(5)}
    async with in_process(store=daemon.store) as again:
        names |= {(await again.call("POST", PRODUCERS, json={})).json()["producer"] for _ in range(5)}
    assert len(names) == 10


async def test_the_older_session_is_fenced_and_the_newer_one_continues(daemon):
    await daemon.create()
    old = await opened(daemon)
    await send(daemon, [0], producerEpoch=old["epoch"])
    new = await opened(daemon)
    assert new["lastSequenceId"] == 0
    refused = await send(daemon, [1], producerEpoch=old["epoch"], status=409, code="producer_fenced")
    assert refused.json()["outcome"] == "not-applied"
    await send(daemon, [1], producerEpoch=new["epoch"])
    assert len(await daemon.poll()) == 2


async def test_a_session_is_fenced_across_a_restart(daemon):
    await daemon.create()
    old = await opened(daemon)
    new = await opened(daemon)
    async with in_process(store=daemon.store) as again:
        await send(again, [0], producerEpoch=old["epoch"], status=409, code="producer_fenced")
        await send(again, [0], producerEpoch=new["epoch"])


async def test_the_last_request_of_a_producer_is_reported_with_its_ids(daemon):
    await daemon.create()
    receipt = (await send(daemon, [3, 4])).json()
    found = await opened(daemon)
    assert found["lastSequenceId"] == 4
    assert found["recent"] == [
        {"first": 3, "last": 4, "firstId": receipt["firstId"], "lastId": receipt["lastId"], "response": None}
    ]
    shown = (await daemon.call("GET", f"{PRODUCERS}/p")).json()
    assert shown == found


async def test_publishes_under_a_write_pointer_are_reported_with_their_answers(daemon):
    await daemon.create()
    pointer = (await begin(daemon))["writePointer"]
    answer = (await send(daemon, [0], transactionWritePointer=pointer)).json()
    (recent,) = (await daemon.call("GET", f"{PRODUCERS}/p")).json()["recent"]
    assert recent["response"] == {key: answer[key] for key in recent["response"]}
    (recent,) = (await daemon.call("GET", f"{PRODUCERS}/p?longs=string")).json()["recent"]
    assert recent["response"]["transactionWritePointer"] == str(pointer)


async def test_only_the_last_five_requests_are_reported(daemon):
    await daemon.create()
    for number in range(8):
        await send(daemon, [number])
    recent = (await daemon.call("GET", f"{PRODUCERS}/p")).json()["recent"]
    assert [(each["first"], each["last"]) for each in recent] == [(number, number) for number in range(3, 8)]


async def test_the_session_of_a_forgotten_producer_is_over_and_its_name_starts_over(daemon):
    await daemon.create()
    session = await opened(daemon)
    await send(daemon, [0], producerEpoch=session["epoch"])
    await daemon.call("DELETE", f"{PRODUCERS}/p")
    await daemon.call("GET", f"{PRODUCERS}/p", status=404, code="producer_not_found")
    await daemon.call("DELETE", f"{PRODUCERS}/p", status=404, code="producer_not_found")
    await send(daemon, [1], producerEpoch=session["epoch"], status=410, code="producer_expired")
    assert (await opened(daemon))["lastSequenceId"] == -1


async def test_an_idle_producer_is_forgotten_and_one_with_a_longer_retention_is_kept(daemon):
    await daemon.create()
    session = await opened(daemon, "short")
    await opened(daemon, "long", retentionSeconds=30 * 86_400)
    daemon.clock.ms += WEEK_MS + 1
    await send(daemon, [0], producer="short", producerEpoch=session["epoch"], status=410, code="producer_expired")
    assert (await daemon.call("GET", f"{PRODUCERS}/long")).json()["expiresMs"] == START_MS + 30 * 86_400_000
    too_long = daemon.service.config.deduplication.max_retention_s + 1
    body = {"retentionSeconds": too_long}
    await daemon.call("PUT", f"{PRODUCERS}/p", status=400, code="invalid_parameter", json=body)


async def test_a_deleted_generation_without_producers_is_reported_like_a_cleaned_one(daemon):
    await daemon.create()
    await daemon.call("DELETE", f"{TOPICS}/t")
    await daemon.call("GET", f"{PRODUCERS}/p?generation=1", status=404, code="producer_not_found")
    await daemon.create()
    answer = await daemon.call("GET", f"{PRODUCERS}/p?generation=1", status=410, code="producer_expired")
    assert "or never existed" in answer.json()["detail"]


async def test_a_deleted_topic_reports_its_producers_and_a_new_one_has_none(daemon):
    await daemon.create()
    await send(daemon, [0, 1])
    await daemon.call("DELETE", f"{TOPICS}/t")
    told = (await daemon.call("GET", f"{PRODUCERS}/p?generation=1")).json()
    assert (told["lastSequenceId"], told["generation"]) == (1, 1)
    await daemon.create()
    told = (await daemon.call("GET", f"{PRODUCERS}/p?generation=1")).json()
    assert (told["lastSequenceId"], told["generation"]) == (1, 1)
    await daemon.call("GET", f"{PRODUCERS}/q?generation=1", status=404, code="producer_not_found")
    await daemon.call("GET", f"{PRODUCERS}/p?generation=3", status=409, code="generation_changed")
    await daemon.call("GET", f"{PRODUCERS}/p", status=404, code="producer_not_found")
    await daemon.call("PUT", f"{PRODUCERS}/p", status=409, code="generation_changed", json={"generation": 1})
    assert (await opened(daemon, generation=2))["lastSequenceId"] == -1


async def test_any_text_of_255_bytes_names_a_producer(daemon):
    await daemon.create()
    for name in ("a/b c", "ü" * 127, "%2F", "..x", "p?q#r", "x" * 255):
        assert (await opened(daemon, name))["producer"] == name
    await daemon.call("PUT", f"{PRODUCERS}/{'x' * 256}", status=400, code="invalid_parameter", json={})
    assert len((await listed(daemon))["producers"]) == 6


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ([], "malformed_body"),
        ({"retentionSeconds": 0}, "invalid_parameter"),
        ({"retentionSeconds": "1"}, "malformed_body"),
        ({"generation": 0}, "invalid_parameter"),
        ({"generations": 1}, "unknown_field"),
    ],
)
async def test_wrong_bodies_open_nothing(daemon, body, code):
    await daemon.create()
    for method, path in (("PUT", f"{PRODUCERS}/p"), ("POST", PRODUCERS)):
        await daemon.call(method, path, status=400, code=code, json=body)
    assert (await listed(daemon))["count"] == 0


async def test_missing_topics_have_no_producers(daemon):
    for method, path in (("GET", ""), ("POST", ""), ("PUT", "/p"), ("GET", "/p"), ("DELETE", "/p")):
        await daemon.call(method, PRODUCERS + path, status=404, code="topic_not_found")


# --- the list ----------------------------------------------------------------------------------------


async def test_producers_are_listed_by_name_in_pages_with_both_maps(daemon):
    await daemon.create()
    for name in ("b", "a", "c"):
        await send(daemon, [0, 7], producer=name)
    first = await listed(daemon, "?limit=2")
    assert [each["producer"] for each in first["producers"]] == ["a", "b"]
    assert (first["count"], first["next"]) == (3, "b")
    assert first["producers"][0] == {
        "producer": "a",
        "epoch": 0,
        "pushed": 7,
        "persisted": 7,
        "activeMs": START_MS,
        "expiresMs": START_MS + WEEK_MS,
        "damaged": False,
    }
    rest = await listed(daemon, "?after=b&limit=2")
    assert [each["producer"] for each in rest["producers"]] == ["c"]
    assert rest["next"] is None


async def test_the_list_shows_the_snapshot_and_the_rows_replayed_by_the_last_load():
    async with in_process(deduplication__snapshot_entries=3) as daemon:
        await daemon.create()
        for number in range(2):
            await send(daemon, [number])
        told = await listed(daemon)
        assert told["snapshot"]["entriesSince"] == 2
        assert told["deduplication"] == {"enabled": True, "level": "service"}
        await send(daemon, [2])
        daemon.clock.ms += 5
        told = await listed(daemon)
        assert (told["snapshot"]["entriesSince"], told["snapshot"]["ageMs"]) == (0, 5)
        await send(daemon, [3])
        told = await listed(daemon)
        assert told["snapshot"]["entriesSince"] == 1
        messages = await daemon.poll()
        behind = [each for each in messages if each["id"] >= told["snapshot"]["position"]]
        assert [each["payload"] for each in behind] == ["m3"]


@pytest.mark.parametrize("query", ["?limit=0", "?limit=1001", "?limit=x", "?before=a"])
async def test_pages_are_bounded(daemon, query):
    await daemon.create()
    await daemon.call("GET", PRODUCERS + query, status=400, code="invalid_parameter")


async def test_stats_count_the_producers(daemon):
    await daemon.create()
    await send(daemon, [0])
    stats = (await daemon.call("GET", f"{TOPICS}/t/stats")).json()
    assert (stats["producers"], stats["enabledFrom"]) == (1, None)


# --- bounds and switches -----------------------------------------------------------------------------


async def test_producers_of_one_topic_are_bounded():
    async with in_process(deduplication__max_producers=2) as daemon:
        await daemon.create()
        for name in ("a", "b"):
            await opened(daemon, name)
        answer = await daemon.call("PUT", f"{PRODUCERS}/c", status=503, code="too_many_producers", json={})
        assert answer.headers["retry-after"]
        await send(daemon, [0], producer="c", status=503, code="too_many_producers")
        assert await daemon.poll() == []


async def test_no_session_is_opened_when_deduplication_is_off(daemon):
    await daemon.create(deduplication="disabled")
    for method, path in (("PUT", f"{PRODUCERS}/p"), ("POST", PRODUCERS)):
        await daemon.call(method, path, status=409, code="deduplication_disabled", json={})
    assert (await listed(daemon))["deduplication"] == {"enabled": False, "level": "topic"}


async def test_switching_off_and_on_forgets_all_producers_and_reports_from_where(daemon):
    await daemon.create()
    await send(daemon, [0])
    properties = "/v1/namespaces/ns/properties"
    await daemon.call("PUT", properties, json={"deduplication": "disabled"})
    assert (await listed(daemon))["count"] == 0
    await send(daemon, [0])
    await daemon.call("PUT", properties, json={"deduplication": "inherit"})
    session = await opened(daemon)
    assert session["lastSequenceId"] == -1
    await send(daemon, [0], producerEpoch=session["epoch"])
    messages = await daemon.poll()
    assert [each["payload"] for each in messages] == ["m0"] * 3
    assert [each["id"] >= session["enabledFrom"] for each in messages] == [False, False, True]
    assert (await daemon.call("GET", f"{TOPICS}/t/stats")).json()["enabledFrom"] == session["enabledFrom"]


# --- metrics -----------------------------------------------------------------------------------------


def counted(daemon, event):
    return daemon.service.metrics.registry.get_sample_value("plainsong_producer_events_total", {"event": event}) or 0


async def test_outcomes_of_publishes_of_producers_are_counted(daemon):
    await daemon.create()
    session = await opened(daemon)
    await opened(daemon)
    await send(daemon, [5])
    await send(daemon, [5])
    await send(daemon, [4, 5, 6])
    await send(daemon, [2])
    await send(daemon, [6, 7], atomic=True, status=409, code="partial_duplicate")
    await send(daemon, [9], producerEpoch=session["epoch"], status=409, code="producer_fenced")
    await daemon.publish("nobody's")
    assert [counted(daemon, word) for word in ("duplicate", "partial", "unremembered")] == [2, 1, 2]
    assert [counted(daemon, word) for word in ("partial_duplicate", "producer_fenced")] == [1, 1]
    await daemon.call("DELETE", f"{PRODUCERS}/p")
    assert counted(daemon, "removed") == 1

"""Inspecting messages without consuming them."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS, in_process

from broker.api.messages import show as messages
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.ids import pack_id, pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, encode_row
from tests.broker.cluster.in_process import cluster

LOOK = f"{TOPICS}/t/messages"


async def test_a_message_is_shown_with_all_its_metadata(daemon):
    await daemon.create(ttl=100)
    first, _ = await daemon.publish("héllo")
    await daemon.publish({"payload": {"base64": "/w=="}, "ttlSeconds": 7})
    shown = (await daemon.call("GET", LOOK)).json()
    common = {"state": "plain", "writePointer": None, "attributes": {}}
    common |= {"producer": None, "sequenceId": None, "batch": None}
    assert shown[0] == common | {
        "id": first,
        "publishTimeMs": START_MS,
        "expiresMs": START_MS + 100_000,
        "size": 6,
        "payload": "héllo",
    }
    assert shown[1]["payload"] == {"base64": "/w=="}
    assert shown[1]["expiresMs"] == START_MS + 7_000
    as_base64 = (await daemon.call("GET", LOOK + "?payload=base64")).json()
    assert as_base64[0]["payload"] == {"base64": "aMOpbGxv"}


async def test_peeking_consumes_nothing_and_moves_no_reader(daemon):
    await daemon.create()
    await daemon.publish("a", "b")
    for _ in range(2):
        assert [each["payload"] for each in (await daemon.call("GET", LOOK)).json()] == ["a", "b"]


async def test_from_is_inclusive_and_to_is_exclusive_by_id_and_by_time(daemon):
    await daemon.create()
    for index in range(5):
        await daemon.publish(str(index), ms=START_MS + index)

    async def look(**parameters):
        return "".join(each["payload"] for each in (await daemon.call("GET", LOOK, params=parameters)).json())

    assert await look(**{"from": START_MS + 1, "to": START_MS + 3}) == "12"
    ids = [each["id"] for each in (await daemon.call("GET", LOOK)).json()]
    assert await look(**{"from": ids[2], "to": ids[4]}) == "23"
    assert await look(**{"from": ids[2], "to": START_MS + 99}) == "234"
    assert await look(**{"from": ids[4], "to": ids[2]}) == ""
    assert await look(to=0) == ""
    assert await look(**{"from": START_MS + 99}) == ""


async def test_a_hundred_messages_are_shown_by_default_and_a_thousand_at_most(daemon):
    await daemon.create()
    await daemon.publish(*(str(number) for number in range(1200)))
    answer = await daemon.call("GET", LOOK)
    assert len(answer.json()) == 100
    assert answer.headers["plainsong-end"] == "more"
    assert answer.headers["plainsong-last-id"] == answer.json()[-1]["id"]
    assert len((await daemon.call("GET", LOOK + "?limit=1000")).json()) == 1000
    for limit in (0, -1, 1001, "x"):
        await daemon.call("GET", LOOK + f"?limit={limit}", status=400, code="invalid_parameter")


async def test_an_answer_is_bounded_in_bytes_but_has_at_least_one_message():
    from broker_in_process import in_process

    async with in_process(poll__max_bytes=250) as daemon:
        await daemon.create()
        await daemon.publish("x" * 1000, "y" * 100, "z" * 100, "e")
        assert len((await daemon.call("GET", LOOK)).json()) == 1
        second = (await daemon.call("GET", LOOK)).headers["plainsong-last-id"]
        rest = await daemon.call("GET", LOOK, params={"from": second[:20] + "1" * 20})
        assert [each["size"] for each in rest.json()] == [100, 100, 1]
        assert rest.headers["plainsong-end"] == "end"


async def test_expired_messages_are_hidden_to_the_millisecond(daemon):
    await daemon.create(ttl=10)
    await daemon.publish("long", {"payload": "short", "ttlSeconds": 1})
    daemon.clock.ms = START_MS + 1_000
    assert len((await daemon.call("GET", LOOK)).json()) == 2
    daemon.clock.ms += 1
    assert [each["payload"] for each in (await daemon.call("GET", LOOK)).json()] == ["long"]
    daemon.clock.ms = START_MS + 10_001
    assert (await daemon.call("GET", LOOK)).json() == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "garbled"),
        (b"\x40", "flags"),
        (b"\x00\x08ab", "its parts say"),
        (b"\x01\x00\x00", "garbled"),
        (encode_row(MessageRow(None, pointer=5)), "no readable reference"),
    ],
)
async def test_a_row_that_cannot_be_read_is_shown_as_damaged_between_its_neighbours(daemon, value, words):
    await daemon.create()
    await daemon.publish("before")
    await daemon.publish("hurt", ms=START_MS + 1)
    await daemon.publish("after", ms=START_MS + 2)
    key = generation_prefix(TopicName("ns", "t"), 1) + pack_position(START_MS + 1, 0)
    daemon.store.inner.apply([put_one(Table.MESSAGE, key, value)])
    before, hurt, after = (await daemon.call("GET", LOOK)).json()
    assert (before["payload"], after["payload"]) == ("before", "after")
    assert hurt.keys() == {"id", "state", "detail"}
    assert (hurt["id"], hurt["state"]) == (pack_id(START_MS + 1, 0).hex(), "damaged")
    assert words in hurt["detail"]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("from=abc", "invalid_message_id"),
        ("to=" + "0" * 39, "invalid_message_id"),
        ("from=-1", "invalid_parameter"),
        ("form=1", "invalid_parameter"),
        ("from=1&from=2", "invalid_parameter"),
        ("payload=hex", "invalid_parameter"),
        ("from=%ff", "invalid_parameter"),
    ],
)
async def test_wrong_parameters_are_refused(daemon, query, code):
    await daemon.create()
    await daemon.call("GET", f"{LOOK}?{query}", status=400, code=code)


async def test_a_store_that_cannot_be_read_is_a_503(daemon):
    await daemon.create()
    await daemon.publish("a")
    daemon.store.fail_next("scan")
    answer = await daemon.call("GET", LOOK, status=503, code="storage_failed")
    assert answer.headers["retry-after"]
    assert len((await daemon.call("GET", LOOK)).json()) == 1


# --- beginnings of payloads, the newest first, a text, one message ---------------------------------


async def look(daemon, **parameters):
    return await daemon.call("GET", LOOK, params=parameters)


def shown(answer):
    return [each["payload"] for each in answer.json()]


async def test_payloads_are_cut_on_request_and_their_size_is_still_shown(daemon):
    await daemon.create()
    await daemon.publish("abcdef", "ab", {"base64": "/////////w=="}, "ééé")
    found = (await look(daemon, payloadBytes=3)).json()
    assert [each["payload"] for each in found] == ["abc", "ab", {"base64": "////"}, "é"]
    assert [each["size"] for each in found] == [6, 2, 7, 6]
    assert [each.get("truncated") for each in found] == [True, None, True, True]
    assert shown(await look(daemon, payloadBytes=0, payload="base64"))[0] == {"base64": ""}
    await daemon.call("GET", LOOK + "?payloadBytes=-1", status=400, code="invalid_parameter")


async def test_beginnings_of_large_messages_fit_into_an_answer_that_is_too_small_for_them():
    async with in_process(poll__max_bytes=1 << 20) as daemon:
        await daemon.create()
        for _ in range(3):
            await daemon.publish("x" * (1 << 20))
        assert len((await look(daemon)).json()) == 1
        found = await look(daemon, payloadBytes=10)
        assert [(each["size"], len(each["payload"])) for each in found.json()] == [(1 << 20, 10)] * 3
        assert found.headers["plainsong-end"] == "end"


async def stored_and_plain(daemon):
    """Publish messages with ascending payloads, some of them stored first, so that one row stands for several."""
    await daemon.publish("0", "1")
    begun = (await daemon.call("POST", "/v1/transactions")).json()
    under = {"transactionWritePointer": begun["writePointer"]}
    for at in ("2", "3"):
        await daemon.call("POST", f"{TOPICS}/t/store", json={**under, "messages": [at]})
    await daemon.call("POST", f"{TOPICS}/t/publish", json={**under, "messages": ["4"]})
    await daemon.call("POST", f"/v1/transactions/{begun['id']}/commit")
    daemon.clock.ms += 5
    await daemon.publish("5", "6", "7")


async def test_newest_first_is_the_reverse_of_the_same(daemon):
    await daemon.create()
    await stored_and_plain(daemon)
    forward = (await look(daemon)).json()
    assert [each["payload"] for each in forward] == list("01234567")
    assert (await look(daemon, order="desc")).json() == forward[::-1]
    for one in forward:
        for other in forward:
            bounds = {"from": one["id"], "to": other["id"]}
            some = (await look(daemon, **bounds)).json()
            assert (await look(daemon, order="desc", **bounds)).json() == some[::-1], bounds


@pytest.mark.parametrize("limit", [1, 2, 3, 100])
async def test_pages_from_the_newest_down_have_every_message_once(daemon, limit):
    await daemon.create()
    await stored_and_plain(daemon)
    seen, to = [], {}
    while True:
        page = await look(daemon, order="desc", limit=limit, **to)
        seen += shown(page)
        if page.headers["plainsong-end"] == "end":
            break
        to = {"to": page.headers["plainsong-last-id"]}
    assert "".join(seen) == "76543210"


async def test_a_filter_finds_the_messages_whose_payloads_contain_its_text(daemon):
    await daemon.create()
    await daemon.publish("an order", "größe", {"base64": "AG9yZGVy/w=="}, "Order", "")
    found = await look(daemon, filter="order")
    assert shown(found) == ["an order", {"base64": "AG9yZGVy/w=="}]
    assert (found.headers["plainsong-scanned"], found.headers["plainsong-end"]) == ("5", "end")
    assert shown(await look(daemon, filter="öß")) == ["größe"]
    assert shown(await look(daemon, filter="order", order="desc")) == [{"base64": "AG9yZGVy/w=="}, "an order"]
    assert shown(await look(daemon, filter="n o", payloadBytes=2)) == ["an"]
    assert "plainsong-scanned" not in (await look(daemon, filter="")).headers


@pytest.mark.parametrize("order", ["asc", "desc"])
async def test_a_search_at_its_limit_reports_where_to_continue(daemon, order, monkeypatch):
    monkeypatch.setattr(messages, "MAX_SCANNED", 10)
    await daemon.create()
    await daemon.publish(*[f"{number}{'!' if number % 9 == 0 else ''}" for number in range(35)])
    seen, bounds, looks = [], {}, 0
    while True:
        page = await look(daemon, filter="!", order=order, limit=1, **bounds)
        seen += shown(page)
        assert int(page.headers["plainsong-scanned"]) <= 10
        looks += 1
        if page.headers["plainsong-end"] == "end":
            break
        last = page.headers["plainsong-last-id"]
        bounds = {"to": last} if order == "desc" else {"from": pack_bound(last)}
    expected = ["0!", "9!", "18!", "27!"]
    assert seen == (expected if order == "asc" else expected[::-1])
    assert looks >= 4


def pack_bound(text):
    """Return the bound after an id."""
    return (int(text, 16) + 1).to_bytes(20, "big").hex()


async def test_a_search_has_a_time_limit_too(daemon, monkeypatch):
    monkeypatch.setattr(messages, "MAX_SCAN_S", 0.0)
    await daemon.create()
    await daemon.publish(*["x"] * 1000)
    page = await look(daemon, filter="!")
    assert (page.headers["plainsong-scanned"], page.headers["plainsong-end"]) == ("256", "more")


@pytest.mark.parametrize(("text", "shows"), [("!", 0), ("x", 2)])
async def test_a_search_through_large_messages_checks_the_clock_more_often(daemon, monkeypatch, text, shows):
    monkeypatch.setattr(messages, "MAX_SCAN_S", 0.0)
    monkeypatch.setattr(messages, "CLOCK_EACH_BYTES", 15)
    await daemon.create()
    await daemon.publish(*["x" * 10] * 5)
    page = await look(daemon, filter=text)
    assert (page.headers["plainsong-scanned"], page.headers["plainsong-end"]) == ("2", "more")
    assert len(page.json()) == shows
    behind = await look(daemon, **{"from": pack_bound(page.headers["plainsong-last-id"])})
    assert len(behind.json()) == 3


async def test_a_single_message_of_any_kind_is_shown_in_full(daemon):
    await daemon.create()
    await stored_and_plain(daemon)
    for one in (await look(daemon)).json():
        assert (await daemon.call("GET", f"{LOOK}/{one['id']}")).json() == one
        bare = await daemon.call("GET", f"{LOOK}/{one['id']}", headers={"Accept": "application/octet-stream"})
        assert (bare.content, bare.headers["content-type"]) == (one["payload"].encode(), "application/octet-stream")
        assert bare.headers["content-disposition"] == f'attachment; filename="t-{one["id"]}"'
    assert (await daemon.call("GET", f"{LOOK}/{one['id']}?payload=base64")).json()["payload"] == {"base64": "Nw=="}
    behind = pack_bound(one["id"])
    await daemon.call("GET", f"{LOOK}/{behind}", status=404, code="not_found")
    await daemon.call("GET", f"{LOOK}/5", status=400, code="invalid_message_id")
    await daemon.call("GET", f"{TOPICS}/none/messages/{behind}", status=404, code="topic_not_found")
    daemon.clock.ms += 8 * 24 * 3_600_000
    await daemon.call("GET", f"{LOOK}/{one['id']}", status=404, code="not_found")


async def test_messages_are_shown_through_any_instance():
    async with cluster("a", "b") as nodes:
        nodes.move("ns:t", "b")
        await nodes["a"].create()
        first, last = await nodes["a"].publish("t", "one", "two")
        path = f"{TOPICS}/t/messages"
        newest = await nodes["a"].call("GET", f"{path}?order=desc&limit=1&payloadBytes=2")
        assert [(each["id"], each["payload"]) for each in newest.json()] == [(last, "tw")]
        bare = await nodes["a"].call("GET", f"{path}/{first}", headers={"Accept": "application/octet-stream"})
        assert bare.content == b"one"

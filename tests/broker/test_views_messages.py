"""Looking at messages without consuming them."""

from __future__ import annotations

import pytest
from broker_in_process import START_MS, TOPICS

from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.ids import pack_id, pack_position
from plainsong.protocol.keys import generation_prefix
from plainsong.protocol.names import TopicName
from plainsong.protocol.rows import MessageRow, encode_row

LOOK = f"{TOPICS}/t/messages"


async def test_a_message_is_shown_with_all_that_is_known_of_it(daemon):
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


async def test_looking_consumes_nothing_and_moves_no_reader(daemon):
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


async def test_a_hundred_are_shown_unless_told_otherwise_and_a_thousand_at_most(daemon):
    await daemon.create()
    await daemon.publish(*(str(number) for number in range(1200)))
    answer = await daemon.call("GET", LOOK)
    assert len(answer.json()) == 100
    assert answer.headers["plainsong-end"] == "more"
    assert answer.headers["plainsong-last-id"] == answer.json()[-1]["id"]
    assert len((await daemon.call("GET", LOOK + "?limit=1000")).json()) == 1000
    for limit in (0, -1, 1001, "x"):
        await daemon.call("GET", LOOK + f"?limit={limit}", status=400, code="invalid_parameter")


async def test_an_answer_is_bounded_in_bytes_but_has_one_message():
    from broker_in_process import in_process

    async with in_process(poll__max_bytes=250) as daemon:
        await daemon.create()
        await daemon.publish("x" * 1000, "y" * 100, "z" * 100, "e")
        assert len((await daemon.call("GET", LOOK)).json()) == 1
        second = (await daemon.call("GET", LOOK)).headers["plainsong-last-id"]
        rest = await daemon.call("GET", LOOK, params={"from": second[:20] + "1" * 20})
        assert [each["size"] for each in rest.json()] == [100, 100, 1]
        assert rest.headers["plainsong-end"] == "end"


async def test_what_has_expired_is_not_shown_to_the_millisecond(daemon):
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

"""CloudEvents over HTTP: published in each of the three modes, polled as a batch, read by the CloudEvents SDK."""

from __future__ import annotations

import base64
import gzip
import json
from datetime import UTC, datetime

import pytest
from broker_in_process import TOPICS, in_process
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event, to_binary_event, to_structured_event
from cloudevents.core.v1.event import CloudEvent

from plainsong.protocol.codec.cloud_events import BATCH_TYPE, EVENT_TYPE, events_pieces
from plainsong.protocol.page import Page, item

PUBLISH = f"{TOPICS}/t/publish"
POLL = f"{TOPICS}/t/poll"
EVENT = {"specversion": "1.0", "id": "A-1", "source": "/shop", "type": "com.example.sold"}
HEADERS = {f"ce-{name}": value for name, value in EVENT.items()}
ATTRIBUTES = {f"ce_{name}": value for name, value in EVENT.items()}


@pytest.fixture
async def daemon():
    async with in_process() as running:
        await running.create()
        yield running


async def publish(daemon, body, content_type=EVENT_TYPE, **more):
    content = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    headers = {"Content-Type": content_type, **more.pop("headers", {})}
    return await daemon.call("POST", PUBLISH, content=content, headers=headers, **more)


async def binary(daemon, body=b"", content_type=None, *, status=200, code=None, **headers):
    sent = HEADERS | {f"ce-{name}": value for name, value in headers.items()}
    if content_type is not None:
        sent["Content-Type"] = content_type
    sent = {name: value for name, value in sent.items() if value is not None}
    return await daemon.call("POST", PUBLISH, content=body, headers=sent, status=status, code=code)


async def poll(daemon, query="", accept=BATCH_TYPE, **body):
    answer = await daemon.call("POST", POLL + query, json=body, headers={"Accept": accept})
    assert answer.headers["content-type"] == BATCH_TYPE
    return answer


async def events(daemon, query=""):
    """Return the events of a poll, without the attribute that every event has."""
    found = (await poll(daemon, query)).json()
    ids = [message["id"] for message in await messages(daemon)]
    assert [event.pop("plainsongid") for event in found] == ids
    return found


async def messages(daemon):
    return (await daemon.call("POST", POLL, json={})).json()


def read_by_sdk(event):
    """Parse an event of a batch with the SDK."""
    return from_structured_event(HTTPMessage({"content-type": EVENT_TYPE}, json.dumps(event).encode()))


# --- publish -----------------------------------------------------------------------------------------


async def test_a_structured_event_round_trips_through_a_message(daemon):
    event = EVENT | {
        "subject": "Müller & Söhne",
        "time": "2026-04-05T17:31:00.123456Z",
        "datacontenttype": "application/json; charset=utf-8",
        "dataschema": "https://example.com/schema",
        "traceparent": "00-ab-cd-01",
        "data": {"sum": 12, "of": ["ä", None, True]},
    }
    answer = await publish(daemon, event, EVENT_TYPE + "; charset=UTF-8")
    assert answer.content == b""
    (message,) = await messages(daemon)
    assert json.loads(message["payload"]) == event["data"]
    assert message["attributes"] == ATTRIBUTES | {
        "ce_subject": "Müller & Söhne",
        "ce_time": "2026-04-05T17:31:00.123456Z",
        "ce_dataschema": "https://example.com/schema",
        "ce_traceparent": "00-ab-cd-01",
        "content-type": "application/json; charset=utf-8",
    }
    assert await events(daemon) == [event]


async def test_the_data_is_kept_byte_for_byte(daemon):
    data = '{ "sum" : 1.10,\n "big": 123456789012345678901234567890e400, "a": "\\u00e4" }'
    body = f' {{"data" : {data} , {json.dumps(EVENT)[1:]} '
    await publish(daemon, body.encode())
    assert [message["payload"] for message in await messages(daemon)] == [data]
    assert data in (await poll(daemon)).text


@pytest.mark.parametrize(
    ("more", "payload"),
    [
        ({"data": "a string"}, b'"a string"'),
        ({"data": 5, "datacontenttype": "application/vnd.x+json"}, b"5"),
        ({"data": None}, b"null"),
        ({"data": '<much wow="xml"/>ä', "datacontenttype": "application/xml"}, '<much wow="xml"/>ä'.encode()),
        ({"data_base64": "AP8=", "datacontenttype": "image/png"}, b"\0\xff"),
        ({"data_base64": "aGk=", "datacontenttype": "image/png"}, b"hi"),
        ({"data_base64": "/w=="}, b"\xff"),
        ({}, b""),
    ],
)
async def test_data_of_any_kind_round_trips(daemon, more, payload):
    await publish(daemon, EVENT | more)
    (message,) = (await daemon.call("POST", POLL + "?payload=base64", json={})).json()
    assert base64.b64decode(message["payload"]["base64"]) == payload
    assert await events(daemon) == [EVENT | more]


async def test_text_of_a_binary_type_becomes_bytes(daemon):
    event = EVENT | {"datacontenttype": "application/octet-stream"}
    await publish(daemon, event | {"data": "hi"})
    assert await events(daemon) == [event | {"data_base64": "aGk="}]


async def test_large_requests_and_pages_of_events_behave_like_small_ones(daemon):
    batch = [EVENT | {"id": str(number), "data": number} for number in range(1000)]
    await publish(daemon, batch, BATCH_TYPE)
    assert await events(daemon) == batch


async def test_null_attributes_are_left_out_and_others_become_text(daemon):
    await publish(daemon, EVENT | {"subject": None, "count": -5, "sampled": True, "x": ""})
    (message,) = await messages(daemon)
    assert message["attributes"] == ATTRIBUTES | {"ce_count": "-5", "ce_sampled": "true", "ce_x": ""}


async def test_a_batch_is_published_in_its_order(daemon):
    batch = [EVENT | {"id": str(number), "data": {"n": number}} for number in range(20)]
    answer = await publish(daemon, batch, BATCH_TYPE, headers={"Prefer": "return=representation"})
    found = await messages(daemon)
    assert (answer.json()["firstId"], answer.json()["lastId"]) == (found[0]["id"], found[-1]["id"])
    assert await events(daemon) == batch
    await publish(daemon, [], BATCH_TYPE, status=400, code="no_messages")


async def test_a_batch_with_a_mistake_publishes_nothing(daemon):
    wrong = {name: value for name, value in EVENT.items() if name != "type"}
    answer = await publish(daemon, [EVENT, wrong], BATCH_TYPE, status=400, code="invalid_parameter")
    assert "[1].type is missing" in answer.json()["detail"]
    assert await messages(daemon) == []


async def test_a_binary_event_has_its_attributes_in_headers_and_any_body(daemon):
    body = bytes(range(256))
    await binary(
        daemon, body, "application/vnd.thing", subject="Euro%20%E2%82%AC%20%f0%9f%98%80 100%25", quoted='"a \\"b\\" c"'
    )
    (message,) = await messages(daemon)
    assert base64.b64decode(message["payload"]["base64"]) == body
    expected = {"ce_subject": "Euro € 😀 100%", "ce_quoted": 'a "b" c', "content-type": "application/vnd.thing"}
    assert message["attributes"] == ATTRIBUTES | expected
    (event,) = await events(daemon)
    assert (event["subject"], event["quoted"]) == ("Euro € 😀 100%", 'a "b" c')
    assert event["datacontenttype"] == "application/vnd.thing"
    assert base64.b64decode(event["data_base64"]) == body


async def test_a_binary_event_with_a_json_body_is_not_a_publish_request(daemon):
    await binary(daemon, b'{"messages": ["x"]}', "application/json")
    assert [message["payload"] for message in await messages(daemon)] == ['{"messages": ["x"]}']
    await binary(daemon)
    (_, bare) = await messages(daemon)
    assert (bare["payload"], bare["attributes"]) == ("", ATTRIBUTES)
    assert (await events(daemon))[1] == EVENT


async def test_the_content_type_wins_over_event_headers(daemon):
    await publish(daemon, EVENT | {"id": "in the body"}, headers=HEADERS)
    assert [event["id"] for event in await events(daemon)] == ["in the body"]


async def test_a_time_to_live_and_a_receipt_are_requested_as_usual(daemon):
    answer = await daemon.call("POST", PUBLISH + "?ttl=60", headers=HEADERS | {"Prefer": "return=representation"})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["firstId"] == (await messages(daemon))[0]["id"]
    daemon.clock.ms += 61_000
    assert await messages(daemon) == []
    await daemon.call("POST", PUBLISH + "?nonsense=1", headers=HEADERS, status=400, code="invalid_parameter")


async def test_a_compressed_event_is_accepted(daemon):
    body = gzip.compress(b"<x/>")
    headers = HEADERS | {"Content-Type": "application/xml", "Content-Encoding": "gzip"}
    await daemon.call("POST", PUBLISH, content=body, headers=headers)
    headers = {"Content-Type": EVENT_TYPE, "Content-Encoding": "gzip"}
    await daemon.call("POST", PUBLISH, content=gzip.compress(json.dumps(EVENT).encode()), headers=headers)
    assert await events(daemon) == [EVENT | {"datacontenttype": "application/xml", "data": "<x/>"}, EVENT]


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", sorted(EVENT))
async def test_required_attributes_are_enforced_in_each_mode(daemon, missing):
    wrong = {name: value for name, value in EVENT.items() if name != missing}
    for event in (wrong, wrong | {missing: None}, wrong | {missing: ""}):
        answer = await publish(daemon, event, status=400, code="invalid_parameter")
        assert missing in answer.json()["detail"]
        await publish(daemon, [event], BATCH_TYPE, status=400, code="invalid_parameter")
    for value in (None, ""):
        await binary(daemon, b"x", "text/plain", status=400, code="invalid_parameter", **{missing: value})
    assert await messages(daemon) == []


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"specversion": "0.3"}, "invalid_parameter"),
        ({"id": 5}, "invalid_parameter"),
        ({"time": "yesterday"}, "invalid_parameter"),
        ({"time": "2026-02-30T00:00:00Z"}, "invalid_parameter"),
        ({"subject": ""}, "invalid_parameter"),
        ({"datacontenttype": ""}, "invalid_parameter"),
        ({"datacontenttype": 1}, "invalid_parameter"),
        ({"camelCase": "x"}, "invalid_parameter"),
        ({"x": {"y": 1}}, "invalid_parameter"),
        ({"x": 1.5}, "invalid_parameter"),
        ({"x": 1 << 31}, "invalid_parameter"),
        ({"x": "y" * 4096}, "invalid_parameter"),
        ({"data": 1, "data_base64": "AA=="}, "invalid_parameter"),
        ({"data": {}, "datacontenttype": "text/plain"}, "invalid_parameter"),
        ({"data": "ä", "datacontenttype": "text/plain; charset=latin-1"}, "invalid_parameter"),
        ({"data_base64": "A"}, "malformed_body"),
        ({"data_base64": 1}, "malformed_body"),
    ],
)
async def test_an_event_that_its_readers_would_refuse_is_refused(daemon, more, code):
    await publish(daemon, EVENT | more, status=400, code=code)
    assert await messages(daemon) == []


@pytest.mark.parametrize(
    "more", [{"subject": "%C0%A0"}, {"subject": "%ff"}, {"datacontenttype": "text/plain"}, {"data": "x"}, {"a-b": "x"}]
)
async def test_headers_that_are_not_attributes_of_an_event_are_refused(daemon, more):
    await binary(daemon, b"x", status=400, code="invalid_parameter", **more)


async def test_bodies_that_are_not_events_are_refused(daemon):
    for body in (b"", b"{", b"[]", b"5", b"[" * 100_000):
        await publish(daemon, body, status=400, code="malformed_body")
    for body in (b"", b"{}", b"[1]", b"[{}, 1]"):
        await publish(daemon, body, BATCH_TYPE, status=400, code="malformed_body")
    for content_type in (EVENT_TYPE + "; charset=latin-1", "application/cloudevents+avro", "application/cloudevents"):
        await publish(daemon, EVENT, content_type, status=415, code="unsupported_media_type")


async def test_events_are_published_and_never_stored(daemon):
    headers = {"Content-Type": EVENT_TYPE}
    await daemon.call("POST", f"{TOPICS}/t/store", json=EVENT, headers=headers, status=415)


# --- polls -------------------------------------------------------------------------------------------


async def test_plain_messages_are_returned_as_events(daemon):
    daemon.clock.ms = 1_700_000_000_123
    payloads = ["hello", '{"a": 1}', {"base64": "/w=="}, ""]
    items = [{"payload": payload, "attributes": {"color": "red", "routingKey": "x"}} for payload in payloads]
    await daemon.publish(*items, {"payload": "a,b", "attributes": {"content-type": "text/csv", "ce_id": "alone"}})
    ids = [message["id"] for message in await messages(daemon)]
    rest = [
        {"color": "red", "datacontenttype": "text/plain", "data": "hello"},
        {"color": "red", "data": {"a": 1}},
        {"color": "red", "data_base64": "/w=="},
        {"color": "red"},
        {"datacontenttype": "text/csv", "data": "a,b"},
    ]
    common = {"specversion": "1.0", "source": TOPICS + "/t", "type": "plainsong.message"}
    found = await events(daemon)
    assert [event.pop("time") for event in found] == ["2023-11-14T22:13:20.123Z"] * 5
    assert found == [common | {"id": each} | more for each, more in zip(ids, rest, strict=True)]


async def test_positions_work_in_polls_of_events_as_in_any_poll(daemon):
    await daemon.publish("1", "2", "3")
    answer = await poll(daemon, accept=f"application/json;q=0.1, {BATCH_TYPE}", limit=2)
    plain = await daemon.call("POST", POLL, json={"limit": 2})
    assert [event["data"] for event in answer.json()] == [1, 2]
    for name in ("Plainsong-Last-Id", "Plainsong-End"):
        assert answer.headers[name] == plain.headers[name]
    rest = await poll(daemon, startFrom=answer.headers["Plainsong-Last-Id"], inclusive=False)
    assert [event["data"] for event in rest.json()] == [3]
    assert (await poll(daemon, startFrom=rest.headers["Plainsong-Last-Id"], inclusive=False)).json() == []


async def test_a_poll_in_avro_may_be_answered_by_events_in_pages(daemon):
    await daemon.publish("x")
    # startFrom null, inclusive, no limit, no transaction
    headers = {"Content-Type": "avro/binary", "Accept": BATCH_TYPE}
    answer = await daemon.call("POST", POLL, content=bytes([4, 1, 2, 2]), headers=headers)
    assert [event["data"] for event in answer.json()] == ["x"]
    assert answer.headers["Plainsong-End"] == "end"


async def test_all_data_is_base64_on_request(daemon):
    await publish(daemon, EVENT | {"data": {"a": 1}})
    await daemon.publish("hello")
    first, second = await events(daemon, "?payload=base64")
    assert first == EVENT | {"data_base64": base64.b64encode(b'{"a": 1}').decode()}
    assert (second["data_base64"], "datacontenttype" in second) == ("aGVsbG8=", False)


async def test_invalid_json_is_returned_as_base64(daemon):
    for body in (b"{", b"NaN", b"[" * 100_000, b"\xef\xbb\xbf1", b'{"a": 1} x'):
        await binary(daemon, body, "application/json")
    found = await events(daemon)
    assert all("data_base64" in event for event in found)
    await publish(daemon, found, BATCH_TYPE)  # a polled batch can be published again
    assert [m["payload"] for m in (await messages(daemon))[5:]] == [m["payload"] for m in (await messages(daemon))[:5]]


def test_attributes_that_events_may_not_have_are_left_out_so_that_the_batch_can_be_read():
    attributes = ATTRIBUTES | {
        "ce_time": "soon",
        "ce_subject": "",
        "ce_data": "x",
        "ce_A": "x",
        "ce_ok": "x",
        "own": "x",
    }
    message_id = bytes.fromhex("0000018bcfe568000002" + "0" * 20)
    page = Page([item(message_id, b"1")], 1, 1, message_id, attributes={0: attributes})
    assert json.loads(b"".join(events_pieces(page, "/t"))) == [
        EVENT | {"ok": "x", "plainsongid": message_id.hex(), "data": 1}
    ]


# --- the SDK -----------------------------------------------------------------------------------------


async def test_the_cloudevents_sdk_publishes_and_reads(daemon):
    attributes = EVENT | {
        "time": datetime(2026, 4, 5, 17, 31, 0, 5000, UTC),
        "subject": "50 % of “x”",
        "datacontenttype": "application/json",
        "partitionkey": "a b",
    }
    event = CloudEvent(attributes, {"sum": [1, 2.5, "ä"]})
    for message in (to_binary_event(event), to_structured_event(event)):
        headers = {name: str(value) for name, value in message.headers.items()}
        await daemon.call("POST", PUBLISH, content=message.body, headers=headers)
    await daemon.publish("hello")
    found = [read_by_sdk(each) for each in (await poll(daemon)).json()]
    for each in found[:2]:
        assert {name: each.get_attributes()[name] for name in attributes} == attributes
        assert each.get_data() == event.get_data()
    assert found[2].get_type() == "plainsong.message"
    assert found[2].get_data() == "hello"

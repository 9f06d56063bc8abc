"""CloudEvents with any content: valid ones survive a round trip, invalid ones are refused with a proper error."""

from __future__ import annotations

import json
from contextlib import suppress

from hypothesis import example, given
from hypothesis import strategies as st

from plainsong.protocol.codec.cloud_events import decode_events, events_pieces
from plainsong.protocol.errors import BadRequest
from plainsong.protocol.page import Page, item

ID = bytes.fromhex("0000018bcfe568000002" + "0" * 20)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True).filter(lambda name: name not in OWN)
OWN = {"specversion", "id", "source", "type", "subject", "time", "datacontenttype", "dataschema", "data", "plainsongid"}
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
EVENTS = st.builds(
    lambda needed, more, data: {"specversion": "1.0", **needed, **more, **data},
    st.fixed_dictionaries({name: TEXT.filter(bool) for name in ("id", "source", "type")}),
    st.dictionaries(NAMES, TEXT, max_size=3),
    st.just({}) | st.builds(lambda data: {"data": data}, JSONS),
)
TYPES = st.none() | st.sampled_from(["application/json", "text/plain", "a/b;charset=x", "image/png", "", ";", "x"])


def encode_events(page, **options):
    return b"".join(events_pieces(page, "/t", **options))


def page_of(request):
    """Return a page with the messages of a publish."""
    items = [item(ID, payload) for payload in request.messages]
    return Page(items, len(items), 0, ID, attributes=dict(enumerate(request.attributes)))


@given(st.lists(EVENTS, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_events_round_trip(events, escaped, indent):
    body = json.dumps(events, ensure_ascii=escaped, indent=indent).encode()
    found = json.loads(encode_events(page_of(decode_events("batch", {}, body))))
    assert [event.pop("plainsongid") for event in found] == [ID.hex()] * len(events)
    assert found == events


@given(
    st.sampled_from(["structured", "batch"]), JSONS | st.lists(EVENTS | JSONS, max_size=3) | EVENTS, st.integers(0, 99)
)
def test_an_invalid_event_is_refused_cleanly(mode, value, cut):
    for body in (json.dumps(value).encode(), json.dumps(value).encode()[:cut]):
        with suppress(BadRequest):
            decode_events(mode, {}, body)


@given(st.dictionaries(st.from_regex(r"ce-\S{0,8}", fullmatch=True), st.text(st.characters(max_codepoint=255))))
@example({"ce-id": '"'})
@example({"ce-id": '"\\"'})
@example({"ce-id": "%"})
def test_headers_of_any_content_are_read_or_refused(headers):
    needed = {"ce-specversion": "1.0", "ce-id": "i", "ce-source": "s", "ce-type": "t"}
    try:
        request = decode_events("binary", needed | headers, b"")
    except BadRequest:
        return
    json.loads(encode_events(page_of(request)))


@given(st.binary(max_size=30) | TEXT.map(str.encode) | JSONS.map(lambda value: json.dumps(value).encode()), TYPES)
def test_a_message_of_any_content_is_shown_with_the_same_bytes(payload, content_type):
    attributes = {} if content_type is None else {"content-type": content_type}
    page = Page([item(ID, payload)], 1, len(payload), ID, attributes={0: attributes})
    shown = encode_events(page)
    (event,) = json.loads(shown)
    assert event["type"] == "plainsong.message"
    assert json.loads(encode_events(page, payload_base64=True))[0]["id"] == ID.hex()
    assert page_of(decode_events("batch", {}, shown)).parts == [item(ID, payload)]

"""Trace context: a valid context is added to every message that has none; an invalid one is ignored."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES, PublishRequest, check_publish
from plainsong.protocol.trace import carry_trace, is_sampled, trace_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("parent", "valid", "sampled"),
    [
        (PARENT, True, True),
        (PARENT[:-2] + "00", True, False),
        (PARENT[:-2] + "03", True, True),
        ("cc" + PARENT[2:] + "-of a later version", True, True),
        ("ff" + PARENT[2:], False, False),
        (PARENT.upper(), False, False),
        (PARENT + "0", False, False),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", False, False),
        (f"00-0af7651916cd43dd8448eb211c80319c-{'0' * 16}-01", False, False),
        ("", False, False),
        (PARENT + "\n", False, False),
    ],
)
def test_a_valid_traceparent_is_accepted_as_the_recommendation_says(parent, valid, sampled):
    assert trace_of({"traceparent": parent}) == ({"traceparent": parent} if valid else {})
    assert is_sampled(parent) is sampled


@pytest.mark.parametrize("state", ["", "x" * 513, "a=\x01", "a=é"])
def test_a_tracestate_that_cannot_be_passed_on_is_left_out(state):
    assert trace_of({"traceparent": PARENT, "tracestate": state}) == {"traceparent": PARENT}


def test_a_tracestate_alone_is_ignored():
    assert trace_of({"tracestate": "a=1"}) == {}


attributes = st.dictionaries(st.sampled_from(["k", "traceparent", "tracestate"]), st.text(max_size=8), max_size=3)


@given(own=st.none() | st.lists(attributes, min_size=2, max_size=2), state=st.sampled_from(["", "a=1"]))
def test_each_message_has_its_own_trace_or_that_of_its_request(own, state):
    request = PublishRequest([b"a", b"b"], attributes=None if own is None else [dict(each) for each in own])
    carry_trace(request, {"traceparent": PARENT, "tracestate": state})
    assert request.attributes is not None
    for before, after in zip(own or [{}, {}], request.attributes, strict=True):
        if "traceparent" in before:
            assert after == before
        else:
            assert after["traceparent"] == PARENT
            assert after.get("tracestate", "") == state  # never that of another context
            assert {name: text for name, text in after.items() if not name.startswith("trace")} == {
                name: text for name, text in before.items() if name != "tracestate"
            }


def test_a_message_whose_attributes_leave_no_room_is_published_without_a_trace():
    full = {"k": "x" * (MAX_ATTRIBUTE_BYTES - 10)}
    request = PublishRequest([b"a"], attributes=[full])
    carry_trace(request, {"traceparent": PARENT})
    assert request.attributes == [full]
    check_publish(request)


def test_a_request_without_messages_stays_without_attributes():
    request = PublishRequest([], write_pointer=7)
    carry_trace(request, {"traceparent": PARENT})
    assert request.attributes is None

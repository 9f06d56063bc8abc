"""A large JSON body is parsed in pieces: with the same result as in one go, and with pauses throughout."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from plainsong.protocol.codec import JSON
from plainsong.protocol.codec import json_values as values
from plainsong.protocol.errors import MalformedBody, PlainsongError, RequestTooLarge

MIB = 1 << 20
texts = st.text(max_size=40)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda each: st.lists(each, max_size=5) | st.dictionaries(texts, each, max_size=5),
    max_leaves=30,
)
#: A text that is cut off or changed at this place; it is usually not valid JSON.
spoiled = st.tuples(anything, st.integers(0, 400), st.sampled_from(["", "x", ",", "]", "}", '"', "\\", "[", " ", "1"]))


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(values, "_AT_ONCE_BYTES", 0)
    monkeypatch.setattr(values, "_PIECE_BYTES", 7)
    monkeypatch.setattr(values, "_WINDOW", 11)


def outcome(body: bytes) -> object:
    try:
        return values.parse_json(body)
    except PlainsongError as error:
        return type(error)


def at_once(body: bytes) -> object:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(values, "_AT_ONCE_BYTES", len(body))
        return outcome(body)


def in_small_pieces(body: bytes) -> object:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(values, "_AT_ONCE_BYTES", -1)
        patched.setattr(values, "_PIECE_BYTES", 7)
        patched.setattr(values, "_WINDOW", 11)
        return outcome(body)


@given(value=anything, indent=st.sampled_from([None, 0, 1]), is_ascii=st.booleans())
def test_pieces_have_the_same_value_as_the_whole(value, indent, is_ascii):
    body = json.dumps(value, indent=indent, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert in_small_pieces(body) == at_once(body)


@given(case=spoiled)
@example(case=([1], 2, ","))
@example(case=({"a": 1}, 7, ","))
def test_json_that_is_invalid_as_a_whole_is_invalid_in_pieces(case):
    value, at, mark = case
    text = json.dumps(value)
    body = (text[:at] + mark + text[at + 1 :]).encode()
    assert in_small_pieces(body) == at_once(body)


@given(body=st.binary(max_size=60))
def test_any_bytes_are_judged_alike_in_pieces_and_as_a_whole(body):
    assert in_small_pieces(body) == at_once(body)


@pytest.mark.parametrize(
    ("body", "at"),
    [
        (b'{"messages": ["' + "é".encode() * 40 + b"\xff" + b'"]}', 95),
        (b'{"messages": ["' + "é".encode() * 40 + b'", nope]}', 98),
    ],
    ids=["no UTF-8", "no JSON"],
)
def test_the_position_of_a_fault_counts_the_bytes_of_the_whole_body(small_pieces, body, at):
    with pytest.raises(MalformedBody, match=f"at byte {at}"):
        values.parse_json(body)


def test_a_duplicate_field_is_refused_in_pieces_too(small_pieces):
    with pytest.raises(MalformedBody, match="'messages' occurs twice"):
        values.parse_json(b'{"messages": ["some text"], "messages": ["some other text"]}')


def test_nested_lists_are_refused_and_not_read_again_for_each_level():
    deep = b"[" * 200_000 + b"]" * 200_000
    with pytest.raises(MalformedBody, match="nested too deeply"):
        values.parse_json(b'{"messages": [' + b" " * MIB + deep + b"]}")


def test_values_are_counted_with_an_escape_at_the_border_of_two_pieces(monkeypatch):
    monkeypatch.setattr(values, "MAX_VALUES", 20)
    monkeypatch.setattr(values, "_PIECE_BYTES", 7)
    for shift in range(7):
        body = json.dumps({"messages": ["x" * shift + '\\",[,{' * 20]}).encode()
        assert values.parse_json(body)
    with pytest.raises(RequestTooLarge):
        values.parse_json(json.dumps({"messages": [0] * 30}).encode())


@pytest.mark.parametrize(
    "entry",
    [
        "x" * 1000,
        "\n" * 500,
        {"payload": "x" * 100, "sequenceId": 7},
        {"payload": "x", "attributes": {"a": "b" * 3000}},
    ],
    ids=["strings", "escapes", "items", "large items"],
)
def test_no_large_part_of_a_body_is_parsed_without_a_pause(entry):
    """The work between two pauses is measured in bytes, because its duration depends on the machine."""
    one = json.dumps(entry).encode()
    count = 4 * MIB // len(one)
    body = b'{"messages": [' + b",".join([one] * count) + b"]}"
    pauses = []
    token = values.between_pieces.set(lambda: pauses.append(None))
    try:
        request = JSON.decode_publish(body)
    finally:
        values.between_pieces.reset(token)
    assert len(request.messages) == count
    # Counting, decoding and parsing each pause every 64 KiB, or a little later if an entry crosses the boundary.
    assert len(pauses) >= 2 * len(body) // (1 << 16)

"""The input of publish: lines, NDJSON, base64, files; in order, with nothing lost or added."""

from __future__ import annotations

import base64
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong.cli import inputs
from plainsong.cli.command import CommandFailed


class InPieces:
    """A source that returns the given pieces, one at a time."""

    def __init__(self, pieces):
        self._pieces = [piece for piece in pieces if piece]

    def read1(self, size):
        return self._pieces.pop(0) if self._pieces else b""


def payloads(pieces):
    return [item.payload for piece in pieces for item in piece.items]


@given(st.lists(st.binary(max_size=6)))
def test_lines_are_the_same_however_they_arrive(pieces):
    whole = b"".join(pieces)
    expected = whole.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert payloads(inputs.from_lines(InPieces(pieces), inputs.as_is)) == expected


def test_whole_lines_are_passed_on_before_more_is_read():
    found = inputs.from_lines(InPieces([b"a\nb", b"c\n"]), inputs.as_is)
    assert next(found).items == [inputs.InputMessage(b"a")]
    assert next(found).items == [inputs.InputMessage(b"bc")]


def test_an_empty_line_is_an_empty_message():
    assert payloads(inputs.from_lines(io.BytesIO(b"a\n\nb\n"), inputs.as_is)) == [b"a", b"", b"b"]


def test_batches_are_bounded_and_record_where_they_begin():
    found = list(inputs.from_lines(io.BytesIO(b"x\n" * (inputs.PIECE_MESSAGES + 5)), inputs.as_is))
    assert [(piece.first, len(piece.items)) for piece in found] == [
        (1, inputs.PIECE_MESSAGES),
        (inputs.PIECE_MESSAGES + 1, 5),
    ]
    big = ["x" * (inputs.PIECE_BYTES // 2 + 1)] * 3
    assert [piece.first for piece in inputs.from_arguments(big, inputs.as_is)] == [1, 2, 3]


def test_an_endless_line_is_refused(monkeypatch):
    monkeypatch.setattr(inputs, "MAX_MESSAGE_BYTES", 10)
    with pytest.raises(CommandFailed, match="line 2 is longer"):
        list(inputs.from_lines(InPieces([b"a\n", b"b" * 11]), inputs.as_is))


def test_a_file_too_large_for_a_message_is_not_read_to_its_end(monkeypatch, tmp_path):
    monkeypatch.setattr(inputs, "MAX_MESSAGE_BYTES", 10)
    file = tmp_path / "large"
    file.write_bytes(b"x" * 11)
    for path in (str(file), "-"):
        with pytest.raises(CommandFailed, match="the limit for a message"):
            list(inputs.from_files([path], InPieces([b"x" * 11, b"never asked for"]), inputs.as_is))


def test_lines_before_a_wrong_one_are_passed_on_first():
    found = inputs.from_lines(io.BytesIO(b'"a"\n"b"\n{\n"c"\n'), inputs.from_json)
    assert payloads([next(found)]) == [b"a", b"b"]
    with pytest.raises(CommandFailed, match="line 3: invalid JSON"):
        next(found)


@pytest.mark.parametrize(
    ("text", "item"),
    [
        (b'"text"', (b"text", None)),
        (b'{"base64": "AP8="}', (b"\x00\xff", None)),
        (b'{"payload": "p", "ttlSeconds": 5}', (b"p", 5)),
        (b'{"payload": {"base64": "AP8="}, "ttlSeconds": null}', (b"\x00\xff", None)),
        (b'{"payload": "a", "attributes": {"k": "v"}}', (b"a", None, {"k": "v"})),
        (b'{"payload": "a", "attributes": null}', (b"a", None)),
        (b'{"topic": "t", "id": "i", "publishTimeMs": 1, "payload": ""}', (b"", None)),
    ],
)
def test_a_line_of_ndjson_is_a_payload_or_an_object_around_one(text, item):
    assert inputs.from_json(text) == inputs.InputMessage(*item)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"5", "a payload must be a string"),
        (b'{"payload": {"a": 1}}', "omit --ndjson"),
        (b'{"payloads": "x"}', "did you mean 'payload'"),
        (b"{}", '"payload" is missing'),
        (b'{"payload": "x", "ttlSeconds": 0}', "got 0"),
        (b'{"payload": "x", "ttlSeconds": true}', "got True"),
        (b'{"base64": "?"}', "invalid base64"),
        (b'"\\ud800"', "surrogate"),
        (b'{"payload": "x", "attributes": {"k": "\\ud800"}}', "cannot be written as UTF-8"),
        (b'{"payload": "x", "attributes": {"\\ud800": "v"}}', "cannot be written as UTF-8"),
        (b'{"payload": "x", "attributes": {"k": "%s"}}' % (b"v" * 4096), "the attributes are 4097 bytes"),
        (b'{"payload": "x", "ttlSeconds": 2147483648}', "ttl_s is 2147483648"),
        (b"[" * 100_000, "nested"),
        (b"\xff", "invalid JSON"),
    ],
)
def test_an_invalid_message_is_refused_with_an_explanation(text, says):
    with pytest.raises(ValueError, match=says):
        inputs.from_json(text)


@given(st.binary(max_size=40))
def test_base64_is_decoded(payload):
    assert inputs.from_base64(base64.b64encode(payload)).payload == payload


def test_files_are_messages_as_a_whole_and_a_dash_is_standard_input(tmp_path):
    file = tmp_path / "picture"
    file.write_bytes(b"\x00\n\xff")
    found = inputs.from_files([str(file), "-"], InPieces([b"a\n", b"b"]), inputs.as_is)
    assert payloads(found) == [b"\x00\n\xff", b"a\nb"]
    with pytest.raises(CommandFailed, match="cannot be read: No such file"):
        list(inputs.from_files([str(tmp_path / "none")], InPieces([]), inputs.as_is))

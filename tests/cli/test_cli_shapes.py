"""Format strings, JSON lines, tables, and control characters that must not reach a terminal."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plainsong import MessageId
from plainsong.cli import inputs, output
from plainsong.cli.printing import Shape, escaped_bytes, json_line

ID = "0000018bcfe56805000100000000000000000000"


def message(payload=b"hello", topic="greetings", attributes=None):
    return SimpleNamespace(topic=topic, id=MessageId(ID), payload=payload, attributes=attributes or {})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("%p", b"hello"),
        ("%t %i %p", b"greetings " + ID.encode() + b" hello"),
        ("%T %m", b"2023-11-14T22:13:20.005Z 1700000000005"),
        ("%s%%", b"5%"),
        (r"%t\t%p\n\x00\\", b"greetings\thello\n\x00\\"),
        ("é %p", "é hello".encode()),
        ("", b""),
    ],
)
def test_a_format_names_the_parts_of_a_message(text, line):
    assert Shape(text)(message()) == line


def test_attributes_are_printed_as_json_on_request():
    assert Shape("%p %a")(message(attributes={"key": "téxt"})) == 'hello {"key":"téxt"}'.encode()
    assert Shape("%a")(message()) == b"{}"
    assert json.loads(json_line(message(attributes={"key": "text"})))["attributes"] == {"key": "text"}
    assert "attributes" not in json.loads(json_line(message()))


@pytest.mark.parametrize("text", ["%q", "%", r"\q", "\\", r"\x1", r"%p\xzz"])
def test_a_format_with_an_unknown_part_is_refused(text):
    with pytest.raises(ValueError, match="; use "):
        Shape(text)


@given(st.binary(max_size=50))
def test_a_payload_is_printed_unchanged(payload):
    assert Shape("<%p>")(message(payload)) == b"<" + payload + b">"


@given(st.binary(max_size=50))
def test_publish_reads_what_poll_prints_as_json(payload):
    assert inputs.from_json(json_line(message(payload))) == (payload, None, {})
    strings = {"key": "text"}
    assert inputs.from_json(json_line(message(payload, attributes=strings))) == (payload, None, strings)


def test_a_json_line_has_the_topic_the_id_the_time_and_the_payload():
    assert json.loads(json_line(message())) == {
        "topic": "greetings",
        "id": ID,
        "publishTimeMs": 1_700_000_000_005,
        "payload": "hello",
    }


def test_control_characters_and_broken_text_are_escaped_at_a_terminal():
    assert escaped_bytes(b"a\x1b[2Jb\tc\xff\r") == rb"a\x1b[2Jb" + b"\t" + rb"c\xff\r"
    assert escaped_bytes("é ok".encode()) == "é ok".encode()


@given(st.binary(max_size=80))
def test_no_terminal_control_sequence_gets_through(line):
    shown = escaped_bytes(line).decode()
    assert all(char.isprintable() or char in "\t\n" for char in shown)


def test_a_table_respects_its_width():
    rows = [("a-topic-with-a-very-long-name-" * 4, "12 345 678", "99.9 KiB"), ("b", "1", "1 B")]
    lines = output.table(("TOPIC", ">MESSAGES", ">SIZE"), rows, columns=80)
    assert max(map(len, lines)) <= 80
    assert len({line.rindex(" B") for line in lines if line.endswith(" B")} | {len(lines[0])}) == 2
    assert lines[1].split("  ")[0].endswith("…")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1048570, "1.0 MiB"),
        (1 << 34, "16.0 GiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_sizes_are_shown_in_binary_units(count, text):
    assert output.show_bytes(count) == text


def test_counts_rates_and_short_times_are_shown_short():
    assert [output.show_count(n, grouped=True) for n in (None, 0, 1234567)] == ["-", "0", "1 234 567"]
    assert output.show_count(1000, estimated=True, grouped=True) == "~1 000"
    assert [output.show_rate(n) for n in (0, 0.4, 1234.5)] == ["0", "0.4/s", "1234/s"]
    assert [output.show_seconds(n) for n in (12e-6, 0.00345, 1.5)] == ["12 µs", "3.45 ms", "1.5 s"]

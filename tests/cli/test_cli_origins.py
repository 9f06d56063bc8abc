"""The command line shows a message's producer, batch and attributes."""

from __future__ import annotations

import json

import pytest

from plainsong.cli.command import Exit


@pytest.fixture
def numbers(cli):
    cli("topic", "create", "numbers")
    return "numbers"


def test_peek_shows_producer_sequence_id_batch_and_attributes(cli, numbers):
    cli("publish", numbers, "plain")
    cli("publish", numbers, "--producer", "loader", "--sequence-id", "7", "--atomic", "--attribute", "k=v", "a", "b")
    plain, first, second = cli("peek", numbers, "--json").rows
    assert (plain["producer"], plain["sequenceId"], plain["batch"], plain["attributes"]) == (None, None, None, {})
    assert (first["producer"], first["sequenceId"], first["batch"]) == ("loader", 7, {"index": 0, "count": 2})
    assert (second["producer"], second["sequenceId"], second["batch"]) == ("loader", 8, {"index": 1, "count": 2})
    lines = cli("peek", numbers).lines
    assert lines[-2:] == ["  producer loader, sequence id 8, message 2 of 2 in a batch", "  k=v"]
    assert len(lines) == 2 + 4 + 4


def test_attributes_control_no_terminal_and_break_no_line(cli, numbers):
    long = "x" * 300
    cli("publish", numbers, "--attribute", "k=\x1b[2J\nsecond line", "--attribute", f"long={long}", "a")
    lines = cli("peek", numbers).lines
    assert len(lines) == 3
    assert "\x1b" not in lines[2]
    assert max(map(len, lines)) <= 80


def test_poll_and_tail_print_attributes_as_publish_accepts_them(cli, numbers, monkeypatch, tmp_path):
    cli("publish", numbers, "--attribute", "k=é", "--routing-key", "r", "a")
    cli("publish", numbers, "b")
    printed = cli("poll", numbers, "--json")
    assert [each.get("attributes") for each in printed.rows] == [{"k": "é", "routingKey": "r"}, None]
    assert cli("poll", numbers, "-f", "%p %a").lines == ['a {"k":"é","routingKey":"r"}', "b {}"]
    followed = cli("tail", numbers, "--from", "oldest", "--limit", "2", "--json").rows
    assert [each.get("attributes") for each in followed] == [{"k": "é", "routingKey": "r"}, None]
    cli("topic", "create", "copy")
    (tmp_path / "lines").write_text("".join(json.dumps(row) + "\n" for row in printed.rows))
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        cli("publish", "copy", "--ndjson")
    assert cli("poll", "copy", "-f", "%p %a").lines == ['a {"k":"é","routingKey":"r"}', "b {}"]


def test_a_transaction_refuses_lines_with_attributes_rather_than_lose_them(cli, numbers, monkeypatch, tmp_path):
    (tmp_path / "lines").write_text('"a"\n{"payload": "b", "attributes": {"k": "v"}}\n')
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        said = cli("publish", numbers, "--ndjson", "--tx", code=Exit.USAGE)
    assert "attributes" in said.err
    assert cli("poll", numbers, "--isolation", "committed").lines == []

"""Producers and namespaces from the command line, with a real daemon: stored once, in one batch, and administration."""

from __future__ import annotations

import pytest

from plainsong.cli.command import Exit


@pytest.fixture
def numbers(cli):
    cli("topic", "create", "numbers")
    return "numbers"


def publish(cli, *arguments, **more):
    return cli("publish", "numbers", *arguments, **more)


# --- publish -----------------------------------------------------------------------------------------


def test_messages_published_again_by_a_producer_are_stored_once(cli, numbers):
    arguments = ("--producer", "loader", "--sequence-id", "0", "a", "b", "c")
    assert publish(cli, *arguments).out.startswith("published 3 messages, last id ")
    again = publish(cli, *arguments)
    assert again.out.startswith("published 3 messages, 3 messages of them already stored")
    assert cli("poll", numbers).lines == ["a", "b", "c"]


def test_an_interrupted_run_is_completed(cli, numbers):
    publish(cli, "--producer", "loader", "--sequence-id", "0", "a", "b")
    told = publish(cli, "--producer", "loader", "--sequence-id", "0", "a", "b", "c", "--json").json
    assert (told["messages"], told["storedBefore"], told["lastSequenceId"]) == (3, 2, 2)
    assert (told["producer"], told["topic"]) == ("loader", numbers)
    assert cli("poll", numbers).lines == ["a", "b", "c"]


def test_without_a_sequence_id_a_producer_continues_after_its_last(cli, numbers):
    publish(cli, "--producer", "loader", "--sequence-id", "40", "a")
    assert publish(cli, "--producer", "loader", "b", "--json").json["lastSequenceId"] == 41
    assert cli("poll", numbers).lines == ["a", "b"]


def test_attributes_and_the_routing_key_go_with_every_message(cli, numbers):
    publish(cli, "--attribute", "origin=shop", "--attribute", "x=a=b", "--routing-key", "k", "one", "two")
    seen = cli("peek", numbers, "--json").rows
    assert [each["attributes"] for each in seen] == [{"origin": "shop", "x": "a=b", "routingKey": "k"}] * 2


def test_a_line_of_ndjson_has_attributes_of_its_own(cli, numbers, monkeypatch, tmp_path):
    (tmp_path / "lines").write_text('{"payload": "a", "attributes": {"k": "own"}}\n"b"\n')
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        publish(cli, "--ndjson", "--attribute", "k=shared", "--attribute", "more=1")
    seen = cli("peek", numbers, "--json").rows
    assert [each["attributes"] for each in seen] == [{"k": "own", "more": "1"}, {"k": "shared", "more": "1"}]


@pytest.mark.parametrize(
    "bad", ['{"payload": "b", "attributes": {"k": "\\ud800"}}', '{"payload": "b", "ttlSeconds": 2147483648}']
)
def test_lines_before_one_that_cannot_be_written_are_published_and_counted(cli, numbers, monkeypatch, tmp_path, bad):
    (tmp_path / "lines").write_text(f'"a"\n{bad}\n"c"\n')
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        said = publish(cli, "--ndjson", code=Exit.USAGE)
    assert "error: line 2: " in said.err
    assert "1 message published, last id" in said.err
    assert cli("poll", numbers).lines == ["a"]


def test_an_atomic_publish_is_one_batch(cli, numbers):
    said = publish(cli, "--atomic", *map(str, range(20)))
    assert said.out.startswith("published 20 messages in one batch")
    assert cli("poll", numbers).lines == [str(number) for number in range(20)]


def test_an_atomic_publish_that_is_partly_stored_is_refused(cli, numbers):
    arguments = ("--producer", "p", "--sequence-id", "0", "--atomic")
    publish(cli, *arguments, "a", "b")
    said = publish(cli, *arguments, "a", "b", "c", "--json", code=Exit.FAILED)
    assert '"partial_duplicate"' in said.err
    assert cli("poll", numbers).lines == ["a", "b"]


def test_an_oversized_batch_is_refused_before_it_is_sent(cli, numbers, tmp_path):
    (tmp_path / "large").write_bytes(bytes(9 << 20))
    said = publish(cli, "--atomic", "--file", "large", "--file", "large", code=Exit.USAGE)
    assert "--tx takes any number" in said.err
    assert cli("poll", numbers).out == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--sequence-id", "5"),
        ("--producer", "p", "--tx"),
        ("--atomic", "--tx"),
        ("--attribute", "x"),
        ("--attribute", "=x"),
        ("--producer", "p", "--sequence-id", "-1"),
    ],
)
def test_incompatible_options_are_refused(cli, numbers, arguments):
    publish(cli, *arguments, "m", code=Exit.USAGE)


def test_a_producer_is_refused_when_deduplication_is_off(cli):
    cli("topic", "create", "numbers", "deduplication=disabled")
    said = publish(cli, "--producer", "p", "a", "--json", code=Exit.FAILED)
    assert '"deduplication_disabled"' in said.err
    assert cli("poll", "numbers").out == ""


# --- producer ----------------------------------------------------------------------------------------


def test_producers_are_listed_with_their_retention(cli, numbers):
    for name in ("b", "a"):
        publish(cli, "--producer", name, "--sequence-id", "0", "x", "y")
    heading, first, second, _, *about = cli("producer", "ls", numbers).lines
    assert heading.split()[:3] == ["PRODUCER", "LAST", "SENT"]
    assert (first.split()[:3], second.split()[:3]) == (["a", "1", "1"], ["b", "1", "1"])
    assert about[0] == "deduplication  on, set by the service"
    assert about[1] == "producers      2 of numbers"
    page = cli("producer", "ls", numbers, "--after", "a", "--limit", "1", "--json").json
    assert [each["producer"] for each in page["producers"]] == ["b"]


def test_a_producer_is_shown_and_forgotten(cli, numbers):
    publish(cli, "--producer", "a/b", "--sequence-id", "7", "x", "y")
    shown = cli("producer", "show", numbers, "a/b").out
    assert "a/b of numbers, generation 1" in shown
    assert "sequence id 8" in shown
    assert "7 to 8" in shown
    assert cli("producer", "show", numbers, "a/b", "--generation", "1", "--json").json["lastSequenceId"] == 8
    cli("producer", "delete", numbers, "a/b", code=Exit.USAGE)
    assert cli("producer", "rm", numbers, "a/b", "--yes").out == "forgot a/b; its last sequence id was 8\n"
    said = cli("producer", "show", numbers, "a/b", code=Exit.NOT_FOUND)
    assert "has no producer" in said.err


def test_the_nearest_producer_is_named(cli, numbers):
    publish(cli, "--producer", "loader", "x")
    said = cli("producer", "show", numbers, "loadr", code=Exit.NOT_FOUND)
    assert "did you mean 'loader'?" in said.err


def test_names_cannot_control_a_terminal(cli, numbers):
    publish(cli, "--producer", "a\x1b]0;b\x07\n", "x")
    said = cli("producer", "show", numbers, "zzz", code=Exit.NOT_FOUND)
    assert "hint: known: a ]0;b  \n" in said.err
    said = cli("producer", "delete", numbers, "a\x1b]0;b\x07\n", code=Exit.USAGE)
    assert "Forget a ]0;b   of" in said.err


# --- namespace ---------------------------------------------------------------------------------------


def test_a_namespace_says_whether_producers_are_remembered(cli, numbers):
    shown = cli("namespace", "show", "--json").json
    assert shown["properties"] == {"deduplication": "inherit"}
    assert shown["name"] in cli("namespace", "list").lines
    said = cli("namespace", "set", shown["name"], "deduplication=disabled").out
    assert "in force       off, set by the namespace" in said
    publish(cli, "--producer", "p", "a", code=Exit.FAILED)
    cli("namespace", "set", shown["name"], "deduplication=default")
    publish(cli, "--producer", "p", "a")


@pytest.mark.parametrize(
    ("assignment", "says"),
    [("dedup=x", "did you mean 'deduplication'"), ("deduplication", "no value"), ("deduplication=maybe", "maybe")],
)
def test_invalid_properties_of_a_namespace_are_refused(cli, assignment, says):
    said = cli("namespace", "set", "ns", assignment, code=Exit.USAGE)
    assert says in said.err

"""Everyday use: the position of options, confirmation before hiding messages, figures, hints, one line per result."""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from plainsong import Client, __version__
from plainsong.cli import machine
from plainsong.cli.command import Exit
from plainsong.cli.main import program
from plainsong.cli.output import counted, show_count
from plainsong.positions import now_ms
from plainsong.protocol.plurals import plural
from tests.cli.conftest import Said, url_of
from tests.daemon.harness import Daemon
from tests.patience import PATIENCE_S

Cli = Callable[..., Said]


@pytest.fixture
def client(cli: Cli) -> Iterator[Client]:
    """A client in the command line's namespace, with a topic."""
    with Client.from_environment() as client:
        client.create_topic("orders")
        yield client


@pytest.fixture(autouse=True)
def quiet_loggers() -> Iterator[None]:
    """``-v`` configures the loggers of its process, which is the tests' process here; restore them."""
    logger = logging.getLogger("plainsong")
    before = (logger.level, logger.handlers, logger.propagate)
    yield
    logger.setLevel(before[0])
    logger.handlers, logger.propagate = before[1], before[2]


# --- options before and after the verb -----------------------------------------------------------------


def test_options_may_be_before_the_verb_between_its_words_and_after_it(alone, running: Daemon):
    url = url_of(running)
    alone("--url", url, "--namespace", "places", "topic", "create", "here", code=0)
    for words in (
        ("--url", url, "-n", "places", "--json", "topic", "list"),
        ("topic", "--url", url, "-n", "places", "--json", "list"),
        ("topic", "list", "--url", url, "-n", "places", "--json"),
        ("--url", "http://127.0.0.1:1", "-n", "elsewhere", "topic", "list", "--json", "--url", url, "-n", "places"),
    ):
        assert alone(*words, code=0).json == ["here"], words


def test_verbose_prints_requests_and_answers(cli: Cli, client: Client):
    for words in (("-v", "publish", "orders", "a"), ("publish", "orders", "a", "--verbose")):
        said = cli(*words)
        assert "/topics/orders/publish, " in said.err
        assert "bytes: 200, " in said.err
        assert said.err.count("POST http") == 1


def test_a_timeout_applies_to_each_call(alone):
    said = alone("--timeout", "50ms", "topic", "list", "--url", "http://127.0.0.1:1", code=Exit.UNAVAILABLE)
    assert "no daemon answers" in said.err
    assert "invalid duration" in alone("topic", "list", "--timeout", "soon", code=Exit.USAGE).err


def test_help_and_version_are_verbs_too(alone):
    assert alone("help", "topic", "create", code=0).out == alone("topic", "create", "--help", code=0).out
    assert alone("help", code=0).out == alone("--help", code=0).out
    assert "did you mean 'create'" in alone("help", "topic", "crate", code=Exit.USAGE).err
    assert alone("version", code=0).lines[0].split() == ["plainsong", __version__]
    assert alone("version", "--json", code=0).json["plainsong"] == __version__


def test_every_verb_but_those_that_print_for_programs_anyway_has_json():
    def verbs(
        command: click.Command, words: tuple[str, ...], ctx: click.Context
    ) -> Iterator[tuple[tuple[str, ...], click.Command]]:
        if not isinstance(command, click.Group):
            yield words, command
            return
        for name in command.list_commands(ctx):
            found = command.get_command(ctx, name)
            yield from verbs(found, (*words, name), click.Context(found, parent=ctx, info_name=name))

    every = dict(verbs(program, (), click.Context(program, info_name="plainsong")))
    without = {
        " ".join(words) for words, verb in every.items() if not any(each.name == "as_json" for each in verb.params)
    }
    assert without == {"completion", "help", "serve"}


# --- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("poll", "--json"), ("--json", "poll"), ("poll", "notes", "--limit", "x", "--json"), ("--json", "bogus")],
    ids=" ".join,
)
def test_a_wrong_command_line_is_reported_in_json_too(alone, words: tuple[str, ...]) -> None:
    said = json.loads(alone(*words, code=Exit.USAGE).err)
    assert said["error"]
    assert said["hint"].startswith("try plainsong")
    assert said["exit"] == Exit.USAGE
    assert alone("poll", "--", "--json", "x", code=Exit.USAGE).err.startswith("error: ")


def test_tail_shows_the_last_messages_of_each_topic(cli: Cli, client: Client):
    client.create_topic("returns")
    client.publish("orders", [b"1", b"2", b"3"])
    client.publish("returns", [b"4", b"5", b"6"])
    lines = cli("tail", "orders", "returns", "--last", "2", "--limit", "4").lines
    assert sorted(lines) == ["orders 2", "orders 3", "returns 5", "returns 6"]
    assert sorted(cli("tail", "*", "--last", "9", "--limit", "6").lines)[0] == "orders 1"


def test_grep_prints_matching_messages_and_the_limit_counts_those(cli: Cli, client: Client):
    client.publish("orders", [b"error: disk", b"fine", b"\xff error", b"fine too", b"error: net"])
    assert cli("poll", "orders", "--grep", "^error").lines == ["error: disk", "error: net"]
    assert cli("poll", "orders", "--grep", "error", "--limit", "1").lines == ["error: disk"]
    assert cli("tail", "orders", "--from", "oldest", "--grep", "^error", "--limit", "2").lines == [
        "error: disk",
        "error: net",
    ]
    said = cli("poll", "orders", "--grep", "(", code=Exit.USAGE)
    assert "invalid regular expression" in said.err


# --- confirmation ---------------------------------------------------------------------------------------


def test_a_ttl_that_would_hide_messages_asks_first_with_their_count(cli: Cli, client: Client, tmp_path: Path):
    client.publish("orders", [b"1", b"2"], ttl_s=None)
    kept = client.admin.properties("orders")["ttl"]
    assert cli("topic", "set", "orders", "ttl=1d").out
    client.admin.set_properties("orders", ttl_s=int(kept))
    declared = tmp_path / "topics.toml"
    declared.write_text('[topics.orders]\nttl = "1s"\n')
    newest_ms = client.poll("orders")[-1].id.publish_time_ms
    while now_ms() <= newest_ms + 1000:
        pass
    for words, asks in (
        (("topic", "set", "orders", "ttl=1s"), "A ttl of 1s hides 2 messages of orders forever. Set it?"),
        (("definitions", "import", str(declared)), "orders gets a shorter ttl, which hides 2 messages"),
    ):
        assert asks in cli(*words, code=Exit.USAGE).err
        assert client.admin.properties("orders")["ttl"] == kept
    cli("topic", "set", "orders", "ttl=1s", "--yes")
    assert client.admin.properties("orders")["ttl"] == "1"


def test_deleting_reports_how_many_messages_are_removed(cli: Cli, client: Client):
    client.publish("orders", [b"1", b"2"])
    assert "Delete orders with 2 messages?" in cli("topic", "delete", "orders", code=Exit.USAGE).err


def test_create_if_not_exists_says_what_differs(cli: Cli, client: Client):
    client.create_topic("kept", ttl_s=86_400)
    cli("topic", "create", "kept", "--ttl", "1d", "--if-not-exists")
    said = cli("topic", "create", "kept", "--ttl", "30d", "max_bytes=1GiB", "--if-not-exists", code=Exit.FAILED)
    assert "topic kept exists with other properties: " in said.err
    assert "ttl is 1d, not 30d" in said.err
    assert "max_bytes is unset, not 1GiB" in said.err


# --- messages ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("topic", "create", "x", "max_bytes=10GB"), "max_bytes=10GiB"),
        (("topic", "create", "x", "ttl=a week"), "ttl=7d"),
        (("poll", "orders", "--from", "ten minutes ago"), "-10m"),
        (("publish", "orders", "a", "--ttl", "soon"), "7d"),
    ],
)
def test_a_hint_shows_the_correct_form(cli: Cli, words, hint):
    assert hint in cli(*words, code=Exit.USAGE).err


def test_counts_are_plain_digits_when_a_program_reads_them(cli: Cli, client: Client, monkeypatch):
    client.publish("orders", [b"x"] * 1234)
    assert cli("stats").lines[1].split()[1] == "1234"
    assert (show_count(1234567), show_count(5, estimated=True), show_count(None)) == ("1234567", "~5", "-")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert show_count(1234567) == "1 234 567"


def test_counts_use_singular_and_plural(cli: Cli, client: Client):
    assert [counted(count, "topic") for count in (0, 1, 2)] == ["0 topics", "1 topic", "2 topics"]
    words = ("entry", "key", "batch", "address", "damaged row")
    assert [plural(word, 2) for word in words] == ["entries", "keys", "batches", "addresses", "damaged rows"]
    assert [plural(word, 1) for word in words] == list(words)
    assert cli("top", "--once").lines[1].startswith("1 topic, ")


def test_stats_of_one_topic_are_for_people(cli: Cli, client: Client):
    client.publish("orders", b"plain")
    undecided = client.transactions.begin()
    client.publish("orders", [b"a", b"b"], transaction=undecided)
    facts = dict(line.split(maxsplit=1) for line in cli("stats", "orders").lines)
    assert facts["messages"] == "3"
    assert facts["readable"] == "1 message by committed readers"
    assert facts["hidden"] == "2 messages behind 1 undecided transaction: plainsong tx blame orders"
    assert facts["waiting"] == "0 polls"
    client.transactions.abort(undecided)
    assert "hidden" not in cli("stats", "orders").out


def test_doctor_finds_the_data_directory_of_a_daemon_that_runs_here(running: Daemon):
    assert machine.directory_of_daemon([url_of(running)]) == running.data_dir
    assert machine.directory_of_daemon(["http://127.0.0.1:1", "http://example.org"]) is None


def test_a_verb_that_changed_something_says_so_in_one_line(cli: Cli, client: Client):
    for words in (
        ("topic", "create", "one"),
        ("publish", "one", "a"),
        ("topic", "delete", "one", "--yes"),
        ("topic", "undelete", "one"),
        ("context", "add", "somewhere", "--url", "http://127.0.0.1:1"),
    ):
        assert cli(*words).out.strip(), words


def test_q_leaves_top(cli: Cli, running: Daemon, client: Client):
    import pty

    from tests.daemon.harness import PLAINSONG

    process, handle = pty.fork()
    if process == 0:
        os.execv(
            PLAINSONG, ["plainsong", "top", "--every", "30s", "--url", url_of(running), "--namespace", client.namespace]
        )
    seen = b""
    while b"TOPIC" not in seen:
        seen += os.read(handle, 4096)
    os.write(handle, b"q")
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    os.close(handle)


@pytest.mark.parametrize(
    "verb", [("topic", "list"), ("poll", "t"), ("tail", "t"), ("publish", "t", "x"), ("doctor", "--ready"), ("events",)]
)
def test_the_time_limit_holds_while_a_name_is_not_resolved(alone, verb, monkeypatch):
    resolved = threading.Event()

    def never(*_: object, flags: int = 0, **__: object) -> None:
        if not flags & socket.AI_NUMERICHOST:
            resolved.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", never)
    said = alone("--timeout", "100ms", *verb, "--url", "http://stuck.test:1", code=Exit.UNAVAILABLE)
    assert not resolved.is_set()
    assert "stuck.test" in said.err + said.out
    resolved.set()

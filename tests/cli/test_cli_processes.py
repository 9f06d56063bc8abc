"""The installed program in pipes and at a terminal: streams, interrupts, readers that exit, daemons that die."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.cli.conftest import url_of
from tests.daemon.harness import PLAINSONG, Daemon, eventually
from tests.patience import PATIENCE_S
from tests.ports import free_address


@pytest.fixture
def numbers(cli):
    """An empty topic."""
    cli("topic", "create", "numbers")
    return "numbers"


def unread(pipe):
    """Return the number of unread bytes in a pipe."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]


def finished(process):
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err.decode()


# --- pipes -------------------------------------------------------------------------------------------


def test_lines_of_a_pipe_are_published_in_order(cli, spawn, numbers):
    lines = [str(number) for number in range(25_000)]
    process = spawn("publish", numbers, "--json")
    out, err = process.communicate("\n".join(lines).encode() + b"\n", timeout=PATIENCE_S)
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["messages"] == 25_000
    assert cli("poll", numbers, "--until-empty").lines == lines


def test_a_line_is_published_before_the_next_one_arrives(cli, spawn, numbers):
    process = spawn("publish", numbers)
    for word in ("one", "two"):
        process.stdin.write(word.encode() + b"\n")
        process.stdin.flush()
        eventually(f"{word} is published", lambda word=word: cli("poll", numbers).lines[-1:] == [word])
    process.stdin.close()
    assert process.wait(PATIENCE_S) == 0


def test_publish_accepts_as_ndjson_what_poll_prints_as_json(cli, spawn, numbers):
    cli("topic", "create", "copies")
    cli("publish", numbers, "--base64", "AP8=", "")
    cli("publish", numbers, "text")
    poll = spawn("poll", numbers, "--json", stdin=subprocess.DEVNULL)
    assert finished(spawn("publish", "copies", "--ndjson", stdin=poll.stdout))[0] == 0
    assert [row["payload"] for row in cli("poll", "copies", "--json").rows] == [{"base64": "AP8="}, "", "text"]


def test_a_wrong_line_ends_a_publish_after_the_lines_before_it(cli, spawn, numbers):
    process = spawn("publish", numbers, "--ndjson")
    _, err = process.communicate(b'"a"\n"b"\nc\n"d"\n', timeout=PATIENCE_S)
    assert process.returncode == Exit.USAGE
    assert b"error: line 3: invalid JSON" in err
    assert b"2 messages published" in err
    process = spawn("publish", numbers, "--ndjson", "--json")
    told = json.loads(process.communicate(b'"e"\n?\n', timeout=PATIENCE_S)[1])
    assert (told["messages"], told["unknown"], told["outcome"]) == (1, 0, "not-applied")
    assert told["firstId"] == told["lastId"]
    assert cli("poll", numbers).lines == ["a", "b", "e"]


def test_a_closed_pipe_ends_the_command_silently(cli, spawn, numbers):
    cli("publish", numbers, *(["x" * 1000] * 1000))
    for verb in (("poll", numbers), ("tail", numbers, "--from", "oldest")):
        process = spawn(*verb, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        assert process.stdout.read(1001) == b"x" * 1000 + b"\n"
        process.stdout.close()
        assert (process.wait(PATIENCE_S), process.stderr.read()) == (Exit.FAILED, b""), verb


# --- interrupts --------------------------------------------------------------------------------------


def test_an_interrupted_publish_reports_the_published_messages(cli, spawn, numbers):
    process = spawn("publish", numbers)
    process.stdin.write(b"a\nb\nc\n")
    process.stdin.flush()
    eventually("three are published", lambda: len(cli("poll", numbers).lines) == 3)
    # The program reads more only after the three are acknowledged.
    process.stdin.write(b"d")
    process.stdin.flush()
    eventually("the program has read the rest", lambda: unread(process.stdin) == 0)
    last_id = cli("poll", numbers, "--json").rows[-1]["id"]
    process.send_signal(signal.SIGINT)
    code = process.wait(PATIENCE_S)
    assert (code, process.stderr.read().decode()) == (
        Exit.INTERRUPTED,
        f"error: interrupted: 3 messages published, last id {last_id}, the rest not published\n",
    )


def test_an_interrupt_in_the_middle_of_a_request_leaves_its_outcome_unknown(alone, spawn):
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = spawn(
            "publish", "numbers", "a", "b", "--json", "--url", f"http://127.0.0.1:{server.getsockname()[1]}"
        )
        connection, _ = server.accept()
        with connection:
            assert connection.recv(1 << 16)
            process.send_signal(signal.SIGINT)
            code, _, err = finished(process)
    told = json.loads(err.strip())
    assert (code, told["exit"], told["outcome"]) == (Exit.INTERRUPTED, Exit.INTERRUPTED, "unknown")
    assert (told["messages"], told["unknown"]) == (0, 2)


def test_an_interrupted_tail_prints_nothing_more(cli, spawn, numbers):
    cli("publish", numbers, "a")
    process = spawn("tail", numbers, "--last", "1")
    assert process.stdout.readline() == b"a\n"
    process.send_signal(signal.SIGINT)
    assert finished(process) == (Exit.INTERRUPTED, b"", "\n")


def test_top_runs_until_it_is_interrupted(cli, spawn, numbers):
    process = spawn("top", "--every", "1s", "--json")
    assert [json.loads(process.stdout.readline())["topics"][0]["topic"] for _ in range(2)] == [numbers] * 2
    process.send_signal(signal.SIGINT)
    code, out, err = finished(process)
    assert (code, err) == (Exit.INTERRUPTED, "\n")
    # The program may have polled again before the interrupt; its output consists of complete lines.
    assert all(json.loads(line)["topics"][0]["topic"] == numbers for line in out.splitlines())


# --- tail --------------------------------------------------------------------------------------------


def test_tail_follows_several_topics_and_labels_their_messages(cli, spawn):
    for name in ("orders-eu", "orders-us", "audit"):
        cli("topic", "create", name)
        cli("publish", name, "old")
    process = spawn("tail", "orders-*", "--from", "oldest", "--limit", "3")
    cli("publish", "orders-us", "new")
    code, out, _ = finished(process)
    assert code == 0
    assert sorted(out.splitlines()) == [b"orders-eu old", b"orders-us new", b"orders-us old"]


def test_tail_begins_at_the_given_id(cli, spawn, numbers):
    cli("publish", numbers, "a", "b", "c")
    second = cli("poll", numbers, "--json").rows[1]["id"]
    assert finished(spawn("tail", numbers, "--from", second, "--limit", "2"))[1] == b"b\nc\n"


def test_tail_continues_when_the_daemon_is_back(tmp_path, alone):
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        url, port = url_of(daemon), daemon.address[1]
        with Client(url, retry=False) as client:
            client.create_topic("orders")
            client.publish("orders", b"before")
            command = [PLAINSONG, "tail", "orders", "--from", "oldest", "--limit", "2", "--url", url]
            tail = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            assert tail.stdout.readline() == b"before\n"
            daemon.kill()
        with Daemon(tmp_path / "data", bind=f"127.0.0.1:{port}"), Client(url) as client:
            client.publish("orders", b"after")
            assert finished(tail) == (0, b"after\n", "")


# --- unknown outcomes --------------------------------------------------------------------------------


def test_events_continue_when_the_daemon_is_back(tmp_path, alone):
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        url, port = url_of(daemon), daemon.address[1]
        command = [PLAINSONG, "events", "--kind", "transactions", "--limit", "2", "--json", "--url", url]
        follow = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = json.loads(follow.stdout.readline())
        assert (first["event"], first["data"]) == ("transactions", {"open": [], "total": 0})
        daemon.kill()
    with Daemon(tmp_path / "data", bind=f"127.0.0.1:{port}"), Client(url) as client:
        begun = client.transactions.begin()
        code, out, err = finished(follow)
        assert (code, err) == (0, "")
        (changed,) = [json.loads(line)["data"] for line in out.splitlines()]
        assert [each["id"] for each in changed["open"]] == [str(begun.id)]


def test_a_connection_that_breaks_in_the_middle_leaves_the_outcome_unknown(alone):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def break_off():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)

        threading.Thread(target=break_off, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        said = alone("publish", "orders", "a", "b", "--url", url, code=Exit.UNKNOWN)
    assert "outcome unknown: it may have happened" in said.err
    assert "messages 1 to 2 unknown, the rest not published" in said.err


def test_publish_waits_for_the_daemon_on_request(tmp_path, alone, spawn):
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        url, port = url_of(daemon), daemon.address[1]
        with Client(url, retry=False) as client:
            client.create_topic("orders")
    publish = spawn(
        "publish", "orders", "a", "--retry-for", f"{PATIENCE_S:.0f}s", "--url", url, "--namespace", "default"
    )
    with Daemon(tmp_path / "data", bind=f"127.0.0.1:{port}"):
        code, out, _ = finished(publish)
    assert code == 0
    assert out.startswith(b"published 1 message, ")


# --- at a terminal -----------------------------------------------------------------------------------


class Terminal:
    """The program, with a terminal for all three streams."""

    def __init__(self, *arguments):
        self.pid, self._handle = pty.fork()
        if self.pid == 0:
            os.execv(PLAINSONG, ["plainsong", *arguments])
        self.seen = b""

    def until(self, part, times=1):
        over = time.monotonic() + PATIENCE_S
        while self.seen.count(part) < times and time.monotonic() < over:
            try:
                self.seen += os.read(self._handle, 4096)
            except OSError:  # the program's end is closed
                break
        assert self.seen.count(part) >= times, self.seen
        return self.seen

    def type(self, text):
        os.write(self._handle, text)

    def ended(self):
        try:
            while chunk := os.read(self._handle, 4096):
                self.seen += chunk
        except OSError:
            pass
        os.close(self._handle)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_delete_asks_at_a_terminal(cli, numbers):
    asked = Terminal("topic", "delete", numbers)
    asked.until(b" messages?")
    asked.type(b"n\n")
    assert asked.ended() == Exit.FAILED
    assert cli("topic", "list").lines == [numbers]
    asked = Terminal("topic", "delete", numbers)
    asked.until(b"[y/N]")
    asked.type(b"y\n")
    assert asked.ended() == 0
    assert cli("topic", "list").lines == []


@pytest.mark.parametrize("verb", ["abort", "invalidate"])
def test_the_end_of_a_transaction_shows_its_effect_at_a_terminal_and_asks(cli, numbers, verb):
    with Client.from_environment() as client:
        begun = client.transactions.begin(client_id="checkout-7")
        client.publish(numbers, [b"a", b"b"], transaction=begun)
        client.publish(numbers, b"behind")
        asked = Terminal("tx", verb, str(begun.id))
        seen = asked.until(b"[y/N]").decode()
        assert f"removes 2 messages of {client.namespace}:{numbers}" in seen
        assert "releases 1 message and 0 waiting polls" in seen
        assert "of client checkout-7" in seen
        asked.type(b"n\n")
        assert asked.ended() == Exit.FAILED
        assert client.transactions.get(begun.id).state == "in_progress"
        client.transactions.abort(begun)


def test_a_terminal_gets_notes_and_no_control_characters(cli, numbers):
    cli("publish", numbers, "\x1b[2J!")
    following = Terminal("tail", numbers, "--from", "oldest")
    seen = following.until(b"!")
    assert b"following numbers; Ctrl-C stops" in seen
    assert rb"\x1b[2J!" in seen
    following.type(b"\x03")
    assert following.ended() == Exit.INTERRUPTED


def test_messages_are_typed_line_by_line(cli, numbers):
    typing = Terminal("publish", numbers)
    typing.until(b"each line is a message; Ctrl-D ends")
    typing.type(b"hello\n\x04")
    typing.until(b"published 1 message")
    assert typing.ended() == 0
    assert cli("poll", numbers).lines == ["hello"]


def test_top_redraws_the_screen(cli, numbers):
    live = Terminal("top", "--every", "1s")
    drawn = live.until(b"numbers").count(b"\x1b[H")
    live.until(b"\x1b[H", times=drawn + 2)
    live.type(b"\x03")
    assert live.ended() == Exit.INTERRUPTED


# --- completion --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_completion_script(alone, shell):
    assert f"_PLAINSONG_COMPLETE={shell}_complete" in alone("completion", shell, code=0).out


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("plainsong pu", ["publish"]),
        ("plainsong poll num", ["numbers"]),
        ("plainsong reader ls --json num", ["numbers"]),
        ("plainsong poll --until", ["--until-empty"]),
        ("plainsong topic und", ["undelete"]),
    ],
)
def test_verbs_options_and_topics_are_completed(cli, spawn, numbers, monkeypatch, words, completed):
    environ = {"_PLAINSONG_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [PLAINSONG], env={**os.environ, **environ}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert [line.split(",")[1] for line in done.stdout.splitlines()] == completed
    assert done.stderr == ""


# --- readers that exit, and containers ----------------------------------------------------------------


@pytest.mark.parametrize("verb", [("tail", "numbers", "--from", "oldest"), ("events",)], ids=lambda verb: verb[0])
def test_a_verb_that_waits_for_news_ends_when_its_output_is_closed(cli, spawn, numbers, verb):
    cli("publish", numbers, "a")
    process = spawn(*verb)
    assert process.stdout.readline()
    process.stdout.close()  # while no further line would be printed
    assert (process.wait(PATIENCE_S), process.stderr.read()) == (Exit.FAILED, b"")


@pytest.mark.parametrize("verb", [("tail", "numbers", "--from", "oldest"), ("events",)], ids=lambda verb: verb[0])
def test_sigterm_ends_the_first_process_of_a_container(cli, numbers, verb):
    """There the kernel ignores signals without a handler, so the program installs one if it runs as that process."""
    cli("publish", numbers, "a")
    program = "import os, signal; os.getpid = lambda: 1; from plainsong.cli.start import main; main()"
    process = subprocess.Popen([sys.executable, "-c", program, *verb], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    code, _, err = finished(process)
    assert (code, err.strip()) == (Exit.INTERRUPTED, "")

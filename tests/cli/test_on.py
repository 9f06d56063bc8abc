"""``plainsong on``: its command line, with a real daemon, real commands and a real unit file."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import click
import pytest
from standardwebhooks import Webhook

from plainsong import Client
from plainsong.cli import on_options
from plainsong.cli.command import Exit
from plainsong.cli.on_options import derived_name, kept_position, words_of
from tests.cli.conftest import url_of
from tests.daemon.harness import PLAINSONG, ROOT, Daemon, eventually
from tests.patience import PATIENCE_S
from tests.ports import free_address

CAT = derived_name("cat", None)
EXITS = "test $(cat) != b || { echo no b >&2; exit 65; }"


@pytest.fixture
def orders(cli):
    """Create a topic with three messages, and one for dead letters; return the messages' ids."""
    cli("topic", "create", "orders")
    cli("topic", "create", "dead")
    cli("publish", "orders", "a", "b", "c")
    return [row["id"] for row in cli("poll", "orders", "--json").rows]


@pytest.fixture
def on(cli):
    """Run the command in this process; return its output, including its commands' output, and its errors."""

    def call(*arguments, code=0):
        said = cli("on", "orders", *arguments, code=code)
        return said.out, said.err

    return call


def position(cli, name):
    return cli("reader", "show", "orders", name, "--json").json["position"]


# --- commands ----------------------------------------------------------------------------------------


def test_the_command_runs_once_for_each_message_in_order_until_the_end(on, cli, orders):
    assert on("--run", "cat", "--once") == ("abc", "")
    assert position(cli, CAT) == orders[-1]
    cli("publish", "orders", "d")
    assert on("--run", "cat", "--once")[0] == "d"
    assert on("--run", "cat", "--once")[0] == ""


def test_two_reactions_are_independent(on, orders):
    assert on("--run", "cat", "--once", "--limit", "1")[0] == "a"
    assert on("--run", "cat", "--once", "--position", "reader:other")[0] == "abc"
    assert on("--run", "cat", "--once", "--position", "a.position")[0] == "abc"
    assert on("--run", "cat", "--once")[0] == "bc"
    assert on("--run", "cat", "--once", "--position", "a.position")[0] == ""


def test_lines_may_begin_with_the_id_of_their_message(on, orders):
    out, err = on("--shell", "--run", "cat; echo; printf half >&2", "--prefix", "--once")
    assert out.splitlines() == [f"{message_id}: {payload}" for message_id, payload in zip(orders, "abc", strict=True)]
    assert err.splitlines() == [f"{message_id}: half" for message_id in orders]


def test_with_json_all_output_is_events(on, orders):
    line = f"echo $PLAINSONG_ATTEMPT; {EXITS}"
    out, err = on("--shell", "--run", line, "--dead-letter", "dead", "--once", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [event["event"] for event in events] == [
        *("begun", "output", "done", "output", "output", "dead-letter", "output", "done", "ended")
    ]
    assert events[0] == {"event": "begun", "topic": "orders", "position": f"reader:{derived_name(line, None)}"}
    assert events[3] == {"event": "output", "topic": "orders", "id": orders[1], "stream": "stdout", "line": "1"}
    assert events[5]["error"] == "exit 65: no b"
    assert events[-1] == {"event": "ended", "topic": "orders", "done": 2, "deadLetters": 1}


def test_the_command_uses_the_same_daemon(on, cli, orders, running, monkeypatch):
    monkeypatch.setenv("PATH", f"{PLAINSONG.parent}:{os.environ['PATH']}")
    namespace = os.environ["PLAINSONG_NAMESPACE"]
    monkeypatch.delenv("PLAINSONG_URL")
    monkeypatch.delenv("PLAINSONG_NAMESPACE")
    arguments = ("--url", url_of(running), "--namespace", namespace, "--limit", "1", "--once")
    on("--run", "plainsong publish dead", *arguments)
    assert cli("poll", "dead", "--url", url_of(running), "--namespace", namespace).lines == ["a"]


# --- failures ----------------------------------------------------------------------------------------


def test_a_permanent_failure_ends_it_and_its_message_stays_first(on, cli, orders):
    for _ in range(2):
        _, err = on("--shell", "--run", EXITS, "--once", code=Exit.FAILED)
        assert err.startswith(
            f"no b\nerror: message {orders[1]}: exit 65: no b (1 attempt)\nhint: the next run begins with it"
        )
        assert position(cli, derived_name(EXITS, None)) == orders[0]
    told = json.loads(on("--shell", "--run", EXITS, "--once", "--json", code=Exit.FAILED)[1])
    assert (told["code"], told["id"], told["attempts"]) == ("message_given_up", orders[1], 1)


def test_a_permanent_failure_goes_to_the_dead_letters_once(on, cli, orders):
    _, err = on("--shell", "--run", EXITS, "--dead-letter", "dead", "--once")
    assert f"{orders[1]}: exit 65: no b; now in dead, after 1 attempt\n" in err
    (letter,) = cli("poll", "dead", "--json").rows
    assert letter["payload"] == "b"
    assert letter["attributes"] == {
        "originalTopic": "orders",
        "originalId": orders[1],
        "attempts": "1",
        "error": "exit 65: no b",
    }
    assert cli("producer", "ls", "dead", "--json").json["producers"] == []
    assert position(cli, derived_name(EXITS, None)) == orders[2]


def test_retries_are_reported_and_counted(on, orders):
    line = "test $PLAINSONG_ATTEMPT = 3"
    _, err = on("--shell", "--run", line, "--retries", "2", "--pause", "2ms", "--once", "--limit", "1")
    assert re.findall(r"^(\w+): exit 1; attempt (\d) of 3 in \d+ms$", err, re.MULTILINE) == [
        *((orders[0], "2"), (orders[0], "3"))
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "give either --run CMD or --post URL"),
        (("--run", "cat", "--post", "http://x"), "give either --run CMD or --post URL"),
        (("--run", ""), "names no command"),
        (("--run", "'"), "No closing quotation"),
        (("--run", "no-such-command-here x"), "command 'no-such-command-here' not found"),
        (("--run", "cat", "--header", "a: b"), "--header needs --post"),
        (("--run", "cat", "--retry-all"), "--retry-all needs --post"),
        (("--post", "http://x", "--shell"), "--shell needs --run"),
        (("--post", "ftp://x"), "cannot post to"),
        (("--post", "http://x", "--header", "Host: x"), "the header Host is set"),
        (("--post", "http://x", "--header", "@no-such-file"), "cannot read the file"),
        (("--post", "http://x", "--content-type", "a\nb"), "invalid header"),
        (("--run", "cat", "--sign-with", "hook.secret"), "--sign-with needs --post"),
        (("--post", "http://x", "--sign-with", "no-such-file"), "cannot read the secrets"),
        (("--run", "cat", "--retries", "-1"), "invalid number of retries"),
        (("--run", "cat", "--position", "reader:a b"), "--position reader:a b"),
        (("--run", "cat", "--position", "."), "is not a file"),
        (("--run", "cat", "--dead-letter", "orders"), "be processed forever"),
    ],
)
def test_a_wrong_command_line_does_nothing(on, cli, orders, arguments, says):
    _, err = on("--once", *arguments, code=Exit.USAGE)
    assert says in err
    assert cli("reader", "ls", "orders", "--json").json == []


def test_missing_topics_are_reported_at_once(on, orders):
    assert "no topic 'daed'; did you mean" in on("--run", "cat", "--dead-letter", "daed", code=4)[1].replace(
        "\nhint:", ";"
    )


def test_an_unreachable_daemon_is_reported_at_once(on):
    on("--run", "cat", "--url", "http://127.0.0.1:1", code=Exit.UNAVAILABLE)


# --- the starting position ---------------------------------------------------------------------------


def test_on_begins_at_the_given_position_but_continues_from_its_own(on, orders):
    assert on("--run", "cat", "--from", orders[1], "--once", "--limit", "1")[0] == "b"
    assert on("--run", "cat", "--from", "oldest", "--once")[0] == "c"
    assert on("--run", "cat", "--from", "now", "--once", "--position", "reader:new")[0] == ""


def test_a_dry_run_does_nothing_and_moves_nothing(on, cli, orders):
    on("--run", "cat", "--once", "--limit", "1")
    out, _ = on("--run", "cat -A 'x y'", "--dry-run", "--position", f"reader:{CAT}")
    assert out.splitlines() == [f"{message_id} (1 bytes): would run: cat -A 'x y'" for message_id in orders[1:]]
    out, _ = on("--post", "http://h/x", "--dry-run", "--json", "--limit", "1")
    event = json.loads(out)
    assert event == {"event": "would", "topic": "orders", "id": orders[0], "bytes": 1, "post": "http://h/x"}
    assert [reader["name"] for reader in cli("reader", "ls", "orders", "--json").json] == [CAT]
    assert position(cli, CAT) == orders[0]


def test_derived_names_tell_reactions_apart_and_are_readable():
    assert re.fullmatch("on-send-mail-[0-9a-f]{8}", derived_name("/usr/bin/send-mail.py --to x", None))
    assert derived_name("send-mail --to x", None) == derived_name("send-mail  '--to' x", None)
    assert re.fullmatch("on-hooks-example-81-a-b-[0-9a-f]{8}", derived_name(None, "https://u@hooks.example:81/a/b?c=d"))
    assert re.fullmatch("on-[0-9a-f]{8}", derived_name("'", None))
    assert len(derived_name("x" * 900, None)) <= 255
    unlike = [("python a.py", None), ("python b.py", None), (None, "https://x/?a"), (None, "https://x/?b")]
    assert len({derived_name(*each) for each in unlike}) == len(unlike)


def test_another_reaction_of_the_same_command_has_to_say_where_it_begins(on, cli, orders, tmp_path):
    """The user may have changed the arguments of one reaction, so the command must not skip or repeat messages unasked."""
    for name in "ab":
        (tmp_path / name).write_text(f"import sys; print('{name}', sys.stdin.read(), end=' ')", encoding="utf-8")
    one, other = (f"{sys.executable} {tmp_path / name}" for name in "ab")
    assert on("--run", one, "--once", "--limit", "2")[0] == "a a a b "
    first = derived_name(one, None)
    for more in ((), ("--dry-run",)):
        _, err = on("--run", other, "--once", *more, code=Exit.USAGE)
        assert f"but reader:{first} of the same command with other arguments" in err
    assert [row["name"] for row in cli("reader", "ls", "orders", "--json").json] == [first]
    assert on("--run", other, "--once", "--from", "oldest")[0] == "b a b b b c "
    assert on("--run", other, "--once")[0] == ""
    assert on("--run", one, "--once")[0] == "a c "
    assert on("--run", f"{one} more", "--once", "--position", f"reader:{first}")[0] == ""


# --- committed ---------------------------------------------------------------------------------------


def test_committed_waits_before_undecided_messages(on, orders, running):
    with Client(url_of(running), namespace=os.environ["PLAINSONG_NAMESPACE"]) as client:
        undecided = client.transactions.begin()
        client.publish("orders", b"u", transaction=undecided)
        client.publish("orders", b"d")
        assert on("--run", "cat", "--committed", "--once")[0] == "abc"
        client.transactions.abort(undecided)
        assert on("--run", "cat", "--committed", "--once")[0] == "d"


# --- the end -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, Exit.INTERRUPTED)])
def test_signals_end_a_wait_at_once_and_received_messages_are_finished(cli, spawn, orders, number, code):
    process = spawn("on", "orders", "--run", "cat")
    assert process.stdout.read(3) == b"abc"
    eventually("it is saved", lambda: position(cli, CAT) == orders[-1])
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == code


def test_work_in_progress_is_finished_and_counts(cli, spawn, orders, tmp_path):
    line = f"echo begun; until test -e {tmp_path}/go; do sleep 0.02; done"
    process = spawn("on", "orders", "--shell", "--run", line)
    assert process.stdout.readline() == b"begun\n"
    process.terminate()
    (tmp_path / "go").touch()
    assert process.wait(PATIENCE_S) == 0
    assert process.stdout.read() == b""
    assert position(cli, derived_name(line, None)) == orders[0]


@pytest.mark.parametrize("how", ["second signal", "--grace"])
def test_work_that_takes_too_long_at_the_end_is_returned(cli, spawn, orders, how):
    process = spawn(
        "on",
        "orders",
        "--shell",
        "--run",
        "echo begun; exec sleep 1000",
        *(("--grace", "200ms") if how == "--grace" else ()),
    )
    assert process.stdout.readline() == b"begun\n"
    process.terminate()
    if how == "second signal":
        process.send_signal(signal.SIGINT)  # a different signal, since two equal ones may be merged
    assert process.wait(PATIENCE_S) in (0, Exit.INTERRUPTED)  # depending on which it handles first
    assert cli("reader", "ls", "orders", "--json").json == []


def test_two_processes_with_one_file_are_detected_before_anything_happens(spawn, on, orders):
    first = spawn("on", "orders", "--run", "cat", "--position", "shared")
    assert first.stdout.read(3) == b"abc"
    out, err = on("--run", "cat", "--position", "shared", "--once", code=Exit.FAILED)
    assert out == ""
    assert "another process uses the position" in err
    first.kill()
    first.wait()
    assert on("--run", "cat", "--position", "shared", "--once")[1] == ""


def test_the_lock_that_a_killed_command_leaves_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    """A process that is just being started has a copy of it until it runs its program."""
    kept = kept_position(str(tmp_path / "position"), "derived")
    left = os.open(tmp_path / "position.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(left, fcntl.LOCK_EX)
    closing = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: os.close(left))
    monkeypatch.setattr(on_options, "time", closing)
    with kept.alone(), (tmp_path / "position.lock").open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_two_processes_with_one_reader_are_detected_when_they_save(cli, spawn, on, orders, tmp_path):
    line = f"cat; until test -e {tmp_path}/go; do sleep 0.02; done"
    slow = spawn("on", "orders", "--shell", "--run", line, "--position", "reader:one")
    assert slow.stdout.read(1) == b"a"
    assert on("--run", "cat", "--position", "reader:one", "--once")[0] == "abc"
    (tmp_path / "go").touch()
    _, err = slow.communicate(timeout=PATIENCE_S)
    assert slow.returncode == Exit.FAILED
    assert b"reader one is not at the expected position" in err
    assert b"two processes need a --position each" in err
    assert position(cli, "one") == orders[-1]


def test_on_continues_when_the_daemon_is_back(tmp_path, alone, spawn):
    with Daemon(tmp_path / "data", bind=free_address()) as daemon:
        url, port = url_of(daemon), daemon.address[1]
        with Client(url) as client:
            client.create_topic("orders")
            client.publish("orders", b"before")
        process = spawn("on", "orders", "--run", "cat", "--url", url, "--namespace", "default", "--limit", "2")
        assert process.stdout.read(6) == b"before"
        daemon.kill()
    with Daemon(tmp_path / "data", bind=f"127.0.0.1:{port}"), Client(url) as client:
        client.publish("orders", b"after")
        assert process.stdout.read(5) == b"after"
        assert process.wait(PATIENCE_S) == 0


# --- posts -------------------------------------------------------------------------------------------


#: The secret with which posts are signed.
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


class Hook(BaseHTTPRequestHandler):
    """Fails the first attempt at b, and always rejects c."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((body, self.headers["Plainsong-Attempt"], self.headers))
        status = {b"b1": 503, b"c1": 422}.get(body + self.headers["Plainsong-Attempt"].encode(), 204)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


def test_posts_are_retried_or_put_aside_according_to_the_status(on, cli, orders, tmp_path):
    (tmp_path / "secret").write_text("Authorization: Bearer xyz\n\n")
    with HTTPServer(("127.0.0.1", 0), Hook) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        (tmp_path / "hook.secret").write_text(f"{SECRET}\n")
        arguments = ("--dead-letter", "dead", "--pause", "2ms", "--header", f"@{tmp_path}/secret")
        arguments = (*arguments, "--sign-with", str(tmp_path / "hook.secret"))
        on("--post", url, *arguments, "--once")
        server.shutdown()
        thread.join()
    assert [(body, attempt) for body, attempt, _ in server.asked] == [
        *((b"a", "1"), (b"b", "1"), (b"b", "2"), (b"c", "1"))
    ]
    assert {headers["Authorization"] for _, _, headers in server.asked} == {"Bearer xyz"}
    for body, _, headers in server.asked:
        Webhook(SECRET).verify(body, dict(headers.items()), json_parse=False)
    assert cli("poll", "dead", "--json").rows[0]["attributes"]["error"] == "status 422"


# --- the unit ----------------------------------------------------------------------------------------


def test_the_command_line_of_the_unit_is_valid():
    text = (ROOT / "etc/plainsong-on@.service").read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=\S+/plainsong (.*)$", text, re.MULTILINE)
    assert line == "on ${TOPIC} --position reader:%i $DO $OPTIONS"
    assert "RestartPreventExitStatus=2\n" in text
    grace_s, stop_s = 30, int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    assert stop_s > grace_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
def test_systemd_accepts_the_unit(tmp_path):
    text = (ROOT / "etc/plainsong-on@.service").read_text(encoding="utf-8")
    unit = tmp_path / "plainsong-on@.service"
    unit.write_text(text.replace("/opt/plainsong/.venv/bin/plainsong", str(PLAINSONG)))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "plainsong-on@receipts.service"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if "plainsong-on" in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("command", ["cat | wc -l", "cat > out", "cat 2>&1", "true && false", "cat ; ls"])
def test_shell_syntax_is_refused_with_a_hint_at_the_shell(command):
    with pytest.raises(click.UsageError, match="--shell"):
        words_of(command, shell=False)
    assert words_of(command, shell=True) == ["/bin/sh", "-c", command]


@pytest.mark.parametrize("command", ["grep '|'", 'grep "a > b"', "grep a|b", "grep \\\\|"])
def test_a_quoted_sign_is_an_argument(command):
    assert words_of(command, shell=False)[0] == "grep"

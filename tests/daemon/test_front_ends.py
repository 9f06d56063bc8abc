"""Front ends of a real daemon: one address, one owner, and the death of any process."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.protocol.link import PREFACE
from plainsong.protocol.requests import PollRequest
from tests.daemon.harness import Daemon, DaemonEnded, eventually, free_port
from tests.daemon.talk import ask, create, metric, poll_call, publish, read_all, topic_path
from tests.freezing import freeze
from tests.patience import PATIENCE_S

FRONT_ENDS = "http.processes=2"
PUBLISH = topic_path("t", "/publish")
HEADERS = {"Content-Type": "application/json", "Prefer": "return=representation"}


def state(pid: int) -> str:
    """Return the process's state as in ``ps``; ``Z`` also if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def runs(pid: int) -> bool:
    return state(pid) != "Z"


def counted(daemon: Daemon, route: str, status: int) -> float:
    text = ask(daemon.address, "GET", "/metrics").body.decode()
    line = f'plainsong_requests_total{{route="{route}",status="{status}"}} '
    return sum(float(each.removeprefix(line)) for each in text.splitlines() if each.startswith(line))


class Publisher:
    """Publishes one message after another, reconnects when the connection breaks, and records acknowledged messages."""

    def __init__(self, address: tuple[str, int], name: str) -> None:
        self.acknowledged: list[str] = []
        self.stop = threading.Event()
        self._address = address
        self._name = name
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        sent = 0
        while not self.stop.is_set():
            connection = http.client.HTTPConnection(*self._address, timeout=PATIENCE_S)
            with suppress(OSError, http.client.HTTPException):
                while not self.stop.is_set():
                    sent += 1
                    text = f"{self._name}-{sent}"
                    connection.request("POST", PUBLISH, json.dumps({"messages": [text]}), HEADERS)
                    answer = connection.getresponse()
                    answer.read()
                    if answer.status == 200:
                        self.acknowledged.append(text)
            connection.close()

    def end(self) -> list[str]:
        self.stop.set()
        self._thread.join(PATIENCE_S)
        return self.acknowledged


def stored(daemon: Daemon) -> list[str]:
    return [payload.decode() for _, payload in read_all(daemon.address, "t")]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with front ends, which tests leave intact."""
    with Daemon(tmp_path_factory.mktemp("front") / "data", FRONT_ENDS) as one:
        yield one


def test_front_ends_are_one_daemon_that_counts_every_request_once(running):
    assert len(running.children()) == 2
    create(running.address, "t")
    for number in range(20):  # each on a new connection, which either front end may accept
        publish(running.address, "t", b"%d" % number)
    assert ask(running.address, "POST", PUBLISH, b'{"messagess": []}', HEADERS).code == "unknown_field"
    assert (
        ask(running.address, "POST", topic_path("missing", "/publish"), b'{"messages": ["x"]}', HEADERS).status == 404
    )
    assert ask(running.address, "GET", topic_path("missing")).code == "topic_not_found"
    assert ask(running.address, "GET", "/nowhere").status == 404
    assert [int(payload) for payload in stored(running)] == list(range(20))
    assert (counted(running, "publish", 200), counted(running, "publish", 400)) == (20, 1)
    assert (counted(running, "publish", 404), counted(running, "create_topic", 200)) == (1, 1)
    eventually("those are counted, too", lambda: counted(running, "get_topic", 404) == 1)
    eventually("what is no route is", lambda: counted(running, "unknown", 404) == 1)


def test_streams_pass_through_front_ends(running):
    create(running.address, "s")
    with (
        Client(f"http://127.0.0.1:{running.address[1]}", namespace="ring") as client,
        client.publisher("s") as publisher,
    ):
        for number in range(5000):
            publisher.send(b"%d" % number)
    assert [int(payload) for _, payload in read_all(running.address, "s")] == list(range(5000))


def test_a_poll_whose_client_leaves_is_held_no_longer(running):
    create(running.address, "quiet")
    method, path, body, headers = poll_call("quiet", PollRequest(), "json", wait_ms=60_000)
    connection = http.client.HTTPConnection(*running.address)
    connection.request(method, path, body, dict(headers))
    eventually("it is parked", lambda: metric(running.address, "plainsong_parked_polls") == 1)
    connection.close()
    eventually("it is no longer parked", lambda: metric(running.address, "plainsong_parked_polls") == 0)


def test_a_killed_front_end_is_started_again_and_the_others_continue(daemon):
    running = daemon(FRONT_ENDS)
    create(running.address, "t")
    publishers = [Publisher(running.address, f"p{number}") for number in range(6)]
    killed = set()
    for _ in range(3):
        eventually("both run", lambda: len([pid for pid in running.children() if runs(pid)]) == 2)
        before = sum(len(each.acknowledged) for each in publishers)
        victim = next(pid for pid in running.children() if runs(pid))  # one that is not a zombie
        killed.add(victim)
        os.kill(victim, signal.SIGKILL)
        eventually(
            "it continues", lambda before=before: sum(len(each.acknowledged) for each in publishers) > before + 20
        )
    running.wait_for_line('"event":"a front end ended"')
    eventually("both run again", lambda: len(set(running.children()) - killed) == 2)
    acknowledged = [text for each in publishers for text in each.end()]
    found = stored(running)
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    assert running.stop() == 0


def test_readiness_says_that_a_front_end_has_too_few_descriptors(daemon):
    one = daemon(FRONT_ENDS)
    kept = http.client.HTTPConnection(*one.address, timeout=PATIENCE_S)

    def readiness() -> tuple[int, bytes]:
        kept.request("GET", "/readyz")
        answer = kept.getresponse()
        return answer.status, answer.read()

    assert readiness()[0] == 200
    for pid in one.children():
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))  # the process cannot open any more files
    with socket.create_connection(one.address):
        eventually("readiness says it", lambda: readiness()[0] == 503)
        assert b"few file descriptors are left" in readiness()[1]
    kept.close()


def test_front_ends_end_by_themselves_when_the_owning_process_is_killed(daemon):
    running = daemon(FRONT_ENDS)
    create(running.address, "t")
    publisher = Publisher(running.address, "p")
    eventually("it publishes", lambda: len(publisher.acknowledged) > 20)
    pids = running.children()
    running.signal(signal.SIGKILL)
    eventually("they have ended", lambda: not any(runs(pid) for pid in pids))
    acknowledged = publisher.end()
    running.end()
    again = daemon()
    assert set(acknowledged) <= set(stored(again))


def test_a_front_end_that_is_stopped_ends_with_the_owning_process_and_frees_its_port(daemon):
    bind = f"127.0.0.1:{free_port()}"
    running = daemon(FRONT_ENDS, bind=bind)
    pids = running.children()
    freeze(pids[0])
    running.signal(signal.SIGKILL)
    eventually("both have ended", lambda: not any(runs(pid) for pid in pids))
    running.end()
    assert daemon(FRONT_ENDS, bind=bind).stop() == 0


def test_a_front_end_whose_parent_has_already_ended_does_not_start():
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        command = [sys.executable, "-m", "broker.front", "front-1", *[str(theirs.fileno())] * 2]
        found = subprocess.run(
            command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    assert (found.returncode, found.stdout) == (1, "")
    assert "has ended" in found.stderr


def test_a_front_end_whose_parent_ends_before_it_has_the_settings_ends_at_once():
    """Otherwise it keeps the daemon's port until its alarm: nothing answers there, and no daemon can start there."""
    with ExitStack() as sockets, socket.create_server(("127.0.0.1", 0)) as listener:
        (link, its_link), (handover, its_handover) = (
            tuple(map(sockets.enter_context, socket.socketpair())) for _ in range(2)
        )
        numbers = [each.fileno() for each in (its_link, its_handover, listener)]
        command = [sys.executable, "-m", "broker.front", "front-1", *map(str, numbers)]
        with subprocess.Popen(command, pass_fds=numbers) as process:
            try:
                link.settimeout(PATIENCE_S)
                assert link.recv(len(PREFACE), socket.MSG_WAITALL) == PREFACE
                for each in (its_link, its_handover, link, handover):
                    each.close()
                assert process.wait(PATIENCE_S) == 0
            finally:
                process.kill()


def test_a_stuck_front_end_is_ended_by_its_alarm():
    lost = (
        "import sys; from broker.front import __main__ as m; m.LEAVE_S = 1; m.watch_parent(int(sys.argv[1])); print(1)"
    )
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-uc", f"{lost}\nwhile True: pass", str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True) as process:
        theirs.close()
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        ours.close()
        assert process.wait(PATIENCE_S) == -signal.SIGALRM


def test_a_client_is_refused_until_it_is_answered(tmp_path):
    """A start takes seconds, and no connection is accepted before it can be answered."""
    running = Daemon(tmp_path / "data", FRONT_ENDS, bind=f"127.0.0.1:{free_port()}")

    def status() -> int:
        with suppress(ConnectionRefusedError):
            return ask(running.address, "GET", "/readyz").status
        return 0

    running.spawn()
    try:
        assert eventually("it answers", status) == 200
        running.wait_ready()
        assert running.stop() == 0
    finally:
        running.end()


def test_a_client_that_keeps_asking_while_the_daemon_stops_is_answered_to_the_last(daemon):
    running = daemon(FRONT_ENDS)
    create(running.address, "t")
    body = b'{"messages": ["x"]}'
    head = f"POST {PUBLISH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(running.address, timeout=PATIENCE_S) as sock:
        for asked in range(1_000_000):
            if asked == 50:
                running.signal(signal.SIGTERM)
            sock.sendall(head.encode() + body)
            answer = sock.recv(65536).lower()
            assert answer.startswith((b"http/1.1 200", b"http/1.1 503"))
            if b"connection: close" in answer:
                break
    assert asked >= 50
    assert running.wait() == 0


def test_parked_polls_are_answered_when_ctrl_c_reaches_all_processes(daemon):
    running = daemon(FRONT_ENDS, "log.access=true")
    create(running.address, "t")
    line = json.loads(running.wait_for_line('"route":"create_topic"'))
    assert line["process"] in ("front-1", "front-2")
    method, path, body, headers = poll_call("t", PollRequest(), "avro", wait_ms=60_000)
    connections = [http.client.HTTPConnection(*running.address, timeout=PATIENCE_S) for _ in range(20)]
    for connection in connections:
        connection.request(method, path, body, dict(headers))
    eventually("all are parked", lambda: metric(running.address, "plainsong_parked_polls") == 20)
    pids = running.children()
    os.killpg(running.pid, signal.SIGINT)
    answers = [connection.getresponse() for connection in connections]
    assert [(answer.status, answer.read()) for answer in answers] == [(200, b"\x00")] * 20
    for connection in connections:
        connection.close()
    assert running.wait() == 0
    assert not any(runs(pid) for pid in pids)


def test_ctrl_c_while_front_ends_start_is_a_quiet_end(tmp_path):
    running = Daemon(tmp_path / "early", FRONT_ENDS)
    running.spawn()
    try:
        eventually("front ends have begun", lambda: sum(map(is_front_end, running.children())) == 2)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait() == 0
        assert running.errors == ""
    finally:
        running.end()


def is_front_end(pid: int) -> bool:
    """True if the process runs the front end's own code."""
    with suppress(OSError):
        ignored = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigIgn" in line)
        return bool(int(ignored.split()[1], 16) >> (signal.SIGINT - 1) & 1)
    return False


def test_no_other_process_can_take_the_address(running, daemon, tmp_path):
    """A shared address would let a second daemon in, and split the clients between them."""
    taken = f"127.0.0.1:{running.address[1]}"
    for setting in (FRONT_ENDS, "http.processes=1"):
        with pytest.raises(DaemonEnded, match="is in use"):
            daemon(setting, data_dir=tmp_path / "other", bind=taken)
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(DaemonEnded, match="is in use"):
        daemon(FRONT_ENDS, data_dir=tmp_path / "other", bind=f"127.0.0.1:{other.getsockname()[1]}")

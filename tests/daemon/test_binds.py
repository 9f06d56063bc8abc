"""The daemon on several addresses and on Unix sockets."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from plainsong.cli.command import Exit
from tests.daemon.harness import run_plainsong
from tests.daemon.talk import ask, create, poll, publish, topic_path
from tests.patience import PATIENCE_S


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("any.name.example", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self._path))


def ask_unix(path: Path, method: str, target: str, body: str = "") -> tuple[int, bytes]:
    connection = UnixConnection(path)
    try:
        connection.request(method, target, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("processes", [1, 2])
def test_all_listed_addresses_reach_the_same_topics(daemon, tmp_path, processes):
    path = tmp_path / "a.sock"
    running = daemon(f"http.processes={processes}", bind=f"unix:{path},[::1]:0,127.0.0.1:0")
    (unix, six, four) = running.serving["addresses"]
    assert (unix, six.startswith("http://[::1]:")) == (f"unix:{path}", True)
    address = ("127.0.0.1", int(four.rpartition(":")[2]))
    create(address, "t")
    publish(address, "t", b"one")
    publish(("::1", int(six.rpartition(":")[2])), "t", b"two")
    target = topic_path("t")
    for _ in range(4):
        assert ask_unix(path, "POST", f"{target}/publish", '{"messages": ["three"]}')[0] == 200
    assert [payload for _, payload in poll(address, "t")] == [b"one", b"two", *[b"three"] * 4]
    assert ask_unix(path, "GET", target)[0] == 200


@pytest.mark.parametrize("processes", [1, 2])
def test_a_unix_socket_has_its_mode_and_is_removed_with_the_daemon(daemon, tmp_path, processes):
    path = tmp_path / "a.sock"
    running = daemon("http.unix_mode=0600", f"http.processes={processes}", bind=f"unix:{path},127.0.0.1:0")
    found = path.stat()
    assert stat.S_ISSOCK(found.st_mode)
    assert stat.S_IMODE(found.st_mode) == 0o600
    running.signal(signal.SIGTERM)
    assert running.wait() == 0
    assert not path.exists()


def test_the_socket_of_a_killed_daemon_is_replaced(daemon, tmp_path):
    path = tmp_path / "a.sock"
    running = daemon(bind=f"unix:{path},127.0.0.1:0")
    running.kill()
    assert path.exists()
    daemon(bind=f"unix:{path},127.0.0.1:0")
    assert ask_unix(path, "GET", "/ping")[0] == 200


def test_the_socket_of_a_running_daemon_is_left_alone(daemon, tmp_path):
    path = tmp_path / "a.sock"
    daemon(bind=f"unix:{path},127.0.0.1:0")
    ended = serve("--bind", f"unix:{path}", "--data-dir", str(tmp_path / "other"))
    assert ended.returncode == Exit.FAILED
    assert ended.stderr.startswith(f"error: http.bind unix:{path} is in use")
    assert ask_unix(path, "GET", "/ping")[0] == 200


def test_a_file_that_is_not_a_socket_is_never_removed(tmp_path):
    path = tmp_path / "precious"
    path.write_text("kept")
    ended = serve("--bind", f"unix:{path}", "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == Exit.FAILED
    assert "is not a socket" in ended.stderr
    assert path.read_text() == "kept"


def test_the_banner_of_a_daemon_on_a_unix_socket_alone_has_a_command_that_works(daemon, tmp_path):
    path = tmp_path / "a.sock"
    running = daemon("log.format=text", bind=f"unix:{path}", stdout=subprocess.PIPE)
    banner = [running.stdout.readline().decode().rstrip() for _ in range(5)]
    assert banner[0].endswith(f"listens on unix:{path}")
    command = banner[4].removeprefix("  try         ").split()
    assert command[:3] == ["curl", "-X", "PUT"]
    assert subprocess.run([*command, "-sf"], timeout=PATIENCE_S, check=False).returncode == 0
    assert ask_unix(path, "GET", "/v1/namespaces/demo/topics/greetings")[0] == 200


def test_a_failed_start_at_one_address_leaves_no_socket_at_another(daemon, tmp_path):
    running = daemon(bind="127.0.0.1:0")
    port = running.address[1]
    path = tmp_path / "a.sock"
    ended = serve("--bind", f"unix:{path},127.0.0.1:{port}", "--data-dir", str(tmp_path / "other"))
    assert ended.stderr.startswith(f"error: http.bind 127.0.0.1:{port} is in use")
    assert not path.exists()
    assert ask(running.address, "GET", "/ping").status == 200


def serve(*options: str) -> subprocess.CompletedProcess[str]:
    return run_plainsong("serve", *options, timeout_s=PATIENCE_S)


def test_the_peer_of_a_unix_socket_is_the_process_that_connected(tmp_path):
    from broker.security.peer import UnixPeer, peer_of

    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "a"))
        listener.listen()
        client.connect(str(tmp_path / "a"))
        accepted, _ = listener.accept()
        with accepted:
            peer = peer_of(accepted)
    assert peer.unix == UnixPeer(os.getpid(), os.getuid(), os.getgid())
    assert (peer.address, peer.scheme) == ("unix", "http")


def test_a_daemon_that_others_could_reach_does_not_start(tmp_path):
    ended = serve("--bind", "0.0.0.0:0", "--data-dir", str(tmp_path / "data"))
    assert ended.returncode == Exit.USAGE
    error, hint = ended.stderr.splitlines()
    assert error == (
        'error: http.bind = "0.0.0.0:0" can be reached from other machines without authentication and without TLS'
    )
    assert hint.startswith(
        'hint: set security.authentication = "required" (plainsong token create makes the first token)'
    )
    assert not (tmp_path / "data").exists()
    checked = run_plainsong("config", "check", "--bind", "0.0.0.0:0", timeout_s=PATIENCE_S)
    assert (checked.returncode, checked.stderr) == (ended.returncode, ended.stderr)


def test_an_explicitly_unprotected_daemon_says_so_at_the_start_and_in_its_log(daemon, tmp_path):
    insecure = "security.allow_insecure=authentication,tls"
    running = daemon(insecure, bind="0.0.0.0:0")
    port = running.address[1]
    running.wait_for_line("reachable without TLS")  # the last warning, after the ready line
    said = [json.loads(line) for line in running.lines]
    assert [line["event"] for line in said if line["level"] == "warning"] == [
        "reachable without authentication",
        "reachable without TLS",
    ]
    assert ask(("127.0.0.1", port), "GET", "/ping").status == 200
    texts = daemon("log.format=text", insecure, data_dir=tmp_path / "b", bind="0.0.0.0:0", stdout=subprocess.PIPE)
    banner = [texts.stdout.readline().decode().rstrip() for _ in range(3)]
    assert banner[1:] == ["  INSECURE    reachable without authentication", "  INSECURE    reachable without TLS"]

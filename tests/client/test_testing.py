"""``plainsong.testing``: a real daemon for users' tests, with a clock that can be moved and faults on demand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from plainsong.errors import OutcomeUnknown, Overloaded
from plainsong.testing import DaemonFailed, DaemonNotInstalled, broker, command
from plainsong.testing.plugin import plainsong_broker, plainsong_client
from tests.daemon.harness import PLAINSONG, eventually
from tests.patience import PATIENCE_S

__all__ = ["plainsong_broker", "plainsong_client"]


@pytest.fixture(scope="module", autouse=True)
def program():
    """Use the daemon of this tree."""
    before = os.environ.get("PLAINSONG_COMMAND")
    os.environ["PLAINSONG_COMMAND"] = str(PLAINSONG)
    yield
    if before is None:
        del os.environ["PLAINSONG_COMMAND"]
    else:
        os.environ["PLAINSONG_COMMAND"] = before


@pytest.fixture(scope="module")
def b():
    with broker() as started:
        yield started


@pytest.fixture
def client(b, request):
    with b.client(namespace=f"n{abs(hash(request.node.name))}", retry=False) as client:
        client.create_topic("orders", ttl_s=3600)
        yield client


def payloads(client: Client) -> list[bytes]:
    return [message.payload for message in client.read("orders")]


def test_time_moves_forward_on_request_and_messages_expire(b, client):
    client.publish("orders", b"old")
    b.clock.advance(3600)
    client.publish("orders", b"new")
    assert payloads(client) == [b"new"]


def test_a_held_reader_continues_once_time_has_passed_the_expiry_of_the_holding_message(b, client):
    undecided = client.transactions.begin()
    body = {"messages": ["undecided"], "transactionWritePointer": undecided.write_pointer, "ttlSeconds": 60}
    url = f"{b.url}/v1/namespaces/{client.namespace}/topics/orders/publish"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request).close()
    client.publish("orders", b"after")
    with ThreadPoolExecutor(1) as threads:
        polled = threads.submit(client.poll, "orders", isolation="committed", wait_ms=60_000)
        eventually("the poll is held", lambda: held_polls(b) == 1)
        b.clock.advance(61)
        assert [message.payload for message in polled.result(PATIENCE_S)] == [b"after"]
    client.transactions.abort(undecided)


def held_polls(b) -> float:
    with urllib.request.urlopen(b.url + "/metrics") as answer:
        (line,) = [each for each in answer.read().decode().splitlines() if each.startswith("plainsong_held_polls ")]
    return float(line.split()[1])


def test_a_publish_whose_answer_is_unknown_has_happened_and_a_refused_one_has_not(b, client):
    b.faults.next_publish("unknown")
    with pytest.raises(OutcomeUnknown) as caught:
        client.publish("orders", b"unknown")
    assert caught.value.outcome == "unknown"
    b.faults.next_publish("refused")
    with pytest.raises(Overloaded) as refused:
        client.publish("orders", b"refused")
    assert refused.value.outcome == "not-applied"
    client.publish("orders", b"fine")
    assert payloads(client) == [b"unknown", b"fine"]


def test_a_client_finds_out_that_a_commit_with_a_lost_answer_succeeded(b, client):
    b.faults.next_commit("lost")
    with client.transaction() as tx:
        tx.publish("orders", b"committed")
    assert payloads(client) == [b"committed"]


def test_committed_readers_are_held_for_a_block(b, client):
    client.publish("orders", b"before")
    with b.faults.hold_transaction("orders", namespace=client.namespace) as transaction:
        client.publish("orders", b"behind")
        assert payloads(client) == [b"before"]
        assert client.poll("orders").held.write_pointer == transaction.write_pointer
    assert payloads(client) == [b"before", b"behind"]


def test_a_test_daemon_is_killed_and_restarted_at_the_same_address_with_everything_acknowledged(tmp_path):
    with broker(tmp_path / "data", http__max_body_bytes=20_000_000) as b, b.client() as client:
        client.create_topic("orders")
        client.publish("orders", b"kept")
        url = b.url
        b.clock.advance(60)
        b.kill()
        b.start()
        assert (b.url, payloads(client)) == (url, [b"kept"])
        b.restart()
        later = client.publish("orders", b"later").first_id.publish_time_ms
        assert later - client.poll("orders")[0].id.publish_time_ms >= 60_000
    with pytest.raises(DaemonFailed, match="takes no commands"):
        b.tell(advance_ms=1)


def test_the_daemon_says_that_it_is_under_test_and_refuses_a_directory_with_data(b, tmp_path):
    with urllib.request.urlopen(f"{b.url}/readyz") as answer:
        assert json.load(answer)["testing"] is True
    with pytest.raises(DaemonFailed, match="no such command"):
        b.tell(next_publish="eaten")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine").touch()
    serve = [PLAINSONG, "serve", "--bind", "127.0.0.1:0", "--testing", str(tmp_path / "socket"), "--data-dir"]
    done = subprocess.run([*serve, str(tmp_path / "data")], capture_output=True, text=True, check=False)
    assert done.returncode == Exit.USAGE
    assert done.stderr.startswith("error: --testing is for a store in memory or a new directory\n")


def test_a_daemon_that_cannot_start_says_why():
    with pytest.raises(DaemonFailed, match="no_such_setting"), broker(http__no_such_setting=1):
        pass


def test_without_a_daemon_it_says_how_to_install_one(monkeypatch, tmp_path):
    monkeypatch.delenv("PLAINSONG_COMMAND")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DaemonNotInstalled, match="pip install plainsong-server"):
        command()
    assert issubclass(DaemonNotInstalled, unittest.SkipTest)  # so tests that call broker() themselves are skipped too


def test_a_missing_command_is_named(monkeypatch):
    monkeypatch.setenv("PLAINSONG_COMMAND", "/nowhere/plainsong")
    with pytest.raises(DaemonFailed, match=r"^/nowhere/plainsong cannot be run: No such file or directory"), broker():
        pass


def test_fixtures_of_pytest_give_each_test_a_namespace_of_one_daemon(plainsong_client, plainsong_broker):
    assert plainsong_client.topics() == []
    plainsong_client.create_topic("orders")
    assert plainsong_broker.client(namespace=plainsong_client.namespace).topics() == ["orders"]


def test_the_distribution_tells_pytest_of_its_fixtures():
    project = (Path(__file__).parents[2] / "etc/dist/client/pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nplainsong = "plainsong.testing.plugin"' in project


#: A user's tests: one calls the daemon itself, one uses a fixture, one needs neither.
USERS_TESTS = """
from plainsong.testing import broker

def test_by_itself():
    with broker():
        pass

def test_by_fixture(plainsong_client):
    pass

def test_of_something_else():
    pass
"""


@pytest.mark.parametrize(
    ("options", "ini", "environ", "fails"),
    [
        ([], "", {}, False),
        (["--plainsong-required"], "", {}, True),
        ([], "plainsong_required = true", {}, True),
        ([], "", {"PLAINSONG_TESTING_REQUIRED": "1"}, True),
    ],
)
def test_without_a_daemon_pytest_says_so_first_and_fails_if_one_is_required(tmp_path, options, ini, environ, fails):
    (tmp_path / "test_users.py").write_text(USERS_TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{ini}\n")
    (tmp_path / "python").symlink_to(sys.executable)  # a directory without our program
    plugin = ["-p", "plainsong.testing.plugin", "-p", "no:cacheprovider"]
    given = {
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # importing all others takes longer than these tests
        **environ,
    }
    command = [str(tmp_path / "python"), "-m", "pytest", *plugin, *options]
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
    first = done.stdout.partition("collected")[0]
    assert ("plainsong: tests that need the daemon fail" if fails else "plainsong: NOT TESTED") in first, done.stdout
    assert "pip install plainsong-server" in first
    assert done.returncode == (1 if fails else 0)
    counted = done.stdout.rstrip().splitlines()[-1]
    assert ("1 failed, 1 passed, 1 error" if fails else "1 passed, 2 skipped") in counted

"""Errors that pass through Spark keep their reason, code and hint, both in the text output and in JSON."""

from __future__ import annotations

import json
import re

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from plainsong.cli.main import run as run_program
from pyspark_plainsong.pipeline.archive import archiving
from pyspark_plainsong.pipeline.archive.command import archive
from pyspark_plainsong.pipeline.audit.command import audit
from pyspark_plainsong.pipeline.replay.command import replay
from tests.daemon.harness import Daemon, eventually
from tests.pipeline.archives import in_topic, published, url_of

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with Daemon(tmp_path_factory.mktemp("failures") / "data") as running:
        yield running


@pytest.fixture
def client(daemon, request):
    name = "".join(char for char in request.node.name if char.isalnum())[:60]
    with Client(url_of(daemon), namespace=name) as opened:
        yield opened


@pytest.fixture
def where(daemon, client):
    """The options of a job that name the daemon and the namespace."""
    return "--url", url_of(daemon), "-n", client.namespace


@pytest.fixture
def failed(where, capsys):
    """Run a job, once for people and once for programs; return its exit code and the error of each."""

    def run(job, *words):
        words = [*words, *where]
        capsys.readouterr()
        code = run_program(job, words, job.name)
        line = capsys.readouterr().err.strip()
        assert run_program(job, [*words, "--json"], job.name) == code
        told = capsys.readouterr().err.strip().splitlines()
        return code, line, json.loads(told[-1]) if told else None

    return run


def expire(client, topic="orders"):
    client.admin.set_properties(topic, ttl_s=1)
    eventually("the topic has expired", lambda: in_topic(client, topic) == [])


def test_messages_that_expired_before_they_were_archived(client, where, failed, tmp_path):
    published(client, 0, 10)
    words = ("append", "orders", "--root", str(tmp_path / "archive"))
    assert run_program(archive, [*words, *where], "archive") == 0
    published(client, 10, 10)
    expire(client)
    code, line, told = failed(archive, *words)
    assert code == Exit.FAILED
    for text in (line, json.dumps(told)):
        assert f"messages of topic {client.namespace}:orders published between" in text
        assert "have expired" in text
        assert "--may-lose" in text
    assert "Traceback" not in line


def test_messages_that_expired_before_they_were_audited(client, where, failed, tmp_path):
    client.create_topic("audit")
    client.publish("audit", [b"{}"] * 3)
    words = ("run", "audit", "--root", str(tmp_path / "tables"))
    assert run_program(audit, [*words, *where], "audit") == 0
    client.publish("audit", [b"{}"] * 3)
    expire(client, "audit")
    code, line, told = failed(audit, *words)
    assert code == Exit.FAILED
    for text in (line, json.dumps(told)):
        assert "have expired" in text
        assert "--may-lose" in text


def test_a_replay_into_a_topic_that_remembers_nothing(client, where, failed, tmp_path):
    published(client, 0, 10)
    root = str(tmp_path / "archive")
    assert run_program(archive, ["append", "orders", "--root", root, *where], "archive") == 0
    client.create_topic("plain", deduplication="disabled")
    code, line, told = failed(replay, "orders", "--root", root, "--into", "plain")
    assert code == Exit.FAILED
    for text in (line, json.dumps(told)):
        assert "deduplication" in text
    assert in_topic(client, "plain") == []


def test_a_topic_that_is_deleted_while_it_is_followed(client, where, tmp_path, monkeypatch, capsys):
    def tell(self, *, following=False):
        real(self, following=following)
        if following and client.topics():
            client.admin.delete_topic("orders")

    real = archiving.Appending.tell
    monkeypatch.setattr(archiving.Appending, "tell", tell)
    published(client, 0, 10)
    words = ["append", "orders", "--root", str(tmp_path / "archive"), "--follow", "--every", "1s"]
    assert run_program(archive, [*words, *where], "archive") == Exit.FAILED
    line = capsys.readouterr().err
    assert re.search(rf"topic {client.namespace}:orders (was deleted|does not exist)", line)
    assert "Traceback" not in line

"""While a daemon that cleans automatically runs, ``maintain`` reports pending work, shows its plan, and changes
nothing.
"""

from __future__ import annotations

import json
import subprocess

import pytest
from click.testing import CliRunner

from broker.command.maintain import command, plan
from plainsong import Client
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.errors import GenerationChanged, TopicNotFound
from tests.daemon.harness import Daemon, eventually, run_plainsong


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    """A daemon whose cleaning does not run during these tests."""
    with Daemon(tmp_path_factory.mktemp("maintain") / "data", "retention.interval_s=3600") as running:
        yield running


@pytest.fixture
def client(daemon):
    with Client(url(daemon), namespace="shop") as made:
        yield made


def url(daemon) -> str:
    return "http://{}:{}".format(*daemon.address)


def maintained(daemon, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = run_plainsong("maintain", "--url", url(daemon), "-n", "shop", *words)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def events(done) -> dict[str, dict]:
    """Return the events by name, one of each."""
    return {event["event"]: event for event in map(json.loads, done.stdout.splitlines())}


def test_maintain_prints_what_is_due_and_who_removes_it_and_that_nothing_was_done(daemon, client, tmp_path):
    client.create_topic("short", ttl_s=1)
    client.publish("short", [b"a", b"b", b"c"])
    eventually("they expire", lambda: not client.admin.stats("short")["messages"])
    metrics = tmp_path / "maintain.prom"
    done = maintained(daemon, "--metrics-file", str(metrics))
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("short")]
    assert row.split()[-4:-1] == ["3", "0", "0"]
    assert "leveldb" in done.stdout.splitlines()[-1]
    assert "nothing was done" in done.stdout.splitlines()[-1]
    assert "janitor" in done.stdout
    assert "exit_code" in metrics.read_text()
    assert plan.uncleaned(client, "short").expired == 3


def test_the_plan_is_printed_part_by_part_and_for_programs_in_whole_keys(daemon, client):
    client.create_topic("twice")
    client.admin.delete_topic("twice")
    client.create_topic("twice")
    shown = maintained(daemon, "--dry-run", "twice").stdout
    assert "generation" in shown
    found = events(maintained(daemon, "--dry-run", "--parts", "3", "--json", "twice"))
    topic, end = found["topic"], found["standalone"]
    assert [part["table"] for part in topic["parts"] if part["why"] == "generation"] == ["message", "payload"]
    assert all(bytes.fromhex(part["start"]).startswith(b"shop:twice:") for part in topic["parts"])
    assert (topic["generation"], found["pruning"]["invalid"]) == (2, 0)
    assert (end["store"], end["done"], found["end"]["exit"]) == ("leveldb", False, 0)


def test_a_missing_topic_ends_it_with_the_nearest_name(daemon, client):
    client.create_topic("there", if_not_exists=True)
    assert "did you mean" in maintained(daemon, "ther", code=4).stderr


def test_recreating_a_topic_voids_its_plan(client, monkeypatch):
    client.create_topic("changing")
    limits = plan.limits_of(client, "changing")

    uncleaned = plan.uncleaned

    def recreated(client, topic):
        client.admin.delete_topic(topic)
        client.create_topic(topic)
        return uncleaned(client, topic)

    monkeypatch.setattr(plan, "uncleaned", recreated)
    with pytest.raises(GenerationChanged):
        plan.plan_topic(client, "changing", 2)
    client.admin.delete_topic("changing")
    with pytest.raises(TopicNotFound):
        plan.check_unchanged(client, limits)


def test_an_unknown_store_ends_it_before_any_request(daemon, monkeypatch):
    monkeypatch.setattr(command, "store_kind", lambda client: "elsewhere")
    done = CliRunner().invoke(command.maintain, ["--url", url(daemon), "-n", "shop"])
    assert isinstance(done.exception, CommandFailed)
    assert (done.exception.code, "'elsewhere'" in done.exception.message) == (Exit.USAGE, True)


def test_maintain_can_also_be_run_as_a_job_of_the_pipeline(daemon, client):
    client.create_topic("reached", if_not_exists=True)
    words = ["--url", url(daemon), "-n", "shop", "--conf", "spark.executor.memory=1g", "reached"]
    job = run_plainsong("pipeline", "run", "--master", "local[2]", "--json", "maintain", *words)
    assert job.returncode == 0, job.stdout + job.stderr
    assert [json.loads(line)["event"] for line in job.stdout.splitlines()] == [
        *("progress", "topic", "pruning", "standalone", "end")
    ]

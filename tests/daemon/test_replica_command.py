"""A real daemon with a second copy: killed, its directory removed, and restored from the object store."""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.request
from dataclasses import replace
from random import Random

import pytest
from click.testing import CliRunner

from broker.command.replica import replica as commands
from plainsong import Client
from plainsong.cli.command import Exit
from storage.directory import DataDirectory
from storage.replication.record import Record, Settle, read_record, write_record
from tests.daemon.deployment import EACH, REQUESTS, fill
from tests.daemon.harness import Daemon, DaemonEnded, clean_environ, eventually, run_plainsong
from tests.storage.disks import copied_at_once
from tests.storage.replication.s3_server import BUCKET, s3_server

QUICK = ("replication.interval_ms=20",)
#: The environment of an object store at which nothing listens.
AWAY = {
    "AWS_ENDPOINT": "http://127.0.0.1:9",
    "AWS_ALLOW_HTTP": "true",
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "a-secret",
}


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(params=["file", "s3"])
def place(request, tmp_path):
    """The URL of an object store, and an environment with its credentials."""
    if request.param == "file":
        return f"file:{tmp_path}/copy", {}
    return f"s3://{BUCKET}/{tmp_path.name}", request.getfixturevalue("s3")


def url_of(daemon):
    return "http://{}:{}".format(*daemon.address)


def a_daemon(tmp_path, place, *sets, name="data"):
    url, environ = place
    return Daemon(tmp_path / name, f"replication.to={url}", *QUICK, *sets, environ=environ)


def replica(place, verb, *words, code=0):
    done = run_plainsong("replica", verb, *words, environ={**clean_environ(), **place[1]})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def metrics_of(daemon):
    with urllib.request.urlopen(f"{url_of(daemon)}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if line.startswith("plainsong_replication")}


def status_of(daemon):
    with urllib.request.urlopen(f"{url_of(daemon)}/v1/replication") as answer:
        return json.load(answer)


def counts(daemon):
    found = metrics_of(daemon)
    return found.get("plainsong_replication_counted_commit") == found["plainsong_replication_last_commit"]


def wait_until_all_counts(daemon):
    eventually("every commit counts", lambda: counts(daemon))


def restored(tmp_path, place, *words, name="new"):
    replica(place, "restore", place[0], "--to", f"leveldb:{tmp_path / name}", *words)
    return tmp_path / name


def values(client, topic="orders"):
    return [message.value for message in client.read(topic)]


def test_commits_that_counted_before_a_kill_are_restored_after_the_directory_is_gone(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
        made = fill(client)
        wait_until_all_counts(daemon)
        daemon.kill()
    shutil.rmtree(tmp_path / "data")
    checked = json.loads(replica(place, "verify", place[0], "--json"))
    assert (checked["ok"], checked["problems"]) == (True, [])
    with Daemon(restored(tmp_path, place)) as daemon, Client(url_of(daemon)) as client:
        ids = [bytes(message.id) for message in client.read("orders", isolation="uncommitted")]
        found = set(ids)
        assert ids == [each for each in made.ids if each in found]
        assert len(ids) > REQUESTS * EACH
        assert values(client, "twice") == [b"of the second generation"]
        assert client.admin.reader("orders", "ana")["position"] == made.reader.hex()
        with client.producer("orders", "till") as producer:
            assert producer.last_sequence_id == REQUESTS * EACH - 1
            receipt = producer.publish([b"again"], sequence_ids=[producer.last_sequence_id])
            assert receipt.duplicate


def test_a_daemon_killed_at_any_moment_leaves_a_copy_with_a_prefix_of_its_acknowledged_commits(tmp_path, place):
    random, acknowledged = Random(7), []
    for turn in range(4):
        with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
            if not turn:
                client.create_topic("orders")
                wait_until_all_counts(daemon)
            for number in range(random.randrange(5, 60)):
                value = b"%d-%d" % (turn, number)
                client.publish("orders", [value])
                acknowledged.append(value)
            sure = len(acknowledged) if random.random() < 0.5 else 0
            if sure:
                wait_until_all_counts(daemon)
            daemon.kill()
        new = restored(tmp_path, place, name=f"new-{turn}")
        with Daemon(new) as other, Client(url_of(other)) as client:
            found = values(client)
        assert found == acknowledged[: len(found)]
        assert len(found) >= sure
    assert len(json.loads(replica(place, "status", place[0], "--json"))["bases"]) == 1


def test_a_restore_to_an_earlier_commit_leaves_out_later_ones(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        wait_until_all_counts(daemon)
        client.publish("orders", [b"wanted"])
        wait_until_all_counts(daemon)
        commit = int(metrics_of(daemon)["plainsong_replication_last_commit"])
        client.publish("orders", [b"a mistake"])
        daemon.stop()
    new = restored(tmp_path, place, "--commit", commit)
    with Daemon(new) as daemon, Client(url_of(daemon)) as client:
        assert values(client) == [b"wanted"]


def test_a_restarted_daemon_continues_its_copy_without_a_gap(tmp_path, place):
    for turn in range(2):
        with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
            if not turn:
                client.create_topic("orders")
                wait_until_all_counts(daemon)
            client.publish("orders", [b"%d" % turn])
            daemon.stop()
    shown = json.loads(replica(place, "status", place[0], "--json"))
    assert len(shown["bases"]) == 1
    with Daemon(restored(tmp_path, place)) as daemon, Client(url_of(daemon)) as client:
        assert values(client) == [b"0", b"1"]


def test_a_directory_with_a_copy_starts_without_it_only_after_leaving(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon:
        daemon.stop()
    with pytest.raises(DaemonEnded, match="second copy"):
        Daemon(tmp_path / "data").start()
    options = ("--data-dir", tmp_path / "data", "--set", f"replication.to={place[0]}")
    replica(place, "leave", *options)
    replica(place, "leave", *options, code=Exit.STORE)
    with Daemon(tmp_path / "data") as daemon:
        daemon.stop()


@pytest.mark.parametrize("has_taken_over", [False, True])
def test_leaving_keeps_the_directory_locked_until_its_record_is_removed(tmp_path, monkeypatch, has_taken_over):
    place, found = (f"file:{tmp_path}/copy", {}), []
    with a_daemon(tmp_path, place) as daemon:
        daemon.stop()
    if has_taken_over:
        write_record(tmp_path / "data", replace(read_record(tmp_path / "data"), settle=Settle(1, 0)))

    def close(home):
        found.append(read_record(home.path) is None)
        closes(home)

    closes = DataDirectory.close
    monkeypatch.setattr(DataDirectory, "close", close)
    words = ("leave", "--data-dir", str(tmp_path / "data"), "--set", f"replication.to={place[0]}")
    assert CliRunner().invoke(commands, words).exit_code == 0
    assert found
    assert all(found)


def test_a_standby_that_is_not_built_yet_does_not_become_a_store_by_leaving(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon:
        daemon.stop()
    write_record(tmp_path / "data", Record("s" * 32, standby=True))
    options = ("--data-dir", tmp_path / "data", "--set", f"replication.to={place[0]}")
    replica(place, "leave", *options, "--without-seal", code=Exit.STORE)
    assert read_record(tmp_path / "data").standby


def test_a_copied_directory_deposes_the_daemon_that_has_the_copy(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        wait_until_all_counts(daemon)
        daemon.kill()
        shutil.copytree(tmp_path / "data", tmp_path / "other")
    with a_daemon(tmp_path, place) as first:
        wait_until_all_counts(first)
        shutil.rmtree(tmp_path / "other")
        copied_at_once(tmp_path / "data", tmp_path / "other")
        (tmp_path / "other" / "plainsong.lock").unlink()
        with a_daemon(tmp_path, place, name="other") as second:
            eventually("the first daemon ends", lambda: first.ended)
            assert first.returncode == Exit.DEPOSED
            second.stop()
    with pytest.raises(DaemonEnded, match="has continued the log"):
        a_daemon(tmp_path, place).start()


def test_an_operator_sees_the_copy_and_its_problems(tmp_path):
    with contextlib.ExitStack() as server:
        environ = server.enter_context(s3_server(tmp_path / "s3"))
        with a_daemon(tmp_path, (f"s3://{BUCKET}/seen", environ), "replication.timeout_s=1") as daemon:
            url = url_of(daemon)
            with Client(url) as client:
                client.create_topic("orders")
                wait_until_all_counts(daemon)
                eventually("the oldest restorable time is known", lambda: status_of(daemon)["oldestMs"] is not None)
                shown = status_of(daemon)
                assert (shown["role"], shown["lagCommits"], shown["givenUp"]) == ("primary", 0, False)
                assert shown["oldestMs"] == shown["baseMs"]
                assert shown["puts"] >= 3
                assert 0 < shown["putP50Ms"] <= shown["putP99Ms"]
                told = json.loads(run_plainsong("doctor", "--url", url, "--json").stdout)
                (copy,) = [check for check in told["checks"] if check["what"] == "second copy"]
                assert copy["state"] == "ok"
                assert f"s3://{BUCKET}/seen: epoch 1, 0 commits behind; a write takes " in copy["says"]
                # Without those that the start made before it registered the metric.
                assert metrics_of(daemon)["plainsong_replication_put_duration_seconds_count"] >= 1
                server.close()
                client.publish("orders", [b"x"])
                eventually("the failure is seen", lambda: metrics_of(daemon)["plainsong_replication_failing"] == 1)
                (found,) = json.loads(run_plainsong("doctor", "--attention", "--url", url, "--json").stdout)
                assert (found["kind"], found["severity"]) == ("replication", "warning")
                assert "cannot write its second copy" in found["text"]
                assert status_of(daemon)["lagCommits"] >= 1
            daemon.kill()


def test_an_object_store_that_cannot_be_reached_ends_the_start_with_a_reason(tmp_path):
    daemon = Daemon(tmp_path / "data", "replication.to=s3://bucket/x", "replication.timeout_s=0.2", environ=AWAY)
    with pytest.raises(DaemonEnded, match="has not answered") as ended:
        daemon.start()
    assert "a-secret" not in str(ended.value)


def test_the_directory_of_a_primary_that_nobody_has_deposed_rejoins_only_by_force(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        wait_until_all_counts(daemon)
        daemon.kill()
    where = ("--data-dir", str(tmp_path / "data"), "--set", f"replication.to={place[0]}")
    environ = {**clean_environ(), **place[1]}
    done = run_plainsong("replica", "rejoin", *where, environ=environ)
    assert (done.returncode, done.stdout) == (Exit.FAILED, "")
    assert "no other process has taken over" in done.stderr
    assert "start the daemon" in done.stderr
    with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
        client.publish("orders", [b"1"])
        wait_until_all_counts(daemon)
    replica(place, "rejoin", *where, "--force")
    assert read_record(tmp_path / "data").standby


def test_a_directory_whose_object_store_cannot_be_reached_rejoins_only_by_force(tmp_path):
    with a_daemon(tmp_path, (f"file:{tmp_path}/copy", {})) as daemon:
        wait_until_all_counts(daemon)
    place = ("s3://bucket/x", AWAY)
    where = ("--data-dir", str(tmp_path / "data"), "--set", f"replication.to={place[0]}")
    timeout = ("--set", "replication.timeout_s=0.2")
    done = run_plainsong("replica", "rejoin", *where, *timeout, environ={**clean_environ(), **AWAY})
    assert (done.returncode, done.stdout) == (Exit.UNAVAILABLE, "")
    assert "--force" in done.stderr
    replica(place, "rejoin", *where, *timeout, "--force")
    assert read_record(tmp_path / "data").standby


def test_after_a_switch_in_a_folder_the_command_says_that_a_take_over_by_hand_must_follow(tmp_path):
    place = f"file:{tmp_path}/copy", {}
    with a_daemon(tmp_path, place) as daemon:
        wait_until_all_counts(daemon)
        assert "then run plainsong replica takeover at the standby" in replica(place, "switch", "--url", url_of(daemon))


def test_a_directory_pointed_at_the_copy_of_another_store_neither_rejoins_nor_leaves_there(tmp_path, place):
    with a_daemon(tmp_path, place) as first, Client(url_of(first)) as client:
        client.create_topic("orders")
        client.publish("orders", [b"1"])
        wait_until_all_counts(first)
    own = f"file:{tmp_path}/own", {}
    with a_daemon(tmp_path, own, name="other") as other, Client(url_of(other)) as client:
        client.create_topic("orders")
        client.publish("orders", [b"2"])
        wait_until_all_counts(other)
    for verb in ("rejoin", "leave"):
        where = ("--data-dir", str(tmp_path / "other"), "--set", f"replication.to={place[0]}")
        done = run_plainsong("replica", verb, *where, environ={**clean_environ(), **place[1]})
        assert (done.returncode, done.stdout) == (Exit.FAILED, "")
        assert "the copy of another store" in done.stderr
    with a_daemon(tmp_path, own, name="other") as other, Client(url_of(other)) as client:
        assert values(client) == [b"2"]

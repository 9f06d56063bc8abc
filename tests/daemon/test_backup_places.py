"""``plainsong backup`` with object stores: backups on a real S3 server, and a daemon's second copy."""

from __future__ import annotations

import json

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.daemon.harness import Daemon, clean_environ, run_plainsong
from tests.daemon.test_replica_command import a_daemon, url_of, wait_until_all_counts
from tests.storage.replication.s3_server import BUCKET, s3_server


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as environment:
        yield environment


@pytest.fixture(params=["file", "s3"])
def place(request, tmp_path):
    """The URL of an object store, and an environment with its credentials."""
    if request.param == "file":
        return f"file:{tmp_path}/kept", {}
    return f"s3://{BUCKET}/{tmp_path.name}/kept", request.getfixturevalue("s3")


def backup(place, verb, *words, code=0):
    done = run_plainsong("backup", verb, place[0], *words, "--json", environ={**clean_environ(), **place[1]})
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return json.loads((done.stderr if code else done.stdout).splitlines()[-1])


def test_backups_in_an_object_store_share_objects_and_are_verified_restored_and_pruned(tmp_path, place):
    settings = ("retention.interval_s=3600", "deduplication.snapshot_interval_s=3600")
    with Daemon(tmp_path / "data", *settings) as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        with client.producer("orders", "till") as producer:
            producer.publish([b"one", b"two"])
        client.publish("orders", [b"three"])
        first = backup(place, "create", "--url", url_of(daemon))
        second = backup(place, "create", "--url", url_of(daemon))
    assert (first["newObjects"] > 2, second["newObjects"]) == (True, 0)
    assert [each["id"] for each in backup(place, "list")] == [first["id"], second["id"]]
    assert backup(place, "verify", "--deep")["ok"]
    backup(place, "restore", "--to", f"leveldb:{tmp_path / 'new'}")
    with Daemon(tmp_path / "new") as daemon, Client(url_of(daemon)) as client:
        assert [message.value for message in client.read("orders")] == [b"one", b"two", b"three"]
        with client.producer("orders", "till") as producer:
            assert producer.last_sequence_id == 1
    assert backup(place, "prune", "--keep-last", "1")["removed"] == [first["id"]]
    assert [each["id"] for each in backup(place, "list")] == [second["id"]]
    assert backup(place, "verify", "--id", second["id"])["ok"]


def test_the_prefix_of_a_second_copy_is_only_listed_verified_and_restored(tmp_path, place):
    with a_daemon(tmp_path, place) as daemon, Client(url_of(daemon)) as client:
        client.create_topic("orders")
        client.publish("orders", [b"one"])
        wait_until_all_counts(daemon)
        refused = backup(place, "create", "--url", url_of(daemon), code=Exit.STORE)
        assert "second copy" in str(refused)
        assert "second copy" in str(backup(place, "prune", "--keep-last", "1", code=Exit.STORE))
        daemon.stop()
    assert len(backup(place, "list")["bases"]) == 1
    checked = backup(place, "verify", "--deep")
    assert (checked["ok"], checked["equalBases"]) == (True, [])
    backup(place, "restore", "orders", "--to", f"leveldb:{tmp_path / 'new'}", code=Exit.USAGE)
    backup(place, "restore", "--to", f"leveldb:{tmp_path / 'new'}")
    with Daemon(tmp_path / "new") as daemon, Client(url_of(daemon)) as client:
        assert [message.value for message in client.read("orders")] == [b"one"]


def test_wrong_credentials_and_a_wrong_url_end_the_command_with_a_reason_and_without_a_secret(s3, tmp_path):
    wrong = {**s3, "AWS_SECRET_ACCESS_KEY": "wrong-secret"}
    refused = backup((f"s3://{BUCKET}/x", wrong), "list", code=Exit.UNAVAILABLE)
    assert "credentials" in str(refused)
    assert "wrong-secret" not in str(refused)
    refused = backup((f"s3://key:a-secret@{BUCKET}/x", s3), "list", code=Exit.STORE)
    assert "a-secret" not in str(refused)
    backup(("file:relative", {}), "list", code=Exit.STORE)

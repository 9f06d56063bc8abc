"""Copies of a deployment to a real HBase and back, where each copy is killed and resumed."""

from __future__ import annotations

import signal

from plainsong import Client
from tests.daemon.deployment import (
    Deployment,
    duplicates_are_reported,
    fill,
    is_all_there,
    new_messages_come_behind,
    open_transactions_can_be_committed,
)
from tests.daemon.harness import Daemon
from tests.daemon.test_copy_command import copy, killed_while


def served(daemon: Daemon) -> Client:
    return Client("http://{}:{}".format(*daemon.address))


def test_a_deployment_moves_to_hbase_and_back_and_continues_where_it_was(hbase, tmp_path):
    address = "{}:{}".format(*hbase.address)
    leveldb, tables = f"leveldb:{tmp_path / 'data'}", f"hbase:{address}?prefix=moved_"
    settings = ("storage.kind=hbase", f"storage.hbase.thrift={address}", "storage.hbase.table_prefix=moved_")
    made: Deployment
    with Daemon(tmp_path / "data", "retention.interval_s=3600") as daemon, served(daemon) as client:
        made = fill(client)
        daemon.stop()
    assert killed_while("copying", "--from", leveldb, "--to", tables) == -signal.SIGKILL
    assert killed_while("comparing", "--from", leveldb, "--to", tables) == -signal.SIGKILL
    assert "both sides are the same" in copy("--from", leveldb, "--to", tables).stdout
    with Daemon(tmp_path / "unused", *settings) as daemon, served(daemon) as client:
        is_all_there(client, made)
        duplicates_are_reported(client, made)
        new_messages_come_behind(client, made)
        daemon.stop()
    back = f"leveldb:{tmp_path / 'back'}"
    assert killed_while("copying", "--from", tables, "--to", back) == -signal.SIGKILL
    assert "both sides are the same" in copy("--from", tables, "--to", back).stdout
    with Daemon(tmp_path / "back") as daemon, served(daemon) as client:
        is_all_there(client, made)
        duplicates_are_reported(client, made)
        open_transactions_can_be_committed(client, made)
        new_messages_come_behind(client, made)


def test_a_dry_run_towards_missing_tables_creates_none_and_knows_their_bounds(hbase, tmp_path):
    with Daemon(tmp_path / "data") as daemon, served(daemon) as client:
        client.publish(client.create_topic("orders").name, b"x" * 400_000)
        daemon.stop()
    sides = ("--from", f"leveldb:{tmp_path / 'data'}", "--to", "hbase:{}:{}?prefix=none_".format(*hbase.address))
    for _ in range(2):
        assert "would copy" in copy(*sides, "--dry-run").stdout
    config = tmp_path / "small.toml"
    config.write_text("[storage.hbase]\nmax_cell_bytes = 300000\n")
    refused = copy(*sides, "--dry-run", "--config", str(config), code=3)
    assert "the target takes at most 298976" in refused.stderr
    assert "HBase has no table none_metadata" in copy(*sides, "--verify-only", code=3).stderr


def test_an_hbase_that_already_has_topics_of_the_same_names_is_refused_and_another_prefix_is_not(hbase, tmp_path):
    address = "{}:{}".format(*hbase.address)
    with Daemon(tmp_path / "data") as daemon, served(daemon) as client:
        client.publish(client.create_topic("orders").name, b"here")
        daemon.stop()
    leveldb = f"leveldb:{tmp_path / 'data'}"
    with (
        Daemon(
            tmp_path / "unused",
            "storage.kind=hbase",
            f"storage.hbase.thrift={address}",
            "storage.hbase.table_prefix=taken_",
        ) as daemon,
        served(daemon) as client,
    ):
        client.create_topic("orders")
        daemon.stop()
    done = copy("--from", leveldb, "--to", f"hbase:{address}?prefix=taken_", code=3)
    assert "topics of the same names: default:orders" in done.stderr
    copy("--from", leveldb, "--to", f"hbase:{address}?prefix=free_")

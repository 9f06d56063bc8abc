"""Backups of a deployment on a real HBase while transactions run, restored to LevelDB and back."""

from __future__ import annotations

import signal
from pathlib import Path

from plainsong import Client
from tests.daemon.deployment import EACH, REQUESTS, fill
from tests.daemon.harness import Daemon, eventually
from tests.daemon.test_backup_command import ACCOUNTS, Transfers, backup, made, sums, url_of
from tests.daemon.test_copy_command import started_until
from tests.freezing import thaw
from tests.patience import PATIENCE_S


def settings_of(hbase, prefix: str) -> tuple[str, ...]:
    address = "{}:{}".format(*hbase.address)
    return ("storage.kind=hbase", f"storage.hbase.thrift={address}", f"storage.hbase.table_prefix={prefix}")


def stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_in_a_backup_of_hbase_transactions_are_whole_over_topics_and_publishes_are_a_prefix(hbase, tmp_path):
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "unused", *settings_of(hbase, "backed_")) as daemon:
        with Client(url_of(daemon)) as client:
            for name in (*ACCOUNTS, "log"):
                client.create_topic(name)
        with Transfers(url_of(daemon)) as going_on:
            eventually("there is something to keep", lambda: going_on.transfers > 20)
            floor, before = going_on.acknowledged, going_on.transfers
            # Stopped when it renames the first object, until more transactions have been made.
            words = ("backup", "create", folder, "--url", url_of(daemon))
            creating = started_until("os.rename", r"/objects/../[0-9a-f]{64}", *words, by=signal.SIGSTOP)
            try:
                eventually(
                    "the backup is stopped at the rename",
                    lambda: creating.poll() is not None or stands_still(creating.pid),
                )
                assert creating.poll() is None
                meanwhile = going_on.transfers
                eventually("transactions continue", lambda: going_on.transfers > meanwhile + 3)
                thaw(creating.pid)
                assert creating.wait(PATIENCE_S) == 0
            finally:
                creating.kill()  # even if it is still stopped
        daemon.stop()
    assert made("verify", folder, "--deep")["ok"]
    backup("restore", folder, "--to", f"leveldb:{tmp_path / 'data'}")
    with Daemon(tmp_path / "data") as daemon, Client(url_of(daemon)) as client:
        total, count = sums(client)
        published = [message.value for message in client.read("log")]
        client.publish("log", [b"behind"])
    assert total == 0
    assert count >= 2 * before - 4  # all except those in progress
    assert len(published) >= 2 * floor
    assert published == [each for n in range(len(published) // 2) for each in (b"%d" % n, b"same request")]


def test_a_backup_of_leveldb_is_restored_to_hbase(hbase, tmp_path):
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "data", "retention.interval_s=3600") as daemon, Client(url_of(daemon)) as client:
        told = fill(client)
        made("create", folder, "--url", url_of(daemon))
        daemon.stop()
    place = "hbase:{}:{}?prefix=restored_".format(*hbase.address)
    assert "both sides are the same" in backup("restore", folder, "--to", place).stdout
    with Daemon(tmp_path / "unused", *settings_of(hbase, "restored_")) as daemon, Client(url_of(daemon)) as client:
        assert len(list(client.read("orders", isolation="committed"))) == REQUESTS * EACH + 1
        with client.producer("orders", "till") as producer:
            assert producer.last_sequence_id == REQUESTS * EACH - 1
        receipt = client.publish("orders", [b"new"])
        assert bytes(receipt.first_id) > told.ids[-1]

"""Backups and restores on full disks, and scrub, backup and restore while the clock is set back."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from random import Random

import pytest

from plainsong import Client
from plainsong.cli.command import Exit
from tests.daemon.harness import PLAINSONG, Daemon, DaemonEnded, eventually, run_plainsong, start_python
from tests.daemon.talk import ask
from tests.daemon.test_backup_command import backup, made, restored, url_of
from tests.daemon.test_clock import _LIBRARIES as FAKETIME
from tests.daemon.test_clock import HOUR_S, clock
from tests.patience import PATIENCE_S
from tests.storage.disks import fill, small_disk

#: Number of requests, messages in each, and bytes in each message, which are incompressible.
REQUESTS, EACH, SIZE = 20, 100, 4096


def publish_much(client: Client) -> list[bytes]:
    """Publish about 8 MB; return the last id of each request."""
    random = Random(1)
    client.create_topic("orders")
    requests = [[random.randbytes(SIZE) for _ in range(EACH)] for _ in range(REQUESTS)]
    return [bytes(client.publish("orders", messages).last_id) for messages in requests]


def enlarge(disk: Path, size_mib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_mib}m", str(disk)], check=True)


def objects_in(folder: Path) -> list[str]:
    return [each.name for each in folder.glob("objects/*/*") if len(each.name) == 64]


def test_a_full_disk_leaves_no_backup_and_its_objects_are_used_by_the_next(tmp_path):
    with Daemon(tmp_path / "data") as daemon, small_disk(tmp_path / "disk", 5) as disk:
        with Client(url_of(daemon)) as client:
            publish_much(client)
            folder = disk / "backups"
            failed = backup("create", folder, "--url", url_of(daemon), code=Exit.FAILED)
            assert "No space left on device" in failed.stderr
            assert json.loads(backup("list", folder, "--json").stdout) == []
            left = objects_in(folder)
            assert left
            assert not list(folder.rglob(".new-*"))
            # The daemon has released the failed backup's cut: the next backup begins at once.
            enlarge(disk, 64)
            last = client.publish("orders", b"behind it")
            done = made("create", folder, "--url", url_of(daemon))
        assert done["newObjects"] <= done["objects"] - len(left)
        assert done["messages"] == REQUESTS * EACH + 1
        assert made("verify", folder, "--deep")["ok"]
        with Daemon(restored(folder, tmp_path / "new")) as again, Client(url_of(again)) as client:
            assert [bytes(message.id) for message in client.read("orders")][-1] == bytes(last.first_id)


def test_a_daemon_whose_own_disk_is_full_makes_a_backup_or_says_why_not_and_makes_it_later(tmp_path):
    """The backup fails if the disk was full during a write: reads then fail until the store is reopened."""
    folder = tmp_path / "backups"
    with small_disk(tmp_path / "disk", 48) as disk, Daemon(disk / "data", "storage.min_free_bytes=0") as daemon:
        with Client(url_of(daemon)) as client:
            publish_much(client)
        ballast = fill(disk)
        done = run_plainsong("backup", "create", folder, "--url", url_of(daemon))
        kept = json.loads(backup("list", folder, "--json").stdout)
        assert (done.returncode, len(kept)) in ((Exit.OK, 1), (Exit.UNAVAILABLE, 0)), done
        assert done.returncode == Exit.OK or "No space left on device" in done.stderr
        ballast.unlink()
        with Client(url_of(daemon)) as client:
            client.publish("orders", b"again")  # the client retries until the store is open
            assert made("create", folder, "--url", url_of(daemon))["messages"] == REQUESTS * EACH + 1
            assert made("verify", folder, "--deep")["ok"]


def test_a_restore_onto_a_full_disk_is_not_served_and_continues_when_there_is_room(tmp_path):
    folder = tmp_path / "backups"
    with Daemon(tmp_path / "data") as daemon, Client(url_of(daemon)) as client:
        ids = publish_much(client)
        made("create", folder, "--url", url_of(daemon))
        daemon.stop()
    with small_disk(tmp_path / "disk", 5) as disk:
        words = ["restore", folder, "--to", f"leveldb:{disk / 'data'}"]
        failed = run_plainsong("backup", *words)
        assert failed.returncode in (Exit.FAILED, Exit.UNAVAILABLE, Exit.STORE), failed
        assert "No space left on device" in failed.stderr
        assert "Traceback" not in failed.stderr
        enlarge(disk, 96)
        with pytest.raises(DaemonEnded, match="not complete"), Daemon(disk / "data"):
            pass
        assert "both sides are the same" in backup(*words).stdout
        with Daemon(disk / "data", "storage.min_free_bytes=0") as daemon, Client(url_of(daemon)) as client:
            found = [bytes(message.id) for message in client.read("orders")]
            assert len(found) == REQUESTS * EACH
            assert set(ids) < set(found)
            assert bytes(client.publish("orders", b"new").first_id) > found[-1]


# --- clocks ----------------------------------------------------------------------------------------


class Clock:
    """A wall clock that can be set while a daemon runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, ahead_s: int) -> None:
        self._file.write_text(f"{ahead_s:+d}s\n")

    @property
    def environ(self) -> dict[str, str]:
        found = clock(0)
        del found["FAKETIME"]
        return {**found, "FAKETIME_TIMESTAMP_FILE": str(self._file), "FAKETIME_NO_CACHE": "1"}


@pytest.mark.skipif(not FAKETIME, reason="NOT TESTED: wrong clocks, since libfaketime is not installed")
def test_a_clock_that_is_set_back_during_scrub_backup_and_restore_breaks_no_promise(tmp_path, monkeypatch):
    wall, folder = Clock(tmp_path / "clock"), tmp_path / "backups"
    slow = ("backup.bytes_per_s=4MiB", "storage.scrub_bytes_per_s=4MiB")
    with Daemon(tmp_path / "data", *slow, environ=wall.environ) as daemon, Client(url_of(daemon)) as client:
        publish_much(client)
        before = [bytes(message.id) for message in client.read("orders")]
        ask(daemon.address, "POST", "/v1/scrub")
        line = (PLAINSONG, "backup", "create", folder, "--url", url_of(daemon), "--json")
        creating = start_python(*line, imports=[])
        eventually("objects are written", lambda: len(objects_in(folder)) >= 3)
        wall.set(-HOUR_S)
        during = client.publish("orders", b"during")
        done = json.loads(creating.communicate(PATIENCE_S)[0])
        assert done["messages"] >= len(before)
        eventually("the scrub ends", lambda: ask(daemon.address, "GET", "/v1/scrub").json()["state"] == "waiting")
        report = ask(daemon.address, "GET", "/v1/scrub").json()
        assert (report["findings"], report["lastCompleteMs"] is not None) == ([], True)
        assert bytes(during.first_id) > before[-1]
        # With the clock set back, ``list``, ``prune`` and ``restore`` still treat a later backup as newer.
        later = made("create", folder, "--url", url_of(daemon))
        daemon.kill()
    assert made("verify", folder, "--id", done["id"], "--deep")["ok"]
    assert made("verify", folder, "--id", later["id"], "--deep")["ok"]
    # The clock is an hour behind: ids assigned since the backup are unknown, so a restore needs a confirmation.
    for name, value in clock(-HOUR_S).items():
        monkeypatch.setenv(name, value)
    target = tmp_path / "new"
    words = ["restore", folder, "--to", f"leveldb:{target}", "--id", later["id"]]
    refused = backup(*words, code=Exit.FAILED).stderr
    assert "this machine's clock is earlier than backup " + done["id"] in refused
    assert not target.exists()
    assert "--now is before" in backup(*words, "--now", later["cutMs"], code=Exit.USAGE).stderr
    lost_ms = done["cutMs"] + HOUR_S * 1000
    backup(*words, "--now", lost_ms)
    with Daemon(target, environ=clock(-HOUR_S)) as daemon, Client(url_of(daemon)) as client:
        found = [bytes(message.id) for message in client.read("orders")]
        assert found == [*before, bytes(during.first_id)]
        new = bytes(client.publish("orders", b"new").first_id)
        # Ids assigned until then are not assigned again, although no backup contains them.
        assert int.from_bytes(new[:8], "big") >= lost_ms

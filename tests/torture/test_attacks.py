"""Attacks on a store from outside, on a real daemon or its directory; version 0.1 failed each of them.

``docs/stores.md`` states the promise for each. Rows that are temporarily unreadable during a removal cannot be
simulated here, because the read fails inside LevelDB's mappings: ``tests/storage/test_lost_volume.py`` tests that.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random

import pytest

from plainsong import Client
from tests.daemon.harness import Daemon, DaemonEnded, eventually, run_plainsong
from tests.daemon.talk import ask, create, publish, publish_call, read_all
from tests.torture.course import SIZES, SMALLEST
from tests.torture.disk import Disk, Plan, why_not
from tests.torture.power import SECTOR, Record, read_log
from tests.torture.power import Disk as Told

SEED = 192
FOR_EVER = 1 << 32
needs_disk = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


def volumes(data: Path) -> list[Path]:
    """Return the folders of volumes, oldest first."""
    return sorted(path for path in (data / "volumes").iterdir() if path.is_dir())


@needs_disk
def test_a_daemon_starts_where_a_power_cut_has_torn_the_last_record_of_a_manifest_at_a_sector(tmp_path, made):
    disk = Disk(tmp_path / "data", made, log=True)
    assert disk.log is not None
    # Each flush of LevelDB's memory to a table adds an edit to the volume's manifest.
    settings = ("storage.min_free_bytes=0", "storage.write_buffer_bytes=65536")
    acknowledged: list[tuple[float, bytes]] = []
    with Daemon(tmp_path / "data", *settings, environ=disk.environ) as daemon:
        create(daemon.address, "t")
        for number in range(60):
            payload = b"%d" % number + b"x" * 50_000
            publish(daemon.address, "t", payload)
            acknowledged.append((time.monotonic(), payload))
        daemon.kill()
    disk.close()
    records = read_log(disk.log)
    torn = list(edits_over_a_sectors_end(records))
    assert torn
    for number, (moment, path, sector, end) in enumerate(torn[:3]):
        image = tmp_path / f"image{number}"
        Told.that_was_reported(disk.root, records[:moment]).image(image, "kept", Random(SEED))
        manifest = image / Path(path).relative_to(disk.root)
        content = bytearray(manifest.read_bytes())
        assert len(content) == end
        content[sector:end] = bytes(end - sector)
        manifest.write_bytes(content)
        wanted = [payload for at_s, payload in acknowledged if at_s < records[moment - 1].at_s]
        with Daemon(image, *settings) as daemon:
            there = [payload for _, payload in read_all(daemon.address, "t")]
        assert there[: len(wanted)] == wanted


def edits_over_a_sectors_end(records: list[Record]) -> Iterator[tuple[int, str, int, int]]:
    """Yield writes to manifests that cross a sector's end: number of records, path, that place, and the end."""
    paths: dict[int, str] = {}
    for moment, each in enumerate(records, 1):
        if each.kind == "open_":
            paths[each.fd] = each.one.decode()
        elif each.kind == "write" and "/MANIFEST-" in paths.get(each.fd, ""):
            end = each.number + len(each.one)
            sector = end - end % SECTOR
            if each.number < sector < end:
                yield moment, paths[each.fd], sector, end


@pytest.mark.parametrize("part", [0.25, 0.5, 0.9])
def test_a_log_of_a_volume_that_was_cut_while_the_daemon_was_stopped_is_damage_and_not_a_shorter_topic(tmp_path, part):
    data = tmp_path / "data"
    with Daemon(data, "storage.min_free_bytes=0") as daemon:
        create(daemon.address, "t")
        for number in range(50):
            publish(daemon.address, "t", b"%d" % number + b"x" * 500)
        assert daemon.stop() == 0
    log = max(volumes(data)[-1].glob("*.log"), key=lambda path: path.stat().st_size)
    written = log.read_bytes().rstrip(b"\0")
    assert len(written) > 25_000
    log.write_bytes(written[: int(len(written) * part)])
    with pytest.raises(DaemonEnded, match=r"ended with 3: .*commits are missing"), Daemon(data):
        pass


@needs_disk
def test_a_next_volume_that_cannot_be_made_is_named_and_made_once_there_is_room(tmp_path, made):
    disk = Disk(tmp_path / "data", made)
    with Daemon(tmp_path / "data", *SIZES[SMALLEST], environ=disk.environ) as daemon:
        create(daemon.address, "t")
        disk.fail(Plan(1, FOR_EVER, error=errno.ENOSPC, kinds=("mkdir",)))
        acknowledged: list[bytes] = []
        for number in count():
            payload = b"%d" % number + b"x" * 5_000
            answer = ask(daemon.address, *publish_call("t", [payload]))
            if answer.status != 200:
                break
            acknowledged.append(payload)
        problem = answer.json()
        assert (answer.status, problem["outcome"]) == (503, "not-applied")
        assert "the next volume cannot be made" in problem["detail"]
        assert "No space left on device" in problem["detail"]
        assert "backup" not in json.dumps(problem)
        assert disk.made
        disk.heal()
        eventually(
            "it makes the volume",
            lambda: ask(daemon.address, *publish_call("t", [b"last"])).status == 200,
        )
        assert len(volumes(tmp_path / "data")) > 1
        there = [payload for _, payload in read_all(daemon.address, "t")]
        assert there == [*acknowledged, b"last"]
        daemon.kill()
    with Daemon(tmp_path / "data", *SIZES[SMALLEST]) as daemon:
        assert [payload for _, payload in read_all(daemon.address, "t")] == there
    disk.close()


def test_a_deleted_topic_is_brought_back_from_a_backup_as_the_documents_say(tmp_path):
    folder, data = tmp_path / "backups", tmp_path / "data"
    with Daemon(data, "storage.min_free_bytes=0") as daemon, Client(f"http://127.0.0.1:{daemon.address[1]}") as client:
        client.create_topic("orders")
        client.publish("orders", b"precious")
        done = run_plainsong("backup", "create", folder, "--url", f"http://127.0.0.1:{daemon.address[1]}")
        assert done.returncode == 0, done.stderr
        client.admin.delete_topic("orders")
        daemon.stop()

    def restore(*words: str) -> tuple[int, str]:
        done = run_plainsong("backup", "restore", folder, "--to", f"leveldb:{data}", "default:orders", *words)
        return done.returncode, done.stdout + done.stderr

    code, said = restore()
    assert code == 3
    assert "topics of the same names: default:orders" in said
    assert restore("--as", "default:orders_again")[0] == 0
    with Daemon(data) as daemon, Client(f"http://127.0.0.1:{daemon.address[1]}") as client:
        assert [message.value for message in client.read("orders_again")] == [b"precious"]
    page = (Path(__file__).parents[2] / "docs" / "backup.md").read_text("utf-8")
    assert "under its own or another name into the stopped" not in page

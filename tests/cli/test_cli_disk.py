"""Doctor and the disk: the meaning of a sync time and of a mount, and the one sentence that doctor prints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plainsong.cli import examination, machine
from plainsong.cli.ping import ProbeResult

GOOD = machine.SyncTimes(0.0015, 0.004)
MOUNTS = """\
/dev/sda1 / ext4 rw,relatime 0 0
tmpfs /run tmpfs rw,nosuid 0 0
/dev/sdb1 /srv/my\\040data xfs rw 0 0
server:/x /srv/far nfs4 rw 0 0
/dev/sdc1 /srv/far ext4 rw,barrier=0 0 0
"""


def mount(kind="ext4", options="rw"):
    return machine.Mount("/", "/dev/sda1", kind, tuple(options.split(",")))


def test_a_plausible_sync_on_a_plain_disk_is_believed():
    assert machine.judged(GOOD, mount(), rotating=False) == ("ok", "plausible for a real disk")


@pytest.mark.parametrize(
    ("times", "where", "rotating", "preload", "says"),
    [
        (machine.SyncTimes(0.000001, 0.00001), mount(), False, "", "no device syncs this fast"),
        (GOOD, mount("tmpfs"), False, "", "memory"),
        (GOOD, mount(options="rw,nobarrier"), False, "", "without barriers"),
        (GOOD, mount("overlay", "rw,volatile"), False, "", "volatile overlay"),
        (GOOD, mount(), False, "/usr/lib/libeatmydata.so", "eatmydata"),
    ],
)
def test_a_sync_that_cannot_be_true_is_not_believed(times, where, rotating, preload, says):
    trust, why = machine.judged(times, where, rotating=rotating, preload=preload)
    assert trust == "bad"
    assert says in why


def test_a_rotating_disk_with_impossibly_fast_syncs_is_suspicious():
    trust, why = machine.judged(machine.SyncTimes(0.0005, 0.001), mount(), rotating=True)
    assert trust == "warning"
    assert "a rotating disk" in why


def test_a_remote_file_system_is_believed_with_a_warning():
    assert machine.judged(GOOD, mount("nfs4"), rotating=None) == (
        "warning",
        "the file system is nfs4: the server decides whether a sync is real",
    )


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/etc", "ext4"), ("/run/x", "tmpfs"), ("/srv/my data/x", "xfs"), ("/srv/far", "ext4"), ("/srv/m", "ext4")],
)
def test_a_directory_lies_on_the_closest_and_latest_mount(path, kind):
    assert machine.mount_of(Path(path), MOUNTS).kind == kind


def test_measuring_leaves_no_files(tmp_path, monkeypatch):
    synced, sync = [], os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda handle: synced.append(sync(handle)))
    times = machine.measure_sync(tmp_path)
    assert 5 <= len(synced) <= machine.MAX_ROUNDS
    assert 0 < times.median_s <= times.p99_s
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_judged_by_its_parent(tmp_path):
    assert machine.nearest_directory(tmp_path / "a" / "b") == tmp_path


@pytest.mark.parametrize(
    ("store", "trust", "says"),
    [
        ("memory", "ok", "survives no restart"),
        ("hbase", None, "as durable as HBase's file system"),
        ("leveldb", "warning", "survives kill -9, a crash of the machine and a power cut"),
        ("leveldb", "bad", "is lost in a power cut"),
        ("leveldb", None, "to find out about power cuts"),
        ("", "ok", "and a power cut"),
    ],
)
def test_the_failures_that_a_message_survives_are_described_in_one_sentence(store, trust, says):
    sentence = machine.survives(store, trust, Path("/srv"))
    assert says in sentence
    assert sentence.count(". ") == 0


def test_a_daemon_that_is_not_ready_or_of_another_version_is_reported():
    found = ProbeResult("http://x", answers=True, seconds=[0.001], version="9.9.0", reasons=["the disk is full"])
    states = {finding.what: finding.state for finding in examination.look_at_daemon(found)}
    assert states == {"daemon": "ok", "version": "warning", "ready": "bad"}


def test_a_directory_that_cannot_be_written_to_is_bad(tmp_path, monkeypatch):
    def refuse(directory):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(machine, "measure_sync", refuse)
    findings, trust = machine.look_at_disk(tmp_path)
    assert trust is None
    assert findings[0].state == "bad"
    assert "Permission denied" in findings[0].says


def test_a_low_limit_of_open_files_is_reported(monkeypatch):
    limits = {machine.resource.RLIMIT_NOFILE: (256, 512), machine.resource.RLIMIT_FSIZE: (1000, 1000)}
    monkeypatch.setattr(machine.resource, "getrlimit", limits.__getitem__)
    assert [(finding.what, finding.state) for finding in machine.look_at_limits()] == [
        ("open files", "bad"),
        ("file size", "warning"),
    ]


def test_a_clock_in_the_past_is_bad(monkeypatch):
    monkeypatch.setattr(machine.time, "time", lambda: 0.0)
    (finding,) = machine.look_at_clock()
    assert (finding.state, finding.says) == ("bad", "the clock says 1970-01-01")


def test_a_message_from_the_future_reveals_a_clock_that_went_back(cli, running, monkeypatch):
    class Client:
        def topics(self):
            return ["orders"]

        @property
        def admin(self):
            return self

        def stats(self, topic):
            old, new = 1_700_000_000_000, 1_700_000_100_000
            shape = "{:016x}" + "0" * 24
            return {"oldestId": shape.format(old), "newestId": shape.format(new), "oldestAgeMs": 10_000}

    class There:
        def client(self):
            from contextlib import nullcontext

            return nullcontext(Client())

    findings = {finding.what: finding.says for finding in examination.look_at_times(There())}
    assert "90" in findings["clock history"] or "1m 30s" in findings["clock history"]
    assert "behind ours" in findings["clocks"]


def test_a_daemon_that_cannot_reach_an_instance_names_it_and_its_address():
    found = ProbeResult(
        "http://one", answers=True, ready=True, seconds=[0.001], version="0.2.0", unreached=["b at far:7420"]
    )
    (finding,) = [each for each in examination.look_at_daemon(found) if each.what == "instances"]
    assert finding.state == "warning"
    assert "http://one cannot reach the instance b at far:7420" in finding.says
    assert "cluster.advertise" in finding.hint

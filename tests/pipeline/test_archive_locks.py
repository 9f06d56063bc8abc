"""One writer at a time: locks on local disks, leases elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from plainsong.cli.command import Exit
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline import locks
from pyspark_plainsong.pipeline.files import LocalFiles
from pyspark_plainsong.pipeline.hadoop import HadoopFiles
from pyspark_plainsong.pipeline.locks import (
    RENEW_S,
    STALE_S,
    Busy,
    Lease,
    encode_lease,
    leased,
    locked,
    numbers,
    owner,
    take,
)
from tests.patience import PATIENCE_S

HOLDER = "import sys; from pathlib import Path; from pyspark_plainsong.pipeline.locks import locked\n"
HOLDER += "with locked(Path(sys.argv[1]), 'it'): print('held', flush=True); sys.stdin.read()"


class Disk(LocalFiles):
    """Local files with the operations that leases need, which ``LocalFiles`` lacks since local disks use locks."""

    def create(self, path, data):
        at = self._at(path)
        at.parent.mkdir(parents=True, exist_ok=True)
        try:
            with at.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def discard(self, path):
        self._at(path).unlink(missing_ok=True)

    def modified_ms(self, folder):
        at = self._at(folder)
        return max(each.stat().st_mtime_ns for each in (at, *at.iterdir())) // 1_000_000


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


@pytest.fixture(params=["local", "hadoop"])
def files(request, tmp_path):
    if request.param == "local":
        return LocalFiles(tmp_path / "root")
    return HadoopFiles((tmp_path / "root").as_uri(), request.getfixturevalue("spark"))


def test_a_lock_has_one_holder_and_names_it(files):
    with files.lock("a/_appending", "the archive", print) as hold:
        hold.check()
        with pytest.raises(Busy, match=rf"the archive is already being written, by process {os.getpid()} on") as raised:
            files.lock("a/_appending", "the archive", print).__enter__()
        assert raised.value.code == Exit.STORE
        with files.lock("b/_appending", "another", print):
            pass
    with files.lock("a/_appending", "the archive", print):
        pass


def test_a_lock_does_not_outlive_its_holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(Busy, match=f"process {process.pid} on"), locked(tmp_path / "lock", "it"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with locked(tmp_path / "lock", "it"):
        pass


def write_as_of(disk, ago_s, holder="somebody"):
    """Write the lease with the highest number as of ``ago_s`` seconds ago."""
    path = f"l/{max(numbers(disk, 'l'), default=1):012d}.lease"
    disk.write(path, json.dumps({"owner": holder, "renewedMs": locks.now_ms() - int(ago_s * 1000)}).encode())


def test_a_lease_is_taken_over_with_a_message_when_its_holder_was_silent_for_long(disk, monkeypatch):
    moment_ms = now_ms()
    monkeypatch.setattr(locks, "now_ms", lambda: moment_ms)  # otherwise delays of this machine would add to its age
    said = []
    write_as_of(disk, STALE_S - 5)
    with pytest.raises(Busy, match="by somebody"):
        take(disk, "l", "it", say=said.append)
    assert said == []
    write_as_of(disk, STALE_S + 5)
    take(disk, "l", "it", say=said.append).check()
    assert said == [f"it: taken over from somebody, which showed no sign of life for {STALE_S + 5:.0f} s"]
    assert numbers(disk, "l") == [2]


def test_a_holder_that_wakes_after_its_lease_was_taken_finishes_nothing(disk):
    asleep = take(disk, "l", "it")
    write_as_of(disk, STALE_S + 5)
    awake = take(disk, "l", "it")
    for step in (asleep.check, asleep.renew):
        with pytest.raises(Busy, match=f"by process {os.getpid()}"):
            step()
    asleep.give_back()
    awake.check()
    with pytest.raises(Busy):
        take(disk, "l", "it")
    awake.give_back()
    take(disk, "l", "it").check()


def test_of_two_processes_that_find_the_same_stale_lease_one_takes_it(disk, monkeypatch):
    write_as_of(disk, STALE_S + 5)
    real, others = disk.create, []

    def create(path, data):  # the other process takes it just before this one
        monkeypatch.setattr(disk, "create", real)
        others.append(take(disk, "l", "it"))
        return real(path, data)

    monkeypatch.setattr(disk, "create", create)
    with pytest.raises(Busy):
        take(disk, "l", "it")
    others[0].check()


def test_a_process_with_an_old_check_gives_way_to_later_ones(disk, monkeypatch):
    real, others = disk.create, []

    def create(path, data):  # before that, a second process takes and releases it, and a third removes its file
        monkeypatch.setattr(disk, "create", real)
        take(disk, "l", "it").give_back()
        others.append(take(disk, "l", "it"))
        return real(path, data)

    monkeypatch.setattr(disk, "create", create)
    with pytest.raises(Busy):
        take(disk, "l", "it")
    others[0].check()
    assert numbers(disk, "l") == [2]


def test_a_lease_that_could_not_be_renewed_is_not_relied_on(disk):
    now = [0.0]
    disk.create("l/000000000001.lease", encode_lease(owner()))
    lease = Lease(disk, "l", "it", 1, clock=lambda: now[0])
    now[0] = STALE_S / 2 - RENEW_S
    lease.check()
    now[0] = STALE_S / 2 + 1
    with pytest.raises(Busy, match="not renewed"):
        lease.check()
    lease.renew()
    lease.check()


def test_a_lease_whose_maker_died_before_it_was_written_becomes_stale_too(disk, tmp_path):
    disk.create("l/000000000001.lease", b"")
    with pytest.raises(Busy):
        take(disk, "l", "it")
    for path in (tmp_path / "l" / "000000000001.lease", tmp_path / "l"):
        os.utime(path, (0, 0))
    take(disk, "l", "it").check()


def test_a_lease_is_renewed_while_it_is_held_and_released_at_the_end(disk, monkeypatch):
    monkeypatch.setattr(locks, "RENEW_S", 0.001)
    from threading import Event

    renewed, real = Event(), Lease.renew

    def renew(lease):
        real(lease)
        renewed.set()

    monkeypatch.setattr(Lease, "renew", renew)
    with leased(disk, "l", "it"):
        assert renewed.wait(PATIENCE_S)
    with leased(disk, "l", "it"):
        pass

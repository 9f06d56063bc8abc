"""Space is freed a little at a time: of volumes that go (test_volumes.py), and of logs that LevelDB has removed."""

from __future__ import annotations

import os
import threading

import pytest

from storage.leveldb import LevelDBOptions, shrinking
from storage.leveldb.database import Database
from storage.leveldb.shrinking import LOOKS, MAX_HELD, STEP_BYTES, OldLogs
from tests.storage.old_logs import old_logs_freed


@pytest.fixture
def cut(monkeypatch):
    """What files were cut to, and whether they had a name then."""
    found = []
    truncate = os.ftruncate

    def noted(descriptor, size):
        about = os.fstat(descriptor)
        if size < about.st_size:
            found.append((size, about.st_nlink > 0))
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", noted)
    return found


@pytest.fixture
def logs():
    made = OldLogs()
    yield made
    old_logs_freed()


def opened(path, size=5 * STEP_BYTES // 2):
    path.write_bytes(bytes(size))
    return os.open(path, os.O_RDWR)


def is_open(descriptor):
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_a_log_that_has_been_removed_gets_shorter_in_steps_and_is_closed(tmp_path, logs, cut):
    descriptor = opened(tmp_path / "000003.log")
    (tmp_path / "000003.log").unlink()
    logs.take(descriptor)
    old_logs_freed()
    assert cut == [(3 * STEP_BYTES // 2, False), (STEP_BYTES // 2, False)]
    assert not is_open(descriptor)


def test_a_log_stays_as_it_is_until_it_is_removed(tmp_path, logs, cut, monkeypatch):
    file = tmp_path / "000003.log"
    looks = []

    def nap(seconds):
        looks.append((len(cut), file.exists() and file.stat().st_size))
        if len(looks) == 3:
            file.unlink()

    monkeypatch.setattr(shrinking, "nap", nap)
    logs.take(opened(file))
    old_logs_freed()
    assert looks[:3] == [(0, 5 * STEP_BYTES // 2)] * 3
    assert [size for size, _ in cut] == [3 * STEP_BYTES // 2, STEP_BYTES // 2]


def test_a_log_that_nobody_removes_is_closed_in_the_end_and_keeps_its_length(tmp_path, logs, cut, monkeypatch):
    monkeypatch.setattr(shrinking, "nap", lambda seconds: None)
    descriptor = opened(tmp_path / "000003.log")
    logs.take(descriptor)
    old_logs_freed()
    assert cut == []
    assert not is_open(descriptor)
    assert (tmp_path / "000003.log").stat().st_size == 5 * STEP_BYTES // 2


def test_one_that_a_copy_shares_keeps_its_length(tmp_path, logs, cut, monkeypatch):
    monkeypatch.setattr(shrinking, "nap", lambda seconds: None)
    file, copy = tmp_path / "000003.log", tmp_path / "copy.log"
    descriptor = opened(file)
    copy.hardlink_to(file)
    file.unlink()
    logs.take(descriptor)
    old_logs_freed()
    assert cut == []
    assert copy.stat().st_size == 5 * STEP_BYTES // 2


def test_one_that_is_not_removed_does_not_hold_up_those_that_are(tmp_path, logs, cut, monkeypatch):
    stays, goes = opened(tmp_path / "000003.log"), opened(tmp_path / "000004.log")
    (tmp_path / "000004.log").unlink()
    order = []
    close = os.close
    monkeypatch.setattr(shrinking, "nap", lambda seconds: None)
    monkeypatch.setattr(os, "close", lambda descriptor: (order.append(descriptor), close(descriptor)))
    logs._held[stays] = LOOKS
    logs.take(goes)
    old_logs_freed()
    assert order == [goes, stays]
    assert len(cut) == 2


def test_no_more_than_a_few_are_held_open_and_the_oldest_goes_at_once(tmp_path, logs, monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(shrinking, "nap", lambda seconds: go_on.wait())
    descriptors = [opened(tmp_path / f"00000{number}.log", 10) for number in range(MAX_HELD + 2)]
    for descriptor in descriptors:
        logs.take(descriptor)
    assert [is_open(each) for each in descriptors] == [False, False] + [True] * MAX_HELD
    go_on.set()
    old_logs_freed()
    assert not any(map(is_open, descriptors))


def test_without_another_thread_they_wait_for_the_next_one(tmp_path, logs, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    files = [tmp_path / f"00000{number}.log" for number in range(2)]
    descriptors = [opened(file) for file in files]
    for file in files:
        file.unlink()
    with monkeypatch.context() as only_now:
        only_now.setattr(threading.Thread, "start", refuse)
        logs.take(descriptors[0])
    assert is_open(descriptors[0])
    logs.take(descriptors[1])
    old_logs_freed()
    assert not any(map(is_open, descriptors))


def test_a_log_that_cannot_be_cut_is_closed_all_the_same(tmp_path, logs, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "ftruncate", refuse)
    descriptor = opened(tmp_path / "000003.log")
    (tmp_path / "000003.log").unlink()
    logs.take(descriptor)
    old_logs_freed()
    assert not is_open(descriptor)


@pytest.mark.parametrize("early", [True, False], ids=["synced beside", "synced at once"])
def test_logs_of_a_database_get_shorter_once_leveldb_has_removed_them_and_never_before(tmp_path, cut, early):
    shape = LevelDBOptions(write_buffer_bytes=4 * STEP_BYTES).volume_shape(compressed=False)
    database = Database(tmp_path / "data", shape, create=True)
    value = os.urandom(8000)
    for number in range(600):
        beside = early and database.syncs_early
        with database.batch(sync=not beside) as batch:
            batch.put(b"\2%06d" % number, value)
            database.make_room(batch.approximate_size())
        if beside:
            database.sync_beside(lambda: None)
    old_logs_freed()
    assert len(cut) >= 6
    assert not any(has_name for _, has_name in cut)
    database.close()
    again = Database(tmp_path / "data", shape, create=False)
    assert again.own_rows(b"\2", b"\3") == [(b"\2%06d" % number, value) for number in range(600)]
    again.close()


def test_a_log_gets_shorter_once_what_is_in_memory_was_put_into_a_table(tmp_path, cut):
    """As of a volume that is sealed, or that takes the place of others: its log is as long as the buffer."""
    shape = LevelDBOptions(write_buffer_bytes=8 * STEP_BYTES).volume_shape(compressed=False)
    database = Database(tmp_path / "data", shape, create=True)
    with database.batch(sync=True) as batch:
        for number in range(100):
            batch.put(b"\2%06d" % number, os.urandom(8000))
    database.flush_memory()
    old_logs_freed()
    assert [has_name for _, has_name in cut] == [False] * 3
    assert len(database.own_rows(b"\2", b"\3")) == 100
    database.close()

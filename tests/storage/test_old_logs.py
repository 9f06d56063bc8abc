"""Space is freed gradually: of removed volumes (test_volumes.py), and of logs that LevelDB has removed."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from storage.leveldb import LevelDBOptions, threads
from storage.leveldb.engine import newest_log
from storage.leveldb.engine.database import Database
from storage.leveldb.engine.old_logs import LOOKS, MAX_HELD, STEP_BYTES, OldLogs
from tests.storage.old_logs import removed_logs_freed, until

SIZE = 5 * STEP_BYTES // 2


@pytest.fixture
def cut(monkeypatch, tmp_path):
    """Record the sizes to which this test's files are truncated, and True for each that had a name at the time."""
    found = []
    truncate = os.ftruncate

    def noted(descriptor, size):
        about = os.fstat(descriptor)
        if size < about.st_size and os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path)):
            found.append((size, about.st_nlink > 0))
        truncate(descriptor, size)

    monkeypatch.setattr(os, "ftruncate", noted)
    return found


def no_nap(seconds):
    pass


def opened(path, size=SIZE):
    path.write_bytes(bytes(size))
    return os.open(path, os.O_RDWR)


def taken(*descriptors, nap=no_nap, meanwhile=lambda: None):
    """Make ``OldLogs`` that has taken these descriptors."""
    logs = OldLogs(nap, meanwhile)
    for descriptor in descriptors:
        logs.take(descriptor)
    return logs


def freed(logs):
    until(lambda: not logs.count)


def is_open(path):
    """True if this process has the file open, even if the file has lost its name."""
    for each in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{each}").removesuffix(" (deleted)") == str(path):
                return True
        except FileNotFoundError:
            pass
    return False


def test_a_log_that_has_been_removed_gets_shorter_in_steps_and_is_closed(tmp_path, cut):
    file = tmp_path / "000003.log"
    descriptor = opened(file)
    file.unlink()
    freed(taken(descriptor))
    assert cut == [(3 * STEP_BYTES // 2, False), (STEP_BYTES // 2, False)]
    assert not is_open(file)


def test_the_thread_ends_with_the_last_log_and_another_one_has_the_next(tmp_path):
    logs = OldLogs(no_nap, lambda: None)
    for number in (3, 4):
        file = tmp_path / f"00000{number}.log"
        descriptor = opened(file)
        file.unlink()
        logs.take(descriptor)
        until(lambda: not [each for each in threading.enumerate() if each.name == "old logs"])
        assert not is_open(file)


def test_a_log_keeps_its_length_until_it_is_removed(tmp_path, cut):
    file = tmp_path / "000003.log"
    looks = []

    def meanwhile():
        looks.append((len(cut), file.stat().st_size))
        if len(looks) == 3:
            file.unlink()

    freed(taken(opened(file), meanwhile=meanwhile))
    assert looks == [(0, SIZE)] * 3
    assert [size for size, _ in cut] == [3 * STEP_BYTES // 2, STEP_BYTES // 2]


def test_a_log_that_is_never_removed_is_closed_in_the_end_and_keeps_its_length(tmp_path, cut):
    file = tmp_path / "000003.log"
    naps = []
    freed(taken(opened(file), nap=naps.append))
    assert len(naps) == LOOKS - 1
    assert cut == []
    assert not is_open(file)
    assert file.stat().st_size == SIZE


def test_one_that_a_copy_shares_keeps_its_length(tmp_path, cut):
    file, copy = tmp_path / "000003.log", tmp_path / "copy.log"
    descriptor = opened(file)
    copy.hardlink_to(file)
    file.unlink()
    freed(taken(descriptor))
    assert cut == []
    assert copy.stat().st_size == SIZE


def test_one_that_is_not_removed_does_not_hold_up_those_that_are(tmp_path, cut):
    stays, goes = tmp_path / "000003.log", tmp_path / "000004.log"
    descriptors = [opened(stays), opened(goes)]
    goes.unlink()
    open_at = []
    freed(taken(*descriptors, meanwhile=lambda: open_at.append((is_open(stays), is_open(goes)))))
    assert open_at[-1] == (True, False)
    assert len(cut) == 2


def test_no_more_than_a_few_are_held_open_and_further_ones_are_closed_at_once(tmp_path):
    go_on = threading.Event()
    files = [tmp_path / f"00000{number}.log" for number in range(MAX_HELD + 2)]
    logs = taken(*(opened(file, 10) for file in files), meanwhile=go_on.wait)
    assert logs.count == MAX_HELD
    assert [is_open(file) for file in files] == [True] * MAX_HELD + [False] * 2
    go_on.set()
    freed(logs)
    assert not any(map(is_open, files))


def test_a_file_that_is_held_already_is_not_held_twice(tmp_path):
    go_on = threading.Event()
    file = tmp_path / "000003.log"
    descriptor = opened(file)
    logs = taken(descriptor, os.open(file, os.O_RDWR), meanwhile=go_on.wait)
    assert logs.count == 1
    go_on.set()
    freed(logs)
    assert not is_open(file)


def test_where_the_process_may_have_no_more_threads_logs_are_closed_at_once(tmp_path, monkeypatch):
    def refuse(name, run):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "spawn", refuse)
    file = tmp_path / "000003.log"
    logs = taken(opened(file))
    assert not logs.count
    assert not is_open(file)


@pytest.mark.parametrize("call", ["ftruncate", "fstat", "close"])
def test_an_error_of_the_file_system_ends_neither_the_commit_nor_the_thread(tmp_path, monkeypatch, call):
    """An error such as ESTALE, for a file that a server has removed."""
    files = [tmp_path / f"00000{number}.log" for number in range(3)]
    descriptors = [opened(file) for file in files]
    for file in files:
        file.unlink()
    real, bad = getattr(os, call), set(descriptors[:2])

    def fails(descriptor, *more):
        found = real(descriptor, *more) if call == "close" or descriptor not in bad else None
        if descriptor in bad:
            bad.discard(descriptor)
            raise OSError
        return found

    monkeypatch.setattr(os, call, fails)
    logs = taken(*descriptors)
    freed(logs)
    until(lambda: not any(map(is_open, files)))


def test_where_names_are_not_counted_no_log_is_held_or_cut(tmp_path, monkeypatch, cut):
    """Some file systems report a link count of 0 for every file."""
    stat = os.fstat

    def uncounted(descriptor):
        about = stat(descriptor)
        return SimpleNamespace(st_dev=about.st_dev, st_ino=about.st_ino, st_size=about.st_size, st_nlink=0)

    monkeypatch.setattr(os, "fstat", uncounted)
    taken_logs = []
    monkeypatch.setattr(newest_log, "old_logs", SimpleNamespace(take=taken_logs.append))
    with_rows(tmp_path, early=True).flush_memory()
    assert taken_logs == []
    assert cut == []


def database_shape():
    return LevelDBOptions(write_buffer_bytes=4 * STEP_BYTES).volume_shape()


def with_rows(tmp_path, *, early, rows=600):
    """Make a database whose buffer was filled several times."""
    database = Database(tmp_path / "data", database_shape(), create=True)
    value = b"v" * 8000
    for number in range(rows):
        beside = early and database.syncs_early
        with database.batch(sync=not beside) as batch:
            batch.put(b"\2%06d" % number, value)
            database.make_room(batch.approximate_size())
        if beside:
            database.sync_while(lambda: None)
    return database


@pytest.mark.parametrize("early", [True, False], ids=["synced beside", "synced at once"])
def test_logs_of_a_database_get_shorter_once_leveldb_has_removed_them_and_never_before(tmp_path, cut, early):
    database = with_rows(tmp_path, early=early)
    removed_logs_freed(tmp_path)
    assert len(cut) >= 6
    assert not any(has_name for _, has_name in cut)
    database.close()
    again = Database(tmp_path / "data", database_shape(), create=False)
    assert [key for key, _ in again.own_rows(b"\2", b"\3")] == [b"\2%06d" % number for number in range(600)]
    again.close()


def test_a_log_gets_shorter_once_the_rows_in_memory_are_in_a_table(tmp_path, cut):
    """This happens when a volume is sealed, or replaces others: its log is as long as the buffer."""
    database = with_rows(tmp_path, early=False, rows=100)
    cut.clear()
    database.flush_memory()
    removed_logs_freed(tmp_path)
    until(lambda: len(cut) >= 3)
    assert not any(has_name for _, has_name in cut)
    assert len(database.own_rows(b"\2", b"\3")) == 100
    database.close()

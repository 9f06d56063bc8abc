"""LevelDB's own thread runs with a lower priority than the others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from storage.leveldb.engine.background import LOOKS, NICER_BY, BackgroundThread

WRITER = """
import os, sys, threading, time
from pathlib import Path
from storage.leveldb import LevelDBOptions
from storage.leveldb.engine.database import Database

database = Database(Path(sys.argv[1]), LevelDBOptions().volume_shape(), create=True)


def niceness():
    own = {str(each.native_id) for each in threading.enumerate()}
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            found.append((task in own, os.getpriority(os.PRIO_PROCESS, int(task))))
        except ProcessLookupError:
            pass
    return sorted(found)


ends_s = time.monotonic() + 60
while all(nice == os.getpriority(os.PRIO_PROCESS, 0) for _, nice in niceness()) and time.monotonic() < ends_s:
    for number in range(1000):
        with database.batch(sync=False) as batch:
            batch.put(os.urandom(8), bytes(8000))
    database.flush_memory()
print(niceness())
"""


def test_leveldbs_thread_gives_way_to_all_others_of_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "data")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    here = os.getpriority(os.PRIO_PROCESS, 0)
    # The writing thread, and possibly the one that waits for old logs.
    assert done.stdout.strip() in [str([(False, here + NICER_BY), *[(True, here)] * count]) for count in (1, 2)]


def told(*of_others):
    """Return a function that lists thread ids as the kernel would at each call: Python's own threads, and these."""
    looks = iter(of_others)
    return lambda: {each.native_id for each in threading.enumerate()} | set(next(looks))


def test_a_thread_that_comes_and_goes_is_left_alone():
    lowered = []
    looks = [[], *[[71]] * (LOOKS - 1), [72], [71], *[[72]] * (LOOKS - 1), [72], [72]]
    thread = BackgroundThread(told(*looks), lowered.append)
    for _ in looks[:-2]:
        thread.look()
    assert lowered == []
    thread.look()
    assert lowered == [72]
    thread.look()  # it is known by now, so it is not searched for again
    assert lowered == [72]


def test_as_long_as_there_are_several_none_is_chosen():
    lowered = []
    thread = BackgroundThread(told(*[[71, 72]] * (2 * LOOKS), [72]), lowered.append)
    for _ in range(2 * LOOKS):
        thread.look()
    assert lowered == []
    thread.look()
    assert lowered == [72]


def refuse(*_):
    raise PermissionError


@pytest.mark.parametrize("how", [(refuse, None), (told(*[[71]] * LOOKS), refuse)], ids=["to tell", "to change"])
def test_where_the_system_refuses_it_stays_as_it_is(how):
    thread = BackgroundThread(*how)
    for _ in range(2 * LOOKS):
        thread.look()

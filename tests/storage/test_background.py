"""LevelDB's own thread gives way: its priority is lower than that of the others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from storage.leveldb.background import NICER_BY, BackgroundThread

WRITER = """
import os, sys, threading
from pathlib import Path
from storage.leveldb import LevelDBOptions
from storage.leveldb.database import Database

database = Database(Path(sys.argv[1]), LevelDBOptions(write_buffer_bytes=1 << 20).volume_shape(compressed=False), create=True)
begun = set(os.listdir("/proc/self/task"))
value = os.urandom(8000)
stays = threading.Event()
beside = threading.Thread(target=stays.wait)
beside.start()


def niceness():
    own = {str(each.native_id) for each in threading.enumerate()}
    tasks = os.listdir("/proc/self/task")
    return sorted((task in own, os.getpriority(os.PRIO_PROCESS, int(task))) for task in tasks)


for number in range(100_000):
    with database.batch(sync=True) as batch:
        batch.put(b"\\2%06d" % number, value)
        database.make_room(batch.approximate_size())
    if number > 500 and not number % 100 and any(nice for _, nice in niceness()):
        break
for thread in threading.enumerate():
    if thread.name == "old logs":
        thread.join()
print(niceness())
stays.set()
"""


def test_leveldbs_thread_gives_way_to_all_others_of_the_process(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "data")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert done.stdout.strip() == str([(False, here + NICER_BY), (True, here), (True, here)])


def told(*of_others):
    """What the kernel says, one look after the other: Python's own threads, and these."""
    looks = iter(of_others)
    return lambda: {each.native_id for each in threading.enumerate()} | set(next(looks))


def test_a_thread_that_is_not_there_twice_is_left_alone():
    lowered = []
    thread = BackgroundThread(told([], [71], [72], [73, 72], [72]), lowered.append)
    for _ in range(3):
        thread.look()
    assert lowered == []
    thread.look()
    assert lowered == [72]
    thread.look()  # found: it is not looked for again
    assert lowered == [72]


def test_of_several_none_is_chosen():
    lowered = []
    thread = BackgroundThread(told([71, 72], [71, 72], [71]), lowered.append)
    for _ in range(3):
        thread.look()
    assert lowered == []


def refuse(*_):
    raise PermissionError


@pytest.mark.parametrize("how", [(refuse, None), (told([71], [71]), refuse)], ids=["to tell", "to change"])
def test_where_the_system_refuses_it_stays_as_it_is(how):
    thread = BackgroundThread(*how)
    for _ in range(3):
        thread.look()

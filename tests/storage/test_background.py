"""LevelDB's own thread runs at a lower priority than the others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from storage.leveldb.engine.background import LOOKS, NICER_BY, BackgroundThread

OPENER = """
import os, sys, threading
from pathlib import Path
import trio
from storage.leveldb import LevelDBStore


async def main():
    async with await LevelDBStore.open(Path(sys.argv[1])):
        own = {str(each.native_id) for each in threading.enumerate()}
        found = {task: os.getpriority(os.PRIO_PROCESS, int(task)) for task in os.listdir("/proc/self/task")}
        print(sorted({nice for task, nice in found.items() if task in own}))
        print([nice for task, nice in found.items() if task not in own])


trio.run(main)
"""


def test_the_thread_of_leveldb_yields_to_all_others_of_a_process_that_has_opened_a_store(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OPENER, str(tmp_path / "data")], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    here = os.getpriority(os.PRIO_PROCESS, 0)
    assert done.stdout == f"[{here}]\n[{min(here + NICER_BY, 19)}]\n"


def told(*of_others):
    """Return a fake of the kernel's list of thread ids: at each call Python's threads and the next of ``of_others``."""
    looks = iter(of_others)
    return lambda: {each.native_id for each in threading.enumerate()} | set(next(looks))


def nothing():
    pass


def test_a_short_lived_thread_is_left_alone():
    lowered = []
    looks = [*[[71]] * (LOOKS - 1), [72], *[[72]] * (LOOKS - 1), [], *[[71, 72], [72]] * LOOKS]
    thread = BackgroundThread(told(*looks), lowered.append)
    thread.find(nothing)
    thread.find(nothing)
    assert lowered == []
    thread.find(nothing)
    assert lowered == [72]
    thread.find(nothing)  # the thread was found before, so it is not searched for again
    assert lowered == [72]


def test_no_thread_is_chosen_while_there_are_several():
    lowered = []
    thread = BackgroundThread(told(*[[71, 72]] * (2 * LOOKS), *[[72]] * LOOKS), lowered.append)
    thread.find(nothing)
    thread.find(nothing)
    assert lowered == []
    thread.find(nothing)
    assert lowered == [72]


def refuse(*_):
    raise PermissionError


@pytest.mark.parametrize("how", [(refuse, None), (told(*[[71]] * LOOKS), refuse)], ids=["to tell", "to change"])
def test_the_priority_stays_if_the_system_refuses_a_change(how):
    thread = BackgroundThread(*how)
    thread.find(nothing)
    thread.find(nothing)

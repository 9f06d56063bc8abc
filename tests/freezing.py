"""Freezes processes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.patience import PATIENCE_S

#: States of a thread (proc(5)) that is not running: stopped, or ended.
_STILL = "TtZXx"


def freeze(pid: int) -> None:
    """Stop the process with SIGSTOP, and return once all its threads have stopped.

    ``kill`` returns earlier: on a busy machine a thread on another core, or one that a request is just waking, runs for
    another moment, and may answer.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(state in _STILL for state in _states(pid)):
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"
        time.sleep(0.001)


def thaw(pid: int) -> None:
    """Make the process continue."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    """Return the state of each thread; empty if the process is gone."""
    states = []
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(each.read_text().rpartition(")")[2].split()[0])
    return states

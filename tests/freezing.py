"""Freezes processes."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.patience import PATIENCE_S

#: States of a thread (proc(5)) that executes nothing: stopped, and what is left of one that has ended.
_STILL = "TtZXx"


def freeze(pid: int) -> None:
    """Stop the process with SIGSTOP, and return once each of its threads stands still.

    ``kill`` returns before: on a busy machine a thread on another core, or one that is just being woken by a request,
    goes on for a moment, and may answer.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(state in _STILL for state in _states(pid)):
        assert time.monotonic() < deadline_s, f"process {pid} does not stop"
        time.sleep(0.001)


def thaw(pid: int) -> None:
    """Let it go on."""
    os.kill(pid, signal.SIGCONT)


def _states(pid: int) -> list[str]:
    """Of each thread; no thread of a process that is gone."""
    states = []
    for each in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(each.read_text().rpartition(")")[2].split()[0])
    return states

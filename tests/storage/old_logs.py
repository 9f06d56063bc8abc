"""Waits for the thread that frees the space of logs which LevelDB has removed."""

from __future__ import annotations

import threading


def old_logs_freed() -> None:
    """Return once no removed log is held open any more."""
    for thread in threading.enumerate():
        if thread.name == "old logs":
            thread.join()

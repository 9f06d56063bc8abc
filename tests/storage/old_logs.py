"""Observing logs that LevelDB has removed and that are held open until their space is freed."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def until(holds: Callable[[], object]) -> None:
    """Wait until this holds; another thread makes it true."""
    ends_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < ends_s
        time.sleep(0.001)


def held_open(directory: Path) -> list[str]:
    """Return the removed files of a directory that this process holds open."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{each}"))
    return [path for path in found if path.startswith(str(directory)) and path.endswith("(deleted)")]


def removed_logs_freed(directory: Path) -> None:
    """Wait until no removed file of a directory is held open."""
    until(lambda: not held_open(directory))

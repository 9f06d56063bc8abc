"""Thread primitives of the store: all locks, queues and threads of ``storage.leveldb`` are made here.

Tests replace these names to decide which thread runs next (``tests/schedules``). So modules write ``threads.Lock()``
and do not import the name.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Condition", "Empty", "Lock", "Queue", "Thread", "native_ids", "spawn"]

Lock = threading.Lock
Condition = threading.Condition
Queue = SimpleQueue
Thread = threading.Thread


def spawn(name: str, run: Callable[[], None]) -> Thread:
    """Start a daemon thread, so that a store that was never closed does not delay the exit.

    Raises RuntimeError: the process may have no more threads.
    """
    thread = Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def native_ids() -> set[int | None]:
    """Return the kernel's ids of all threads that Python has started."""
    return {each.native_id for each in threading.enumerate()}

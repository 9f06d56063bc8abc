"""Starts LevelDB's own thread, which writes tables, and gives it a lower priority than threads that requests wait for.

LevelDB has one such thread for all databases of a process, from its first table on. On two busy cores it occupied one
of them while it wrote a table of 32 MiB, and publishes waited. Adding 5 to its niceness halved their p99.9. 10 gained
no more, and next to programs that use all cores it would leave the thread a tenth of a core instead of a quarter.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from storage.leveldb import threads
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
NICER_BY = 5
#: A thread counts as LevelDB's if it is the only unknown one in this number of consecutive checks; and the pause
#: between checks. One check is not enough, because Python does not list its own threads while they start or end.
LOOKS = 4
_LOOK_EVERY_S = 0.002
#: A thread that has been joined ends within this time.
MAX_END_S = 1.0


def _threads() -> set[int]:
    """Return the threads of this process. Raises OSError."""
    return set(map(int, os.listdir("/proc/self/task")))


def _lower_priority(thread: int) -> None:
    """Raises OSError."""
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER_BY)


def _wait_for_end(thread: int | None) -> None:
    """Wait until the kernel no longer lists a thread, which is a moment after it was joined."""
    until_s = time.monotonic() + MAX_END_S
    while os.path.exists(f"/proc/self/task/{thread}") and time.monotonic() < until_s:
        nap(_LOOK_EVERY_S / 10)


class BackgroundThread:
    """Finds LevelDB's thread, which is the one that Python has not started."""

    def __init__(
        self,
        threads: Callable[[], set[int]] = _threads,
        lower_priority: Callable[[int], None] = _lower_priority,
    ) -> None:
        self._threads = threads
        self._lower_priority = lower_priority
        self._is_over = False

    def find(self, start: Callable[[], object]) -> None:
        """Lower the priority, unless that has been done. If the thread cannot be identified, it keeps its priority.

        Args:
          start: makes LevelDB write a table, and so start its thread. Its errors are raised.
        Raises:
          RuntimeError: the process may not start more threads, in which case LevelDB would abort it.
        """
        if self._is_over:
            return
        # A plain thread instead of one from ``storage.leveldb.threads``: it shares no state, so no schedule includes
        # it.
        probe = threading.Thread(target=lambda: None, name="thread of LevelDB")
        probe.start()
        probe.join()
        _wait_for_end(probe.native_id)
        start()
        try:
            unknown = self._unknown()
            for _ in range(LOOKS - 1):
                nap(_LOOK_EVERY_S)
                unknown &= self._unknown()
            if len(unknown) == 1:
                self._is_over = True
                self._lower_priority(*unknown)
        except OSError as error:
            self._is_over = True
            log.debug("LevelDB's thread does not yield", extra={"why": str(error)})

    def _unknown(self) -> set[int]:
        return self._threads() - threads.native_ids()


#: The instance of this process.
background_thread = BackgroundThread()

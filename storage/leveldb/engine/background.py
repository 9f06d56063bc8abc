"""Lowers the priority of LevelDB's own thread, which writes tables, below that of the threads that requests wait for.

LevelDB has one such thread for all databases of a process, from its first table on. On two busy cores it took one of them
for as long as it wrote a table of 32 MiB, and publishes waited. With 5 added to its niceness the p99.9 of 20 000 publishes
a second over 32 connections (half of the most) was 4.7 ms instead of 9.6, of 29 000 15 ms instead of 29, medians of seven
turns. 10 was no better, and next to programs that take all cores the thread would get a tenth of one instead of a quarter.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from storage.leveldb import threads

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
NICER_BY = 5
#: A thread is LevelDB's if it is the only unknown one at this many looks in a row.
LOOKS = 4


def _threads() -> set[int]:
    """The threads of this process. Raises OSError."""
    return set(map(int, os.listdir("/proc/self/task")))


def _lower_priority(thread: int) -> None:
    """Raises OSError."""
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER_BY)


class BackgroundThread:
    """Finds LevelDB's thread, the one that Python has not started, and lowers its priority."""

    def __init__(
        self,
        threads: Callable[[], set[int]] = _threads,
        lower_priority: Callable[[int], None] = _lower_priority,
    ) -> None:
        self._threads = threads
        self._lower_priority = lower_priority
        #: Threads that Python does not know, and at how many looks in a row each was there.
        self._seen: dict[int, int] = {}
        self._is_over = False

    def look(self) -> None:
        """Look once; called some milliseconds apart while a table is being written. Never raises.

        One look is not enough: Python does not know its own threads either while they begin or end.
        """
        if self._is_over:
            return
        try:
            unknown = self._threads() - threads.native_ids()
            self._seen = {thread: self._seen.get(thread, 0) + 1 for thread in unknown}
            if len(unknown) == 1 and min(self._seen.values()) >= LOOKS:
                self._is_over = True
                self._lower_priority(*unknown)
        except OSError as error:
            self._is_over = True
            log.debug("LevelDB's thread does not give way", extra={"why": str(error)})


#: That of this process.
background_thread = BackgroundThread()

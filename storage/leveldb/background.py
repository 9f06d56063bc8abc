"""LevelDB's own thread, which writes its tables: it gives way to the threads whose work somebody waits for.

LevelDB has one such thread for all databases of a process, from when it first writes a table on. On two cores, which the
daemon and those who ask it keep busy, that thread took one of them for as long as it wrote a table of 32 MiB, and what
was published meanwhile came to wait. Niced by 5 beside none, 32 connections, 20 000 and 29 000 publishes a second (half
and three quarters of the most): p99.9 4.7 ms beside 9.6, and 15 beside 29, medians of seven turns. By 10 it was no better
than by 5, and beside programs that take all there is the thread would get a tenth of a core instead of a quarter.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)
NICER_BY = 5
#: A thread is LevelDB's if it is the only unknown one, so often one look after the other.
LOOKS = 4


def _threads() -> set[int]:
    """The threads of this process. Raises OSError."""
    return set(map(int, os.listdir("/proc/self/task")))


def _lower_priority(thread: int) -> None:
    """Raises OSError."""
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER_BY)


class BackgroundThread:
    """Looks for LevelDB's thread, and lowers its priority: the one that Python has not begun."""

    def __init__(
        self,
        threads: Callable[[], set[int]] = _threads,
        lower_priority: Callable[[int], None] = _lower_priority,
    ) -> None:
        self._threads = threads
        self._lower_priority = lower_priority
        #: Threads that Python does not know, and how often each was there, one look after the other.
        self._seen: dict[int, int] = {}
        self._is_over = False

    def look(self) -> None:
        """Call this again and again, some milliseconds apart, while a table is being written. Never raises.

        A thread of Python's own that just begins or ends is not known to Python, either: so one look is not enough.
        """
        if self._is_over:
            return
        try:
            unknown = self._threads() - {each.native_id for each in threading.enumerate()}
            self._seen = {thread: self._seen.get(thread, 0) + 1 for thread in unknown}
            if len(unknown) == 1 and min(self._seen.values()) >= LOOKS:
                self._is_over = True
                self._lower_priority(*unknown)
        except OSError as error:
            self._is_over = True
            log.debug("LevelDB's thread does not give way", extra={"why": str(error)})


#: That of this process.
background_thread = BackgroundThread()

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
        #: Threads that Python did not know when they were last looked for; None: not looked yet.
        self._unknown: set[int] | None = None
        self._is_over = False

    def look(self) -> None:
        """Call this again and again, some milliseconds apart, after a table had to be written. Never raises.

        Only what is there twice counts: a thread of Python's own that just begins or ends is not known to Python, either.
        """
        if self._is_over:
            return
        try:
            unknown = self._threads() - {each.native_id for each in threading.enumerate()}
            before, self._unknown = self._unknown, unknown
            found = unknown & before if before else set()
            if not found:
                return
            self._is_over = True
            if len(found) > 1:
                log.debug("several threads may be LevelDB's: none gives way", extra={"threads": sorted(found)})
                return
            (thread,) = found
            self._lower_priority(thread)
        except OSError as error:
            self._is_over = True
            log.debug("LevelDB's thread does not give way", extra={"why": str(error)})


#: That of this process.
background_thread = BackgroundThread()

"""Lowers the priority of LevelDB's own thread, which writes tables, below that of the threads that requests wait for.

LevelDB has one such thread for all databases of a process, from its first table on. On two busy cores it took one of
them while it wrote a table of 32 MiB, and publishes waited. Adding 5 to its niceness halved their p99.9 (9.6 to 4.7
ms). 10 gained no more, and next to programs that use all cores the thread would get a tenth of a core instead of a
quarter.
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
#: Number of consecutive looks at which a thread must be the only unknown one to be taken for LevelDB's.
LOOKS = 4


def _threads() -> set[int]:
    """Return the threads of this process. Raises OSError."""
    return set(map(int, os.listdir("/proc/self/task")))


def _lower_priority(thread: int) -> None:
    """Raises OSError."""
    os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICER_BY)


class BackgroundThread:
    """Finds LevelDB's thread, which is the one that Python has not started, and lowers its priority."""

    def __init__(
        self,
        threads: Callable[[], set[int]] = _threads,
        lower_priority: Callable[[int], None] = _lower_priority,
    ) -> None:
        self._threads = threads
        self._lower_priority = lower_priority
        #: Threads that Python does not know, with the number of consecutive looks that found each.
        self._seen: dict[int, int] = {}
        self._is_over = False

    def look(self) -> None:
        """Look once. Called some milliseconds apart while a table is written. Never raises.

        One look is not enough, because Python does not know its own threads while they begin or end.
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
            log.debug("LevelDB's thread does not yield", extra={"why": str(error)})


#: The instance of this process.
background_thread = BackgroundThread()

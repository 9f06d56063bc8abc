"""Frees the space of large files a little at a time, so that commits do not wait meanwhile.

Once a file has neither a name nor an open descriptor, the kernel frees its blocks, and what is in memory of it, in one
call: of 32 MiB on ext4 that keeps a core for 4 to 11 ms, in which no other thread has that core. Commits behind sixteen
connections waited 7 to 11 ms, and publishes at three quarters of the highest rate 20 to 35 ms. So files are made shorter
in steps before, with pauses in between.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from storage.leveldb.background import background_thread
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable

#: With a mebibyte, a fifth of a millisecond each, the p99 of publishes over 16 connections was 1.3 to 1.9 of the quiet one
#: while volumes were dropped, with this 1.2 to 1.3.
STEP_BYTES = 1 << 18
PAUSE_S = 0.002
#: So many logs are held open at once, each of about ``storage.write_buffer_bytes``; the space of a further one is freed at
#: once.
MAX_HELD = 4
#: LevelDB removes a log once its rows are in a table. It is looked for that so often, at these intervals.
LOOKS = 3000
LOOK_EVERY_S = 0.02


def shrink(descriptor: int, size: int, pause: Callable[[], bool]) -> None:
    """Make a file of this size shorter, step by step. Raises OSError.

    Args:
      pause: is called behind each step; False ends it.
    """
    for shorter in range(size - STEP_BYTES, 0, -STEP_BYTES):
        os.ftruncate(descriptor, shorter)
        if not pause():
            return


class OldLogs:
    """Descriptors of logs that LevelDB does not write any more, and removes when it has written their rows to a table.

    As long as such a descriptor is open, removing the log frees nothing. A thread waits until the log has no name left,
    so that nobody can ever read it again, shortens it, and closes it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: Descriptors, the oldest first, and how often each is looked at before it is closed as it is.
        self._held: dict[int, int] = {}
        self._has_thread = False

    def take(self, descriptor: int) -> None:
        """Close a log's descriptor, later; never raises. It must not be used any more."""
        with self._lock:
            self._held[descriptor] = LOOKS
            surplus = next(iter(self._held)) if len(self._held) > MAX_HELD else None
            if surplus is not None:
                del self._held[surplus]
            if not self._has_thread:
                # Without one they are held, and the next descriptor tries again.
                with suppress(RuntimeError):
                    threading.Thread(target=self._run, name="old logs", daemon=True).start()
                    self._has_thread = True
        if surplus is not None:
            os.close(surplus)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._held:
                    self._has_thread = False
                    return
                removed = self._removed()
            if removed is None:
                background_thread.look()  # it writes the rows of a log to a table just now
                nap(LOOK_EVERY_S)
            else:
                self._free(*removed)

    def _removed(self) -> tuple[int, int] | None:
        """A log that has been removed and its size; or one that is not going to be, and 0. They are not held any more."""
        for descriptor in self._held:
            about = os.fstat(descriptor)
            self._held[descriptor] -= 1
            if not about.st_nlink or self._held[descriptor] <= 0:
                del self._held[descriptor]
                return descriptor, 0 if about.st_nlink else about.st_size
        return None

    def _free(self, descriptor: int, size: int) -> None:
        try:
            with suppress(OSError):
                shrink(descriptor, size, self._pause)
        finally:
            os.close(descriptor)

    def _pause(self) -> bool:
        # The shorter the more are waiting: they take space on the disk.
        nap(PAUSE_S / (1 + len(self._held)))
        return True


#: Those of all databases of this process.
old_logs = OldLogs()

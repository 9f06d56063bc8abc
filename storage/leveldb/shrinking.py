"""Frees the space of large files a little at a time, so that commits do not wait meanwhile.

Once a file has neither a name nor an open descriptor, the kernel frees its blocks, and what is in memory of it, in one
call: of 32 MiB on ext4 that keeps a core for 4 to 11 ms, in which no other thread has that core. Commits behind sixteen
connections waited 7 to 11 ms, and publishes at three quarters of the highest rate 20 to 35 ms. So files are made shorter
in steps before, with pauses in between.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from storage.leveldb.background import background_thread
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
#: With a mebibyte, a fifth of a millisecond each, the p99 of publishes over 16 connections was 1.3 to 1.9 of the quiet one
#: while volumes were dropped, with this 1.2 to 1.3.
STEP_BYTES = 1 << 18
PAUSE_S = 0.002
#: So many logs are held open at once, each of about ``storage.write_buffer_bytes``; a further one is closed, and LevelDB
#: frees its space in one go.
MAX_HELD = 4
#: LevelDB removes a log once its rows are in a table. It is looked for that so often, at these intervals.
LOOKS = 3000
LOOK_EVERY_S = 0.02


def shrunk(descriptor: int, size: int) -> Iterator[None]:
    """Make a file of this size shorter, step by step; the caller pauses between steps. Raises OSError."""
    for shorter in range(size - STEP_BYTES, 0, -STEP_BYTES):
        os.ftruncate(descriptor, shorter)
        yield


@dataclass(slots=True)
class _Held:
    descriptor: int
    file: tuple[int, int]
    looks: int = 0


class OldLogs:
    """Descriptors of logs that LevelDB does not write any more, and removes when it has written their rows to a table.

    As long as such a descriptor is open, removing the log frees nothing. A thread waits until the log has no name left,
    so that nobody can ever read it again, shortens it, and closes it.
    """

    def __init__(
        self, nap: Callable[[float], None] = nap, meanwhile: Callable[[], None] = background_thread.look
    ) -> None:
        """The thread calls ``meanwhile`` again and again while LevelDB writes such rows to a table."""
        self._nap = nap
        self._meanwhile = meanwhile
        self._given: SimpleQueue[_Held] = SimpleQueue()
        self._lock = threading.Lock()
        #: The files of descriptors that were taken and are not closed yet, as device and inode.
        self._files: set[tuple[int, int]] = set()
        self._has_thread = False

    def start(self) -> None:
        """Have the thread run, where nobody waits: when ``take`` is called somebody does. Raises RuntimeError."""
        with self._lock:
            if not self._has_thread:
                threading.Thread(target=self._run, name="old logs", daemon=True).start()
                self._has_thread = True

    def take(self, descriptor: int) -> None:
        """Close a log's descriptor, later; never raises. It must not be used any more.

        Its file must have had a name that was counted, by ``has_name``: where names are not, it is never known to have lost
        the last one.
        """
        try:
            file = _file_of(os.fstat(descriptor))
            with self._lock:
                if self._has_thread and len(self._files) < MAX_HELD and file not in self._files:
                    self._files.add(file)
                    self._given.put(_Held(descriptor, file))
                    return
        except OSError as error:
            log.debug("an old log was not looked at", extra={"why": str(error)})
        close_quietly(descriptor)

    @property
    def count(self) -> int:
        """How many are held open."""
        return len(self._files)

    def _run(self) -> None:
        waiting: list[_Held] = []
        while True:
            if not waiting:
                waiting.append(self._given.get())
            with suppress(Empty):
                while True:
                    waiting.append(self._given.get_nowait())
            waiting = [held for held in waiting if not self._is_over(held)]
            if waiting:
                self._meanwhile()
                self._nap(LOOK_EVERY_S)

    def _is_over(self, held: _Held) -> bool:
        """Look at a log, and let go of it if nobody can read it any more, or if nobody removes it."""
        held.looks += 1
        try:
            about = os.fstat(held.descriptor)
            if about.st_nlink and held.looks < LOOKS:
                return False
            if not about.st_nlink:
                for _ in shrunk(held.descriptor, about.st_size):
                    self._pause()
        except OSError as error:
            log.debug("an old log is closed as it is", extra={"why": str(error)})
        close_quietly(held.descriptor)
        with self._lock:
            self._files.discard(held.file)
        return True

    def _pause(self) -> None:
        # The shorter the more are held: they take space on the disk.
        self._nap(PAUSE_S / len(self._files))


def has_name(descriptor: int) -> bool:
    """Whether a file that was just opened by its name is said to have one: some file systems do not count. Raises OSError."""
    return os.fstat(descriptor).st_nlink > 0


def _file_of(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def close_quietly(descriptor: int) -> None:
    with suppress(OSError):  # it is closed all the same
        os.close(descriptor)


#: Those of all databases of this process.
old_logs = OldLogs()

"""Frees the space of removed logs a little at a time, so that commits do not wait for it.

When a file has neither a name nor an open descriptor left, the kernel frees its blocks and page cache in one call: for
32 MiB on ext4 that keeps a core for 4 to 11 ms, and commits wait for it. So files are first shortened in steps, with
pauses in between. Only a file without a name is shortened, because nothing can read it any longer.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.leveldb import threads
from storage.leveldb.engine.background import background_thread
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)
#: With steps of a mebibyte, a fifth of a millisecond each, dropping volumes raises the p99 of publishes visibly more.
STEP_BYTES = 1 << 18
PAUSE_S = 0.002
#: Logs held open at once, each of about ``storage.write_buffer_bytes``. Further ones are closed at once, which frees
#: their space in one go.
MAX_HELD = 4
#: LevelDB removes a log once its rows are in a table. Number of checks of a held log until then, and their interval.
LOOKS = 3000
LOOK_EVERY_S = 0.02


def shrunk(descriptor: int, size: int) -> Iterator[None]:
    """Shorten a file of this size step by step; the caller pauses between steps. Raises OSError."""
    for shorter in range(size - STEP_BYTES, 0, -STEP_BYTES):
        os.ftruncate(descriptor, shorter)
        yield


@dataclass(slots=True)
class _Held:
    descriptor: int
    file: tuple[int, int]
    """Device and inode."""
    looks: int = 0


class OldLogs:
    """Open descriptors of logs that LevelDB no longer writes, and removes once their rows are in a table.

    While such a descriptor is open, removing the log frees nothing. A thread waits until the log has no name left,
    shortens it, and closes it. The thread ends when it holds no log.
    """

    def __init__(
        self, nap: Callable[[float], None] = nap, meanwhile: Callable[[], None] = background_thread.look
    ) -> None:
        """The thread calls ``meanwhile`` repeatedly while LevelDB writes the rows of a log to a table."""
        self._nap = nap
        self._meanwhile = meanwhile
        #: Guards the other fields. Nothing is called while it is held.
        self._lock = threads.Lock()
        #: Logs that the thread has not fetched yet.
        self._given: list[_Held] = []
        #: The files of all held logs.
        self._files: set[tuple[int, int]] = set()
        self._has_thread = False

    def take(self, descriptor: int) -> None:
        """Take over a log's descriptor, to close it later; never raises. The caller must not use it any longer.

        ``has_name`` must have returned True for it: on a file system that does not count links, a log would look
        removed while LevelDB still needs it.
        """
        try:
            file = _file_of(os.fstat(descriptor))
        except OSError as error:
            log.debug("an old log was not checked", extra={"why": str(error)})
            close_quietly(descriptor)
            return
        with self._lock:
            holds = len(self._files) < MAX_HELD and file not in self._files
            if holds:
                self._files.add(file)
                self._given.append(_Held(descriptor, file))
            starts = holds and not self._has_thread
            self._has_thread |= starts
        if not holds:
            close_quietly(descriptor)
        elif starts:
            try:
                threads.spawn("old logs", self._run)
            except RuntimeError as error:
                log.debug("old logs are closed at once", extra={"why": str(error)})
                self._close_given()

    @property
    def count(self) -> int:
        """Number of logs held open."""
        return len(self._files)

    def _close_given(self) -> None:
        """Close the logs for which no thread could be started."""
        with self._lock:
            given, self._given, self._has_thread = self._given, [], False
            self._files.difference_update(each.file for each in given)
        for each in given:
            close_quietly(each.descriptor)

    def _run(self) -> None:
        waiting: list[_Held] = []
        while True:
            with self._lock:
                waiting += self._given
                self._given = []
                if not waiting:
                    self._has_thread = False
                    return
            waiting = [held for held in waiting if not self._is_over(held)]
            if waiting:
                self._meanwhile()
                self._nap(LOOK_EVERY_S)

    def _is_over(self, held: _Held) -> bool:
        """Close a log if it has no name any longer, or was checked often enough. Returns True if it was closed."""
        held.looks += 1
        try:
            about = os.fstat(held.descriptor)
            if about.st_nlink and held.looks < LOOKS:
                return False
            if not about.st_nlink:
                for _ in shrunk(held.descriptor, about.st_size):
                    self._pause()
        except OSError as error:
            log.debug("an old log was closed without being shortened", extra={"why": str(error)})
        close_quietly(held.descriptor)
        with self._lock:
            self._files.discard(held.file)
        return True

    def _pause(self) -> None:
        # Shorter if more logs are held, because they take disk space.
        self._nap(PAUSE_S / len(self._files))


def has_name(descriptor: int) -> bool:
    """True if the file system counts the links of a file that was just opened by its name. Raises OSError."""
    return os.fstat(descriptor).st_nlink > 0


def _file_of(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def close_quietly(descriptor: int) -> None:
    """Close a descriptor and ignore errors."""
    with suppress(OSError):  # it is closed even then
        os.close(descriptor)


#: For all databases of this process.
old_logs = OldLogs()

"""The log that LevelDB appends to: made longer ahead of commits, and synced early.

**Longer.** LevelDB appends each commit to its log and syncs it. If that makes the file longer, the file system writes its
journal as well and has the disk empty its cache twice: on ext4 1.00 journal transactions and 34 sectors for a commit of
200 bytes, compared with 0.06 and 11 if the file was long enough. LevelDB writes at an offset that it counts itself,
whatever the file's length, and its reader passes over zeros. ``torn_end`` deals with what that means for a commit that a
power cut has torn. Only the length is changed (``ftruncate``), which takes no blocks; ``fallocate`` gained no more. If the
file system refuses, commits take as long as they would.

**Zeros ahead.** A commit that reaches a new block of the file still costs a journal write for that block, of which a small
commit needs one every few kilobytes. So zeros are written ahead of small commits. Compared with the length alone, write and
sync of 1.3 kB took 80 µs instead of 95, of 4.3 kB 85 instead of 128, of 16 kB 100 instead of 144. They take blocks:
``ZEROS_BYTES`` of the newest log alone. They are written only after the last record, if nothing but zeros was read there.

**Early.** A synced write of LevelDB hands the data to the disk and waits, then has the disk empty its cache and waits
again. A writer with other work writes without a sync, hands the data over (``begin_sync``), works, and waits only then
(``finish_sync``): 25 µs of work next to a sync of 88 µs left it as long as it was. The descriptor is our own, and LevelDB
begins another log when it likes. So the header of the record is read back each time; if it is not where it must be, all
logs of the database are synced.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.leveldb.engine.log_format import BLOCK_BYTES, FIRST, FULL, HEADER
from storage.leveldb.engine.old_logs import close_quietly, has_name, old_logs
from storage.leveldb.engine.torn_end import logs_among, newest_log_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)
#: By how much a log is made longer at a time. Four times as much gains nothing.
STEP_BYTES = 1 << 20
#: A batch of this size takes new blocks of the disk, so that its sync writes the journal however long the file is.
LARGE_BYTES = 1 << 16
#: Zeros are written ahead of batches below this size, and how many at a time. With larger ones, writing everything twice
#: would cost the disk more than its journal.
SMALL_BYTES = 1 << 14
ZEROS_BYTES = 1 << 17
_PAGE_BYTES = 4096
_ZEROS = bytes(ZEROS_BYTES + _PAGE_BYTES)
#: Linux's SYNC_FILE_RANGE_WRITE: begin to write what is dirty, and do not wait.
_BEGIN_WRITING = 2


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """The system call of this name; None where there is none. It gives up the interpreter lock."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


_begin_writing = _sync_file_range()
#: True if a sync can begin before it is waited for.
SYNCS_EARLY = _begin_writing is not None


@dataclass(slots=True)
class Syncing:
    """A sync that has begun."""

    descriptors: list[int]
    opened: bool = False
    """True if they were opened for this sync, and are closed after it."""


class NewestLog:
    """The newest log of an open database. One thread at a time uses it: the one that writes the database."""

    def __init__(self, directory: Path, step_bytes: int) -> None:
        self._directory = directory
        self._step_bytes = step_bytes
        self._name: str | None = None
        self._descriptor = -1
        #: True if the file system counts the names of the file.
        self._counts_names = False
        #: How long the file is, and where the next record begins, unless LevelDB has begun another log.
        self._length = 0
        self._end = 0
        #: Zeros were written ahead up to here.
        self._zeroed = 0
        #: Where the record of the last announced batch begins, and its header: length and kind.
        self._header_at = 0
        self._header = (0, 0)
        #: Batches that were begun and not announced. Above 0 it is unknown where the next record begins.
        self._unknown = 0
        self._refused = False

    def begins(self) -> None:
        """A batch is begun; ``take`` announces its size."""
        self._unknown += 1

    def take(self, size: int) -> None:
        """Announce that a batch of this size is written next, and make room for it if need be.

        LevelDB begins another log when it likes. ``begin_sync`` notices that; without it, it is noticed when the room of the
        log before would have been used up, and until then the new log grows with each commit.
        """
        self._unknown -= 1
        begin = self._end
        self._place(size)
        if self._end > self._length and size < LARGE_BYTES:
            try:
                self._make_longer(size)
            except OSError as error:
                # LevelDB has just removed the log, or the file system cannot do it: the commit only takes longer.
                self._length = self._end + self._step_bytes
                if not self._refused:
                    log.info("a log was not made longer ahead of commits", extra={"why": str(error)})
                self._refused = True
        elif self._end > self._zeroed and size < SMALL_BYTES and self.is_known and not self._refused:
            self._write_zeros(begin)

    @property
    def is_known(self) -> bool:
        """True if it is known where the next record begins, unless LevelDB has begun another log."""
        return self._descriptor >= 0 and not self._unknown

    def begin_sync(self) -> Syncing:
        """Begin to make the last batch durable. It was announced, and written without a sync.

        Returns:
          What ``finish_sync`` waits for.

        Raises:
          OSError: it may not become durable.
        """
        if not self.is_known:
            return Syncing(self._open_all(), opened=True)
        if _begin_writing is not None:
            # Errors are ignored here: fdatasync reports them.
            _begin_writing(self._descriptor, self._header_at, self._end - self._header_at, _BEGIN_WRITING)
        # Only now, so that the disk works in the meantime.
        return Syncing([self._descriptor]) if self._is_there() else Syncing(self._open_all(), opened=True)

    @staticmethod
    def finish_sync(syncing: Syncing) -> None:
        """Wait until it is durable. The log has not been let go of since ``begin_sync``. Raises OSError: it may not be."""
        try:
            for descriptor in syncing.descriptors:
                os.fdatasync(descriptor)
        finally:
            if syncing.opened:
                for descriptor in syncing.descriptors:
                    close_quietly(descriptor)  # the sync has said everything

    def let_go(self) -> None:
        """Let go of a log that LevelDB removes soon, or has removed. Idempotent."""
        self._leave(old_logs.take if self._counts_names else close_quietly)

    def let_go_of_all(self) -> None:
        """Let go of every log there is: LevelDB is about to write its memory to a table, and to remove them."""
        self.let_go()
        names: list[str] = []
        with suppress(OSError):
            names = logs_among(os.listdir(self._directory))
        for name in names:
            with suppress(OSError):  # LevelDB may have removed it by now
                descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CLOEXEC)
                if has_name(descriptor):
                    old_logs.take(descriptor)
                else:
                    os.close(descriptor)

    def close(self) -> None:
        """Let go of the log when LevelDB is closed, which leaves it in place. Idempotent."""
        self._leave(close_quietly)

    def _leave(self, leave: Callable[[int], None]) -> None:
        descriptor, self._descriptor, self._name = self._descriptor, -1, None
        self._length = self._end
        if descriptor >= 0:
            leave(descriptor)

    # --- where records are ------------------------------------------------------------------------

    def _place(self, size: int) -> None:
        """Compute where a record of this size begins and ends: see LevelDB's ``log_format.md``."""
        at = self._end
        room = BLOCK_BYTES - at % BLOCK_BYTES
        if room < HEADER.size:
            at, room = at + room, BLOCK_BYTES
        self._header_at = at
        room -= HEADER.size
        if size <= room:
            self._header = (size, FULL)
            self._end = at + HEADER.size + size
            return
        self._header = (room, FIRST)
        blocks, last = divmod(size - room, BLOCK_BYTES - HEADER.size)
        self._end = at + HEADER.size + room + blocks * BLOCK_BYTES + (HEADER.size + last if last else 0)

    def _is_there(self) -> bool:
        """True if the record is where it must be. Before it was written, zeros stood there."""
        found = os.pread(self._descriptor, HEADER.size, self._header_at)
        return len(found) == HEADER.size and HEADER.unpack(found)[1:] == self._header

    def _open_all(self) -> list[int]:
        """Open every log. Usually LevelDB has begun another one, which is made longer before the next batch."""
        opened: list[int] = []
        names = logs_among(os.listdir(self._directory))
        try:
            for name in names:
                # The rows of a log that LevelDB has removed are in a synced table.
                with suppress(FileNotFoundError):
                    opened.append(os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            for descriptor in opened:
                close_quietly(descriptor)
            raise
        if newest_log_of(names) == self._name:
            self._unknown += 1
        else:
            self.let_go()
        return opened

    def _write_zeros(self, begin: int) -> None:
        """Write zeros from the first page after ``begin`` on. The last record ends at ``begin``."""
        start = begin + -begin % _PAGE_BYTES
        size = min(ZEROS_BYTES, self._step_bytes)
        self._zeroed = start + size
        try:
            there = os.pread(self._descriptor, start + size - begin, begin)
            if there != _ZEROS[: len(there)]:
                # A record was written that was not announced: where the next one begins is unknown from now on.
                self._unknown += 1
                return
            os.pwrite(self._descriptor, _ZEROS[:size], start)
        except OSError as error:
            log.debug(
                "no zeros were written ahead of commits", extra={"why": str(error)}
            )  # the commit only takes longer
            return
        self._length = max(self._length, self._zeroed)

    def _make_longer(self, size: int) -> None:
        name = newest_log_of(os.listdir(self._directory))
        if name is None:
            self.let_go()
            return
        if name != self._name:
            self.let_go()
            self._descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CLOEXEC)
            self._name = name
            self._counts_names = has_name(self._descriptor)
            # It has not been made longer yet.
            self._end = os.fstat(self._descriptor).st_size
            self._zeroed = self._end
            self._unknown = 0
            self._place(size)
        # Never shorter: only LevelDB, called by this thread, writes to the log.
        length = max(os.fstat(self._descriptor).st_size, self._end) + self._step_bytes
        os.ftruncate(self._descriptor, length)
        self._length = length

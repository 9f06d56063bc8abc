"""The log that LevelDB appends to: extended ahead of commits, and synced early.

**Extended.** LevelDB appends each commit to its log and syncs it. If that makes the file longer, the file system also
writes its journal and flushes the disk's cache twice: on ext4 a commit of 200 bytes costs 34 sectors, compared with
11 if the file was long enough. LevelDB writes at an offset that it counts itself, whatever the file's length, and its
reader skips zeros. ``torn_end`` deals with the consequence for a commit that a power cut has torn. Only the length is
changed (``ftruncate``), which takes no blocks; ``fallocate`` was no faster. If the file system refuses, commits are
only slower.

**Zeros ahead.** A commit that reaches a new block of the file still costs a journal write for that block, and small
commits reach one every few kilobytes. So zeros are written ahead of small commits, which saves them a sixth to a third
of the time. They take blocks, but only ``ZEROS_BYTES`` of the newest log. They are written only after the last record,
over a range that was read as zeros.

**Early.** A synced write of LevelDB hands the data to the disk and waits, then flushes the disk's cache and waits
again. A caller that has other work writes without a sync, starts the disk (``begin_sync``), works, and only then waits
(``finish_sync``): work of 25 µs during a sync of 88 µs is free. The descriptor is our own, and LevelDB switches to
another log at any time. So the record's header is read back each time; if it is not in its place, all logs of the
database are synced.
"""

from __future__ import annotations

import ctypes
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.leveldb.engine.log_format import BLOCK_BYTES, FIRST, FULL, HEADER
from storage.leveldb.engine.torn_end import logs_among, newest_log_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)
#: A log is extended by this much at a time. Four times as much gains nothing.
STEP_BYTES = 1 << 20
#: A batch of this size needs new blocks on the disk, so its sync writes the journal however long the file is.
LARGE_BYTES = 1 << 16
#: Zeros are written ahead of batches below SMALL_BYTES, ZEROS_BYTES at a time. With larger batches, writing everything
#: twice would cost the disk more than its journal.
SMALL_BYTES = 1 << 14
ZEROS_BYTES = 1 << 17
_PAGE_BYTES = 4096
_ZEROS = bytes(ZEROS_BYTES + _PAGE_BYTES)
#: Linux's SYNC_FILE_RANGE_WRITE: start writing dirty pages without waiting.
_BEGIN_WRITING = 2


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the system call of this name, None if there is none. It releases the interpreter lock."""
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    call.restype = ctypes.c_int
    found: Callable[[int, int, int, int], int] = call
    return found


_begin_writing = _sync_file_range()
#: True if a sync can begin without waiting for it.
SYNCS_EARLY = _begin_writing is not None


@dataclass(slots=True)
class Syncing:
    """A sync that has begun."""

    descriptors: list[int]
    opened: bool = False
    """True if they were opened for this sync only, and are closed after it."""


class NewestLog:
    """The newest log of an open database. For the thread that writes the database."""

    def __init__(self, directory: Path, step_bytes: int) -> None:
        self._directory = directory
        self._step_bytes = step_bytes
        self._name: str | None = None
        self._descriptor = -1
        #: The file's length, and where the next record begins unless LevelDB has switched to another log.
        self._length = 0
        self._end = 0
        #: Zeros were written ahead up to this offset.
        self._zeroed = 0
        #: The offset of the last announced batch's record, and its header: length and kind.
        self._header_at = 0
        self._header = (0, 0)
        #: Batches that began and were not announced. Above 0, the place of the next record is unknown.
        self._unknown = 0
        self._refused = False

    def begins(self) -> None:
        """Record that a batch begins; ``take`` announces its size."""
        self._unknown += 1

    def take(self, size: int) -> None:
        """Announce the size of the next batch, and extend the log if necessary.

        LevelDB switches to another log at any time. ``begin_sync`` notices that. Without it, the switch is noticed when
        the room in the previous log would be used up; until then the new log grows with each commit.
        """
        self._unknown -= 1
        begin = self._end
        self._place(size)
        if self._end > self._length and size < LARGE_BYTES:
            try:
                self._make_longer(size)
            except OSError as error:
                # LevelDB has just removed the log, or the file system cannot extend it: commits are only slower.
                self._length = self._end + self._step_bytes
                if not self._refused:
                    log.info("a log was not extended ahead of commits", extra={"why": str(error)})
                self._refused = True
        elif self._end > self._zeroed and size < SMALL_BYTES and self.is_known and not self._refused:
            self._write_zeros(begin)

    @property
    def is_known(self) -> bool:
        """True if the place of the next record is known, unless LevelDB has switched to another log."""
        return self._descriptor >= 0 and not self._unknown

    def begin_sync(self) -> Syncing:
        """Begin to make the last batch durable. It must have been announced, and written without a sync.

        Returns:
          The argument for ``finish_sync``.

        Raises:
          OSError: it may not become durable.
        """
        if not self.is_known:
            return Syncing(self._open_all(), opened=True)
        if _begin_writing is not None:
            # Errors are ignored here: fdatasync reports them.
            _begin_writing(self._descriptor, self._header_at, self._end - self._header_at, _BEGIN_WRITING)
        # Check only now, while the disk works.
        return Syncing([self._descriptor]) if self._is_there() else Syncing(self._open_all(), opened=True)

    @staticmethod
    def finish_sync(syncing: Syncing) -> None:
        """Wait until the batch is durable. Do not let go of the log in between. Raises OSError: it may not be durable."""
        try:
            for descriptor in syncing.descriptors:
                os.fdatasync(descriptor)
        finally:
            if syncing.opened:
                for descriptor in syncing.descriptors:
                    close_quietly(descriptor)  # the sync has reported all errors

    def let_go(self) -> None:
        """Close the log. Idempotent.

        LevelDB switches to another log before it writes the rows of this one to a table and removes it, so this one is
        usually closed while it still has its name: LevelDB's thread then frees its space, and no commit waits for that.
        """
        descriptor, self._descriptor, self._name = self._descriptor, -1, None
        self._length = self._end
        if descriptor >= 0:
            close_quietly(descriptor)

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
        """True if the record is in its place. Until it is written, there are zeros."""
        found = os.pread(self._descriptor, HEADER.size, self._header_at)
        return len(found) == HEADER.size and HEADER.unpack(found)[1:] == self._header

    def _open_all(self) -> list[int]:
        """Open every log. Usually LevelDB has switched to another one, which is extended before the next batch."""
        opened: list[int] = []
        names = logs_among(os.listdir(self._directory))
        try:
            for name in names:
                # The rows of a removed log are in a synced table.
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
        """Write zeros from the first page after ``begin``, where the last record ends."""
        start = begin + -begin % _PAGE_BYTES
        size = min(ZEROS_BYTES, self._step_bytes)
        self._zeroed = start + size
        try:
            there = os.pread(self._descriptor, start + size - begin, begin)
            if there != _ZEROS[: len(there)]:
                # An unannounced record was written: the place of the next one is unknown from now on.
                self._unknown += 1
                return
            os.pwrite(self._descriptor, _ZEROS[:size], start)
        except OSError as error:
            log.debug(
                "no zeros were written ahead of commits", extra={"why": str(error)}
            )  # harmless: the commit only takes longer
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
            # It has not been extended yet.
            self._end = os.fstat(self._descriptor).st_size
            self._zeroed = self._end
            self._unknown = 0
            self._place(size)
        # Never shorter: only LevelDB, called by this thread, writes to the log.
        length = max(os.fstat(self._descriptor).st_size, self._end) + self._step_bytes
        os.ftruncate(self._descriptor, length)
        self._length = length


def close_quietly(descriptor: int) -> None:
    """Close a descriptor and ignore errors."""
    with suppress(OSError):  # the descriptor is closed even then
        os.close(descriptor)

"""The log that LevelDB writes, as its one writer knows it: kept longer than what was written to it, and synced early.

LevelDB appends each commit to its log and syncs it. Where that makes the file longer, the file system writes its journal
beside the data, and lets the disk empty its cache twice: on ext4, 1.00 transactions of the journal a commit of 200 bytes
and 34 sectors, beside 0.06 and 11 where the file was long enough. LevelDB begins to write at the beginning of a log of
its own and goes on from there, whatever the file's length is, and its reader passes over zeros. ``torn_end`` has what
that means for a commit that a power cut has torn.

The length alone is changed (``ftruncate``), which takes no block from the disk. Setting blocks aside (``fallocate``)
gained no more. Where the file system refuses, commits take as long as they did.

A commit that comes to a new block of the file still has the journal written, for that block; of a few kilobytes each
does. So for small ones zeros are written ahead, a stretch at a time. Beside the length alone, write and sync of 1.3 kB
took 80 µs instead of 95, of 4.3 kB 85 instead of 128, and of 16 kB 100 instead of 144, with less written to the disk: the
journal takes 17 kB each time. They take blocks: ``ZEROS_BYTES``, of the newest log alone. Zeros go only where it is known
that LevelDB has written nothing, and where nothing but zeros was read just before.

A synced write of LevelDB hands the data to the disk and waits, then has the disk empty its cache and waits again. A
writer that has something else to do meanwhile writes without a sync, begins to hand the data over (``begin_sync``), does
it, and waits only then (``finish_sync``): 25 µs of work beside a sync of 88 µs left it as long as it was. There is a
descriptor of its own for that. LevelDB begins another log when it likes, so that each time the header of the record is
read back where it has to be; if it is not there, all logs of the database are synced.
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
#: Batches below this size have zeros written ahead of them, so much at a time. Of larger ones writing everything twice
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
#: Whether a sync can begin before it is waited for.
SYNCS_EARLY = _begin_writing is not None


@dataclass(slots=True)
class Syncing:
    """A sync that has begun."""

    descriptors: list[int]
    opened: bool = False
    """Whether they were opened for it, and are closed behind it."""


class NewestLog:
    """The newest log of an open database, for the one thread at a time that writes it."""

    def __init__(self, directory: Path, step_bytes: int) -> None:
        self._directory = directory
        self._step_bytes = step_bytes
        self._name: str | None = None
        self._descriptor = -1
        #: Whether the file system counts the names of the file.
        self._counts_names = False
        #: How long the file is, and where the next record begins, unless LevelDB has begun another log.
        self._length = 0
        self._end = 0
        #: Up to where zeros were written ahead.
        self._zeroed = 0
        #: Where the record of the batch begins that was announced last, and the header that it then has.
        self._header_at = 0
        self._header = (0, 0)
        #: Batches that were begun without being announced: where the next record begins is not known.
        self._unknown = 0
        self._refused = False

    def begins(self) -> None:
        """A batch is begun; ``take`` announces its size."""
        self._unknown += 1

    def take(self, size: int) -> None:
        """A batch of this size is written next: make room for it if need be.

        LevelDB begins another log when it likes. That is noticed by ``begin_sync``, or else when the room of the one before
        would have come to its end; until then the new one grows with each commit.
        """
        self._unknown -= 1
        begin = self._end
        self._place(size)
        if self._end > self._length and size < LARGE_BYTES:
            try:
                self._make_longer(size)
            except OSError as error:
                # A log that LevelDB has removed meanwhile, or a file system that cannot: the commit itself is as good.
                self._length = self._end + self._step_bytes
                if not self._refused:
                    log.info("a log was not made longer ahead of commits", extra={"why": str(error)})
                self._refused = True
        elif self._end > self._zeroed and size < SMALL_BYTES and self.is_known and not self._refused:
            self._write_zeros(begin)

    @property
    def is_known(self) -> bool:
        """Whether it is known where the next record begins, unless LevelDB has begun another log."""
        return self._descriptor >= 0 and not self._unknown

    def begin_sync(self) -> Syncing:
        """Begin to make the last batch durable, which was announced and written without a sync.

        Returns:
          What ``finish_sync`` waits for.

        Raises:
          OSError: it may not become durable.
        """
        if not self.is_known:
            return Syncing(self._open_all(), opened=True)
        if _begin_writing is not None:
            # What it says of errors, the sync says as well.
            _begin_writing(self._descriptor, self._header_at, self._end - self._header_at, _BEGIN_WRITING)
        # Looked at behind it: the disk is at work.
        return Syncing([self._descriptor]) if self._is_there() else Syncing(self._open_all(), opened=True)

    @staticmethod
    def finish_sync(syncing: Syncing) -> None:
        """Wait until it is durable; nobody has let go of the log meanwhile. Raises OSError: it may not be."""
        try:
            for descriptor in syncing.descriptors:
                os.fdatasync(descriptor)
        finally:
            if syncing.opened:
                for descriptor in syncing.descriptors:
                    os.close(descriptor)

    def let_go(self) -> None:
        """Let go of a file that LevelDB removes soon, or has removed. Idempotent."""
        self._leave(old_logs.take if self._counts_names else close_quietly)

    def let_go_of_all(self) -> None:
        """LevelDB is about to put what is in its memory into a table, and to remove every log that is there now."""
        self.let_go()
        names: list[str] = []
        with suppress(OSError):
            names = logs_among(os.listdir(self._directory))
        for name in names:
            with suppress(OSError):  # LevelDB has removed it by now
                descriptor = os.open(self._directory / name, os.O_RDWR | os.O_CLOEXEC)
                if has_name(descriptor):
                    old_logs.take(descriptor)
                else:
                    os.close(descriptor)

    def close(self) -> None:
        """Let go of the file, since LevelDB is closed and leaves it. Idempotent."""
        self._leave(close_quietly)

    def _leave(self, leave: Callable[[int], None]) -> None:
        descriptor, self._descriptor, self._name = self._descriptor, -1, None
        self._length = self._end
        if descriptor >= 0:
            leave(descriptor)

    # --- where records are ------------------------------------------------------------------------

    def _place(self, size: int) -> None:
        """Where a record of this size comes, and the next one behind it: see LevelDB's ``log_format.md``."""
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
        """Whether the record is where it has to be. Nothing was written there before, so that all read as zeros."""
        found = os.pread(self._descriptor, HEADER.size, self._header_at)
        return len(found) == HEADER.size and HEADER.unpack(found)[1:] == self._header

    def _open_all(self) -> list[int]:
        """All logs: mostly since there is a new one, which is made longer before the next batch."""
        opened: list[int] = []
        names = logs_among(os.listdir(self._directory))
        try:
            for name in names:
                # One that LevelDB has removed is in a table, which is synced.
                with suppress(FileNotFoundError):
                    opened.append(os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        if newest_log_of(names) == self._name:
            self._unknown += 1
        else:
            self.let_go()
        return opened

    def _write_zeros(self, begin: int) -> None:
        """Write zeros from the next page on behind ``begin``, where the last record ends."""
        start = begin + -begin % _PAGE_BYTES
        size = min(ZEROS_BYTES, self._step_bytes)
        self._zeroed = start + size
        try:
            there = os.pread(self._descriptor, start + size - begin, begin)
            if there != _ZEROS[: len(there)]:
                # Somebody has written what was not announced: from now on nothing is known of this log.
                self._unknown += 1
                return
            os.pwrite(self._descriptor, _ZEROS[:size], start)
        except OSError as error:
            log.debug("no zeros were written ahead of commits", extra={"why": str(error)})  # it is as good without
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
        # Never shorter: nobody but this thread writes to the log.
        length = max(os.fstat(self._descriptor).st_size, self._end) + self._step_bytes
        os.ftruncate(self._descriptor, length)
        self._length = length

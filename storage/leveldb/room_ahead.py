"""Keeps the log that LevelDB writes longer than what was written to it, so that a sync has no new length to store.

LevelDB appends each commit to its log and syncs it. Where that makes the file longer, the file system writes its journal
beside the data, and lets the disk empty its cache twice: on ext4, 1.00 transactions of the journal a commit of 200 bytes
and 34 sectors, beside 0.06 and 11 where the file was long enough. LevelDB begins to write at the beginning of a log of
its own and goes on from there, whatever the file's length is, and its reader passes over zeros. ``torn_end`` has what
that means for a commit that a power cut has torn.

The length alone is changed (``ftruncate``): no block is taken from the disk, so that it is as free as before. Setting
blocks aside (``fallocate``) gained no more. Where the file system refuses, commits take as long as they did.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from storage.leveldb.manifest import BLOCK_BYTES, HEADER
from storage.leveldb.torn_end import newest_log_of

if TYPE_CHECKING:
    from pathlib import Path

log = logging.getLogger(__name__)
#: By how much a log is made longer at a time. Four times as much gains nothing.
STEP_BYTES = 1 << 20
#: A batch of this size takes new blocks of the disk, so that its sync writes the journal however long the file is.
LARGE_BYTES = 1 << 16


class RoomAhead:
    """The room in the newest log of an open database, for the one thread that writes it."""

    def __init__(self, directory: Path, step_bytes: int) -> None:
        self._directory = directory
        self._step_bytes = step_bytes
        self._left = 0
        self._refused = False

    def take(self, size: int) -> None:
        """Make room if need be for a batch of this size, which is written next.

        LevelDB begins another log when it likes. That is noticed when the room of the one before would have come to its
        end; until then the new one grows with each commit.
        """
        self._left -= size + HEADER.size * (1 + size // BLOCK_BYTES)
        if self._left >= 0 or size >= LARGE_BYTES:
            return
        self._left = self._step_bytes
        try:
            self._make_longer(size)
        except OSError as error:
            # A log that LevelDB has removed meanwhile, or a file system that cannot: the commit itself is as good.
            if not self._refused:
                log.info("a log was not made longer ahead of commits", extra={"why": str(error)})
            self._refused = True

    def _make_longer(self, size: int) -> None:
        name = newest_log_of(os.listdir(self._directory))
        if name is None:
            return
        with (self._directory / name).open("r+b", buffering=0) as file:
            # Never shorter: nobody but this thread writes to the log.
            file.truncate(os.fstat(file.fileno()).st_size + self._step_bytes + size)

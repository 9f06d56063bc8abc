"""One opening of the LevelDB, in blocking calls: options, tables, batches, scans, and plyvel's errors.

The defaults of the options were measured on two cores and a local SSD: synced commits of 1000 rows of 100 B, 1.5 M
rows.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from contextlib import closing
from dataclasses import dataclass
from itertools import repeat, takewhile
from typing import TYPE_CHECKING, Any

import plyvel

from plainsong.protocol.effects import Put, Table
from storage.base import StoreConflict, StoreError, chunks
from storage.directory import DAMAGED_HINT, message_of, opening_failed
from storage.leveldb.manifest import check_files

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Delete, Expect
    from storage.base import Row

log = logging.getLogger(__name__)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LevelDBOptions:
    """Sizes in bytes. Memory at load is about twice the write buffer, plus the block cache."""

    write_buffer_bytes: int = 8 * MIB
    """Rows kept in memory, besides the log, before they become a table file.

    4 MiB wrote 1.17 to 1.30 M rows/s, 8 MiB 1.28 M, 16 and 32 MiB no more than 1.33 M, but +10 and +30 MB
    resident. Smaller: more, smaller files to compact. Larger: also a longer start, since the log is read again.
    """
    block_cache_bytes: int = 8 * MIB
    """Decompressed blocks kept for point reads; scans do not fill it."""
    max_file_bytes: int = 8 * MIB
    """The size of a table file. At LevelDB's own 2 MiB, 50 GB would be 25 000 files, at the same speed."""
    max_open_files: int = 500
    """Table files held open, each a descriptor; the usual limit of a process is 1024, and sockets need theirs."""
    bloom_bits: int = 10
    """Bits per key that spare a point read of an absent row its disk access: 10 spare 99 of 100."""
    paranoid_checks: bool = True
    """Refuse a log or manifest that has a damaged record, instead of dropping it with what follows in its block."""
    max_readers: int = 8
    """Threads that read at once. More than a few gain nothing under one interpreter lock; each keeps a list of rows."""


# --- errors of an open database --------------------------------------------------------------------


#: The folders of a path, but not its last part.
_FOLDERS = re.compile(r"/(?:[^/:]+/)+")
#: The exceptions of calls into the database; plyvel raises RuntimeError for a closed handle.
FOREIGN = (plyvel.Error, OSError, RuntimeError, MemoryError)
#: Texts in LevelDB's messages → the hint. The first match counts.
_RUNNING: tuple[tuple[str, str], ...] = (
    ("No space left", "free some space; the store opens itself again"),
    ("Disk quota exceeded", "raise the quota; the store opens itself again"),
    ("Corruption", DAMAGED_HINT),
    ("Input/output error", "the disk fails: see the kernel's log, and have a copy ready"),
)


def call_failed(error: BaseException, doing: str) -> StoreError:
    """The error to raise when a call into an open database failed."""
    text = message_of(error)
    log.error("the store failed", extra={"doing": doing, "why": text})
    hint = next((hint for words, hint in _RUNNING if words in text), "")
    # Clients learn what failed; the log alone has the paths of files.
    return StoreError(f"{doing}: {_FOLDERS.sub('', text)}", hint=hint)


# --- database --------------------------------------------------------------------------------------
#
# The first byte of a key is the table's number. ``storage.leveldb.store`` calls these methods from worker threads, one
# writer at a time.


_TABLE_BYTE = {table: bytes([table]) for table in Table}
_AFTER_ALL = b"\xff" * 8
#: Scans that ask for this few rows first are point reads in disguise, and may fill the block cache.
_FEW_ROWS = 8
_MEASURE_EVERY_S = 1.0


class Database:
    """An open LevelDB. Methods block, are for threads, and raise StoreError."""

    def __init__(self, path: Path, options: LevelDBOptions, *, create: bool, check: bool = True) -> None:
        """Open ``path``; LevelDB reads its log again.

        Args:
          create: create the database if there is none.
          check: look for missing files first, since LevelDB does not notice them.

        Raises:
          StoreUnusable: one of its kinds; without ``create`` a missing database is StoreDamaged.
        """
        if check and not create:
            check_files(path)
        try:
            self._db: Any = plyvel.DB(
                str(path),
                create_if_missing=create,
                paranoid_checks=options.paranoid_checks,
                write_buffer_size=options.write_buffer_bytes,
                max_open_files=options.max_open_files,
                lru_cache_size=options.block_cache_bytes,
                max_file_size=options.max_file_bytes,
                bloom_filter_bits=options.bloom_bits,
                compression="snappy",
            )
        except FOREIGN as error:
            raise opening_failed(error, path) from error
        self._tables = {table: self._db.prefixed_db(byte) for table, byte in _TABLE_BYTE.items()}
        #: Scans take turns, list by list: the one that iterates has this lock.
        self._turn = threading.Lock()
        self._log_bytes = 0
        self._max_log_bytes = options.write_buffer_bytes
        self._measure_at_s = 0.0
        #: The size on disk: table files exactly; the log by what was written, at most a write buffer.
        self.bytes = 0
        #: Set before the handle is closed; scans stop at their next list.
        self.leaving = False
        self.measure()

    def measure_if_due(self) -> None:
        """``measure``, at most once in its interval."""
        if time.monotonic() >= self._measure_at_s:
            self.measure()

    def compare(self, expect: Sequence[Expect]) -> None:
        """Raise StoreConflict for the first expectation that does not hold."""
        for wanted in expect:
            if self.get(wanted.table, wanted.key) != wanted.value:
                raise StoreConflict(f"row {wanted.key.hex()} of the {wanted.table.name.lower()} table has changed")

    def write(self, operations: Sequence[Put | Delete], *, sync: bool) -> None:
        """All operations as one batch: all or nothing. After an exception the handle must not write again."""
        try:
            with self._db.write_batch(transaction=True, sync=sync) as batch:
                for operation in operations:
                    if isinstance(operation, Put):
                        _put_rows(batch.put, operation)
                    else:
                        byte = _TABLE_BYTE[operation.table]
                        for key in operation.keys:
                            batch.delete(byte + key)
                self._log_bytes += batch.approximate_size()
        except FOREIGN as error:
            raise call_failed(error, "writing") from error
        self.measure_if_due()

    def get(self, table: Table, key: bytes) -> bytes | None:
        """A row's value, None if there is none."""
        try:
            value: bytes | None = self._tables[table].get(key, verify_checksums=True)
        except FOREIGN as error:
            raise call_failed(error, "reading a row") from error
        return value

    def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[list[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """See ``Store.scan``; ``between`` is called between two lists, and ends the scan by raising."""
        # Closed here and not by the garbage collector: an iterator holds table files, and the handle.
        with closing(self._chunks(table, start, stop, reverse, first_chunk, values)) as lists:
            while True:
                # plyvel releases the interpreter lock at every row, so two threads that iterate at once pass it
                # back and forth row by row: four readers together had half the throughput of one.
                with self._turn:
                    chunk = next(lists, None)
                if chunk is None or not feed(chunk):
                    return
                between()
                if self.leaving:
                    raise StoreError("the store was closed or opened again during a scan", hint="ask again")

    def first_rows(self, table: Table, start: bytes, stop: bytes, max_bytes: int, row_bytes: int) -> list[Row]:
        """The first rows of a range, at least one if there is any; for the writer, which nothing interrupts.

        Args:
          max_bytes: of values, with ``row_bytes`` more for each row. The last row may go beyond.
        """
        found: list[Row] = []
        with closing(self._chunks(table, start, stop, False, 64, True)) as lists:
            while max_bytes > 0:
                with self._turn:
                    chunk = next(lists, None)
                if chunk is None:
                    break
                for row in chunk:
                    if max_bytes <= 0:
                        return found
                    found.append(row)
                    max_bytes -= len(row[1]) + row_bytes
        return found

    def _chunks(
        self, table: Table, start: bytes, stop: bytes, reverse: bool, first_chunk: int, values: bool
    ) -> Generator[list[Row], None, None]:
        if start >= stop:
            return
        try:
            iterator = self._tables[table].iterator(
                # plyvel 1.5.1 finds nothing on the way down when the only key of a range is its start.
                start=None if reverse else start,
                stop=stop,
                reverse=reverse,
                include_value=values,
                verify_checksums=True,
                fill_cache=first_chunk <= _FEW_ROWS,
            )
            with closing(iterator):
                rows = iterator if values else zip(iterator, repeat(b""))
                yield from chunks(takewhile(lambda row: row[0] >= start, rows) if reverse else rows, first_chunk)
        except FOREIGN as error:
            raise call_failed(error, "scanning") from error

    def compact(self, table: Table, start: bytes, stop: bytes) -> None:
        """Rewrite the files of a range without the rows that were removed."""
        byte = _TABLE_BYTE[table]
        # LevelDB first writes its memory to a table file, and begins a new log.
        self._log_bytes = 0
        try:
            self._db.compact_range(start=byte + start, stop=byte + stop)
        except FOREIGN as error:
            raise call_failed(error, "compacting") from error
        self.measure()

    def measure(self) -> None:
        """Update ``bytes``; LevelDB sums the sizes of its files in memory, without the disk."""
        self._measure_at_s = time.monotonic() + _MEASURE_EVERY_S
        try:
            files = int(self._db.approximate_size(b"\x00", _AFTER_ALL))
        except FOREIGN:
            return
        self.bytes = files + min(self._log_bytes, self._max_log_bytes)

    def close(self) -> None:
        """Close; waits for a compaction that is under way. No other thread may be inside."""
        self._db.close()


def _put_rows(put: Callable[[bytes, bytes], None], operation: Put) -> None:
    # The daemon's hottest loop: nothing but the put.
    prefix = _TABLE_BYTE[operation.table] + operation.prefix
    for suffix, value in zip(operation.suffixes, operation.values, strict=True):
        put(prefix + suffix, value)

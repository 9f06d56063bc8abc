"""One open LevelDB, in blocking calls: batches, rows, ranges and snapshots.

A store has several: the metadata's, and one for each volume of messages.
"""

from __future__ import annotations

import logging
import os
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plyvel

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from storage.base import Blocks, StoreDamaged, StoreError
from storage.directory import opening_failed
from storage.leveldb.engine.errors import FOREIGN, call_failed
from storage.leveldb.engine.manifest import check_files
from storage.leveldb.engine.newest_log import STEP_BYTES, SYNCS_EARLY, NewestLog
from storage.leveldb.engine.packs import MARK, PACKED_TABLE, Pack, is_of_topic
from storage.leveldb.engine.ranges import RangeScan, lists_down, lists_up, look_behind, look_for_damage, one_by_one
from storage.leveldb.engine.torn_end import copy_without, cut, torn_ends

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from storage.base import Row

log = logging.getLogger(__name__)
KIB, MIB = 1 << 10, 1 << 20
#: LevelDB's ``config::kNumLevels``.
_LEVELS = 7


@dataclass(frozen=True, slots=True)
class Shape:
    """The layout of one LevelDB; sizes in bytes."""

    write_buffer_bytes: int
    """Rows kept in memory, in addition to the log, until they become a table file."""
    block_cache_bytes: int
    """Decompressed blocks cached for point reads; scans do not fill the cache."""
    max_file_bytes: int
    """Size of the table files that a merge writes; a new table may overlap ten times that size two levels below."""
    block_bytes: int = 4 * KIB
    max_open_files: int = 500
    """Table files held open, each as a descriptor or a mapping."""
    bloom_bits: int = 0
    """Bits per key of the filter that saves point reads of absent rows a disk access: 10 bits save 99 of 100."""
    paranoid_checks: bool = True
    """Refuse a log or manifest with a damaged record, instead of dropping it and the rest of its block."""
    packed: bool = False
    """True if rows of messages may be in packs; see ``storage.leveldb.engine.packs``."""


# The first byte of a key is the table's number; keys for the store's own use begin with 00 or 04.


_TABLE_BYTE = {table: bytes([table]) for table in Table}
_AFTER_ALL = b"\xff" * 8


class Readable:
    """Reads that ``Database`` and ``Snapshot`` share."""

    _tables: dict[Table, Any]
    _database: Any
    """plyvel's database or snapshot over all tables."""
    _has_packs: bool
    """True if rows of messages may be in packs."""
    _strips_prefix = False
    """True if its iterators can strip a prefix from keys."""

    def get(self, table: Table, key: bytes, *, packed: bool = True) -> bytes | None:
        """Return a row's value, None if there is none.

        Args:
          packed: False if the row is known to be in no pack.
        """
        if packed and self._has_packs and table is PACKED_TABLE:
            return self._unpacked(table, key)
        try:
            value: bytes | None = self._tables[table].get(key, verify_checksums=True)
        except FOREIGN as error:
            raise call_failed(error, "reading a row") from error
        return value

    def _unpacked(self, table: Table, key: bytes) -> bytes | None:
        """Return the value of a row that may be in a pack."""
        found = self.first_from(table, key)
        if isinstance(found, Pack):
            return found.get(key)
        return None if found is None or found[0] != key else found[1]

    def first_from(self, table: Table, key: bytes) -> Row | Pack | None:
        """Return the first row of a table from a key on, or the pack that it is in. Raises StoreError."""
        try:
            with closing(self._tables[table].iterator(start=key, verify_checksums=True)) as iterator:
                row: Row | None = next(iterator, None)
            if row is None:
                byte = _TABLE_BYTE[table]
                look_for_damage(self._database, byte + key, _after(byte))
            return Pack(*row) if row is not None and row[1][:1] == MARK else row
        except FOREIGN as error:
            raise call_failed(error, "reading a row") from error

    @contextmanager
    def rows(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        *,
        reverse: bool = False,
        values: bool = True,
        cache: bool = False,
        packed: bool = True,
        wanted: int = 0,
        largest: int = 0,
    ) -> Iterator[Iterable[Row]]:
        """Yield the rows of ``[start, stop)``; iterating raises plyvel's errors (``FOREIGN``).

        Args:
          values: False: every value is ``b""``, which is cheaper.
          cache: keep the blocks in memory.
          packed: False if there are known to be no packs among them.
          wanted: about how many rows the caller wants; 0 if unknown.
          largest: upper bound of the size of a row's value; 0 if unknown.
        """
        packed &= self._has_packs and table is PACKED_TABLE
        scan = RangeScan(
            *(self._database, self._tables[table], _TABLE_BYTE[table], start, stop),
            values=values,
            cache=cache,
            packed=packed,
            wanted=wanted,
            largest=largest,
        )
        prefix = b"" if reverse or not values else self._prefix_of(table, start, stop)
        if not (packed or prefix):
            with one_by_one(scan, reverse=reverse) as rows:
                yield rows
            return
        with closing(lists_down(scan) if reverse else lists_up(scan, prefix)) as lists:
            yield Blocks(lists)

    def _prefix_of(self, table: Table, start: bytes, stop: bytes) -> bytes:
        """Return the common part of all keys of ``[start, stop)`` before the position; empty if there may be none."""
        prefix = start[:-POSITION_BYTES] if table is PACKED_TABLE else b""
        return prefix if self._strips_prefix and stop.startswith(prefix) and is_of_topic(start) else b""


def _after(byte: bytes) -> bytes:
    """Return the first key after all keys of a table."""
    return bytes([byte[0] + 1])


class Snapshot(Readable):
    """A database in its state when ``Database.snapshot`` was called."""

    def __init__(self, database: Any, tables: dict[Table, Any], *, has_packs: bool) -> None:
        self._database = database
        self._has_packs = has_packs
        self._tables = {table: prefixed.snapshot() for table, prefixed in tables.items()}

    def close(self) -> None:
        """Release it. Idempotent."""
        for snapshot in self._tables.values():
            snapshot.close()


def _opened(path: Path, shape: Shape, *, create: bool, check: bool) -> Any:
    """Open plyvel's database. Raises StoreUnusable."""

    def attempt(path: Path) -> Any:
        if check and not create:
            check_files(path)
        try:
            if create:
                # LevelDB would make it too, but hides the reason for a failure: it reports that its lock is "not
                # found".
                path.mkdir(exist_ok=True)
            return plyvel.DB(
                str(path),
                create_if_missing=create,
                paranoid_checks=shape.paranoid_checks,
                write_buffer_size=shape.write_buffer_bytes,
                max_open_files=shape.max_open_files,
                lru_cache_size=shape.block_cache_bytes,
                block_size=shape.block_bytes,
                max_file_size=shape.max_file_bytes,
                bloom_filter_bits=shape.bloom_bits,
                # A block that would not become at least an eighth smaller is stored uncompressed.
                compression="snappy",
            )
        except FOREIGN as error:
            raise opening_failed(error, path) from error

    try:
        return attempt(path)
    except StoreDamaged as damaged:
        torn = _cut_torn_ends(path, attempt) if path.is_dir() else ()
        if not torn:
            raise
        log.warning(
            "a record torn by a power cut or a kill was skipped: it had not been acknowledged",
            extra={"files": [str(file) for file, _ in torn], "at": [at for _, at in torn], "why": damaged.detail},
        )
        return attempt(path)


def _cut_torn_ends(path: Path, attempt: Callable[[Path], Any]) -> Sequence[tuple[Path, int]]:
    """Cut torn records without which a copy of the database opens, and return them; empty if there are none."""
    try:
        torn = torn_ends(path)
        choices: list[Sequence[tuple[Path, int]]] = [[each] for each in torn]
        for chosen in [*choices, torn] if len(torn) > 1 else choices:
            with copy_without(path, chosen) as copy:
                try:
                    attempt(copy).close()
                except StoreDamaged:
                    continue
            for file, start in chosen:
                cut(file, start)
            return chosen
    except OSError as error:
        # Not damage: it is unknown whether leaving out a torn record would be enough.
        raise opening_failed(error, path) from error
    return ()


class _GuardedBatch:
    """The context of ``Database.batch``. A generator would cost each commit a microsecond more."""

    __slots__ = ("_database", "_real")

    def __init__(self, database: Database, real: Any) -> None:
        self._database = database
        self._real = real

    def __enter__(self) -> Any:
        return self._real.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self._real.__exit__(kind, error, tb)
        except BaseException as failed:
            self._database.write_failed(failed)
            raise
        if error is not None:
            self._database.write_failed(error)


class Database(Readable):
    """An open LevelDB. Methods block, are for threads, and raise StoreError. One thread at a time writes."""

    _strips_prefix = True

    def __init__(self, path: Path, shape: Shape, *, create: bool, check: bool = True) -> None:
        """Open ``path``; LevelDB replays its logs.

        Args:
          create: create the database if there is none.
          check: check for missing files first, since LevelDB does not notice them.

        Raises:
          StoreUnusable: one of its subclasses; without ``create`` a missing database is StoreDamaged.
        """
        self._db = _opened(path, shape, create=create, check=check)
        self._database = self._db
        self._has_packs = shape.packed
        self._path = path
        self._failed_write = ""
        # LevelDB begins another log when its buffer is full, so extending a log by more than a part of that is useless.
        self._log = NewestLog(path, min(STEP_BYTES, shape.write_buffer_bytes // 4))
        self._tables = {table: self._db.prefixed_db(byte) for table, byte in _TABLE_BYTE.items()}

    def batch(self, *, sync: bool) -> _GuardedBatch:
        """Return a batch to fill, written when the block ends: all or nothing.

        It has ``put`` and ``delete`` for whole keys, with the table's byte, and ``approximate_size``.

        Args:
          sync: wait until it is durable.

        Raises:
          StoreError: it failed, or an earlier one did; the database must be reopened.
        """
        if self._failed_write:
            # The log may end in a torn record: later records would be lost, or would make the log count as damaged.
            raise StoreError(f"a write failed before, and the database has not been reopened: {self._failed_write}")
        self._log.begins()
        try:
            return _GuardedBatch(self, self._db.write_batch(transaction=True, sync=sync))
        except BaseException as error:
            self.write_failed(error)
            raise

    def write_failed(self, error: BaseException) -> None:
        """Refuse all further batches. Raises StoreError in place of a foreign error."""
        if not isinstance(error, FOREIGN):
            self._failed_write = repr(error)
            return
        failed = call_failed(error, "writing")
        self._failed_write = failed.detail
        raise failed from error

    def make_room(self, size: int) -> None:
        """Extend the log before a batch of this size is written, so that its sync is cheaper.

        Every such batch must be synced before the next one: of several unsynced ones, a power cut could tear one that
        others follow.
        """
        self._log.take(size)

    @property
    def syncs_early(self) -> bool:
        """True if a batch may be written without a sync, to be made durable by ``sync_while``."""
        return SYNCS_EARLY and self._log.is_known

    def sync_while(self, work: Callable[[], object]) -> None:
        """Make the last batch durable, for which room was made. ``work`` runs during the sync and must not raise.

        Raises:
          StoreError: it failed; the database must be reopened.
        """
        try:
            syncing = self._log.begin_sync()
            try:
                work()
            finally:
                self._log.finish_sync(syncing)
        except BaseException as error:
            self.write_failed(error)
            raise

    def end_log(self) -> None:
        """Close the log's descriptor, because little more will be written. For the writing thread.

        Otherwise the log takes space while the database is open, even after LevelDB has removed it.
        """
        self._log.let_go()

    def snapshot(self) -> Snapshot:
        """Take a snapshot. For the writing thread, because it snapshots the tables one after the other."""
        return Snapshot(self._db, self._tables, has_packs=self._has_packs)

    def own_rows(self, start: bytes, stop: bytes) -> list[Row]:
        """Return the store's own rows of a range, with whole keys. Raises StoreError."""
        try:
            with closing(self._db.iterator(start=start, stop=stop, verify_checksums=True, fill_cache=False)) as rows:
                found = list(rows)
            look_behind(self._db, start, stop)
            if not found:
                look_for_damage(self._db, start, stop)
            return found
        except FOREIGN as error:
            raise call_failed(error, "reading the store's own rows") from error

    def outermost_own_key(self, start: bytes, stop: bytes, *, last: bool = False) -> bytes | None:
        """Return the first or last whole key of a range, None if it is empty. Raises StoreError."""
        try:
            # Verify checksums, and bypass the cache: blocks in the cache are never verified.
            iterator = self._db.iterator(
                **({"stop": stop} if last else {"start": start}),
                reverse=last,
                include_value=False,
                verify_checksums=True,
                fill_cache=False,
            )
            with closing(iterator) as keys:
                key: bytes | None = next(keys, None)
            if key is None:
                look_for_damage(self._db, start, stop, reverse=last)
        except FOREIGN as error:
            raise call_failed(error, "reading the store's own rows") from error
        return key if key is not None and start <= key < stop else None

    def compact(self, table: Table, start: bytes, stop: bytes) -> None:
        """Rewrite the files of a range without the removed rows."""
        byte = _TABLE_BYTE[table]
        try:
            self._db.compact_range(start=byte + start, stop=byte + stop)
        except FOREIGN as error:
            raise call_failed(error, "compacting") from error

    def flush_memory(self) -> None:
        """Write the rows in memory to a table file, which empties the log.

        LevelDB does not report if that fails, but then it refuses every later batch. So rows of unsynced batches are
        durable only once a synced batch after this has succeeded; it may be empty.
        """
        self._log.let_go()
        try:
            # A range after all keys: LevelDB flushes its memory, and finds no file to merge.
            self._db.compact_range(start=_AFTER_ALL, stop=_AFTER_ALL + b"\xff")
        except FOREIGN as error:
            raise call_failed(error, "writing a table") from error

    def sync(self) -> None:
        """Make earlier unsynced batches durable."""
        with self.batch(sync=True) as batch:
            batch.delete(_AFTER_ALL)

    def table_count(self) -> int:
        """Return the number of its tables, including those whose files are missing."""
        return sum(int(self._db.get_property(b"leveldb.num-files-at-level%d" % level) or 0) for level in range(_LEVELS))

    def bytes_on_disk(self) -> int:
        """Return the size of its files."""
        return size_of(self._path)

    def close(self) -> None:
        """Close it; waits for a merge in progress. No other thread may be inside. Idempotent."""
        try:
            self._log.let_go()
        finally:
            self._db.close()


def size_of(path: Path) -> int:
    """Return the disk space of the files in a folder; 0 if there is none."""
    size = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            # LevelDB may remove a file in between.
            with suppress(OSError):
                found = entry.stat()
                # A log is longer than its records; the rest takes no space.
                size += min(found.st_size, found.st_blocks * 512) if entry.name.endswith(".log") else found.st_size
    return size

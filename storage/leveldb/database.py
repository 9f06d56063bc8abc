"""One LevelDB, in blocking calls: its sizes, batches, iterators, and plyvel's errors.

A store has several: the database of the metadata, and a volume for every stretch of messages.
"""

from __future__ import annotations

import logging
import os
import re
import time
from bisect import bisect_left
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import plyvel

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import stop_after
from plainsong.protocol.rows import JOINED_VALUE, PLAIN, PLAIN_GAP, PlainItems
from storage.base import GROWTH, Blocks, StoreDamaged, StoreError, Unreadable
from storage.directory import DAMAGED_HINT, message_of, opening_failed
from storage.leveldb.manifest import check_files
from storage.leveldb.newest_log import STEP_BYTES, SYNCS_EARLY, NewestLog
from storage.leveldb.packs import MARK, PACKED_TABLE, Pack, PlainPart, is_of_topic
from storage.leveldb.shrinking import old_logs
from storage.leveldb.torn_end import left_out, torn_end

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from pathlib import Path
    from types import TracebackType

    from storage.base import Row

S = TypeVar("S")
log = logging.getLogger(__name__)
KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """How LevelDB is to lay out one database; sizes in bytes."""

    write_buffer_bytes: int
    """Rows kept in memory, besides the log, before they become a table file."""
    block_cache_bytes: int
    """Decompressed blocks kept for point reads; scans do not fill it."""
    max_file_bytes: int
    """The size of a table file that a merge writes, and a tenth of what a new table may overlap two levels below."""
    block_bytes: int = 4 * KIB
    max_open_files: int = 500
    """Table files held open, each a descriptor or a mapping."""
    bloom_bits: int = 0
    """Bits per key that spare a point read of an absent row its disk access: 10 spare 99 of 100."""
    paranoid_checks: bool = True
    """Refuse a log or manifest that has a damaged record, instead of dropping it with what follows in its block."""
    compressed: bool = True
    """Whether blocks that are written are compressed; each says whether it is, so that any can be read."""
    packed: bool = False
    """Whether rows of messages may be in packs; see ``storage.leveldb.packs``."""


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
    ("No such file", "a file of the store is missing: put it back from a copy, or restore a backup"),
    ("Input/output error", "the disk fails: see the kernel's log, and have a copy ready"),
)
#: Texts in LevelDB's messages about a block, or a table, whose neighbours may be read.
_UNREADABLE = ("Corruption", "Input/output error", "No such file")


#: A failure that comes again within so long is logged at debug: looking for the end of a damaged block meets it some
#: hundred times.
QUIET_S = 10.0
#: LevelDB's ``config::kNumLevels``.
_LEVELS = 7


class _Failures:
    """The failure that was logged last, as an error."""

    def __init__(self) -> None:
        self._last = ""
        self._at_s = 0.0

    def level_of(self, text: str) -> int:
        now_s = time.monotonic()
        if text == self._last and now_s - self._at_s < QUIET_S:
            return logging.DEBUG
        self._last, self._at_s = text, now_s
        return logging.ERROR


_failures = _Failures()


def call_failed(error: BaseException, doing: str) -> StoreError:
    """The error to raise when a call into an open database failed."""
    text = message_of(error)
    log.log(_failures.level_of(f"{doing}: {text}"), "the store failed", extra={"doing": doing, "why": text})
    hint = next((hint for words, hint in _RUNNING if words in text), "")
    kind = Unreadable if any(words in text for words in _UNREADABLE) else StoreError
    return kind(f"{doing}: {without_folders(text)}", hint=hint)


def without_folders(text: str) -> str:
    """A text for clients: they learn what failed; the log alone has the paths of files."""
    return _FOLDERS.sub("", text)


# --- database --------------------------------------------------------------------------------------
#
# The first byte of a key is the table's number; keys of the store's own use begin with 00 or 04.


_TABLE_BYTE = {table: bytes([table]) for table in Table}
_AFTER_ALL = b"\xff" * 8


class Readable:
    """The rows of a database, as they are or as they were: what ``Database`` and ``Snapshot`` share."""

    _tables: dict[Table, Any]
    _database: Any
    """That of plyvel, with all tables."""
    _has_packs: bool
    """Whether rows of messages may be in packs."""
    _takes_off = False
    """Whether its iterators can take off a prefix of keys."""

    def get(self, table: Table, key: bytes, *, packed: bool = True) -> bytes | None:
        """A row's value, None if there is none.

        Args:
          packed: False: it is known that it is in no pack.
        """
        if packed and self._has_packs and table is PACKED_TABLE:
            return self._unpacked(table, key)
        try:
            value: bytes | None = self._tables[table].get(key, verify_checksums=True)
        except FOREIGN as error:
            raise call_failed(error, "reading a row") from error
        return value

    def _unpacked(self, table: Table, key: bytes) -> bytes | None:
        """The value of a row that may be in a pack."""
        found = self.first_from(table, key)
        if isinstance(found, Pack):
            return found.get(key)
        return None if found is None or found[0] != key else found[1]

    def first_from(self, table: Table, key: bytes) -> Row | Pack | None:
        """The first row of a table from a key on, or the pack that it is in. Raises StoreError."""
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
    ) -> Iterator[Iterable[Row]]:
        """The rows of ``[start, stop)``; iterating raises plyvel's errors (``FOREIGN``).

        Args:
          values: False: every value is ``b""``, which is cheaper.
          cache: whether to keep the blocks in memory.
          packed: False: it is known that there are no packs among them.
          wanted: rows that are asked for before others; 0: it is not known how many.
        """
        if table is PACKED_TABLE:
            packed &= self._has_packs
            prefix = b"" if reverse or not values else self._prefix_of(table, start, stop)
            if packed or prefix:
                if reverse:
                    lists = self._blocks_down(table, start, stop, values, cache, wanted)
                else:
                    lists = self._lists_up(table, start, stop, prefix, values, cache, packed, wanted)
                with closing(lists):
                    yield Blocks(lists)
                return
        # Closed here and not by the garbage collector: an iterator holds table files, and the handle.
        with closing(
            self._tables[table].iterator(
                # plyvel 1.5.1 finds nothing on the way down when the only key of a range is its start.
                start=None if reverse else start,
                stop=stop,
                reverse=reverse,
                include_value=values,
                verify_checksums=True,
                fill_cache=cache,
            )
        ) as iterator:
            first = next(iterator, None)
            byte = _TABLE_BYTE[table]
            if first is None:
                look_for_damage(self._database, byte + start, byte + stop, reverse=reverse)
                yield ()
                return
            rest = _damage_behind(self._database, byte + start, byte + stop, reverse=reverse)
            found = chain((first,), iterator, rest)
            rows = found if values else zip(found, repeat(b""))
            yield takewhile(lambda row: row[0] >= start, rows) if reverse else rows

    def _prefix_of(self, table: Table, start: bytes, stop: bytes) -> bytes:
        """What the keys of all rows of ``[start, stop)`` have before the position; empty if that may differ."""
        prefix = start[:-POSITION_BYTES]
        return prefix if self._takes_off and stop.startswith(prefix) and is_of_topic(start) else b""

    def _lists_up(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        prefix: bytes,
        values: bool,
        cache: bool,
        packed: bool,
        wanted: int,
    ) -> Generator[Sequence[Row], None, None]:
        """The rows of ``[start, stop)``, of which some may be in packs, some at a time.

        plyvel takes off a prefix that all keys have, and each row that is plain is joined as it comes: no pair, no key
        and no slice is made of it. Among rows that are not plain that would be work for nothing: behind them come pairs
        again, until a whole list of them is plain.
        """
        byte = _TABLE_BYTE[table]
        rows = self._tables[table].prefixed_db(prefix) if prefix else self._tables[table]
        from_, until = start[len(prefix) :], stop[len(prefix) :]
        # The pack that has the last row of a range ends behind the range.
        bounds = {"start": from_} if packed else {"start": from_, "stop": until}
        end = byte + stop if not packed else stop_after(byte + prefix)
        with closing(rows.iterator(verify_checksums=True, fill_cache=cache, **bounds)) as iterator:
            begin = next(iterator, None)
            if begin is None:
                look_for_damage(self._database, byte + start, end)
                return
            behind = _damage_behind(self._database, byte + start, end, reverse=False)
            pairs = chain((begin,), iterator, behind)
            joined = map(PLAIN_GAP.join, pairs)
            joins = bool(prefix) and not packed
            size = 1 if packed else max(1, min(wanted, _LIST_ROWS))
            step = _step_behind(len(begin[1]))
            while True:
                block: Sequence[Row] = ()
                some: list[Row] = []
                if joins:
                    items, item_bytes, failed = _some(joined, size, len, step)
                    plain = _plain_before(items)
                    if plain < len(items):
                        joins, some = False, list(PlainItems(prefix, items[plain:]))
                        block = PlainItems(prefix, items[:plain])
                    else:
                        block = PlainItems(prefix, items, item_bytes)
                    if block:
                        yield from _up_to(stop, block)
                else:
                    some, _, failed = _some(pairs, size, _value_bytes, step)
                    joins = bool(prefix) and len(some) >= _JOINED_ROWS and _are_plain(some)
                    if prefix:
                        some = [(prefix + key, value) for key, value in some]
                size = min(size * GROWTH, _LIST_ROWS)
                if some:
                    block = some
                    if not packed or max(map(_VALUE, some)) < MARK:
                        yield from _up_to(stop, some if values else [(key, b"") for key, _ in some])
                    else:
                        yield from _taken_apart(some, start, stop, values=values, wanted=wanted)
                        size = 1
                if block and block[-1][0] >= stop:
                    return
                if failed is not None:
                    raise failed
                if not block:
                    return
                step = _step_behind(len(block[-1][1]))

    def _blocks_down(
        self, table: Table, start: bytes, stop: bytes, values: bool, cache: bool, wanted: int
    ) -> Generator[Sequence[Row], None, None]:
        """The rows of ``[start, stop)``, of which some are in packs, some at a time."""
        byte = _TABLE_BYTE[table]
        with closing(self._stored(table, cache, start=stop)) as iterator:
            above = next(iterator, None)
        if above is not None and above[1][:1] == MARK:
            yield from _taken_apart([above], start, stop, values=values, reverse=True, wanted=wanted)
        with closing(self._stored(table, cache, stop=stop, reverse=True)) as iterator:
            begin = next(iterator, None)
            if begin is None:
                look_for_damage(self._database, byte + start, byte + stop, reverse=True)
                return
            behind = _damage_behind(self._database, byte + start, byte + stop, reverse=True)
            for row in chain((begin,), iterator, behind):
                yield from _taken_apart((row,), start, stop, values=values, reverse=True, wanted=wanted)
                if row[0] < start:
                    return

    def _stored(self, table: Table, cache: bool, **bounds: Any) -> Any:
        """plyvel's iterator over rows as LevelDB has them."""
        return self._tables[table].iterator(verify_checksums=True, fill_cache=cache, **bounds)


_KEY, _VALUE = itemgetter(0), itemgetter(1)
#: Rows of LevelDB that are read together without a look at what they take: what is read ahead takes memory.
_TOGETHER = 16
#: Unless they are larger.
_TOGETHER_BYTES = 4 * KIB
#: The longest list of rows, and about how many bytes it has at most. A page that ends within one has read the rest for
#: nothing, and each list costs whoever takes it some microseconds.
_LIST_ROWS = 500
_LIST_BYTES = 256 * KIB
#: Rows in a list that is all plain, at least, before others are joined.
_JOINED_ROWS = 16
#: Rows of a pack that are made before the others, at least, for who wants a few first.
_FEW_ROWS = 16
_PLAIN = bytes([PLAIN])
_flags_of = itemgetter(JOINED_VALUE)


def _value_bytes(row: Row) -> int:
    return len(row[1])


def _some(
    stored: Iterator[S], most: int, bytes_of: Callable[[S], int], step: int
) -> tuple[list[S], int, BaseException | None]:
    """The next rows as LevelDB has them, so many at most, how many bytes they are, and the error that ended them.

    Args:
      step: how many to read before a look at what they take: ``_step_behind`` the row before them.
    """
    some: list[S] = []
    read, size = 0, 0
    try:
        while read < most and size < _LIST_BYTES:
            # What came before an error stays in the list.
            some.extend(islice(stored, min(step, most - read)))
            if len(some) == read:
                break
            size += sum(map(bytes_of, some[read:]))
            read = len(some)
            step = _step_behind(bytes_of(some[-1]))
    except FOREIGN as error:
        return some, size + sum(map(bytes_of, some[read:])), error
    return some, size, None


def _step_behind(size: int) -> int:
    """How many rows are read together behind one of so many bytes."""
    return _TOGETHER if size <= _TOGETHER_BYTES else 1


def _plain_before(items: list[bytes]) -> int:
    """How many joined rows are plain before the first one that is not."""
    try:
        if max(map(_flags_of, items), default=PLAIN) == PLAIN:
            return len(items)
    except IndexError:
        pass  # a value without a byte
    return next(index for index, item in enumerate(items) if item[JOINED_VALUE : JOINED_VALUE + 1] != _PLAIN)


def _are_plain(rows: list[Row]) -> bool:
    """Whether all of them have a payload and nothing else."""
    return all(map(_VALUE, rows)) and max(map(_VALUE, rows))[0] == PLAIN


def _up_to(stop: bytes, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Those before a key."""
    if rows[-1][0] >= stop:
        rows = rows[: bisect_left(rows, stop, key=_KEY)]
    if rows:
        yield rows


def _taken_apart(
    stored: Iterable[Row], start: bytes, stop: bytes, *, values: bool, wanted: int, reverse: bool = False
) -> Iterator[Sequence[Row]]:
    """The rows in rows as LevelDB has them, in the order in which these come; those of ``[start, stop)``."""
    plain: list[Row] = []
    for key, value in stored:
        if value[:1] != MARK:
            if start <= key < stop:
                plain.append((key, value if values else b""))
            continue
        if plain:
            yield plain
            plain = []
        pack = Pack(key, value)
        low, end = pack.index(start), pack.index(stop)
        part = max(wanted, _FEW_ROWS) if wanted else end - low
        if reverse:
            if part < end - low:
                yield pack.rows(end - part, end, values=values)[::-1]
                end -= part
            yield pack.rows(low, end, values=values)[::-1]
        elif values:
            for first, after, is_plain in pack.stretches(low, end):
                if is_plain:
                    yield PlainPart(pack, first, after)
                    continue
                few = min(first + part, after)
                yield pack.rows(first, few)
                if few < after:
                    yield pack.rows(few, after)
        else:
            if part < end - low:
                yield pack.rows(low, low + part, values=False)
                low += part
            yield pack.rows(low, end, values=False)
    if plain:
        yield plain


def _after(byte: bytes) -> bytes:
    """The key behind all of a table."""
    return bytes([byte[0] + 1])


class Snapshot(Readable):
    """A database as it was when ``Database.snapshot`` was called, until it is closed."""

    def __init__(self, database: Any, tables: dict[Table, Any], *, has_packs: bool) -> None:
        self._database = database
        self._has_packs = has_packs
        self._tables = {table: prefixed.snapshot() for table, prefixed in tables.items()}

    def close(self) -> None:
        """Let go of it. Idempotent."""
        for snapshot in self._tables.values():
            snapshot.close()


def _opened(path: Path, shape: Shape, *, create: bool) -> Any:
    """plyvel's database. Raises StoreUnusable."""

    def attempt() -> Any:
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
            compression="snappy" if shape.compressed else None,
        )

    try:
        return attempt()
    except FOREIGN as error:
        failed = opening_failed(error, path)
        torn = torn_end(path) if isinstance(failed, StoreDamaged) else None
        if torn is None:
            raise failed from error
        file, start = torn
        lost_bytes = file.stat().st_size - start
        try:
            with left_out(file, start):
                found = attempt()
        except FOREIGN:
            raise failed from error
    log.warning(
        "a commit that a power cut or a kill has torn, and that was not acknowledged, was left out",
        extra={"file": str(file), "at": start, "bytes": lost_bytes},
    )
    return found


class _GuardedBatch:
    """``Database.batch``: as a generator it would take a microsecond more of each commit."""

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
    """An open LevelDB. Methods block, are for threads, and raise StoreError; one thread at a time writes."""

    _takes_off = True

    def __init__(self, path: Path, shape: Shape, *, create: bool, check: bool = True) -> None:
        """Open ``path``; LevelDB reads its log again.

        Args:
          create: create the database if there is none.
          check: look for missing files first, since LevelDB does not notice them.

        Raises:
          StoreUnusable: one of its kinds; without ``create`` a missing database is StoreDamaged.
        """
        if check and not create:
            check_files(path)
        self._db = _opened(path, shape, create=create)
        self._database = self._db
        self._has_packs = shape.packed
        self._path = path
        self._failed_write = ""
        with suppress(RuntimeError):  # there is no further thread: logs are closed at once then
            old_logs.start()
        # LevelDB begins another log when its buffer is full: more room than a part of it would be of no use.
        self._log = NewestLog(path, min(STEP_BYTES, shape.write_buffer_bytes // 4))
        self._tables = {table: self._db.prefixed_db(byte) for table, byte in _TABLE_BYTE.items()}

    def batch(self, *, sync: bool) -> _GuardedBatch:
        """A batch to fill, written when the block ends: all or nothing.

        It has ``put`` and ``delete`` for whole keys, with the table's byte, and ``approximate_size``.

        Args:
          sync: wait until it is durable.

        Raises:
          StoreError: it failed, or one before it did; the database must be opened again.
        """
        if self._failed_write:
            # The log may end in a torn record: what is written behind it is lost, or makes it unreadable.
            raise StoreError(f"a write failed before, and the database was not opened again: {self._failed_write}")
        self._log.begins()
        try:
            return _GuardedBatch(self, self._db.write_batch(transaction=True, sync=sync))
        except BaseException as error:
            self.write_failed(error)
            raise

    def write_failed(self, error: BaseException) -> None:
        """Nothing is written any more. Raises StoreError instead of a foreign error."""
        if not isinstance(error, FOREIGN):
            self._failed_write = repr(error)
            return
        failed = call_failed(error, "writing")
        self._failed_write = failed.detail
        raise failed from error

    def make_room(self, size: int) -> None:
        """Keep the log longer than what is written to it, which makes a sync cheaper; before a batch of this size is.

        Every batch is to be synced then: of several that were not, a power cut could tear one that has others behind it.
        """
        self._log.take(size)

    @property
    def syncs_early(self) -> bool:
        """Whether a batch may be written without a sync, for ``sync_beside`` to make it durable."""
        return SYNCS_EARLY and self._log.is_known

    def sync_beside(self, work: Callable[[], object]) -> None:
        """Make the last batch durable, for which room was made; the disk works on it while ``work`` runs, which never raises.

        Raises:
          StoreError: it failed; the database must be opened again.
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
        """Let go of the log: what is still written is little. For the thread that writes; without, a log takes space for as
        long as the database is open, although LevelDB has removed it.
        """
        self._log.let_go()

    def snapshot(self) -> Snapshot:
        """The tables as they are now. For the thread that writes: each table is looked at in turn."""
        return Snapshot(self._db, self._tables, has_packs=self._has_packs)

    def own_rows(self, start: bytes, stop: bytes) -> list[Row]:
        """Rows of the store's own use, with whole keys."""
        try:
            with closing(self._db.iterator(start=start, stop=stop, verify_checksums=True, fill_cache=False)) as rows:
                found = list(chain(rows, _damage_behind(self._db, start, stop, reverse=False)))
            if not found:
                look_for_damage(self._db, start, stop)
            return found
        except FOREIGN as error:
            raise call_failed(error, "reading the store's own rows") from error

    def last_own_key(self, start: bytes, stop: bytes) -> bytes | None:
        """The last whole key of a range."""
        try:
            # Verified, and not kept: a block in the cache is verified by nobody.
            iterator = self._db.iterator(
                stop=stop, reverse=True, include_value=False, verify_checksums=True, fill_cache=False
            )
            with closing(iterator) as keys:
                key: bytes | None = next(keys, None)
            if key is None:
                look_for_damage(self._db, start, stop, reverse=True)
        except FOREIGN as error:
            raise call_failed(error, "reading the store's own rows") from error
        return key if key is not None and key >= start else None

    def compact(self, table: Table, start: bytes, stop: bytes) -> None:
        """Rewrite the files of a range without the rows that were removed."""
        byte = _TABLE_BYTE[table]
        try:
            self._db.compact_range(start=byte + start, stop=byte + stop)
        except FOREIGN as error:
            raise call_failed(error, "compacting") from error

    def flush_memory(self) -> None:
        """Write what is in memory to a table file, so that the log is empty."""
        self._log.let_go_of_all()
        try:
            # Behind all keys: LevelDB writes its memory, and finds no file to merge.
            self._db.compact_range(start=_AFTER_ALL, stop=_AFTER_ALL + b"\xff")
        except FOREIGN as error:
            raise call_failed(error, "writing a table") from error

    def sync(self) -> None:
        """Make durable what was written without waiting for the disk."""
        with self.batch(sync=True) as batch:
            batch.delete(_AFTER_ALL)

    def files_at_level_0(self) -> int:
        """Table files that LevelDB has not merged; at four it merges them."""
        return int(self._db.get_property(b"leveldb.num-files-at-level0") or 0)

    def table_count(self) -> int:
        """How many tables it has, whether or not their files are there."""
        return sum(int(self._db.get_property(b"leveldb.num-files-at-level%d" % level) or 0) for level in range(_LEVELS))

    def memory_bytes(self) -> int:
        """What LevelDB holds in memory: rows that are in no table yet, and cached blocks."""
        return int(self._db.get_property(b"leveldb.approximate-memory-usage") or 0)

    def bytes_on_disk(self) -> int:
        """The sizes of its files."""
        return size_of(self._path)

    def close(self) -> None:
        """Close; waits for a merge that is under way. No other thread may be inside. Idempotent."""
        self._log.close()
        self._db.close()


def look_for_damage(database: Any, start: bytes, stop: bytes, *, reverse: bool = False) -> None:
    """Raise what LevelDB has against the rows at an end of a range in which none were found.

    plyvel's iterators (1.5.1) end without an error where the block they begin in is damaged and the last one there is;
    in its raw iterators each step is checked.
    """
    with closing(database.raw_iterator(verify_checksums=True, fill_cache=False)) as raw:
        _seek_to_first(raw, start, stop, reverse=reverse)


def _seek_to_first(raw: Any, start: bytes, stop: bytes, *, reverse: bool) -> None:
    """To the row at which an iterator over the range begins, in its direction."""
    if not reverse:
        raw.seek(start)
        return
    raw.seek(stop)
    if raw.valid():
        raw.prev()
    else:
        raw.seek_to_last()


def _damage_behind(database: Any, start: bytes, stop: bytes, *, reverse: bool) -> Iterator[Row]:
    """No rows, but what LevelDB has against those behind the last one that an iterator found, in its direction.

    plyvel's iterators (1.5.1) end without an error, too, where the next block is damaged and the last one there is.
    """
    with closing(database.raw_iterator(verify_checksums=True, fill_cache=False)) as raw:
        try:
            raw.seek(start if reverse else stop)
            if reverse and raw.valid():
                raw.prev()
            if raw.valid():
                return  # a row behind the range: the iterator came to it, and was checked there
            if reverse:
                raw.seek_to_first()
            else:
                raw.seek_to_last()
        except FOREIGN:
            # Whether that is in the range, only its own rows tell.
            _seek_to_first(raw, start, stop, reverse=reverse)
            while raw.valid() and (raw.key() >= start if reverse else raw.key() < stop):
                raw.prev() if reverse else raw.next()
    yield from ()


def size_of(path: Path) -> int:
    """The bytes that the files in a folder take; 0 if there is none."""
    size = 0
    with suppress(OSError), os.scandir(path) as entries:
        for entry in entries:
            # LevelDB removes files meanwhile.
            with suppress(OSError):
                found = entry.stat()
                # A log is longer than what was written to it, and takes no space for the rest.
                size += min(found.st_size, found.st_blocks * 512) if entry.name.endswith(".log") else found.st_size
    return size

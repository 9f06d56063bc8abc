"""The three tables of an open data directory: messages and payloads in volumes, metadata beside them.

``storage.leveldb.store`` calls these methods from worker threads, one writer at a time. What a commit changes is one
batch in the newest volume, synced: its rows, and an entry of the journal for the metadata. Rows of sealed volumes that
a commit removes or rolls back are changed in place, each volume by a synced batch of its own, behind what the commit has
before: the newest volume would otherwise have a second version of old rows, and every reader would have to merge it with
all volumes between.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections import deque
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table
from storage.base import StoreConflict, StoreDamaged, StoreError, StoreUnusable, chunks
from storage.directory import METADATA_NAME, VOLUMES_NAME, opening_failed
from storage.leveldb.database import Database
from storage.leveldb.errors import FOREIGN, call_failed, without_folders
from storage.leveldb.manifest import check_files
from storage.leveldb.metadata import ROW, Changes, Metadata, dead_key, encode_entry
from storage.leveldb.packs import MARK, PACKED_TABLE, RowEdits, are_many, packs_of, stored
from storage.leveldb.tidying import Stopped, tidy
from storage.leveldb.upkeep import UpkeepThread
from storage.leveldb.volume import JOURNAL
from storage.leveldb.volumes import Volumes, make_first, remove_packed
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from plainsong.protocol.effects import Expect
    from storage.base import Row
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume import Volume

log = logging.getLogger(__name__)
#: Scans that ask for this few rows first are point reads in disguise, and may fill the block cache.
_FEW_ROWS = 8
_MEASURE_EVERY_S = 1.0
#: For so long a scan has its turn while others wait. Two that pass it on at every list, which is one pack, read half of
#: what one does alone: each time a thread has to wake.
TURN_S = 0.001
#: A scan that finds the event loop at work gives it the interpreter lock for so many times as long as its last list
#: took, or until the loop sleeps. Measured with two readers far behind, beside 5000 publishes a second: the p99 of these
#: falls from 16 to 25 ms to 10 to 14, and the readers, whose turns are longer, still read half as much again as before.
PATIENCE = 4
_NAP_S = 0.00003
#: Operations on rows; the others are the store's own.
_OF_TABLES = (Put, Delete)
_TABLE_BYTE = {table: bytes([table]) for table in Table}


def _give_way(loop_runs: Callable[[], bool], seconds: float) -> None:
    """Let an event loop that is at work have the interpreter lock, for so long at most."""
    until_s = time.perf_counter() + seconds
    while loop_runs() and time.perf_counter() < until_s:
        nap(_NAP_S)


class Turn:
    """A lock that threads have in the order in which they asked for it.

    A thread that gives up a ``threading.Lock`` and asks for it again has it again, since it runs and the others sleep: a
    poll of one message would wait for the whole of a large page.
    """

    __slots__ = ("_held", "_mutex", "_waiting")

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            given = threading.Lock()
            given.acquire()
            self._waiting.append(given)
        given.acquire()  # whoever has the turn gives it up in the end

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


@dataclass(slots=True)
class Turned(Put):
    """An operation of the store itself: rows of the newest volume, as a rollback leaves them."""


@dataclass(slots=True)
class MarkDead:
    """An operation of the store itself: all rows of these ranges are dead, and nothing will be written there."""

    table: Table
    ranges: Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class ForgetDead:
    """An operation of the store itself: no volume has rows in these dead ranges any more."""

    ranges: Sequence[tuple[Table, bytes, bytes]]


@dataclass(slots=True)
class Seal:
    """An operation of the store itself: write to another volume from now on, since all rows of this one are dead."""

    volume: Volume


@dataclass(slots=True)
class Pin:
    """An operation of the store itself: a view of everything behind this batch."""

    max_s: float
    view: PinnedView | None = None


#: What a batch is made of; a rollback has become puts before.
Stored = Put | Delete | MarkDead | ForgetDead | Seal | Pin


@dataclass(frozen=True, slots=True)
class TidySteps:
    """What tidying did, and what it leaves to the thread that commits."""

    removed: int
    """Volumes that are gone."""
    operations: Sequence[Stored]
    more: bool
    """Whether there is more to do behind these operations."""


class LevelDBTables:
    """An open data directory. Methods block, are for threads, and raise StoreError."""

    def __init__(self, directory: Path, options: LevelDBOptions, *, check: bool = True) -> None:
        """Open what ``create`` made, and bring the metadata up to date from the journal.

        Args:
          check: look for missing files first, since LevelDB does not notice them.
        Raises:
          StoreUnusable: one of its kinds.
        """
        self._options = options
        if check:
            check_files(directory / METADATA_NAME)
        with ExitStack() as opened:
            self.volumes = Volumes.open(directory / VOLUMES_NAME, options, check=check)
            opened.callback(self.volumes.close)
            database = Database(directory / METADATA_NAME, options.metadata_shape, create=False, check=check)
            opened.callback(database.close)
            try:
                self.metadata = Metadata(database)
                self.volumes.catch_up(self.metadata)
            except StoreError as error:
                raise StoreUnusable(error.detail, hint=error.hint) from error
            except OSError as error:
                raise opening_failed(error, directory) from error
            opened.pop_all()
        self.upkeep = UpkeepThread()
        #: Scans take turns, list by list: the one that iterates, and takes what it finds, has this lock.
        self._turn = Turn()
        #: A write has failed: nobody knows what is in the newest volume.
        self._failed = False
        self._measure_at_s = 0.0
        #: The size on disk.
        self.bytes = 0
        self.measure()

    @staticmethod
    def create(directory: Path, options: LevelDBOptions) -> None:
        """Make an empty one; what an attempt that was cut off has left is used. Raises StoreUnusable."""
        metadata = directory / METADATA_NAME
        try:
            Database(metadata, options.metadata_shape, create=True).close()
        except StoreDamaged:
            # LevelDB does not sync the manifest of a new database before it names it: a power cut can leave one that
            # is empty. Nothing was ever stored here, or the directory would have been refused.
            shutil.rmtree(metadata)
            Database(metadata, options.metadata_shape, create=True).close()
        make_first(directory / VOLUMES_NAME, options)

    @property
    def leaving(self) -> bool:
        """Set before the tables are closed: scans stop at their next list, and nothing is done at leisure."""
        return self.volumes.leaving

    @leaving.setter
    def leaving(self, is_leaving: bool) -> None:
        self.volumes.leaving = is_leaving

    def close(self) -> None:
        """Write the metadata that waits, and close. No other thread may be inside."""
        self.upkeep.close()
        if not self._failed and self.upkeep.failed is None:
            try:
                self.metadata.checkpoint()
                self.volumes.newest.write_index()
            except (StoreError, OSError) as error:
                log.warning("the next start reads the newest volume through", extra={"why": str(error)})
        self.volumes.close()
        self.metadata.close()

    # --- reading -------------------------------------------------------------------------------

    def get(self, table: Table, key: bytes, view: PinnedView | None = None) -> bytes | None:
        """A row's value, None if there is none; now, or in a view."""
        if table is not Table.METADATA:
            return self.volumes.get(table, key, view)
        return self.metadata.get(key) if view is None else view.metadata.get(table, key)

    def file_of(self, table: Table, key: bytes) -> str | None:
        """Where the row with this key would be, relative to the data directory; None: nowhere."""
        if table is Table.METADATA:
            return METADATA_NAME
        places = self.volumes.places(table, key)
        if not places:
            return None
        folder, database = places[-1].path, places[-1].database
        files = [*folder.glob("*.ldb"), *folder.glob("*.sst")]
        # Where another table is missing, that is the one.
        is_one = len(files) == 1 and (database is None or database.table_count() == 1)
        return str((files[0] if is_one else folder).relative_to(folder.parent.parent))

    def compare(self, expect: Sequence[Expect]) -> None:
        """Raise StoreConflict for the first expectation that does not hold."""
        for wanted in expect:
            if self.get(wanted.table, wanted.key) != wanted.value:
                raise StoreConflict(f"row {wanted.key.hex()} of the {wanted.table.name.lower()} table has changed")

    def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
        between: Callable[[], None] = lambda: None,
        loop_runs: Callable[[], bool] = lambda: False,
        view: PinnedView | None = None,
    ) -> None:
        """See ``Store.scan``, now or in a view.

        Args:
          between: is called between lists, and ends the scan by raising.
          loop_runs: whether the event loop is in the middle of a turn, and so wants the interpreter lock.
        """
        with closing(self._chunks(table, start, stop, reverse, first_chunk, values, view)) as lists:
            while True:
                # plyvel releases the interpreter lock at every row, so two threads that iterate at once pass it
                # back and forth row by row: four readers together had half the throughput of one. What a list is fed
                # to holds the interpreter lock all the time, so that it belongs to the turn: the event loop, which
                # wants that lock after each system call, then waits for one reader and not for all of them.
                with self._turn:
                    until_s = time.perf_counter() + TURN_S
                    while (began_s := time.perf_counter()) < until_s:
                        chunk = next(lists, None)
                        if chunk is None or not feed(chunk):
                            return
                        between()
                        if self.leaving:
                            raise StoreError("the store was closed or opened again during a scan", hint="ask again")
                        _give_way(loop_runs, PATIENCE * (time.perf_counter() - began_s))

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
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        reverse: bool,
        first_chunk: int,
        values: bool,
        view: PinnedView | None = None,
    ) -> Generator[Sequence[Row], None, None]:
        if start >= stop:
            return
        cache = first_chunk <= _FEW_ROWS
        try:
            rows: AbstractContextManager[Iterable[Row]]
            if table is not Table.METADATA:
                with self.volumes.chunks(
                    table, start, stop, first_chunk, reverse=reverse, values=values, cache=cache, view=view
                ) as lists:
                    yield from lists
                return
            if view is not None:
                rows = view.metadata.rows(table, start, stop, reverse=reverse, values=values, cache=cache)
            else:
                rows = self.metadata.rows(start, stop, reverse=reverse, values=values, cache=cache)
            with rows as found:
                yield from chunks(iter(found), first_chunk)
        except FOREIGN as error:
            raise call_failed(error, "scanning") from error

    # --- writing -------------------------------------------------------------------------------

    def write(self, operations: Sequence[Stored]) -> None:
        """All operations as one synced batch: all or nothing, but rows of sealed volumes are removed behind it.

        After an exception the tables must be opened again.
        """
        self._write_or_fail(operations)
        self.measure_if_due()

    def write_small(self, operations: Sequence[Stored], beside: Callable[[], object]) -> None:
        """As ``write``, and ``end_group`` behind it, for puts of new rows after which ``is_quick`` still holds.

        Args:
          beside: what there is to do while the disk works, once at most; it neither raises nor asks the tables for anything.
        """
        self._write_or_fail(operations, partial(self._beside, beside))

    def _beside(self, work: Callable[[], object]) -> None:
        work()
        self._prepare_if_filling()
        self.measure_if_due()

    def _write_or_fail(self, operations: Sequence[Stored], beside: Callable[[], object] | None = None) -> None:
        self._refuse_if_failed()
        try:
            self._write(operations, beside)
        except BaseException:
            self._failed = True
            raise

    def is_quick(self, size: int) -> bool:
        """Whether no volume has to be sealed behind a write of so many bytes."""
        return not self.volumes.is_full_within(size)

    def _refuse_if_failed(self) -> None:
        failed = self.upkeep.failed
        if failed is not None:
            raise StoreError(failed.detail, hint=failed.hint)

    def _write(self, operations: Sequence[Stored], beside: Callable[[], object] | None = None) -> None:
        rows: list[Put | Delete] = []
        own: list[MarkDead | ForgetDead | Seal | Pin] = []
        changes: Changes = {}
        for operation in operations:
            if not isinstance(operation, _OF_TABLES):
                own.append(operation)
                self._note_dead(operation, changes)
            elif operation.table is not Table.METADATA:
                rows.append(operation)
            elif isinstance(operation, Put):
                prefix = ROW + operation.prefix
                pairs = zip(operation.suffixes, operation.values, strict=True)
                changes.update((prefix + suffix, value) for suffix, value in pairs)
            else:
                changes.update((ROW + key, None) for key in operation.keys)
        if rows or changes:
            self._write_newest(rows, changes, beside)
        for operation in own:
            if isinstance(operation, Seal) and operation.volume is self.volumes.newest:
                self._seal()
            elif isinstance(operation, Pin):
                operation.view = self.volumes.pin(self.metadata.snapshot(), operation.max_s)

    def _write_newest(
        self, rows: Sequence[Put | Delete], changes: Changes, beside: Callable[[], object] | None = None
    ) -> None:
        volume, position = self.volumes.newest, self.metadata.position + 1
        removed: list[tuple[Table, bytes]] = []
        elsewhere: dict[Volume, list[tuple[Table, bytes]]] = {}
        # Always synced before anybody is told. The journal has no gap, which tells that nothing is missing; and only the
        # last batch in a log may be torn by a power cut. What is removed need not be durable, but a step of it takes longer
        # than its sync.
        database = volume.open()
        early = beside is not None and database.syncs_early
        with database.batch(sync=not early) as batch:
            edits: RowEdits | None = None
            for operation in rows:
                if isinstance(operation, Put):
                    if _concerns_no_pack(volume, operation):
                        self.volumes.note(operation)
                        _put_rows(batch.put, operation)
                    else:
                        edits = edits or RowEdits(database, batch.put, batch.delete)
                        self._put(volume, operation, batch.put, edits)
                    continue
                places = self.volumes.places_of_each(operation.table, operation.keys)
                for row, holders in zip(((operation.table, key) for key in operation.keys), places, strict=True):
                    for place in holders:
                        if place is volume:
                            if volume.may_be_packed(*row):
                                edits = edits or RowEdits(database, batch.put, batch.delete)
                                remove_packed(edits, row[1])
                            else:
                                batch.delete(_TABLE_BYTE[row[0]] + row[1])
                            removed.append(row)
                        else:
                            elsewhere.setdefault(place, []).append(row)
            if edits is not None:
                volume.memory_bytes += edits.finish()
            if changes:
                batch.put(JOURNAL + position.to_bytes(8, "big"), encode_entry(changes))
            database.make_room(batch.approximate_size())
        if beside is not None:
            if early:
                database.sync_beside(beside)
            else:
                beside()
        if changes:
            volume.journal_last = position
            self.metadata.apply(position, changes)
            if self.metadata.is_due:
                self.upkeep.submit("checkpoint", self.metadata.checkpoint)
        if removed or volume not in self.volumes.touched:
            self.volumes.note_removed(volume, removed)
        for place, found in elsewhere.items():
            self._remove_in(place, found)

    def _put(self, volume: Volume, put: Put, into: Callable[[bytes, bytes], None], edits: RowEdits) -> None:
        """Put rows into a batch for the newest volume: as packs, or one by one."""
        is_new = not isinstance(put, Turned)
        packs, inside, marked = None, False, False
        if put.table is PACKED_TABLE and volume.shape.packed and put.values:
            if is_new and are_many(put.values) and self.volumes.may_pack(put):
                packs = packs_of(put.prefix, put.suffixes, put.values, may_expire=put.may_expire)
            if packs is None:
                inside = volume.has_packs
                if inside and is_new:  # rows that are turned may be of several topics
                    inside = volume.has_packs_between(put.prefix + put.suffixes[0], put.prefix + put.suffixes[-1])
                marked = max(put.values) >= MARK and any(value[:1] == MARK for value in put.values)
        if is_new:
            self.volumes.note(put, packs=packs, packed=packs is not None or inside or marked)
        if packs is not None:
            edits.add(packs)
        elif inside or marked:
            for suffix, value in zip(put.suffixes, put.values, strict=True):
                key = put.prefix + suffix
                if is_new or volume.may_be_packed(put.table, key):
                    edits.put(key, value)
                else:
                    into(_TABLE_BYTE[put.table] + key, stored(value))
        else:
            _put_rows(into, put)

    def _note_dead(self, operation: MarkDead | ForgetDead | Seal | Pin, changes: Changes) -> None:
        """What an operation changes of dead ranges. They are dead at once: no reader can see any of their rows."""
        if isinstance(operation, MarkDead):
            for start, stop in operation.ranges:
                first, end, within = self.volumes.dead[operation.table].joined(start, stop)
                changes.update((dead_key(operation.table, each), None) for each in within)
                changes[dead_key(operation.table, first)] = end
                self.volumes.mark_dead(operation.table, start, stop)
        elif isinstance(operation, ForgetDead):
            for table, start, stop in operation.ranges:
                if self.volumes.forget_dead(table, start, stop):
                    changes[dead_key(table, start)] = None

    def _remove_in(self, volume: Volume, rows: Sequence[tuple[Table, bytes]]) -> None:
        """Remove rows in a sealed volume, or in what has taken its place."""
        if self.volumes.remove_in(volume, rows):
            return
        again: dict[Volume, list[tuple[Table, bytes]]] = {}
        for row in rows:
            for place in self.volumes.places(*row):
                if place is not self.volumes.newest:
                    again.setdefault(place, []).append(row)
        for place, found in again.items():
            self._remove_in(place, found)

    def discard_sealed(self, table: Table, keys: Sequence[bytes]) -> list[bytes]:
        """Remove rows that are in sealed volumes, durably; returns the keys that may be elsewhere, or on their way.

        For any thread, beside the one that commits.
        """
        newest: list[bytes] = []
        sealed: dict[Volume, list[tuple[Table, bytes]]] = {}
        for key in keys:
            places = self.volumes.places(table, key)
            # Looked at behind the places: none of them becomes the newest afterwards, though it may be sealed.
            written = self.volumes.newest
            if not places or places[-1] is written:
                newest.append(key)
            for place in places:
                if place is not written:
                    sealed.setdefault(place, []).append((table, key))
        # Older versions first: of two with one key the newer one hides the other until it goes, too.
        for place in sorted(sealed, key=lambda each: each.number):
            self._remove_in(place, sealed[place])
        return newest

    def parted(self, rows: Sequence[Row]) -> tuple[list[Row], dict[Volume, list[bytes]]]:
        """Messages by where they are: those of the newest volume, and the keys of those in sealed ones."""
        here: list[Row] = []
        sealed: dict[Volume, list[bytes]] = {}
        newest = self.volumes.newest
        for row in rows:
            places = self.volumes.places(Table.MESSAGE, row[0])
            for place in places:
                if place is not newest:
                    sealed.setdefault(place, []).append(row[0])
                elif len(places) == 1 or newest.open().get(Table.MESSAGE, row[0]) is not None:
                    here.append(row)
        return here, sealed

    def roll_back_sealed(self, rows: dict[Volume, list[bytes]], pointer: int) -> None:
        """Roll back messages in sealed volumes, each volume by one synced batch."""
        for volume, keys in rows.items():
            if not self.volumes.roll_back_in(volume, keys, pointer):
                # It was rewritten meanwhile.
                found = ((key, self.get(Table.MESSAGE, key)) for key in keys)
                _, again = self.parted([(key, value) for key, value in found if value is not None])
                self.roll_back_sealed(again, pointer)

    def end_group(self) -> None:
        """Begin another volume if the newest is full; for the thread that commits, behind a group."""
        if self.volumes.is_full:
            self._seal()
        else:
            self._prepare_if_filling()

    def _prepare_if_filling(self) -> None:
        if self.volumes.is_filling:
            self.upkeep.submit("prepare", self.volumes.prepare)

    def _seal(self) -> None:
        sealed = self.volumes.seal()
        self.upkeep.submit(f"seal {sealed.number}", lambda: self._finish(sealed))

    def _finish(self, volume: Volume) -> None:
        """Put a sealed volume's memory into a table, and what is known of it beside it."""
        with self.volumes.kept(volume) as database:
            database.flush_memory()
        volume.measure()
        self.volumes.close_idle()
        self.metadata.checkpoint()
        if volume.gone:
            return
        try:
            volume.write_index()
        except OSError as error:
            # It is read through at the next start.
            log.warning("a volume's index was not written", extra={"volume": volume.path.name, "why": str(error)})

    # --- removed rows --------------------------------------------------------------------------

    def tidy(self) -> TidySteps:
        """Drop volumes in which all is dead, and rewrite one that mostly is; see ``storage.leveldb.tidying``."""
        self._refuse_if_failed()
        try:
            tidied = tidy(self.volumes, self.metadata, self._options, self._stop_if_leaving)
        except Stopped:
            raise
        except StoreError as error:
            # Of the metadata nobody knows what was written.
            self.upkeep.fail(error)
            raise
        except Exception as error:
            log.exception("tidying failed")
            failed = StoreError(f"tidying: {without_folders(repr(error))}")
            self.upkeep.fail(failed)
            raise failed from error
        operations: list[Stored] = []
        if tidied.forget:
            operations.append(ForgetDead(tidied.forget))
        if tidied.seal is not None:
            operations.append(Seal(tidied.seal))
        return TidySteps(tidied.removed, operations, more=tidied.seal is not None)

    def _stop_if_leaving(self) -> None:
        if self.leaving:
            raise Stopped("the store was closed or opened again during tidying", hint="tidy again")

    def compact(self, table: Table, start: bytes, stop: bytes) -> None:
        """Rewrite the files of a range without the rows that were removed."""
        self._refuse_if_failed()
        if table is Table.METADATA:
            self.metadata.compact(start, stop)
        else:
            self.volumes.compact(table, start, stop)
        self.measure()

    def measure_if_due(self) -> None:
        """``measure``, at most once in its interval."""
        if time.monotonic() >= self._measure_at_s:
            self.measure()

    def measure(self) -> None:
        """Update ``bytes``."""
        self._measure_at_s = time.monotonic() + _MEASURE_EVERY_S
        self.bytes = self.volumes.bytes_on_disk() + self.metadata.bytes_on_disk()


def _concerns_no_pack(volume: Volume, put: Put) -> bool:
    """Whether new rows become no pack, and are in none: mostly so, for requests of few messages."""
    suffixes, values = put.suffixes, put.values
    if put.table is not PACKED_TABLE or not volume.shape.packed or not values:
        return not isinstance(put, Turned)
    if are_many(values) or isinstance(put, Turned) or max(values) >= MARK:
        return False
    return not volume.has_packs or not volume.has_packs_between(put.prefix + suffixes[0], put.prefix + suffixes[-1])


def _put_rows(put: Callable[[bytes, bytes], None], operation: Put) -> None:
    # The daemon's hottest loop: nothing but the put.
    prefix = _TABLE_BYTE[operation.table] + operation.prefix
    for suffix, value in zip(operation.suffixes, operation.values, strict=True):
        put(prefix + suffix, value)

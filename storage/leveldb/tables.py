"""The three tables of an open data directory: messages and payloads in volumes, metadata in a database of its own.

Blocking calls, for threads. Three parties use the tables; each structure has one writer:

    the commit   storage.leveldb.commit    the newest volume, the set of volumes, the metadata in memory
    the keeper   storage.leveldb.keeper    sealed volumes, the list of volumes, the metadata's database
    readers      this module               pin a set of volumes, and read it
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import deque
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from storage.base import StoreConflict, StoreDamaged, StoreError, StoreUnusable, chunks
from storage.directory import METADATA_NAME, NO_THREADS_HINT, VOLUMES_NAME, opening_failed
from storage.leveldb import threads
from storage.leveldb.commit import Committer
from storage.leveldb.engine.background import background_thread
from storage.leveldb.engine.database import Database, size_of
from storage.leveldb.engine.errors import FOREIGN, call_failed
from storage.leveldb.engine.manifest import check_files
from storage.leveldb.keeper import Keeper
from storage.leveldb.metadata import Metadata
from storage.leveldb.open_databases import OpenDatabases
from storage.leveldb.opening import first_set, listed_volumes, make_first
from storage.leveldb.reads import VolumeReads
from storage.leveldb.tidying import tidy
from storage.leveldb.volume import AFTER_JOURNAL, JOURNAL, save_index
from storage.leveldb.volume_set import Sets
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from plainsong.protocol.effects import Expect
    from storage.base import Row
    from storage.leveldb.operations import PendingWrite
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.shipping import Shipper
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume import Volume

log = logging.getLogger(__name__)
#: A scan that asks for at most this many rows first is treated as a point read and may fill the block cache.
_FEW_ROWS = 8
#: A scan keeps its turn for this time while others wait. Passing it on after every list halved the throughput of two scans,
#: because a thread has to wake each time.
TURN_S = 0.001
#: A scan that finds the event loop running gives up the interpreter lock for this many times the duration of its last
#: list, or until the loop sleeps. Without it, two readers of old messages double the p99 of publishes.
PATIENCE = 4
#: Maximum number of stale indexes that a clean stop writes. The volumes of the others are counted after the next start.
MOST_SAVED = 200
_NAP_S = 0.00003


def _give_way(loop_runs: Callable[[], bool], seconds: float) -> None:
    """Give up the interpreter lock while the event loop runs, for at most ``seconds``."""
    until_s = time.perf_counter() + seconds
    while loop_runs() and time.perf_counter() < until_s:
        nap(_NAP_S)


def _log_unknown(error: Exception) -> None:
    log.warning("the next start reads the whole newest volume", extra={"why": str(error)})


class Turn:
    """A fair lock: threads get it in the order in which they asked.

    A thread that releases a ``threading.Lock`` and acquires it again gets it at once, since it runs and the others
    sleep: a poll of one message would wait for all of a large page.
    """

    __slots__ = ("_held", "_mutex", "_waiting")

    def __init__(self) -> None:
        self._mutex = threads.Lock()
        self._held = False
        self._waiting: deque[threads.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            given = threads.Lock()
            given.acquire()
            self._waiting.append(given)
        given.acquire()  # the current owner releases it

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False


class LevelDBTables:
    """An open data directory. Methods block, are for threads, and raise StoreError."""

    def __init__(
        self,
        directory: Path,
        options: LevelDBOptions,
        *,
        check: bool = True,
        hand_in: Callable[[PendingWrite], object] = lambda _: None,
        shipper: Shipper | None = None,
    ) -> None:
        """Open what ``create`` made, and replay the journal into the metadata.

        Args:
          check: check for missing files first, because LevelDB does not detect them.
          hand_in: see ``Keeper``. Not needed if the owner only reads.
          shipper: see ``Committer``.
        Raises:
          StoreUnusable: one of its subclasses.
        """
        self._options = options
        if check:
            check_files(directory / METADATA_NAME)
        volumes, self._metadata_path = directory / VOLUMES_NAME, directory / METADATA_NAME
        self.databases = OpenDatabases(options.max_open_volumes, check=check)
        with ExitStack() as opened:
            opened.callback(self.databases.close)
            listed = listed_volumes(volumes, options, self.databases, check=check)
            database = Database(self._metadata_path, options.metadata_shape, create=False, check=check)
            opened.callback(database.close)
            try:
                self._start_background(database)
                self.metadata = Metadata(database)
                self.sets = Sets(first_set(listed, self.databases, self.metadata, check=check))
            except StoreError as error:
                raise StoreUnusable(error.detail, hint=error.hint) from error
            except OSError as error:
                raise opening_failed(error, directory) from error
            try:
                self.keeper = Keeper(volumes, options, self.sets, self.databases, self.metadata, hand_in, shipper)
            except RuntimeError as error:
                # The process may have no more threads. The store can be opened again later.
                raise StoreUnusable(f"the store's thread cannot start: {error}", hint=NO_THREADS_HINT) from error
            opened.callback(self.keeper.thread.close)
            if shipper is not None:
                shipper.opened(self.metadata.position)
            self.committer = Committer(
                self.sets, self.databases, self.metadata, self.keeper, options, self._first_messages, shipper
            )
            opened.pop_all()
        #: Held by the scan that iterates and feeds; passed on list by list.
        self._turn = Turn()

    @staticmethod
    def _start_background(database: Database) -> None:
        try:
            background_thread.find(database.flush_memory)
        except RuntimeError as error:
            raise StoreUnusable(f"LevelDB's thread cannot start: {error}", hint=NO_THREADS_HINT) from error

    @staticmethod
    def create(directory: Path, options: LevelDBOptions) -> None:
        """Create an empty store; reuses the files of an interrupted attempt. Raises StoreUnusable."""
        metadata = directory / METADATA_NAME
        try:
            Database(metadata, options.metadata_shape, create=True).close()
        except StoreDamaged:
            # LevelDB does not sync the manifest of a new database before CURRENT names it: a power cut can leave an
            # empty one. Nothing was ever stored here; otherwise the directory would have been refused.
            shutil.rmtree(metadata)
            Database(metadata, options.metadata_shape, create=True).close()
        make_first(directory / VOLUMES_NAME, options)

    @property
    def failed(self) -> StoreError | None:
        """The keeper's failure, after which the tables must be reopened; None if there was none."""
        return self.keeper.thread.failed

    @property
    def leaving(self) -> bool:
        """True before closing: scans end before their next list, long work of the keeper at its next step."""
        return self.keeper.thread.leaving

    def close(self) -> None:
        """Write the waiting metadata, close, and write the stale indexes and that of the newest volume.

        No other thread may be inside. Indexes have the names of logs, so they are written after LevelDB has ended: a
        flush that was under way removes a log.
        """
        self.keeper.thread.close()
        is_known = not self.committer.failed and self.keeper.thread.failed is None
        if is_known:
            try:
                self.metadata.checkpoint()
            except StoreError as error:
                is_known = False
                _log_unknown(error)
        for view in self.sets.current.views:
            view.close()
        self.databases.close()
        self.metadata.close()
        if is_known:
            try:
                current = self.sets.current
                stale = [each for each in current.sealed if each.is_index_stale and not each.uncounted]
                for volume in stale[:MOST_SAVED]:
                    volume.is_index_stale = False
                    save_index(volume)
                uncounted = [volume.number for volume in current.all if volume.uncounted]
                current.newest.write_index(self._metadata_path, uncounted)
            except OSError as error:
                _log_unknown(error)

    def tidy(self, done: Callable[[int | StoreError], object]) -> None:
        """Have the keeper do one step of tidying; ``done`` is called in its thread. See ``storage.leveldb.tidying``."""
        self.keeper.thread.start(lambda: tidy(self.keeper, self._options), done)

    # --- reading -------------------------------------------------------------------------------

    @contextmanager
    def reads(self, view: PinnedView | None = None) -> Iterator[VolumeReads]:
        """Pin the current volumes and read them, or read those of a view, which has its own pin."""
        if view is not None:
            yield VolumeReads(view.volumes, self.databases, view)
            return
        pinned = self.sets.pin()
        try:
            yield VolumeReads(pinned, self.databases)
        finally:
            if self.sets.unpin(pinned):
                self.keeper.remove_files_soon()

    def get(self, table: Table, key: bytes, view: PinnedView | None = None) -> bytes | None:
        """Return a row's value, None if there is none; from the current tables or a view."""
        if table is not Table.METADATA:
            with self.reads(view) as reads:
                return reads.get(table, key)
        return self.metadata.get(key) if view is None else view.metadata.get(key)

    def file_of(self, table: Table, key: bytes) -> str | None:
        """Return where the row with this key would be, relative to the data directory; None: in no volume."""
        if table is Table.METADATA:
            return METADATA_NAME
        with self.reads() as reads:
            places = reads.volumes.places(table, key)
            if not places:
                return None
            folder = places[-1].path
            files = [*folder.glob("*.ldb"), *folder.glob("*.sst")]
            # If another table file is missing, the row may be in that one.
            is_one = len(files) == 1 and self._table_count(places[-1]) in (None, 1)
            return str((files[0] if is_one else folder).relative_to(folder.parent.parent))

    def _table_count(self, volume: Volume) -> int | None:
        """Return the number of a volume's tables; None if it cannot be opened."""
        try:
            with self.databases.lease(volume) as database:
                return database.table_count()
        except StoreError:
            return None

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
        """See ``Store.scan``; of the current tables or of a view.

        Args:
          between: called between lists; raises to end the scan.
          loop_runs: returns True if the event loop is running and so needs the interpreter lock.
        """
        with closing(self._chunks(table, start, stop, reverse, first_chunk, values, view)) as lists:
            while True:
                # plyvel releases the interpreter lock at every row, so two iterating threads pass it back and forth row
                # by row: four readers together had half the throughput of one. ``feed`` is part of the turn because it
                # holds the interpreter lock throughout: the event loop, which wants the lock after each system call,
                # then waits for one reader instead of all of them.
                with self._turn:
                    until_s = time.perf_counter() + TURN_S
                    while (began_s := time.perf_counter()) < until_s:
                        chunk = next(lists, None)
                        if chunk is None or not feed(chunk):
                            return
                        between()
                        if self.leaving:
                            raise StoreError("the store was closed or reopened during a scan", hint="ask again")
                        _give_way(loop_runs, PATIENCE * (time.perf_counter() - began_s))

    def _first_messages(self, start: bytes, stop: bytes, max_bytes: int, row_bytes: int) -> list[Row]:
        """Return the first messages of a range, at least one if there is any. Never interrupted: the commit needs it.

        Args:
          max_bytes: of values, with ``row_bytes`` added for each row. The last row may exceed it.
        """
        found: list[Row] = []
        with closing(self._chunks(Table.MESSAGE, start, stop, False, 64, True)) as lists:
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
                options = {"reverse": reverse, "values": values, "cache": cache}
                with self.reads(view) as reads, reads.chunks(table, start, stop, first_chunk, **options) as lists:
                    yield from lists
                return
            if view is not None:
                rows = view.metadata.rows(start, stop, reverse=reverse, values=values, cache=cache)
            else:
                rows = self.metadata.rows(start, stop, reverse=reverse, values=values, cache=cache)
            with rows as found:
                yield from chunks(iter(found), first_chunk)
        except FOREIGN as error:
            raise call_failed(error, "scanning") from error

    def entries_after(self, number: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Return the newest entries of the journal, in order and without a gap: those after ``number``, or fewer.

        Args:
          max_bytes: the limit beyond which older entries are left out.
        """
        found: list[tuple[int, bytes]] = []
        size, start = 0, JOURNAL + (number + 1).to_bytes(8, "big")
        pinned = self.sets.pin()
        try:
            for volume in sorted(pinned.all, key=lambda each: each.number, reverse=True):
                if volume.journal_last > number and size <= max_bytes:
                    with self.databases.lease(volume) as database:
                        rows = database.own_rows(start, AFTER_JOURNAL)
                    found += [(int.from_bytes(key[1:], "big"), value) for key, value in rows]
                    size += sum(len(value) for _, value in rows)
        finally:
            if self.sets.unpin(pinned):
                self.keeper.remove_files_soon()
        found.sort()
        first = len(found)
        while first and found[first - 1][0] == self.metadata.position - (len(found) - first):
            first -= 1
        return found[first:]

    def compact(self, table: Table, start: bytes, stop: bytes) -> None:
        """Rewrite the files of a range without the removed rows. Other calls may run at the same time."""
        if table is Table.METADATA:
            self.metadata.compact(start, stop)
            return
        with self.reads() as reads:
            found = {extent.volume for extent in reads.volumes.overlapping(table, start, stop)}
            for volume in sorted(found, key=lambda each: each.number):
                with self.databases.lease(volume) as database:
                    database.compact(table, start, stop)
                self.keeper.measure_soon(volume)

    def measure(self) -> int:
        """Return the bytes on disk."""
        current = self.sets.current
        return (
            sum(volume.size for volume in current.sealed) + size_of(current.newest.path) + self.metadata.bytes_on_disk()
        )

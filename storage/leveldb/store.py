"""The LevelDB store on the event loop: which thread makes each call into its tables (``storage.leveldb.open_tables``).

    write, discard, drop    the commit thread, one group at a time, or the event loop itself
                            (storage.leveldb.group_commit)
    get, scan, reclaim      up to ``max_readers`` threads
    tidy, pin               the keeper's thread (storage.leveldb.keeper)

Calls are never abandoned.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import trio

from plainsong.protocol.effects import Delete, Table
from storage.base import Claim, NothingWritten, StoreError, StoreStatistics, StoreTraits, StoreUnusable, drop_rows
from storage.directory import NO_THREADS_HINT, DataDirectory, refuse_replicated
from storage.leveldb.group_commit import GroupCommit, own_error
from storage.leveldb.inline_policy import MAX_INLINE_BYTES
from storage.leveldb.open_tables import OpenTables
from storage.leveldb.operations import MarkDead, PendingWrite, Seal
from storage.leveldb.options import LevelDBOptions
from storage.leveldb.tables import LevelDBTables
from storage.leveldb.upgrade import upgrade_directory
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.errors import Outcome
    from plainsong.protocol.names import TopicName
    from storage.base import RawRow, Row
    from storage.leveldb.operations import Stored
    from storage.leveldb.shipping import Shipper
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume_set import View

T = TypeVar("T")
#: Rows of a discard per group, so that cleaning never delays a publish for long.
DISCARD_ROWS = 500
#: Measure the size on disk at most this often.
_MEASURE_EVERY_S = 1.0
NOT_ACKNOWLEDGED = "another process may have taken over the second copy"


class NotAcknowledged(StoreError):
    """A commit is durable in this directory, and another process may have taken over without it."""

    code = "outcome_unknown"
    title = "The outcome of the request is unknown"
    outcome: Outcome = "unknown"


class LevelDBStore:
    """``storage.base.Store`` on volumes of LevelDB. Every commit is atomic, over all tables."""

    traits = StoreTraits(
        kind="leveldb",
        durability="acknowledged messages are synced to the disk: they survive kill -9, and a power cut if the disk honours "
        "syncs",
        # LevelDB's lengths have 32 bits, and a batch is built in memory; this is far above any bound on messages.
        max_row_bytes=1 << 30,
        whole_commits=True,
        drops_ranges=True,
        ordered_commits=True,
    )

    def __init__(self, home: DataDirectory, options: LevelDBOptions, shipper: Shipper | None = None) -> None:
        """Internal: call ``open`` instead."""
        self._directory = home
        self._loop = trio.lowlevel.current_trio_token()
        self._group_commit = GroupCommit(
            self._write_group, is_hot=self._is_hot, max_inline_s=options.settings.inline_commit_s
        )
        self.waker = self._group_commit.waker
        #: See ``Store.gather_writes`` and ``Store.write_gathered``.
        self.gather_writes, self.write_gathered = self._group_commit.gather, self._group_commit.write_gathered
        opened = partial(LevelDBTables, home.path, options, hand_in=self._hand_in, shipper=shipper)
        self._tables = OpenTables(opened, self._group_commit.quiet)
        self._readers = trio.CapacityLimiter(options.max_readers)
        self._reclaiming = trio.CapacityLimiter(1)
        self._tidying = trio.Lock()
        #: False while durable commits must not be acknowledged: another process may have taken over the second copy.
        self.acknowledges: Callable[[], bool] | None = None
        self._bytes: int | None = None
        self._measure_at_s = 0.0

    @classmethod
    async def open(
        cls,
        directory: Path,
        options: LevelDBOptions | None = None,
        *,
        address: str = "",
        shipper: Shipper | None = None,
        follows: bool = False,
        locked: DataDirectory | None = None,
    ) -> Self:
        """Open the store in ``directory``, and create it if there is none.

        Use it as ``async with await LevelDBStore.open(directory) as store``.

        Args:
          address: where this process serves, quoted in the error of a process that finds the directory in use.
          shipper: takes every commit for the second copy. Without it, a directory that has one is refused: commits
            would be missing from the copy.
          follows: the directory is a standby's, and every commit comes from the log.
          locked: the directory, if the caller has locked it already; the store releases it when it is closed.
        Raises:
          StoreInUse, StoreTooNew, StoreDamaged, StoreReadOnly, StoreFull, StoreUnusable: nothing was changed.
        """
        chosen = options or LevelDBOptions()

        def enter() -> DataDirectory:
            home = locked or DataDirectory.open(directory, address=address)
            try:
                if shipper is None and not follows:
                    refuse_replicated(home.path)
                if home.is_new:
                    LevelDBTables.create(home.path, chosen)
                else:
                    upgrade_directory(home.path, chosen)
            except BaseException:
                home.close()
                raise
            return home

        home = await in_thread(enter)
        try:
            store = cls(home, chosen, shipper)
        except RuntimeError as error:
            home.close()
            raise StoreUnusable(f"the store's thread cannot start: {error}", hint=NO_THREADS_HINT) from error
        try:
            await store._tables.open()
            await in_thread(home.seal)
        except BaseException:
            await store.aclose()
            raise
        return store

    @property
    def _db(self) -> LevelDBTables | None:
        """The open tables; None while they are being reopened."""
        return self._tables.now

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``: this process is the one writer; reopens the database after a failed write."""
        await trio.lowlevel.checkpoint()
        await self._tables.reopen_if_failed()
        return Claim(name, 0)

    async def recover(self) -> None:
        """Open the store again if a write has failed. Raises StoreError."""
        await self._tables.reopen_if_failed()

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``. The claim always holds: no other process can open the directory."""
        del claim
        self._tables.refuse_if_closed()
        await trio.lowlevel.checkpoint()

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``. A commit is all or nothing, except that a long rollback takes several steps."""
        del claim
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._submit(PendingWrite(commit, expect))

    def begin(
        self,
        commit: Sequence[Operation],
        completed: Callable[[Exception | None], object],
        *,
        claim: Claim,
        while_syncing: Callable[[], object] | None = None,
    ) -> None:
        """See ``Store.begin``."""
        del claim
        # A commit's operations must not refer to the commit: a reference cycle would keep the request objects alive
        # until the next collection.
        self._group_commit.begin(
            PendingWrite(commit, on_completed=self._written, while_syncing=while_syncing, completed=completed)
        )

    @property
    def writes_inline(self) -> bool:
        """See ``Store.writes_inline``."""
        return self._group_commit.writes_inline

    @property
    def is_idle(self) -> bool:
        """See ``Store.is_idle``."""
        return not self._tables.calls_inside and self._group_commit.is_idle

    def _is_hot(self) -> bool:
        tables = self._tables.now
        return tables is not None and tables.committer.is_hot(MAX_INLINE_BYTES)

    def _written(self, done: PendingWrite) -> None:
        """Report a commit to its submitter; first begin the operations that a long rollback has left."""
        error, completed = done.error, done.completed
        assert completed is not None  # given with the commit
        if error is not None:
            if done.is_rest and isinstance(error, NothingWritten):
                completed(StoreError(f"during a rollback: {error.detail}", hint=error.hint))
            else:
                completed(own_error(error))
        elif done.rest:
            # Queued after the commits that are already waiting: a rollback of a million rows delays none of them for long.
            rest = PendingWrite(done.rest, on_completed=self._written, completed=completed, is_rest=True)
            try:
                self._group_commit.begin(rest)
            except StoreError as closed:
                completed(closed)
        elif self.acknowledges is not None and not self.acknowledges():
            completed(NotAcknowledged(NOT_ACKNOWLEDGED))
        else:
            completed(None)

    def _hand_in(self, work: PendingWrite) -> None:
        """Begin a write of the keeper. Called in its thread."""
        try:
            self._loop.run_sync_soon(self._begin_of_keeper, work)
        except trio.RunFinishedError:
            _refuse(work, StoreError("the store is closed"))

    def _begin_of_keeper(self, work: PendingWrite) -> None:
        try:
            self._group_commit.begin(work)
        except StoreError as closed:
            _refuse(work, closed)

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """See ``Store.discard``. Joins the groups of other commits, ``DISCARD_ROWS`` at a time."""
        await trio.lowlevel.checkpoint()
        for at in range(0, len(keys), DISCARD_ROWS):
            await trio.lowlevel.checkpoint_if_cancelled()
            await self._submit(PendingWrite([Delete(table, keys[at : at + DISCARD_ROWS])]))

    async def _submit(self, work: PendingWrite) -> None:
        """Write a commit and wait until it is durable. Raises StoreError."""

        def begin(completed: Callable[[Exception | None], object]) -> None:
            work.on_completed, work.completed = self._written, completed
            self._group_commit.begin(work)

        failed = await self._group_commit.written(begin)
        if failed is not None:
            raise failed

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """See ``Store.drop``. Marks the ranges as dead; a volume is dropped once all its rows are dead."""
        await trio.lowlevel.checkpoint()
        if table is Table.METADATA:
            return await drop_rows(self, table, ranges)
        rows = 0
        for at in range(0, len(ranges), DISCARD_ROWS):
            await trio.lowlevel.checkpoint_if_cancelled()
            step = ranges[at : at + DISCARD_ROWS]
            rows += await self._tables.run(partial(_count, table=table, ranges=step), self._readers)
            await self._submit(PendingWrite([MarkDead(table, step)]))
        return rows

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """See ``Store.file_of``. Returns the volume's only table file, or its folder if it has several."""
        return await self._tables.run(lambda tables: tables.file_of(table, key), self._readers)

    @property
    def topics_number(self) -> int | None:
        """See ``Store.topics_number``."""
        if self._tables.is_closed or self._tables.is_broken or self._db is None:
            return None
        return self._db.metadata.topics_position

    async def begin_files(self) -> None:
        """See ``Store.begin_files``: seals the newest volume."""
        seal = Seal(await self._tables.run(lambda tables: tables.sets.current.newest, self._readers))
        await self._submit(PendingWrite([seal]))
        if seal.error is not None:
            raise seal.error

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """See ``Store.scan_raw``. Finds nothing, because LevelDB returns no part of a block that fails its checksum."""
        del table, start, stop, take
        self._tables.refuse_if_closed()
        await trio.lowlevel.checkpoint()

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """See ``Store.may_have``. Always true for the metadata, which has no index in memory."""
        if table is Table.METADATA or self._db is None:
            return start < stop
        return self._db.sets.current.may_have(table, start, stop)

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Store.get``. Reads the metadata on the event loop while the loop writes small commits itself."""
        if table is Table.METADATA:
            await trio.lowlevel.checkpoint()  # a caller that reads many rows must yield to other tasks
            opened = self._tables
            if self._group_commit.writes_inline and opened.now and not (opened.is_closed or opened.shows_undurable):
                return self._group_commit.done_inline(partial(opened.now.get, table, key))
        return await self._tables.run(lambda tables: tables.get(table, key), self._readers)

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """See ``Store.scan``. ``feed`` runs in a worker thread; a cancelled scan ends before its next list."""

        def read(tables: LevelDBTables) -> None:
            tables.scan(
                table,
                start,
                stop,
                feed,
                reverse=reverse,
                first_chunk=first_chunk,
                values=values,
                between=trio.from_thread.check_cancelled,
                loop_runs=self.loop_runs,
            )

        await self._tables.run(read, self._readers)

    async def apply(self, operations: Sequence[Operation | Stored]) -> None:
        """Write commits of the log as one batch, and wait until it is durable in this directory. Raises StoreError."""
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._submit(PendingWrite(operations))

    @property
    def number(self) -> int | None:
        """The number of the last batch that is durable in this directory; None while the store is being reopened."""
        return None if self._db is None else self._db.metadata.position

    async def run_reader(self, call: Callable[[LevelDBTables], T]) -> T:
        """Run ``call`` as a reader, in a thread. Raises StoreError."""
        return await self._tables.run(call, self._readers)

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """See ``Store.reclaim``: compacts the range."""
        if table is Table.METADATA:
            await self._ask(_checkpoint)

        def compact(tables: LevelDBTables) -> None:
            try:
                tables.compact(table, start, stop)
            except StoreError:
                # LevelDB refuses writes after a compaction that failed.
                self._tables.is_broken = True
                raise

        await self._tables.run(compact, self._reclaiming)

    async def tidy(self) -> int:
        """See ``Store.tidy``. Drops volumes whose rows are all dead, and rewrites those most of whose rows are dead.

        Reopens the database after a failure, as ``claim`` does: on a full disk nothing can be written, so no topic is
        claimed, and only tidying frees space.
        """
        await self._tables.reopen_if_failed()
        async with self._tidying:
            for view in self._db.sets.current.views if self._db is not None else ():
                if view.is_over:
                    await self.close_view(view)
            return await self._ask(lambda tables, done: tables.tidy(done))

    async def pin(self, max_s: float) -> LevelDBView:
        """See ``Store.pin``."""
        return await self.pin_now(max_s)

    async def pin_now(self, max_s: float) -> LevelDBView:
        """Open a view of everything that is durable in this directory. Raises StoreError."""
        await trio.lowlevel.checkpoint_if_cancelled()
        return LevelDBView(self, await self._ask(lambda tables, done: tables.keeper.pin(max_s, done)))

    async def close_view(self, view: View) -> None:
        """End a view. Closes it too unless a read is under way; then the next tidying does."""
        if view.end():
            await self._ask(partial(_close_view, view))

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``."""
        if self._db is not None and time.monotonic() >= self._measure_at_s:
            self._measure_at_s = time.monotonic() + _MEASURE_EVERY_S
            self._bytes = self._db.measure()
        try:
            free = shutil.disk_usage(self._directory.path).free
        except OSError:
            free = None
        if self._db is None:
            return StoreStatistics(bytes=None, free_bytes=free)
        return StoreStatistics(
            bytes=self._bytes,
            free_bytes=free,
            volumes=len(self._db.sets.current.all),
            open_volumes=self._db.databases.open_count,
        )

    async def aclose(self) -> None:
        """See ``Store.aclose``. Scans end before their next list; waiting writes are refused."""
        with trio.CancelScope(shield=True):
            async with self._tables.closing():
                await self._group_commit.close()
                self._directory.close()

    def _write_group(self, group: Sequence[PendingWrite], while_syncing: Callable[[], object] | None = None) -> None:
        """Make a group durable. Called in the commit thread, or on the event loop while that thread is idle.

        Args:
          while_syncing: called while the disk syncs a small group, once at most. Other threads would see rows that are
            not durable yet, so it is skipped while any of them is reading.
        """
        opened = self._tables
        opened.refuse_if_closed()
        tables = opened.now
        if opened.is_broken or tables is None:
            raise NothingWritten("a write failed before, and the store has not been reopened", hint="send it again")
        failed = tables.keeper.thread.failed
        if failed is not None:
            opened.is_broken = True
            raise NothingWritten(failed.detail, hint=failed.hint)
        if not group:
            return
        if group[0].expect:
            tables.compare(group[0].expect)
        if opened.calls_inside:
            while_syncing = None
        try:
            tables.committer.write(group, while_syncing)
        except BaseException as error:
            # After any error the log may end in a torn record, and nothing may be appended to that. If only the sync
            # failed, LevelDB already shows the rows.
            opened.is_broken = True
            opened.shows_undurable = while_syncing is not None
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"writing: {error!r}") from error

    async def _ask(self, begin: Callable[[LevelDBTables, Callable[[T | StoreError], object]], None]) -> T:
        """Have the keeper do something, counted as inside the tables, and return its result. Raises StoreError."""
        tables = await self._tables.present()
        with self._tables.counted():

            def begin_in_thread(completed: Callable[[T | StoreError], object]) -> None:
                begin(tables, partial(self._on_loop, completed))

            found = await self._group_commit.written(begin_in_thread)
        if isinstance(found, StoreError):
            raise found
        return found

    def _on_loop(self, completed: Callable[[T | StoreError], object], found: T | StoreError) -> None:
        """Complete an event-loop call from another thread."""
        with suppress(trio.RunFinishedError):
            self._loop.run_sync_soon(completed, found)

    def loop_runs(self) -> bool:
        """True if the event loop is not asleep in the kernel. For other threads."""
        return not self._group_commit.is_asleep


def _count(tables: LevelDBTables, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
    volumes = tables.sets.current
    return sum(volumes.rows_in(table, start, stop) for start, stop in ranges)


def _checkpoint(tables: LevelDBTables, done: Callable[[StoreError | None], object]) -> None:
    tables.keeper.checkpoint(done)


def _close_view(view: View, tables: LevelDBTables, done: Callable[[StoreError | None], object]) -> None:
    tables.keeper.close_view(view, done)


def _refuse(work: PendingWrite, error: StoreError) -> None:
    """Complete a write of the keeper that cannot begin."""
    assert work.on_completed is not None  # given by the keeper
    work.error = error
    work.on_completed(work)


class LevelDBView:
    """``storage.base.StoreView``: a pinned set of volumes, with snapshots of those that change."""

    exact = True

    def __init__(self, store: LevelDBStore, view: PinnedView) -> None:
        self._store = store
        self._view = view

    @property
    def number(self) -> int:
        """The number of the last journal entry before the view."""
        return self._view.number

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``StoreView.get``."""

        def read(tables: LevelDBTables) -> bytes | None:
            self._view.refuse_if_ended()
            return tables.get(table, key, self._view)

        with self._view.reading():
            return await self._store.run_reader(read)

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool = False,
        first_chunk: int = 64,
        values: bool = True,
    ) -> None:
        """See ``StoreView.scan``; ``feed`` runs in a worker thread."""
        view = self._view

        def between() -> None:
            trio.from_thread.check_cancelled()
            view.refuse_if_over()

        def read(tables: LevelDBTables) -> None:
            view.refuse_if_ended()
            tables.scan(
                table,
                start,
                stop,
                feed,
                reverse=reverse,
                first_chunk=first_chunk,
                values=values,
                between=between,
                loop_runs=self._store.loop_runs,
                view=view,
            )

        with view.reading():
            await self._store.run_reader(read)

    def renew(self, max_s: float) -> None:
        """See ``StoreView.renew``."""
        self._view.renew(max_s)

    async def aclose(self) -> None:
        """See ``StoreView.aclose``."""
        if self._view.is_closed:
            await trio.lowlevel.checkpoint()
            return
        with trio.CancelScope(shield=True), suppress(StoreError):
            # If the store has been closed since, the view is closed, too.
            await self._store.close_view(self._view)

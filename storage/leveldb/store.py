"""The LevelDB store on the event loop: which threads may be inside the database, and when it is reopened.

    write            the commit thread, one group at a time, or the event loop instead of it; storage.leveldb.group_commit
    discard          in sealed volumes one thread of its own; the rest as a write
    get, scan        up to ``max_readers`` threads
    reclaim          one thread of its own, so that it never takes the place of a writer or reader

No thread is abandoned: LevelDB must not be closed while one is inside.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import trio

from plainsong.protocol.effects import Delete, Table
from storage.base import Claim, NothingWritten, StoreError, StoreStatistics, StoreTraits, StoreUnusable, drop_rows
from storage.directory import DataDirectory
from storage.leveldb.errors import without_folders
from storage.leveldb.group_commit import MAX_INLINE_BYTES, GroupCommit, PendingWrite, own_error, write_group
from storage.leveldb.options import LevelDBOptions
from storage.leveldb.tables import LevelDBTables, MarkDead, Pin, Seal
from storage.leveldb.takeover import take_over

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.names import TopicName
    from storage.base import Row
    from storage.leveldb.view import PinnedView

log = logging.getLogger(__name__)
T = TypeVar("T")
#: Rows of a discard in one group, so that cleaning never makes a publish wait for long.
DISCARD_ROWS = 500


class LevelDBStore:
    """``storage.base.Store`` on volumes of LevelDB. Every commit is atomic, over all tables."""

    traits = StoreTraits(
        kind="leveldb",
        durability="acknowledged messages are synced to the disk: they survive kill -9, and a power cut of an honest disk",
        # LevelDB's lengths have 32 bits, and a batch is built in memory; this is far above any bound on messages.
        max_row_bytes=1 << 30,
        whole_commits=True,
        drops_ranges=True,
    )

    def __init__(self, home: DataDirectory, tables: LevelDBTables, options: LevelDBOptions) -> None:
        """Use ``open``."""
        self._directory = home
        self._options = options
        self._db: LevelDBTables | None = tables
        self._broken = False
        self._closed = False
        #: A sync has failed behind its write: nobody may read before the database was opened again.
        self._shows_undurable = False
        self._calls_inside = 0
        self._no_calls_inside: trio.Event | None = None
        self._reopening = trio.Lock()
        self._group_commit = GroupCommit(self._write_group, is_quick=self._is_quick, max_inline_s=options.max_inline_s)
        self.bell = self._group_commit.bell
        self._readers = trio.CapacityLimiter(options.max_readers)
        self._upkeep = trio.CapacityLimiter(1)
        self._discards = trio.CapacityLimiter(1)

    @classmethod
    async def open(cls, directory: Path, options: LevelDBOptions | None = None, *, address: str = "") -> Self:
        """Open the store in ``directory``, and create it if there is none.

        Use it as ``async with await LevelDBStore.open(directory) as store``.

        Args:
          address: where this process serves, for the message to a process that finds the directory in use.
        Raises:
          StoreInUse, StoreTooNew, StoreDamaged, StoreReadOnly, StoreFull, StoreUnusable: nothing was changed.
        """
        chosen = options or LevelDBOptions()

        def enter() -> tuple[DataDirectory, LevelDBTables]:
            home = DataDirectory.open(directory, address=address)
            try:
                if home.is_new:
                    LevelDBTables.create(home.path, chosen)
                else:
                    take_over(home.path, chosen)
                tables = LevelDBTables(home.path, chosen)
                home.seal()
            except BaseException:
                home.close()
                raise
            return home, tables

        home, tables = await trio.to_thread.run_sync(enter)
        return cls(home, tables, chosen)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``: this process is the one writer; reopens the database after a failed write."""
        await trio.lowlevel.checkpoint()
        await self._reopen_if_failed()
        return Claim(name, 0)

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``: no other process can open the directory."""
        del claim
        self._refuse_if_closed()
        await trio.lowlevel.checkpoint()

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``; here all or nothing, except that a long rollback takes several steps."""
        del claim
        await trio.lowlevel.checkpoint_if_cancelled()
        await self._submit(PendingWrite(commit, expect))

    def begin_write(
        self,
        commit: Sequence[Operation],
        settled: Callable[[PlainsongError | None], object],
        beside: Callable[[], object] | None = None,
    ) -> None:
        """See ``BeginsWrites.begin_write``."""
        self._begin(PendingWrite(commit, beside=beside), settled)

    @property
    def writes_inline(self) -> bool:
        """See ``WritesInline.writes_inline``."""
        return self._group_commit.writes_inline

    @property
    def is_idle(self) -> bool:
        """See ``WritesInline.is_idle``."""
        return not self._calls_inside and self._group_commit.is_idle

    def gather_writes(self) -> None:
        """See ``WritesInline.gather_writes``."""
        self._group_commit.gather()

    def write_gathered(self) -> None:
        """See ``WritesInline.write_gathered``."""
        self._group_commit.write_gathered()

    def _is_quick(self) -> bool:
        return self._db is not None and self._db.is_quick(MAX_INLINE_BYTES)

    def _begin(self, work: PendingWrite, settled: Callable[[PlainsongError | None], object]) -> None:
        """Begin a commit, and go on with what a long rollback leaves to do."""
        # What a commit refers to must not refer to it: a cycle would keep all that its requests were made of until the
        # garbage collector comes by.
        work.settled = settled
        work.on_settled = self._written
        self._group_commit.begin(work)

    def _written(self, done: PendingWrite) -> None:
        error, settled = done.error, done.settled
        assert settled is not None  # given with the commit
        if error is not None:
            if done.is_rest and isinstance(error, NothingWritten):
                settled(StoreError(f"in the middle of a rollback: {error.detail}", hint=error.hint))
            else:
                settled(own_error(error))
        elif done.rest:
            # Behind the commits that wait by now: a rollback of a million rows delays none of them for long.
            rest = PendingWrite(done.rest, on_settled=self._written, settled=settled, is_rest=True)
            try:
                self._group_commit.begin(rest)
            except StoreError as closed:
                settled(closed)
        else:
            settled(None)

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """See ``Store.discard``; joins commits, a bounded number of rows at a time."""
        await trio.lowlevel.checkpoint()
        for at in range(0, len(keys), DISCARD_ROWS):
            await trio.lowlevel.checkpoint_if_cancelled()
            step = keys[at : at + DISCARD_ROWS]
            if table is not Table.METADATA:
                with trio.CancelScope(shield=True):
                    step = await self._discard_sealed(table, step)
            if step:
                await self._submit(PendingWrite([Delete(table, step)]))

    async def _submit(self, work: PendingWrite) -> None:
        """Have something written, and wait for that. Raises StoreError."""
        failed = await self._group_commit.written(partial(self._begin, work))
        if failed is not None:
            raise failed

    async def _discard_sealed(self, table: Table, keys: Sequence[bytes]) -> list[bytes]:
        """Remove the rows that are in sealed volumes; returns the keys that the newest may have."""
        if self._broken:
            raise NothingWritten("a write failed before, and the store was not opened again", hint="send it again")

        return await self._change_inside(lambda tables: tables.discard_sealed(table, keys), "removing", self._discards)

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """See ``Store.drop``; the ranges are noted as dead, and volumes go when all of them is."""
        await trio.lowlevel.checkpoint()
        if table is Table.METADATA:
            return await drop_rows(self, table, ranges)
        rows = 0
        for at in range(0, len(ranges), DISCARD_ROWS):
            await trio.lowlevel.checkpoint_if_cancelled()
            step = ranges[at : at + DISCARD_ROWS]
            rows += await self._run_inside(partial(_count, table=table, ranges=step), self._readers)
            await self._submit(PendingWrite([MarkDead(table, step)]))
        return rows

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """See ``NamesFiles``: the table of LevelDB where there is but one, else its folder."""
        return await self._run_inside(lambda tables: tables.file_of(table, key), self._readers)

    @property
    def topics_number(self) -> int | None:
        """See ``NumbersTopics``."""
        if self._closed or self._broken or self._db is None:
            return None
        return self._db.metadata.topics_position

    async def begin_files(self) -> None:
        """See ``BeginsFiles``: another volume is written from now on."""
        newest = await self._run_inside(lambda tables: tables.volumes.newest, self._readers)
        await self._submit(PendingWrite([Seal(newest)]))

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """See ``Store.may_have``; of the metadata it is not known without reading."""
        if table is Table.METADATA or self._db is None:
            return start < stop
        return self._db.volumes.may_have(table, start, stop)

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Store.get``; a row of the metadata is read on the event loop while that writes small commits itself."""
        if table is Table.METADATA:
            await trio.lowlevel.checkpoint()  # whoever reads many lets others have their turns
            tables = self._db
            if self._group_commit.writes_inline and tables is not None and not (self._closed or self._shows_undurable):
                return self._group_commit.done_inline(partial(tables.get, table, key))
        return await self._run_inside(lambda tables: tables.get(table, key), self._readers)

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
        """See ``Store.scan``; ``feed`` runs in a worker thread, a cancelled scan ends at its next list."""

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

        await self._run_inside(read, self._readers)

    async def run_reader(self, call: Callable[[LevelDBTables], T]) -> T:
        """Run ``call`` as a reader, in a thread. Raises StoreError."""
        return await self._run_inside(call, self._readers)

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """See ``Store.reclaim``: compacts the range."""
        await self._change_inside(lambda tables: tables.compact(table, start, stop), "compacting", self._upkeep)

    async def tidy(self) -> int:
        """See ``Store.tidy``: drops volumes in which all rows are dead, and rewrites one that mostly is.

        Reopens the database after a failure, as ``claim`` does: with a full disk nobody writes, so nobody claims, and
        only tidying makes room.
        """
        await self._reopen_if_failed()
        removed = 0
        while True:
            tidied = await self._change_inside(LevelDBTables.tidy, "tidying", self._upkeep)
            removed += tidied.removed
            if tidied.operations:
                await self._submit(PendingWrite(tidied.operations))
            if not tidied.more:
                return removed

    async def pin(self, max_s: float) -> LevelDBView:
        """See ``Store.pin``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        pin = Pin(max_s)
        await self._submit(PendingWrite([pin]))
        if pin.view is None:
            raise StoreError("the view was not made")
        return LevelDBView(self, pin.view)

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``."""
        if self._db is not None:
            self._db.measure_if_due()
        try:
            free = shutil.disk_usage(self._directory.path).free
        except OSError:
            free = None
        if self._db is None:
            return StoreStatistics(bytes=None, free_bytes=free)
        volumes = self._db.volumes
        return StoreStatistics(
            bytes=self._db.bytes, free_bytes=free, volumes=len(volumes.all), open_volumes=volumes.open_count
        )

    async def aclose(self) -> None:
        """See ``Store.aclose``; scans end at their next list, writes that wait are refused."""
        self._closed = True
        with trio.CancelScope(shield=True):
            async with self._reopening:
                await self._close_database()
                await self._group_commit.close()
                await trio.to_thread.run_sync(self._directory.close)

    def _write_group(self, group: Sequence[PendingWrite], beside: Callable[[], object] | None = None) -> None:
        """Make a group durable; in the commit thread, or on the event loop while that has nothing to do.

        Args:
          beside: of a group of few rows, what there is to do while the disk works, once at most. Other threads would see
            rows that are not durable meanwhile, so that it is left out while one reads.
        """
        self._refuse_if_closed()
        tables = self._db
        if self._broken or tables is None:
            raise NothingWritten("a write failed before, and the store was not opened again", hint="send it again")
        failed = tables.upkeep.failed
        if failed is not None:
            # Asked here and not before each batch only: a group may have several, and of this one none was begun.
            self._broken = True
            raise NothingWritten(failed.detail, hint=failed.hint)
        if not group:
            return
        if group[0].expect:
            tables.compare(group[0].expect)
        try:
            if beside is None or self._calls_inside:
                write_group(tables, group)
            else:
                tables.write_small([put for work in group for put in work.operations], beside)  # type: ignore[misc]  # no rollback is small
        except BaseException as error:
            # After any error the log may end in a torn record, behind which nothing may be written. Of a sync that failed
            # on its own, LevelDB has the rows already.
            self._broken = True
            self._shows_undurable = beside is not None
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"writing: {error!r}") from error

    async def _run_inside(self, call: Callable[[LevelDBTables], T], limiter: trio.CapacityLimiter) -> T:
        """Run ``call`` in a thread, counted as inside the database."""
        if self._shows_undurable:
            await self._reopen_if_failed()
        if self._db is None:
            # It is being reopened: wait until that has ended.
            async with self._reopening:
                pass
        self._refuse_if_closed()
        tables = self._db
        if tables is None:
            raise StoreError("the store could not be opened again", hint="claim the topic again")
        with self._counted():
            return await trio.to_thread.run_sync(call, tables, limiter=limiter)

    def loop_runs(self) -> bool:
        """Whether the event loop is in the middle of a turn; for its other threads."""
        return not self._group_commit.is_asleep

    async def _change_inside(self, call: Callable[[LevelDBTables], T], doing: str, limiter: trio.CapacityLimiter) -> T:
        """``_run_inside`` for what changes something; after an exception the database must be opened again."""

        def run(tables: LevelDBTables) -> T:
            try:
                return call(tables)
            except BaseException as error:
                self._broken = True
                if isinstance(error, StoreError):
                    raise
                raise StoreError(f"{doing}: {error!r}") from error

        return await self._run_inside(run, limiter)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self._calls_inside += 1
        try:
            yield
        finally:
            self._calls_inside -= 1
            if self._calls_inside == 0 and self._no_calls_inside is not None:
                self._no_calls_inside.set()

    async def _close_database(self) -> None:
        """Close the database once no thread is inside; new calls wait for it to be reopened."""
        tables, self._db = self._db, None
        if tables is None:
            return
        tables.leaving = True
        # Nothing waits for long: without a database what is in the queue is refused.
        await self._group_commit.quiet()
        if self._calls_inside:
            self._no_calls_inside = trio.Event()
            await self._no_calls_inside.wait()
            self._no_calls_inside = None
        await trio.to_thread.run_sync(tables.close, limiter=self._upkeep)

    async def _reopen_if_failed(self) -> None:
        """Open the database again if something failed that wrote to it. Raises StoreError."""
        async with self._reopening:
            self._refuse_if_closed()
            if self._broken or self._db is None or self._db.upkeep.failed is not None:
                await self._reopen()

    async def _reopen(self) -> None:
        with trio.CancelScope(shield=True):
            await self._close_database()
            try:
                self._db = await trio.to_thread.run_sync(
                    lambda: LevelDBTables(self._directory.path, self._options), limiter=self._upkeep
                )
            except StoreUnusable as error:
                log.error("the store cannot be opened again", extra={"why": error.detail})
                detail = without_folders(error.detail)
                raise StoreError(f"the store cannot be opened again: {detail}", hint=error.hint) from error
            self._broken = self._shows_undurable = False

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")


def _count(tables: LevelDBTables, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
    return sum(tables.volumes.rows_in(table, start, stop) for start, stop in ranges)


class LevelDBView:
    """``storage.base.StoreView``: snapshots, and sealed volumes as long as they do not change."""

    exact = True

    def __init__(self, store: LevelDBStore, view: PinnedView) -> None:
        self._store = store
        self._view = view

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``StoreView.get``."""

        def read(tables: LevelDBTables) -> bytes | None:
            with self._view.reading():
                return tables.get(table, key, self._view)

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
            if view.is_over:
                raise StoreError("the view of the store has ended")

        def read(tables: LevelDBTables) -> None:
            with view.reading():
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

        await self._store.run_reader(read)

    def renew(self, max_s: float) -> None:
        """See ``StoreView.renew``."""
        self._view.renew(max_s)

    async def aclose(self) -> None:
        """See ``StoreView.aclose``."""
        if self._view.ended:
            await trio.lowlevel.checkpoint()
            return
        with trio.CancelScope(shield=True), suppress(StoreError):
            # A store that was closed meanwhile has let go of it.
            await self._store.run_reader(lambda tables: tables.volumes.unpin(self._view))

"""The HBase store: rows of a commit are put if absent, and count once the topic's head says so.

    messages, payloads   packed, as many rows of a commit in one row of HBase as fit a cell; put if absent
    metadata             two alternating cells for each row; compare-and-set
    then                 the owner increments the topic's head: the commit takes effect, unless there is a new owner

All puts of a commit, and its removals of metadata, become visible at once, up to a rollback; a crash leaves all of them
or none. Removals of messages and payloads follow.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import trio

from plainsong.protocol.effects import Table
from storage.base import (
    Claim,
    NothingWritten,
    RawRow,
    StoreConflict,
    StoreError,
    StoreStatistics,
    StoreTraits,
    StoreUnusable,
    Unreadable,
    drop_rows,
)
from storage.hbase.cells import Cells, Slots
from storage.hbase.commit import CommitWriter, RowRemover, RowWriter
from storage.hbase.owners import Owners
from storage.hbase.pool import Pool
from storage.hbase.read import RowReader
from storage.hbase.tables import Tables, check_gateways
from storage.hbase.upkeep import Upkeep
from storage.spawned import SpawnsWrites

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.names import TopicName
    from storage.base import Row
    from storage.hbase.gateway import Address
    from storage.hbase.scan import ScannedRow
    from storage.hbase.settings import HBaseConfig

#: Cells that mark removed rows are kept at least this long.
GONE_KEPT_S = 86_400.0


class LiveView:
    """``storage.base.StoreView`` that also shows later commits."""

    exact = False

    def __init__(self, store: HBaseStore) -> None:
        self.get = store.get
        self.scan = store.scan

    def renew(self, max_s: float) -> None:
        """See ``StoreView.renew``. It does not expire."""

    async def aclose(self) -> None:
        """See ``StoreView.aclose``. There is nothing to release."""
        await trio.lowlevel.checkpoint()


class HBaseStore(SpawnsWrites):
    """``storage.base.Store`` on three tables of HBase, which other instances may share."""

    waker = None
    #: Unknown, because other instances create and delete topics too.
    topics_number = None

    def __init__(self, pool: Pool, tables: Tables, settings: HBaseConfig, gone_kept_s: float) -> None:
        """Internal: call ``open`` instead."""
        self.traits = StoreTraits(
            kind="hbase",
            durability="acknowledged messages are in HBase's log: they are as durable as its file system",
            max_row_bytes=settings.max_row_bytes,
            whole_commits=True,
            shared=True,
        )
        self._pool = pool
        self._owners = Owners(pool, tables, Slots(pool, tables[Table.METADATA]))
        self._reader = RowReader(pool, tables, self._owners, timeout_s=settings.timeout_s)
        self._remover = RowRemover(pool, tables, self._owners, timeout_s=settings.timeout_s)
        row_writer = RowWriter(pool, tables, self._owners, max_cell_bytes=settings.max_cell_bytes)
        cells = Cells(pool, tables[Table.METADATA])
        self._upkeep = Upkeep(pool, tables, self._owners, timeout_s=settings.timeout_s, kept_s=gone_kept_s)
        self._commit_writer = CommitWriter(self._owners, cells, row_writer, self._remover, settings.max_row_bytes)
        #: The epoch in which this instance may write a topic; removed by a failure, until it claims the topic again.
        self._epochs: dict[TopicName, int] = {}
        self._closed = False

    @classmethod
    async def open(
        cls,
        addresses: Sequence[tuple[str, int]],
        settings: HBaseConfig,
        tls: Callable[[], ssl.SSLContext] | None = None,
        *,
        gone_kept_s: float = GONE_KEPT_S,
    ) -> Self:
        """Connect to the Thrift gateways at ``addresses`` (host, port), and check that the tables exist.

        Args:
          tls: returns the context of each new connection, so that renewed certificates take effect; None for no TLS.
          gone_kept_s: how long to keep, at least, cells that mark removed rows.
        Raises:
          StoreUnusable: no gateway answers, or one is not configured for the store; or a table is missing (NoTables:
            all are) and cannot or may not be created; or HBase does not answer.
        """
        pool = Pool(addresses, size=settings.max_connections, timeout_s=settings.timeout_s, tls=tls)
        tables = Tables(settings.table_prefix)
        try:
            await check_gateways(pool, addresses, max_cell_bytes=settings.max_cell_bytes)
            await tables.prepare(pool, create=settings.create_tables)
        except BaseException as error:
            with trio.CancelScope(shield=True):
                await pool.aclose()
            if isinstance(error, StoreError) and not isinstance(error, StoreUnusable):
                raise StoreUnusable(error.detail, hint=error.hint) from error
            raise
        return cls(pool, tables, settings, gone_kept_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``. Begins a new epoch, after which no commit of an earlier one can take effect."""
        self._refuse_if_closed()
        claim = await self._owners.claim(name)
        self._epochs[name] = claim.epoch
        return claim

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``. Reads the topic's head."""
        self._refuse_if_closed()
        await self._owners.check(claim)

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        self._refuse_if_closed()
        if self._epochs.get(claim.name) != claim.epoch:
            raise NothingWritten(f"a write to topic {claim.name} failed before", hint="claim it again")
        with trio.CancelScope(shield=True):
            try:
                await self._write(commit, claim, expect)
            except StoreConflict:
                raise
            except BaseException:
                # Puts in progress may still arrive: only a later epoch ensures that they never count.
                self._epochs.pop(claim.name, None)
                raise

    async def _write(self, commit: Sequence[Operation], claim: Claim, expect: Sequence[Expect]) -> None:
        for wanted in expect:
            try:
                found = await self.get(wanted.table, wanted.key)
            except StoreError as error:
                raise NothingWritten(error.detail, hint=error.hint) from error
            if found != wanted.value:
                raise StoreConflict(f"row {wanted.key.hex()} of the {wanted.table.name.lower()} table has changed")
        await self._commit_writer.write(commit, claim, expect)

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """See ``Store.discard``."""
        self._refuse_if_closed()
        await self._remover.remove(table, keys)

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """See ``Store.drop``. Removes row by row; an unreadable row of HBase is removed whole and counts as one."""
        removed = 0
        for start, stop in ranges:
            while True:
                try:
                    removed += await drop_rows(self, table, [(start, stop)])
                    break
                except Unreadable:
                    damaged = await self._drop_damaged(table, start, stop)
                    if not damaged:
                        raise
                    removed += damaged
        return removed

    async def _drop_damaged(self, table: Table, start: bytes, stop: bytes) -> int:
        self._refuse_if_closed()
        keys: list[ScannedRow] = []

        def take(found: list[ScannedRow]) -> None:
            keys.extend(row._replace(columns={}) for row in found)

        await self._reader.damaged(table, start, stop, take)
        await self._remover.remove_whole(table, keys)
        return len(keys)

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """See ``Store.scan_raw``."""
        self._refuse_if_closed()
        await self._reader.damaged(
            table, start, stop, lambda found: take([RawRow(row.key, row.columns) for row in found])
        )

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """See ``Store.file_of``. HBase manages its own files."""
        del table, key
        self._refuse_if_closed()
        await trio.lowlevel.checkpoint()
        return None

    async def begin_files(self) -> None:
        """See ``Store.begin_files``. An unreadable cell does not make others unreadable."""
        self._refuse_if_closed()
        await trio.lowlevel.checkpoint()

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """See ``Store.may_have``. Always true, since the answer would require a call to HBase."""
        del table
        return start < stop

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Store.get``."""
        self._refuse_if_closed()
        if table is Table.METADATA:
            return await self._reader.metadata(key)
        rows: list[Row] = []

        def feed(chunk: Sequence[Row]) -> bool:
            rows.extend(chunk)
            return False

        await self.scan(table, key, key + b"\x00", feed, first_chunk=1)
        return rows[0][1] if rows else None

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
        """See ``Store.scan``."""
        self._refuse_if_closed()
        if start >= stop:
            await trio.lowlevel.checkpoint()
            return
        await self._reader.scan(table, start, stop, feed, reverse=reverse, first_chunk=first_chunk, values=values)

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """See ``Store.reclaim``. HBase compacts automatically."""
        del table, start, stop
        self._refuse_if_closed()
        await trio.lowlevel.checkpoint()

    async def tidy(self) -> int:
        """See ``Store.tidy``."""
        self._refuse_if_closed()
        return await self._upkeep.step()

    async def pin(self, max_s: float) -> LiveView:
        """See ``Store.pin``. HBase has no snapshot of all rows at one moment."""
        del max_s
        await trio.lowlevel.checkpoint()
        return LiveView(self)

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``. HBase has its own tools for that."""
        return StoreStatistics(bytes=None, free_bytes=None)

    async def aclose(self) -> None:
        """See ``Store.aclose``."""
        self._closed = True
        await self._pool.aclose()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise StoreError("the store is closed")


# --- blocking scans, for commands without an event loop --------------------------------------------
#
# They claim and write nothing; daemons on the same tables continue. A scan shows the rows that count at that time.


class HBaseRows:
    """The rows of a store; implements ``storage.inspect.explain.RowSource``."""

    def __init__(
        self, addresses: Sequence[Address], settings: HBaseConfig, tls: Callable[[], ssl.SSLContext] | None
    ) -> None:
        """Check that the store and its tables can be opened. Raises StoreUnusable."""
        self._addresses = addresses
        self._settings = replace(settings, create_tables=False)
        self._tls = tls
        trio.run(self._open)

    async def _open(self) -> None:
        async with await HBaseStore.open(self._addresses, self._settings, self._tls):
            pass

    def scan(self, table: Table, start: bytes, stop: bytes, feed: Callable[[Sequence[Row]], bool]) -> None:
        """Scan in ascending order as ``Store.scan`` does. Raises StoreError, StoreUnusable."""
        trio.run(partial(self._scan, table, start, stop, feed))

    async def _scan(self, table: Table, start: bytes, stop: bytes, feed: Callable[[Sequence[Row]], bool]) -> None:
        async with await HBaseStore.open(self._addresses, self._settings, self._tls) as store:
            await store.scan(table, start, stop, feed)

"""Writes a commit: puts its rows and cells, moves the head, then removes rows and rolls back.

    a put fails, or finds another owner           the commit did not happen: the head was never moved
    another instance moved the head               ``Owners.commit`` determines if the commit came first
    no connection was free to move the head       the commit did not happen
    the answer to the head's move was lost        unknown
    a removal or rollback after it fails          unknown: the puts have taken effect

Rows of the metadata table that no head governs take effect when they are put: after such a put the outcome of a failed
commit is unknown.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, RollBack, Table
from plainsong.protocol.keys import metadata_key, stop_after, topic_prefix
from storage.base import Deposed, NothingWritten, StoreConflict, StoreError, rolled_back
from storage.gather import gather
from storage.hbase.cells import governor
from storage.hbase.gateway import thrift
from storage.hbase.layout import (
    CELL,
    NO_OWNER,
    PRESENT,
    hashed,
    kind_of,
    pack,
    removing_columns,
    rolling_column,
    stamp_of,
    unpack,
)
from storage.hbase.owners import HEAD
from storage.hbase.pool import NoConnectionFree
from storage.hbase.scan import ScanRange, scan, scanned_row

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from storage.base import Claim
    from storage.hbase.cells import Cells
    from storage.hbase.layout import Packed
    from storage.hbase.owners import Owners
    from storage.hbase.pool import Pool
    from storage.hbase.scan import ScannedRow
    from storage.hbase.tables import Tables


class CommitWriter:
    """Writes commits under their claims."""

    def __init__(
        self, owners: Owners, cells: Cells, row_writer: RowWriter, row_remover: RowRemover, max_row_bytes: int
    ) -> None:
        self._owners = owners
        self._cells = cells
        self._row_writer = row_writer
        self._row_remover = row_remover
        self._max_row_bytes = max_row_bytes

    async def write(self, commit: Sequence[Operation], claim: Claim, expect: Sequence[Expect]) -> None:
        """Write a commit part by part, in order. The caller has checked the expectations.

        Raises:
          StoreConflict: an expectation no longer holds; nothing happened.
          Deposed, NothingWritten, StoreError: as in ``Store.write``.
        """
        progress = _CommitProgress()
        try:
            for part in commit_parts(commit):
                await self._write(part, claim, {wanted.key: wanted for wanted in expect}, progress)
        except Deposed as error:
            if progress.is_open:
                error.happened = None
            raise
        except StoreError as error:
            if progress.is_open:
                raise
            raise NothingWritten(error.detail, hint=error.hint) from error

    async def _write(
        self, part: CommitPart, claim: Claim, expected: dict[bytes, Expect], progress: _CommitProgress
    ) -> None:
        batch = part.batch
        self._refuse_too_large(batch)
        if not batch.is_empty:
            await self._put_free_cells(batch, claim, expected, progress)
            await gather(self._calls(batch, claim))
            await self._commit(claim, progress)
        elif not progress.is_open:
            await self._owners.check(claim)
        if part.removals or part.rollback:
            progress.is_open = True
            await self._follow(part)
            # Still the owner: an instance that claims the topic from now on reads the rows in this state.
            await self._owners.check(claim)

    async def _follow(self, part: CommitPart) -> None:
        for removal in part.removals:
            await self._row_remover.remove(removal.table, removal.keys)
        if part.rollback is not None:
            await self._row_remover.roll_back(part.rollback)

    async def _commit(self, claim: Claim, progress: _CommitProgress) -> None:
        """Move the head. Afterwards the commit may have happened, unless the answer rules that out."""
        before, progress.is_open = progress.is_open, True
        try:
            await self._owners.commit(claim)
        except (Deposed, NoConnectionFree):
            progress.is_open = before
            raise

    def _refuse_too_large(self, batch: CommitBatch) -> None:
        largest = max((len(value) for value in batch.metadata.values() if value is not None), default=0)
        largest = max((largest, *(max(map(len, put.values), default=0) for put in batch.rows)))
        if largest > self._max_row_bytes:
            raise StoreError(
                f"a row of {largest} bytes exceeds storage.hbase.max_cell_bytes",
                hint=("nothing was written; raise that setting"),
            )

    async def _put_free_cells(
        self, batch: CommitBatch, claim: Claim, expected: dict[bytes, Expect], progress: _CommitProgress
    ) -> None:
        """Put the cells that no head governs; those with an expectation first, as they may refuse the whole commit."""
        free = {key: value for key, value in batch.metadata.items() if governor(key) != metadata_key(claim.name)}
        for key in sorted(free, key=lambda key: key not in expected):
            value, wanted = free[key], expected.get(key)
            kind, other = kind_of(key), governor(key)
            if kind and other:  # a row of a topic that was not claimed: only tests write one
                await self._owners.record_kind(other, kind)
            before, progress.is_open = progress.is_open, True
            if wanted is None:
                await self._cells.put(key, value, claim.epoch)
                continue
            try:
                await self._cells.put_expected(key, wanted.value, value, claim.epoch)
            except StoreConflict as error:
                if before:
                    raise StoreError(error.detail) from error
                raise

    def _calls(self, batch: CommitBatch, claim: Claim) -> Iterator[Callable[[], Awaitable[None]]]:
        for put in batch.rows:
            yield from self._row_writer.calls(put, claim)
        prefix = metadata_key(claim.name)
        governed = {key: value for key, value in batch.metadata.items() if governor(key) == prefix}
        for kind in self._owners.unrecorded_kinds(claim, (key for key, value in governed.items() if value is not None)):
            yield partial(self._owners.record_kind, prefix, kind)
        for key, value in governed.items():
            yield partial(self._owners.put, key, value, claim)


class _CommitProgress:
    """The state of a commit while it is written."""

    def __init__(self) -> None:
        self.is_open = False
        """True if part of the commit may have taken effect."""


# --- parts of a commit -----------------------------------------------------------------------------
#
#     batch      all puts, and removals of metadata, merged to the last operation on each row; takes effect at once
#     removals   of messages and payloads, after the batch: no reader can see those rows any longer
#     rollback   after the removals; operations after it are the next part


class CommitBatch:
    """Puts of a commit between two rollbacks."""

    def __init__(self) -> None:
        self.rows: list[Put] = []
        """Rows of messages and payloads."""
        self.metadata: dict[bytes, bytes | None] = {}
        """The last operation on each row of the metadata table; None: removed."""

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to put."""
        return not (self.rows or self.metadata)


class CommitPart:
    """A batch, and the operations that follow it."""

    def __init__(self) -> None:
        self.batch = CommitBatch()
        self.removals: list[Delete] = []
        self.rollback: RollBack | None = None
        self._gone: set[tuple[Table, bytes]] = set()

    def take(self, operation: Operation) -> bool:
        """Add an operation. Returns False if it must come after everything in this part."""
        if self.rollback is not None:
            return False
        if isinstance(operation, RollBack):
            self.rollback = operation
        elif operation.table is Table.METADATA:
            self._take_metadata(operation)
        elif isinstance(operation, Delete):
            self.removals.append(operation)
            self._gone.update((operation.table, key) for key in operation.keys)
        elif self._gone and any(
            (operation.table, operation.prefix + each) in self._gone for each in operation.suffixes
        ):
            return False
        else:
            self.batch.rows.append(operation)
        return True

    def _take_metadata(self, operation: Put | Delete) -> None:
        if isinstance(operation, Delete):
            self.batch.metadata.update(dict.fromkeys(operation.keys))
            return
        keys = (operation.prefix + suffix for suffix in operation.suffixes)
        self.batch.metadata.update(zip(keys, operation.values, strict=True))


def commit_parts(commit: Sequence[Operation]) -> Iterator[CommitPart]:
    """Yield the parts of a commit in order; usually one."""
    part = CommitPart()
    for operation in commit:
        if not part.take(operation):
            yield part
            part = CommitPart()
            part.take(operation)
    yield part


# --- puts of messages and payloads: only if absent, so that no late attempt replaces an acknowledged row ---
#
#     absent                                     put
#     the same bytes                             an earlier attempt of ours has succeeded: done
#     of a commit that will never take effect    invisible to all readers: replaced
#     anything else                              another owner has put it


class RowWriter:
    """Packs rows of messages and payloads, and puts them."""

    def __init__(self, pool: Pool, tables: Tables, owners: Owners, *, max_cell_bytes: int) -> None:
        self._pool = pool
        self._tables = tables
        self._owners = owners
        self._max_cell_bytes = max_cell_bytes

    def calls(self, operation: Put, claim: Claim) -> Iterator[Callable[[], Awaitable[None]]]:
        """Yield calls that put the rows, in as few rows of HBase as the bound on cells allows, in any order.

        They raise:
          Deposed: another owner has put a row there.
          StoreError: some rows may have been put; they take effect if the commit does.
        """
        keys = [operation.prefix + suffix for suffix in operation.suffixes]
        # No head governs rows of a topic other than the claim's; only tests of stores write those.
        own = not keys or topic_prefix(keys[0]) == metadata_key(claim.name)
        stamp = self._owners.next_stamp(claim) if own else NO_OWNER
        for packed in pack(keys, operation.values, stamp, self._max_cell_bytes):
            yield partial(self._put, operation.table, packed, claim)

    async def _put(self, table: Table, packed: Packed, claim: Claim) -> None:
        row = hashed(packed.key)
        name = self._tables[table]
        mutation = thrift.Mutation(column=CELL, value=packed.cell)
        before: bytes | None = None
        while not await self._pool.call("checkAndPut", name, row, CELL, before, mutation, {}):
            found = await self._pool.call("getRow", name, row, {})
            before = found[0].columns[CELL].value if found and CELL in found[0].columns else None
            if before == packed.cell:
                return
            if before is not None and not (await self._owners.head_of(metadata_key(claim.name))).is_void(
                stamp := stamp_of(before)
            ):
                if stamp.epoch <= claim.epoch:
                    raise StoreError(f"row {packed.key.hex()} was put earlier with other bytes")
                raise Deposed(f"row {packed.key.hex()} of {name.decode()} was put in epoch {stamp.epoch}")


# --- removals and rollbacks: cells next to the packed rows, until all rows of one are removed -------
#
# A row of HBase is removed by the timestamp with which it was read. So a row that has replaced it since then stays, and
# the removal does not hide later puts, whatever their clocks say.


_FIRST_REMOVAL_PAGE = 16
#: Rows of metadata read in one call.
_ROWS = 500


class RowRemover:
    """Removes rows and rolls them back."""

    def __init__(self, pool: Pool, tables: Tables, owners: Owners, *, timeout_s: float) -> None:
        self._pool = pool
        self._tables = tables
        self._owners = owners
        self._timeout_s = timeout_s

    async def remove(self, table: Table, keys: Sequence[bytes]) -> None:
        """Remove rows; absent ones are ignored. Raises StoreError: some may have been removed."""
        if table is Table.METADATA:
            for at in range(0, len(keys), _ROWS):
                found = await self._pool.call("getRows", self._tables[table], list(keys[at : at + _ROWS]), {})
                await gather(self._gone(table, scanned_row(row)) for row in found)
            return
        by_topic: dict[bytes, list[bytes]] = {}
        for key in keys:
            by_topic.setdefault(topic_prefix(key), []).append(key)
        for wanted in by_topic.values():
            await self._remove_of_topic(table, wanted)

    async def _remove_of_topic(self, table: Table, keys: list[bytes]) -> None:
        gone = set(keys)
        last = max(gone)
        head = await self._owners.head_of(topic_prefix(last))
        whole: list[Callable[[], Awaitable[None]]] = []

        async def change(found: ScannedRow) -> bool:
            key = found.key[1:]
            if HEAD in found.columns:
                return True
            stamp = stamp_of(found.columns[CELL]) if CELL in found.columns else None
            if stamp is not None and not head.counts(stamp) and not head.is_void(stamp):
                return key < last  # the cell belongs to a commit in progress
            void = stamp is None or head.is_void(stamp)
            rows = [] if void else unpack(key, found.columns)
            if all(row[0] in gone for row in rows):
                whole.append(self._gone(table, found))
            else:
                columns = removing_columns(found.columns[CELL], [row[0] for row in rows], gone)
                await self._put_marks(table, found.key, columns)
            return key < last

        await self._each(table, min(gone), topic_prefix(last), change)
        await gather(whole)

    async def remove_whole(self, table: Table, found: Iterable[ScannedRow]) -> None:
        """Remove rows of HBase as they were read, whatever is in them. Raises StoreError: some may be removed."""
        await gather(self._gone(table, row) for row in found)

    def _gone(self, table: Table, found: ScannedRow) -> Callable[[], Awaitable[None]]:
        """Return the call that removes a row of HBase as it was read."""
        call = partial(self._pool.call, "deleteAllRowTs", self._tables[table])
        return partial(call, found.key, found.time_ms, {})

    async def roll_back(self, operation: RollBack) -> None:
        """Roll back the pointer's rows in the range. Raises StoreError: some may have been rolled back."""
        if operation.start >= operation.stop:
            return
        head = await self._owners.head_of(topic_prefix(operation.start))

        async def change(found: ScannedRow) -> bool:
            key = found.key[1:]
            counts = CELL in found.columns and head.counts(stamp_of(found.columns[CELL]))
            rows = unpack(key, found.columns) if counts else []
            inside = [row for row in rows if operation.start <= row[0] < operation.stop]
            turned = [row[0] for row in rolled_back(inside, operation.pointer)]
            if turned:
                column = rolling_column(found.columns[CELL], operation.pointer, turned[0], turned[-1])
                await self._put_marks(Table.MESSAGE, found.key, [column])
            return key < operation.stop

        await self._each(Table.MESSAGE, operation.start, topic_prefix(operation.start), change)

    async def _each(
        self, table: Table, start: bytes, prefix: bytes, change: Callable[[ScannedRow], Awaitable[bool]]
    ) -> None:
        """Call ``change`` with each row of HBase from the one that contains ``start`` on, until it returns False."""

        async def take(page: list[ScannedRow]) -> bool:
            for found in page:
                if not await change(found):
                    return False
            return True

        wanted = ScanRange(self._tables[table], hashed(start), stop_after(hashed(prefix)))
        await scan(self._pool, wanted, take, first_page=_FIRST_REMOVAL_PAGE, timeout_s=self._timeout_s)

    async def _put_marks(self, table: Table, row: bytes, columns: list[bytes]) -> None:
        mutations = [thrift.Mutation(column=column, value=PRESENT) for column in columns]
        if mutations:
            await self._pool.call("mutateRow", self._tables[table], row, mutations, {})

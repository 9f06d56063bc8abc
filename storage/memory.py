"""A store in memory: the reference for all stores.

Each table is a dict and a sorted list of its keys. Rows are added and removed in runs of neighbours, so a run is one
slice of the list.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Delete, Put, RollBack, Table
from plainsong.protocol.keys import SYSTEM
from storage.base import (
    Claim,
    StoreConflict,
    StoreError,
    StoreStatistics,
    StoreTraits,
    chunks,
    drop_rows,
    rolled_back,
)
from storage.spawned import SpawnsWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.names import TopicName
    from storage.base import RawRow, Row

#: Keys per step of a walk. Each step searches for its position again, since other tasks change the list in between.
_WALK_KEYS = 256


class MemoryTable:
    """One table: an ordered map from key to value."""

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}
        #: Number of puts and removals of rows whose keys do not begin with ``SYSTEM``.
        self.changes = 0
        self._keys: list[bytes] = []

    def put(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Store rows, given in ascending order of their keys."""
        self._count(keys)
        new = [key for key in keys if key not in self.rows]
        self.rows.update(zip(keys, values, strict=True))
        if not new:
            return
        at = bisect_left(self._keys, new[0])
        if at == len(self._keys) or new[-1] < self._keys[at]:
            self._keys[at:at] = new
        else:
            self._keys += new
            self._keys.sort()

    def copy(self) -> MemoryTable:
        """Return a copy of the table."""
        other = MemoryTable()
        other.rows, other._keys = dict(self.rows), list(self._keys)
        return other

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove rows; absent ones are ignored."""
        self._count(keys)
        gone = sorted({key for key in keys if self.rows.pop(key, None) is not None})
        if not gone:
            return
        at = bisect_left(self._keys, gone[0])
        if self._keys[at : at + len(gone)] == gone:
            del self._keys[at : at + len(gone)]
        else:
            self._keys = [key for key in self._keys if key in self.rows]

    def _count(self, keys: Sequence[bytes]) -> None:
        self.changes += any(not key.startswith(SYSTEM) for key in keys)

    def walk(self, start: bytes, stop: bytes, *, reverse: bool) -> Iterator[Row]:
        """Yield the rows of ``[start, stop)`` in order. Rows may be added and removed between two steps."""
        while True:
            low, high = bisect_left(self._keys, start), bisect_left(self._keys, stop)
            block = self._keys[max(low, high - _WALK_KEYS) : high] if reverse else self._keys[low:high][:_WALK_KEYS]
            if not block:
                return
            if reverse:
                stop = block[0]
                block.reverse()
            else:
                start = block[-1] + b"\x00"
            for key in block:
                value = self.rows.get(key)
                if value is not None:
                    yield key, value


class MemoryView:
    """``storage.base.StoreView``: a copy of the tables."""

    exact = True

    def __init__(self, tables: dict[Table, MemoryTable], ends_at: float) -> None:
        self._store = MemoryStore()
        self._store.tables = {table: rows.copy() for table, rows in tables.items()}
        self._ends_at = ends_at

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``StoreView.get``."""
        self._refuse_if_over()
        return await self._store.get(table, key)

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
        """See ``StoreView.scan``."""
        self._refuse_if_over()
        await self._store.scan(table, start, stop, feed, reverse=reverse, first_chunk=first_chunk, values=values)

    def renew(self, max_s: float) -> None:
        """See ``StoreView.renew``."""
        if trio.current_time() < self._ends_at:
            self._ends_at = trio.current_time() + max_s

    async def aclose(self) -> None:
        """See ``StoreView.aclose``."""
        await self._store.aclose()

    def _refuse_if_over(self) -> None:
        if trio.current_time() >= self._ends_at:
            raise StoreError("the view of the store has ended")


class MemoryStore(SpawnsWrites):
    """``storage.base.Store`` in memory, without threads: every await is a checkpoint. Lost with the process."""

    traits = StoreTraits(
        kind="memory",
        durability="acknowledged messages are only in this process's memory: they are lost when it ends",
        max_row_bytes=None,
        whole_commits=True,
    )
    waker = None

    def __init__(self) -> None:
        self.tables = {table: MemoryTable() for table in Table}
        self._closed = False

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``. There is one writer, and nothing to reopen."""
        await self._enter()
        return Claim(name, 0)

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``. There is no other writer."""
        del claim
        await self._enter()

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``. All or nothing, because no other task runs during it."""
        await self._enter()
        self.compare(expect)
        self.apply(commit)

    def compare(self, expect: Sequence[Expect]) -> None:
        """Raise StoreConflict for the first expectation that does not hold."""
        for wanted in expect:
            if self.tables[wanted.table].rows.get(wanted.key) != wanted.value:
                raise StoreConflict(f"row {wanted.key.hex()} of the {wanted.table.name.lower()} table has changed")

    def apply(self, commit: Sequence[Operation]) -> None:
        """Apply the operations, in order."""
        for operation in commit:
            if isinstance(operation, Put):
                keys = [operation.prefix + suffix for suffix in operation.suffixes]
                self.tables[operation.table].put(keys, operation.values)
            elif isinstance(operation, RollBack):
                for key, value in self.turned(operation):
                    self.tables[Table.MESSAGE].rows[key] = value
            else:
                self.tables[operation.table].remove(operation.keys)

    def turned(self, operation: RollBack) -> Iterator[Row]:
        """Yield the rows that a rollback changes, in their new form. The table may change between two rows."""
        rows = self.tables[Table.MESSAGE].walk(operation.start, operation.stop, reverse=False)
        return rolled_back(rows, operation.pointer)

    async def discard(self, table: Table, keys: Sequence[bytes]) -> None:
        """See ``Store.discard``."""
        await self._enter()
        self.apply([Delete(table, keys)])

    async def drop(self, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> int:
        """See ``Store.drop``. Removes row by row."""
        return await drop_rows(self, table, ranges)

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """See ``Store.may_have``. Exact."""
        return next(self.tables[table].walk(start, stop, reverse=False), None) is not None

    @property
    def topics_number(self) -> int | None:
        """See ``Store.topics_number``."""
        return None if self._closed else self.tables[Table.METADATA].changes

    async def file_of(self, table: Table, key: bytes) -> str | None:
        """See ``Store.file_of``. There are no files."""
        del table, key
        await self._enter()
        return None

    async def begin_files(self) -> None:
        """See ``Store.begin_files``. Memory has no damage."""
        await self._enter()

    async def scan_raw(self, table: Table, start: bytes, stop: bytes, take: Callable[[list[RawRow]], object]) -> None:
        """See ``Store.scan_raw``. Every row can be read."""
        del table, start, stop, take
        await self._enter()

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Store.get``."""
        await self._enter()
        return self.tables[table].rows.get(key)

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
        """See ``Store.scan``. ``feed`` runs on the event loop."""
        await self._enter()
        rows = self.tables[table].walk(start, stop, reverse=reverse)
        for chunk in chunks(rows if values else ((key, b"") for key, _ in rows), first_chunk):
            if not feed(chunk):
                return
            await self._enter()

    async def reclaim(self, table: Table, start: bytes, stop: bytes) -> None:
        """See ``Store.reclaim``. Removing a row frees its memory."""
        await self._enter()

    async def tidy(self) -> int:
        """See ``Store.tidy``. There is nothing to remove."""
        await trio.lowlevel.checkpoint()
        return 0

    async def pin(self, max_s: float) -> MemoryView:
        """See ``Store.pin``. Copies the tables."""
        await self._enter()
        return MemoryView(self.tables, trio.current_time() + max_s)

    def statistics(self) -> StoreStatistics:
        """See ``Store.statistics``. There is no disk."""
        return StoreStatistics(bytes=None, free_bytes=None)

    async def aclose(self) -> None:
        """See ``Store.aclose``. Drops the rows."""
        await trio.lowlevel.checkpoint()
        self._closed = True
        self.tables = {table: MemoryTable() for table in Table}

    async def _enter(self) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise StoreError("the store is closed")

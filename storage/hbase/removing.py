"""Removing and rolling back rows that are packed with others: by cells beside theirs, until all of them are gone.

A row of HBase goes as it was seen, by its time: one that has come to the same place since stays, and what removes it
hides nothing that is put later, by whatever clock.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.keys import stop_after, topic_prefix
from storage.hbase.gateway import thrift
from storage.hbase.owners import HEAD
from storage.hbase.packed import CELL, SAID, removing_columns, rolling_column, stamp_of, unpack
from storage.hbase.scanning import Range, found_in, scan
from storage.hbase.tables import hashed
from storage.rolled import rolled_back
from storage.together import together

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from protocol.effects import RollBack
    from storage.hbase.owners import Owners
    from storage.hbase.pool import Pool
    from storage.hbase.scanning import Found
    from storage.hbase.tables import Tables

_FIRST_PAGE = 16
#: Rows of metadata looked at in one call.
_ROWS = 500


class Removing:
    """Changes what is there of rows."""

    def __init__(self, pool: Pool, tables: Tables, owners: Owners, *, timeout_s: float) -> None:
        self._pool = pool
        self._tables = tables
        self._owners = owners
        self._timeout_s = timeout_s

    async def remove(self, table: Table, keys: Sequence[bytes]) -> None:
        """Remove rows; those that are not there are no error. Raises StoreError: some may be removed."""
        if table is Table.METADATA:
            for at in range(0, len(keys), _ROWS):
                found = await self._pool.call("getRows", self._tables[table], list(keys[at : at + _ROWS]), {})
                await together(self._gone(table, found_in(row)) for row in found)
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

        async def change(found: Found) -> bool:
            key = found.key[1:]
            if HEAD in found.columns:
                return True
            stamp = stamp_of(found.columns[CELL]) if CELL in found.columns else None
            if stamp is not None and not head.counts(stamp) and not head.is_void(stamp):
                return key < last  # of a commit under way
            void = stamp is None or head.is_void(stamp)
            rows = [] if void else unpack(key, found.columns)
            if all(row[0] in gone for row in rows):
                whole.append(self._gone(table, found))
            else:
                columns = removing_columns(found.columns[CELL], [row[0] for row in rows], gone)
                await self._say(table, found.key, columns)
            return key < last

        await self._each(table, min(gone), topic_prefix(last), change)
        await together(whole)

    def _gone(self, table: Table, found: Found) -> Callable[[], Awaitable[None]]:
        """What removes a row of HBase as it was seen."""
        call = partial(self._pool.call, "deleteAllRowTs", self._tables[table])
        return partial(call, found.key, found.time_ms, {})

    async def roll_back(self, operation: RollBack) -> None:
        """Turn the pointer's sign in its rows of the range. Raises StoreError: some may be turned."""
        if operation.start >= operation.stop:
            return
        head = await self._owners.head_of(topic_prefix(operation.start))

        async def change(found: Found) -> bool:
            key = found.key[1:]
            counts = CELL in found.columns and head.counts(stamp_of(found.columns[CELL]))
            rows = unpack(key, found.columns) if counts else []
            inside = [row for row in rows if operation.start <= row[0] < operation.stop]
            turned = [row[0] for row in rolled_back(inside, operation.pointer)]
            if turned:
                column = rolling_column(found.columns[CELL], operation.pointer, turned[0], turned[-1])
                await self._say(Table.MESSAGE, found.key, [column])
            return key < operation.stop

        await self._each(Table.MESSAGE, operation.start, topic_prefix(operation.start), change)

    async def _each(
        self, table: Table, start: bytes, prefix: bytes, change: Callable[[Found], Awaitable[bool]]
    ) -> None:
        """Call ``change`` with each of HBase's rows from the one with ``start`` on, until it says False."""

        async def take(page: list[Found]) -> bool:
            for found in page:
                if not await change(found):
                    return False
            return True

        wanted = Range(self._tables[table], hashed(start), stop_after(hashed(prefix)))
        await scan(self._pool, wanted, take, first_page=_FIRST_PAGE, timeout_s=self._timeout_s)

    async def _say(self, table: Table, row: bytes, columns: list[bytes]) -> None:
        mutations = [thrift.Mutation(column=column, value=SAID) for column in columns]
        if mutations:
            await self._pool.call("mutateRow", self._tables[table], row, mutations, {})

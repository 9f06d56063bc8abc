"""Removing rows in bounded steps: a list of keys, a discard, a breath, the next list.

The breath is as long as the step took, so that cleaning never takes more than half of a core or of the
disk from those who publish and poll.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from protocol.effects import Table
from protocol.ids import pack_position
from protocol.keys import READER, stop_after, system_key
from protocol.rows import own_ttl_s
from protocol.topic.asks import SliceCleaned
from protocol.topic.usage import ROW_BYTES
from storage.base import read_rows

if TYPE_CHECKING:
    from protocol.names import TopicName
    from storage.base import Row, Store

#: Rows removed from a range before its space is asked back: below, the store's own compactions do.
RECLAIM_ROWS = 50_000


class Sweep:
    """Removes ranges of rows, ``step_rows`` at a time."""

    def __init__(self, store: Store, step_rows: int) -> None:
        self._store = store
        self._step_rows = step_rows

    async def remove(self, table: Table, start: bytes, stop: bytes) -> int:
        """Remove all rows of a range; their number. Space is given back when there were many."""
        removed = 0
        at = start
        while at < stop:
            begun_s = trio.current_time()
            rows = await read_rows(self._store, table, at, stop, limit=self._step_rows, values=False)
            if rows:
                await self._store.discard(table, [key for key, _ in rows])
                removed += len(rows)
            if len(rows) < self._step_rows:
                break
            # Go on behind the last one: starting over would pass all the tombstones again.
            at = rows[-1][0] + b"\x00"
            await trio.sleep(trio.current_time() - begun_s)
        if removed >= RECLAIM_ROWS:
            await self._store.reclaim(table, start, stop)
        return removed

    async def remove_due(self, prefix: bytes, first_ms: int, last_ms: int, now_ms: int) -> SliceCleaned:
        """Remove the messages of a slice whose own time to live has passed."""
        start, stop = prefix + pack_position(first_ms, 0), prefix + pack_position(last_ms + 1, 0)
        messages = size = next_expiry_ms = 0
        while True:
            begun_s = trio.current_time()
            rows = await read_rows(self._store, Table.MESSAGE, start, stop, limit=self._step_rows)
            due, later_ms = _due(rows, now_ms)
            if due:
                await self._store.discard(Table.MESSAGE, [key for key, _ in due])
            messages += len(due)
            size += sum(len(value) + ROW_BYTES for _, value in due)
            next_expiry_ms = min(filter(None, (next_expiry_ms, later_ms)), default=0)
            if len(rows) < self._step_rows:
                return SliceCleaned(first_ms, last_ms, messages, size, next_expiry_ms)
            start = rows[-1][0] + b"\x00"
            await trio.sleep(trio.current_time() - begun_s)

    async def remove_readers(self, name: TopicName, first: int, last: int) -> None:
        """Remove the readers' rows of generations that are gone."""
        start, stop = system_key(READER, name, first), stop_after(system_key(READER, name, last))
        await self.remove(Table.METADATA, start, stop)


def _due(rows: list[Row], now_ms: int) -> tuple[list[Row], int]:
    """Those that have expired by themselves, and when the next of the others will (0: never)."""
    due = []
    later_ms = 0
    for row in rows:
        ttl_s = own_ttl_s(row[1])
        if ttl_s is None:
            continue
        expires_ms = int.from_bytes(row[0][-10:-2], "big") + ttl_s * 1000
        if expires_ms < now_ms:
            due.append(row)
        else:
            later_ms = min(later_ms or expires_ms, expires_ms)
    return due, later_ms

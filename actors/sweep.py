"""Removing rows in bounded steps: a list of keys, a discard, a breath, the next list.

The breath is as long as the step took, so that cleaning never takes more than half of a core or of the
disk from those who publish and poll.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

import trio

from protocol.effects import Table
from protocol.ids import pack_position
from protocol.keys import (
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    READER,
    DamagedRow,
    stop_after,
    system_key,
    topic_of,
)
from protocol.records import Reader
from protocol.rows import is_intact, own_ttl_s
from protocol.topic.asks import SliceCleaned
from protocol.topic.usage import ROW_BYTES
from storage.base import read_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.names import TopicName
    from storage.base import Row, Store

log = logging.getLogger(__name__)

#: Rows removed from a range before its space is asked back: below, the store's own compactions do.
MIN_RECLAIM_ROWS = 50_000
#: Rows whose space is asked back at a time. A store cannot be closed while it gives space back, and a million
#: small rows take it a good part of a second.
RECLAIM_ROWS = 500_000


class Sweep:
    """Removes ranges of rows, ``step_rows`` at a time."""

    def __init__(self, store: Store, step_rows: int) -> None:
        self._store = store
        self._step_rows = step_rows

    async def remove(self, table: Table, start: bytes, stop: bytes, is_ours: Callable[[Row], bool]) -> int:
        """Remove the rows of a range; their number. Space is given back piece by piece when there were many.

        Args:
          is_ours: whether a row can be read at all. One that cannot is kept for somebody to look at:
            nobody knows what it was.
        """
        removed = kept = unclaimed = 0
        piece = at = start
        while at < stop:
            begun_s = trio.current_time()
            rows = await read_rows(self._store, table, at, stop, limit=self._step_rows)
            ours = [row[0] for row in rows if is_ours(row)]
            if ours:
                await self._store.discard(table, ours)
            removed += len(ours)
            unclaimed += len(ours)
            kept += len(rows) - len(ours)
            if len(rows) < self._step_rows:
                break
            # Go on behind the last one: starting over would pass all the tombstones again.
            at = rows[-1][0] + b"\x00"
            await trio.sleep(trio.current_time() - begun_s)
            if unclaimed >= RECLAIM_ROWS:
                await self._store.reclaim(table, piece, at)
                piece, unclaimed = at, 0
        if removed >= MIN_RECLAIM_ROWS and unclaimed:
            await self._store.reclaim(table, piece, stop)
        if kept:
            log.warning(
                "rows that cannot be read were kept", extra={"table": table.name, "rows": kept, "from": start.hex()}
            )
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
        await self.remove(Table.METADATA, start, stop, _is_reader)


def is_message(row: Row) -> bool:
    """Whether a row of the message table can be read."""
    return _is_topic(row[0][:-MESSAGE_TAIL_BYTES]) and is_intact(row[1])


def is_payload(row: Row) -> bool:
    """Whether a row of the payload table can be read."""
    return _is_topic(row[0][:-PAYLOAD_TAIL_BYTES]) and is_intact(row[1])


def _is_reader(row: Row) -> bool:
    try:
        Reader.decode(row[1])
    except DamagedRow:
        return False
    return True


@lru_cache(maxsize=64)
def _is_topic(start: bytes) -> bool:
    """Whether a key's start is ``ns:topic:`` and no more; asked of every row, and the same for most."""
    try:
        return topic_of(start)[1] == b""
    except DamagedRow:
        return False


def _due(rows: list[Row], now_ms: int) -> tuple[list[Row], int]:
    """Those that have expired by themselves, and when the next of the others will (0: never)."""
    due = []
    later_ms = 0
    for row in rows:
        ttl_s = own_ttl_s(row[1])
        if ttl_s is None:
            continue
        expires_ms = int.from_bytes(row[0][-10:-2], "big") + ttl_s * 1000
        if expires_ms < now_ms and is_message(row):
            due.append(row)
        else:
            later_ms = min(later_ms or expires_ms, expires_ms)
    return due, later_ms

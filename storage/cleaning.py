"""Cleaning: selects rows that can be removed, and removes them in bounded steps.

Unreadable rows are kept for an operator, because their contents are unknown.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES, pack_position
from plainsong.protocol.keys import (
    CHAIN_POINTER,
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    POINTER,
    PRODUCER,
    PRODUCERS,
    READER,
    DamagedRow,
    parse_pointer_key,
    parse_system_key,
    stop_after,
    system_key,
    topic_of,
)
from plainsong.protocol.records import Reader
from plainsong.protocol.rows import NO_PAYLOAD, Stored, decode_row, expires_ms_of, is_intact, own_ttl_s
from plainsong.protocol.topic.asks import SliceCleaned
from plainsong.protocol.topic.pending import transactional_pointers
from plainsong.protocol.topic.usage import ROW_BYTES
from storage.base import read_rows

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from plainsong.protocol.names import TopicName
    from storage.base import Row, Store

log = logging.getLogger(__name__)


def is_message(row: Row) -> bool:
    """True if a row of the message table can be read, and names its payload rows if it has no payload."""
    if not _is_topic(row[0][:-MESSAGE_TAIL_BYTES]) or not is_intact(row[1]):
        return False
    if is_reference(row):
        try:
            Stored.of(decode_row(row[1]))
        except DamagedRow:
            return False
    return True


def is_reference(row: Row) -> bool:
    """True if a message row refers to stored messages. The rest of the row may be damaged."""
    return bool(row[1]) and bool(row[1][0] & NO_PAYLOAD)


def payloads_of(row: Row) -> tuple[bytes, bytes]:
    """Return ``[start, stop)`` of the payload keys that a message row refers to. Raises DamagedRow if it names none."""
    key, value = row
    message = decode_row(value)
    stored = Stored.of(message)
    prefix = key[:-POSITION_BYTES] + stored.pointer_of_payloads(message).to_bytes(8, "big", signed=True)
    return prefix + stored.first, prefix + stored.last + b"\x00"


def is_payload(row: Row) -> bool:
    """True if a row of the payload table can be read."""
    return _is_topic(row[0][:-PAYLOAD_TAIL_BYTES]) and is_intact(row[1])


def counted(row: Row) -> tuple[int, int]:
    """Return the messages and bytes that the topic counted for a row when it was published."""
    if not is_reference(row):
        return 1, len(row[1]) + ROW_BYTES
    stored = Stored.of(decode_row(row[1]))
    return stored.messages, stored.payload_bytes + ROW_BYTES * stored.messages


def is_reader(row: Row) -> bool:
    """True if a reader's row can be read."""
    try:
        Reader.decode(row[1])
    except DamagedRow:
        return False
    return True


def is_pointer(row: Row) -> bool:
    """True if a row's key is that of a write pointer. The value does not matter in a purged generation."""
    try:
        parse_pointer_key(row[0])
    except DamagedRow:
        return False
    return True


def is_producer(row: Row) -> bool:
    """True if a row's key is that of a producer or of producers. The value does not matter in a purged generation."""
    try:
        return parse_system_key(row[0]).kind in (PRODUCER, PRODUCERS)
    except DamagedRow:
        return False


@lru_cache(maxsize=64)
def _is_topic(start: bytes) -> bool:
    """True if a key's start is exactly ``ns:topic:``. Cached, since most rows share it."""
    try:
        return topic_of(start)[1] == b""
    except DamagedRow:
        return False


# --- sweep: a list of keys, a discard, a pause, the next list --------------------------------------
#
# A pause is as long as its step, so that cleaning takes at most half of a core or of the disk from publishes and polls.
#
# A message row that refers to stored messages is removed after their payload rows: after a crash in between, the
# expired row still exists and leads the next round to the rest.


#: Reclaim space of a range only from this number of removed rows on; below, the store's own compactions are enough.
MIN_RECLAIM_ROWS = 50_000
#: Rows whose space is reclaimed at a time. A store cannot be closed during that, and a million small rows take a good
#: part of a second.
RECLAIM_ROWS = 500_000
#: Messages read in a step that drops what they refer to.
DROP_STEP_ROWS = 1000
#: Bytes of values after which a step reads no further list, because a row may have many MiB.
STEP_BYTES = 4 << 20


class Sweep:
    """Removes ranges of rows, ``step_rows`` at a time.

    Args:
      pause_factor: the pause after a step, as a multiple of the step's duration.
    """

    def __init__(self, store: Store, step_rows: int, *, pause_factor: float = 1.0) -> None:
        self._store = store
        self._step_rows = step_rows
        self._pause_factor = pause_factor

    async def remove(self, table: Table, start: bytes, stop: bytes, is_ours: Callable[[Row], bool]) -> int:
        """Remove the rows of a range; return their number. Reclaims the space of many rows piece by piece.

        Args:
          is_ours: returns True if a row can be read; others are kept, unless the store drops ranges without reading.
        """
        if self._store.traits.drops_ranges and table is not Table.METADATA:
            return await self._drop(table, start, stop)
        return await self._remove(table, start, stop, is_ours, _nothing_before)

    async def remove_messages(self, start: bytes, stop: bytes) -> int:
        """Remove the messages of a range and the payload rows they refer to. Returns the number of rows."""
        if self._store.traits.drops_ranges:
            return await self._drop_payloads(start, stop) + await self._drop(Table.MESSAGE, start, stop)
        return await self._remove(Table.MESSAGE, start, stop, is_message, self._remove_payloads)

    async def _drop(self, table: Table, start: bytes, stop: bytes) -> int:
        if not self._store.may_have(table, start, stop):
            return 0
        if table is Table.PAYLOAD:
            # Not beyond the last row, since later rows may still be stored under a pointer.
            last = await read_rows(self._store, table, start, stop, limit=1, reverse=True, values=False)
            if not last:
                return 0
            stop = last[0][0] + b"\x00"
        return await self._store.drop(table, [(start, stop)])

    async def _drop_payloads(self, start: bytes, stop: bytes) -> int:
        """Drop the payload rows that messages of a range refer to. Reads messages only if there are payload rows."""
        generation = stop[:-POSITION_BYTES]
        removed = 0
        # Entries of a chain, which sort before all others, are not referred to by messages.
        stored = generation + (CHAIN_POINTER + 1).to_bytes(8, "big")
        while self._store.may_have(Table.PAYLOAD, stored, stop_after(generation)):
            begun_s = trio.current_time()
            rows, more = await self._read(Table.MESSAGE, start, stop, DROP_STEP_ROWS)
            ranges = [payloads_of(row) for row in rows if is_reference(row) and is_message(row)]
            if ranges:
                removed += await self._store.drop(Table.PAYLOAD, ranges)
            if not more:
                break
            start = rows[-1][0] + b"\x00"
            await trio.sleep((trio.current_time() - begun_s) * self._pause_factor)
        return removed

    async def _remove(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        is_ours: Callable[[Row], bool],
        before: Callable[[list[Row]], Awaitable[int]],
    ) -> int:
        removed = kept = unclaimed = 0
        piece = at = start
        while at < stop:
            begun_s = trio.current_time()
            rows, more = await self._read(table, at, stop)
            ours = [row for row in rows if is_ours(row)]
            took_s = trio.current_time() - begun_s
            removed += await before(ours)
            begun_s = trio.current_time() - took_s
            if ours:
                await self._store.discard(table, [key for key, _ in ours])
            removed += len(ours)
            unclaimed += len(ours)
            kept += len(rows) - len(ours)
            if not more:
                break
            # Continue after the last row: starting over would read all tombstones again.
            at = rows[-1][0] + b"\x00"
            await trio.sleep((trio.current_time() - begun_s) * self._pause_factor)
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

    async def remove_entries(self, start: bytes, stop: bytes) -> int:
        """Remove the entries of a chain in a range, except the last one, from whose link later ones continue."""
        if not self._store.may_have(Table.PAYLOAD, start, stop):
            return 0
        last = await read_rows(self._store, Table.PAYLOAD, start, stop, limit=1, reverse=True, values=False)
        if not last or last[0][0] == start:
            return 0
        return await self.remove(Table.PAYLOAD, start, last[0][0], is_payload)

    async def remove_due(self, prefix: bytes, first_ms: int, last_ms: int, now_ms: int) -> SliceCleaned:
        """Remove the messages of a slice whose own time to live has passed, with their payload rows."""
        start, stop = prefix + pack_position(first_ms, 0), prefix + pack_position(last_ms + 1, 0)
        messages = size = next_expiry_ms = 0
        while True:
            begun_s = trio.current_time()
            rows, more = await self._read(Table.MESSAGE, start, stop)
            due, later_ms = _due(rows, now_ms)
            took_s = trio.current_time() - begun_s
            await self._remove_payloads(due)
            begun_s = trio.current_time() - took_s
            if due:
                await self._store.discard(Table.MESSAGE, [key for key, _ in due])
            for row in due:
                row_messages, row_bytes = counted(row)
                messages += row_messages
                size += row_bytes
            next_expiry_ms = min(filter(None, (next_expiry_ms, later_ms)), default=0)
            if not more:
                return SliceCleaned(first_ms, last_ms, messages, size, next_expiry_ms)
            start = rows[-1][0] + b"\x00"
            await trio.sleep((trio.current_time() - begun_s) * self._pause_factor)

    async def _remove_payloads(self, rows: Sequence[Row]) -> int:
        """Remove the payload rows that message rows refer to, with pauses of its own. Returns their number."""
        removed = 0
        for row in rows:
            if is_reference(row):
                removed += await self.remove(Table.PAYLOAD, *payloads_of(row), is_payload)
        return removed

    async def _read(self, table: Table, start: bytes, stop: bytes, most: int = 0) -> tuple[list[Row], bool]:
        """Return the rows of a step, ``most`` if it is given, and True if more rows may follow."""
        most = most or self._step_rows
        rows: list[Row] = []
        size = 0

        def take(chunk: Sequence[Row]) -> bool:
            nonlocal size
            chunk = chunk[: most - len(rows)]
            rows.extend(chunk)
            size += sum(len(value) for _, value in chunk)
            return len(rows) < most and size < STEP_BYTES

        await self._store.scan(table, start, stop, take, first_chunk=min(most, 1000))
        return rows, len(rows) >= most or size >= STEP_BYTES

    async def remove_readers(self, name: TopicName, first: int, last: int) -> None:
        """Remove the readers' rows of purged generations."""
        start, stop = system_key(READER, name, first), stop_after(system_key(READER, name, last))
        await self.remove(Table.METADATA, start, stop, is_reader)

    async def remove_producers(self, name: TopicName, first: int, last: int) -> None:
        """Remove the rows about producers of purged generations; the row that says that there are any goes last."""
        for kind in (PRODUCER, PRODUCERS):
            start, stop = system_key(kind, name, first), stop_after(system_key(kind, name, last))
            await self.remove(Table.METADATA, start, stop, is_producer)

    async def remove_pointers(self, name: TopicName, first: int, last: int) -> list[int]:
        """Remove the rows about pointers of purged generations. Returns the pointers of transactions."""
        start, stop = system_key(POINTER, name, first), stop_after(system_key(POINTER, name, last))
        found: list[int] = []

        async def note(rows: Sequence[Row]) -> int:
            found.extend(transactional_pointers(parse_pointer_key(key)[2] for key, _ in rows))
            return 0

        await self._remove(Table.METADATA, start, stop, is_pointer, note)
        return found


async def _nothing_before(rows: Sequence[Row]) -> int:
    del rows
    return 0


def _due(rows: Sequence[Row], now_ms: int) -> tuple[list[Row], int]:
    """Return the rows whose own time to live has passed, and when the next of the others expires (0: never)."""
    due = []
    later_ms = 0
    for row in rows:
        ttl_s = own_ttl_s(row[1])
        if ttl_s is None:
            continue
        expires_ms = expires_ms_of(row[0][-POSITION_BYTES:], ttl_s)
        if expires_ms < now_ms and is_message(row):
            due.append(row)
        else:
            later_ms = min(later_ms or expires_ms, expires_ms)
    return due, later_ms

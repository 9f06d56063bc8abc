"""Cleaning: which rows can be removed, and their removal in bounded steps.

What whoever cleans must know of a row before it is removed: whether it can be read, and what goes with it.

A row that cannot be read is kept for somebody to look at: nobody knows what it was.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import (
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
from plainsong.protocol.rows import NO_PAYLOAD, Stored, decode_row, is_intact, own_ttl_s
from plainsong.protocol.topic.asks import SliceCleaned
from plainsong.protocol.topic.pending import transactional_pointers
from plainsong.protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from plainsong.protocol.names import TopicName
    from storage.base import Row, Store

_POSITION_BYTES = 10


def is_message(row: Row) -> bool:
    """Whether a row of the message table can be read, and says where its payloads are if it has none."""
    if not _is_topic(row[0][:-MESSAGE_TAIL_BYTES]) or not is_intact(row[1]):
        return False
    if is_reference(row):
        try:
            Stored.of(decode_row(row[1]))
        except DamagedRow:
            return False
    return True


def is_reference(row: Row) -> bool:
    """Whether a message row stands for stored messages. Anything may be in it otherwise."""
    return bool(row[1]) and bool(row[1][0] & NO_PAYLOAD)


def payloads_of(row: Row) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the payload keys that a message row refers to. Raises DamagedRow when it does not say."""
    key, value = row
    message = decode_row(value)
    stored = Stored.of(message)
    prefix = key[:-_POSITION_BYTES] + stored.pointer_of_payloads(message).to_bytes(8, "big", signed=True)
    return prefix + stored.first, prefix + stored.last + b"\x00"


def is_payload(row: Row) -> bool:
    """Whether a row of the payload table can be read."""
    return _is_topic(row[0][:-PAYLOAD_TAIL_BYTES]) and is_intact(row[1])


def counted(row: Row) -> tuple[int, int]:
    """The messages and bytes that the topic counted for a row when it was published."""
    if not is_reference(row):
        return 1, len(row[1]) + ROW_BYTES
    stored = Stored.of(decode_row(row[1]))
    return stored.messages, stored.payload_bytes + ROW_BYTES * stored.messages


def is_reader(row: Row) -> bool:
    """Whether a reader's row can be read."""
    try:
        Reader.decode(row[1])
    except DamagedRow:
        return False
    return True


def is_pointer(row: Row) -> bool:
    """Whether a row is one about a write pointer; in a generation that is gone its value means nothing any more."""
    try:
        parse_pointer_key(row[0])
    except DamagedRow:
        return False
    return True


def is_producer(row: Row) -> bool:
    """Whether a row is one about producers; in a generation that is gone its value means nothing any more."""
    try:
        return parse_system_key(row[0]).kind in (PRODUCER, PRODUCERS)
    except DamagedRow:
        return False


@lru_cache(maxsize=64)
def _is_topic(start: bytes) -> bool:
    """Whether a key's start is ``ns:topic:`` and no more; asked of every row, and the same for most."""
    try:
        return topic_of(start)[1] == b""
    except DamagedRow:
        return False


# --- sweep -----------------------------------------------------------------------------------------
#
# Removing rows in bounded steps: a list of keys, a discard, a breath, the next list.
#
# The breath is as long as the step took, so that cleaning beside a daemon's own work never takes more than half of
# a core or of the disk from those who publish and poll.
#
# A message row that refers to stored messages goes after their payload rows: wherever a crash comes in between, the
# row is still there, expired, and says to the next round what is left.


log = logging.getLogger(__name__)
#: Rows removed from a range before its space is asked back: below, the store's own compactions do.
MIN_RECLAIM_ROWS = 50_000
#: Rows whose space is asked back at a time. A store cannot be closed while it gives space back, and a million
#: small rows take it a good part of a second.
RECLAIM_ROWS = 500_000
#: Bytes of values after which a step reads no further list: rows may be of many MiB each.
STEP_BYTES = 4 << 20


class Sweep:
    """Removes ranges of rows, ``step_rows`` at a time.

    Args:
      breath: how long to pause behind a step, in times of what it took.
    """

    def __init__(self, store: Store, step_rows: int, *, breath: float = 1.0) -> None:
        self._store = store
        self._step_rows = step_rows
        self._breath = breath

    async def remove(self, table: Table, start: bytes, stop: bytes, is_ours: Callable[[Row], bool]) -> int:
        """Remove the rows of a range; their number. Space is given back piece by piece when there were many.

        Args:
          is_ours: whether a row can be read at all. One that cannot is kept for somebody to look at:
            nobody knows what it was.
        """
        return await self._remove(table, start, stop, is_ours, _nothing_before)

    async def remove_messages(self, start: bytes, stop: bytes) -> int:
        """Remove the messages of a range with the payload rows they refer to; the number of rows of both tables."""
        return await self._remove(Table.MESSAGE, start, stop, is_message, self._remove_payloads)

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
            # Go on behind the last one: starting over would pass all the tombstones again.
            at = rows[-1][0] + b"\x00"
            await trio.sleep((trio.current_time() - begun_s) * self._breath)
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
        """Remove the messages of a slice whose own time to live has passed, and what they refer to."""
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
            await trio.sleep((trio.current_time() - begun_s) * self._breath)

    async def _remove_payloads(self, rows: list[Row]) -> int:
        """Remove the payload rows that message rows refer to, with breaths of its own; their number."""
        removed = 0
        for row in rows:
            if is_reference(row):
                removed += await self.remove(Table.PAYLOAD, *payloads_of(row), is_payload)
        return removed

    async def _read(self, table: Table, start: bytes, stop: bytes) -> tuple[list[Row], bool]:
        """The rows of a step, and whether there may be more behind them."""
        rows: list[Row] = []
        size = 0

        def take(chunk: list[Row]) -> bool:
            nonlocal size
            chunk = chunk[: self._step_rows - len(rows)]
            rows.extend(chunk)
            size += sum(len(value) for _, value in chunk)
            return len(rows) < self._step_rows and size < STEP_BYTES

        await self._store.scan(table, start, stop, take, first_chunk=min(self._step_rows, 1000))
        return rows, len(rows) >= self._step_rows or size >= STEP_BYTES

    async def remove_readers(self, name: TopicName, first: int, last: int) -> None:
        """Remove the readers' rows of generations that are gone."""
        start, stop = system_key(READER, name, first), stop_after(system_key(READER, name, last))
        await self.remove(Table.METADATA, start, stop, is_reader)

    async def remove_producers(self, name: TopicName, first: int, last: int) -> None:
        """Remove what generations that are gone knew of producers; last what says that they knew any."""
        for kind in (PRODUCER, PRODUCERS):
            start, stop = system_key(kind, name, first), stop_after(system_key(kind, name, last))
            await self.remove(Table.METADATA, start, stop, is_producer)

    async def remove_pointers(self, name: TopicName, first: int, last: int) -> list[int]:
        """Remove what was kept of pointers in generations that are gone; the transactions' among them."""
        start, stop = system_key(POINTER, name, first), stop_after(system_key(POINTER, name, last))
        found: list[int] = []

        async def note(rows: list[Row]) -> int:
            found.extend(transactional_pointers(parse_pointer_key(key)[2] for key, _ in rows))
            return 0

        await self._remove(Table.METADATA, start, stop, is_pointer, note)
        return found


async def _nothing_before(rows: list[Row]) -> int:
    del rows
    return 0


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

"""Upkeep: removes cells that mark removed rows, and fences of owners that have left no rows.

    row of the metadata table whose valid cell says *gone*   removed as a whole
    fence of an epoch, once a topic has more than a few      removed, if no row of the topic has that epoch

Both are removed only if they are older than a day by HBase's own clock, and only in the version that was read,
identified by its timestamp. So a put in progress has a day to arrive; and a row can be put again even if HBase's clock
was set back by up to a day, although a removal hides every cell with its timestamp or an earlier one. Rows that no head
governs stay. So do unreadable rows, and everything that depends on them; they are logged once, and do not stop other
removals.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import (
    CHAIN_POINTER,
    HIGH_WATER,
    POINTER,
    PRODUCER,
    PRODUCERS,
    READER,
    SYSTEM,
    DamagedRow,
    parse_payload_key,
    payload_prefix,
    stop_after,
)
from storage.hbase.cells import SERVICE_PREFIX, SlotPair, governor
from storage.hbase.layout import CELL, hashed, stamp_of
from storage.hbase.owners import EPOCHS_COLUMN, EPOCHS_KEY, FENCE, encode_epoch
from storage.hbase.scan import ScanRange, first_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.hbase.layout import Head
    from storage.hbase.owners import Owners
    from storage.hbase.pool import Pool
    from storage.hbase.scan import ScannedRow
    from storage.hbase.tables import Tables

log = logging.getLogger(__name__)
#: Rows of the metadata table read in a step.
STEP_ROWS = 1000
#: A step removes fences only in topics with more of them than this, and reads up to this many rows of a topic to check.
MANY_FENCES = 16
_ROWS_FOR_FENCES = 10_000
#: Maximum number of rows with entries of a chain that the check reads; if there are more, only the first one counts, which
#: has the lowest epoch.
FEW_ENTRIES = 100
#: Maximum number of unreadable rows that are logged, for a table that is damaged throughout.
_MAX_LOGGED = 1000
_KINDS = (HIGH_WATER, READER, POINTER, PRODUCER, PRODUCERS)


class Upkeep:
    """Removes these rows and fences step by step, in cycles from the first row of the table to the last."""

    def __init__(self, pool: Pool, tables: Tables, owners: Owners, *, timeout_s: float, kept_s: float) -> None:
        self._pool = pool
        self._tables = tables
        self._owners = owners
        self._timeout_s = timeout_s
        self._kept_ms = int(kept_s * 1000)
        self._at = b""
        #: Keys of unreadable rows and heads that were logged already.
        self._logged: set[bytes] = set()

    async def step(self) -> int:
        """Do one step. Returns the number of rows and fences removed. Raises StoreError."""
        table = self._tables[Table.METADATA]
        found = await first_rows(self._pool, ScanRange(table, self._at, b""), STEP_ROWS, timeout_s=self._timeout_s)
        self._at = found[-1].key + b"\x00" if len(found) == STEP_ROWS else b""
        before_ms = await self._now_ms() - self._kept_ms
        governors = {row.key: prefix for row in found if (prefix := governor(row.key)) is not None}
        heads = await self._heads_of(list(dict.fromkeys(governors.values())))
        removed = 0
        for row in found:
            head = heads.get(governors.get(row.key, b""))
            if head is not None and row.time_ms < before_ms and self._is_gone(row, head):
                await self._pool.call("deleteAllRowTs", table, row.key, row.time_ms, {})
                removed += 1
        for prefix, head in heads.items():
            if len(head.fences) > MANY_FENCES:
                try:
                    removed += await self._remove_fences(prefix, before_ms)
                except DamagedRow as error:
                    # A row with an unknown epoch may need any of the fences.
                    self._pass_over(prefix, error)
        return removed

    async def _heads_of(self, prefixes: Sequence[bytes]) -> dict[bytes, Head]:
        """Return the heads of these topics, except unreadable ones, which are found by bisection."""
        try:
            return dict(await self._owners.heads_of(prefixes))
        except DamagedRow as error:
            if len(prefixes) == 1:
                self._pass_over(prefixes[0], error)
                return {}
        middle = len(prefixes) // 2
        return {**await self._heads_of(prefixes[:middle]), **await self._heads_of(prefixes[middle:])}

    def _is_gone(self, row: ScannedRow, head: Head) -> bool:
        try:
            return _is_gone(row, head)
        except DamagedRow as error:
            self._pass_over(row.key, error)
            return False

    def _pass_over(self, key: bytes, error: DamagedRow) -> None:
        """Skip a row or head that cannot be read; a reader of its topic gets the error."""
        if key not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(key)
            log.warning("upkeep skips an unreadable row", extra={"key": key.hex(), "why": error.detail})

    async def _now_ms(self) -> int:
        """Return HBase's clock: the timestamp of a cell written now."""
        table = self._tables[Table.METADATA]
        await self._pool.call("atomicIncrement", table, EPOCHS_KEY, EPOCHS_COLUMN, 1)
        (cell,) = await self._pool.call("get", table, EPOCHS_KEY, EPOCHS_COLUMN, {})
        return int(cell.timestamp)

    async def _remove_fences(self, prefix: bytes, before_ms: int) -> int:
        """Remove fences of epochs that no row of the topic has; none if there are too many rows to check."""
        table, row = self._tables[Table.MESSAGE], hashed(prefix)
        head = await self._owners.read(prefix)
        needed = await self._epochs(prefix)
        if needed is None:
            return 0
        first, others = needed
        gone = {epoch for epoch in head.fences if epoch < first and epoch not in others and epoch != head.before.epoch}
        removed = 0
        for cells in await self._pool.call("getRow", table, row, {}):
            for epoch in gone:
                column = FENCE + encode_epoch(epoch)
                cell = cells.columns.get(column)
                if cell is not None and cell.timestamp < before_ms:
                    await self._pool.call("deleteAllTs", table, row, column, cell.timestamp, {})
                    removed += 1
        return removed

    async def _epochs(self, prefix: bytes) -> tuple[int, set[int]] | None:
        """Return the lowest epoch of rows that were not all read, and the epochs of the others; None: too many rows."""
        entries = await self._epochs_of_entries(prefix)
        if entries is None:
            return None
        first, others = entries
        for low, high in _governed(prefix):
            wanted = ScanRange(self._tables[Table.METADATA], low, high)
            found = await first_rows(self._pool, wanted, _ROWS_FOR_FENCES, timeout_s=self._timeout_s)
            if len(found) == _ROWS_FOR_FENCES:
                return None
            others.update(stamp.epoch for row in found for stamp in SlotPair.of(row.columns).stamps())
        # Messages are ordered by epoch, because each owner continues after the last position.
        start = hashed(prefix)
        messages = ScanRange(self._tables[Table.MESSAGE], start + b"\x00", stop_after(start))
        rows = await first_rows(self._pool, messages, 1, timeout_s=self._timeout_s)
        of_messages = _epoch_of(rows[0]) if rows else (await self._owners.read(prefix)).last.epoch
        return of_messages if first is None else min(first, of_messages), others

    async def _epochs_of_entries(self, prefix: bytes) -> tuple[int | None, set[int]] | None:
        """Like ``_epochs``, for the payload table of a topic without stored messages; its chains may have many entries.

        A generation's entries precede its other rows, and are ordered by epoch as messages are. None: there are stored
        messages, which are ordered by pointer, so each would have to be read.
        """
        first: int | None = None
        others: set[int] = set()
        table, start = self._tables[Table.PAYLOAD], hashed(prefix)
        stop = stop_after(start)
        while rows := await first_rows(self._pool, ScanRange(table, start, stop), 1, timeout_s=self._timeout_s):
            entries = _entries_prefix(rows[0].key)
            if entries is None:
                return None
            start = stop_after(entries)
            found = await first_rows(
                self._pool, ScanRange(table, entries, start), FEW_ENTRIES, timeout_s=self._timeout_s
            )
            if len(found) < FEW_ENTRIES:
                others.update(map(_epoch_of, found))
            else:
                first = _epoch_of(found[0]) if first is None else min(first, _epoch_of(found[0]))
        return first, others


def _entries_prefix(key: bytes) -> bytes | None:
    """Return the prefix of a chain's entries if a row of the payload table contains some; else None."""
    try:
        name, generation, pointer, _, _ = parse_payload_key(key[1:])
    except DamagedRow:
        return None
    return hashed(payload_prefix(name, generation, CHAIN_POINTER)) if pointer == CHAIN_POINTER else None


def _epoch_of(row: ScannedRow) -> int:
    """Return the epoch of a row of messages or payloads; 0 if it has none. Raises DamagedRow."""
    return stamp_of(row.columns[CELL]).epoch if CELL in row.columns else 0


def _governed(prefix: bytes) -> list[tuple[bytes, bytes]]:
    """Return the ranges of the metadata table that the head of ``ns:topic:`` governs."""
    if prefix == SERVICE_PREFIX:
        return [(SYSTEM + b"x", stop_after(SYSTEM + b"x"))]
    starts = [SYSTEM + kind + prefix for kind in _KINDS]
    return [(prefix, prefix + b"\x00"), *((start, stop_after(start)) for start in starts)]


def _is_gone(row: ScannedRow, head: Head) -> bool:
    """True if the cell that counts says that the row is removed, and no other cell in it can ever count."""
    if CELL in row.columns:
        return False
    pair = SlotPair.of(row.columns)
    settled = all(head.counts(stamp) or head.is_void(stamp) for stamp in pair.stamps())
    return settled and bool(pair.stamps()) and pair.value(head) is None

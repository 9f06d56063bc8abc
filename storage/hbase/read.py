"""Reading: converts HBase's rows to the store's rows, drops those that do not count, and feeds lists to the caller."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import DamagedRow, stop_after, topic_prefix
from storage.base import GROWTH, MAX_CHUNK_BYTES, MAX_CHUNK_ROWS, Unreadable
from storage.hbase.cells import SlotPair, governor, value_in
from storage.hbase.layout import CELL, HASHES, hashed, is_within_topic, stamp_of, unpack
from storage.hbase.owners import EPOCHS_KEY
from storage.hbase.scan import ScannedRow, ScanRange, first_rows, merged_rows, scan
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from storage.base import Row
    from storage.hbase.layout import Head
    from storage.hbase.owners import Owners
    from storage.hbase.pool import Pool
    from storage.hbase.tables import Tables

#: Rows of HBase in the first page; each may contain thousands of the store's rows.
_FIRST_PAGE = 4
#: Larger pages are unpacked in a thread.
_THREAD_BYTES = 1 << 16


class RowReader:
    """Scans of the three tables."""

    def __init__(self, pool: Pool, tables: Tables, owners: Owners, *, timeout_s: float) -> None:
        self._pool = pool
        self._tables = tables
        self._owners = owners
        self._timeout_s = timeout_s

    async def scan(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        feed: Callable[[Sequence[Row]], bool],
        *,
        reverse: bool,
        first_chunk: int,
        values: bool,
    ) -> None:
        """See ``Store.scan``. ``start`` must be below ``stop``."""
        lists = ChunkedRows(feed, first_chunk, values=values)
        if table is Table.METADATA:
            await self._scan_metadata(ScanRange(self._tables[table], start, stop, reverse), lists, first_chunk)
        elif is_within_topic(start, stop):
            await self._scan_topic(table, start, stop, lists, reverse=reverse)
        else:
            await self._scan_all(table, start, stop, lists, reverse=reverse)
        lists.end()

    async def metadata(self, key: bytes) -> bytes | None:
        """Return the value of a row of the metadata table, None if there is none. Raises StoreError."""
        rows = await self._pool.call("getRow", self._tables[Table.METADATA], key, {})
        found = [ScannedRow(key, {column: cell.value for column, cell in row.columns.items()}) for row in rows]
        return next((value for _, value in await self._valid(found)), None)

    async def _scan_metadata(self, wanted: ScanRange, lists: ChunkedRows, first_page: int) -> None:
        async def take(page: list[ScannedRow]) -> bool:
            return lists.add(iter(await self._valid(page)))

        await scan(self._pool, wanted, take, first_page=first_page, timeout_s=self._timeout_s)

    async def _valid(self, page: list[ScannedRow]) -> list[Row]:
        """Return the rows of metadata on a page in their committed state.

        The heads are read after the page: if a cell counted when the page was read, it still counts, or a later one
        does.
        """
        found = [row for row in page if row.key != EPOCHS_KEY]
        governors = {row.key: governor(row.key) for row in found if CELL not in row.columns}
        wanted = {prefix for prefix in governors.values() if prefix is not None}
        heads = dict(await self._owners.heads_of(wanted))
        rows: list[Row] = []
        for row in found:
            prefix = governors.get(row.key)
            try:
                if prefix is None:
                    value = value_in(row.columns.get(CELL))
                else:
                    pair = SlotPair.of(row.columns)
                    if pair.is_beyond(heads[prefix]):
                        self._owners.forget(prefix)
                        heads[prefix] = await self._owners.head_of(prefix)
                    value = pair.value(heads[prefix])
            except DamagedRow as error:
                raise _unreadable(row.key, error) from error
            if value is not None:
                rows.append((row.key, value))
        return rows

    async def _scan_topic(self, table: Table, start: bytes, stop: bytes, lists: ChunkedRows, *, reverse: bool) -> None:
        """Scan one range of HBase: from the row that contains ``start`` to the one that contains ``stop``."""
        prefix = topic_prefix(start)
        head = await self._owners.head_of(prefix)
        span = _Span(start, stop, head, reverse=reverse)
        begin, bound, end = hashed(start), _hashed_stop(prefix, stop), stop_after(hashed(prefix))
        name = self._tables[table]

        async def take(page: list[ScannedRow]) -> bool:
            return await _take(page, span.rows_of, lists) and not span.passed

        if reverse:
            above = await first_rows(self._pool, ScanRange(name, bound, end), 1, timeout_s=self._timeout_s)
            if above and not await take(above):
                return
            span.passed = False
            end = bound
        await scan(
            self._pool, ScanRange(name, begin, end, reverse), take, first_page=_FIRST_PAGE, timeout_s=self._timeout_s
        )

    async def damaged(
        self, table: Table, start: bytes, stop: bytes, take: Callable[[list[ScannedRow]], object]
    ) -> None:
        """Give ``take`` the unreadable rows of HBase whose last row is in ``[start, stop)`` of a topic."""
        prefix = topic_prefix(start)
        span = _Span(start, stop, await self._owners.head_of(prefix), reverse=False)

        def run(page: list[ScannedRow]) -> None:
            found = [row for row in page if span.is_damaged(row)]
            if found:
                take(found)

        async def look(page: list[ScannedRow]) -> bool:
            await in_thread(run, page, max_wait_s=inf)
            return True

        wanted = ScanRange(self._tables[table], hashed(start), _hashed_stop(prefix, stop))
        await scan(self._pool, wanted, look, first_page=_FIRST_PAGE, timeout_s=self._timeout_s)

    async def _scan_all(self, table: Table, start: bytes, stop: bytes, lists: ChunkedRows, *, reverse: bool) -> None:
        """Scan all topics, for tools that read everything: rows one by one, merged over all hashes."""
        heads: dict[bytes, Head] = {}

        async def take(page: list[ScannedRow]) -> bool:
            for found in page:
                prefix = topic_prefix(found.key[1:])
                if prefix not in heads:
                    heads[prefix] = await self._owners.head_of(prefix)
                span = _Span(start, stop, heads[prefix], reverse=reverse)
                if not lists.add(span.rows_of(found)):
                    return False
            return True

        # A row of HBase has the key of the last row in it: one that extends beyond ``stop`` may begin before it.
        ranges = [
            ScanRange(self._tables[table], bytes([index]) + start, _above(index), reverse) for index in range(HASHES)
        ]
        await merged_rows(self._pool, ranges, _plain_key, take, timeout_s=self._timeout_s)


def _plain_key(key: bytes) -> bytes:
    return key[1:]


def _above(index: int) -> bytes:
    return bytes([index + 1]) if index < HASHES - 1 else b""


def _hashed_stop(prefix: bytes, stop: bytes) -> bytes:
    """Return the end of the range under the topic's own hash, even if ``stop`` is the first key after the topic."""
    return hashed(prefix)[:1] + stop


class _Span:
    """The wanted rows of one topic."""

    def __init__(self, start: bytes, stop: bytes, head: Head, *, reverse: bool) -> None:
        self._start, self._stop = start, stop
        self._head = head
        self._reverse = reverse
        #: True once the scan has reached the end of the range.
        self.passed = False

    def rows_of(self, found: ScannedRow) -> Iterator[Row]:
        """Yield the wanted rows in a row of HBase."""
        key = found.key[1:]
        if CELL not in found.columns:
            return  # a head; or cells that were put after the row was removed: cleaning finds them
        try:
            if not self._head.counts(stamp_of(found.columns[CELL])):
                return
            rows = unpack(key, found.columns)
        except DamagedRow as error:
            raise _unreadable(found.key, error) from error
        if key >= self._stop:
            self.passed = not self._reverse
            rows = [row for row in rows if row[0] < self._stop]
        if rows and rows[0][0] < self._start:
            self.passed = self.passed or self._reverse
            rows = [row for row in rows if row[0] >= self._start]
        yield from reversed(rows) if self._reverse else rows

    def is_damaged(self, found: ScannedRow) -> bool:
        """True if a row of HBase counts or may count, and cannot be read."""
        try:
            for _ in self.rows_of(found):
                break
        except Unreadable:
            return True
        return False


def _unreadable(key: bytes, error: DamagedRow) -> Unreadable:
    return Unreadable(
        f"row {key.hex()} of HBase: {error.detail}",
        hint="`plainsong topic set-aside` takes it out of its topic's order",
    )


async def _take(page: list[ScannedRow], rows_of: Callable[[ScannedRow], Iterator[Row]], lists: ChunkedRows) -> bool:
    def run() -> bool:
        return all(lists.add(rows_of(found)) for found in page)

    if sum(len(value) for found in page for value in found.columns.values()) < _THREAD_BYTES:
        return run()
    return await in_thread(run, max_wait_s=inf)


class ChunkedRows:
    """Collects rows for ``feed`` in lists that begin small and stay bounded, as ``storage.base.chunks`` does."""

    def __init__(self, feed: Callable[[Sequence[Row]], bool], first_chunk: int, *, values: bool) -> None:
        self._feed = feed
        self._values = values
        self._wanted = max(1, min(first_chunk, MAX_CHUNK_ROWS))
        self._rows: list[Row] = []
        self._size = 0
        self._done = False

    def add(self, rows: Iterator[Row]) -> bool:
        """Add rows. Returns False once ``feed`` wants no more."""
        for key, value in rows:
            if self._done:
                return False
            if self._rows and self._size + len(value) > MAX_CHUNK_BYTES:
                self._give()
            self._rows.append((key, value if self._values else b""))
            self._size += len(value)
            if len(self._rows) >= self._wanted:
                self._give()
        return not self._done

    def end(self) -> None:
        """Feed the last list."""
        if self._rows and not self._done:
            self._give()

    def _give(self) -> None:
        rows, self._rows, self._size = self._rows, [], 0
        self._wanted = min(self._wanted * GROWTH, MAX_CHUNK_ROWS)
        self._done = not self._feed(rows)

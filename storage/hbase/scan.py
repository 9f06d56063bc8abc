"""Scans of HBase: rows page by page, from one range or merged from many ranges.

A page has few rows at first, then as many as fit a bound, by the size of the last ones: a row of HBase may have nine
megabytes. If rows are much larger than those before them, a page may exceed the answer's bound or time out; then the
next attempt asks for fewer. A scanner belongs to its gateway, so a scan keeps its connection; if that breaks, another
scanner continues after the last row.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from plainsong.protocol.plurals import counted
from storage.base import StoreError
from storage.hbase.gateway import AnswerTooLarge, thrift
from storage.hbase.pool import BROKEN_CONNECTION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from storage.hbase.gateway import Gateway
    from storage.hbase.pool import Pool, RetryDeadline

#: Maximum rows of HBase in a page, and the bytes that a page should not exceed by much.
_MAX_PAGE_ROWS = 1000
_PAGE_BYTES = 2 << 20
_GROWTH = 4
#: A page has time for this many attempts: with the full number of rows, a quarter of them, and one.
_ATTEMPTS = 3
#: Number of successful pages before a page of a size that failed is tried again.
_GOOD_PAGES = 8
#: Rows in a page of one of many ranges, most of which have none.
_MERGED_PAGE_ROWS = 64


class ScannedRow(NamedTuple):
    """A row of HBase."""

    key: bytes
    columns: Mapping[bytes, bytes]
    time_ms: int = 0
    """HBase's timestamp of the newest cell."""


class ScanRange(NamedTuple):
    """``[start, stop)`` in a table of HBase; downwards from ``stop`` if ``reverse``."""

    table: bytes
    start: bytes
    stop: bytes
    reverse: bool = False

    def behind(self, key: bytes) -> ScanRange:
        """Return the rest of the range after ``key``."""
        return self._replace(stop=key) if self.reverse else self._replace(start=key + b"\x00")

    def contains(self, key: bytes) -> bool:
        """True if ``key`` is in the range, whatever its direction."""
        return self.start <= key and (not self.stop or key < self.stop)

    def rest_in(self, rest: ScanRange) -> ScanRange | None:
        """Return the part of this range that a scan has not read, if ``rest`` remains of the scan; None if all was read."""
        if self.reverse:
            stop = rest.stop if self.contains(rest.stop) else self.stop
            return self._replace(stop=stop) if not rest.stop or self.start < rest.stop else None
        start = max(self.start, rest.start)
        return self._replace(start=start) if not self.stop or start < self.stop else None


async def scan(
    pool: Pool,
    wanted: ScanRange,
    take: Callable[[list[ScannedRow]], Awaitable[bool]],
    *,
    first_page: int,
    timeout_s: float,
) -> None:
    """Give the range's rows to ``take``, page by page, until it returns False or there are no more.

    Args:
      take: may call through the pool, but not scan.
      timeout_s: for each page with all its attempts, and again for a single row if several failed; also the limit of
        the scan's wait for a connection.
    Raises:
      StoreError: a page could not be read; those before it are valid. Exceptions of ``take`` propagate.
    """
    left = wanted
    size = _PageSize(first_page)
    async with pool.place_to_scan(timeout_s):
        # Kept over all attempts: waiting for it again could leave no time to ask for fewer rows.
        retry = pool.retry_deadline("reading", timeout_s)
        while True:
            try:
                async with pool.connected() as gateway:
                    scanner = _Scanner(gateway, left, size)
                    while page := await _next_page(scanner, size, left, size.attempt_s(retry, timeout_s)):
                        left = left.behind(page[-1].key)
                        retry.progressed()
                        if not await take(page):
                            break
                        retry.progressed()
                    scanner.close()
                    return
            except BROKEN_CONNECTION as error:
                if size.is_last_resort:
                    retry.progressed()  # several rows got only part of the time; their number may not be the cause
                await retry.pause(error)


async def _next_page(scanner: _Scanner, size: _PageSize, left: ScanRange, attempt_s: float) -> list[ScannedRow]:
    """Return the next rows of ``left``. Raises OSError if they do not arrive in time, so that the connection is closed.

    Raises StoreError: a single row is too large.
    """
    asked = size.rows
    try:
        with trio.fail_after(attempt_s):
            return await scanner.page()
    except trio.TooSlowError:
        size.failed()
        raise OSError(f"no answer of {counted(asked, 'row')} in {attempt_s:g} s") from None
    except BROKEN_CONNECTION as error:
        if isinstance(error, AnswerTooLarge) and asked == 1:
            where = f"last row before {left.stop.hex()}" if left.reverse else f"first row from {left.start.hex()} on"
            raise StoreError(
                f"the {where} of HBase's table {left.table.decode()} cannot be read: {error}",
                hint=(
                    "inspect it in hbase shell: perhaps another program wrote it, or storage.hbase.max_cell_bytes "
                    "is too high"
                ),
            ) from error
        size.failed()  # even if the connection broke: the gateway may have run out of memory
        raise


class _PageSize:
    """Computes how many rows a scan asks for next."""

    def __init__(self, first: int) -> None:
        self.rows = max(1, min(first, _MAX_PAGE_ROWS))
        self.is_last_resort = False
        """True if the next attempt asks for a single row, because several have just failed."""
        self._has_failed = False
        #: The largest number of rows that has not failed recently, and the successful pages since a larger one failed.
        self._most, self._good_pages = _MAX_PAGE_ROWS, 0

    def attempt_s(self, retry: RetryDeadline, timeout_s: float) -> float:
        """Return the time limit of the next attempt; if it asks for several rows, leave time to ask for fewer."""
        return retry.attempt_s if self.rows == 1 else min(retry.attempt_s, timeout_s / _ATTEMPTS)

    def failed(self) -> None:
        """Record that an attempt with this many rows failed: next request a quarter of them, then one."""
        before = self.rows
        self._most = self.rows = 1 if self._has_failed else max(1, self.rows // _GROWTH)
        self.is_last_resort = self.rows == 1 < before
        self._has_failed, self._good_pages = True, 0

    def read(self, page: list[ScannedRow]) -> None:
        """Record that a page arrived: next request more rows, within the bounds of a page's size."""
        each = sum(len(value) for row in page for value in row.columns.values()) // len(page) + 1
        self._good_pages += 1
        if self._good_pages == _GOOD_PAGES:
            self._most, self._good_pages = self._most * _GROWTH, 0
        self.rows = max(1, min(self.rows * _GROWTH, _PAGE_BYTES // each, self._most, _MAX_PAGE_ROWS))
        self._has_failed = self.is_last_resort = False


class _Scanner:
    """A scanner at a gateway."""

    def __init__(self, gateway: Gateway, wanted: ScanRange, size: _PageSize) -> None:
        self._gateway = gateway
        self._number: int | None = None
        self._wanted = wanted
        self._size = size
        self._ended = False

    async def _open(self) -> int:
        wanted = self._wanted
        start, stop = (wanted.stop, _below(wanted.start)) if wanted.reverse else (wanted.start, wanted.stop)
        asked = thrift.TScan(startRow=start, stopRow=stop, caching=_MAX_PAGE_ROWS, reversed=wanted.reverse)
        number: int = await self._gateway.call("scannerOpenWithScan", wanted.table, asked, {})
        return number

    async def page(self) -> list[ScannedRow]:
        """Return the next rows; empty at the end. The first call also opens the scanner, within its deadline."""
        if self._number is None:
            self._number = await self._open()
        page: list[ScannedRow] = []
        while not page and not self._ended:
            answer = await self._gateway.call("scannerGetList", self._number, self._size.rows)
            self._ended = len(answer) < self._size.rows
            page = [found for found in map(scanned_row, answer) if self._is_wanted(found.key)]
        if page:
            self._size.read(page)
        return page

    def _is_wanted(self, key: bytes) -> bool:
        """True if a row is in the range: a reverse scan of HBase includes its start, and excludes its end."""
        return not self._wanted.reverse or self._wanted.start <= key < self._wanted.stop or not self._wanted.stop

    def close(self) -> None:
        """Close it along with the connection's next call. A finished scan is closed at the region server."""
        self._gateway.call_later("scannerClose", self._number)


def _below(key: bytes) -> bytes:
    """Return a key just below ``key``."""
    if not key or key.endswith(b"\x00"):
        return key[:-1]
    return key[:-1] + bytes([key[-1] - 1]) + b"\xff" * 32


def scanned_row(row: Any) -> ScannedRow:
    """Convert a row of an answer."""
    columns = {column: cell.value for column, cell in row.columns.items()}
    return ScannedRow(row.row, columns, max((cell.timestamp for cell in row.columns.values()), default=0))


async def first_rows(pool: Pool, wanted: ScanRange, limit: int, *, timeout_s: float) -> list[ScannedRow]:
    """Return the first ``limit`` rows of a range. Raises StoreError."""
    found: list[ScannedRow] = []

    async def take(page: list[ScannedRow]) -> bool:
        found.extend(page[: limit - len(found)])
        return len(found) < limit

    await scan(pool, wanted, take, first_page=limit, timeout_s=timeout_s)
    return found


async def merged_rows(
    pool: Pool,
    ranges: Sequence[ScanRange],
    key_of: Callable[[bytes], bytes],
    take: Callable[[list[ScannedRow]], Awaitable[bool]],
    *,
    timeout_s: float,
) -> None:
    """Scan many ranges of one table and direction: give their rows to ``take`` one by one, in the order of ``key_of``.

    For tools that read everything: each page is a separate scan. A page extends over the ranges that follow, so that
    most of those without rows cost no scan.

    Args:
      ranges: disjoint, in the order of the table.
    """
    reverse = ranges[0].reverse
    pages, rests = await _first_pages(pool, ranges, timeout_s)
    waiting = [(_Order(key_of(page[-1].key), reverse), index) for index, page in enumerate(pages) if page]
    heapq.heapify(waiting)
    while waiting:
        _, index = heapq.heappop(waiting)
        page = pages[index]
        if not await take([page.pop()]):
            return
        if not page and (wanted := rests[index]):
            found = await first_rows(pool, wanted, _MERGED_PAGE_ROWS, timeout_s=timeout_s)
            page.extend(reversed(found))
            full = len(found) == _MERGED_PAGE_ROWS
            rests[index] = wanted.rest_in(wanted.behind(found[-1].key)) if full else None
        if page:
            heapq.heappush(waiting, (_Order(key_of(page[-1].key), reverse), index))


async def _first_pages(
    pool: Pool, ranges: Sequence[ScanRange], timeout_s: float
) -> tuple[list[list[ScannedRow]], list[ScanRange | None]]:
    """Return for each range its first rows, the next one last, and the rest of the range, None if read."""
    reverse = ranges[0].reverse
    starts = [each.start for each in ranges]
    pages: list[list[ScannedRow]] = [[] for _ in ranges]
    rests: list[ScanRange | None] = [None] * len(ranges)
    unread = deque(reversed(range(len(ranges))) if reverse else range(len(ranges)))
    while unread:
        first = ranges[unread[0]]
        rest = first._replace(start=ranges[0].start) if reverse else first._replace(stop=ranges[-1].stop)
        page = await first_rows(pool, rest, _MERGED_PAGE_ROWS, timeout_s=timeout_s)
        for row in page:
            index = bisect_right(starts, row.key) - 1
            if index >= 0 and ranges[index].contains(row.key):
                pages[index].append(row)
        if len(page) < _MERGED_PAGE_ROWS:
            break
        rest = rest.behind(page[-1].key)
        while unread and (left := ranges[unread[0]].rest_in(rest)) != ranges[unread[0]]:
            rests[unread.popleft()] = left
    for page in pages:
        page.reverse()
    return pages, rests


class _Order(NamedTuple):
    """A key in the heap's order, which is descending for reverse scans."""

    key: bytes
    reverse: bool

    def __lt__(self, other: tuple[object, ...]) -> bool:
        assert isinstance(other, _Order)  # the heap has nothing else
        return (self.key > other.key) if self.reverse else (self.key < other.key)

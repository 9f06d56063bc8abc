"""Rows of many HBase ranges in one order, read by scans that skip empty ranges, compared with a sorted list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.hbase import scan
from storage.hbase.scan import ScannedRow, ScanRange, merged_rows

#: Few rows per page, so that ranges end within a page, at its end, and after it.
PAGE_ROWS = 3
TABLE = b"table"
BUCKETS = range(6)
keys = st.builds(lambda bucket, rest: bytes([bucket]) + rest, st.sampled_from(BUCKETS), st.binary(max_size=2))


class Gateway:
    """Answers ``first_rows`` from a table with these keys, and counts the scans."""

    def __init__(self, rows: set[bytes]) -> None:
        self.rows, self.scans = sorted(rows), 0

    async def first_rows(self, _: object, wanted: ScanRange, limit: int, *, timeout_s: float) -> list[ScannedRow]:
        assert wanted.start < wanted.stop or not wanted.stop, wanted
        self.scans += 1
        found = [key for key in self.rows if wanted.contains(key)]
        return [ScannedRow(key, {}) for key in (found[::-1] if wanted.reverse else found)[:limit]]


def buckets(start: bytes, *, reverse: bool) -> list[ScanRange]:
    """Return the range of all keys from ``start`` in each bucket; the last one has no end."""
    stops = [*(bytes([bucket + 1]) for bucket in BUCKETS[:-1]), b""]
    return [
        ScanRange(TABLE, bytes([bucket]) + start, stop, reverse) for bucket, stop in zip(BUCKETS, stops, strict=True)
    ]


async def merged(gateway: Gateway, ranges: list[ScanRange], limit: int = 1000) -> list[bytes]:
    found: list[bytes] = []

    async def take(page: list[ScannedRow]) -> bool:
        found.extend(row.key for row in page)
        return len(found) < limit

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scan, "first_rows", gateway.first_rows)
        patched.setattr(scan, "_MERGED_PAGE_ROWS", PAGE_ROWS)
        await merged_rows(None, ranges, lambda key: key[1:], take, timeout_s=1.0)  # type: ignore[arg-type]
    return found


@given(rows=st.sets(keys, max_size=40), start=st.binary(max_size=1), reverse=st.booleans())
async def test_rows_of_all_ranges_are_read_once_and_in_order_whatever_ranges_a_page_covers(rows, start, reverse):
    gateway = Gateway(rows)
    found = await merged(gateway, buckets(start, reverse=reverse))
    assert sorted(found) == sorted(key for key in rows if key[1:] >= start)
    assert [key[1:] for key in found] == sorted((key[1:] for key in found), reverse=reverse)
    # Each scan returns a full page, completes a range that has rows, or is the last one.
    assert gateway.scans <= len(rows) // PAGE_ROWS + len({key[:1] for key in rows}) + 1


@pytest.mark.parametrize("reverse", [False, True])
async def test_ranges_without_rows_cost_one_scan(reverse):
    gateway = Gateway(set())
    assert await merged(gateway, buckets(b"", reverse=reverse)) == []
    assert gateway.scans == 1


async def test_no_rows_are_requested_after_the_last_one_that_is_taken():
    gateway = Gateway({bytes([bucket, number]) for bucket in BUCKETS for number in range(100)})
    assert await merged(gateway, buckets(b"", reverse=False), limit=1) == [b"\x00\x00"]
    assert gateway.scans == len(BUCKETS)

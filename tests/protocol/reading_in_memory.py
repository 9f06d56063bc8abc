"""Reads a topic from a store of dicts with the real walk: page by page, with stored messages."""

from __future__ import annotations

from plainsong.protocol.ids import after
from plainsong.protocol.topic.reading import Paging

MAX_PAGE_BYTES = 1 << 20


def walk(store, sink, chunk=3):
    """Feed ``sink`` the rows of its scans, a few at a time as stores do."""
    for scan in sink.scans():
        rows = store.scan(scan.table, scan.start, scan.stop)
        rows = rows[::-1] if scan.reverse else rows
        for at in range(0, len(rows), chunk):
            if not scan.feed(rows[at : at + chunk]):
                break


def messages_of(store, span, limit=1000, view=None):
    """Return the id and payload of each message in a span, read in pages of ``limit``."""
    found = []
    while True:
        paging = Paging(span, limit, MAX_PAGE_BYTES, view)
        walk(store, paging)
        page = paging.page()
        found += page.messages()
        if page.end != "more":
            return found
        span.since = after(page.last_id)

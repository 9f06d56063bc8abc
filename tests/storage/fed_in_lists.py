"""Pages and extents that get their rows in lists of given lengths."""

from __future__ import annotations

from plainsong.protocol.topic.reading import Extent, Paging, Walk


def page_in_lists(rows, lists, span, limit, max_bytes):
    """Feed lists of these lengths and then the rest; return the page's content, and True if it wants more rows."""
    paging = Paging(span, limit, max_bytes)
    wants_more = _fed(paging, rows, lists)
    made = paging.page()
    return b"".join(made.parts), made.count, made.payload_bytes, made.last_id, made.end, wants_more


def extent_in_lists(rows, lists, span, limit, max_bytes):
    """Feed lists of these lengths and then the rest; return the extent's size, its end, and all its bounds."""
    extent = Extent(span, limit, max_bytes)
    wants_more = _fed(extent, rows, lists)
    return extent.count, extent.bytes, extent.end, extent.splits(1000), wants_more


def _fed(walk: Walk, rows, lists) -> bool:
    at, wants_more = 0, True
    for size in (*lists, len(rows)):
        wants_more = wants_more and walk.feed_rows(rows[at : at + size])
        at += size
    return wants_more

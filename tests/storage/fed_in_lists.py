"""A page that gets its rows in lists of given lengths."""

from __future__ import annotations

from plainsong.protocol.topic.reading import Paging


def page_in_lists(rows, lists, span, limit, max_bytes):
    """Feed lists of these lengths and then the rest; return the page's content, and True if it wants more rows."""
    paging, at, goes_on = Paging(span, limit, max_bytes), 0, True
    for size in (*lists, len(rows)):
        goes_on = goes_on and paging.feed_rows(rows[at : at + size])
        at += size
    made = paging.page()
    return b"".join(made.parts), made.count, made.payload_bytes, made.last_id, made.end, goes_on

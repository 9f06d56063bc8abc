"""Pages with any content and of any size, read one after another, add up to the topic."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_store import NAME, page_of

from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES, LAST_BOUND, NO_PAYLOAD_PART, after, pack_id, pack_position
from plainsong.protocol.keys import DamagedRow, generation_prefix
from plainsong.protocol.page import ITEM_HEAD_BYTES, Page, item, messages_of, offsets_in
from plainsong.protocol.rows import MessageRow, encode_row
from plainsong.protocol.topic.asks import Span
from plainsong.protocol.topic.reading import Paging

PREFIX = generation_prefix(NAME, 1)
NOW_MS = 5_000
#: Publish times at which a message with a TTL of a second has expired, is in its last millisecond, or is live.
TIMES_MS = (1_000, 3_999, 4_000, 4_001, 4_500)

payloads = st.one_of(st.binary(max_size=8), st.sampled_from([b"x" * 63, b"y" * 64, b"z" * 200]))
messages = st.tuples(st.sampled_from(TIMES_MS), st.integers(0, 3), payloads, st.sampled_from([None, None, 1, 60]))
bounds = st.one_of(
    st.just(FIRST_BOUND),
    st.just(LAST_BOUND),
    st.builds(
        pack_id,
        st.sampled_from([*TIMES_MS, 2_000]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 0, 7]),
        st.sampled_from([0, 0, 1]),
    ),
)


def span(since=FIRST_BOUND, until=LAST_BOUND, oldest_ms=0):
    return Span(1, PREFIX, since, until, NOW_MS, oldest_ms, None)


def rows_of(messages):
    """Return one row per position, in key order."""
    at = {pack_position(ts, seq): MessageRow(payload, ttl_s=ttl) for ts, seq, payload, ttl in messages}
    return [(PREFIX + position, encode_row(row)) for position, row in sorted(at.items())]


def visible(messages, span):
    """Return ``(id, payload)`` of the messages that a reader of the span must get, according to the specification."""
    at = {pack_id(ts, seq): (ts, payload, ttl) for ts, seq, payload, ttl in messages}
    return [
        (each, payload)
        for each, (ts, payload, ttl) in sorted(at.items())
        if max(span.since, pack_id(span.oldest_ms, 0)) <= each < span.until
        and (ttl is None or ts + ttl * 1000 >= span.now_ms)
    ]


def read_on(rows, span, limit, max_bytes, chunk):
    """Read all messages page by page; check that each page keeps its bounds and makes progress."""
    out = []
    while True:
        page = page_of(rows, span, limit, max_bytes, chunk)
        got = list(page.messages())
        assert page.count == len(got) <= limit
        assert page.payload_bytes == sum(map(len, page.parts))
        assert page.payload_bytes <= max_bytes or page.count == 1
        out += got
        if page.end == "end":
            return out
        assert got, "a page that says there is more has a message"
        assert page.last_id == got[-1][0]
        span.since = after(page.last_id)


@given(st.lists(messages, max_size=12), bounds, bounds, st.integers(1, 13), st.integers(0, 400), st.integers(1, 5))
def test_consecutive_pages_of_every_size_equal_the_range(written, since, until, limit, max_bytes, chunk):
    rows = rows_of(written)
    wanted = visible(written, span(since, until))
    assert list(page_of(rows, span(since, until), 10**6, 10**9).messages()) == wanted
    assert read_on(rows, span(since, until), limit, max_bytes, chunk) == wanted


@given(st.lists(messages, max_size=12), bounds, st.sampled_from([0, *TIMES_MS]), st.integers(1, 4))
def test_messages_expired_by_the_topic_ttl_are_in_no_page(written, since, oldest_ms, limit):
    rows = rows_of(written)
    wanted = visible(written, span(since, oldest_ms=oldest_ms))
    assert read_on(rows, span(since, oldest_ms=oldest_ms), limit, 10**9, 3) == wanted


@given(st.lists(messages, max_size=12), st.integers(1, 13), st.integers(0, 400), st.integers(1, 5), st.integers(1, 5))
def test_a_page_of_items_equals_the_page_of_the_rows(written, limit, max_bytes, chunk, other_chunk):
    from_rows = page_of(rows_of(written), span(), limit, max_bytes, chunk)
    items = [item(*message) for message in visible(written, span())]
    paging = Paging(span(), limit, max_bytes)
    for at in range(0, len(items), other_chunk):
        part = items[at : at + other_chunk]
        size = sum(map(len, part))
        if paging.fits(len(part), size):
            paging.feed_part(b"".join(part), len(part), part[-1][1 : 1 + ID_BYTES])
        elif not paging.feed_items(part):
            break
    from_items = paging.page()
    assert list(from_items.messages()) == list(from_rows.messages())
    assert (from_items.count, from_items.payload_bytes) == (from_rows.count, from_rows.payload_bytes)
    assert (from_items.last_id, from_items.end) == (from_rows.last_id, from_rows.end)


@given(
    st.lists(st.one_of(st.binary(max_size=8), st.sampled_from([b"y" * 63, b"y" * 64, b"y" * 9000])), max_size=60),
    st.integers(0, 60),
    st.integers(0, 200),
)
def test_the_beginning_of_each_item_of_a_part_is_known_whether_they_are_alike_or_not(payloads, alike, size):
    for some in (payloads, [b"z" * size] * alike):
        items = [item(pack_id(7, number), payload) for number, payload in enumerate(some)]
        assert list(offsets_in(b"".join(items))) == list(accumulate(map(len, items), initial=0))


def test_a_page_has_at_least_one_message_however_large():
    rows = rows_of([(4_000, seq, bytes(1_000), None) for seq in range(3)])
    for max_bytes in (0, 1, 999):
        page = page_of(rows, span(), 10, max_bytes)
        assert (page.count, page.end) == (1, "more")


def test_a_page_that_is_exactly_full_at_the_end_of_the_topic_is_marked_as_the_end():
    rows = rows_of([(4_000, seq, b"four", None) for seq in range(3)])
    size = len(item(bytes(20), b"four"))
    assert page_of(rows, span(), 3, 10**6).end == "end"
    assert page_of(rows, span(), 10, 3 * size).end == "end"
    assert (page_of(rows, span(), 10, 3 * size - 1).count, page_of(rows, span(), 2, 10**6).end) == (2, "more")


def test_expired_messages_after_a_full_page_do_not_count_as_more():
    rows = rows_of([(1_000, 0, b"lives", 60), (1_000, 1, b"gone", 1), (1_001, 0, b"gone", 1)])
    assert page_of(rows, span(), 1, 10**6).end == "end"


def test_a_start_inside_a_position_is_after_its_message():
    rows = rows_of([(4_000, 0, b"a", None), (4_000, 1, b"b", None)])
    at = pack_id(4_000, 0)
    assert [payload for _, payload in page_of(rows, span(at)).messages()] == [b"a", b"b"]
    for inside in (after(at), pack_id(4_000, 0, 9, 9), at[:10] + b"\xff" * 10):
        assert [payload for _, payload in page_of(rows, span(inside)).messages()] == [b"b"]


@pytest.mark.parametrize(("first_ttl_s", "second_ttl_s"), [(None, None), (60, None), (None, 60)])
def test_a_page_is_plain_if_its_own_messages_are_whatever_the_one_before_its_start(first_ttl_s, second_ttl_s):
    rows = rows_of([(4_000, 0, b"a", first_ttl_s), (4_000, 1, b"b", second_ttl_s), (4_000, 2, b"c", None)])
    for lists in ([rows], [rows[:1], rows[1:]]):
        paging = Paging(span(after(pack_id(4_000, 0))), 10, 10**6)
        assert [paging.feed_rows(some) for some in lists] == [True] * len(lists)
        assert [payload for _, payload in paging.page().messages()] == [b"b", b"c"]
        assert paging.is_plain == (second_ttl_s is None)


def test_an_end_is_exclusive_and_one_inside_a_position_is_after_its_message():
    rows = rows_of([(4_000, 0, b"a", None), (4_000, 1, b"b", None)])
    at = pack_id(4_000, 1)
    assert [payload for _, payload in page_of(rows, span(until=at)).messages()] == [b"a"]
    assert [payload for _, payload in page_of(rows, span(until=after(at))).messages()] == [b"a", b"b"]


def test_an_empty_range_is_resumed_where_it_ends():
    page = page_of([], span(pack_id(4_000, 0), pack_id(4_500, 0)))
    assert (page.count, page.end) == (0, "end")
    assert after(page.last_id) == pack_id(4_500, 0)
    assert page_of([], span(until=FIRST_BOUND)).last_id is None


DAMAGED = {
    "unknown flags": b"\xff?",
    "nothing": b"",
    "a length that is not its own": encode_row(MessageRow(b"whole", ttl_s=60))[:-1],
    "a payload stored elsewhere": encode_row(MessageRow(None, pointer=7)),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_messages_before_a_damaged_row_are_returned_and_the_next_page_raises(damage, chunk):
    rows = rows_of([(4_000, seq, b"m", None) for seq in range(6)])
    key = PREFIX + pack_position(4_000, 3)
    rows[3] = (key, damage)
    first = page_of(rows, span(), 10, 10**6, chunk)
    assert [each for each, _ in first.messages()] == [pack_id(4_000, seq) for seq in range(3)]
    assert first.end == "more"
    with pytest.raises(DamagedRow):
        page_of(rows, span(after(first.last_id)), 10, 10**6, chunk)
    behind = page_of(rows, span(after(key[-10:] + NO_PAYLOAD_PART)), 10, 10**6, chunk)
    assert (behind.count, behind.end) == (2, "end")


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_row_after_the_page_does_not_affect_it(damage):
    rows = rows_of([(4_000, seq, b"m", 60) for seq in range(4)])
    rows[2] = (rows[2][0], damage)
    for limit in (1, 2):
        assert page_of(rows, span(), limit, 10**6, 10).count == limit


def test_expired_messages_before_a_damaged_row_make_no_page():
    rows = rows_of([(1_000, 0, b"gone", 1), (1_000, 1, b"m", None)])
    rows[1] = (rows[1][0], b"\xff?")
    with pytest.raises(DamagedRow):
        page_of(rows, span())


@pytest.mark.parametrize("size", [0, 1, ITEM_HEAD_BYTES, ITEM_HEAD_BYTES + 1, 63, 64])
def test_items_of_one_length_are_cut_into_the_original_messages(size):
    messages = [(pack_id(4_500, number), bytes([number]) * size) for number in range(40)]
    page = Page([b"".join(item(*each) for each in messages)], count=40)
    assert list(messages_of(page)) == list(page.messages()) == messages

"""Transactional pages always equal the list, whatever rows the topic has and wherever pages are cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transactional_topic import (
    START_MS,
    Entry,
    Payload,
    Topic,
    check_page,
    ids_around,
    plain,
    same_page,
    stored,
    walk_through,
)

from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, NO_PAYLOAD_PART, after, bound_at
from plainsong.protocol.topic.reading import Extent, Newest, Tally
from plainsong.protocol.transactions.view import Moment, View

NOW_MS = START_MS + 5_000

payloads = st.one_of(st.binary(max_size=4), st.sampled_from([b"x" * 63, b"y" * 64, b"z" * 200]))
#: A message's own TTL: expired, in its last millisecond, or live; mostly none.
ttls_s = st.sampled_from([None] * 6 + [1, 5, 60])
pointers = st.integers(1, 9)
segments = st.sampled_from([None, 0, 1, 2, 300])
#: Mostly none; some are repeated, and some are long.
attributes = st.sampled_from([None] * 5 + [{}, {"routingKey": "k"}, {"traceparent": "ü" * 300}]) | st.dictionaries(
    st.text(max_size=3), st.text(max_size=3), max_size=3
)
#: Rows' data about their request: a stamp, a batch, both, or an index within a batch.
requests = st.sampled_from(
    [{}] * 4
    + [{"d": ["p", 3, 1, 7]}, {"d": ["producer-" * 20, 0, 3, [1, 5, 900]]}, {"b": 3}, {"b": 2, "d": ["p", 1, 2, 0]}]
    + [{"i": index} for index in (1, 2, 3, 127, 128, 70_000)]
)


besides = st.fixed_dictionaries({"attributes": attributes, "extras": requests})


@st.composite
def topics(draw):
    """Draw entries of all kinds; each stored transaction has its own pointer, since it is published once."""
    entries, ms, sequence, own = [], START_MS, 0, 20
    for kind in draw(st.lists(st.sampled_from(["plain", "plain", "inline", "inline", "stored"]), max_size=10)):
        step = draw(st.sampled_from([0, 0, 1, 1_000]))
        ms, sequence = ms + step, 0 if step else sequence + 1
        sign = draw(st.sampled_from([1, 1, 1, -1]))
        if kind == "plain":
            entries.append(Entry(ms, sequence, draw(payloads), None, draw(ttls_s), **draw(besides)))
        elif kind == "inline":
            entries.append(Entry(ms, sequence, draw(payloads), sign * draw(pointers), draw(ttls_s), **draw(besides)))
        else:
            own += 1
            kept = draw(st.lists(st.builds(Payload, payloads, ttls_s, segments, attributes), min_size=1, max_size=7))
            winners = draw(st.none() | st.lists(st.sampled_from([0, 1, 2, 300]), unique=True))
            orphans = draw(st.integers(0, 2))
            stamp = {key: said for key, said in draw(requests).items() if key == "d"}
            entries.append(Entry(ms, sequence, b"", sign * own, draw(ttls_s), kept, winners, orphans, extras=stamp))
    return Topic(entries)


some_pointers = st.frozensets(st.integers(1, 26), max_size=3)
views = (
    st.none()
    | st.builds(
        View,
        st.sampled_from([0, 5, 9, 21, 22, 30]),
        some_pointers,
        some_pointers,
        st.frozensets(st.integers(1, 26), max_size=2),
    )
    | st.builds(
        Moment,
        st.sampled_from([START_MS - 1, START_MS, START_MS + 1, START_MS + 1_000, START_MS + 2_000, START_MS + 9_000]),
        some_pointers,
        some_pointers.map(tuple),
        st.just(1),
        st.just(26),
    ).map(Moment.view)
)


@st.composite
def bounds(draw, topic):
    """Draw a position at, between, around or inside the topic's entries."""
    entries = [(each.ms, each.position) for each in topic.entries]
    return draw(
        st.sampled_from(
            [FIRST_BOUND, LAST_BOUND, *ids_around(topic)]
            + [bound_at(ms + by) for ms, _ in entries for by in (-1, 0, 1)]
            + [position + NO_PAYLOAD_PART for _, position in entries]
        )
    )


limits = st.one_of(st.integers(1, 12), st.just(10**6))
byte_limits = st.one_of(st.integers(1, 400), st.just(10**9))


@given(st.data(), topics(), views, limits, byte_limits, st.integers(1, 9))
def test_a_page_from_any_start_matches_the_reference_list(data, topic, view, limit, max_bytes, chunk):
    oldest_ms = data.draw(st.sampled_from([0, 0, START_MS, START_MS + 1_000, START_MS + 1_001]))
    since, until = data.draw(bounds(topic)), data.draw(st.just(LAST_BOUND) | bounds(topic))
    span = topic.span(since, until, NOW_MS, oldest_ms)
    page = topic.from_store(span, limit, max_bytes, view, chunk=chunk)
    check_page(topic, page, span, limit, max_bytes, view)


@given(st.data(), topics(), views, limits, byte_limits, st.integers(1, 4))
def test_consecutive_pages_add_up_to_one_large_page(data, topic, view, limit, max_bytes, chunk):
    """Nothing is lost, repeated or reordered, and every page makes progress."""
    since, until = data.draw(bounds(topic)), data.draw(st.just(LAST_BOUND) | bounds(topic))
    whole = topic.from_store(topic.span(since, until, NOW_MS), view=view)
    got, at = [], since
    for _ in range(100):
        page = topic.from_store(topic.span(at, until, NOW_MS), limit, max_bytes, view, chunk=chunk)
        got += page.messages()
        if page.end != "more":
            break
        assert page.count
        at = after(page.last_id)
    assert got == list(whole.messages())
    assert (page.end, page.held) == (whole.end, whole.held)
    if page.count or at == since:
        assert page.last_id == whole.last_id


@given(
    st.data(),
    topics(),
    views,
    limits,
    byte_limits,
    st.integers(1, 6),
    st.sampled_from([20, 200, 65_536]),
    st.booleans(),
)
def test_a_page_from_the_cache_equals_the_page_from_the_store(
    data, topic, view, limit, max_bytes, commit, seal_bytes, with_pointers
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.cache.SEAL_BYTES", seal_bytes)
        cache = topic.cache(commit)
    span = topic.span(data.draw(bounds(topic)), data.draw(st.just(LAST_BOUND) | bounds(topic)), NOW_MS)
    cached = topic.from_cache(cache, span, limit, max_bytes, view, pointers=with_pointers)
    if cached is not None:
        from_store = topic.from_store(span, limit, max_bytes, view, pointers=with_pointers)
        same_page(cached, from_store)
    assert cache.budget.bytes == sum(chunk.cost for chunk in cache.chunks)


@given(st.data(), topics(), views, limits, st.integers(1, 9))
def test_write_pointers_of_messages_are_returned_on_request(data, topic, view, limit, chunk):
    span = topic.span(data.draw(bounds(topic)), LAST_BOUND, NOW_MS)
    page = topic.from_store(span, limit, 10**9, view, chunk=chunk, pointers=True)
    wanted, *_ = topic.from_list(span, limit, 10**9, view)
    assert dict(page.pointers) == {index: each.pointer for index, each in enumerate(wanted) if each.pointer}


@given(st.data(), topics(), views, st.none() | st.integers(1, 12), st.none() | st.integers(1, 400), st.integers(1, 8))
def test_an_extent_equals_the_page_and_its_parts_equal_their_pages(data, topic, view, limit, max_bytes, parts):
    span = topic.span(data.draw(bounds(topic)), data.draw(st.just(LAST_BOUND) | bounds(topic)), NOW_MS)
    page = topic.from_store(span, limit or 10**6, max_bytes or 10**9, view)
    extent = Extent(span, limit, max_bytes, view)
    walk_through(topic.tables, extent)
    assert (extent.count, extent.bytes) == (page.count, page.payload_bytes)
    if page.end == "end":
        assert extent.end == max(span.since, span.until)
    else:
        assert extent.end == after(page.last_id)
    cuts = [span.since, *extent.splits(parts), extent.end]
    got = []
    for start, end in itertools.pairwise(cuts):
        got += topic.from_store(topic.span(start, end, NOW_MS), view=view).messages()
    assert got == list(page.messages())


@given(st.data(), topics(), views.filter(bool), st.integers(1, 9))
def test_counts_match_the_reference_list(data, topic, view, chunk):
    span = topic.span(data.draw(bounds(topic)), LAST_BOUND, NOW_MS)
    tally = Tally(span, view, 10**6)
    walk_through(topic.tables, tally, chunk)
    wanted, _, _, _, hidden = topic.from_list(span, view=view)
    assert (tally.messages, tally.hidden, tally.gave_up) == (len(wanted), hidden, False)
    newest = Newest(topic.span(now_ms=NOW_MS), 10**6)
    walk_through(topic.tables, newest, chunk)
    everything, *_ = topic.from_list(topic.span(now_ms=NOW_MS))
    assert newest.message_id == (everything[-1].message_id if everything else None)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 8))
def test_a_count_stops_at_its_limit(published, max_looks, chunk):
    for topic in (Topic([plain(ms) for ms in range(published)]), Topic([stored(0, 7, published)] if published else [])):
        looks = len(topic.entries) + (published if topic.entries and topic.entries[0].stored else 0)
        tally = Tally(topic.span(), None, max_looks)
        walk_through(topic.tables, tally, chunk)
        assert tally.gave_up == (looks > max_looks)
        assert tally.messages == min(published, max(0, max_looks - (looks - published)))

"""Readers with views read messages under pointers from real actors: from the cache, from the store, and in pages."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import NAME, START_MS, actors
from hypothesis import given
from hypothesis import strategies as st

from actors.reading import read_page
from plainsong.protocol.errors import AlreadyPublished, RolledBack
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import PublishUnder, RollBackPointer, StoreUnder
from plainsong.protocol.transactions.view import Verdict, View
from storage.base import StoreError

BASE = START_MS * 1_000_000
pointers = st.integers(1, 4).map(lambda number: BASE + number)
counts = st.integers(1, 4)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("plain"), st.just(0), counts, st.none()),
        st.tuples(st.just("store"), pointers, counts, st.sampled_from([None, None, "a", "b"])),
        st.tuples(
            st.just("publish"), pointers, st.integers(0, 4), st.sampled_from([None, None, ["a"], ["b", "c"], []])
        ),
        st.tuples(st.just("roll back"), pointers, counts, st.none()),
    ),
    max_size=16,
)
views = st.builds(
    View,
    st.integers(0, 4).map(lambda number: BASE + number),
    st.frozensets(pointers, max_size=2),
    st.frozensets(pointers, max_size=2),
    st.frozensets(pointers, max_size=1),
)


class Listed:
    """The topic as a list: each published message's payload and pointer, and stored messages by pointer."""

    def __init__(self):
        self.messages = []
        self.stored = {}
        #: By pointer, the segments that the publish of stored messages listed; None if it listed none.
        self.published = {}
        self.rolled_back = set()
        self.number = 0

    def payloads(self, count):
        self.number += count
        return [b"%d" % number for number in range(self.number - count, self.number)]

    def read(self, view):
        out = []
        for payload, pointer in self.messages:
            rolled_back = pointer in self.rolled_back
            verdict = (
                Verdict.DELIVER if view is None or not pointer else view.verdict(-pointer if rolled_back else pointer)
            )
            if verdict is Verdict.HOLD:
                return out, "held"
            if verdict is Verdict.DELIVER:
                out.append(payload)
        return out, "end"


async def act(harness, listed, what, pointer, count, more):
    """Apply an action to the topic and to the list."""
    if what == "roll back":
        await harness.ask(RollBackPointer(pointer))
        listed.rolled_back.add(pointer)
        listed.stored.pop(pointer, None)
        return
    payloads = listed.payloads(count)
    if what == "plain":
        await harness.publish(*payloads)
        listed.messages += [(payload, 0) for payload in payloads]
        return
    request = PublishRequest(payloads, pointer)
    if what == "store":
        request.segment = more
        refused = RolledBack if pointer in listed.rolled_back else AlreadyPublished
        if pointer in listed.rolled_back or pointer in listed.published:
            with pytest.raises(refused):
                await harness.ask(StoreUnder(request, 10))
            return
        await harness.ask(StoreUnder(request, 10))
        listed.stored.setdefault(pointer, []).extend((payload, more) for payload in payloads)
        return
    request.segments = more
    if pointer in listed.rolled_back:
        with pytest.raises(RolledBack):
            await harness.ask(PublishUnder(request, 10))
        return
    before = listed.published.get(pointer)
    if before is not None and more and set(more) != set(before):
        with pytest.raises(AlreadyPublished):
            await harness.ask(PublishUnder(request, 10))
        return
    await harness.ask(PublishUnder(request, 10))
    stored = listed.stored.pop(pointer, [])
    if stored:
        listed.published[pointer] = more
    listed.messages += [(payload, pointer) for payload, segment in stored if more is None or segment in more]
    listed.messages += [(payload, pointer) for payload in payloads]


async def pages(harness, view, limit, cached):
    """Return all ids and payloads, page after page, and how the last page ends."""
    since, got = FIRST_BOUND, []
    while True:
        span = await harness.look(since)
        cache = harness.directory.cache(NAME) if cached else None
        page = await read_page(harness.store, cache, span, limit=limit, max_bytes=10**6, view=view)
        got += page.messages()
        if page.end != "more":
            return got, page
        since = after(page.last_id)


@given(actions, views, st.integers(1, 9), st.sampled_from([0, 1, 7]), st.sampled_from([0, 2_000, 1 << 20]))
def test_readers_of_every_kind_match_the_reference_list(actions, view, limit, step_ms, cache_bytes):
    async def run():
        listed = Listed()
        async with actors(cache_bytes=cache_bytes) as harness:
            await harness.create()
            for action in actions:
                harness.clock.ms += step_ms
                await act(harness, listed, *action)
            store = harness.store
            for eyes in (None, view):
                await check(harness, listed, eyes, limit)
        async with actors(store) as harness:
            harness.clock.ms += 100
            for eyes in (None, view):
                await check(harness, listed, eyes, limit)

    trio.run(run)


async def check(harness, listed, view, limit):
    wanted, end = listed.read(view)
    for cached in (True, False):
        got, page = await pages(harness, view, limit, cached)
        assert [payload for _, payload in got] == wanted
        assert page.end == end
        ids = [each for each, _ in got]
        assert ids == sorted(set(ids))
        for index in range(0, len(ids), 3):
            span = await harness.look(after(ids[index]))
            rest = await read_page(harness.store, None, span, limit=10**6, max_bytes=10**6, view=view)
            assert [payload for _, payload in rest.messages()] == wanted[index + 1 :]


@pytest.mark.parametrize("rows", range(6))
@pytest.mark.parametrize("scan", [0, 1, 2])
async def test_a_page_that_fails_among_stored_messages_does_not_affect_the_next(scan, rows):
    """In the original, the remains of a failed read appeared at the start of the next page."""
    async with actors(cache_bytes=0) as harness:
        await harness.create()
        for pointer in (BASE + 1, BASE + 2):
            await harness.ask(StoreUnder(PublishRequest([b"%d" % n for n in range(5)], pointer), 10))
            await harness.publish("between")
            await harness.ask(PublishUnder(PublishRequest([], pointer), 10))
        whole, _ = await pages(harness, None, 100, cached=False)
        assert len(whole) == 12
        harness.store.fail_next("scan", applied=rows, after=scan)
        with pytest.raises(StoreError):
            await pages(harness, None, 100, cached=False)
        assert (await pages(harness, None, 100, cached=False))[0] == whole
        assert (await pages(harness, None, 3, cached=False))[0] == whole

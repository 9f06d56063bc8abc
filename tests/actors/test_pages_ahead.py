"""Reading ahead: a reader that walks through a topic finds the next page already read, once, and as in the store."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import pytest
import trio
from actors_in_process import NAME, actors
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from actors.pages import AT_ONCE, LEAST_PAUSE_S, Pages
from actors.reading import read_page
from plainsong.protocol.ids import FIRST_BOUND, LAST_BOUND, after
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import SetAside
from plainsong.protocol.topic.asks import Remove
from plainsong.protocol.transactions.view import AsOfView, Moment, View
from storage.base import StoreError

OTHER = TopicName("ns", "other")
#: Long enough for a page of ten such messages to be read ahead.
LONG = "m" * 8_000
LIMIT, BYTES = 10, 1 << 20


class Reader:
    """Requests one page after another, as polls do."""

    def __init__(self, harness, ahead, name=NAME, limit=LIMIT, max_bytes=BYTES):
        self.harness, self.ahead, self.name = harness, ahead, name
        self.limit, self.max_bytes = limit, max_bytes
        self.since = FIRST_BOUND

    async def page(self, **more):
        span = await self.harness.look(self.since, name=self.name)
        page = await self.ahead.read(self.name, span, limit=self.limit, max_bytes=self.max_bytes, **more)
        self.since = after(page.last_id)
        return page

    async def scans(self):
        """Get the next page, which must equal the store's; return the number of scans for it and for reading ahead."""
        span = await self.harness.look(self.since, name=self.name)
        stored = await read_page(self.harness.store, None, span, limit=self.limit, max_bytes=self.max_bytes)
        before = self.harness.store.calls["scan"]
        assert shown(await self.page()) == shown(stored)
        await wait_all_tasks_blocked()
        return self.harness.store.calls["scan"] - before


async def while_the_third_page_is_read_ahead(reader, nursery):
    """Read two pages, so that the third is read ahead, which blocks until the scan is released."""
    store = reader.harness.store
    await reader.page()
    store.stall("scan")
    nursery.start_soon(reader.page)
    await store.stalled("scan")
    store.release("scan")
    store.stall("scan")
    await store.stalled("scan")


def pages_of(harness):
    """Return ``Pages`` whose readers pause between requests."""
    return Pages(harness.store, harness.directory, clock=count(step=LEAST_PAUSE_S).__next__)


def shown(page):
    return list(page.messages()), page.count, page.payload_bytes, page.last_id, page.end


async def cold(harness, messages=80, name=NAME, text=LONG, **properties):
    await harness.create(name, **properties)
    for _ in range(messages):
        harness.clock.ms += 10
        await harness.publish(text, name=name)
    harness.directory.cache(name).start_over()


@asynccontextmanager
async def reading(cache_bytes=1 << 23):
    """Run a harness and ``Pages``, with a topic of 80 messages, none of which is cached."""
    async with actors(cache_bytes=cache_bytes) as harness, trio.open_nursery() as nursery:
        ahead = pages_of(harness)
        nursery.start_soon(ahead.run)
        await wait_all_tasks_blocked()
        await cold(harness)
        yield harness, ahead
        nursery.cancel_scope.cancel()


def kept(harness, name=NAME):
    return harness.directory.cache(name).budget.kept


# --- readers that find a page read ahead ------------------------------------------------------------


async def test_after_the_second_page_of_a_walk_each_next_page_is_read_ahead():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        assert [await reader.scans() for _ in range(4)] == [1, 2, 1, 1]
        # Pages read ahead equal the store's, and the next requested page is there.
        harness.store.stall("scan")
        assert (await reader.page()).count == LIMIT


async def test_a_whole_walk_reads_only_the_last_page_twice():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        # The last page ends at the topic's end and may soon change, so it is never served from the kept pages.
        assert sum([await reader.scans() for _ in range(8)]) == 9


@pytest.mark.parametrize(("limit", "more_scans"), [(LIMIT, 1), (2, 0)], ids=["large", "small"])
async def test_a_request_during_a_read_ahead_waits_for_it(limit, more_scans):
    async with reading() as (harness, ahead):
        reader, pages = Reader(harness, ahead, limit=limit), []
        async with trio.open_nursery() as nursery:
            await while_the_third_page_is_read_ahead(reader, nursery)

            async def read():
                pages.append(await reader.page())

            before = harness.store.calls["scan"]
            nursery.start_soon(read)
            await wait_all_tasks_blocked()
            assert (len(pages), harness.store.calls["scan"]) == (0, before), "it is read only once"
            harness.store.release("scan")
        await wait_all_tasks_blocked()
        assert harness.store.calls["scan"] == before + more_scans, "behind a page the next one"
        ids = [message_id for message_id, _ in (await harness.page(cached=False)).messages()]
        assert [(page.count, page.last_id) for page in pages] == [(limit, ids[3 * limit - 1])]


async def test_readers_that_follow_the_first_one_through_a_topic_use_its_read_ahead():
    async with reading() as (harness, ahead):

        async def walk():
            reader = Reader(harness, ahead)
            return sum([await reader.scans() for _ in range(7)])

        # The first two pages are read twice before they are kept. The eighth page ends at the topic's end.
        assert [await walk() for _ in range(3)] == [8, 2, 0]


async def test_a_waiting_reader_that_leaves_does_not_cancel_the_read_ahead():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        async with trio.open_nursery() as nursery:
            await while_the_third_page_is_read_ahead(reader, nursery)
            with trio.CancelScope() as scope:
                nursery.start_soon(cancelled_when_blocked, scope)
                await reader.page()
            assert scope.cancelled_caught
            harness.store.release("scan")
        await wait_all_tasks_blocked()
        assert not ahead._under_way
        assert await reader.scans() == 1, "the third page is there, and the fourth is read ahead"


async def cancelled_when_blocked(scope):
    await wait_all_tasks_blocked()
    scope.cancel()


# --- readers that do not ----------------------------------------------------------------------------


async def test_scattered_pages_are_not_a_walk():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        for at in (0, 40, 20, 60, 10):
            span = await harness.look()
            ids = [message_id for message_id, _ in (await harness.page(cached=False)).messages()]
            reader.since = ids[at]
            assert span.start <= reader.since
            assert await reader.scans() == 1


@pytest.mark.parametrize("pause_s", [0.0, LEAST_PAUSE_S / 2])
async def test_nothing_is_read_ahead_for_a_fast_reader_until_it_slows_down(pause_s):
    async with reading() as (harness, _), trio.open_nursery() as nursery:
        now_s = 0.0
        ahead = Pages(harness.store, harness.directory, clock=lambda: now_s)
        nursery.start_soon(ahead.run)
        await wait_all_tasks_blocked()
        reader, scans = Reader(harness, ahead), []
        for more_s in (pause_s, pause_s, LEAST_PAUSE_S, pause_s, pause_s):
            now_s += more_s
            scans.append(await reader.scans())
        # The fourth page was read together with the third.
        assert scans == [1, 1, 2, 0, 1]
        nursery.cancel_scope.cancel()


async def test_waiting_for_a_page_does_not_count_as_time_of_the_reader():
    async with reading() as (harness, _), trio.open_nursery() as nursery:
        now_s = 0.0
        ahead = Pages(harness.store, harness.directory, clock=lambda: now_s)
        nursery.start_soon(ahead.run)
        await wait_all_tasks_blocked()
        reader = Reader(harness, ahead)
        await reader.page()
        harness.store.stall("scan")
        async with trio.open_nursery() as asking:
            asking.start_soon(reader.page)
            await harness.store.stalled("scan")
            now_s += 1
            harness.store.release("scan")
        before = harness.store.calls["scan"]
        await wait_all_tasks_blocked()
        assert harness.store.calls["scan"] == before
        nursery.cancel_scope.cancel()


async def test_nothing_is_read_ahead_if_the_next_page_might_be_too_large_to_keep():
    async with reading(cache_bytes=8 * 150_000) as (harness, ahead):
        assert kept(harness).max_bytes == 150_000
        reader = Reader(harness, ahead)
        assert [await reader.scans() for _ in range(3)] == [1] * 3


async def test_nothing_is_read_ahead_after_messages_that_are_not_plain():
    async with reading() as (harness, ahead):
        await harness.create(OTHER)
        for _ in range(40):
            await harness.publish(LONG, name=OTHER, message_ttls_s=[3600])
        harness.directory.cache(OTHER).start_over()
        reader = Reader(harness, ahead, name=OTHER)
        assert [await reader.scans() for _ in range(3)] == [1] * 3


async def test_nothing_is_read_ahead_for_a_read_as_of_a_moment():
    async with reading() as (harness, ahead):
        for _ in range(2):  # so that the pages are remembered
            reader = Reader(harness, ahead)
            for _ in range(4):
                await reader.page()
                await wait_all_tasks_blocked()
        view = AsOfView(Moment(harness.clock.ms, frozenset(), (), 0, 0))
        reader = Reader(harness, ahead)
        before = harness.store.calls["scan"]
        for _ in range(4):
            assert (await reader.page(view=view)).count == LIMIT
            await wait_all_tasks_blocked()
        assert harness.store.calls["scan"] == before + 4


async def test_nothing_is_read_ahead_that_is_cached_or_after_the_end():
    async with reading() as (harness, ahead):
        for _ in range(20):
            await harness.publish(LONG)
        reader = Reader(harness, ahead)
        scans = [await reader.scans() for _ in range(10)]
        assert scans == [1, 2, 1, 1, 1, 1, 1, 1, 0, 0]


async def test_one_page_is_read_ahead_at_a_time():
    async with reading() as (harness, ahead):
        await cold(harness, name=OTHER)
        readers = [Reader(harness, ahead, name=name) for name in (NAME, OTHER)]
        for reader in readers:
            await reader.page()
        before = harness.store.calls["scan"]
        harness.store.stall("scan")
        async with trio.open_nursery() as nursery:
            for reader in readers:
                nursery.start_soon(reader.page)
            await wait_all_tasks_blocked()
            harness.store.release("scan")
            harness.store.stall("scan")
            await wait_all_tasks_blocked()
            assert harness.store.calls["scan"] == before + len(readers) + AT_ONCE
            harness.store.release("scan")


async def test_read_ahead_pages_never_exceed_the_kept_size():
    async with reading(cache_bytes=8 * 200_000) as (harness, ahead):
        await harness.create(OTHER)
        for text in [LONG] * 20 + [LONG * 10] * 20:
            await harness.publish(text, name=OTHER)
        harness.directory.cache(OTHER).start_over()
        reader, rows = Reader(harness, ahead, name=OTHER), []
        scan = harness.store.scan

        async def counted(table, start, stop, feed, **options):
            def fed(some):
                rows.extend(some)
                return feed(some)

            await scan(table, start, stop, fed, **options)

        await reader.page()
        harness.store.scan = counted
        await reader.page()
        rows.clear()
        await wait_all_tasks_blocked()
        assert sum(len(value) for _, value in rows) < 200_000 + 12 * 80_010  # at most one more list of rows
        assert kept(harness, OTHER).bytes <= kept(harness, OTHER).max_bytes
        assert (await reader.page()).count == LIMIT


async def test_a_page_that_replaces_one_of_equal_length_is_dropped_with_its_topic():
    async with reading(cache_bytes=8 * 161_000) as (harness, ahead):
        await cold(harness, name=OTHER)
        for name in (NAME, OTHER):
            reader = Reader(harness, ahead, name=name)
            await reader.page()
            await reader.page()
            await wait_all_tasks_blocked()
        assert len(kept(harness)) > 0
        await harness.ask(Remove(), OTHER)
        await harness.ask(Remove())
        assert len(kept(harness)) == 0


async def test_nothing_is_read_ahead_while_the_task_does_not_run():
    async with actors() as harness:
        await cold(harness)
        reader = Reader(harness, pages_of(harness))
        assert [await reader.scans() for _ in range(4)] == [1] * 4


# --- small pages ------------------------------------------------------------------------------------


async def test_after_small_pages_of_a_walk_a_chunk_is_read_and_the_next_one_in_time():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead, limit=2)
        scans = [await reader.scans() for _ in range(40)]
        # A chunk has 32 of these messages. The scans are two pages, three chunks, the last page, and the part after it.
        assert (scans[:3], sum(scans)) == ([1, 2, 0], 2 + 3 + 1 + 1)


async def test_a_chunk_serves_pages_of_any_start_and_end():
    async with reading() as (harness, ahead):
        first = Reader(harness, ahead, limit=2)
        for _ in range(2):
            await first.scans()
        ids = [message_id for message_id, _ in (await harness.page(cached=False)).messages()]
        for at in (4, 9, 15):
            for bounds in ({"limit": 3}, {"limit": 100, "max_bytes": 20_000}, {"limit": 1, "max_bytes": 1}):
                for since in (ids[at], after(ids[at])):
                    reader = Reader(harness, ahead, **bounds)
                    reader.since = since
                    assert await reader.scans() == 0
        reader = Reader(harness, ahead, limit=40)
        reader.since = ids[4]
        assert await reader.scans() == 1, "it continues after the chunk"


async def test_a_chunk_that_reaches_the_end_of_the_topic_shows_nothing_of_the_end():
    async with reading() as (harness, ahead):
        await cold(harness, messages=9, name=OTHER)
        reader = Reader(harness, ahead, name=OTHER, limit=2)
        assert [await reader.scans() for _ in range(4)] == [1, 2, 0, 1]
        await harness.publish(LONG, LONG, name=OTHER)
        harness.directory.cache(OTHER).start_over()
        assert await reader.scans() == 1
        assert (await reader.page()).count == 1


async def test_a_chunk_that_cannot_be_built_is_not_tried_again():
    async with reading() as (harness, ahead):
        await cold(harness, messages=6, name=OTHER)
        for number in range(30):
            more = {"message_ttls_s": [3600]} if number == 24 else {}
            await harness.publish(LONG, name=OTHER, **more)
        harness.directory.cache(OTHER).start_over()
        reader = Reader(harness, ahead, name=OTHER, limit=2)
        assert [await reader.scans() for _ in range(6)] == [1, 2, 1, 1, 1, 1]
        other = Reader(harness, ahead, limit=2)
        assert [await other.scans() for _ in range(3)] == [1, 2, 0], "what is so of one topic is not of others"


async def test_chunks_are_dropped_with_their_topic_and_expired_messages_are_not_delivered():
    async with reading() as (harness, ahead):
        first_ms = harness.clock.ms
        await cold(harness, name=OTHER, ttl_s=3600)
        for name in (NAME, OTHER):
            reader = Reader(harness, ahead, name=name, limit=2)
            for _ in range(2):
                await reader.scans()
        harness.clock.ms = first_ms + 3_600_000 + 95
        page = await reader.page()
        assert page.parts[0][1:9] == (first_ms + 100).to_bytes(8, "big")
        await wait_all_tasks_blocked()
        await harness.ask(Remove(), OTHER)
        await harness.ask(Remove())
        assert (len(kept(harness)), kept(harness).bytes) == (0, 0)


async def test_overlapping_chunks_deliver_no_message_twice():
    async with reading() as (harness, ahead):
        ids = [message_id for message_id, _ in (await harness.page(cached=False)).messages()]
        from_the_middle = Reader(harness, ahead, limit=2)
        from_the_middle.since = ids[20]
        from_the_start = Reader(harness, ahead, limit=2)
        for reader in (from_the_middle, from_the_start):
            for _ in range(2):
                await reader.scans()
        one, other = kept(harness).from_start(await harness.look(ids[20]))
        assert other.first <= one.last_id
        for at in range(4, 40):
            reader = Reader(harness, ahead, limit=20)
            reader.since = ids[at]
            await reader.scans()  # compares with the store's page


async def test_a_chunk_is_not_kept_if_its_topic_was_dropped_nor_served_where_rows_were_set_aside():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead, limit=2)
        await reader.page()
        await reader.page()
        harness.directory.cache(NAME).clear()
        await wait_all_tasks_blocked()
        assert (len(kept(harness)), kept(harness).bytes) == (0, 0)
        reader = Reader(harness, ahead, limit=2)
        for _ in range(2):
            await reader.scans()
        span = await harness.look(reader.since)
        assert kept(harness).covers(span)
        assert not kept(harness).covers(replace(span, set_aside=(SetAside(reader.since, reader.since, 1),)))


async def test_a_chunk_is_charged_the_memory_of_its_messages():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead, limit=2)
        for _ in range(2):
            await reader.scans()
        (chunk,) = kept(harness)._chunks.values()
        assert chunk.cost >= chunk.chunk.cost > 30 * len(LONG)
        assert kept(harness).bytes == chunk.cost


async def test_each_page_is_counted_once_whatever_its_source():
    async with reading() as (harness, ahead):
        budget = harness.directory.cache(NAME).budget
        reader = Reader(harness, ahead, limit=2)
        for _ in range(2):
            await reader.scans()
        before = budget.hits, budget.misses
        span = await harness.look(reader.since)
        bounds = {"limit": 12, "max_bytes": BYTES, "view": None}
        assert ahead.read_now(NAME, span, at_once_bytes=1 << 16, **bounds) is None
        assert (budget.hits, budget.misses) == before
        await ahead.read(NAME, span, **bounds)
        ahead.read_now(NAME, span, at_once_bytes=1 << 20, **bounds)
        assert (budget.hits, budget.misses) == (before[0] + 2, before[1])


async def test_chunks_respect_the_memory_bound_of_pages():
    async with reading(cache_bytes=8 * 100_000) as (harness, ahead):
        reader = Reader(harness, ahead, limit=2)
        for _ in range(30):
            await reader.scans()
            assert kept(harness).bytes <= kept(harness).max_bytes == 100_000


async def test_only_a_page_in_memory_is_available_at_once():
    async with reading() as (harness, ahead):

        async def now(since, **bounds):
            span = await harness.look(since)
            return ahead.read_now(
                NAME, span, view=None, **{"limit": 2, "max_bytes": BYTES, "at_once_bytes": 1 << 16} | bounds
            )

        ids = [message_id for message_id, _ in (await harness.page(cached=False)).messages()]
        assert await now(ids[4]) is None
        reader = Reader(harness, ahead, limit=2)
        for _ in range(2):
            await reader.scans()
        page = await now(ids[4])
        assert [message_id for message_id, _ in page.messages()] == ids[4:6]
        assert await now(ids[4], limit=9) is None, "it is not small"
        assert await now(ids[30], limit=7) is None, "it continues after the chunk"
        assert (await now(LAST_BOUND)).count == 0


# --- failures ---------------------------------------------------------------------------------------


async def test_a_page_that_cannot_be_read_ahead_is_read_on_request():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        await reader.page()
        harness.store.fail_next("scan", after=1)
        await reader.page()
        await wait_all_tasks_blocked()
        assert await reader.scans() == 2  # its own page, and the next one again


async def test_a_page_that_cannot_be_read_at_all_is_an_error_for_its_reader():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        await reader.page()
        harness.store.fail_next("scan", after=1)
        await reader.page()
        await wait_all_tasks_blocked()
        harness.store.fail_next("scan")
        with pytest.raises(StoreError):
            await reader.page()
        assert (await reader.page()).count == LIMIT


async def test_a_bug_in_reading_ahead_is_logged_and_crashes_nothing(monkeypatch, caplog):
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        with monkeypatch.context() as patch:
            patch.setattr("actors.pages.walk_rows", None)
            assert [await reader.scans() for _ in range(3)] == [1] * 3
        assert "nothing was read ahead" in caplog.text
        assert await reader.scans() == 2


async def test_a_topic_deleted_during_a_read_ahead_shows_nothing_of_it():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        async with trio.open_nursery() as nursery:
            await while_the_third_page_is_read_ahead(reader, nursery)
            await harness.ask(Remove())
            harness.store.release("scan")
        await wait_all_tasks_blocked()
        assert len(kept(harness)) == 0
        await harness.create()
        assert await harness.read() == []


async def test_pages_dropped_before_the_next_read_ahead_are_not_kept_again():
    async with reading() as (harness, ahead):
        reader = Reader(harness, ahead)
        await reader.page()
        await reader.page()
        harness.directory.cache(NAME).clear()
        await wait_all_tasks_blocked()
        assert (len(kept(harness)), kept(harness).bytes) == (0, 0)


async def test_messages_that_expire_after_they_were_read_ahead_are_not_delivered():
    async with reading() as (harness, ahead):
        first_ms = harness.clock.ms
        await cold(harness, name=OTHER, ttl_s=3600)
        reader = Reader(harness, ahead, name=OTHER)
        await reader.page()
        await reader.page()
        await wait_all_tasks_blocked()
        assert len(kept(harness, OTHER)) == 1
        harness.clock.ms = first_ms + 3_600_000 + 255
        page = await reader.page()
        assert (page.count, page.parts[0][1:9]) == (LIMIT, (first_ms + 260).to_bytes(8, "big"))


# --- the same pages ---------------------------------------------------------------------------------


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("publish"), st.integers(1, 30), st.sampled_from([2_000, 9_000, 30_000])),
            st.tuples(st.just("cold")),
            st.tuples(st.just("read"), st.integers(0, 4), st.booleans()),
            st.tuples(st.just("read"), st.integers(0, 4), st.booleans()),
            st.tuples(st.just("read"), st.integers(0, 4), st.booleans()),
            st.tuples(st.just("back"), st.integers(0, 4)),
            st.tuples(st.just("jump"), st.integers(0, 4), st.integers(0, 200)),
            st.tuples(st.just("later"), st.integers(1, 3_000)),
        ),
        max_size=60,
    )
)
def test_every_page_of_every_reader_equals_the_page_of_the_store(actions):
    async def run():
        async with actors(cache_bytes=1 << 23) as harness, trio.open_nursery() as nursery:
            ahead = pages_of(harness)
            nursery.start_soon(ahead.run)
            await harness.create(ttl_s=5)
            for _ in range(30):
                await harness.publish(LONG)
            harness.directory.cache(NAME).start_over()
            readers = [Reader(harness, ahead, limit=limit, max_bytes=BYTES) for limit in (10, 10, 17, 2, 3)]
            for action, *given in actions:
                if action == "publish":
                    await harness.publish(*["x" * given[1]] * given[0])
                elif action == "cold":
                    harness.directory.cache(NAME).start_over()
                elif action == "later":
                    harness.clock.ms += given[0]
                elif action == "jump":
                    ids = [message_id for message_id, _ in (await harness.page(cached=False)).messages()] or [
                        FIRST_BOUND
                    ]
                    readers[given[0]].since = ids[given[1] % len(ids)]
                elif action == "back":
                    readers[given[0]].since = FIRST_BOUND
                else:
                    reader = readers[given[0]]
                    span = await harness.look(reader.since)
                    options = {"limit": reader.limit, "max_bytes": BYTES, "view": View.without_service(frozenset())}
                    stored = await read_page(harness.store, None, span, **options)
                    page = await ahead.read(NAME, span, **options)
                    assert shown(page) == shown(stored)
                    if page.last_id is not None:
                        reader.since = after(page.last_id)
                    if given[1]:
                        await wait_all_tasks_blocked()
                budget = harness.directory.cache(NAME).budget
                assert budget.bytes <= budget.max_bytes
            nursery.cancel_scope.cancel()

    trio.run(run)

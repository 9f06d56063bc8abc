"""Messages of the store that are requested repeatedly: read at most twice, never stale, never over their bound."""

from __future__ import annotations

import random

import pytest
import trio
from actors_in_process import NAME, START_MS, actors, after_receipt
from hypothesis import given
from hypothesis import strategies as st

from actors.cache import KEPT_PART
from actors.kept_chunks import KEPT_OVERHEAD_BYTES
from actors.pages import Pages
from actors.reading import read_page
from plainsong.protocol.errors import TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND, after, before, pack_id
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import Remove, SetProperties, Undelete

OTHER = TopicName("ns", "other")


async def cold(harness, count=40, name=NAME, **properties):
    """Make a topic with messages, none of which is cached."""
    await harness.create(name, **properties)
    receipts = []
    for number in range(count):
        harness.clock.ms += 10
        receipts.append(await harness.publish(f"{number}", name=name))
    harness.directory.cache(name).start_over()
    return receipts


def kept(harness):
    return harness.directory.cache(NAME).budget.kept


def shown(page):
    return list(page.messages()), page.count, page.payload_bytes, page.last_id, page.end, page.pointers, page.attributes


async def scans_of(harness, **asked):
    """Return the number of scans for a page, which must equal the store's page."""
    stored = await harness.page(cached=False, **asked)
    before = harness.store.calls["scan"]
    assert shown(await harness.page(**asked)) == shown(stored)
    return harness.store.calls["scan"] - before


# --- requests that need no disk ---------------------------------------------------------------------


async def test_the_third_request_for_a_page_does_not_touch_the_disk():
    async with actors() as harness:
        await cold(harness)
        assert [await scans_of(harness, limit=10) for _ in range(4)] == [1, 1, 0, 0]
        assert kept(harness).bytes > 0
        assert harness.directory.cache(NAME).budget.hits == 2


async def test_readers_that_follow_each_other_through_a_topic_share_its_pages():
    async with actors() as harness:
        await cold(harness)

        async def walk():
            since, scans = FIRST_BOUND, 0
            for _ in range(3):
                scans += await scans_of(harness, since=since, limit=10)
                since = after((await harness.page(since, limit=10, cached=False)).last_id)
            return scans

        assert [await walk() for _ in range(3)] == [3, 3, 0]


async def test_a_page_is_found_from_every_start_whose_next_message_is_its_first():
    async with actors() as harness:
        receipts = await cold(harness)
        since = after_receipt(receipts[9])
        for _ in range(2):
            await harness.page(since, limit=10)
        assert await scans_of(harness, since=receipts[10].first_id, limit=10) == 0
        assert await scans_of(harness, since=before(receipts[10].first_id), limit=10) == 0
        assert await scans_of(harness, since=receipts[9].first_id, limit=10) == 1
        assert await scans_of(harness, since=receipts[11].first_id, limit=10) == 1


async def test_pages_with_other_bounds_are_cut_from_kept_chunks_that_cover_them():
    async with actors() as harness:
        receipts = await cold(harness)
        for _ in range(2):
            await harness.page(limit=10)
        assert await scans_of(harness, limit=9) == 0
        assert await scans_of(harness, limit=10, max_bytes=50) == 0
        assert await scans_of(harness, since=receipts[4].first_id, limit=6) == 0
        assert await scans_of(harness, since=receipts[4].first_id, limit=7) == 1, "it ends after the kept messages"
        assert await scans_of(harness, limit=11) == 1
        assert await scans_of(harness, limit=40, max_bytes=10_000) == 1


async def test_a_page_can_reach_its_limit_of_bytes_at_the_end_of_a_kept_chunk():
    async with actors() as harness:
        await harness.create()
        for size in [100] * 5 + [1_000] * 5:
            await harness.publish(bytes(size))
        harness.directory.cache(NAME).start_over()
        assert [await scans_of(harness, max_bytes=1_000) for _ in range(3)] == [1, 1, 0]
        assert await scans_of(harness, max_bytes=1_600) == 0, "the next message does not fit either"
        assert await scans_of(harness, max_bytes=2_000) == 1, "it would"


async def test_kept_chunks_may_overlap_but_none_is_inside_another():
    async with actors() as harness:
        receipts = await cold(harness)
        pages = [(0, 10), (5, 10), (2, 4), (20, 4), (18, 10)]
        for at, limit in pages:
            for _ in range(2):
                await scans_of(harness, since=receipts[at].first_id, limit=limit)
        assert [key[1] for key in sorted(kept(harness)._chunks)] == [receipts[at].first_id for at in (0, 5, 18)]
        first = receipts[0].first_id
        assert await scans_of(harness, since=first, limit=15) == 0, "two together have it"
        assert await scans_of(harness, since=first, limit=16) == 1


# --- never stale ------------------------------------------------------------------------------------


async def test_kept_pages_contain_no_expired_messages():
    async with actors() as harness:
        await cold(harness, ttl_s=3600)
        for _ in range(3):
            await harness.page(limit=10)
        harness.clock.ms = START_MS + 3_600_000 + 55
        assert (await harness.page(limit=10)).parts[0][1:9] == (START_MS + 60).to_bytes(8, "big")
        await scans_of(harness, limit=10)


async def test_messages_with_a_ttl_or_a_pointer_or_at_the_end_are_never_in_a_kept_page():
    async with actors() as harness:
        receipts = await cold(harness)
        await harness.publish("short", "lived", message_ttls_s=[5, 9])
        await harness.publish("last")
        harness.directory.cache(NAME).start_over()
        since = after_receipt(receipts[-1])
        for _ in range(3):
            assert await scans_of(harness, since=since, limit=2) == 1
            assert await scans_of(harness, limit=100) == 1, "it ends where the topic does"
        assert len(kept(harness)) == 0


async def test_an_end_bound_limits_a_page_before_it_is_kept_and_after():
    async with actors() as harness:
        await cold(harness)
        for end in [
            None,
            None,
            None,
            pack_id(START_MS + 60, 0),
            pack_id(START_MS + 100, 0),
            pack_id(START_MS + 110, 0),
        ]:
            span = await harness.look(end_before=end)
            stored = await read_page(harness.store, None, span, limit=10, max_bytes=10_000)
            assert shown(await harness.pages.read(NAME, span, limit=10, max_bytes=10_000)) == shown(stored)


async def test_a_deletion_and_a_new_generation_drop_kept_pages():
    async with actors() as harness:
        await cold(harness)
        for _ in range(3):
            await harness.page(limit=10)
        await harness.ask(Remove())
        assert (len(kept(harness)), kept(harness).bytes) == (0, 0)
        with pytest.raises(TopicNotFound):
            await harness.page(limit=10)
        await harness.ask(Undelete())
        assert await scans_of(harness, limit=10) == 1
        await harness.ask(Remove())
        await harness.create()
        assert await harness.read() == []


async def test_a_page_read_while_pages_are_dropped_is_not_kept():
    async with actors() as harness:
        await cold(harness)
        await harness.page(limit=10)
        cache = harness.directory.cache(NAME)
        real = harness.store.scan

        async def scan(*args, **more):
            await real(*args, **more)
            cache.clear()

        harness.store.scan = scan
        await harness.page(limit=10)
        del harness.store.scan
        assert len(kept(harness)) == 0


# --- never over the bound ---------------------------------------------------------------------------


async def test_kept_chunks_use_at_most_an_eighth_of_the_cache_and_the_least_recently_used_are_evicted():
    async with actors(cache_bytes=80_000) as harness:
        receipts = await cold(harness, 150)
        chunks = kept(harness)
        assert chunks.max_bytes == 80_000 // KEPT_PART
        starts = [receipt.first_id for receipt in receipts[::3]]
        for since in starts:
            for _ in range(2):
                await harness.page(since, limit=2)
            assert chunks.bytes <= chunks.max_bytes
            assert harness.directory.cache(NAME).budget.bytes <= 80_000
        number = len(chunks)
        assert 1 < number < 50
        assert chunks.bytes >= number * KEPT_OVERHEAD_BYTES
        assert [await scans_of(harness, since=since, limit=2) for since in starts[-number:]] == [0] * number
        assert await scans_of(harness, since=starts[-number - 1], limit=2) == 1


async def test_the_number_of_remembered_pages_is_bounded(monkeypatch):
    monkeypatch.setattr("actors.pages.REMEMBERED", 20)
    async with actors() as harness:
        harness.pages = Pages(harness.store, harness.directory)
        receipts = await cold(harness, 31)
        starts = [receipt.first_id for receipt in receipts[:30]]
        for since in starts:
            await harness.page(since, limit=1)
        assert (len(harness.pages._firsts), len(harness.pages._ends)) == (20, 20)
        assert [await scans_of(harness, since=starts[-1], limit=1) for _ in range(2)] == [1, 0]
        assert [await scans_of(harness, since=starts[0], limit=1) for _ in range(2)] == [1, 1], "it was forgotten"


async def test_a_page_larger_than_the_bound_and_any_page_without_a_cache_is_not_kept():
    async with actors(cache_bytes=0) as harness:
        await cold(harness)
        for _ in range(3):
            assert await scans_of(harness, limit=10) == 1
        assert kept(harness).bytes == 0


@given(
    st.lists(st.sampled_from(["publish", "later", "shorter", "read", "read", "read", "restart"]), max_size=40),
    st.integers(0, 1 << 30),
)
def test_a_kept_page_always_equals_the_page_of_the_store(actions, seed):
    async def run():
        chance = random.Random(seed)
        async with actors(cache_bytes=60_000) as harness:
            await cold(harness, 20, ttl_s=3600)
            for action in actions:
                if action == "publish":
                    harness.clock.ms += chance.randrange(3)
                    many = [bytes(chance.randrange(50)) for _ in range(chance.randrange(1, 9))]
                    ttls = [chance.choice([None, None, 1]) for _ in many]
                    await harness.publish(*many, **({"message_ttls_s": ttls} if chance.random() < 0.2 else {}))
                    harness.directory.cache(NAME).start_over()
                elif action == "later":
                    harness.clock.ms += chance.choice([1, 40, 1000])
                elif action == "shorter":
                    await harness.ask(SetProperties({"ttl": chance.choice([1, 60, 3600])}))
                elif action == "restart":
                    harness.directory.cache(NAME).clear()
                else:
                    since = chance.choice([FIRST_BOUND, pack_id(START_MS + 10 * chance.randrange(30), 0)])
                    limit = chance.choice([3, 7])
                    for _ in range(3):
                        await scans_of(harness, since=since, limit=limit)

    trio.run(run)

"""The scan cache is never stale, never over its budget, and has the same pages as the store."""

from __future__ import annotations

import tracemalloc

import pytest
import trio
from actors_in_process import NAME, START_MS, actors, after_receipt
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from actors.cache import SEAL_BYTES, CacheBudget, TopicCache
from actors.reading import read_page
from plainsong.protocol.errors import OutcomeUnknown, TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND, ID_BYTES, after, pack_id
from plainsong.protocol.names import TopicName
from plainsong.protocol.page import item
from plainsong.protocol.requests import Lengths
from plainsong.protocol.topic.asks import Cleaned, PlanCleaning, Remove, SetProperties, SliceCleaned, Undelete
from plainsong.protocol.topic.state import PositionSequence
from plainsong.protocol.topic.step import RowBatch
from storage.base import StoreError

OTHER = TopicName("ns", "other")


def items(first, count, size=100):
    return [item(pack_id(START_MS + number, 0), bytes(size)) for number in range(first, first + count)]


def named(number, count):
    """Return attributes with unique strings, some of which take four bytes a character."""
    return {f"name {number} {index}": f"text {number} {index} " + "\U0001f600" * (number % 2) for index in range(count)}


def costs(*caches):
    return sum(chunk.cost for cache in caches for chunk in cache.chunks)


# --- requests that need no disk -------------------------------------------------------------------


async def test_a_reader_inside_the_cache_does_not_touch_the_disk():
    async with actors() as harness:
        await harness.create()
        receipts = [await harness.publish(f"{number}") for number in range(50)]
        scans, gets = harness.store.calls["scan"], harness.store.calls["get"]
        assert await harness.read() == [b"%d" % number for number in range(50)], (
            "the cache has all messages ever published"
        )
        for number in (0, 20, 49):
            assert len(await harness.read(after_receipt(receipts[number]))) == 49 - number
        assert (harness.store.calls["scan"], harness.store.calls["get"]) == (scans, gets)


async def test_a_reader_at_the_end_sees_each_message_once_without_touching_the_disk(autojump_clock):
    async with actors() as harness:
        await harness.create()
        scans, since, got = harness.store.calls["scan"], FIRST_BOUND, []
        for number in range(20):
            await harness.publish(f"{number}")
            page = await harness.page(since)
            got += [payload for _, payload in page.messages()]
            since = after(page.last_id)
        assert got == [b"%d" % number for number in range(20)]
        assert harness.store.calls["scan"] == scans


async def test_after_a_restart_old_messages_are_read_from_disk_and_new_ones_from_the_cache():
    async with actors() as harness:
        await harness.create()
        await harness.publish("old")
        store = harness.store
    async with actors(store) as harness:
        end = await harness.end()
        await harness.publish("new")
        scans = store.calls["scan"]
        assert await harness.read(end) == [b"new"]
        assert store.calls["scan"] == scans
        assert await harness.read() == [b"old", b"new"]
        assert store.calls["scan"] == scans + 1


async def test_an_empty_range_reads_nothing():
    async with actors() as harness:
        await harness.create()
        await harness.publish("m")
        scans = harness.store.calls["scan"]
        assert await harness.read(await harness.end()) == []
        assert harness.store.calls["scan"] == scans


# --- never stale ----------------------------------------------------------------------------------


async def test_nothing_of_a_deleted_topic_is_read_after_it_is_recreated():
    async with actors() as harness:
        await harness.create()
        await harness.publish("first life")
        await harness.ask(Remove())
        with pytest.raises(TopicNotFound):
            await harness.read()
        await harness.create()
        assert await harness.read() == []
        await harness.publish("second life")
        assert await harness.read() == await harness.read(cached=False) == [b"second life"]


async def test_an_undeleted_topic_shows_all_its_messages():
    async with actors() as harness:
        await harness.create()
        await harness.publish("a")
        await harness.ask(Remove())
        await harness.ask(Undelete())
        assert await harness.read() == [b"a"]
        await harness.publish("b")
        assert await harness.read() == await harness.read(cached=False) == [b"a", b"b"]


async def test_a_recreation_between_two_publishes_of_one_commit_does_not_mix_generations(nursery):
    """Publish, delete, create and publish wait during a commit, and are committed together."""
    async with actors() as harness:
        await harness.create()
        await harness.publish("zero")
        harness.store.stall("write")
        nursery.start_soon(harness.publish, "stalls")
        await harness.store.stalled("write")
        for call in (
            lambda: harness.publish("old"),
            lambda: harness.ask(Remove()),
            harness.create,
            lambda: harness.publish("new"),
            lambda: harness.ask(Remove()),
            lambda: harness.ask(Undelete()),
            lambda: harness.publish("newer"),
        ):
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
        harness.store.release("write")
        await wait_all_tasks_blocked()
        assert await harness.read() == await harness.read(cached=False) == [b"new", b"newer"]


@pytest.mark.parametrize("applied", [False, True])
async def test_after_a_crash_the_cache_matches_the_disk(applied):
    async with actors() as harness:
        await harness.create()
        await harness.publish("a")
        harness.store.fail_next("write", applied=applied)
        with pytest.raises(OutcomeUnknown):
            await harness.publish("b")
        await harness.publish("c")
        wanted = [b"a", *([b"b"] if applied else []), b"c"]
        assert await harness.read() == await harness.read(cached=False) == wanted


async def test_expired_messages_are_not_in_the_cache_either():
    async with actors() as harness:
        await harness.create(ttl_s=10)
        await harness.publish("a", "b", message_ttls_s=[2, None])
        harness.clock.ms += 2_000
        assert await harness.read() == [b"a", b"b"]
        harness.clock.ms += 1
        assert await harness.read() == await harness.read(cached=False) == [b"b"]
        harness.clock.ms += 7_999
        assert await harness.read() == await harness.read(cached=False) == [b"b"]
        harness.clock.ms += 1
        assert await harness.read() == await harness.read(cached=False) == []
        await harness.ask(SetProperties({"ttl": 1_000}))
        assert await harness.read() == await harness.read(cached=False) == []


async def test_a_topic_counted_as_empty_still_shows_live_messages():
    """The cleaner counts independently; if its counts are too high, live messages must not vanish from the cache."""
    async with actors() as harness:
        await harness.create()
        await harness.publish("old", ttl_s=1)
        await harness.publish("lives")
        store = harness.store
    async with actors(store) as harness:
        harness.clock.ms = START_MS + 2_000
        plan = await harness.ask(PlanCleaning(0))
        (first_ms, last_ms), *_ = plan.due
        await harness.ask(Cleaned(plan.prefix, [SliceCleaned(first_ms, last_ms, 1, 10, 0)]))
        await harness.publish("new")
        assert await harness.read() == await harness.read(cached=False) == [b"lives", b"new"]


async def test_a_page_read_while_the_store_fails_is_an_error():
    async with actors(cache_bytes=0) as harness:
        await harness.create()
        await harness.publish("m")
        harness.store.fail_next("scan")
        with pytest.raises(StoreError):
            await harness.read()
        assert await harness.read() == [b"m"]
        assert harness.watch.count["falls"] == 0


# --- the same pages -------------------------------------------------------------------------------

requests = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 300), st.sampled_from([None, None, 1, 100])), min_size=1, max_size=40),
        st.sampled_from([0, 0, 1, 500, 1_000]),
    ),
    min_size=1,
    max_size=8,
)


@given(
    requests,
    st.sampled_from([0, 3_000, 8_000, 1 << 20]),
    st.lists(st.tuples(st.floats(0, 1), st.booleans(), st.integers(1, 60), st.integers(0, 9_000)), max_size=8),
    st.sampled_from([64, 1_000, SEAL_BYTES]),
)
def test_a_page_from_the_cache_equals_the_page_from_the_store(requests, cache_bytes, reads, seal_bytes):
    async def run():
        async with actors(cache_bytes=cache_bytes) as harness:
            await harness.create()
            ids = [FIRST_BOUND]
            for number, (messages, by_ms) in enumerate(requests):
                harness.clock.ms += by_ms
                payloads = [bytes([number % 256]) * size for size, _ in messages]
                receipt = await harness.publish(*payloads, message_ttls_s=[ttl for _, ttl in messages])
                ids += [receipt.first_id, receipt.last_id]
            for share, behind, limit, max_bytes in reads:
                since = ids[int(share * (len(ids) - 1))]
                since = after(since) if behind else since
                cached = await harness.page(since, limit, max_bytes)
                stored = await harness.page(since, limit, max_bytes, cached=False)
                assert list(cached.messages()) == list(stored.messages())
                assert (cached.count, cached.payload_bytes) == (stored.count, stored.payload_bytes)
                assert (cached.last_id, cached.end) == (stored.last_id, stored.end)
                assert cached.count == len(list(cached.messages()))
            cache = harness.directory.cache(NAME)
            assert cache.budget.bytes == costs(cache) <= cache_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.cache.SEAL_BYTES", seal_bytes)
        trio.run(run)


@pytest.mark.parametrize("limit", [1, 4, 7, 8, 9])
async def test_a_page_that_ends_among_partly_expired_messages_reports_more(limit):
    async with actors() as harness:
        await harness.create()
        await harness.publish(*(f"{number}" for number in range(10)), message_ttls_s=[None, 1, None, 1] + [None] * 6)
        harness.clock.ms += 2_000
        cached, stored = [await harness.page(limit=limit, cached=cached) for cached in (True, False)]
        assert list(cached.messages()) == list(stored.messages())
        assert (
            (cached.count, cached.end) == (stored.count, stored.end) == (min(limit, 8), "more" if limit < 8 else "end")
        )


async def test_an_end_bound_cuts_a_cached_page_like_one_from_the_store():
    async with actors() as harness:
        await harness.create()
        receipt = await harness.publish(*[f"{number}" for number in range(30)])
        for end in (receipt.first_id, pack_id(START_MS, 7), pack_id(START_MS, 7, 1), receipt.last_id):
            span = await harness.look(pack_id(START_MS, 3), end_before=end)
            pages = [
                await read_page(harness.store, cache, span, limit=100, max_bytes=10_000)
                for cache in (harness.directory.cache(NAME), None)
            ]
            assert list(pages[0].messages()) == list(pages[1].messages())
            assert (pages[0].last_id, pages[0].end) == (pages[1].last_id, pages[1].end)


requests = st.lists(
    st.tuples(
        st.lists(st.integers(0, 300), min_size=1, max_size=30)
        | st.builds(lambda size, count: [size] * count, st.integers(0, 300), st.integers(1, 120)),
        st.sampled_from(["plain"] * 4 + ["ttl", "pointer"]),
    ),
    min_size=1,
    max_size=4,
)


@given(st.lists(requests, min_size=1, max_size=6), st.sampled_from([1, 10, 40]))
def test_messages_cached_in_bulk_equal_messages_cached_one_by_one(commits, many):
    """Large commits become separate chunks; a reader gets the same messages."""
    one_by_one, at_once = TopicCache(CacheBudget(1 << 20)), TopicCache(CacheBudget(1 << 20))
    sequence = PositionSequence()
    since = FIRST_BOUND
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.cache.SEAL_BYTES", 2_000)
        patch.setattr("plainsong.protocol.topic.step.MANY_ROWS", many)
        for commit in commits:
            batch, every = RowBatch(), []
            for sizes, kind in commit:
                runs = sequence.take(START_MS, len(sizes))
                messages = [bytes([size % 256]) * size for size in sizes]
                ttls_s, pointer = [5] * len(sizes) if kind == "ttl" else None, 7 if kind == "pointer" else None
                batch.add(runs, messages, ttls_s, pointer, length=Lengths(messages).of_each)
                (run,) = runs
                every += [
                    item(pack_id(run.ts_ms, run.first + index), message) for index, message in enumerate(messages)
                ]
            assert batch.last_id == every[-1][1 : 1 + ID_BYTES]
            if batch.item_count >= many:
                at_once.append_wire(b"p", *batch.wire(), batch.expiries, since, batch.pointers)
            else:
                at_once.append(b"p", batch.items, batch.expiries, since, batch.pointers)
            assert batch.items == every
            one_by_one.append(b"p", every, batch.expiries, since, batch.pointers)
            since = after(batch.last_id)
            assert at_once.budget.bytes == costs(at_once)
    assert _told(at_once) == _told(one_by_one)


def _told(cache):
    """Return everything that readers get from a cache, item by item."""
    told = []
    for chunk in cache.chunks:
        pointers = {at: pointer for start, stop, pointer in chunk.runs for at in range(start, stop)}
        for at in range(len(chunk)):
            found = chunk.slice(at, at + 1)
            assert chunk.id_at(at) == found[1 : 1 + ID_BYTES]
            assert chunk.size_to(at, at + 1) == len(found)
            told.append((found, chunk.expiries.get(at), pointers.get(at)))
    return told


# --- the budget -----------------------------------------------------------------------------------

actions = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from(["append"] * 8 + ["clear", "renew"]), st.integers(1, 30), st.integers(0, 900)
    ),
    max_size=60,
)


@given(actions, st.sampled_from([0, 2_000, 20_000, 10**6]))
def test_the_budget_is_the_sum_of_chunk_costs_and_never_exceeded(actions, max_bytes):
    budget = CacheBudget(max_bytes)
    caches = [TopicCache(budget) for _ in range(3)]
    kept = [[] for _ in caches]
    at = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.cache.SEAL_BYTES", 4_000)
        for which, what, count, size in actions:
            cache, all_items = caches[which], kept[which]
            if what == "clear":
                cache.clear()
            else:
                prefix = b"%d" % at if what == "renew" else cache.prefix
                more = items(at, count, size)
                expiries = dict.fromkeys(range(0, count, 3), 1)
                since = after(all_items[-1][1:21]) if all_items else FIRST_BOUND
                cache.append(prefix, more, expiries, since)
                all_items += more
                at += count
            assert budget.bytes == costs(*caches) <= max_bytes
            for each, every in zip(caches, kept, strict=True):
                here = b"".join(chunk.slice(0, len(chunk)) for chunk in each.chunks)
                assert not here or b"".join(every).endswith(here), "the last of them, without holes"


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=12),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40), st.integers(0, 40)), max_size=6),
    st.sampled_from([200, 1_000, SEAL_BYTES]),
)
def test_a_rollback_changes_exactly_the_rows_of_its_own_pointer_in_its_range(runs, rollbacks, seal_bytes):
    budget, at, had = CacheBudget(1 << 20), 0, []
    cache = TopicCache(budget)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("actors.cache.SEAL_BYTES", seal_bytes)
        for pointer, count in runs:
            cache.append(b"p", items(at, count, 10), {}, FIRST_BOUND, [(0, count, pointer)] if pointer else ())
            had += [pointer] * count
            at += count
    for pointer, first, last in rollbacks:
        for prefix in (b"p", b"another generation"):
            cache.roll_back(prefix, pointer, pack_id(START_MS + first, 0)[:10], pack_id(START_MS + last, 0)[:10])
        had = [-each if each == pointer and first <= i <= last else each for i, each in enumerate(had)]
    here = []
    for chunk in cache.chunks:
        here += [0] * len(chunk)
        for start, stop, pointer in chunk.runs:
            here[len(here) - len(chunk) + start : len(here) - len(chunk) + stop] = [pointer] * (stop - start)
    assert here == had
    assert budget.bytes == costs(cache)


async def test_the_oldest_chunks_of_any_topic_are_dropped_first():
    async with actors(cache_bytes=3 * SEAL_BYTES) as harness:
        await harness.create()
        await harness.create(OTHER)
        first = await harness.publish(bytes(SEAL_BYTES))
        await harness.publish(bytes(SEAL_BYTES), name=OTHER)
        assert harness.directory.cache(NAME).chunks
        await harness.publish(bytes(SEAL_BYTES), name=OTHER)
        assert not harness.directory.cache(NAME).chunks
        assert len(harness.directory.cache(OTHER).chunks) == 2
        scans = harness.store.calls["scan"]
        assert len(await harness.read()) == 1
        assert harness.store.calls["scan"] == scans + 1
        assert await harness.read(after_receipt(first)) == []


async def test_a_read_that_starts_before_the_cached_range_uses_the_store():
    async with actors(cache_bytes=3 * SEAL_BYTES) as harness:
        await harness.create()
        receipts = [await harness.publish(bytes([number]) * SEAL_BYTES) for number in range(6)]
        assert len(harness.directory.cache(NAME).chunks) == 2
        for number, receipt in enumerate(receipts):
            scans = harness.store.calls["scan"]
            assert [each[0] for each in await harness.read(receipt.first_id)] == list(range(number, 6))
            assert harness.store.calls["scan"] - scans == (0 if number >= 4 else 1)
        assert len(await harness.read()) == 6


async def test_a_commit_larger_than_the_budget_is_read_from_the_store():
    async with actors(cache_bytes=10_000) as harness:
        await harness.create()
        await harness.publish("small")
        await harness.publish(*[bytes(1_000)] * 50)
        assert harness.directory.budget.bytes == 0
        assert len(await harness.read()) == 51


async def test_releasing_a_topic_frees_its_cache(autojump_clock):
    async with actors(idle_s=10, sweeping=True) as harness:
        await harness.create()
        await harness.publish(bytes(1_000))
        assert harness.directory.budget.bytes > 1_000
        await trio.sleep(30)
        assert harness.directory.budget.bytes == 0


@pytest.mark.parametrize("strings", [0, 1, 5])
@pytest.mark.parametrize("pointers", [False, True])
# Small commits take long to fill a large budget. With fewer topics a chunk still grows as large before it is dropped.
@pytest.mark.parametrize(
    ("count", "size", "topics", "max_bytes"),
    [(1, 10, 2, 1 << 18), (1, 3_000, 10, 1 << 20), (50, 20, 10, 1 << 20), (1_000, 10, 10, 1 << 20)],
)
def test_memory_is_bounded_by_the_budget(count, size, topics, max_bytes, pointers, strings):
    budget = CacheBudget(max_bytes)
    caches = [TopicCache(budget) for _ in range(topics)]
    tracemalloc.start()
    try:
        at = written = 0
        while written < 2 * max_bytes:
            cache = caches[at % len(caches)]
            runs = [(index, index + 1, START_MS + at + index) for index in range(count)] if pointers else ()
            expiries = dict.fromkeys(range(0, count, 2), START_MS + at)
            attributes = {index: named(at + index, strings) for index in range(count)} if strings else {}
            cache.append(b"p", items(at, count, size), expiries, FIRST_BOUND, runs, attributes)
            at += count
            written += count * (size + 60 + 200 * strings)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert budget.bytes <= max_bytes
    assert used < 1.3 * max_bytes

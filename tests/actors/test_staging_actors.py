"""Staging with real actors: on every store, with each write failing in turn, and with cleaning by the real janitor."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress

import pytest
from actors_in_process import NAME, actors
from pointers_in_process import FIRST, payload_rows, pointer_rows, publish, store

from actors.authority import keep_authority
from actors.pointers import PointerIndex
from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import InvalidParameter, PlainsongError, Unavailable
from plainsong.protocol.keys import pointer_key
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, ListPointers, OpenProducer, PublishStaged, Remove, Stats, StoreStaged
from plainsong.protocol.topic.state import TopicLimits
from storage.leveldb import LevelDBStore
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

STEPS = RetentionConfig(interval_s=60, delete_grace_s=100, step_rows=3)
LONG_LIVED = TopicLimits(max_lifetime_ms=10_000_000)


async def stage(harness, segment, *payloads, ids=None, producer="p", **more):
    request = PublishRequest([each.encode() for each in payloads], producer=producer, segment=segment, **more)
    request.sequence_ids = ids
    await harness.ask(StoreStaged(request, sum(map(len, payloads))))


async def batch(harness, sequence_id, *segments, producer="p", **more):
    request = PublishRequest([], producer=producer, sequence_ids=[sequence_id], segments=segments, **more)
    return await harness.ask(PublishStaged(request, 0))


# --- a store that fails ------------------------------------------------------------------------------

#: A small job: two tasks, one losing attempt, two batches.
STORES = [("0.a", ("one", "two"), [0, 1]), ("1.a", ("lost",), [0]), ("1.b", ("three",), [0]), ("0.a", ("four",), [2])]
EXPECTED = [b"one", b"two", b"three", b"four", b"five"]


async def certainly(harness, ask):
    """Ask until there is an answer, with a little time between attempts."""
    for _ in range(5):
        harness.clock.ms += 7
        try:
            return await ask()
        except Unavailable:
            continue
    raise AssertionError("no answer")


async def course(harness, certainly=certainly):
    session = await certainly(harness, lambda: harness.ask(OpenProducer("p")))
    for segment, payloads, ids in STORES:
        await certainly(harness, lambda: stage(harness, segment, *payloads, ids=ids))  # noqa: B023 - asked at once
        assert await certainly(harness, harness.read) == []
    first = await certainly(harness, lambda: batch(harness, 0, "0.a", "1.b", producer_epoch=session.epoch))
    await certainly(harness, lambda: stage(harness, "2.a", "five", ids=[0]))
    await certainly(harness, lambda: batch(harness, 1, "2.a"))
    again = await certainly(harness, lambda: batch(harness, 0, "0.a", "1.b"))
    assert again.duplicate
    assert (again.first_id, again.last_id) == (first.first_id, first.last_id)


@asynccontextmanager
async def memory(tmp_path):
    del tmp_path
    yield MemoryStore()


@asynccontextmanager
async def leveldb(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as inner:
        yield inner


@pytest.mark.parametrize("failing", range(9))
@pytest.mark.parametrize(
    ("kind", "applied"), [(memory, 0), (memory, 1), (memory, 2), (memory, 3), (memory, True), (leveldb, 0)]
)
async def test_a_retried_batch_is_stored_once_whichever_write_fails(tmp_path, kind, applied, failing):
    async with kind(tmp_path) as inner:
        disk = FaultyStore(inner)
        async with actors(disk, limits=LONG_LIVED) as harness:
            await harness.create()
            disk.fail_next("write", applied=applied, after=failing)
            await course(harness)
            assert await harness.read(cached=False) == EXPECTED
            harness.clock.ms -= 3_600_000
        async with actors(disk, limits=LONG_LIVED) as harness:
            assert await harness.read() == EXPECTED
            assert harness.core().state.staged == {}


@pytest.mark.parametrize("kept", range(8))
@pytest.mark.parametrize("at", range(8))
async def test_a_power_cut_in_any_write_leaves_the_whole_batch_or_nothing(autojump_clock, at, kept):
    disk = FaultyStore(MemoryStore())
    async with actors(disk, limits=LONG_LIVED) as harness:
        await harness.create()
        disk.fail_next("write", applied=kept, after=at)

        async def once(harness, ask):
            harness.clock.ms += 7
            return await ask()

        with suppress(Unavailable):
            await course(harness, once)
        disk.crash()
    async with actors(disk, limits=LONG_LIVED) as harness:
        assert await harness.read() in ([], EXPECTED[:4], EXPECTED)
        await certainly(harness, lambda: harness.ask(OpenProducer("p")))
        for segment, payloads, ids in STORES:
            await stage(harness, f"again {segment}", *payloads, ids=ids)
        before = await harness.read()
        await batch(harness, 0, "again 0.a", "again 1.b")
        assert await harness.read() == (before or EXPECTED[:4])


async def test_staged_messages_are_read_back_from_a_store_of_files(tmp_path):
    async with await LevelDBStore.open(tmp_path / "data") as disk, actors(FaultyStore(disk)) as harness:
        await harness.create()
        await stage(harness, "a", "one", ids=[0])
        await stage(harness, "b", "lost", ids=[0])
    async with await LevelDBStore.open(tmp_path / "data") as disk, actors(FaultyStore(disk)) as harness:
        harness.clock.ms -= 3_600_000
        await stage(harness, "a", "one", "two", ids=[0, 1])
        await batch(harness, 0, "a")
        await harness.publish("behind")
    async with await LevelDBStore.open(tmp_path / "data") as disk, actors(FaultyStore(disk)) as harness:
        assert await harness.read() == [b"one", b"two", b"behind"]
        with pytest.raises(InvalidParameter):
            await batch(harness, 1, "b")


async def test_an_unreadable_staging_row_blocks_nothing(caplog):
    disk = FaultyStore(MemoryStore())
    async with actors(disk) as harness:
        await harness.create()
        await stage(harness, "a", "one")
        pointer = harness.core().state.staged["p"]
    disk.inner.apply([put_one(Table.METADATA, pointer_key(NAME, 1, pointer), b"\x01\x80")])
    async with actors(disk) as harness:
        with pytest.raises(InvalidParameter):
            await batch(harness, 0, "a")
        await stage(harness, "a", "anew")
        await batch(harness, 0, "a")
        assert await harness.read() == [b"anew"]
    assert "pointer row unreadable" in caplog.text


# --- invisible to transactions --------------------------------------------------------------------------


async def test_staged_pointers_are_in_no_list_of_transactions_and_bind_to_no_authority():
    disk = FaultyStore(MemoryStore())
    async with actors(disk) as harness:
        await keep_authority(disk, "embedded")
        await harness.create()
        await stage(harness, "a", "one")
        await store(harness, FIRST, "kept")
        index = harness.directory.environment.pointers
        assert len(index) == 1
        assert [each.pointer for each in await harness.ask(ListPointers())] == [FIRST]
        await batch(harness, 0, "a")
        await stage(harness, "b", "two")
        await publish(harness, FIRST)
        index.decided([FIRST])
        await harness.ask(Stats())
        await harness.publish("another commit")
        assert len(index) == 0
    again = PointerIndex()
    await again.load(disk)
    assert len(again) == 0
    await keep_authority(disk, "off")


# --- cleaning --------------------------------------------------------------------------------------------


async def test_an_expired_batch_is_removed_with_exactly_its_winners_and_losers(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await stage(harness, "a", *"abcdefgh")
        await stage(harness, "lost", *"uvwxyz")
        await batch(harness, 0, "a")
        await stage(harness, "a", "open")
        await stage(harness, "a", "later", producer="q")
        harness.clock.ms += 5_000
        await batch(harness, 0, "a", producer="q")
        harness.clock.ms += 5_001
        assert await harness.read(cached=False) == [b"later"]
        assert await harness.janitor.clean_all() == 15
        assert (harness.rows(), payload_rows(harness)) == (1, 2)
        await batch(harness, 1, "a")
        assert await harness.read(cached=False) == [b"later", b"open"]


async def test_a_batch_with_its_own_ttl_is_removed_and_uncounted_with_its_losers(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=1_000)
        await stage(harness, "a", *"abcdefgh")
        await stage(harness, "lost", "x")
        await batch(harness, 0, "a", ttl_s=5)
        await harness.publish("lives")
        harness.clock.ms += 5_001
        assert await harness.janitor.clean_all() == 8
        assert (harness.rows(), payload_rows(harness)) == (1, 0)
        assert harness.core().state.usage.messages == 1


async def test_unpublished_staged_messages_are_removed_one_lifetime_after_the_last_store(autojump_clock):
    async with actors(janitor=STEPS, limits=TopicLimits(max_lifetime_ms=50_000)) as harness:
        await harness.create(ttl_s=10)
        await stage(harness, "a", *"abcdefgh")
        harness.clock.ms += 40_000
        await stage(harness, "a", "last")
        harness.clock.ms += 49_999
        assert await harness.janitor.clean_all() == 0
        assert harness.core().state.stored_bytes == 8 + len("last")
        harness.clock.ms += 1
        assert await harness.janitor.clean_all() == 9
        await harness.publish("another commit")
        assert (payload_rows(harness), pointer_rows(harness)) == (0, [])
        assert harness.core().state.stored_bytes == 0
        with pytest.raises(InvalidParameter):
            await batch(harness, 0, "a")


async def test_the_next_batch_may_be_staged_while_an_orphan_is_removed(autojump_clock):
    async with actors(janitor=STEPS, limits=TopicLimits(max_lifetime_ms=50_000)) as harness:
        await harness.create(ttl_s=1_000)
        await stage(harness, "a", *"abcdefgh")
        harness.clock.ms += 50_000
        harness.store.fail_next("discard", after=1)
        with suppress(PlainsongError):
            await harness.janitor.clean_all()
        await certainly(harness, lambda: stage(harness, "a", "anew", ids=[0]))
        await batch(harness, 0, "a")
        await stage(harness, "b", "next")
        await harness.janitor.clean_all()
        assert payload_rows(harness) == 2
        await batch(harness, 1, "b")
        assert await harness.read(cached=False) == [b"anew", b"next"]


async def test_a_removed_generation_removes_its_staged_and_published_messages(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create()
        await stage(harness, "a", *"abc")
        await batch(harness, 0, "a")
        await stage(harness, "b", *"def")
        await harness.ask(Remove())
        metadata = harness.core().state.metadata
        await harness.ask(Create(metadata.properties))
        await stage(harness, "a", "new")
        await harness.janitor.clean_all()
        assert (harness.rows(), payload_rows(harness), len(pointer_rows(harness))) == (0, 1, 1)
        await batch(harness, 0, "a")
        assert await harness.read(cached=False) == [b"new"]


async def test_a_deleted_topic_leaves_no_staged_messages(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create()
        await stage(harness, "a", *"abc")
        await harness.ask(Remove())
        harness.clock.ms += 100_001
        await harness.janitor.clean_all()
        assert (payload_rows(harness), pointer_rows(harness)) == (0, [])

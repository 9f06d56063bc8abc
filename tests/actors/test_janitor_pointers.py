"""Cleaning what was stored: payload rows leave with their reference, orphans leave, and nothing else does."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import actors
from hypothesis import given, settings
from hypothesis import strategies as st
from pointers_in_process import FIRST, Said, payload_rows, pointer_rows, publish, roll_back, store

from actors.janitor import JanitorSettings
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import RolledBack, TransactionExpired
from plainsong.protocol.rows import MessageRow, encode_row
from plainsong.protocol.topic.state import TopicLimits
from storage.cleaning import STEP_BYTES

GRACE_S = 100
STEPS = JanitorSettings(interval_s=60, delete_grace_s=GRACE_S, step_rows=3)
LONG_LIVED = TopicLimits(max_lifetime_ms=10_000_000)


# --- what was published ---------------------------------------------------------------------------


async def test_an_expired_reference_takes_its_payload_rows_with_it_and_no_others(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        await store(world, FIRST, *"abcdefgh")
        await publish(world, FIRST, "inline")
        await store(world, FIRST + 1, "open")
        world.clock.ms += 5_000
        await store(world, FIRST + 2, "later 1", "later 2")
        await publish(world, FIRST + 2)
        world.clock.ms += 5_001
        assert await world.read(cached=False) == [b"later 1", b"later 2"]
        assert await world.janitor.clean_all() == 10
        assert (world.rows(), payload_rows(world)) == (1, 3)
        assert await world.read(cached=False) == [b"later 1", b"later 2"]
        await publish(world, FIRST + 1)
        assert await world.read(cached=False) == [b"later 1", b"later 2", b"open"]


async def test_what_the_topic_counted_for_stored_messages_is_counted_out_with_them(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=1_000)
        await store(world, FIRST, *"abcdefgh")
        await publish(world, FIRST, ttl_s=5)
        await world.publish("lives")
        before = world.core().state.usage.bytes
        world.clock.ms += 5_001
        assert await world.janitor.clean_all() == 8
        assert (world.rows(), payload_rows(world)) == (1, 0)
        assert world.core().state.usage.messages == 1
        assert world.core().state.usage.bytes == before - 8 * (1 + 10)
        assert await world.read(cached=False) == [b"lives"]


async def test_stored_messages_with_a_short_life_of_their_own_are_hidden_exactly_and_leave_with_their_reference(
    autojump_clock,
):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=100)
        await store(world, FIRST, "short", "long", message_ttls_s=[1, None])
        await publish(world, FIRST)
        world.clock.ms += 1_001
        await world.janitor.clean_all()
        assert await world.read(cached=False) == [b"long"]
        world.clock.ms += 99_000
        await world.janitor.clean_all()
        assert (world.rows(), payload_rows(world)) == (0, 0)


async def test_a_rolled_back_reference_takes_its_payload_rows_along_when_it_expires(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        await store(world, FIRST, "a", "b")
        await publish(world, FIRST)
        await roll_back(world, FIRST)
        await world.janitor.clean_all()
        assert payload_rows(world) == 2, "readers without transactions still see them"
        assert await world.read(cached=False) == [b"a", b"b"]
        world.clock.ms += 10_001
        await world.janitor.clean_all()
        assert (world.rows(), payload_rows(world)) == (0, 0)


async def test_losing_segments_leave_with_the_reference_that_did_not_list_them(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        for segment in ("one", "two", "three"):
            await store(world, FIRST, f"{segment} a", f"{segment} b", segment=segment)
        await publish(world, FIRST, segments=["two"])
        assert await world.read(cached=False) == [b"two a", b"two b"]
        world.clock.ms += 10_001
        await world.janitor.clean_all()
        assert payload_rows(world) == 0


@pytest.mark.parametrize("discards", range(6))
@pytest.mark.parametrize("kept", [0, 2, 5, 50])
async def test_a_crash_between_payloads_and_reference_shows_nothing_and_leaks_nothing(autojump_clock, discards, kept):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        for number in range(2):
            await store(world, FIRST + number, *"abcdefgh")
            await publish(world, FIRST + number)
        world.clock.ms += 5_000
        await world.publish("lives")
        world.clock.ms += 5_001
        ms, disk = world.clock.ms, world.store
        disk.fail_next("discard", after=discards)
        await world.janitor.clean_all()
        disk.crash(keep_discards=kept)
    async with actors(disk, janitor=STEPS, limits=LONG_LIVED) as world:
        world.clock.ms = ms
        assert await world.read(cached=False) == [b"lives"]
        await world.janitor.clean_all()
        assert await world.read(cached=False) == [b"lives"]
        assert (world.rows(), payload_rows(world)) == (1, 0)


async def test_a_reference_that_does_not_say_where_its_payloads_are_is_kept_with_them(autojump_clock, caplog):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        await store(world, FIRST, "a")
        await publish(world, FIRST)
        [key] = world.store.inner.tables[Table.MESSAGE].rows
        world.store.inner.apply([put_one(Table.MESSAGE, key, encode_row(MessageRow(None, FIRST, extras={"n": 1})))])
        world.clock.ms += 10_001
        assert await world.janitor.clean_all() == 0
        assert (world.rows(), payload_rows(world)) == (1, 1)
        assert "rows that cannot be read were kept" in caplog.text


# --- what was not ---------------------------------------------------------------------------------


async def test_what_was_stored_and_rolled_back_is_removed_and_the_topic_forgets_it(autojump_clock):
    said = Said()
    async with actors(janitor=STEPS, limits=LONG_LIVED, authority=said) as world:
        await world.create(ttl_s=100_000)
        said.standings = {FIRST: "in_progress", FIRST + 1: "in_progress"}
        await store(world, FIRST, *"abcdefgh")
        await store(world, FIRST + 1, "open")
        await roll_back(world, FIRST)
        assert await world.janitor.clean_all() == 8
        assert payload_rows(world) == 1
        assert world.core().state.stored_bytes == len("open")
        with pytest.raises(RolledBack):
            await publish(world, FIRST)
        said.standings[FIRST] = "aborted"
        world.directory.environment.pointers.decided([FIRST])
        await world.janitor.clean_all()
        assert len(pointer_rows(world)) == 1
        await publish(world, FIRST + 1)
        assert await world.read(cached=False) == [b"open"]


async def test_what_was_stored_and_never_published_goes_after_the_longest_life_of_a_transaction(autojump_clock):
    limits = TopicLimits(max_lifetime_ms=50_000)
    async with actors(janitor=STEPS, limits=limits) as world:
        await world.create(ttl_s=10)
        await store(world, FIRST, *"abcdefgh")
        world.clock.ms += 49_999
        assert await world.janitor.clean_all() == 0
        assert payload_rows(world) == 8
        world.clock.ms += 1
        assert await world.janitor.clean_all() == 8
        assert (payload_rows(world), pointer_rows(world)) == (0, [])
        assert world.directory.environment.pointers.topics_of([FIRST]) == set()
        with pytest.raises(TransactionExpired):
            await publish(world, FIRST)
        assert await world.read(cached=False) == []


async def test_without_a_longest_life_orphans_go_by_the_topics_ttl(autojump_clock):
    async with actors(janitor=STEPS, limits=TopicLimits(max_lifetime_ms=0)) as world:
        await world.create(ttl_s=10)
        await store(world, 17, *"abcd")
        world.clock.ms += 10_000
        await store(world, 17, "e")
        world.clock.ms += 10_000
        assert await world.janitor.clean_all() == 0
        world.clock.ms += 1
        assert await world.janitor.clean_all() == 5
        assert pointer_rows(world) == []


async def test_orphans_of_an_invalid_transaction_go_and_its_pointer_stays_until_it_is_pruned(autojump_clock):
    said = Said()
    async with actors(janitor=STEPS, limits=TopicLimits(max_lifetime_ms=50_000), authority=said) as world:
        await world.create(ttl_s=10)
        said.standings[FIRST] = "in_progress"
        await store(world, FIRST, "a", "b")
        said.standings[FIRST] = "invalid"
        world.clock.ms += 50_001
        assert await world.janitor.clean_all() == 2
        assert len(pointer_rows(world)) == 1
        del said.standings[FIRST]
        await world.janitor.clean_all()
        assert pointer_rows(world) == []


@pytest.mark.parametrize("discards", range(4))
@pytest.mark.parametrize("kept", [0, 2, 50])
async def test_a_crash_while_orphans_go_leaves_nothing_that_shows_and_nothing_for_ever(autojump_clock, discards, kept):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as world:
        await world.create(ttl_s=10_000)
        await store(world, FIRST, *"abcdefgh")
        await roll_back(world, FIRST)
        ms, disk = world.clock.ms, world.store
        disk.fail_next("discard", after=discards)
        await world.janitor.clean_all()
        disk.crash(keep_discards=kept)
    async with actors(disk, janitor=STEPS, limits=LONG_LIVED) as world:
        world.clock.ms = ms
        with pytest.raises(RolledBack):
            await publish(world, FIRST)
        assert await world.read(cached=False) == []
        await world.janitor.clean_all()
        assert payload_rows(world) == 0


# --- bounds ---------------------------------------------------------------------------------------


async def test_payload_rows_go_in_steps_of_bounded_rows_and_bytes(autojump_clock, monkeypatch):
    async with actors(janitor=JanitorSettings(step_rows=50), limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        await store(world, FIRST, *["small"] * 120)
        await store(world, FIRST, *["x" * (1 << 20)] * 14)
        await publish(world, FIRST)
        world.clock.ms += 10_001
        removed = []
        discard = world.store.discard

        async def counted(table, keys):
            removed.append(len(keys))
            await discard(table, keys)

        monkeypatch.setattr(world.store, "discard", counted)
        assert await world.janitor.clean_all() == 135
        assert max(removed) <= 50
        assert sum(removed) == 135
        # A step reads one list beyond its bytes at most, and a list is bounded too.
        assert len(removed) >= 3 + 14 // (2 * STEP_BYTES >> 20)


async def test_publishes_and_polls_go_on_while_a_stored_transaction_is_removed(nursery, autojump_clock):
    async with actors(janitor=JanitorSettings(step_rows=1), limits=LONG_LIVED) as world:
        await world.create(ttl_s=10)
        await store(world, FIRST, *["old"] * 50)
        await publish(world, FIRST)
        world.clock.ms += 10_001
        world.store.stall("discard")
        nursery.start_soon(world.janitor.clean_all)
        await world.store.stalled("discard")
        await store(world, FIRST + 1, "new")
        await publish(world, FIRST + 1, "inline")
        assert await world.read() == await world.read(cached=False) == [b"new", b"inline"]
        world.store.release("discard")
        await trio.sleep(10)
        assert (world.rows(), payload_rows(world)) == (2, 1)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.sampled_from(["plain", "store", "publish", "publish", "roll back", "clean"]),
            st.integers(0, 4),
            st.sampled_from([None, None, 1, 50]),
            st.sampled_from([0, 1, 400, 1_000, 5_000]),
        ),
        min_size=3,
        max_size=16,
    ),
    st.sampled_from([1, 5, 20]),
    st.sampled_from([0, 999, 30_000]),
    st.integers(1, 5),
)
@settings(max_examples=60)
def test_cleaning_changes_nothing_anybody_reads_and_leaves_no_row_nobody_can(steps, ttl_s, by_ms, step_rows):
    async def run():
        async with actors(janitor=JanitorSettings(step_rows=step_rows), limits=LONG_LIVED) as world:
            await world.create(ttl_s=ttl_s)
            stored, closed = {}, set()
            for number, what, count, own_s, later_ms in steps:
                pointer = FIRST + number
                messages = [f"{number} {count} {index}" for index in range(count)]
                if what == "clean":
                    await clean(world)
                elif what == "plain":
                    await world.publish("plain", ttl_s=own_s)
                elif pointer in closed:
                    pass
                elif what == "store" and messages and stored.get(pointer) != "published":
                    await store(world, pointer, *messages, ttl_s=own_s)
                    stored[pointer] = "stored"
                elif what == "publish":
                    await publish(world, pointer, *messages, ttl_s=own_s)
                    stored[pointer] = "published" if pointer in stored else None
                elif what == "roll back":
                    await roll_back(world, pointer)
                    closed.add(pointer)
                world.clock.ms += later_ms
            world.clock.ms += by_ms
            await clean(world)
            world.clock.ms += 60_000_000
            await clean(world)
            await clean(world)
            assert (world.rows(), payload_rows(world), pointer_rows(world)) == (0, 0, [])
            assert world.core().state.pending == {}

    async def clean(world):
        before = list((await world.page(cached=False)).messages())
        await world.janitor.clean_all()
        assert list((await world.page(cached=False)).messages()) == before
        assert list((await world.page()).messages()) == before

    trio.run(run)

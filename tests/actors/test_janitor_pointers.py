"""Cleaning stored messages: payload rows are removed with their reference, orphans are removed, and nothing else."""

from __future__ import annotations

import pytest
import trio
from actors_in_process import actors
from hypothesis import given, settings
from hypothesis import strategies as st
from pointers_in_process import FIRST, Said, payload_rows, pointer_rows, publish, roll_back, store

from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import RolledBack, TransactionExpired
from plainsong.protocol.rows import MessageRow, encode_row
from plainsong.protocol.topic.state import TopicLimits
from storage.cleaning import STEP_BYTES

GRACE_S = 100
STEPS = RetentionConfig(interval_s=60, delete_grace_s=GRACE_S, step_rows=3)
LONG_LIVED = TopicLimits(max_lifetime_ms=10_000_000)


# --- what was published ---------------------------------------------------------------------------


async def test_an_expired_reference_is_removed_with_exactly_its_own_payload_rows(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, *"abcdefgh")
        await publish(harness, FIRST, "inline")
        await store(harness, FIRST + 1, "open")
        harness.clock.ms += 5_000
        await store(harness, FIRST + 2, "later 1", "later 2")
        await publish(harness, FIRST + 2)
        harness.clock.ms += 5_001
        assert await harness.read(cached=False) == [b"later 1", b"later 2"]
        assert await harness.janitor.clean_all() == 10
        assert (harness.rows(), payload_rows(harness)) == (1, 3)
        assert await harness.read(cached=False) == [b"later 1", b"later 2"]
        await publish(harness, FIRST + 1)
        assert await harness.read(cached=False) == [b"later 1", b"later 2", b"open"]


async def test_removing_stored_messages_updates_the_counts_of_the_topic(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=1_000)
        await store(harness, FIRST, *"abcdefgh")
        await publish(harness, FIRST, ttl_s=5)
        await harness.publish("lives")
        before = harness.core().state.usage.bytes
        harness.clock.ms += 5_001
        assert await harness.janitor.clean_all() == 8
        assert (harness.rows(), payload_rows(harness)) == (1, 0)
        assert harness.core().state.usage.messages == 1
        assert harness.core().state.usage.bytes == before - 8 * (1 + 10)
        assert await harness.read(cached=False) == [b"lives"]


async def test_stored_messages_with_a_short_ttl_are_hidden_on_time_and_removed_with_their_reference(
    autojump_clock,
):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=100)
        await store(harness, FIRST, "short", "long", message_ttls_s=[1, None])
        await publish(harness, FIRST)
        harness.clock.ms += 1_001
        await harness.janitor.clean_all()
        assert await harness.read(cached=False) == [b"long"]
        harness.clock.ms += 99_000
        await harness.janitor.clean_all()
        assert (harness.rows(), payload_rows(harness)) == (0, 0)


async def test_a_rolled_back_reference_is_removed_with_its_payload_rows_when_it_expires(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, "a", "b")
        await publish(harness, FIRST)
        await roll_back(harness, FIRST)
        await harness.janitor.clean_all()
        assert payload_rows(harness) == 2, "readers without transactions still see them"
        assert await harness.read(cached=False) == [b"a", b"b"]
        harness.clock.ms += 10_001
        await harness.janitor.clean_all()
        assert (harness.rows(), payload_rows(harness)) == (0, 0)


async def test_losing_segments_are_removed_with_the_reference_that_did_not_list_them(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        for segment in ("one", "two", "three"):
            await store(harness, FIRST, f"{segment} a", f"{segment} b", segment=segment)
        await publish(harness, FIRST, segments=["two"])
        assert await harness.read(cached=False) == [b"two a", b"two b"]
        harness.clock.ms += 10_001
        await harness.janitor.clean_all()
        assert payload_rows(harness) == 0


@pytest.mark.parametrize("discards", range(6))
@pytest.mark.parametrize("kept", [0, 2, 5, 50])
async def test_a_crash_between_payloads_and_reference_shows_nothing_and_leaks_nothing(autojump_clock, discards, kept):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        for number in range(2):
            await store(harness, FIRST + number, *"abcdefgh")
            await publish(harness, FIRST + number)
        harness.clock.ms += 5_000
        await harness.publish("lives")
        harness.clock.ms += 5_001
        ms, disk = harness.clock.ms, harness.store
        disk.fail_next("discard", after=discards)
        await harness.janitor.clean_all()
        disk.crash(keep_discards=kept)
    async with actors(disk, janitor=STEPS, limits=LONG_LIVED) as harness:
        harness.clock.ms = ms
        assert await harness.read(cached=False) == [b"lives"]
        await harness.janitor.clean_all()
        assert await harness.read(cached=False) == [b"lives"]
        assert (harness.rows(), payload_rows(harness)) == (1, 0)


async def test_a_reference_without_the_location_of_its_payloads_is_kept_with_them(autojump_clock, caplog):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, "a")
        await publish(harness, FIRST)
        [key] = harness.store.inner.tables[Table.MESSAGE].rows
        harness.store.inner.apply([put_one(Table.MESSAGE, key, encode_row(MessageRow(None, FIRST, extras={"n": 1})))])
        harness.clock.ms += 10_001
        assert await harness.janitor.clean_all() == 0
        assert (harness.rows(), payload_rows(harness)) == (1, 1)
        assert "rows that cannot be read were kept" in caplog.text


# --- what was not ---------------------------------------------------------------------------------


async def test_rolled_back_stored_messages_are_removed_and_forgotten_by_the_topic(autojump_clock):
    said = Said()
    async with actors(janitor=STEPS, limits=LONG_LIVED, authority=said) as harness:
        await harness.create(ttl_s=100_000)
        said.standings = {FIRST: "in_progress", FIRST + 1: "in_progress"}
        await store(harness, FIRST, *"abcdefgh")
        await store(harness, FIRST + 1, "open")
        await roll_back(harness, FIRST)
        assert await harness.janitor.clean_all() == 8
        assert payload_rows(harness) == 1
        assert harness.core().state.stored_bytes == len("open")
        with pytest.raises(RolledBack):
            await publish(harness, FIRST)
        said.standings[FIRST] = "aborted"
        harness.directory.environment.pointers.decided([FIRST])
        await harness.janitor.clean_all()
        assert len(pointer_rows(harness)) == 1
        await publish(harness, FIRST + 1)
        assert await harness.read(cached=False) == [b"open"]


async def test_unpublished_stored_messages_are_removed_after_the_maximum_transaction_lifetime(autojump_clock):
    limits = TopicLimits(max_lifetime_ms=50_000)
    async with actors(janitor=STEPS, limits=limits) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, *"abcdefgh")
        harness.clock.ms += 49_999
        assert await harness.janitor.clean_all() == 0
        assert payload_rows(harness) == 8
        harness.clock.ms += 1
        assert await harness.janitor.clean_all() == 8
        assert (payload_rows(harness), pointer_rows(harness)) == (0, [])
        assert harness.directory.environment.pointers.topics_of([FIRST]) == set()
        with pytest.raises(TransactionExpired):
            await publish(harness, FIRST)
        assert await harness.read(cached=False) == []


async def test_without_a_maximum_lifetime_orphans_expire_by_the_topic_ttl(autojump_clock):
    async with actors(janitor=STEPS, limits=TopicLimits(max_lifetime_ms=0)) as harness:
        await harness.create(ttl_s=10)
        await store(harness, 17, *"abcd")
        harness.clock.ms += 10_000
        await store(harness, 17, "e")
        harness.clock.ms += 10_000
        assert await harness.janitor.clean_all() == 0
        harness.clock.ms += 1
        assert await harness.janitor.clean_all() == 5
        assert pointer_rows(harness) == []


async def test_orphans_of_an_invalid_transaction_are_removed_and_its_pointer_stays_until_it_is_pruned(autojump_clock):
    said = Said()
    async with actors(janitor=STEPS, limits=TopicLimits(max_lifetime_ms=50_000), authority=said) as harness:
        await harness.create(ttl_s=10)
        said.standings[FIRST] = "in_progress"
        await store(harness, FIRST, "a", "b")
        said.standings[FIRST] = "invalid"
        harness.clock.ms += 50_001
        assert await harness.janitor.clean_all() == 2
        assert len(pointer_rows(harness)) == 1
        del said.standings[FIRST]
        await harness.janitor.clean_all()
        assert pointer_rows(harness) == []


@pytest.mark.parametrize("discards", range(4))
@pytest.mark.parametrize("kept", [0, 2, 50])
async def test_a_crash_while_orphans_are_removed_leaves_nothing_visible_and_nothing_forever(
    autojump_clock, discards, kept
):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10_000)
        await store(harness, FIRST, *"abcdefgh")
        await roll_back(harness, FIRST)
        ms, disk = harness.clock.ms, harness.store
        disk.fail_next("discard", after=discards)
        await harness.janitor.clean_all()
        disk.crash(keep_discards=kept)
    async with actors(disk, janitor=STEPS, limits=LONG_LIVED) as harness:
        harness.clock.ms = ms
        with pytest.raises(RolledBack):
            await publish(harness, FIRST)
        assert await harness.read(cached=False) == []
        await harness.janitor.clean_all()
        assert payload_rows(harness) == 0


# --- bounds ---------------------------------------------------------------------------------------


async def test_payload_rows_are_removed_in_bounded_steps_of_rows_and_bytes(autojump_clock, monkeypatch):
    async with actors(janitor=RetentionConfig(step_rows=50), limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, *["small"] * 120)
        await store(harness, FIRST, *["x" * (1 << 20)] * 14)
        await publish(harness, FIRST)
        harness.clock.ms += 10_001
        removed = []
        discard = harness.store.discard

        async def counted(table, keys):
            removed.append(len(keys))
            await discard(table, keys)

        monkeypatch.setattr(harness.store, "discard", counted)
        assert await harness.janitor.clean_all() == 135
        assert max(removed) <= 50
        assert sum(removed) == 135
        # A step may exceed its bytes by one list, and a list is bounded too.
        assert len(removed) >= 3 + 14 // (2 * STEP_BYTES >> 20)


async def test_publishes_and_polls_continue_while_a_stored_transaction_is_removed(nursery, autojump_clock):
    async with actors(janitor=RetentionConfig(step_rows=1), limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, *["old"] * 50)
        await publish(harness, FIRST)
        harness.clock.ms += 10_001
        harness.store.stall("discard")
        nursery.start_soon(harness.janitor.clean_all)
        await harness.store.stalled("discard")
        await store(harness, FIRST + 1, "new")
        await publish(harness, FIRST + 1, "inline")
        assert await harness.read() == await harness.read(cached=False) == [b"new", b"inline"]
        harness.store.release("discard")
        await trio.sleep(10)
        assert (harness.rows(), payload_rows(harness)) == (2, 1)


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
def test_cleaning_changes_nothing_readable_and_leaves_no_unreachable_row(steps, ttl_s, by_ms, step_rows):
    async def run():
        async with actors(janitor=RetentionConfig(step_rows=step_rows), limits=LONG_LIVED) as harness:
            await harness.create(ttl_s=ttl_s)
            stored, closed = {}, set()
            for number, what, count, own_s, later_ms in steps:
                pointer = FIRST + number
                messages = [f"{number} {count} {index}" for index in range(count)]
                if what == "clean":
                    await clean(harness)
                elif what == "plain":
                    await harness.publish("plain", ttl_s=own_s)
                elif pointer in closed:
                    pass
                elif what == "store" and messages and stored.get(pointer) != "published":
                    await store(harness, pointer, *messages, ttl_s=own_s)
                    stored[pointer] = "stored"
                elif what == "publish":
                    await publish(harness, pointer, *messages, ttl_s=own_s)
                    stored[pointer] = "published" if pointer in stored else None
                elif what == "roll back":
                    await roll_back(harness, pointer)
                    closed.add(pointer)
                harness.clock.ms += later_ms
            harness.clock.ms += by_ms
            await clean(harness)
            harness.clock.ms += 60_000_000
            await clean(harness)
            await clean(harness)
            assert (harness.rows(), payload_rows(harness), pointer_rows(harness)) == (0, 0, [])
            assert harness.core().state.pending == {}

    async def clean(harness):
        before = list((await harness.page(cached=False)).messages())
        await harness.janitor.clean_all()
        assert list((await harness.page(cached=False)).messages()) == before
        assert list((await harness.page()).messages()) == before

    trio.run(run)

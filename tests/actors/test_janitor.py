"""The janitor removes only rows that no reader can see, and readers do not notice its work."""

from __future__ import annotations

import time

import pytest
import trio
from actors_in_process import NAME, START_MS, actors
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from actors.janitor import Janitor
from actors.observe import SpaceGuard, SystemClock
from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.errors import LowSpace, PartlyCleaned
from plainsong.protocol.ids import FIRST_BOUND, after
from plainsong.protocol.keys import READER, metadata_key, system_key, topic_range
from plainsong.protocol.names import TopicName
from plainsong.protocol.topic.asks import ListReaders, Remove, SetProperties, SetReader, Undelete
from storage.base import StoreError, StoreStatistics
from storage.memory import MemoryStore

GRACE_S = 100
STEPS = RetentionConfig(interval_s=60, delete_grace_s=GRACE_S, step_rows=3)


# --- exactly the invisible rows -------------------------------------------------------------------


async def test_a_topic_without_expired_messages_keeps_everything(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        await harness.publish("a", "b", message_ttls_s=[10, None])
        harness.clock.ms += 10_000
        assert await harness.janitor.clean_all() == 0
        assert await harness.read(cached=False) == [b"a", b"b"]


async def test_expired_messages_are_removed_and_nothing_else(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        await harness.publish(*"abcdefgh")
        harness.clock.ms += 5_000
        await harness.publish("later")
        harness.clock.ms += 5_001
        assert await harness.janitor.clean_all() == 8
        assert harness.rows() == 1
        assert await harness.read(cached=False) == await harness.read() == [b"later"]
        assert (harness.watch.count["expired"], harness.watch.count["purged"]) == (8, 0)


async def test_messages_with_their_own_ttl_are_removed_from_among_living_ones(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=1_000)
        for number in range(10):
            await harness.publish(f"short {number}", f"long {number}", message_ttls_s=[1 + number, None])
            harness.clock.ms += 1
        harness.clock.ms = START_MS + 5_500
        assert await harness.janitor.clean_all() == 5
        assert harness.rows() == 15
        harness.clock.ms = START_MS + 20_000
        assert await harness.janitor.clean_all() == 5
        assert await harness.read(cached=False) == [b"long %d" % number for number in range(10)]
        assert await harness.janitor.clean_all() == 0
        assert harness.core().state.usage.messages == 10


@given(
    st.lists(
        st.tuples(
            st.integers(1, 8), st.sampled_from([None, None, 1, 2, 50]), st.sampled_from([0, 1, 400, 1_000, 5_000])
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([1, 5, 20]),
    st.sampled_from([0, 1, 999, 1_001, 30_000]),
    st.integers(1, 5),
    st.booleans(),
)
@settings(max_examples=60)
def test_after_a_round_the_rows_are_the_visible_messages(published, ttl_s, by_ms, step_rows, restarted):
    async def run():
        async with actors(janitor=RetentionConfig(step_rows=step_rows)) as harness:
            await harness.create(ttl_s=ttl_s)
            for count, own_s, later_ms in published:
                await harness.publish(*["m"] * count, ttl_s=own_s)
                harness.clock.ms += later_ms
            store, ms = harness.store, harness.clock.ms + by_ms
            harness.clock.ms = ms
            if not restarted:
                await check(harness)
        if restarted:
            async with actors(store, janitor=RetentionConfig(step_rows=step_rows)) as harness:
                harness.clock.ms = ms
                await check(harness)

    async def check(harness):
        before = list((await harness.page(cached=False)).messages())
        await harness.janitor.clean_all()
        assert harness.rows() == len(before)
        assert list((await harness.page(cached=False)).messages()) == before
        assert list((await harness.page()).messages()) == before

    trio.run(run)


async def test_messages_expired_by_a_shorter_ttl_are_removed_and_a_longer_one_does_not_restore_them(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=1_000)
        await harness.publish("old")
        harness.clock.ms += 100_000
        await harness.publish("new")
        await harness.ask(SetProperties({"ttl": 10}))
        await harness.ask(SetProperties({"ttl": 5_000}))
        harness.clock.ms += 10_001
        await harness.janitor.clean_all()
        await harness.ask(SetProperties({"ttl": 5_000}))
        assert harness.rows() == len(await harness.read(cached=False))
        assert b"old" not in await harness.read()


# --- generations ----------------------------------------------------------------------------------


async def test_older_generations_are_removed_with_their_readers(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        for life in range(3):
            await harness.create()
            await harness.publish(*[f"life {life}"] * 10)
            await harness.ask(SetReader("r", FIRST_BOUND))
            if life < 2:
                await harness.ask(Remove())
        assert await harness.janitor.clean_all() == 20
        assert await harness.read(cached=False) == [b"life 2"] * 10
        assert harness.watch.count["purged"] == 20
        assert [each.name for each in await harness.ask(ListReaders())] == ["r"]
        assert len([key for key in harness.store.inner.tables[Table.METADATA].rows if key.startswith(b"\x00r")]) == 1


async def test_a_deleted_topic_is_removed_after_the_grace_period_and_not_before(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create()
        await harness.publish("a", "b")
        await harness.ask(Remove())
        harness.clock.ms += GRACE_S * 1000
        assert await harness.janitor.clean_all() == 0
        await harness.ask(Undelete())
        assert await harness.read() == [b"a", b"b"]
        await harness.ask(Remove())
        harness.clock.ms += GRACE_S * 1000 + 1
        assert await harness.janitor.clean_all() == 2
        assert harness.rows() == 0
        with pytest.raises(PartlyCleaned):
            await harness.ask(Undelete())
        await harness.create()
        await harness.publish("new life")
        assert await harness.read() == [b"new life"]


async def test_a_deleted_topic_without_messages_loses_its_readers_too(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create()
        await harness.ask(SetReader("r", FIRST_BOUND))
        await harness.ask(Remove())
        key = system_key(READER, NAME, 1, b"r")
        await harness.janitor.clean_all()
        assert key in harness.store.inner.tables[Table.METADATA].rows
        harness.clock.ms += GRACE_S * 1000 + 1
        await harness.janitor.clean_all()
        assert key not in harness.store.inner.tables[Table.METADATA].rows


async def test_readers_of_an_older_generation_are_removed_even_if_it_never_had_messages(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create()
        await harness.ask(SetReader("r", FIRST_BOUND))
        await harness.ask(Remove())
        await harness.create()
        await harness.ask(SetReader("living", FIRST_BOUND))
        await harness.janitor.clean_all()
        rows = harness.store.inner.tables[Table.METADATA].rows
        assert system_key(READER, NAME, 1, b"r") not in rows
        assert system_key(READER, NAME, 2, b"living") in rows


async def test_a_topic_undeleted_while_its_cleaning_is_planned_keeps_its_rows(nursery, autojump_clock):
    """The topic decides on both the undelete and the plan, so one of them definitely comes first."""
    async with actors(janitor=STEPS) as harness:
        await harness.create()
        await harness.publish("a")
        await harness.ask(Remove())
        harness.clock.ms += GRACE_S * 1000 + 1
        await harness.ask(Undelete())
        assert await harness.janitor.clean(NAME) == 0
        assert await harness.read() == [b"a"]


async def test_a_round_forgets_topics_that_no_longer_exist(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        await harness.publish("a")
        harness.clock.ms += 10_001
        await harness.janitor.clean_all()
        assert list(harness.janitor._first_keys) == [NAME]
        start, stop = topic_range()
        for key in [key for key in harness.store.inner.tables[Table.METADATA].rows if start <= key < stop]:
            await harness.store.discard(Table.METADATA, [key])
        await harness.janitor.clean_all()
        assert not harness.janitor._first_keys


# --- next to other work ---------------------------------------------------------------------------


async def test_publishes_and_polls_continue_during_cleaning(nursery, autojump_clock):
    async with actors(janitor=RetentionConfig(step_rows=1)) as harness:
        await harness.create(ttl_s=10)
        await harness.publish(*["old"] * 100)
        harness.clock.ms += 10_001
        harness.store.stall("discard")
        done = trio.Event()

        async def clean():
            await harness.janitor.clean_all()
            done.set()

        nursery.start_soon(clean)
        await harness.store.stalled("discard")
        assert await harness.read() == []
        await harness.publish("one")
        assert await harness.read() == await harness.read(cached=False) == [b"one"]
        harness.store.release("discard")
        for number in range(20):
            await harness.publish(f"{number}")
            await trio.lowlevel.checkpoint()
        await done.wait()
        assert await harness.read(cached=False) == [b"one", *[b"%d" % number for number in range(20)]]
        assert harness.rows() == 21


async def test_a_topic_deleted_and_recreated_during_cleaning_loses_nothing(nursery, autojump_clock):
    async with actors(janitor=RetentionConfig(step_rows=2)) as harness:
        await harness.create(ttl_s=100)
        for number in range(10):
            await harness.publish("short", "long", message_ttls_s=[1, None])
            harness.clock.ms += number
        harness.clock.ms += 2_000
        harness.store.stall("discard")
        nursery.start_soon(harness.janitor.clean_all)
        await harness.store.stalled("discard")
        await harness.ask(Remove())
        await harness.create(ttl_s=100)
        await harness.publish("new", "newer")
        harness.store.release("discard")
        await wait_all_tasks_blocked()
        assert await harness.read(cached=False) == [b"new", b"newer"]
        assert harness.core().state.usage.messages == 2


@pytest.mark.parametrize("keep_discards", [0, 2])
async def test_a_crash_during_cleaning_changes_nothing_visible(nursery, autojump_clock, keep_discards):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        for number in range(20):
            await harness.publish(f"short {number}", f"{number}", message_ttls_s=[1, None])
            harness.clock.ms += 500
        harness.clock.ms += 3_000
        ms, store = harness.clock.ms, harness.store
        wanted = await harness.read(cached=False)
        discards = store.calls["discard"]
        store.fail_next("discard", after=2)
        await harness.janitor.clean_all()
        assert store.calls["discard"] == discards + 3
        store.crash(keep_discards=keep_discards)
    async with actors(store, janitor=STEPS) as harness:
        harness.clock.ms = START_MS - 3_600_000  # the machine's clock was also set back
        assert await harness.read() == wanted
        harness.clock.ms = ms
        assert await harness.read() == wanted
        await harness.janitor.clean_all()
        assert await harness.read() == wanted
        assert harness.rows() == len(wanted)


async def test_a_failed_round_is_logged_and_the_next_one_runs(nursery, autojump_clock, caplog):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        await harness.publish("old")
        harness.clock.ms += 10_001
        harness.store.fail_next("scan")
        nursery.start_soon(harness.janitor.run)
        await trio.sleep(61)
        assert "cleaning stopped, trying again later" in caplog.text
        assert harness.rows() == 1
        await trio.sleep(60)
        assert harness.rows() == 0
        nursery.cancel_scope.cancel()


async def test_one_topic_that_cannot_be_cleaned_does_not_block_the_others(autojump_clock, caplog):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        await harness.publish("old")
        garbled = put_one(Table.METADATA, metadata_key(TopicName("ns", "a")), b"\xff garbled")
        await harness.store.write([garbled], claim=await harness.store.claim(NAME))
        harness.clock.ms += 10_001
        assert await harness.janitor.clean_all() == 1
        assert "topic not cleaned" in caplog.text


async def test_all_topics_are_cleaned_even_if_they_exceed_one_listing(autojump_clock, monkeypatch):
    monkeypatch.setattr("storage.base.PAGE_ROWS", 3)
    names = [TopicName("ns", f"t{number}") for number in range(10)]
    async with actors(janitor=STEPS) as harness:
        for name in names:
            await harness.create(name, ttl_s=10)
            await harness.publish("old", name=name)
        harness.clock.ms += 10_001
        assert await harness.janitor.clean_all() == 10


async def test_idle_topics_with_nothing_to_remove_are_not_opened(autojump_clock):
    names = [TopicName("ns", f"t{number}") for number in range(6)]
    async with actors() as harness:
        for name in names:
            await harness.create(name, ttl_s=1_000)
        for name in names[:4]:
            await harness.publish("lives", name=name)
        await harness.publish("short", name=names[0], ttl_s=10)
        await harness.publish("short", name=names[1], ttl_s=900)
        await harness.ask(Remove(), names[3])
        await harness.ask(Remove(), names[5])
        store = harness.store
    async with actors(store, janitor=STEPS) as harness:
        assert await harness.janitor.clean_all() == 0
        assert len(harness.directory) == 0
        harness.clock.ms += 10_001
        assert await harness.janitor.clean_all() == 1
        assert list(harness.watch.loads) == [names[0]]


# --- the disk and the clock -----------------------------------------------------------------------


class Disk(MemoryStore):
    """A store that reports a given free space."""

    free_bytes = 1_000

    def statistics(self):
        return StoreStatistics(bytes=None, free_bytes=self.free_bytes)


async def test_when_the_disk_is_nearly_full_publishes_are_refused_and_polls_and_cleaning_continue(autojump_clock):
    async with actors(janitor=STEPS) as harness:
        await harness.create(ttl_s=10)
        await harness.publish("old")
        harness.clock.ms += 5_000
        await harness.publish("lives")
        harness.clock.ms += 5_001
        harness.space.low = True
        with pytest.raises(LowSpace) as told:
            await harness.publish("m")
        assert told.value.outcome == "not-applied"
        assert await harness.read() == [b"lives"]
        assert await harness.janitor.clean_all() == 1
        await harness.ask(Remove())
        harness.clock.ms += GRACE_S * 1000 + 1
        assert await harness.janitor.clean_all() == 1
        harness.space.low = False
        await harness.create()
        await harness.publish("m")
        assert harness.watch.count["falls"] == 0


async def test_the_space_guard_notices_that_the_disk_fills_up_and_has_space_again(nursery, autojump_clock, caplog):
    disk = Disk()
    guard = SpaceGuard(disk, 500)
    assert (guard.low, guard.free_bytes) == (False, 1_000)
    nursery.start_soon(guard.run)
    disk.free_bytes = 499
    await trio.sleep(1.5)
    assert guard.low
    disk.free_bytes = 500
    await trio.sleep(1.5)
    assert not guard.low
    assert caplog.text.count("disk nearly full") == caplog.text.count("disk has room again") == 1
    disk.free_bytes = None
    assert not guard.look()
    nursery.cancel_scope.cancel()


def test_every_backward_step_of_the_clock_is_counted(monkeypatch):
    times_ms = iter([1_000, 1_000, 1_001, 900, 950, 949, 2_000])
    monkeypatch.setattr(time, "time_ns", lambda: next(times_ms) * 1_000_000)
    clock = SystemClock()
    assert [clock.now_ms() for _ in range(7)] == [1_000, 1_000, 1_001, 900, 950, 949, 2_000]
    assert clock.regressions == 2


async def test_a_backward_step_of_the_clock_does_not_revive_expired_messages(autojump_clock):
    async with actors() as harness:
        await harness.create(ttl_s=10)
        receipt = await harness.publish("a")
        harness.clock.ms += 10_001
        assert await harness.read() == []
        harness.clock.ms -= 10_001
        assert await harness.read() == []
        assert (await harness.publish("b")).first_id > receipt.last_id
        assert await harness.read() == await harness.read(after(receipt.last_id)) == [b"b"]


async def test_a_failed_round_still_frees_space(nursery, autojump_clock, monkeypatch):
    async with actors() as harness:
        tidied = trio.Event()

        async def fail():
            raise StoreError("the disk is full")

        async def tidy():
            tidied.set()
            return 0

        monkeypatch.setattr(harness.janitor, "clean_all", fail)
        monkeypatch.setattr(harness.store, "tidy", tidy, raising=False)
        nursery.start_soon(harness.janitor.run)
        with trio.fail_after(1000):
            await tidied.wait()
        nursery.cancel_scope.cancel()


# --- the parts of a round -------------------------------------------------------------------------


class Passes:
    """Counts the passes over the invalid list; they may fail."""

    def __init__(self, fails=False):
        self.count, self.fails = 0, fails

    async def run_once(self):
        await trio.lowlevel.checkpoint()
        self.count += 1
        if self.fails:
            raise StoreError("the pass")


ROUNDS = 5


async def after_rounds(harness, passes):
    """Run rounds with these passes; return True if messages that had expired before are gone at the end."""
    harness.janitor = janitor = Janitor(harness.store, harness.directory, harness.clock, harness.watch, STEPS, passes)
    await harness.create(ttl_s=10)
    await harness.publish("old")
    harness.clock.ms += 10_001
    with trio.move_on_after(ROUNDS * STEPS.interval_s + 1):
        await janitor.run()
    return harness.rows() == 0


async def test_every_round_cleans_and_scans_for_invalid_rows_even_if_tidying_fails(autojump_clock, monkeypatch, caplog):
    async with actors() as harness:

        async def tidy():
            await trio.lowlevel.checkpoint()
            raise StoreError("a row that cannot be read")

        monkeypatch.setattr(harness.store, "tidy", tidy, raising=False)
        passes = Passes()
        assert await after_rounds(harness, passes)
        assert (passes.count, harness.janitor.rounds) == (ROUNDS, ROUNDS)
        assert caplog.text.count("tidying stopped, trying again later") == ROUNDS
        assert "cleaning stopped" not in caplog.text


async def test_every_round_tidies_and_scans_for_invalid_rows_even_if_topics_cannot_be_listed(
    autojump_clock, monkeypatch, caplog
):
    async with actors() as harness:
        tidied = []

        async def tidy():
            await trio.lowlevel.checkpoint()
            tidied.append(True)

        async def clean_all():
            await trio.lowlevel.checkpoint()
            raise StoreError("no answer in 30 s")

        passes = Passes()
        monkeypatch.setattr(harness.store, "tidy", tidy, raising=False)
        monkeypatch.setattr(Janitor, "clean_all", lambda _: clean_all())
        assert not await after_rounds(harness, passes)
        assert (passes.count, len(tidied)) == (ROUNDS, ROUNDS)
        assert caplog.text.count("cleaning stopped, trying again later") == ROUNDS


async def test_a_failed_pass_does_not_stop_later_rounds(autojump_clock, caplog):
    async with actors() as harness:
        passes = Passes(fails=True)
        assert await after_rounds(harness, passes)
        assert (passes.count, harness.janitor.rounds) == (ROUNDS, ROUNDS)
        assert caplog.text.count("invalid pass stopped, trying again later") == ROUNDS


async def test_a_topic_whose_cleaning_fails_in_the_store_does_not_block_the_others(autojump_clock, monkeypatch, caplog):
    names = [TopicName("ns", f"t{number}") for number in range(5)]
    async with actors(janitor=STEPS) as harness:
        for name in names:
            await harness.create(name, ttl_s=10)
            await harness.publish("old", name=name)
        harness.clock.ms += 10_001
        clean = harness.janitor.clean

        async def fails_in_one(name):
            if name == names[1]:
                raise StoreError("no answer in 30 s")
            return await clean(name)

        monkeypatch.setattr(harness.janitor, "clean", fails_in_one)
        assert await harness.janitor.clean_all() == 4
        assert (harness.rows(), harness.janitor.rounds) == (1, 1)
        assert caplog.text.count("topic not cleaned") == 1

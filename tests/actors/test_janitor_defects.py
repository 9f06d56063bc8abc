"""The original service's defects in the cleanup of payloads, numbered as in section 5.2 of its description."""

from __future__ import annotations

import trio
from actors_in_process import NAME, START_MS, actors
from pointers_in_process import FIRST, payload_rows, pointer_rows, publish, roll_back, store

from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table, put_one
from plainsong.protocol.keys import generation_prefix, payload_prefix
from plainsong.protocol.topic.asks import Remove, Undelete
from plainsong.protocol.topic.state import TopicLimits

GRACE_S = 100
STEPS = RetentionConfig(interval_s=60, delete_grace_s=GRACE_S, step_rows=3)
LONG_LIVED = TopicLimits(max_lifetime_ms=10_000_000)


async def test_defect_1_payloads_of_older_generations_are_removed_and_their_pointers_forgotten(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        pointers = harness.directory.environment.pointers
        for life in range(3):
            await harness.create()
            await store(harness, FIRST + 10 * life, "stored", "only")
            await store(harness, FIRST + 10 * life + 1, "published")
            await publish(harness, FIRST + 10 * life + 1, "inline")
            if life < 2:
                pointers.decided([FIRST + 10 * life, FIRST + 10 * life + 1])
                await harness.ask(Remove())
        await harness.janitor.clean_all()
        assert (harness.rows(), payload_rows(harness), len(pointer_rows(harness))) == (2, 3, 2)
        assert await harness.read(cached=False) == [b"published", b"inline"]
        assert [bool(pointers.topics_of([FIRST + 10 * life])) for life in range(3)] == [False, False, True]


async def test_defect_1_payloads_of_older_generations_are_removed_even_if_there_was_never_a_message(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create()
        await store(harness, FIRST, "stored")
        await harness.ask(Remove())
        await harness.create()
        harness.store.inner.apply(
            [put_one(Table.PAYLOAD, payload_prefix(NAME, 1, FIRST + 9) + b"\x00" * 10, b"\x00\x02x")]
        )
        for key in pointer_rows(harness):
            await harness.store.discard(Table.METADATA, [key])
        await harness.janitor.clean_all()
        assert payload_rows(harness) == 0


async def test_defect_2_cleaning_a_deleted_topic_leaves_nothing_and_creates_nothing(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create()
        await store(harness, FIRST, "stored")
        await store(harness, FIRST + 1, "published")
        await publish(harness, FIRST + 1)
        await harness.ask(Remove())
        harness.clock.ms += GRACE_S * 1000 - 1
        await harness.janitor.clean_all()
        assert payload_rows(harness) == 2
        await harness.ask(Undelete())
        assert await harness.read(cached=False) == [b"published"]
        await harness.ask(Remove())
        harness.clock.ms += GRACE_S * 1000 + 1
        await harness.janitor.clean_all()
        before = {table: dict(harness.store.inner.tables[table].rows) for table in Table}
        assert (harness.rows(), payload_rows(harness), pointer_rows(harness)) == (0, 0, [])
        for _ in range(3):
            assert await harness.janitor.clean_all() == 0
        assert {table: harness.store.inner.tables[table].rows for table in Table} == before


async def test_defect_3_payloads_of_a_recreated_topic_expire_too(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        for life in range(3):
            await harness.create(ttl_s=10)
            if life < 2:
                await harness.ask(Remove())
        await store(harness, FIRST, "a", "b")
        await publish(harness, FIRST)
        harness.clock.ms += 10_001
        await harness.janitor.clean_all()
        assert (harness.rows(), payload_rows(harness)) == (0, 0)


async def test_defect_4_expired_payloads_after_live_ones_in_key_order_are_removed(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST + 9, "higher pointer, published early")
        await publish(harness, FIRST + 9)
        await store(harness, FIRST, "lower pointer, open", "and long")
        harness.clock.ms += 9_000
        await store(harness, FIRST + 1, "lower pointer, published late")
        await publish(harness, FIRST + 1)
        harness.clock.ms += 1_001
        assert await harness.janitor.clean_all() == 2
        assert await harness.read(cached=False) == [b"lower pointer, published late"]
        assert payload_rows(harness) == 3


async def test_defect_5_payloads_of_an_unused_topic_are_removed_after_a_restart(autojump_clock):
    async with actors(limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        await store(harness, FIRST, *"abcdefgh")
        await publish(harness, FIRST)
        await store(harness, FIRST + 1, "orphan")
        disk = harness.store
    async with actors(disk, janitor=STEPS, limits=TopicLimits(max_lifetime_ms=5_000)) as harness:
        harness.clock.ms = START_MS + 10_001
        await harness.janitor.clean_all()
        assert (harness.rows(), payload_rows(harness), pointer_rows(harness)) == (0, 0, [])


async def test_defect_6_a_rollback_after_an_idle_gap_reaches_the_first_message_after_it(autojump_clock):
    async with actors(janitor=STEPS, limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=200_000)
        await harness.publish("before")
        harness.clock.ms += 90_000_000 + 7_500
        said = await publish(harness, FIRST + 90_000_000 * 1_000_000, "first", "second")
        await harness.janitor.clean_all()
        prefix = generation_prefix(NAME, 1)
        await roll_back(harness, FIRST + 90_000_000 * 1_000_000)
        signs = [
            value[1] >= 0x80
            for key, value in harness.store.inner.tables[Table.MESSAGE].walk(prefix, prefix + b"\xff", reverse=False)
            if value[0] & 1
        ]
        assert signs == [True, True]
        assert said.start_timestamp_ms == harness.clock.ms


async def test_defects_7_and_8_readers_see_all_live_stored_messages_while_others_are_removed(nursery, autojump_clock):
    async with actors(janitor=RetentionConfig(step_rows=2), limits=LONG_LIVED) as harness:
        await harness.create(ttl_s=10)
        for number in range(10):
            await store(harness, FIRST + number, *[f"{number} {index}" for index in range(5)])
            await publish(harness, FIRST + number)
            harness.clock.ms += 1_000
        harness.clock.ms += 5_500
        living = [b"%d %d" % (number, index) for number in range(6, 10) for index in range(5)]
        done = trio.Event()

        async def clean():
            await harness.janitor.clean_all()
            done.set()

        nursery.start_soon(clean)
        while not done.is_set():
            assert await harness.read(cached=False) == living
            await trio.lowlevel.checkpoint()
        assert await harness.read(cached=False) == living
        assert (harness.rows(), payload_rows(harness)) == (4, 20)

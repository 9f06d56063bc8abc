"""Chained topics with real actors: rows kept by the janitor, and the state after failed writes and crashes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio
from actors_in_process import NAME, START_MS, actors

from actors.chain import read_part
from actors.settings import RetentionConfig
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import GenerationChanged, OutcomeUnknown
from plainsong.protocol.keys import CHAIN_POINTER, payload_prefix, stop_after
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import (
    Create,
    DescribeChain,
    NoteSetAside,
    PublishStaged,
    PublishUnder,
    Remove,
    RollBackPointer,
    StoreStaged,
    StoreUnder,
)
from plainsong.protocol.topic.chain import StoredRow
from plainsong.protocol.topic.verify import KnownHead, Verifier
from storage.base import read_rows
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore
from tests.storage.faulty import FaultyStore

STEPS = RetentionConfig(interval_s=60, delete_grace_s=100, step_rows=3)
ENTRIES = payload_prefix(NAME, 1, CHAIN_POINTER)
#: A write pointer issued at the time to which the clock is set.
POINTER = START_MS * 1_000_000 + 7


@pytest.fixture(params=["memory", "leveldb"])
async def store(request, tmp_path):
    if request.param == "memory":
        yield FaultyStore(MemoryStore())
        return
    opened = await LevelDBStore.open(
        tmp_path / "db", LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, block_cache_bytes=0))
    )
    yield FaultyStore(opened)
    await opened.aclose()


def give(verifier, row, oldest_ms):
    """Pass a row of a part to a verifier."""
    if isinstance(row, StoredRow):
        verifier.stored(row)
    else:
        verifier.row(row, oldest_ms)


async def verified(harness, known=None, limit=2, sizes=None):
    """Verify the chain in small parts; ``sizes`` collects the number of rows in each."""
    sizes = [] if sizes is None else sizes
    view = await harness.ask(DescribeChain())
    verifier = Verifier(str(NAME), view.generation, known)
    for with_messages in (False, True):
        after = None
        while True:
            part = await read_part(harness.store, harness.directory, NAME, after, limit, messages=with_messages)
            rows = list(part.rows)
            sizes.append(len(rows))
            for position, value in part.entries:
                if not with_messages:
                    verifier.survey(position, value)
                    continue
                while rows and rows[0].position <= position:
                    give(verifier, rows.pop(0), part.view.oldest_ms)
                verifier.entry(position, value, oldest_ms=part.view.oldest_ms, now_ms=part.view.now_ms)
            for row in rows:
                give(verifier, row, part.view.oldest_ms)
            after = part.next
            if after is None:
                break
    return verifier.end(undecided=part.view.undecided)


async def entries(harness):
    return len(await read_rows(harness.store, Table.PAYLOAD, ENTRIES, stop_after(ENTRIES), limit=1000))


async def head(harness):
    view = await harness.ask(DescribeChain())
    return KnownHead(view.generation, view.number, view.position, view.link)


async def test_the_janitor_removes_entries_that_have_expired_and_keeps_the_last_of_them(store, autojump_clock):
    async with actors(store, janitor=STEPS) as harness:
        await harness.create(ttl_s=10, chain="sha256")
        for number in range(8):
            await harness.publish(f"{number}")
        early = await head(harness)
        harness.clock.ms += 5_000
        await harness.publish("later", "and", "later")
        harness.clock.ms += 5_001
        await harness.janitor.clean_all()
        assert await entries(harness) == 2
        found = await verified(harness, early)
        assert (found.faults, found.messages, found.entries, found.known) == ([], 3, 2, "found")
        harness.clock.ms += 20_000
        await harness.janitor.clean_all()
        assert await entries(harness) == 1
        await harness.publish("new")
        found = await verified(harness, early)
        assert (found.faults, found.messages, found.known) == ([], 1, "cleaned")


async def test_removal_of_messages_with_their_own_ttl_is_not_a_fault(store, autojump_clock):
    async with actors(store, janitor=STEPS) as harness:
        await harness.create(ttl_s=1_000, chain="sha256")
        for number in range(5):
            await harness.publish(f"short {number}", f"long {number}", message_ttls_s=[1 + number, None])
        harness.clock.ms += 3_500
        await harness.janitor.clean_all()
        assert len(await harness.read(cached=False)) == 7
        found = await verified(harness)
        assert (found.faults, found.messages, found.expired) == ([], 7, 3)


async def some_stored(harness):
    """Publish one of two segments stored under a write pointer, a plain message, and a large staged batch."""
    for segment in ("a", "lost", "a"):
        request = PublishRequest([b"stored %d" % number for number in range(9)], write_pointer=POINTER, segment=segment)
        await harness.ask(StoreUnder(request, 1))
    await harness.ask(PublishUnder(PublishRequest([b"with them"], write_pointer=POINTER, segments=["a"]), 1))
    await harness.publish("plain")
    staged = PublishRequest([b"staged %d" % number for number in range(20)], producer="job", segment="a")
    await harness.ask(StoreStaged(replace(staged, sequence_ids=range(20)), 1))
    last = PublishRequest([], producer="job", segments=["a"], sequence_ids=[0], ttl_s=60)
    await harness.ask(PublishStaged(last, 1))


async def test_stored_messages_are_read_in_bounded_parts_and_verified(store, autojump_clock, monkeypatch):
    monkeypatch.setattr("actors.chain.MAX_BYTES", 500)
    async with actors(store, janitor=STEPS) as harness:
        await harness.create(chain="sha256")
        await some_stored(harness)
        sizes = []
        found = await verified(harness, sizes=sizes)
        assert (found.faults, found.messages) == ([], 18 + 1 + 1 + 20)
        # All payload rows, including those of the losing segment, and four message rows.
        assert sum(sizes) == 27 + 20 + 2 + 2
        assert max(sizes) <= 9
        before = await head(harness)
    async with actors(store) as harness:
        await harness.publish("after a load")
        found = await verified(harness, before, limit=1000)
        assert (found.faults, found.messages, found.known) == ([], 41, "found")


async def test_removal_of_stored_messages_with_their_publish_is_not_a_fault(store, autojump_clock):
    async with actors(store, janitor=STEPS) as harness:
        await harness.create(ttl_s=1_000, chain="sha256")
        await some_stored(harness)
        harness.clock.ms += 61_000
        await harness.janitor.clean_all()
        found = await verified(harness)
        assert (found.faults, found.messages, found.expired) == ([], 18 + 1 + 1, 1)
        harness.clock.ms += 1_000_000
        await harness.janitor.clean_all()
        assert await entries(harness) == 1
        assert (await verified(harness)).faults == []


@pytest.mark.parametrize("applied", range(4))
async def test_after_a_failed_publish_of_stored_messages_the_chain_matches_the_durable_rows(applied, autojump_clock):
    store = FaultyStore(MemoryStore())
    async with actors(store) as harness:
        await harness.create(chain="sha256")
        await harness.ask(StoreUnder(PublishRequest([b"one", b"two"], write_pointer=POINTER), 1))
        store.fail_next("write", applied=applied)
        with pytest.raises(OutcomeUnknown):
            await harness.ask(PublishUnder(PublishRequest([b"three"], write_pointer=POINTER), 1))
        harness.clock.ms += 1
        await harness.publish("behind")
        found = await verified(harness)
        assert found.faults == []
        assert found.messages == len(await harness.read(cached=False))


async def test_purging_a_generation_removes_its_entries_and_the_next_has_its_own_chain(store, autojump_clock):
    async with actors(store, janitor=STEPS) as harness:
        await harness.create(chain="sha256")
        await harness.publish("old")
        old = await head(harness)
        await harness.ask(Remove())
        harness.clock.ms += 200_000
        await harness.janitor.clean_all()
        assert await entries(harness) == 0
        await harness.ask(Create(TopicProperties(chain="sha256")))
        await harness.publish("new")
        found = await verified(harness, old)
        assert [fault.kind for fault in found.faults] == ["other-chain"]
        assert (await verified(harness)).messages == 1


@pytest.mark.parametrize(("applied", "left", "unlinked"), [(False, 2, 0), (1, 3, 1), (2, 4, 1), (3, 4, 0)], ids=str)
async def test_after_a_failed_write_the_chain_matches_the_durable_rows(applied, left, unlinked, autojump_clock):
    store = FaultyStore(MemoryStore())
    async with actors(store) as harness:
        await harness.create(chain="sha256")
        await harness.publish("one")
        before = await head(harness)
        store.fail_next("write", applied=applied)
        with pytest.raises(OutcomeUnknown):
            await harness.publish("two", "too")
        harness.clock.ms += 1
        await harness.publish("three")
        found = await verified(harness, before)
        assert (found.faults, found.known) == ([], "found")
        assert found.messages == len(await harness.read(cached=False)) == left
        assert found.found == unlinked


async def test_rollbacks_and_rows_set_aside_are_entries(store, autojump_clock):
    async with actors(store) as harness:
        await harness.create(chain="sha256")
        await harness.publish("one")
        await harness.publish("two")
        rows = await read_rows(harness.store, Table.MESSAGE, b"", b"\xff", limit=10)
        position = rows[0][0][-10:]
        await harness.ask(RollBackPointer(7, within=(position, position)))
        await harness.ask(NoteSetAside(1, position, position, 1))
        await harness.store.discard(Table.MESSAGE, [rows[0][0]])
        found = await verified(harness)
        assert (found.faults, found.messages, found.set_aside, found.entries) == ([], 1, 1, 5)


async def test_reading_reports_that_the_topic_was_recreated(autojump_clock):
    class Slow(MemoryStore):
        async def scan(self, table, *args, **more):
            await super().scan(table, *args, **more)
            if table is Table.PAYLOAD:
                reached.set()
                await trio.sleep(1)

    reached = trio.Event()
    async with actors(FaultyStore(Slow())) as harness, trio.open_nursery() as nursery:
        await harness.create(chain="sha256")
        await harness.publish("one")

        async def read():
            with pytest.raises(GenerationChanged):
                await read_part(harness.store, harness.directory, NAME, None, 10, messages=True)

        nursery.start_soon(read)
        await reached.wait()
        await harness.ask(Remove())
        await harness.ask(Create(TopicProperties(chain="sha256")))

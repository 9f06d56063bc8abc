"""Chained topics on HBase: entries take effect with their commits, and the next owner continues the chain."""

from __future__ import annotations

import pytest

from actors.chain import read_part
from actors.loading import load_topic
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import (
    Create,
    DescribeChain,
    Publish,
    PublishStaged,
    PublishUnder,
    RollBackPointer,
    StoreStaged,
    StoreUnder,
)
from plainsong.protocol.topic.chain import ChainEntry, StoredRow
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.topic.verify import Verifier

NAME = TopicName("ns", "chained")
START_MS = 1_700_000_000_000
LIMITS = TopicLimits(max_lifetime_ms=0)


class Owner:
    """An instance that owns the topic, as its actor does."""

    def __init__(self, store, claim, core):
        self.store, self.claim, self.core = store, claim, core

    @classmethod
    async def of(cls, store):
        claim = await store.claim(NAME)
        state = await load_topic(NAME, store, LIMITS, lacks=claim.lacks, epoch=claim.epoch)
        return cls(store, claim, TopicCore(state))

    async def ask(self, name, ask):
        now = Now(START_MS, 0.0)
        step = self.core.step([(0, ask)], now)
        if step.operations:
            await self.store.write(step.operations, claim=self.claim)
        ((_, answer),) = self.core.settled(step, now)
        if isinstance(answer, PlainsongError):
            raise answer
        return answer

    async def publish(self, *messages):
        return await self.ask(NAME, Publish(PublishRequest(list(messages)), 1))

    async def verified(self):
        view = await self.ask(NAME, DescribeChain())
        verifier = Verifier(str(NAME), view.generation)
        part = await read_part(self.store, self, NAME, None, 1000, messages=True)
        for position, value in part.entries:
            verifier.survey(position, value)
        rows = list(part.rows)
        for position, value in part.entries:
            while rows and rows[0].position <= position:
                row = rows.pop(0)
                if isinstance(row, StoredRow):
                    verifier.stored(row)
                else:
                    verifier.row(row, part.view.oldest_ms)
            verifier.entry(position, value, oldest_ms=part.view.oldest_ms, now_ms=part.view.now_ms)
        return verifier.end(undecided=part.view.undecided), part


async def test_the_next_owner_continues_the_chain_and_entries_have_the_epochs_of_their_owners(store, others):
    first = await Owner.of(store)
    await first.ask(NAME, Create(TopicProperties(chain="sha256")))
    await first.publish(b"one", b"two")
    await first.ask(NAME, PublishUnder(PublishRequest([b"undone"], write_pointer=7), 1))
    second = await Owner.of(others[0])
    await second.publish(b"three")
    await second.ask(NAME, RollBackPointer(7))
    third = await Owner.of(others[1])
    await third.publish(b"four")
    found, part = await third.verified()
    assert (found.faults, found.messages, found.found) == ([], 5, 0)
    epochs = [ChainEntry.decode(*each).epoch for each in part.entries]
    assert epochs == sorted(epochs)
    assert set(epochs) == {first.claim.epoch, second.claim.epoch, third.claim.epoch}


async def test_the_next_owner_publishes_messages_stored_at_another_and_its_entry_covers_them(store, others):
    first = await Owner.of(store)
    await first.ask(NAME, Create(TopicProperties(chain="sha256")))
    for segment in ("a", "lost"):
        await first.ask(NAME, StoreUnder(PublishRequest([b"one", b"two"], write_pointer=7, segment=segment), 1))
    await first.ask(NAME, StoreStaged(PublishRequest([b"staged"], producer="job", segment="s"), 1))
    second = await Owner.of(others[0])
    await second.ask(NAME, StoreUnder(PublishRequest([b"three"], write_pointer=7, segment="a"), 1))
    await second.ask(NAME, PublishUnder(PublishRequest([b"four"], write_pointer=7, segments=["a"]), 1))
    third = await Owner.of(others[1])
    last = PublishRequest([], producer="job", segments=["s"], sequence_ids=[0])
    await third.ask(NAME, PublishStaged(last, 1))
    found, _ = await third.verified()
    assert (found.faults, found.messages, found.found) == ([], 5, 0)


async def test_an_entry_of_an_owner_that_was_replaced_does_not_count(store, others):
    first = await Owner.of(store)
    await first.ask(NAME, Create(TopicProperties(chain="sha256")))
    second = await Owner.of(others[0])
    with pytest.raises(PlainsongError):
        await first.publish(b"late")
    await second.publish(b"one")
    found, _ = await (await Owner.of(others[1])).verified()
    assert (found.faults, found.messages, found.entries) == ([], 1, 2)

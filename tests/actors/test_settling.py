"""The rules of a restore, applied in place to the store of a standby that took over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from trio.testing import MockClock

from actors.settling import settle
from plainsong.protocol.effects import Operation, Table, put_one
from plainsong.protocol.keys import PRODUCERS, metadata_key, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from storage.base import StoreUnusable
from storage.memory import MemoryStore
from storage.replication.record import Settle

NOW_MS = 1_700_000_000_000
TOPICS = [TopicName("default", f"orders-{number}") for number in range(200)]


class CountingStore(MemoryStore):
    """Counts the writes under way."""

    writing = most_writing = 0

    async def write(self, commit: Sequence[Operation], **options: Any) -> None:
        self.writing += 1
        self.most_writing = max(self.most_writing, self.writing)
        try:
            await super().write(commit, **options)
        finally:
            self.writing -= 1


async def _with_topics() -> CountingStore:
    store = CountingStore()
    row = Metadata(1, TopicProperties(), 1, 1).encode()
    for name in TOPICS:
        await store.write([put_one(Table.METADATA, metadata_key(name), row)], claim=await store.claim(name))
    store.most_writing = 0
    return store


async def test_topics_are_settled_several_at_once_so_that_their_commits_share_syncs(autojump_clock: MockClock) -> None:
    store = await _with_topics()
    settled = await settle(store, Settle(NOW_MS - 1000, 0), NOW_MS)
    assert settled.topics == len(TOPICS)
    assert store.most_writing > 1


async def test_a_topic_that_cannot_be_settled_is_the_error_of_the_whole(autojump_clock: MockClock) -> None:
    store = await _with_topics()
    damaged = put_one(Table.METADATA, system_key(PRODUCERS, TOPICS[70], 1), b"\xff")
    await store.write([damaged], claim=await store.claim(TOPICS[70]))
    with pytest.raises(StoreUnusable, match="orders-70"):
        await settle(store, Settle(NOW_MS - 1000, 0), NOW_MS)

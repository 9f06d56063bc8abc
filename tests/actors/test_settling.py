"""The rules of a restore, applied in place to the store of a standby that took over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from trio.testing import MockClock

from actors import settling
from actors.settling import settle
from plainsong.protocol.effects import Operation, Table, put_one
from plainsong.protocol.keys import HIGH_WATER, PRODUCERS, metadata_key, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from storage.base import StoreUnusable
from storage.memory import MemoryStore
from storage.replication.record import Settle

NOW_MS = 1_700_000_000_000
TOPICS = [TopicName("default", f"orders-{number}") for number in range(200)]


class CountingStore(MemoryStore):
    """Counts commits."""

    commits = 0

    async def write(self, commit: Sequence[Operation], **options: Any) -> None:
        self.commits += 1
        await super().write(commit, **options)


async def _with_topics() -> CountingStore:
    store = CountingStore()
    row = Metadata(1, TopicProperties(), 1, 1).encode()
    for name in TOPICS:
        await store.write([put_one(Table.METADATA, metadata_key(name), row)], claim=await store.claim(name))
    store.commits = 0
    return store


async def test_topics_share_the_commits_that_settle_them(autojump_clock: MockClock) -> None:
    store = await _with_topics()
    before = {name: await store.get(Table.METADATA, system_key(HIGH_WATER, name, 1)) for name in TOPICS}
    settled = await settle(store, Settle(NOW_MS - 1000, 0), NOW_MS)
    assert settled.topics == len(TOPICS)
    for name, row in before.items():
        mark = await store.get(Table.METADATA, system_key(HIGH_WATER, name, 1))
        assert mark is not None
        assert mark != row
    assert store.commits < len(TOPICS) / 10


async def test_every_topic_is_settled_if_each_commit_has_one_operation(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_COMMIT_OPERATIONS", 1)
    store = await _with_topics()
    await settle(store, Settle(NOW_MS - 1000, 0), NOW_MS)
    for name in TOPICS:
        assert await store.get(Table.METADATA, system_key(HIGH_WATER, name, 1)) is not None
    assert store.commits > len(TOPICS)


async def test_a_topic_that_cannot_be_settled_is_the_error_of_the_whole(autojump_clock: MockClock) -> None:
    store = await _with_topics()
    damaged = put_one(Table.METADATA, system_key(PRODUCERS, TOPICS[70], 1), b"\xff")
    await store.write([damaged], claim=await store.claim(TOPICS[70]))
    with pytest.raises(StoreUnusable, match="orders-70"):
        await settle(store, Settle(NOW_MS - 1000, 0), NOW_MS)

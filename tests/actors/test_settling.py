"""The rules of a restore, applied in place to the store of a standby that took over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from actors import settling
from actors.loading import load_topic
from actors.restoring import EPOCHS
from actors.settling import settle
from plainsong.protocol.effects import Ask, Operation, Table, put_one
from plainsong.protocol.errors import ProducerFenced
from plainsong.protocol.ids import SEQUENCES_PER_MS, id_at, pack_position
from plainsong.protocol.keys import HIGH_WATER, PRODUCERS, metadata_key, system_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Create, OpenProducer, Publish, StoreStaged
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.state import Now, TopicLimits, TopicState
from plainsong.protocol.transactions.ledger_rows import HEAD, Head, service_key
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS
from storage.base import StoreUnusable
from storage.memory import MemoryStore
from storage.replication.record import Settle

NOW_MS = 1_700_000_000_000
TOPICS = [TopicName("default", f"orders-{number}") for number in range(200)]


class CountingStore(MemoryStore):
    """Counts commits, and messages that are read."""

    commits = 0
    read = 0

    async def write(self, commit: Sequence[Operation], **options: Any) -> None:
        self.commits += 1
        await super().write(commit, **options)

    async def scan(self, table: Table, start: bytes, stop: bytes, feed: Any, **options: Any) -> None:
        def count(rows: Sequence[Any]) -> bool:
            self.read += len(rows) if table is Table.MESSAGE else 0
            return bool(feed(rows))

        await super().scan(table, start, stop, count, **options)


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


# --- messages after the mark ---------------------------------------------------------------------------


class Topic:
    """A topic of a store, which its rules write."""

    name = TOPICS[0]

    def __init__(self, store: CountingStore, core: TopicCore | None = None, **properties: Any) -> None:
        self._store = store
        self._core = core or TopicCore(TopicState(self.name))
        if core is None:
            self.ask(Create(TopicProperties(**properties)), 1)

    @classmethod
    async def loaded(cls, store: CountingStore) -> Topic:
        """Load it as an actor does."""
        return cls(store, TopicCore(await load_topic(cls.name, store, TopicLimits())))

    @property
    def state(self) -> TopicState:
        return self._core.state

    def ask(self, ask: Ask[Any], now_ms: int) -> Any:
        """Return the answer at a time. Raises its error."""
        now = Now(now_ms, 0.0)
        step = self._core.step([("ticket", ask)], now)
        self._store.apply(step.operations)
        ((_, answer),) = self._core.settled(step, now)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def publish(self, now_ms: int, **options: Any) -> Any:
        return self.ask(Publish(PublishRequest([b"one", b"two"], **options), 6), now_ms)


def _with_everything(store: CountingStore, **properties: Any) -> Topic:
    """Make a topic with plain messages, staged ones, and producers with and without a session, after its mark."""
    topic = Topic(store, **properties)
    topic.publish(NOW_MS - 9000)
    session = topic.ask(OpenProducer("open"), NOW_MS - 8000).epoch
    topic.publish(NOW_MS - 7000, producer="open", producer_epoch=session, sequence_ids=[0, 1])
    topic.publish(NOW_MS - 6000, producer="plain", sequence_ids=[4, 5])
    staged = PublishRequest([b"staged"], producer="open", producer_epoch=session, segment="s", sequence_ids=[0])
    topic.ask(StoreStaged(staged, 6), NOW_MS - 5000)
    return topic


def _seen(topic: Topic) -> dict[str, Any]:
    """Return the state that requests see, except epochs."""
    state = topic.state
    producers = {
        each.name: (each.pushed, each.recent, each.active_ms, each.retention_ms)
        for each in state.producers.known.values()
    }
    usage = (state.usage.messages, state.usage.bytes, state.usage.stored())
    about = (state.metadata, state.pending, state.staged, state.stored_bytes, state.readers)
    return {
        "producers": producers,
        "usage": usage,
        "about": about,
        "ends": (state.watermark, state.appended, state.time_ms, repr(state.sequence)),
    }


@pytest.mark.parametrize("last_ms", [NOW_MS - 4000, NOW_MS + 9000], ids=["behind the clock", "ahead of it"])
async def test_a_topic_is_settled_by_its_last_message_as_if_all_after_its_mark_were_read(
    last_ms: int, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for reads_all in (False, True):
        store = CountingStore()
        topic = _with_everything(store)
        for _ in range(500):
            topic.publish(last_ms)
        store.read = 0
        with monkeypatch.context() as patched:
            if reads_all:

                async def unknown(*_: object) -> None:
                    pass

                patched.setattr(settling, "_without_replay", unknown)
            await settle(store, Settle(NOW_MS - 3000, 20), NOW_MS)
        assert (store.read > 1000) == reads_all
        assert reads_all or store.read <= 1
        found.append(await Topic.loaded(store))
    assert _seen(found[0]) == _seen(found[1])
    floor_ms = max(NOW_MS + 20, last_ms + 3020)
    for topic in found:
        assert topic.state.watermark == pack_position(floor_ms, SEQUENCES_PER_MS - 1)
        assert topic.state.usage.messages == 1006
        with pytest.raises(ProducerFenced):
            topic.publish(NOW_MS, producer="open", producer_epoch=1, sequence_ids=[2, 3])
        assert topic.publish(NOW_MS).first_id == id_at(pack_position(floor_ms + 1, 0))
        assert topic.ask(OpenProducer("open"), NOW_MS).epoch > EPOCHS
        assert topic.ask(OpenProducer("plain"), NOW_MS).epoch > EPOCHS
        assert topic.ask(OpenProducer("new"), NOW_MS).epoch > EPOCHS


async def test_ids_after_a_take_over_are_above_those_that_staged_messages_reserve(autojump_clock: MockClock) -> None:
    store = CountingStore()
    topic = Topic(store)
    staged = PublishRequest([b"staged"], producer="p", segment="s", sequence_ids=[0])
    topic.ask(StoreStaged(staged, 6), NOW_MS + 9000)
    await settle(store, Settle(NOW_MS, 0), NOW_MS)
    state = (await Topic.loaded(store)).state
    assert (state.sequence.last_ts_ms, state.sequence.last_sequence_id) == (NOW_MS + 9000, SEQUENCES_PER_MS - 1)


async def test_ids_begin_no_earlier_than_at_the_take_over_if_the_clock_is_set_back_before_the_rules_are_applied(
    autojump_clock: MockClock,
) -> None:
    store = CountingStore()
    topic = Topic(store)
    topic.publish(NOW_MS)
    await settle(store, Settle(NOW_MS, 20, NOW_MS + 30), NOW_MS - 60_000)
    assert (await Topic.loaded(store)).state.time_ms == NOW_MS + 30


class Interrupted(Exception):
    """The process was killed."""


class KilledStore(CountingStore):
    """Fails in the middle: before a number of further commits."""

    left = 1 << 30

    async def write(self, commit: Sequence[Operation], **options: Any) -> None:
        if not self.left:
            raise Interrupted
        self.left -= 1
        await super().write(commit, **options)


async def _three_topics(monkeypatch: pytest.MonkeyPatch) -> KilledStore:
    """Make topics and transactions whose times are ahead of the clock."""
    store = KilledStore()
    for name in TOPICS[:3]:
        monkeypatch.setattr(Topic, "name", name)
        Topic(store).publish(NOW_MS + 60_000)
    pointer = (NOW_MS + 60_000) * POINTERS_PER_MS
    head = put_one(Table.METADATA, service_key(HEAD), Head(pointer, pointer, pointer).encode())
    await store.write([head], claim=await store.claim(TOPICS[0]))
    store.commits = 0
    return store


async def test_rules_that_are_applied_again_after_a_kill_advance_no_time_again(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_COMMIT_OPERATIONS", 1)
    what, hour_ms = Settle(NOW_MS - 5000, 20, NOW_MS), 3_600_000
    whole = await _three_topics(monkeypatch)
    await settle(whole, what, NOW_MS)
    assert whole.commits == 4
    for left in range(1, 5):
        store = await _three_topics(monkeypatch)
        store.left = left
        if left < 4:
            with pytest.raises(Interrupted):
                await settle(store, what, NOW_MS)
        else:
            await settle(store, what, NOW_MS)  # the record of the directory was not replaced
        store.left = 1 << 30
        await settle(store, what, NOW_MS + hour_ms)
        assert store.tables[Table.METADATA].rows == whole.tables[Table.METADATA].rows
    await settle(store, replace(what, from_ms=NOW_MS + 1), NOW_MS + hour_ms)  # of another take-over
    assert store.tables[Table.METADATA].rows != whole.tables[Table.METADATA].rows


async def test_each_commit_of_the_rules_waits_until_there_is_room_for_it(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settling, "_COMMIT_OPERATIONS", 1)
    store = await _three_topics(monkeypatch)
    store.left = 0

    async def until_room() -> None:
        await trio.lowlevel.checkpoint()
        store.left = 1

    await settle(store, Settle(NOW_MS - 5000, 20, NOW_MS), NOW_MS, until_room)
    assert store.commits == 4


async def test_a_mark_after_a_take_over_is_an_ordinary_one_again(autojump_clock: MockClock) -> None:
    store = CountingStore()
    _with_everything(store)
    await settle(store, Settle(NOW_MS - 3000, 0), NOW_MS)
    key = system_key(HIGH_WATER, Topic.name, 1)
    value = await store.get(Table.METADATA, key)
    assert value is not None
    assert HighWater.decode(value).closed_ms == NOW_MS
    topic = await Topic.loaded(store)
    topic.publish(NOW_MS + 5)
    mark = HighWater.decode(topic.state.mark().values[0])
    assert (mark.closed_ms, mark.last_ts_ms, mark.appended) == (0, NOW_MS + 5, 8)


@pytest.mark.parametrize("value", [None, b"\xff"], ids=["missing", "garbled"])
async def test_a_topic_without_a_readable_mark_is_read_from_its_first_message(
    value: bytes | None, autojump_clock: MockClock
) -> None:
    store = CountingStore()
    _with_everything(store)
    key = system_key(HIGH_WATER, Topic.name, 1)
    rows = store.tables[Table.METADATA].rows
    if value is None:
        store.tables[Table.METADATA].remove([key])
    else:
        rows[key] = value
    await settle(store, Settle(NOW_MS - 3000, 0), NOW_MS)
    mark = HighWater.decode(rows[key])
    assert (mark.closed_ms, mark.last_ts_ms, mark.appended) == (0, NOW_MS, 6)


async def test_a_chained_topic_is_read_for_the_entry_about_its_last_message(autojump_clock: MockClock) -> None:
    store = CountingStore()
    last = _with_everything(store, chain="sha256").state.watermark
    await settle(store, Settle(NOW_MS - 3000, 0), NOW_MS)
    assert (await Topic.loaded(store)).state.living().restored == last

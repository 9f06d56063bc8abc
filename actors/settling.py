"""Applies the rules of a restore to a store in place: for a standby that took over from an asynchronous primary.

The last commits of that primary may be missing. So, as after a restored backup: open transactions are invalid and rolled
back, producers open their sessions again, and no id is assigned twice. Each step may be repeated after a crash.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import trio

from actors.loading import load_topic
from actors.restoring import EPOCHS, RestoredStore, RestoreRequest, restored_rows
from plainsong.protocol.effects import Delete, RollBack, Table, put_one
from plainsong.protocol.ids import POSITION_BYTES, pack_position, published_ms
from plainsong.protocol.keys import (
    HIGH_WATER,
    NAMESPACE,
    POINTER,
    PRODUCER,
    PRODUCERS,
    SERVICE,
    SYSTEM,
    DamagedRow,
    generation_prefix,
    metadata_key,
    parse_pointer_key,
    stop_after,
    system_key,
    topic_of,
    topic_prefix,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.rows import position_of_staged
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.topic.state import TopicLimits
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from storage.base import AFTER_ALL, SERVICE_NAME, StoreUnusable, read_rows
from storage.replication.record import FOLLOWED_KEY, SETTLED_KEY, Followed, Settle
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from plainsong.protocol.effects import Operation
    from plainsong.protocol.transactions.transaction import Authority
    from storage.base import Row, Store
    from storage.replication.record import Record

#: After a take-over that may lack commits, ids begin later by this much. The standby learns the time of the primary's
#: clock from leases and segments, which it reads some time after they were written, so the primary's clock may be further
#: ahead than it seems: by a second or two, unless all reads were late.
LATE_S = 10.0
#: From this number of operations on, a commit is written: topics share commits, since a sync for each would take longer.
_COMMIT_OPERATIONS = 1000
_UNBOUNDED = TopicLimits(max_pending=1 << 62, max_producers=1 << 62)


@dataclass(frozen=True, slots=True)
class SettledStore:
    """The result, for the log."""

    topics: int
    rolled_back: int
    """Transactions in topics."""


async def settle(
    store: Store, what: Settle, now_ms: int, until_room: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint
) -> SettledStore:
    """Apply the rules, before the store is served.

    Args:
      now_ms: the current time by this machine's clock.
      until_room: called before each write; returns once the commits that wait for the object store leave room for it.
    Raises:
      StoreError, StoreUnusable: it may be repeated, and then continues.
    """
    done = _Done.of(await store.get(Table.METADATA, SETTLED_KEY), what) or _Done(what, what.first_ms(now_ms))
    rows = await read_rows(store, Table.METADATA, b"", AFTER_ALL, limit=sys.maxsize)
    present = _Present.of(rows, what.cut_ms)
    names = sorted(present.topics)
    if done.is_whole:
        return SettledStore(len(names), 0)
    restored = _Restored(present, done.from_ms)
    await restored.decide()
    claim = await store.claim(SERVICE_NAME)
    rolled_back = 0
    for name in names:
        await until_room()
        rolled_back += await _roll_back(store, restored, name)
    changes: list[Operation] = []
    for name in names:
        if done.topic is not None and name <= done.topic:
            continue  # again, its time would advance again
        changes += await _advanced(store, restored, name, done.from_ms, what.cut_ms)
        if len(changes) >= _COMMIT_OPERATIONS:
            await until_room()
            await store.write([*changes, replace(done, topic=name).put()], claim=claim)
            changes = []
    # The service's rows come last: until they are written, a repetition finds the same open transactions.
    changes += _difference(dict(present.service), dict(restored.service))
    await until_room()
    await store.write([*changes, replace(done, topic=None, is_whole=True).put()], claim=claim)
    return SettledStore(len(names), rolled_back)


async def settle_alone(store: Store, record: Record, now_ms: Callable[[], int], lease_s: float) -> None:
    """Apply the rules of a restore to a store that continues without its log: commits after its last one may be missing.

    Args:
      store: a standby's, or one that took over and has not applied them yet.
      record: of its directory.
      lease_s: for how long the primary may have acknowledged after its last renewal.
    Raises:
      StoreUnusable: a standby that has not reached a consistent state.
      StoreError.
    """
    what = record.settle
    if record.standby:
        value = await store.get(Table.METADATA, FOLLOWED_KEY)
        found = Followed.of(record, value)
        commit = found.place.commit or 0
        if commit < record.until:
            raise StoreUnusable(
                f"the standby has commit {commit}, and its store is consistent only from commit {record.until} on",
                hint="start it as a standby until it has caught up, or restore the copy",
            )
        late_ms = round(1000 * max(LATE_S, lease_s))
        what = Settle(found.time_ms, max(found.ahead_ms, record.ahead_ms) + late_ms, found.time_ms + late_ms)
    if what is not None:
        await settle(store, what, now_ms())


@dataclass(frozen=True, slots=True)
class _Done:
    """The value of ``SETTLED_KEY``, written with each commit: a repetition after a crash continues from there."""

    what: Settle
    from_ms: int
    """The time from which ids begin, by the first attempt."""
    topic: TopicName | None = None
    """The last topic, in the order of names; None if there is none."""
    is_whole: bool = False

    def put(self) -> Operation:
        """Return the operation that writes it."""
        shown = {"of": astuple(self.what), "fromMs": self.from_ms, "topic": self.topic, "isWhole": self.is_whole}
        return put_one(Table.METADATA, SETTLED_KEY, json.dumps(shown).encode())

    @classmethod
    def of(cls, value: bytes | None, what: Settle) -> _Done | None:
        """Return the progress of applying the rules for one take-over; None if they have not been applied for it."""
        found = None if value is None else json.loads(value)
        if found is None or tuple(found["of"]) != astuple(what):
            return None
        topic = found["topic"]
        return cls(what, found["fromMs"], None if topic is None else TopicName(*topic), found["isWhole"])


class _Present:
    """The metadata of a store, presented as the folder of a backup that has nothing else."""

    def __init__(self, cut_ms: int) -> None:
        self.service: list[Row] = []
        self.namespaces: list[Row] = []
        self.topics: dict[TopicName, list[Row]] = {}
        self._cut_ms = cut_ms

    @classmethod
    def of(cls, rows: Sequence[Row], cut_ms: int) -> _Present:
        """Group rows: those of the service, of namespaces, and of each topic."""
        found = cls(cut_ms)
        start, stop = SERVICE_RANGE
        for key, value in rows:
            prefix = topic_prefix(key[2:] if key[:1] == SYSTEM else key)
            if start <= key < stop or key[:2] == SYSTEM + SERVICE:
                found.service.append((key, value))
            elif key[:2] == SYSTEM + NAMESPACE:
                found.namespaces.append((key, value))
            elif prefix and (key[:1] == SYSTEM or key == prefix):
                found.topics.setdefault(topic_of(prefix)[0], []).append((key, value))
        # Without its own row a topic does not exist; its other rows are removed by cleaning.
        found.topics = {
            name: of for name, of in found.topics.items() if any(key == metadata_key(name) for key, _ in of)
        }
        return found

    def manifest(self) -> dict[str, Any]:
        """Return the manifest of that backup."""
        topics = [self._topic(name, rows) for name, rows in self.topics.items()]
        return {
            "id": "take-over",
            "cutMs": self._cut_ms,
            "exact": True,
            "topics": topics,
            "service": [{"sha256": "service"}],
            "metadata": [{"sha256": "namespaces"}],
        }

    @staticmethod
    def _topic(name: TopicName, rows: Sequence[Row]) -> dict[str, Any]:
        value = next(value for key, value in rows if key == metadata_key(name))
        try:
            generation = Metadata.decode(value).generation
        except DamagedRow as error:
            raise StoreUnusable(f"{name}: {error.detail}", hint="restore the copy without this topic") from error
        objects = [{"table": "metadata", "sha256": str(name)}]
        return {"namespace": name.namespace, "topic": name.topic, "generation": generation, "objects": objects}

    def rows(self, sha256: str) -> Iterator[Row]:
        """See ``BackupFolder.rows``."""
        if sha256 == "service":
            return iter(self.service)
        if sha256 == "namespaces":
            return iter(self.namespaces)
        namespace, _, topic = sha256.partition(":")
        return iter(self.topics[TopicName(namespace, topic)])

    def manifests(self) -> tuple[dict[str, Any], None]:
        """See ``BackupFolder.manifests``."""
        return {}, None


class _Restored(RestoredStore):
    """The rows of the service and of each topic as a restore would leave them."""

    def __init__(self, present: _Present, now_ms: int) -> None:
        super().__init__(present, present.manifest(), RestoreRequest(), now_ms)  # type: ignore[arg-type]  # the part that is used
        self.present = present

    async def decide(self) -> None:
        """Find the transactions that are undone. Raises StoreUnusable."""
        await in_thread(self._open, limiter=self._lock)

    @property
    def service(self) -> list[Row]:
        """The rows of the service after a restore."""
        return self._service

    @property
    def authority(self) -> Authority | None:
        """The authority that decides pointers; None if it is a foreign service."""
        return self._authority

    def is_undone(self, pointer: int) -> bool:
        """True if a pointer's transaction is undone."""
        return self._is_undone(pointer)

    def kept(self, name: TopicName) -> list[Row]:
        """Return a topic's metadata without void rows."""
        return self._kept_about(self._topics[metadata_key(name)])


async def _roll_back(store: Store, restored: _Restored, name: TopicName) -> int:
    """Roll back the undone transactions of a topic. Returns how many there are."""
    count = 0
    for key, value in restored.present.topics[name]:
        if key[:2] != SYSTEM + POINTER:
            continue
        try:
            _, generation, pointer = parse_pointer_key(key)
        except DamagedRow:
            continue  # a load skips such a row, too
        if not restored.is_undone(pointer):
            continue
        count += 1
        prefix = generation_prefix(name, generation)
        start, stop = _range_of(prefix, pointer, value)
        if start < stop:
            claim = await store.claim(name)
            await store.write([RollBack(start, stop, pointer)], claim=claim)
        payloads = prefix + pointer.to_bytes(8, "big", signed=True)
        if await read_rows(store, Table.PAYLOAD, payloads, stop_after(payloads), limit=1, values=False):
            await store.drop(Table.PAYLOAD, [(payloads, stop_after(payloads))])
    return count


def _range_of(prefix: bytes, pointer: int, value: bytes) -> tuple[bytes, bytes]:
    """Return the keys among which a transaction's messages are."""
    try:
        pending = Pending.decode(pointer, value)
    except DamagedRow:
        return prefix, stop_after(prefix)
    if not pending.runs:
        return prefix, prefix  # nothing is published under the pointer
    return prefix + pending.runs[0].first, prefix + pending.runs[-1].last + b"\x00"


async def _advanced(
    store: Store, restored: _Restored, name: TopicName, now_ms: int, cut_ms: int
) -> Sequence[Operation]:
    """Return the operations that advance a topic's time, and fence its producers' sessions."""
    present = dict(restored.present.topics[name])
    metadata = Metadata.decode(present[metadata_key(name)])
    if metadata.partly_cleaned:
        return ()
    kept = restored.kept(name)
    # A chain gets an entry about the last message before the take-over.
    is_chained = metadata.properties.chain != "none" or metadata.chain_end is not None
    rows = None
    try:
        if not is_chained:
            rows = await _without_replay(store, name, metadata.generation, dict(kept), now_ms, cut_ms)
        if rows is None:
            rows = await _after_replay(store, name, kept, restored.authority, now_ms, cut_ms)
    except DamagedRow as error:
        raise StoreUnusable(f"{name}: {error.detail}", hint="restore the copy without this topic") from error
    return _difference(present, rows)


async def _without_replay(
    store: Store, name: TopicName, generation: int, rows: dict[bytes, bytes], now_ms: int, cut_ms: int
) -> dict[bytes, bytes] | None:
    """Return a topic's metadata without a replay of the messages after its mark; None if there is no mark.

    There may be ``topic.checkpoint_rows`` of them in each topic, and its first load replays them, as after a crash. So
    the mark keeps its position, and says separately that later ids begin after ``closed_ms``. Producers that are known
    only from these messages have had no session; their first one gets an epoch above the record's.

    Raises DamagedRow: the topic could not be loaded either.
    """
    mark_key = system_key(HIGH_WATER, name, generation)
    try:
        mark = HighWater.decode(rows[mark_key])
    except (KeyError, DamagedRow):
        return None
    last_ms = await _last_ms(store, generation_prefix(name, generation), mark)
    pointers = system_key(POINTER, name, generation)
    staged_ms = [_staged_ms(key) for key in rows if key.startswith(pointers)]
    floor_ms = _floor_ms(max(mark.time_ms, last_ms, *staged_ms, 0), now_ms, cut_ms)
    rows[mark_key] = replace(mark, time_ms=floor_ms, closed_ms=floor_ms).encode()
    record_key, producers = system_key(PRODUCERS, name, generation), system_key(PRODUCER, name, generation)
    record = DeduplicationRecord.decode(rows[record_key]) if record_key in rows else DeduplicationRecord(on=False)
    rows[record_key] = replace(record, epochs=record.epochs + EPOCHS).encode()
    for key in [key for key in rows if key.startswith(producers)]:
        if not record.on:
            del rows[key]  # void
            continue
        with suppress(DamagedRow):  # its load refuses this producer's requests
            producer = Producer.decode("", rows[key])
            rows[key] = replace(producer, epoch=producer.epoch + EPOCHS).encode()
    return rows


async def _last_ms(store: Store, prefix: bytes, mark: HighWater) -> int:
    """Return the publish time of a topic's last message, or of the last position in its mark."""
    last_ms, last_sequence_id = mark.floor
    start = prefix if last_sequence_id < 0 else prefix + pack_position(last_ms, last_sequence_id) + b"\x00"
    length = len(prefix) + POSITION_BYTES
    last: list[bytes] = []

    def take(rows: Sequence[Row]) -> bool:
        last.extend(key for key, _ in rows if len(key) == length)  # others are no messages
        return not last

    await store.scan(Table.MESSAGE, start, stop_after(prefix), take, reverse=True, first_chunk=1, values=False)
    return published_ms(last[0][len(prefix) :]) if last else last_ms


def _staged_ms(key: bytes) -> int:
    """Return the time of the position that a pointer's row reserves; 0 if it is not that of staged messages."""
    try:
        pointer = parse_pointer_key(key)[2]
    except DamagedRow:
        return 0  # as at every load
    return position_of_staged(pointer)[0] if pointer < 0 else 0


def _floor_ms(last_ms: int, now_ms: int, cut_ms: int) -> int:
    """Return the time after which a topic with this last time assigns ids."""
    # A topic whose ids were ahead of the clock assigned some in the time that is missing.
    return max(now_ms, last_ms + max(0, now_ms - cut_ms))


async def _after_replay(
    store: Store, name: TopicName, kept: list[Row], authority: Authority | None, now_ms: int, cut_ms: int
) -> dict[bytes, bytes]:
    """Return a topic's metadata after a replay of the messages after its mark. Raises DamagedRow."""
    state = await load_topic(name, _WithMetadata(store, kept), _UNBOUNDED, authority)  # type: ignore[arg-type]  # what loading uses
    assert state.metadata is not None  # it has its own row
    floor_ms = _floor_ms(state.time_ms, now_ms, cut_ms)
    return dict(restored_rows(state, kept, state.metadata.generation, floor_ms))


class _WithMetadata:
    """A store with other rows about one topic. Only what ``load_topic`` uses."""

    def __init__(self, store: Store, about: Sequence[Row]) -> None:
        self._store = store
        self._about = about
        self.traits = store.traits

    async def get(self, table: Table, key: bytes) -> bytes | None:
        """See ``Reads.get``."""
        if table is Table.METADATA:
            await trio.lowlevel.checkpoint()
            return next((value for each, value in self._about if each == key), None)
        return await self._store.get(table, key)

    async def scan(
        self, table: Table, start: bytes, stop: bytes, feed: Callable[[Sequence[Row]], bool], **options: Any
    ) -> None:
        """See ``Reads.scan``."""
        if table is Table.METADATA:
            await trio.lowlevel.checkpoint()
            feed([row for row in self._about if start <= row[0] < stop])
        else:
            await self._store.scan(table, start, stop, feed, **options)


def _difference(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> list[Operation]:
    """Return the operations that turn some rows of the metadata into others."""
    removed = [key for key in before if key not in after]
    found: list[Operation] = [
        put_one(Table.METADATA, key, value) for key, value in after.items() if before.get(key) != value
    ]
    return [*found, Delete(Table.METADATA, removed)] if removed else found

"""Applies the rules of a restore to a store in place: for a standby that took over from an asynchronous primary.

The last commits of that primary may be missing. So, as after a restored backup: open transactions are invalid and rolled
back, producers open their sessions again, and no id is assigned twice. Each step may be repeated after a crash.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from actors.loading import load_topic
from actors.restoring import RestoredStore, RestoreRequest, restored_rows
from plainsong.protocol.effects import Delete, RollBack, Table, put_one
from plainsong.protocol.keys import (
    NAMESPACE,
    POINTER,
    SERVICE,
    SYSTEM,
    DamagedRow,
    generation_prefix,
    metadata_key,
    parse_pointer_key,
    stop_after,
    topic_of,
    topic_prefix,
)
from plainsong.protocol.names import TopicName
from plainsong.protocol.records import Metadata
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.state import TopicLimits
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from storage.base import AFTER_ALL, StoreUnusable, read_rows
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plainsong.protocol.effects import Operation
    from storage.base import Row, Store
    from storage.replication.record import Settle

_SERVICE_NAME = TopicName("", "transactions")
#: From this number of operations on, a commit is written: topics share commits, since a sync for each would take longer.
_COMMIT_OPERATIONS = 1000
_UNBOUNDED = TopicLimits(max_pending=1 << 62, max_producers=1 << 62)


@dataclass(frozen=True, slots=True)
class SettledStore:
    """The result, for the log."""

    topics: int
    rolled_back: int
    """Transactions in topics."""


async def settle(store: Store, what: Settle, now_ms: int) -> SettledStore:
    """Apply the rules, before the store is served.

    Args:
      now_ms: the current time by this machine's clock.
    Raises:
      StoreError, StoreUnusable: it may be repeated.
    """
    # Ids that the primary assigned last may be ahead of this clock, by as much as its clock may have been.
    now_ms += max(0, what.ahead_ms)
    rows = await read_rows(store, Table.METADATA, b"", AFTER_ALL, limit=sys.maxsize)
    present = _Present.of(rows, what.cut_ms)
    restored = _Restored(present, now_ms)
    await restored.decide()
    claim = await store.claim(_SERVICE_NAME)
    rolled_back = 0
    for name in present.topics:
        rolled_back += await _roll_back(store, restored, name)
    changes: list[Operation] = []
    for name in present.topics:
        changes += await _advanced(store, restored, name, now_ms, what.cut_ms)
        if len(changes) >= _COMMIT_OPERATIONS:
            await store.write(changes, claim=claim)
            changes = []
    # The service's rows come last: until they are written, a repetition finds the same open transactions.
    await store.write([*changes, *_difference(dict(present.service), dict(restored.service))], claim=claim)
    return SettledStore(len(present.topics), rolled_back)


class _Present:
    """The metadata of a store, as the folder of a backup that has nothing else."""

    def __init__(self, cut_ms: int) -> None:
        self.service: list[Row] = []
        self.namespaces: list[Row] = []
        self.topics: dict[TopicName, list[Row]] = {}
        self._cut_ms = cut_ms

    @classmethod
    def of(cls, rows: Sequence[Row], cut_ms: int) -> _Present:
        """Sort rows by what they are about."""
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
    def authority(self) -> Any:
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
            continue  # as at every load
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
        return prefix, prefix  # nothing is published under it
    return prefix + pending.runs[0].first, prefix + pending.runs[-1].last + b"\x00"


async def _advanced(
    store: Store, restored: _Restored, name: TopicName, now_ms: int, cut_ms: int
) -> Sequence[Operation]:
    """Return the operations that advance a topic's time, and fence its producers' sessions."""
    found = restored.kept(name)
    raw = _WithMetadata(store, found)
    try:
        state = await load_topic(name, raw, _UNBOUNDED, restored.authority)  # type: ignore[arg-type]  # what loading uses
    except DamagedRow as error:
        raise StoreUnusable(f"{name}: {error.detail}", hint="restore the copy without this topic") from error
    if state.metadata is None or state.metadata.partly_cleaned:
        return ()
    # A topic whose ids were ahead of the clock assigned some in the time that is missing.
    floor_ms = max(now_ms, state.time_ms + max(0, now_ms - cut_ms))
    rows = restored_rows(state, found, state.metadata.generation, floor_ms)
    return _difference(dict(restored.present.topics[name]), dict(rows))


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

"""The metadata: a separate database, updated from the journal of commits.

A commit is one synced batch in the newest volume. Its changes of metadata are one row of that batch, an **entry** of
the journal; entries are numbered without gaps over all volumes. An entry is applied in memory, where readers see it at
once, and written to the database later, many entries in one synced batch together with the number of the last one. A
start replays the entries after that number. So the metadata costs a commit neither a sync nor a wait for a merge, and
after any crash the database has the state after some entry, never part of one.

Keys of the database begin with a table's byte, as in a volume:

    00            the number of the last entry applied
    01 key        a row of the metadata table
    04 02|03 key  a dead range of the message or payload table: its start; the value is its stop
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import contextmanager
from heapq import merge
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.keys import SYSTEM, DamagedRow
from plainsong.protocol.records import pack_record, unpack_record
from storage.base import StoreDamaged
from storage.directory import DAMAGED_HINT
from storage.leveldb import threads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from storage.base import Row
    from storage.leveldb.engine.database import Database, Snapshot

APPLIED = b"\x00"
ROW = b"\x01"
DEAD = b"\x04"
AFTER_DEAD = b"\x05"
#: Prefix of the rows of the metadata table that do not belong to topics.
_SYSTEM_ROW = ROW + SYSTEM
#: Limits on the changes in memory; beyond them, a checkpoint is due. A start replays the journal from the last one.
MAX_WAITING_BYTES = 1 << 20
MAX_WAITING_ENTRIES = 20_000

#: The changes of a commit, by whole key; None removes the row.
Changes = dict[bytes, bytes | None]


#: Rows by table, prefix and suffixes.
Keys = Sequence[tuple[int, bytes, Sequence[bytes]]]


def encode_entry(changes: Changes, keys: Keys | None = None) -> bytes:
    """Encode the value of a journal row.

    Args:
      keys: the rows of messages and payloads that the batch changes; None if they are not recorded.
    Raises:
      TypeError: a value is not bytes.
    """
    for value in changes.values():
        if value is not None and not isinstance(value, bytes):
            raise TypeError(f"a row of the metadata is {type(value).__name__}")
    flat = [item for pair in changes.items() for item in pair]
    return pack_record({"c": flat} if keys is None else {"c": flat, "k": keys})


def decode_entry(value: bytes) -> Changes:
    """Decode the changes of an entry. Raises StoreDamaged."""
    try:
        flat = unpack_record(value, "journal")["c"]
        return dict(zip(flat[::2], flat[1::2], strict=True))
    except (DamagedRow, KeyError, TypeError, ValueError) as error:
        raise StoreDamaged(f"an entry of the journal cannot be read: {error}", hint=DAMAGED_HINT) from None


def decode_keys(value: bytes) -> Keys | None:
    """Decode the keys of an entry; None if they were not recorded. Raises DamagedRow."""
    found: Keys | None = unpack_record(value, "journal").get("k")
    return found


class Waiting:
    """Changes in memory, in key order."""

    def __init__(self) -> None:
        self.changes: Changes = {}
        self.entries = 0
        self.bytes = 0
        self.last = 0
        """The number of the last entry added."""
        self._keys: list[bytes] = []

    def add(self, position: int, changes: Changes) -> None:
        """Add the changes of an entry; they override earlier ones."""
        for key, value in changes.items():
            if key not in self.changes:
                insort(self._keys, key)
                self.bytes += len(key) + 64
            self.bytes += len(value or b"") - len(self.changes.get(key) or b"")
            self.changes[key] = value
        self.entries += 1
        self.last = position

    def between(self, start: bytes, stop: bytes) -> list[tuple[bytes, bytes | None]]:
        """Return the changes of keys in ``[start, stop)``."""
        keys = self._keys[bisect_left(self._keys, start) : bisect_left(self._keys, stop)]
        return [(key, self.changes[key]) for key in keys]


class PinnedMetadata:
    """The metadata table as it was after some entry."""

    def __init__(self, changes: Changes, database: Snapshot) -> None:
        self._changes = changes
        self._keys = sorted(changes)
        self._database = database

    def get(self, key: bytes) -> bytes | None:
        """Return a row's value; None if there is no such row."""
        whole = ROW + key
        if whole in self._changes:
            return self._changes[whole]
        return self._database.get(Table.METADATA, key)

    @contextmanager
    def rows(
        self, start: bytes, stop: bytes, *, reverse: bool = False, values: bool = True, cache: bool = False
    ) -> Iterator[Iterable[Row]]:
        """Yield the rows of ``[start, stop)``; iterating raises plyvel's errors."""
        keys = self._keys[bisect_left(self._keys, ROW + start) : bisect_left(self._keys, ROW + stop)]
        changed = [(key[1:], self._changes[key]) for key in (reversed(keys) if reverse else keys)]
        with self._database.rows(Table.METADATA, start, stop, reverse=reverse, values=values, cache=cache) as stored:
            yield _merged(changed, stored, reverse=reverse, values=values) if changed else stored

    def close(self) -> None:
        """Release the snapshot. Idempotent."""
        self._database.close()


class Metadata:
    """The metadata table and the store's own rows.

    The commit thread applies entries, the keeper writes checkpoints, and any thread reads.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        #: Guards ``_waiting`` and ``_leaving``. Held during changes and reads of memory, never during disk access. No
        #: other lock is taken while it is held.
        self._lock = threads.Lock()
        self._waiting = Waiting()
        #: Being written to the database by a checkpoint; nothing is added to it.
        self._leaving: Waiting | None = None
        found = database.own_rows(APPLIED, APPLIED + b"\x00")
        #: The last entry applied. Written by the commit thread.
        self.position = int.from_bytes(found[0][1], "big") if found else 0
        #: The last entry that is durable in the database. Written by the keeper.
        self.durable = self.position
        #: The last entry that changed a topic's row, or a later one: a start does not search for earlier changes.
        self.topics_position = self.position

    @property
    def is_due(self) -> bool:
        """True if a checkpoint is due. For the commit thread, without the lock, since the next commit checks again."""
        return self._waiting.bytes > MAX_WAITING_BYTES or self._waiting.entries > MAX_WAITING_ENTRIES

    def apply(self, position: int, changes: Changes) -> None:
        """Apply an entry that is durable in the journal."""
        with self._lock:
            self._waiting.add(position, changes)
            self.position = position
            if any(key.startswith(ROW) and not key.startswith(_SYSTEM_ROW) for key in changes):
                self.topics_position = position

    def replay(self, position: int, value: bytes) -> None:
        """Apply an entry at startup, unless it is applied already. Raises StoreDamaged: an earlier one is missing."""
        if position <= self.position:
            return
        if position != self.position + 1:
            raise StoreDamaged(f"entry {self.position + 1} of the journal is missing", hint=DAMAGED_HINT)
        self.apply(position, decode_entry(value))

    def checkpoint(self) -> None:
        """Write the waiting changes to the database and sync it. For the keeper.

        Raises:
          StoreError: the database must be reopened.
        """
        with self._lock:
            if self._leaving is None:
                if not self._waiting.entries:
                    return
                self._leaving, self._waiting = self._waiting, Waiting()
            leaving = self._leaving
        with self._database.batch(sync=True) as batch:
            for key, value in leaving.changes.items():
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)
            batch.put(APPLIED, leaving.last.to_bytes(8, "big"))
        with self._lock:
            self._leaving, self.durable = None, leaving.last

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a row of the metadata table; None if there is no such row."""
        whole = ROW + key
        with self._lock:
            for changes in (self._waiting, self._leaving):
                if changes is not None and whole in changes.changes:
                    return changes.changes[whole]
        return self._database.get(Table.METADATA, key)

    @contextmanager
    def rows(
        self, start: bytes, stop: bytes, *, reverse: bool = False, values: bool = True, cache: bool = False
    ) -> Iterator[Iterable[Row]]:
        """Yield the rows of ``[start, stop)``; iterating raises plyvel's errors."""
        # Memory first: changes that a checkpoint writes in between are found twice, and merged.
        with self._lock:
            newer = self._waiting.between(ROW + start, ROW + stop)
            older = self._leaving.between(ROW + start, ROW + stop) if self._leaving is not None else []
        changed = [(key[1:], value) for key, value in sorted({**dict(older), **dict(newer)}.items(), reverse=reverse)]
        with self._database.rows(Table.METADATA, start, stop, reverse=reverse, values=values, cache=cache) as stored:
            yield _merged(changed, stored, reverse=reverse, values=values) if changed else stored

    def pinned(self) -> PinnedMetadata:
        """Pin the table in its current state. For the commit thread. Raises StoreError."""
        with self._lock:
            changes = {**(self._leaving.changes if self._leaving is not None else {}), **self._waiting.changes}
        # A checkpoint in between writes only changes that are included here.
        return PinnedMetadata(changes, self._database.snapshot())

    def dead_ranges(self) -> Iterator[tuple[Table, bytes, bytes]]:
        """Yield all dead ranges: table, start, stop."""
        found: Changes = dict(self._database.own_rows(DEAD, AFTER_DEAD))
        for changes in (self._leaving, self._waiting):
            if changes is not None:
                found.update(changes.between(DEAD, AFTER_DEAD))
        for key, stop in sorted(found.items()):
            if stop is not None:
                yield Table(key[1]), key[2:], stop

    def compact(self, start: bytes, stop: bytes) -> None:
        """Rewrite the database's files of a range without the removed rows. For any thread."""
        self._database.compact(Table.METADATA, start, stop)

    def bytes_on_disk(self) -> int:
        """Return the size of its files."""
        return self._database.bytes_on_disk()

    def close(self) -> None:
        """Close the database. Waiting changes are not written: the journal has them."""
        self._database.close()


def dead_key(table: Table, start: bytes) -> bytes:
    """Return the key of a dead range."""
    return DEAD + bytes([table]) + start


def _merged(
    changed: list[tuple[bytes, bytes | None]], stored: Iterable[Row], *, reverse: bool, values: bool
) -> Iterator[Row]:
    """Merge rows in key order; a changed row replaces the stored one, and None removes it."""
    before: bytes | None = None
    for key, value in merge(changed, stored, key=lambda row: row[0], reverse=reverse):
        if key == before:
            continue
        before = key
        if value is not None:
            yield key, value if values else b""

"""The metadata: a database of its own, brought up to date from what each commit carries.

A commit is one synced batch in the newest volume. What it changes in the metadata is one row of that batch, an **entry**
of the journal, numbered without gaps over all volumes. It is applied here in memory, where readers find it at once, and
written to the database later, many commits at a time, in one synced batch with the number of the last entry in it. At
the start the entries after that number are applied again. So the metadata costs a commit neither a sync nor a wait for
a merge, and after any crash the database is what it was after some entry, never half of one.

Keys of the database begin with a table's byte, as those of a volume do:

    00            the number of the last entry applied
    01 key        a row of the metadata table
    04 02|03 key  a dead range of the message or payload table: its start; the value is its stop
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
#: What all rows of the metadata table begin with that are not topics'.
_SYSTEM_ROW = ROW + SYSTEM
#: Changes that wait in memory; beyond, they are written to the database. Opening reads the journal from there on.
MAX_WAITING_BYTES = 1 << 20
MAX_WAITING_ENTRIES = 20_000

#: What a commit changes, by whole key; None: the row is removed.
Changes = dict[bytes, bytes | None]


def encode_entry(changes: Changes) -> bytes:
    """The value of a journal's row. Raises TypeError: a value is not bytes."""
    for value in changes.values():
        if value is not None and not isinstance(value, bytes):
            raise TypeError(f"a row of the metadata is {type(value).__name__}")
    return pack_record({"c": [item for pair in changes.items() for item in pair]})


def decode_entry(value: bytes) -> Changes:
    """The changes of an entry. Raises StoreDamaged."""
    try:
        flat = unpack_record(value, "journal")["c"]
        return dict(zip(flat[::2], flat[1::2], strict=True))
    except (DamagedRow, KeyError, TypeError, ValueError) as error:
        raise StoreDamaged(f"an entry of the journal cannot be read: {error}", hint=DAMAGED_HINT) from None


class Waiting:
    """Changes in memory, in the order of their keys."""

    def __init__(self) -> None:
        self.changes: Changes = {}
        self.entries = 0
        self.bytes = 0
        self.last = 0
        """The number of the last entry in it."""
        self._keys: list[bytes] = []

    def add(self, position: int, changes: Changes) -> None:
        """Add what an entry changes, over what was changed before."""
        for key, value in changes.items():
            if key not in self.changes:
                insort(self._keys, key)
                self.bytes += len(key) + 64
            self.bytes += len(value or b"") - len(self.changes.get(key) or b"")
            self.changes[key] = value
        self.entries += 1
        self.last = position

    def between(self, start: bytes, stop: bytes) -> list[tuple[bytes, bytes | None]]:
        """The changes of ``[start, stop)``."""
        keys = self._keys[bisect_left(self._keys, start) : bisect_left(self._keys, stop)]
        return [(key, self.changes[key]) for key in keys]


class PinnedMetadata:
    """The metadata table as it was after some entry."""

    def __init__(self, changes: Changes, database: Snapshot) -> None:
        self._changes = changes
        self._keys = sorted(changes)
        self._database = database

    def get(self, key: bytes) -> bytes | None:
        """A row, None if there is none."""
        whole = ROW + key
        if whole in self._changes:
            return self._changes[whole]
        return self._database.get(Table.METADATA, key)

    @contextmanager
    def rows(
        self, start: bytes, stop: bytes, *, reverse: bool = False, values: bool = True, cache: bool = False
    ) -> Iterator[Iterable[Row]]:
        """The rows of ``[start, stop)``; iterating raises plyvel's errors."""
        keys = self._keys[bisect_left(self._keys, ROW + start) : bisect_left(self._keys, ROW + stop)]
        changed = [(key[1:], self._changes[key]) for key in (reversed(keys) if reverse else keys)]
        with self._database.rows(Table.METADATA, start, stop, reverse=reverse, values=values, cache=cache) as stored:
            yield _merged(changed, stored, reverse=reverse, values=values) if changed else stored

    def close(self) -> None:
        """Let go of it. Idempotent."""
        self._database.close()


class Metadata:
    """The metadata table and the store's own rows. The thread that commits applies, the keeper checkpoints, any reads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        #: Guards ``_waiting`` and ``_leaving``. It is held while memory is read or changed, never while the disk is; no
        #: lock is taken under it.
        self._lock = threads.Lock()
        self._waiting = Waiting()
        #: Being written to the database now; nothing is added to it.
        self._leaving: Waiting | None = None
        found = database.own_rows(APPLIED, APPLIED + b"\x00")
        #: The last entry applied. Written by the thread that commits.
        self.position = int.from_bytes(found[0][1], "big") if found else 0
        #: The last entry that is durable in the database. Written by the keeper.
        self.durable = self.position
        #: The last entry that changed a topic's row, or a later one: earlier changes are not looked for at the start.
        self.topics_position = self.position

    @property
    def is_due(self) -> bool:
        """True if enough waits to be written."""
        return self._waiting.bytes > MAX_WAITING_BYTES or self._waiting.entries > MAX_WAITING_ENTRIES

    def apply(self, position: int, changes: Changes) -> None:
        """Apply an entry that is durable in the journal."""
        with self._lock:
            self._waiting.add(position, changes)
            self.position = position
            if any(key.startswith(ROW) and not key.startswith(_SYSTEM_ROW) for key in changes):
                self.topics_position = position

    def replay(self, position: int, value: bytes) -> None:
        """Apply an entry at the start, unless it has been. Raises StoreDamaged: one before it is missing."""
        if position <= self.position:
            return
        if position != self.position + 1:
            raise StoreDamaged(f"entry {self.position + 1} of the journal is missing", hint=DAMAGED_HINT)
        self.apply(position, decode_entry(value))

    def checkpoint(self) -> None:
        """Write the waiting changes to the database, synced. For the keeper.

        Raises:
          StoreError: the database must be opened again.
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
        """A row of the metadata table, None if there is none."""
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
        """The rows of ``[start, stop)``; iterating raises plyvel's errors."""
        # Memory first: what a checkpoint writes in between is found in both, and counts once.
        with self._lock:
            newer = self._waiting.between(ROW + start, ROW + stop)
            older = self._leaving.between(ROW + start, ROW + stop) if self._leaving is not None else []
        changed = [(key[1:], value) for key, value in sorted({**dict(older), **dict(newer)}.items(), reverse=reverse)]
        with self._database.rows(Table.METADATA, start, stop, reverse=reverse, values=values, cache=cache) as stored:
            yield _merged(changed, stored, reverse=reverse, values=values) if changed else stored

    def pinned(self) -> PinnedMetadata:
        """The table as it is now. For the thread that commits. Raises StoreError."""
        with self._lock:
            changes = {**(self._leaving.changes if self._leaving is not None else {}), **self._waiting.changes}
        # A checkpoint in between writes nothing that is not in these changes.
        return PinnedMetadata(changes, self._database.snapshot())

    def dead_ranges(self) -> Iterator[tuple[Table, bytes, bytes]]:
        """All dead ranges: table, start, stop."""
        found: Changes = dict(self._database.own_rows(DEAD, AFTER_DEAD))
        for changes in (self._leaving, self._waiting):
            if changes is not None:
                found.update(changes.between(DEAD, AFTER_DEAD))
        for key, stop in sorted(found.items()):
            if stop is not None:
                yield Table(key[1]), key[2:], stop

    def compact(self, start: bytes, stop: bytes) -> None:
        """Rewrite the database's files of a range without the rows that were removed, for any thread."""
        self._database.compact(Table.METADATA, start, stop)

    def bytes_on_disk(self) -> int:
        """The sizes of its files."""
        return self._database.bytes_on_disk()

    def close(self) -> None:
        """Close the database, without writing what waits: the journal has it."""
        self._database.close()


def dead_key(table: Table, start: bytes) -> bytes:
    """The key of a dead range."""
    return DEAD + bytes([table]) + start


def _merged(
    changed: list[tuple[bytes, bytes | None]], stored: Iterable[Row], *, reverse: bool, values: bool
) -> Iterator[Row]:
    """The rows of both; of one key those that changed."""
    before: bytes | None = None
    for key, value in merge(changed, stored, key=lambda row: row[0], reverse=reverse):
        if key == before:
            continue
        before = key
        if value is not None:
            yield key, value if values else b""

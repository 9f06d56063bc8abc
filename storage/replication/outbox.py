"""Commits between the store and the log: bounded, in order, each once.

The store's writing threads put batches in, the event loop takes them out. If the bound is exceeded, or the store was
reopened in the middle of a write, all later commits are given up together: the log then has a gap, and a restore needs a
complete base that begins after it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Put, Table, put_one
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.rows import HAS_POINTER
from storage.leveldb import threads
from storage.leveldb.metadata import DEAD, ROW, decode_entry, decode_keys
from storage.leveldb.operations import MarkDead
from storage.leveldb.shipping import NO_COMMIT
from storage.replication.segment import Change, Commit, RemovedRange

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plainsong.protocol.effects import Operation
    from storage.leveldb.metadata import Changes
    from storage.leveldb.operations import SealedChange
    from storage.leveldb.shipping import Handed
    from storage.leveldb.tables import LevelDBTables


@dataclass(frozen=True, slots=True)
class Taken:
    """Consecutive batches that were taken out."""

    first: int
    batches: Sequence[Handed]
    size: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The first commit number after everything else was given up."""

    last: int
    """The last commit handed over before: given up, or taken earlier."""
    unmade: Sequence[SealedChange]
    """Changes of given-up commits that the store is still making: a base that begins earlier would lack them."""


class Outbox:
    """``storage.leveldb.shipping.Shipper``. ``opened`` and ``hand_over`` are for the store's threads."""

    def __init__(
        self,
        *,
        max_bytes: int,
        full_bytes: int,
        on_full: Callable[[], object] = lambda: None,
        shift: int = 0,
        continues: int | None = None,
    ) -> None:
        """Args:
        shift: added to the store's numbers: see ``record.Record.shift``.
        continues: the commit of the log that is the store's last one when it is opened, instead of ``shift``.
        max_bytes: a commit that exceeds this bound is given up, with all that follow.
        full_bytes: when this many bytes wait, ``on_full`` is called, in the store's thread.
        """
        self._max_bytes = max_bytes
        self._full_bytes = full_bytes
        self.on_full = on_full
        self.shift = shift
        self._continues = continues
        #: Guards all of the following. Held for moments only.
        self._lock = threads.Lock()
        self._waiting: deque[Handed] = deque()
        self._bytes = 0
        self._last: int | None = None
        self._lost = ""
        #: Changes that the store is still making, of commits that were given up.
        self._unmade: list[SealedChange] = []
        #: The last batch that may be visible. Written by the store's threads.
        self.newest = 0
        #: A batch that was handed over may not be durable here: the process must end.
        self.is_torn = False
        #: See ``Shipper.unsent``: the store's own number. Written by the event loop.
        self.unsent = NO_COMMIT

    # --- for the store --------------------------------------------------------------------------

    @property
    def is_early(self) -> bool:
        """See ``Shipper.is_early``."""
        return False

    def numbered(self, number: int) -> None:
        """See ``Shipper.numbered``."""
        self.newest = number + self.shift

    def write_failed(self, number: int) -> None:
        """See ``Shipper.write_failed``."""

    def opened(self, number: int) -> None:
        """See ``Shipper.opened``."""
        if self._continues is not None:
            self.shift, self._continues = self._continues - number, None
        number += self.shift
        self.newest = number
        with self._lock:
            if self._last is not None and number != self._last:
                self._lost = self._lost or "the store was reopened after a failed write"
            self._last = number

    def hand_over(self, batch: Handed) -> None:
        """See ``Shipper.hand_over``."""
        if self.shift:
            batch = replace(batch, number=batch.number + self.shift)
        with self._lock:
            self._last = batch.number
            if not self._lost and self._bytes + batch.size > self._max_bytes and self._waiting:
                self._lost = "more commits wait than replication.backlog_bytes allows"
            if self._lost:
                self._unmade = [each for each in (*self._unmade, *batch.sealed) if each.made is None]
                return
            self._waiting.append(batch)
            self._bytes += batch.size
            is_full = self._bytes >= self._full_bytes
        if is_full:
            self.on_full()

    # --- for the event loop ---------------------------------------------------------------------

    def progressed(self, logged: int | None, counted: int | None) -> None:
        """Note the last commit in the log, and the last one that counts; None while there is none."""
        del counted  # in ``async`` mode no answer waits for a commit to count
        self.unsent = NO_COMMIT if logged is None else logged + 1 - self.shift

    def close(self, why: str) -> None:
        """End all waits: from now on no commit can be confirmed as counted. Idempotent."""

    @property
    def last(self) -> int:
        """The last commit of the store."""
        assert self._last is not None  # the store is open
        return self._last

    @property
    def waiting_bytes(self) -> int:
        """Approximate bytes that wait."""
        return self._bytes

    @property
    def oldest_ms(self) -> int | None:
        """The time of the oldest commit that waits."""
        with self._lock:
            return self._waiting[0].time_ms if self._waiting else None

    @property
    def lost(self) -> str:
        """Why the commits after those that ``take`` still returns are given up; empty if none are given up."""
        with self._lock:
            if not self._lost and self._waiting and any(each.made is False for each in self._waiting[0].sealed):
                self._lost = "rows of a sealed volume could not be changed"
            return self._lost

    def take(self, max_bytes: int) -> Taken | None:
        """Take the oldest complete batches, at least one; None if there is none."""
        batches: list[Handed] = []
        size = 0
        with self._lock:
            while self._waiting and (not batches or size + self._waiting[0].size <= max_bytes):
                if not all(each.made for each in self._waiting[0].sealed):
                    break
                batches.append(self._waiting.popleft())
                size += batches[-1].size
            self._bytes -= size
        return Taken(batches[0].number, batches, size) if batches else None

    def restart(self) -> Restarted:
        """Give up everything that waits."""
        with self._lock:
            waiting = [each for batch in self._waiting for each in batch.sealed]
            unmade = [each for each in (*self._unmade, *waiting) if each.made is None]
            self._waiting.clear()
            self._unmade.clear()
            self._bytes, self._lost = 0, ""
            return Restarted(self.last, unmade)


@dataclass(frozen=True, slots=True)
class Unsent:
    """Commits that a directory has but its log may lack, according to the directory's journal."""

    entries: Sequence[tuple[int, bytes]]
    """Numbers and journal entries, without a gap up to the store's last commit."""

    @classmethod
    def of(cls, tables: LevelDBTables, after: int, max_bytes: int, shift: int = 0) -> Unsent:
        """Read the unsent commits. For a thread, before anything is written. Raises StoreError."""
        entries = [(number + shift, value) for number, value in tables.entries_after(after - shift, max_bytes)]
        try:
            known = [decode_keys(value) is not None for _, value in entries]
        except DamagedRow:
            return cls(())
        return cls(entries[len(known) - known[::-1].index(False) :] if False in known else entries)

    def contradicts(self, number: int, commit: Commit) -> bool:
        """True if a commit of the log lacks rows of the directory's own commit with this number, or has other values.

        Commits that were sent after a crash are no contradiction: the last one has all rows, and the others are empty. The
        journal has the values of metadata only.
        """
        at = number - self.entries[0][0] if self.entries else -1
        if not commit.changes or not 0 <= at < len(self.entries):
            return False
        entry = self.entries[at][1]
        if not _keys_of_entry(entry) <= _keys_of_commit(commit):
            return True
        found = _metadata_in(commit.changes)
        return any(found.get(key) != value for key, value in _metadata_in(_metadata_of(decode_entry(entry))).items())

    def has_other_values(self, tables: LevelDBTables, number: int, commit: Commit) -> bool:
        """True if the directory's own commit with this number wrote messages whose present values the log's commit lacks.

        For a thread. Nothing replaces a message, but a rollback turns the sign of its pointer. Raises StoreError.
        """
        at = number - self.entries[0][0] if self.entries else -1
        if not 0 <= at < len(self.entries):
            return False
        for table, key, value in _rows_of_commit(commit):
            here = tables.get(table, key)
            if here is not None and _unsigned(here) != _unsigned(value):
                return True
        return False

    def commits(self, tables: LevelDBTables, after: int, time_ms: int) -> list[Commit]:
        """Return the commits after one of them. For a thread, before anything else is written. Raises StoreError.

        The last one has every changed row in its present state; the others are empty. So the log can restore the state
        after the last commit, but none in between.
        """
        entries = [value for number, value in self.entries if number > after]
        changes: dict[bytes, bytes | None] = {}
        keys: dict[tuple[Table, bytes], None] = {}
        for value in entries:
            changes.update(decode_entry(value))
            for table, prefix, suffixes in decode_keys(value) or ():
                keys.update(((Table(table), prefix + suffix), None) for suffix in suffixes)
        found = _metadata_of(changes)
        found += [Change(table, key, tables.get(table, key)) for table, key in keys]
        return [*(Commit(time_ms, ()) for _ in entries[1:]), Commit(time_ms, tuple(found))]


def _keys_of_entry(value: bytes) -> set[tuple[Table, bytes]]:
    """Return the rows that a journal entry changes."""
    found = {(Table.METADATA, key[1:]) for key in decode_entry(value) if key.startswith(ROW)}
    for table, prefix, suffixes in decode_keys(value) or ():
        found.update((Table(table), prefix + suffix) for suffix in suffixes)
    return found


def _keys_of_commit(commit: Commit) -> set[tuple[Table, bytes]]:
    found: set[tuple[Table, bytes]] = set()
    for change in commit.changes:
        if isinstance(change, Put):
            found.update((change.table, change.prefix + suffix) for suffix in change.suffixes)
        elif isinstance(change, Change):
            found.add((change.table, change.key))
    return found


def _rows_of_commit(commit: Commit) -> Iterator[tuple[Table, bytes, bytes]]:
    """Yield the messages and payloads that a commit has written."""
    for change in commit.changes:
        if isinstance(change, Put):
            if change.table is not Table.METADATA:
                for suffix, value in zip(change.suffixes, change.values, strict=True):
                    yield change.table, change.prefix + suffix, value
        elif isinstance(change, Change) and change.table is not Table.METADATA and change.value is not None:
            yield change.table, change.key, change.value


def _unsigned(value: bytes) -> bytes:
    """Return a message's row as it is when its pointer is not rolled back."""
    if not value or not value[0] & HAS_POINTER:
        return value
    pointer = abs(int.from_bytes(value[1:9], "big", signed=True))
    return value[:1] + pointer.to_bytes(8, "big", signed=True) + value[9:]


def _metadata_in(changes: Sequence[Change | RemovedRange | Put]) -> dict[bytes, bytes | None]:
    """Return the metadata rows among changes, as the log has them, by key."""
    return {each.key: each.value for each in changes if isinstance(each, Change) and each.table is Table.METADATA}


def commit_of(batch: Handed) -> Commit:
    """Return a batch as the log has it. For threads: it only reads the batch."""
    changes: list[Change | RemovedRange | Put] = []
    for rows in batch.rows:
        if isinstance(rows, Put):
            changes.append(rows)
        else:
            changes += [Change(rows.table, key, None) for key in rows.keys]
    changes += [Change(Table.MESSAGE, key, value) for key, value in batch.rolled_back]
    return Commit(batch.time_ms, (*changes, *_metadata_of(batch.changes)))


def _metadata_of(changed: Changes) -> list[Change | RemovedRange | Put]:
    changes: list[Change | RemovedRange | Put] = []
    for key, value in changed.items():
        if key.startswith(ROW):
            changes.append(Change(Table.METADATA, key[1:], value))
        elif key.startswith(DEAD) and value is not None:
            changes.append(RemovedRange(Table(key[1]), key[2:], value))
    return changes


def operations_of(commit: Commit) -> list[Operation | MarkDead]:
    """Return what a store has to write for a commit of the log, which ``commit_of`` made: one batch."""
    operations: list[Operation | MarkDead] = []
    for change in commit.changes:
        if isinstance(change, RemovedRange):
            operations.append(MarkDead(change.table, [(change.start, change.stop)]))
        elif isinstance(change, Put):
            operations.append(change)
        elif change.value is None:
            operations.append(Delete(change.table, [change.key]))
        else:
            operations.append(put_one(change.table, change.key, change.value))
    # A commit without changes has a number too, but a store writes no empty batch: delete a key that no row has.
    return operations or [Delete(Table.METADATA, [b""])]

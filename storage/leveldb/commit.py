"""The commit: the one place where the newest volume is written and the set of volumes is replaced.

A group of commits is one batch in the newest volume, synced: its rows, and one entry of the journal for the metadata.
After that, in this order: the entry is applied in memory, the set of volumes is replaced if an operation asks for it,
and a full volume is sealed. Rows of sealed volumes that a commit removes or rolls back are the keeper's: they are
changed in place after the batch, because a second version in the newest volume would have to be merged by every reader.

LevelDB has no update in place, so a rollback is a scan, then a batch of the rows that it changes. Both happen here: a row
that another thread had read before could be discarded in between, and would come back. A commit is one batch while its
rollbacks are short. Otherwise the operations before, and each step, are durable by themselves, in order.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from plainsong.protocol.effects import Delete, Put, RollBack, Table
from plainsong.protocol.ids import POSITION_BYTES
from storage.base import NothingWritten, StoreError, Unreadable, rolled_back
from storage.leveldb.engine.packs import MARK, PACKED_TABLE, RowEdits, are_many, is_of_topic, packs_of, stored
from storage.leveldb.metadata import ROW, Changes, dead_key, encode_entry
from storage.leveldb.view import PinnedView
from storage.leveldb.volume import JOURNAL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.effects import Expect, Operation
    from storage.base import Row, StoreConflict
    from storage.leveldb.engine.database import Database
    from storage.leveldb.metadata import Metadata
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.volume import Volume
    from storage.leveldb.volume_set import Sets, View, VolumeSet

#: The next volume is made when the newest is full to this part.
PREPARE_AT = 0.6
#: A volume that has this many times its size is written no more before the next one is there: commits wait for that, and
#: are refused when it cannot be made.
MAX_OVERFULL = 2
#: How soon the next volume is tried again after it could not be made.
RETRY_S = 1.0
#: Bytes that the rollbacks of a group may read together: one step of the thread that commits, and the memory it takes.
STEP_BYTES = 2 << 20
#: What a row counts in addition to its value, so that a step has 2048 rows at most: a hundredth of a second.
STEP_ROW_BYTES = 1024
_ROW_OPERATIONS = (Put, Delete)
_TABLE_BYTE = {table: bytes([table]) for table in Table}


@dataclass(slots=True)
class Turned(Put):
    """Rows of the newest volume, as a rollback leaves them."""


# --- changes of the set of volumes --------------------------------------------------------------


@dataclass(slots=True)
class MarkDead:
    """All rows of these ranges are dead, and nothing will be written there again."""

    table: Table
    ranges: Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class ForgetDead:
    """No volume has rows in these dead ranges any more."""

    ranges: Sequence[tuple[Table, bytes, bytes]]


@dataclass(slots=True)
class Seal:
    """Write to another volume from now on, if this one is the newest."""

    volume: Volume
    error: StoreError | None = None
    """Set by the commit if there is no next volume: nothing was sealed."""


@dataclass(slots=True)
class Replace:
    """A volume, or none, takes the place of sealed neighbours. It is listed already."""

    sources: Sequence[Volume]
    target: Volume | None
    number: int | None = None
    """Set by the commit: the number of the first set without the sources; None if they were not in the set."""


@dataclass(slots=True)
class Pin:
    """A view of everything up to this commit."""

    max_s: float
    view: PinnedView | None = None
    """Set by the commit."""


@dataclass(slots=True)
class Unpin:
    """A view has ended."""

    view: View


SetChange = MarkDead | ForgetDead | Seal | Replace | Pin | Unpin
#: What a commit of the store is made of.
Stored = Put | Delete | SetChange


class _NotRolledBack(Unreadable):
    """A row that a rollback needs cannot be read; nothing of this step was added to the batch."""


@dataclass(slots=True)
class SealedChange:
    """Rows of sealed volumes that a commit removes or rolls back; for the keeper."""

    removed: dict[Volume, list[tuple[Table, bytes]]] = field(default_factory=dict)
    rolled_back: list[tuple[Volume, Sequence[bytes], int]] = field(default_factory=list)
    """Volume, keys of messages, write pointer."""


@dataclass(eq=False, slots=True)
class PendingWrite:
    """One commit on its way to the disk."""

    operations: Sequence[Operation | Stored]
    expect: Sequence[Expect] = ()
    size: int = 0
    """Bytes, roughly; set when it is begun."""
    on_completed: Callable[[PendingWrite], object] | None = None
    """Called on the event loop once it is written, or ``error`` says why not."""
    while_syncing: Callable[[], object] | None = None
    """Called on the event loop while the disk syncs, once at most; it does not raise."""
    error: StoreError | StoreConflict | None = None
    rest: Sequence[Operation | Stored] = ()
    """Operations of a long rollback that its submitter submits again once the work is completed."""
    change: SealedChange | None = None
    """Changes of sealed volumes that the keeper makes before the work is completed."""
    is_with_keeper: bool = False
    """True once the keeper has the work, and reports it."""
    on_changed: Callable[[PendingWrite], object] | None = None
    """Called by the keeper, in its thread, once it has made them, or ``error`` says why not."""
    is_rest: bool = False
    """True if an earlier work left these operations."""
    completed: Callable[[StoreError | StoreConflict | None], object] | None = None
    """The submitter's own callback."""


@dataclass(slots=True)
class _Batch:
    """What gathers for one batch of the newest volume."""

    rows: list[Put | Delete] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)
    set_changes: list[SetChange] = field(default_factory=list)
    unseen: list[Put | Delete] = field(default_factory=list)
    """The operations among ``rows`` on messages: a rollback does not see these before they are written."""
    volumes: VolumeSet | None = None
    """The set with the dead ranges of the operations so far; None if they change none."""


class SealedVolumes(Protocol):
    """What the commit asks of the keeper (``storage.leveldb.keeper``); nothing waits but ``spare``, if asked to."""

    def make_spare(self) -> None:
        """Make the next volume; ``spare`` returns it, or why it cannot be made, once for each call."""

    def spare(self, *, wait: bool) -> Volume | StoreError | None:
        """The answer to ``make_spare``; None if there is none yet. Its database is leased for the commit."""
        ...

    def finish(self, sealed: Volume) -> None:
        """Put a sealed volume's memory into a table and write its index, and end the commit's lease."""

    def change(self, work: PendingWrite) -> None:
        """Change rows of sealed volumes, then report the work."""

    def note_dead(self, volumes: VolumeSet, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        """Subtract rows that died just now from what is alive in the sealed volumes of a set."""

    def checkpoint_soon(self) -> None:
        """Write the metadata that waits to its database, once for any number of calls."""


class Committer:
    """Writes the newest volume and replaces the set. One thread at a time calls it: ``storage.leveldb.group_commit``."""

    def __init__(
        self,
        sets: Sets,
        databases: OpenDatabases,
        metadata: Metadata,
        keeper: SealedVolumes,
        options: LevelDBOptions,
        first_rows: Callable[[bytes, bytes, int, int], list[Row]],
    ) -> None:
        """The committer leases the database of the newest volume.

        Args:
          first_rows: reads the first messages of a range: start, stop, bytes at most, bytes that a row counts besides.
        """
        self._sets = sets
        self._databases = databases
        self._metadata = metadata
        self._keeper = keeper
        self._options = options
        self._first_rows = first_rows
        self._database: Database = databases.acquire(sets.current.newest)
        #: The next volume, once the keeper has made it.
        self._spare: Volume | None = None
        self._asked_for_spare = False
        self._spare_error: StoreError | None = None
        self._retry_at_s = 0.0
        self._left_bytes = 0
        #: A write has failed: what the newest volume contains is unknown.
        self.failed = False

    # --- one group ------------------------------------------------------------------------------

    def is_hot(self, size: int) -> bool:
        """True if a write of ``size`` bytes of new rows is one batch and nothing else: no volume has to be sealed for it."""
        return self._sets.current.newest.memory_bytes + size < self._options.volume_bytes

    def write(self, group: Sequence[PendingWrite], while_syncing: Callable[[], object] | None = None) -> None:
        """Make a group of commits durable, except for each ``PendingWrite.rest`` and ``PendingWrite.change``.

        A work with a ``change`` is given to the keeper, which reports it.

        Args:
          while_syncing: called while the disk syncs, once at most, if the group is one batch of puts. It does not raise.
        A work gets ``NothingWritten`` as its error if the next volume cannot be made and this one is far too full.

        Raises:
          StoreError: the tables must be opened again.
        """
        if self.failed:
            raise StoreError("a write failed before, and the store was not opened again")
        self._take_spare()
        refused = self._refused()
        if refused is not None:
            group = [work for work in group if not _needs_room(work, refused)]
        try:
            self._write(group, while_syncing)
            filled = self._sets.current.newest.memory_bytes
            if filled >= self._options.volume_bytes:
                self._seal_if_possible()
            elif filled >= PREPARE_AT * self._options.volume_bytes:
                self._ask_for_spare()
        except BaseException:
            self.failed = True
            raise

    def _write(self, group: Sequence[PendingWrite], while_syncing: Callable[[], object] | None) -> None:
        self._left_bytes = STEP_BYTES
        batch = _Batch()
        for work in group:
            change = SealedChange()
            try:
                work.rest = self._add(batch, work.operations, change)
            except _NotRolledBack as error:
                # Only this commit needs the damaged block: its operations before the rollback are written, as after a crash.
                work.error = Unreadable(error.detail, hint=error.hint)
                continue
            work.change = change if change.removed or change.rolled_back else None
        self._flush(batch, while_syncing)
        for work in group:
            if work.change is not None:
                # Before anything else is sealed: the keeper then makes the change before it can merge a later volume,
                # with newer rows of the same keys, into one that is changed.
                work.is_with_keeper = True
                self._keeper.change(work)
        for operation in batch.set_changes:
            self._apply(operation)

    def _add(
        self, batch: _Batch, operations: Sequence[Operation | Stored], change: SealedChange
    ) -> Sequence[Operation | Stored]:
        """Add a commit's operations to a batch; returns those that have to wait."""
        for index, operation in enumerate(operations):
            if isinstance(operation, RollBack):
                rest = self._roll_back(batch, operation, change)
                if rest is not None or change.rolled_back:
                    # What follows is durable after the whole rollback, in sealed volumes as well.
                    following = operations[index + 1 :]
                    return following if rest is None else [rest, *following]
            elif not isinstance(operation, _ROW_OPERATIONS):
                batch.set_changes.append(operation)
                self._note_dead(batch, operation)
            elif operation.table is Table.METADATA:
                if isinstance(operation, Put):
                    prefix = ROW + operation.prefix
                    pairs = zip(operation.suffixes, operation.values, strict=True)
                    batch.changes.update((prefix + suffix, value) for suffix, value in pairs)
                else:
                    batch.changes.update((ROW + key, None) for key in operation.keys)
            else:
                if isinstance(operation, Delete):
                    self._note_sealed(operation, change)
                batch.rows.append(operation)
                if operation.table is Table.MESSAGE:
                    batch.unseen.append(operation)
        return ()

    def _note_sealed(self, delete: Delete, change: SealedChange) -> None:
        """Add the part of a removal that concerns sealed volumes to ``change``."""
        for key, extents in self._sets.current.index[delete.table].of_each(delete.keys):
            for extent in extents:
                change.removed.setdefault(extent.volume, []).append((delete.table, key))

    def _flush(self, batch: _Batch, while_syncing: Callable[[], object] | None = None) -> None:
        """Write the rows and the metadata of a batch, durably."""
        rows, changes = batch.rows, batch.changes
        batch.rows, batch.changes, batch.unseen = [], {}, []
        if rows or changes:
            self._write_batch(rows, changes, while_syncing)

    def _write_batch(
        self, rows: Sequence[Put | Delete], changes: Changes, while_syncing: Callable[[], object] | None
    ) -> None:
        volume, database = self._sets.current.newest, self._database
        removed: list[tuple[Table, bytes]] = []
        # Always sync before acknowledging. The journal has no gap, which shows that nothing is missing; and only the last
        # batch in a log may be torn by a power cut, so that batches are synced one by one.
        early = while_syncing is not None and database.syncs_early
        with database.batch(sync=not early) as batch:
            edits: RowEdits | None = None
            for operation in rows:
                if isinstance(operation, Put):
                    if _concerns_no_pack(volume, operation):
                        volume.note(operation, packs=None, packed=False)
                        _put_rows(batch.put, operation)
                    else:
                        edits = edits or RowEdits(database, batch.put, batch.delete)
                        self._put(volume, operation, batch.put, edits)
                    continue
                for key, _ in volume.extents[operation.table].of_each(operation.keys):
                    if volume.may_be_packed(operation.table, key):
                        edits = edits or RowEdits(database, batch.put, batch.delete)
                        edits.remove_if_readable(key)
                    else:
                        batch.delete(_TABLE_BYTE[operation.table] + key)
                    removed.append((operation.table, key))
            if edits is not None:
                volume.memory_bytes += edits.finish()
            position = self._metadata.position + 1
            if changes:
                batch.put(JOURNAL + position.to_bytes(8, "big"), encode_entry(changes))
            database.make_room(batch.approximate_size())
        if while_syncing is not None:
            if early:
                database.sync_while(while_syncing)
            else:
                while_syncing()
        if changes:
            volume.journal_first = volume.journal_first or position
            volume.journal_last = position
            self._metadata.apply(position, changes)
            if self._metadata.is_due:
                self._keeper.checkpoint_soon()
        if removed:
            volume.note_removed(removed)

    def _put(self, volume: Volume, put: Put, into: Callable[[bytes, bytes], None], edits: RowEdits) -> None:
        """Put rows into a batch: as packs, or one by one."""
        is_new = not isinstance(put, Turned)
        packs, inside, marked = None, False, False
        if put.table is PACKED_TABLE and volume.shape.packed and put.values:
            if is_new and are_many(put.values) and _may_pack(volume, put):
                packs = packs_of(put.prefix, put.suffixes, put.values, may_expire=put.may_expire)
            if packs is None:
                inside = volume.has_packs
                if inside and is_new:  # rows that are turned may be of several topics
                    inside = volume.has_packs_between(put.prefix + put.suffixes[0], put.prefix + put.suffixes[-1])
                marked = max(put.values) >= MARK and any(value[:1] == MARK for value in put.values)
        if is_new:
            volume.note(put, packs=packs, packed=packs is not None or inside or marked)
        if packs is not None:
            edits.add(packs)
        elif inside or marked:
            for suffix, value in zip(put.suffixes, put.values, strict=True):
                key = put.prefix + suffix
                if is_new or volume.may_be_packed(put.table, key):
                    edits.put(key, value)
                else:
                    into(_TABLE_BYTE[put.table] + key, stored(value))
        else:
            _put_rows(into, put)

    # --- rollbacks ------------------------------------------------------------------------------

    def _roll_back(self, batch: _Batch, operation: RollBack, change: SealedChange) -> RollBack | None:
        """Roll back rows of the range; returns the rest of the operation, None if there is none."""
        if self._left_bytes <= 0:
            return operation
        if any(_touches(unseen, operation) for unseen in batch.unseen):
            self._flush(batch)
        here: list[Row] = []
        sealed: dict[Volume, list[bytes]] = {}
        try:
            rows = self._first_rows(operation.start, operation.stop, self._left_bytes, STEP_ROW_BYTES)
            for row in rolled_back(rows, operation.pointer):
                self._place(row, here, sealed)
        except Unreadable as error:
            raise _NotRolledBack(error.detail, hint=error.hint) from error
        change.rolled_back += [(volume, keys, operation.pointer) for volume, keys in sealed.items()]
        if here:
            # Not among the unseen: another rollback finds nothing to change in these rows.
            keys, values = [key for key, _ in here], [value for _, value in here]
            batch.rows.append(Turned(Table.MESSAGE, b"", keys, values))
        self._left_bytes -= sum(len(value) + STEP_ROW_BYTES for _, value in rows)
        if self._left_bytes > 0:
            return None
        return RollBack(rows[-1][0] + b"\x00", operation.stop, operation.pointer)

    def _place(self, row: Row, here: list[Row], sealed: dict[Volume, list[bytes]]) -> None:
        """Add a row that is rolled back to those of the newest volume, or its key to those of sealed ones."""
        current = self._sets.current
        places = current.places(Table.MESSAGE, row[0])
        for place in places:
            if place is not current.newest:
                sealed.setdefault(place, []).append(row[0])
            elif len(places) == 1 or self._database.get(Table.MESSAGE, row[0]) is not None:
                here.append(row)

    # --- the set of volumes -----------------------------------------------------------------------

    def _note_dead(self, batch: _Batch, operation: SetChange) -> None:
        """Add to the metadata what an operation changes of dead ranges, after those before it in the same batch."""
        volumes = batch.volumes or self._sets.current
        changes = batch.changes
        if isinstance(operation, MarkDead):
            table = operation.table
            dead, steps = volumes.dead[table].adding(operation.ranges)
            for start, stop, joined in steps:
                changes.update((dead_key(table, each), None) for each in joined)
                changes[dead_key(table, start)] = stop
            volumes = volumes.burying(table, dead)
        elif isinstance(operation, ForgetDead):
            for table, start, stop in operation.ranges:
                following = volumes.forgetting(table, start, stop)
                if following is not None:
                    changes[dead_key(table, start)] = None
                    volumes = following
        batch.volumes = volumes

    def _apply(self, operation: SetChange) -> None:
        current = self._sets.current
        if isinstance(operation, MarkDead):
            self._bury(current, operation)
        elif isinstance(operation, ForgetDead):
            for table, start, stop in operation.ranges:
                self._sets.put(self._sets.current.forgetting(table, start, stop) or self._sets.current)
        elif isinstance(operation, Seal):
            if operation.volume is current.newest:
                operation.error = self._seal()
        elif isinstance(operation, Replace):
            following = current.replacing(operation.sources, operation.target)
            if following is not None:
                self._sets.put(following)
                operation.number = following.number
        elif isinstance(operation, Pin):
            operation.view = self._pinned(operation.max_s)
        else:
            self._sets.put(current.unviewed(operation.view))

    def _bury(self, current: VolumeSet, operation: MarkDead) -> None:
        table = operation.table
        fresh = [part for start, stop in operation.ranges for part in current.dead[table].live_parts(start, stop)]
        following = current.burying(table, current.dead[table].added(operation.ranges))
        self._sets.put(following)
        for start, stop in fresh:
            for extent in current.newest.extents[table].overlapping(start, stop):
                extent.remove_part(start, stop)
        # The volumes that were sealed by now are the keeper's; the newest one was counted here.
        self._keeper.note_dead(following, table, fresh)

    def _pinned(self, max_s: float) -> PinnedView:
        newest = self._sets.current.newest
        metadata = self._metadata.pinned()
        view = PinnedView(self._sets.pin(), metadata, max_s)
        view.add_snapshot(newest, self._databases.acquire(newest).snapshot())
        self._sets.put(self._sets.current.viewed(view))
        return view

    # --- the next volume --------------------------------------------------------------------------

    def _ask_for_spare(self) -> None:
        """Have the keeper make the next volume, unless it is there, or being made, or just failed."""
        if self._spare is None and not self._asked_for_spare and time.monotonic() >= self._retry_at_s:
            self._asked_for_spare = True
            self._keeper.make_spare()

    def _take_spare(self, *, wait: bool = False) -> None:
        """Take the next volume if the keeper has made it. The keeper answers each request once."""
        if not self._asked_for_spare:
            return
        found = self._keeper.spare(wait=wait)
        if found is None:
            return
        self._asked_for_spare = False
        if isinstance(found, StoreError):
            self._spare_error, self._retry_at_s = found, time.monotonic() + RETRY_S
        else:
            self._spare, self._spare_error = found, None

    def _refused(self) -> StoreError | None:
        """Why rows are refused; waits for the next volume if the newest is far too full."""
        if self._spare is not None:
            return None
        if self._sets.current.newest.memory_bytes < MAX_OVERFULL * self._options.volume_bytes:
            return None
        self._ask_for_spare()
        self._take_spare(wait=True)
        return self._spare_error if self._spare is None else None

    def _seal_if_possible(self) -> None:
        """Seal a full volume. Without a next one it is written until it is far too full."""
        self._ask_for_spare()
        self._take_spare()
        if self._spare is not None:
            self._seal()

    def _seal(self) -> StoreError | None:
        """Write to the next volume from now on; waits until it is there, or returns why it cannot be made."""
        if self._spare is None:
            self._retry_at_s = 0.0
            self._ask_for_spare()
            self._take_spare(wait=True)
        if self._spare is None:
            return self._spare_error or StoreError("the next volume is missing")
        current = self._sets.current
        # LevelDB is going to remove the log.
        self._database.end_log()
        newest, self._spare = self._spare, None
        # The keeper has leased the spare's database for this thread, and takes over the lease of the one that is sealed.
        self._database = self._databases.acquire(newest)
        self._databases.release(newest)
        self._sets.put(current.sealing(newest))
        self._keeper.finish(current.newest)
        return None


def _needs_room(work: PendingWrite, refused: StoreError) -> bool:
    """True if a work writes to the newest volume; then its error says that nothing was written."""
    if all(isinstance(operation, (Replace, Pin, Unpin, Seal, MarkDead, ForgetDead)) for operation in work.operations):
        return False
    work.error = NothingWritten(refused.detail, hint=refused.hint)
    return True


def _may_pack(volume: Volume, put: Put) -> bool:
    """True if the newest volume may have these rows as packs: they are one topic's, and it has none between them."""
    first, last = put.prefix + put.suffixes[0], put.prefix + put.suffixes[-1]
    if len(put.suffixes[0]) != POSITION_BYTES or not is_of_topic(first):
        return False
    return not any(volume.extents[put.table].overlapping(first, last + b"\x00"))


def _concerns_no_pack(volume: Volume, put: Put) -> bool:
    """True if new rows become no pack and are in none, as with most requests of few messages."""
    suffixes, values = put.suffixes, put.values
    if put.table is not PACKED_TABLE or not volume.shape.packed or not values:
        return not isinstance(put, Turned)
    if are_many(values) or isinstance(put, Turned) or max(values) >= MARK:
        return False
    return not volume.has_packs or not volume.has_packs_between(put.prefix + suffixes[0], put.prefix + suffixes[-1])


def _put_rows(put: Callable[[bytes, bytes], None], operation: Put) -> None:
    # The daemon's hottest loop: nothing but the put.
    prefix = _TABLE_BYTE[operation.table] + operation.prefix
    for suffix, value in zip(operation.suffixes, operation.values, strict=True):
        put(prefix + suffix, value)


def _touches(unseen: Put | Delete, operation: RollBack) -> bool:
    """True if a put or delete of messages may change what a rollback finds."""
    if isinstance(unseen, Delete):
        return any(operation.start <= key < operation.stop for key in unseen.keys)
    if not unseen.suffixes:
        return False
    first, last = unseen.prefix + unseen.suffixes[0], unseen.prefix + unseen.suffixes[-1]
    return first < operation.stop and last >= operation.start

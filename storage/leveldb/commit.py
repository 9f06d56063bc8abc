"""The commit: the only writer of the newest volume and of the set of volumes.

A group of commits is one synced batch in the newest volume: its rows, and one journal entry for the metadata. Then, in
this order, the entry is applied in memory, operations on the set of volumes take effect, and a full volume is sealed.
Rows of sealed volumes that a commit removes or rolls back are changed in place by the keeper after the batch, because a
second version in the newest volume would have to be merged by every reader.

LevelDB has no update in place, so a rollback is a scan and a batch of the rows that it changes. Both happen here: had
another thread done the scan, a row could be discarded between scan and batch, and the batch would bring it back. A
commit is one batch while its rollbacks are short and stay within the newest volume. Otherwise the operations before a
rollback, each of its steps, and the operations after it become durable separately and in order. So a kill may leave a
rollback half done, but never anything that follows it: a topic's row records the rollback only once all rows are rolled
back, and until then whatever ends the transaction repeats the rollback.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from plainsong.protocol.effects import Delete, Put, RollBack, Table
from storage.base import NothingWritten, StoreError, Unreadable, rolled_back
from storage.leveldb.metadata import ROW, Changes, dead_key, encode_entry
from storage.leveldb.next_volume import MakesVolumes, NextVolume
from storage.leveldb.operations import ForgetDead, MarkDead, Pin, Replace, Seal, SealedChange, Unpin
from storage.leveldb.row_writes import RowWrites
from storage.leveldb.shipping import Handed, keys_of
from storage.leveldb.view import PinnedView
from storage.leveldb.volume import JOURNAL, note_dead

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.effects import Operation
    from storage.base import Row
    from storage.leveldb.engine.database import Database
    from storage.leveldb.metadata import Metadata
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.operations import PendingWrite, SetChange, Stored
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.shipping import Shipper
    from storage.leveldb.volume import Volume
    from storage.leveldb.volume_set import Sets, VolumeSet

#: Request the next volume when this fraction of the newest is full.
PREPARE_AT = 0.6
#: A volume that has grown to this many times its size is not written until the next one exists: commits wait for that,
#: and are refused if it cannot be made.
MAX_OVERFULL = 2
#: Bytes that the rollbacks of a group may read together. Bounds the time of one commit step and the memory it takes.
STEP_BYTES = 2 << 20
#: Added to the size of each row, so that a step has at most 2048 rows, which takes about 10 ms.
STEP_ROW_BYTES = 1024
_ROW_OPERATIONS = (Put, Delete)


@dataclass(slots=True)
class _Turned:
    """Messages of the newest volume after a rollback."""

    rows: Sequence[Row]


class _NotRolledBack(Unreadable):
    """A row that a rollback needs cannot be read; nothing of this step was added to the batch."""


@dataclass(slots=True)
class _Batch:
    """The rows and changes collected for one batch of the newest volume."""

    rows: list[Put | Delete | _Turned] = field(default_factory=list)
    changes: Changes = field(default_factory=dict)
    set_changes: list[SetChange] = field(default_factory=list)
    volumes: VolumeSet | None = None
    """The set with the dead ranges of the operations so far; None if they change none."""
    rolled_back: list[Row] = field(default_factory=list)
    """Rows of sealed volumes that the keeper rolls back, for the second copy."""


class SealedVolumes(MakesVolumes, Protocol):
    """The keeper's interface for the commit (``storage.leveldb.keeper``). None of these calls waits."""

    def finish(self, sealed: Volume) -> None:
        """Flush a sealed volume's memory to a table, write its index, and end the commit's lease."""

    def change(self, work: PendingWrite) -> None:
        """Change rows of sealed volumes, then report the commit."""

    def note_dead(self, volumes: VolumeSet, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        """Subtract rows that died just now from the live bytes of a set's sealed volumes."""

    def checkpoint_soon(self) -> None:
        """Write the pending metadata to its database, once for all calls before that is done."""


class Committer:
    """Writes the newest volume and replaces the set. For one thread at a time: ``storage.leveldb.group_commit``."""

    def __init__(
        self,
        sets: Sets,
        databases: OpenDatabases,
        metadata: Metadata,
        keeper: SealedVolumes,
        options: LevelDBOptions,
        first_rows: Callable[[bytes, bytes, int, int], list[Row]],
        shipper: Shipper | None = None,
    ) -> None:
        """Lease the database of the newest volume.

        Args:
          first_rows: reads the first messages of a range. Arguments: start, stop, maximum bytes, bytes added for each
            row.
          shipper: takes every durable batch, in order; None if there is no second copy.
        """
        self._shipper = shipper
        #: Batches of this group for the shipper, and the group's changes of sealed volumes.
        self._handed: list[Handed] = []
        self._sealed_changes: list[SealedChange] = []
        self._ship_early = self._hand_over if shipper is not None and shipper.is_early else None
        self._sets = sets
        self._databases = databases
        self._metadata = metadata
        self._keeper = keeper
        self._options = options
        self._first_rows = first_rows
        self._database: Database = databases.acquire(sets.current.newest)
        self._next = NextVolume(keeper)
        #: Bytes that the rollbacks of this group may still read.
        self._left_bytes = 0
        #: A write has failed: the contents of the newest volume are unknown.
        self.failed = False

    # --- one group ------------------------------------------------------------------------------

    def is_hot(self, size: int) -> bool:
        """True if a write of ``size`` bytes of new rows is one batch and no volume has to be sealed for it."""
        return self._sets.current.newest.memory_bytes + size < self._options.settings.volume_bytes

    def write(self, group: Sequence[PendingWrite], while_syncing: Callable[[], object] | None = None) -> None:
        """Make a group of commits durable, except for each ``PendingWrite.rest`` and ``PendingWrite.change``.

        The keeper gets the commits with a ``change``, and reports them. A commit's ``error`` is set to
        ``NothingWritten`` if the newest volume is far too full and the next one cannot be made.

        Args:
          while_syncing: called while the disk syncs, at most once, if the group is one batch of puts. It must not
            raise.

        Raises:
          StoreError: the tables must be reopened.
        """
        if self.failed:
            raise StoreError("a write failed before, and the store has not been reopened")
        self._next.look()
        refused = self._refused()
        if refused is not None:
            group = [work for work in group if not _needs_room(work, refused)]
        try:
            self._write(group, while_syncing)
            self._seal_if_full()
        except BaseException:
            self.failed = True
            if self._shipper is not None:
                self._shipper.write_failed(self._metadata.position)
            raise

    def _write(self, group: Sequence[PendingWrite], while_syncing: Callable[[], object] | None) -> None:
        self._left_bytes = STEP_BYTES
        batch = _Batch()
        for work in group:
            change = SealedChange()
            try:
                work.rest = self._add(batch, work.operations, change)
            except _NotRolledBack as error:
                # Only this commit needs the damaged block. Its operations before the rollback are written, as after a
                # crash.
                work.error = Unreadable(error.detail, hint=error.hint)
                continue
            work.change = change if change.removed or change.rolled_back else None
            if work.change is not None and self._shipper is not None:
                self._sealed_changes.append(work.change)
        self._flush(batch, while_syncing or self._ship_early)
        for work in group:
            if work.change is not None:
                # Before another volume can be sealed: the keeper must make this change before it can merge a later
                # volume with newer rows of the same keys into a volume that changes.
                work.is_with_keeper = True
                self._keeper.change(work)
        for operation in batch.set_changes:
            self._apply(operation)
        if self._shipper is not None:
            self._hand_over()

    def _add(
        self, batch: _Batch, operations: Sequence[Operation | Stored], change: SealedChange
    ) -> Sequence[Operation | Stored]:
        """Add a commit's operations to a batch. Returns those that have to wait."""
        for index, operation in enumerate(operations):
            if isinstance(operation, RollBack):
                rest = self._roll_back(batch, operation, change)
                if rest is not None or change.rolled_back:
                    # Later operations become durable after the whole rollback, including its part in sealed volumes.
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
        return ()

    def _note_sealed(self, delete: Delete, change: SealedChange) -> None:
        """Add the rows of a removal that are in sealed volumes to ``change``."""
        for key, extents in self._sets.current.index[delete.table].of_each(delete.keys):
            for extent in extents:
                change.removed.setdefault(extent.volume, []).append((delete.table, key))

    def _flush(self, batch: _Batch, while_syncing: Callable[[], object] | None = None) -> None:
        """Write the rows and the metadata of a batch, durably."""
        rows, changes, turned = batch.rows, batch.changes, batch.rolled_back
        batch.rows, batch.changes, batch.rolled_back = [], {}, []
        if rows or changes or (turned and self._shipper is not None):
            self._write_batch(rows, changes, while_syncing, turned)

    def _hand_over(self) -> None:
        """Hand over the batches of a group, once all its changes of sealed volumes are known."""
        shipper = self._shipper
        assert shipper is not None  # otherwise there are no batches for it
        handed, self._handed, self._sealed_changes = self._handed, [], []
        for batch in handed:
            shipper.hand_over(batch)

    def _write_batch(
        self,
        operations: Sequence[Put | Delete | _Turned],
        changes: Changes,
        while_syncing: Callable[[], object] | None,
        turned: Sequence[Row],
    ) -> None:
        volume, database = self._sets.current.newest, self._database
        position = self._metadata.position + 1
        if self._shipper is not None:
            self._shipper.numbered(position)
        shipped = None if self._shipper is None else _plain(operations)
        # Always sync before acknowledging. The journal must have no gap, since that proves that nothing is missing; and
        # only the last batch in a log may be torn by a power cut, so batches are synced one by one.
        early = while_syncing is not None and database.syncs_early
        # The volume's summary gets the rows before they are written: a reader must not miss a row that is there. If the
        # write fails the summary has too many, and the store is reopened before anything else is written.
        with database.batch(sync=not early) as batch:
            rows = RowWrites(volume, database, batch)
            for operation in operations:
                if isinstance(operation, Put):
                    rows.insert(operation)
                elif isinstance(operation, Delete):
                    for key, _ in volume.extents[operation.table].of_each(operation.keys):
                        rows.remove(operation.table, key, if_readable=True)
                else:
                    for key, value in operation.rows:
                        rows.replace(Table.MESSAGE, key, value)
            volume.memory_bytes += rows.finish()
            # For the second copy each batch needs a number that is durable with it: that of its entry.
            numbered = bool(changes) or shipped is not None
            if numbered:
                keys = None if shipped is None else keys_of(shipped, turned)
                batch.put(JOURNAL + position.to_bytes(8, "big"), encode_entry(changes, keys))
            size = batch.approximate_size()
            database.make_room(size)
        if shipped is not None:
            now_ms = time.time_ns() // 1_000_000
            self._handed.append(Handed(position, now_ms, shipped, changes, turned, self._sealed_changes, size))
        if while_syncing is not None:
            if early:
                database.sync_while(while_syncing)
            else:
                while_syncing()  # the batch is durable already
        if numbered:
            volume.journal_first = volume.journal_first or position
            volume.journal_last = position
            self._metadata.apply(position, changes)
            if self._metadata.is_due:
                self._keeper.checkpoint_soon()

    # --- rollbacks ------------------------------------------------------------------------------

    def _roll_back(self, batch: _Batch, operation: RollBack, change: SealedChange) -> RollBack | None:
        """Roll back rows of the range. Returns the rest of the operation, None if there is none."""
        if self._left_bytes <= 0:
            return operation
        if any(_touches(each, operation) for each in batch.rows):
            self._flush(batch)  # the scan reads only rows that are written
        here: list[Row] = []
        elsewhere: list[Row] = []
        sealed: dict[Volume, list[bytes]] = {}
        try:
            rows = self._first_rows(operation.start, operation.stop, self._left_bytes, STEP_ROW_BYTES)
            turned = rolled_back(rows, operation.pointer)
            elsewhere.extend(row for row in turned if self._place(row, here, sealed))
        except Unreadable as error:
            raise _NotRolledBack(error.detail, hint=error.hint) from error
        change.rolled_back += [(volume, keys, operation.pointer) for volume, keys in sealed.items()]
        batch.rolled_back += elsewhere
        if here:
            batch.rows.append(_Turned(here))
        self._left_bytes -= sum(len(value) + STEP_ROW_BYTES for _, value in rows)
        if self._left_bytes > 0:
            return None
        return RollBack(rows[-1][0] + b"\x00", operation.stop, operation.pointer)

    def _place(self, row: Row, here: list[Row], sealed: dict[Volume, list[bytes]]) -> bool:
        """Sort a row to roll back: into ``here`` if it is in the newest volume, its key into ``sealed`` otherwise.

        Returns True if it is in a sealed volume.
        """
        current, is_sealed = self._sets.current, False
        places = current.places(Table.MESSAGE, row[0])
        for place in places:
            if place is not current.newest:
                sealed.setdefault(place, []).append(row[0])
                is_sealed = True
            elif len(places) == 1 or self._database.get(Table.MESSAGE, row[0]) is not None:
                here.append(row)
        return is_sealed

    # --- the set of volumes -----------------------------------------------------------------------

    def _note_dead(self, batch: _Batch, operation: SetChange) -> None:
        """Add an operation's changes of dead ranges to the batch's metadata, after those of earlier operations."""
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
        died = note_dead(current.newest.extents[table].overlapping, fresh, following.dead[table])
        if died and table is Table.PAYLOAD:
            current.newest.note_uncounted(died[current.newest])
        # The keeper counts the volumes that are sealed by now; the newest was counted here.
        self._keeper.note_dead(following, table, fresh)

    def _pinned(self, max_s: float) -> PinnedView:
        newest = self._sets.current.newest
        metadata = self._metadata.pinned()
        view = PinnedView(self._sets.pin(), metadata, max_s, self._metadata.position)
        view.add_snapshot(newest, self._databases.acquire(newest).snapshot())
        self._sets.put(self._sets.current.viewed(view))
        return view

    # --- the next volume --------------------------------------------------------------------------

    def _refused(self) -> StoreError | None:
        """Return the error for new rows, if any. Waits for the next volume if the newest is far too full."""
        if (
            self._sets.current.newest.memory_bytes < MAX_OVERFULL * self._options.settings.volume_bytes
            or self._next.is_made
        ):
            return None
        self._next.request()
        self._next.look(wait=True)
        return None if self._next.is_made else self._next.error

    def _seal_if_full(self) -> None:
        """Seal a full volume if the next one exists. Otherwise writes to it continue until it is far too full."""
        filled = self._sets.current.newest.memory_bytes
        if filled < PREPARE_AT * self._options.settings.volume_bytes:
            return
        self._next.request()
        if filled >= self._options.settings.volume_bytes:
            self._next.look()
            if self._next.is_made:
                self._seal()

    def _seal(self) -> StoreError | None:
        """Make the next volume the newest. Waits until it exists; returns the error if it cannot be made."""
        newest = self._next.take()
        if isinstance(newest, StoreError):
            return newest
        current = self._sets.current
        # LevelDB will remove the log.
        self._database.end_log()
        # The keeper has leased the next volume's database for this thread, and takes over the lease of the sealed one.
        self._database = self._databases.acquire(newest)
        self._databases.release(newest)
        self._sets.put(current.sealing(newest))
        self._keeper.finish(current.newest)
        return None


def _plain(operations: Sequence[Put | Delete | _Turned]) -> list[Put | Delete]:
    """Return operations with puts for the rollbacks."""
    return [
        Put(Table.MESSAGE, b"", [key for key, _ in each.rows], [value for _, value in each.rows])
        if isinstance(each, _Turned)
        else each
        for each in operations
    ]


def _needs_room(work: PendingWrite, refused: StoreError) -> bool:
    """True if a commit writes to the newest volume. Then its ``error`` is set to ``NothingWritten``."""
    if all(isinstance(operation, (Replace, Pin, Unpin, Seal, MarkDead, ForgetDead)) for operation in work.operations):
        return False
    work.error = NothingWritten(refused.detail, hint=refused.hint)
    return True


def _touches(written: Put | Delete | _Turned, operation: RollBack) -> bool:
    """True if operations on messages may change what a rollback finds."""
    if isinstance(written, _Turned) or written.table is not Table.MESSAGE:
        return False  # another rollback of the same rows would change nothing
    if isinstance(written, Delete):
        return any(operation.start <= key < operation.stop for key in written.keys)
    if not written.suffixes:
        return False
    first, last = written.prefix + written.suffixes[0], written.prefix + written.suffixes[-1]
    return first < operation.stop and last >= operation.start

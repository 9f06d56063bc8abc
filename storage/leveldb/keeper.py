"""The keeper: the one writer of sealed volumes, of the list of volumes and of the metadata's database.

Its thread (``storage.leveldb.keeper_thread``) makes the next volume, finishes sealed ones, removes and rolls back rows
in sealed volumes, tidies (``storage.leveldb.tidying``), checkpoints the metadata, opens and closes views, and removes
files that no set names any longer. Its results enter the set of volumes by an operation that it hands to the commit,
the set's only writer.

    the commit waits for the keeper only for the next volume; the keeper never waits for the commit
    while an operation of the keeper is with the commit, the keeper changes no sealed volume; it only makes next volumes

The list is always ahead of the set: it names a volume before the set does, and drops one before the set does. So
the disk has every acknowledged commit, whenever the process ends. When an operation of the commit fails after the list
has changed, the keeper fails, and nothing is written before the store is reopened.
"""

from __future__ import annotations

import errno
import logging
import os
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

from plainsong.protocol.effects import Table
from storage.base import StoreError, StoreUnusable, Unreadable, rolled_back
from storage.directory import sync_directory
from storage.leveldb import threads
from storage.leveldb.engine.errors import call_failed, without_folders
from storage.leveldb.keeper_thread import KeeperThread, NotChanged, Running, Work, copy_of
from storage.leveldb.open_databases import VolumeDamaged
from storage.leveldb.operations import PendingWrite, Pin, Replace, Unpin
from storage.leveldb.reads import VolumeReads
from storage.leveldb.row_writes import RowWrites
from storage.leveldb.volume import Volume, save_index
from storage.leveldb.volume_list import Listed, ListUnknown, remove_slowly, remove_volume, write_list
from storage.leveldb.volume_set import estimate_live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from storage.leveldb.engine.database import Database
    from storage.leveldb.metadata import Metadata
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.operations import SealedChange
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.shipping import Shipper
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume_set import Sets, View, VolumeSet

log = logging.getLogger(__name__)
T = TypeVar("T")


class Keeper:
    """Calls for the commit, the event loop and readers, and the work that the thread does for them.

    The calls under the first two headings send messages, and are for the caller that the heading names. Everything else
    runs in the thread, which owns all fields except ``thread``, ``_spares`` and ``_asked_at``.
    """

    def __init__(
        self,
        directory: Path,
        options: LevelDBOptions,
        sets: Sets,
        databases: OpenDatabases,
        metadata: Metadata,
        hand_in: Callable[[PendingWrite], None],
        shipper: Shipper | None = None,
    ) -> None:
        """Start the thread; ``thread.close`` ends it.

        Args:
          directory: the folder of the volumes.
          hand_in: hands a write to the commit, from any thread; its ``on_completed`` is called later, even if it
            fails.
          shipper: see ``Committer``; volumes with a part of the journal that it still needs are kept.
        """
        self._shipper = shipper
        self._directory = directory
        self._options = options
        self._sets = sets
        self._databases = databases
        self._metadata = metadata
        #: Answers to ``make_spare``.
        self._spares: threads.Queue[Volume | StoreError] = threads.Queue()
        #: The list on the disk: every volume that has rows, and perhaps the next one.
        self._listed: list[Volume] = list(sets.current.all)
        #: The list may or may not have been written: volumes that either version names stay until the next opening.
        self._list_unknown = False
        #: Volumes with rows that died or were removed since the last check.
        self.touched: set[Volume] = set(self._listed)
        #: Volumes that tidying could not read: they are left alone until the next opening.
        self.damaged: set[Volume] = set()
        #: The replacement of each volume that has left the set; None if its rows are all dead.
        self._replaced: WeakKeyDictionary[Volume, Volume | None] = WeakKeyDictionary()
        #: Volumes that have left the set, with the number of the first set without them.
        self._gone: list[tuple[Volume, int]] = []
        #: While volumes are rewritten: these volumes, and the rows that changed in them since.
        self.rewriting: Sequence[Volume] = ()
        self.changed: set[tuple[Table, bytes]] = set()
        #: ``Metadata.durable`` at the last request for a checkpoint; owned by the commit.
        self._asked_at = -1
        self.thread = KeeperThread(hand_in)

    # --- for the commit: never waits, except for the next volume -----------------------------------

    def make_spare(self) -> None:
        """Make the next volume. ``spare`` returns it, or the error, once for each call."""
        self.thread.put(self._make_spare, urgent=True)

    def spare(self, *, wait: bool) -> Volume | StoreError | None:
        """Return the answer to ``make_spare``, None if there is none yet. The commit then leases the new database."""
        with suppress(threads.Empty):
            return self._spares.get(block=wait)
        return None

    def finish(self, sealed: Volume) -> None:
        """Flush a sealed volume's memory to a table, write its index, and end the commit's lease."""
        self.thread.put(partial(self.thread.guarded, partial(self._finish, sealed)))

    def change(self, work: PendingWrite) -> None:
        """Change rows of sealed volumes, then complete the commit."""
        self.thread.put(partial(self._change, work))

    def note_dead(self, volumes: VolumeSet, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        """Subtract rows that died just now from the live bytes of a set's sealed volumes."""
        self.thread.put(partial(self._note_dead, volumes, table, ranges))

    def checkpoint_soon(self) -> None:
        """Write the pending metadata to its database, once for all calls before that is done."""
        if self._asked_at != self._metadata.durable:
            self._asked_at = self._metadata.durable
            self.thread.put(partial(self.thread.guarded, self._metadata.checkpoint))

    # --- for the event loop and for readers: never waits -------------------------------------------

    def pin(self, max_s: float, done: Callable[[PinnedView | StoreError], object]) -> None:
        """Open a view between two commits. The keeper changes no sealed volume while the commit makes it."""
        self.thread.start(partial(self._pin, max_s), done)

    def close_view(self, view: View, done: Callable[[StoreError | None], object]) -> None:
        """Close a view that has ended and is not being read."""
        self.thread.start(partial(self._unpin, view), done)

    def checkpoint(self, done: Callable[[StoreError | None], object]) -> None:
        """Write the pending metadata to its database."""
        self.thread.put(lambda: done(self.thread.guarded(self._metadata.checkpoint)))

    def measure_soon(self, volume: Volume) -> None:
        """Measure a volume whose files were rewritten."""
        self.thread.put(volume.measure)

    def remove_files_soon(self) -> None:
        """Remove the files of volumes that no pinned set names any longer."""
        self.thread.put(self._remove_gone)

    # --- the list, and the next volume --------------------------------------------------------------

    def _make_spare(self) -> None:
        found: Volume | StoreError
        try:
            found = self._made()
        except StoreError as error:
            found = copy_of(error)
        except BaseException as raised:  # noqa: BLE001  # the commit may wait for an answer
            found = self.thread.failure(raised)
        self._spares.put(found)

    def _made(self) -> Volume:
        """Return the next volume, listed. Raises StoreError; unless the list is unknown, the call may be retried."""
        if self.thread.failed is not None:
            raise copy_of(self.thread.failed)
        number = self._listed[-1].number + 1
        volume = self._volume(number, f"{number:08d}")
        try:
            # A failed attempt may have left files, which were never listed.
            remove_volume(volume.path)
            _refuse_leftovers(volume.path)
            self._databases.acquire(volume, create=True)
            try:
                sync_directory(volume.path)
                self._write_list([*self._listed, volume])
            except BaseException:
                self._databases.release(volume)
                self._databases.discard(volume)
                raise
        except StoreUnusable as error:
            log.error("the next volume cannot be made", extra={"why": error.detail})
            detail = without_folders(error.detail)
            raise StoreError(f"the next volume cannot be made: {detail}", hint=error.hint) from error
        except OSError as error:
            raise call_failed(error, "making the next volume") from error
        return volume

    def _volume(self, number: int, name: str) -> Volume:
        return Volume(number, self._directory / name, self._options.volume_shape(packed=True))

    def successor(self, sources: Sequence[Volume]) -> Volume:
        """Return a volume to replace adjacent volumes; its folder does not exist yet."""
        again = max(int(volume.path.suffix[1:] or 0) for volume in sources) + 1
        number = sources[0].number
        # If the copy of a failed attempt could not be removed, its rows must not become part of this one: some may have
        # been removed or rolled back since.
        while (path := self._directory / f"{number:08d}.{again}").exists():
            remove_volume(path)
            again += 1
        return self._volume(number, path.name)

    def _write_list(self, volumes: Sequence[Volume]) -> None:
        """Replace the list, durably.

        Raises:
          ListUnknown: nothing that either list names is removed before the next opening, and the store has failed.
          OSError: the list is unchanged.
        """
        if self._list_unknown:
            raise StoreError("the volume list may not have been saved; the store must be reopened")
        try:
            write_list(
                self._directory,
                [Listed(each.number, each.name, each.large, each.shape.packed) for each in volumes],
            )
        except ListUnknown as error:
            self._list_unknown = True
            self.thread.failure(call_failed(error, "saving the volume list"))
            raise
        self._listed = list(volumes)

    def is_listed(self, volume: Volume) -> bool:
        """True if the list on the disk names a volume, or may name it."""
        return self._list_unknown or volume in self._listed

    def replace(self, sources: Sequence[Volume], target: Volume | None) -> Work[None]:
        """Replace adjacent volumes with ``target``, or with nothing if it is None, durably. Raises StoreError.

        Their files are removed once no reader needs them.
        """
        at = self._listed.index(sources[0])
        left = [volume for volume in self._listed if volume not in sources]
        if target is not None:
            left.insert(at, target)
        try:
            self._write_list(left)
        except OSError as error:
            raise call_failed(error, "listing the volumes") from error
        number = yield from self._replaced_in_set(sources, target)
        self._gone += [(volume, number) for volume in sources]
        self._remove_gone()

    def replace_in_memory(self, volume: Volume, target: Volume) -> Work[None]:
        """Replace the summary of a volume; its files stay."""
        self._listed[self._listed.index(volume)] = target
        yield from self._replaced_in_set([volume], target)

    def _replaced_in_set(self, sources: Sequence[Volume], target: Volume | None) -> Work[int]:
        operation = Replace(sources, target)
        try:
            yield operation
        except StoreError as error:
            # The list has changed and the set has not: nothing may be written before the store is reopened.
            raise StoreError(error.detail, hint=error.hint) from error
        if operation.number is None:
            raise StoreError("replaced volumes are not in the set")
        for volume in sources:
            self._replaced[volume] = target
            self.touched.discard(volume)
            self.damaged.discard(volume)
        if target is not None:
            # Rows may have died while it was written.
            self.touched.add(target)
            estimate_live(target, self._sets.current)
        return operation.number

    def _remove_gone(self) -> None:
        """Begin to remove the files of volumes that no reader needs any longer."""
        oldest = self._sets.oldest()
        for volume, number in [each for each in self._gone if each[1] <= oldest]:
            if self._databases.discard(volume):
                self._gone.remove((volume, number))
                if self.thread.leaving:
                    remove_volume(volume.path)
                    continue
                self.thread.begin(Running(remove_slowly(volume.path), lambda _: None))

    # --- sealed volumes -----------------------------------------------------------------------------

    def _finish(self, volume: Volume) -> None:
        try:
            with self._databases.lease(volume) as database:
                # For faster openings, and so that LevelDB removes the log, in which each batch has been synced.
                database.flush_memory()
        finally:
            self._databases.release(volume)
        if self.present(volume) is not volume:
            self._remove_gone()
            return
        volume.measure()
        self.touched.add(volume)
        self._metadata.checkpoint()
        self._databases.close_idle()
        save_index(volume)

    def is_unsent(self, volume: Volume) -> bool:
        """True if the second copy may still need the journal of a volume."""
        return self._shipper is not None and volume.journal_last >= self._shipper.unsent

    def catch_up(self, volumes: Sequence[Volume]) -> None:
        """Make the journal of volumes that are about to be removed durable in the metadata. Raises StoreError."""
        last = max(volume.journal_last for volume in volumes)
        if last > self._metadata.durable:
            self._metadata.checkpoint()
        if last > self._metadata.durable:
            raise StoreError(
                f"the metadata has the journal up to entry {self._metadata.durable}, and {last} would be lost"
            )

    def _change(self, work: PendingWrite) -> None:
        change = work.change
        assert change is not None  # the commit hands over no other work
        found = self.thread.guarded(partial(self._make_change, change))
        work.error = found if isinstance(found, StoreError) else None
        change.made = work.error is None
        assert work.on_changed is not None  # set by the queue of commits
        work.on_changed(work)

    def _make_change(self, change: SealedChange) -> None:
        # Oldest volume first: of two rows with the same key the newer hides the older, which must not reappear.
        for volume in sorted(change.removed, key=lambda each: each.number):
            self._remove(volume, change.removed[volume])
        for volume, keys, pointer in change.rolled_back:
            self._roll_back(volume, keys, pointer)

    def present(self, volume: Volume) -> Volume | None:
        """Return the volume that has the rows of ``volume`` now; None if they are all dead."""
        found: Volume | None = volume
        while found is not None and found in self._replaced:
            found = self._replaced[found]
        return found

    def _remove(self, volume: Volume, rows: Sequence[tuple[Table, bytes]]) -> None:
        present = self.present(volume)
        if present is None:
            return
        with self._leased(present) as database:
            self.before_change(present, database)
            with database.batch(sync=True) as batch:
                writes = RowWrites(present, database, batch)
                for table, key in rows:
                    writes.remove(table, key, if_readable=True)
                writes.finish()
        present.note_removed(rows)
        self.touched.add(present)
        self._note_changed(present, rows)

    def _roll_back(self, volume: Volume, keys: Sequence[bytes], pointer: int) -> None:
        present = self.present(volume)
        if present is None:
            return
        with self._leased(present) as database:
            self.before_change(present, database)
            # Read again: a row that was removed since must not be written back.
            try:
                found = [(key, database.get(Table.MESSAGE, key)) for key in keys]
            except Unreadable as error:
                raise NotChanged(error.detail, hint=error.hint) from error
            turned = list(rolled_back(((key, value) for key, value in found if value is not None), pointer))
            with database.batch(sync=True) as batch:
                writes = RowWrites(present, database, batch)
                for key, value in turned:
                    writes.replace(Table.MESSAGE, key, value)
                writes.finish()
        self._note_changed(present, [(Table.MESSAGE, key) for key, _ in turned])
        # The index has the checksums of the logs. Without it, damage to a log would undo the rollback silently.
        save_index(present)

    @contextmanager
    def _leased(self, volume: Volume) -> Iterator[Database]:
        """Lease a volume's database. Raises NotChanged: the volume is damaged."""
        with ExitStack() as stack:
            try:
                database = stack.enter_context(self._databases.lease(volume))
            except VolumeDamaged as error:
                raise NotChanged(error.detail, hint=error.hint) from error
            yield database

    def _note_changed(self, volume: Volume, rows: Sequence[tuple[Table, bytes]]) -> None:
        if volume in self.rewriting:
            self.changed.update(rows)

    def before_change(self, volume: Volume, database: Database) -> None:
        """Snapshot a sealed volume for the views that have it. No view begins before the change is made."""
        for view in self._sets.current.views:
            if view.needs_snapshot(volume):
                self._databases.acquire(volume)
                view.add_snapshot(volume, database.snapshot())

    def _note_dead(self, volumes: VolumeSet, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        for start, stop in ranges:
            for extent in volumes.index[table].overlapping(start, stop):
                extent.remove_part(start, stop)
                present = self.present(extent.volume)
                if present is not None:
                    self.touched.add(present)

    def now(self) -> VolumeReads:
        """Return reads of the current set. Only for the keeper: it alone removes files, so it needs no pin."""
        return VolumeReads(self._sets.current, self._databases)

    @property
    def volumes(self) -> VolumeSet:
        """The current set."""
        return self._sets.current

    @property
    def databases(self) -> OpenDatabases:
        """The open databases."""
        return self._databases

    # --- views ------------------------------------------------------------------------------------

    def _pin(self, max_s: float) -> Work[PinnedView]:
        operation = Pin(max_s)
        yield operation
        if operation.view is None:
            raise StoreError("the view was not made")
        return operation.view

    def _unpin(self, view: View) -> Work[None]:
        if view in self._sets.current.views:
            yield Unpin(view)
            for volume in view.close():
                self._databases.release(volume)
            self._sets.unpin(view.volumes)
            self._remove_gone()


def _refuse_leftovers(path: Path) -> None:
    """Raise OSError if the folder of an earlier attempt is still there: the new volume would begin with its files."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

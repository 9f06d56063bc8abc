"""The keeper: the one writer of sealed volumes, of the list of volumes and of the metadata's database.

Its thread (``storage.leveldb.keeper_thread``) makes the next volume, finishes sealed ones, removes and rolls back rows
in sealed volumes, tidies (``storage.leveldb.tidying``), checkpoints the metadata, opens and closes views, and removes
files that no set names any longer. Its results enter the set of volumes by an operation that it hands to the commit,
the set's only writer.

    the commit waits for the keeper only for the next volume; the keeper never waits for the commit
    while an operation of the keeper is with the commit, the keeper changes no sealed volume; it only makes next volumes
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from storage.base import StoreError
from storage.leveldb import threads
from storage.leveldb.keeper_thread import KeeperThread, Work, copy_of
from storage.leveldb.listed_volumes import ListedVolumes
from storage.leveldb.operations import PendingWrite, Pin, Unpin
from storage.leveldb.reads import VolumeReads
from storage.leveldb.sealed_rows import SealedRows
from storage.leveldb.volume import Volume, save_index

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Table
    from storage.leveldb.metadata import Metadata
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.shipping import Shipper
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume_set import Sets, View, VolumeSet


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
        hand_in: Callable[[PendingWrite], object],
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
        self._sets = sets
        self._databases = databases
        self._metadata = metadata
        #: Answers to ``make_spare``.
        self._spares: threads.Queue[Volume | StoreError] = threads.Queue()
        #: ``Metadata.durable`` at the last request for a checkpoint; owned by the commit.
        self._asked_at = -1
        self.thread = KeeperThread(hand_in)
        self.listed = ListedVolumes(directory, options, sets, databases, self.thread)
        self.sealed_rows = SealedRows(sets, databases, self.listed)

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
        self.thread.put(partial(self.sealed_rows.note_dead, volumes, table, ranges))

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
        self.thread.put(self.listed.remove_gone)

    # --- the next volume ----------------------------------------------------------------------------

    def _make_spare(self) -> None:
        found: Volume | StoreError
        try:
            found = self.listed.make_next()
        except StoreError as error:
            found = copy_of(error)
        except BaseException as raised:  # noqa: BLE001  # the commit may wait for an answer
            found = self.thread.failure(raised)
        self._spares.put(found)

    # --- sealed volumes -----------------------------------------------------------------------------

    def _finish(self, volume: Volume) -> None:
        try:
            with self._databases.lease(volume) as database:
                # For faster openings, and so that LevelDB removes the log, in which each batch has been synced.
                database.flush_memory()
        finally:
            self._databases.release(volume)
        if self.listed.present(volume) is not volume:
            self.listed.remove_gone()
            return
        volume.measure()
        self.listed.touched.add(volume)
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
        found = self.thread.guarded(partial(self.sealed_rows.change, change))
        work.error = found if isinstance(found, StoreError) else None
        change.made = work.error is None
        assert work.on_changed is not None  # set by the queue of commits
        work.on_changed(work)

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
            self.listed.remove_gone()

"""Changes to rows of sealed volumes, which the keeper's thread makes: rows are removed, rolled back, or die."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from storage.base import Unreadable, rolled_back
from storage.leveldb.keeper_thread import NotChanged
from storage.leveldb.open_databases import VolumeDamaged
from storage.leveldb.row_writes import RowWrites
from storage.leveldb.volume import Volume, note_dead, save_index

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from storage.leveldb.engine.database import Database
    from storage.leveldb.listed_volumes import ListedVolumes
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.operations import SealedChange
    from storage.leveldb.volume_set import Sets, VolumeSet


class SealedRows:
    """The rows of sealed volumes. Only the keeper's thread calls it."""

    def __init__(self, sets: Sets, databases: OpenDatabases, listed: ListedVolumes) -> None:
        self._sets = sets
        self._databases = databases
        self._listed = listed
        #: While volumes are rewritten: these volumes, and the rows that changed in them since.
        self.rewriting: Sequence[Volume] = ()
        self.changed: set[tuple[Table, bytes]] = set()

    def change(self, change: SealedChange) -> None:
        # Oldest volume first: of two rows with the same key the newer hides the older, which must not reappear.
        for volume in sorted(change.removed, key=lambda each: each.number):
            self._remove(volume, change.removed[volume])
        for volume, keys, pointer in change.rolled_back:
            self._roll_back(volume, keys, pointer)

    def _remove(self, volume: Volume, rows: Sequence[tuple[Table, bytes]]) -> None:
        present = self._listed.present(volume)
        if present is None:
            return
        with self._leased(present) as database:
            self.before_change(present, database)
            if not present.is_index_stale:
                present.mark_index_stale()
            with database.batch(sync=True) as batch:
                writes = RowWrites(present, database, batch)
                for table, key in rows:
                    writes.remove(table, key, if_readable=True)
                writes.finish()
        if self._has_dead_ranges(present, rows):
            # The bytes of a dead range are estimated by its keys. They may be most of the volume's bytes, and this row may
            # be its last one.
            present.note_uncounted(1)
        self._listed.touched.add(present)
        self._note_changed(present, rows)

    def _has_dead_ranges(self, volume: Volume, rows: Sequence[tuple[Table, bytes]]) -> bool:
        """True if an extent of one of ``rows`` has a dead range."""
        extents = {volume.extent_of(table, key): table for table, key in rows}
        dead = self._sets.current.dead
        return any(
            extent is not None and dead[table].dead_parts(extent.first, extent.last + b"\x00")
            for extent, table in extents.items()
        )

    def _roll_back(self, volume: Volume, keys: Sequence[bytes], pointer: int) -> None:
        present = self._listed.present(volume)
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

    def note_dead(self, volumes: VolumeSet, table: Table, ranges: Sequence[tuple[bytes, bytes]]) -> None:
        for volume, died in note_dead(volumes.index[table].overlapping, ranges, volumes.dead[table]).items():
            present = self._listed.present(volume)
            if present is None:
                continue
            self._listed.touched.add(present)
            if table is Table.PAYLOAD:
                present.note_uncounted(died)

"""A view of the whole store between two commits: a pinned set of volumes, and snapshots of those that changed since.

    the commit    makes the view: pins the set, takes a snapshot of the newest volume and of the metadata
    the keeper    adds a snapshot of a sealed volume before it changes the volume; closes the view at the end
    a reader      reads these snapshots; if there is none yet, takes its own, then checks again for the keeper's

If the keeper has added no snapshot by the time a reader has taken its own, the reader's was taken before any change.
"""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from storage.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from storage.leveldb.engine.database import Database, Readable, Snapshot
    from storage.leveldb.metadata import PinnedMetadata
    from storage.leveldb.volume import Volume
    from storage.leveldb.volume_set import VolumeSet


class PinnedView:
    """The store between two commits. ``reading``, ``end`` and ``renew`` are for the event loop."""

    def __init__(self, volumes: VolumeSet, metadata: PinnedMetadata, max_s: float, number: int) -> None:
        self._volumes = volumes
        self.metadata = metadata
        #: The number of the last journal entry before the view.
        self.number = number
        self._names = {volume.name for volume in volumes.all}
        #: Snapshots of the newest volume, by the commit, and of sealed ones that changed since, by the keeper.
        self._snapshots: dict[str, Snapshot] = {}
        self._ends_at_s = time.monotonic() + max_s
        self._reads = 0
        #: True once no more reads may begin. Set on the event loop, or by the thread that closes the store.
        self.ended = False
        #: True once its snapshots are closed or about to be. Set by the same thread as ``ended``.
        self.is_closed = False

    @property
    def volumes(self) -> VolumeSet:
        """The pinned set."""
        return self._volumes

    # --- for the event loop -------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True once it has ended or expired. For any thread."""
        return self.ended or time.monotonic() >= self._ends_at_s

    def renew(self, max_s: float) -> None:
        """Postpone the view's expiry to ``max_s`` from now, unless it is over."""
        if not self.is_over:
            self._ends_at_s = time.monotonic() + max_s

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep the view open until the block ends. Raises StoreError: it has ended."""
        self.refuse_if_over()
        self._reads += 1
        try:
            yield
        finally:
            self._reads -= 1

    def end(self) -> bool:
        """Start no more reads. Returns True, once, if no read is under way: the caller then has the keeper close it."""
        self.ended = True
        if self._reads or self.is_closed:
            return False
        self.is_closed = True
        return True

    # --- for the commit and the keeper --------------------------------------------------------

    def needs_snapshot(self, volume: Volume) -> bool:
        """True if a sealed volume is part of the view and has not changed since. For the keeper."""
        return volume.name in self._names and volume.name not in self._snapshots

    def add_snapshot(self, volume: Volume, snapshot: Snapshot) -> None:
        """Add a volume's snapshot. The volume's database stays leased until the view is closed."""
        self._snapshots[volume.name] = snapshot

    def close(self) -> list[Volume]:
        """Close the snapshots; return the volumes whose leases the caller must end. No reader may be inside. Idempotent."""
        self.ended = self.is_closed = True
        snapshots, self._snapshots = self._snapshots, {}
        for snapshot in snapshots.values():
            snapshot.close()
        self.metadata.close()
        return [volume for volume in self._volumes.all if volume.name in snapshots]

    # --- for readers --------------------------------------------------------------------------

    def refuse_if_over(self) -> None:
        """Raise StoreError if the view is over."""
        if self.is_over:
            raise StoreError("the view of the store has ended")

    def refuse_if_ended(self) -> None:
        """Raise StoreError if the view was closed, for example because the store was reopened."""
        if self.is_closed:
            raise StoreError("the view of the store has ended")

    @contextmanager
    def rows_of(self, volume: Volume, database: Database) -> Iterator[Readable]:
        """Yield a volume in its state at the time of the view."""
        found = self._snapshots.get(volume.name)
        if found is not None:
            yield found
            return
        with closing(database.snapshot()) as own:
            yield self._snapshots.get(volume.name, own)

"""The volumes on the list, which the keeper's thread makes, and replaces by others or by nothing.

The list is always ahead of the set: it names a volume before the set does, and drops one before the set does. So
the disk has every acknowledged commit, whenever the process ends. When an operation of the commit fails after the list
has changed, the keeper fails, and nothing is written before the store is reopened.
"""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from storage.base import StoreError, StoreUnusable
from storage.directory import sync_directory
from storage.leveldb.engine.errors import call_failed, without_folders
from storage.leveldb.keeper_thread import Running, Work, copy_of
from storage.leveldb.operations import Replace
from storage.leveldb.volume import Volume
from storage.leveldb.volume_list import Listed, ListUnknown, remove_slowly, remove_volume, write_list
from storage.leveldb.volume_set import estimate_live

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from storage.leveldb.keeper_thread import KeeperThread
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.volume_set import Sets

log = logging.getLogger(__name__)


class ListedVolumes:
    """The list on the disk, and the volumes that have left the set. Only the keeper's thread calls it."""

    def __init__(
        self, directory: Path, options: LevelDBOptions, sets: Sets, databases: OpenDatabases, thread: KeeperThread
    ) -> None:
        """Args:
        directory: the folder of the volumes.
        """
        self._directory = directory
        self._options = options
        self._sets = sets
        self._databases = databases
        self._thread = thread
        #: Every volume that has rows, and perhaps the next one.
        self._listed: list[Volume] = list(sets.current.all)
        #: The list may or may not have been written: volumes that either version names stay until the next opening.
        self._is_unknown = False
        #: Volumes with rows that died or were removed since the last check.
        self.touched: set[Volume] = set(self._listed)
        #: Volumes that tidying could not read: they are left alone until the next opening.
        self.damaged: set[Volume] = set()
        #: The replacement of each volume that has left the set; None if its rows are all dead.
        self._replaced: WeakKeyDictionary[Volume, Volume | None] = WeakKeyDictionary()
        #: Volumes that have left the set, with the number of the first set without them.
        self._gone: list[tuple[Volume, int]] = []

    def make_next(self) -> Volume:
        """Return the next volume, listed. Raises StoreError; unless the list is unknown, the call may be retried."""
        if self._thread.failed is not None:
            raise copy_of(self._thread.failed)
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
        if self._is_unknown:
            raise StoreError("the volume list may not have been saved; the store must be reopened")
        try:
            write_list(
                self._directory,
                [Listed(each.number, each.name, each.large, each.shape.packed) for each in volumes],
            )
        except ListUnknown as error:
            self._is_unknown = True
            self._thread.failure(call_failed(error, "saving the volume list"))
            raise
        self._listed = list(volumes)

    def has(self, volume: Volume) -> bool:
        """True if the list on the disk names a volume, or may name it."""
        return self._is_unknown or volume in self._listed

    def present(self, volume: Volume) -> Volume | None:
        """Return the volume that has the rows of ``volume`` now; None if they are all dead."""
        found: Volume | None = volume
        while found is not None and found in self._replaced:
            found = self._replaced[found]
        return found

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
        self.remove_gone()

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
            target.uncounted = sum(volume.uncounted for volume in sources)
        return operation.number

    def remove_gone(self) -> None:
        """Begin to remove the files of volumes that no reader needs any longer."""
        oldest = self._sets.oldest()
        for volume, number in [each for each in self._gone if each[1] <= oldest]:
            if self._databases.discard(volume):
                self._gone.remove((volume, number))
                if self._thread.leaving:
                    remove_volume(volume.path)
                    continue
                self._thread.begin(Running(remove_slowly(volume.path), lambda _: None))


def _refuse_leftovers(path: Path) -> None:
    """Raise OSError if the folder of an earlier attempt is still there: the new volume would begin with its files."""
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))

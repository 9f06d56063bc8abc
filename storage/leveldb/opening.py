"""Opens the volumes of a store: reads the list and the indexes, and replays the journal into the metadata.

Checks, in addition to LevelDB's checksums:

    a listed volume has its files          without its newer files LevelDB would open an older state
    a log begins as its index says         if the volume was closed, or sealed and finished; of the metadata, if closed
    the journal has no gap                 entries are numbered across all volumes
    the journal reaches the metadata       the metadata never has an entry that the volumes have lost
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from storage.base import StoreDamaged
from storage.directory import DAMAGED_HINT, METADATA_NAME, opening_failed, sync_directory
from storage.leveldb.engine.database import Database, Shape
from storage.leveldb.engine.manifest import check_files
from storage.leveldb.former import large_shape, lost_by_a_race
from storage.leveldb.index import DeadRanges
from storage.leveldb.volume import AFTER_JOURNAL, JOURNAL, MAX_COUNTED_BYTES, TABLES, Volume, log_sizes, save_index
from storage.leveldb.volume_list import Listed, read_list, remove_unlisted, write_list
from storage.leveldb.volume_set import VolumeSet, estimate_live

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from storage.leveldb.metadata import Metadata
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.options import LevelDBOptions


def listed_volumes(directory: Path, options: LevelDBOptions, databases: OpenDatabases, *, check: bool) -> list[Volume]:
    """Return the listed volumes, the newest last; unlisted folders are removed.

    Raises:
      StoreUnusable: one of its subclasses; nothing was changed.
    """
    metadata = directory.parent / METADATA_NAME
    try:
        listed = read_list(directory)
        if not listed:
            raise StoreDamaged(f"the list of volumes in {directory} is missing", hint=DAMAGED_HINT)
        volumes = [Volume(each.number, directory / each.folder, _shape(each, options), each.large) for each in listed]
        if check:
            for volume in volumes:
                check_files(volume.path)
        for volume in volumes:
            logs = volume.read_index(metadata, check=check)
            # If a daemon ended before it removed the index of its newest volume, the index is older than the volume.
            is_newest = volume is volumes[-1]
            volume.is_known = logs is not None and not (is_newest and logs != log_sizes(volume.path))
        databases.acquire(volumes[-1])
        databases.release(volumes[-1])
        found = lost_by_a_race(directory, listed, options)
        if found is not None:
            volumes.append(found)
            # The previous volume was written after its index, and after rows of the lost one.
            volumes[-2].forget_index()
            volumes[-2].is_known = False
            write_list(directory, listed := [*listed, Listed(found.number, found.name, packed=True)])
        # The list may not be durable yet: the previous daemon may have ended between its replacement and the sync.
        sync_directory(directory)
        remove_unlisted(directory, listed)
    except OSError as error:
        raise opening_failed(error, directory) from error
    return volumes


def _shape(listed: Listed, options: LevelDBOptions) -> Shape:
    if listed.large:
        return large_shape(options)
    return options.volume_shape(packed=listed.packed)


def first_set(volumes: Sequence[Volume], databases: OpenDatabases, metadata: Metadata, *, check: bool) -> VolumeSet:
    """Read through the volumes that have no valid index, and bring ``metadata`` up to date from the journal.

    Raises:
      StoreUnusable: one of its subclasses.
      StoreError: the journal cannot be read.
    """
    waiting: list[tuple[int, bytes]] = []
    # After an unclean end it is unknown in which volumes payloads have died since a count.
    uncounted = volumes[-1].noted_uncounted if volumes[-1].is_known else None
    read_through = set()
    for volume in volumes:
        is_newest = volume is volumes[-1]
        if not volume.is_known:
            with databases.lease(volume) as database:
                for _ in volume.look_through(database):
                    pass
            read_through.add(volume)
            # Rows of larger volumes are estimated, not counted.
            volume.is_index_stale = volume.size > MAX_COUNTED_BYTES
            if not is_newest:
                save_index(volume)
        if is_newest:
            volume.forget_index()
        volume.measure()
        if volume.journal_last > metadata.position:
            with databases.lease(volume) as database:
                start = JOURNAL + (metadata.position + 1).to_bytes(8, "big")
                waiting += [
                    (int.from_bytes(key[1:], "big"), value) for key, value in database.own_rows(start, AFTER_JOURNAL)
                ]
    if check:
        _check_journal(volumes, metadata)
    # Sorted, because after a race of an older version the entries of two volumes may alternate.
    for position, value in sorted(waiting):
        metadata.replay(position, value)
    dead: dict[Table, DeadRanges] = {}
    for table in TABLES:
        ranges = [(start, stop) for each, start, stop in metadata.dead_ranges() if each is table]
        dead[table] = DeadRanges().added(ranges)
    found = VolumeSet.of(volumes, dead)
    for volume in volumes:
        estimate_live(volume, found)
        payloads = volume.extents[Table.PAYLOAD].values()
        is_partly_dead = any(dead[Table.PAYLOAD].dead_parts(each.first, each.last + b"\x00") for each in payloads)
        # The summary of a volume that was read through includes the rows of dead ranges.
        is_unsure = is_partly_dead and (uncounted is None or volume in read_through)
        is_noted = uncounted is not None and volume.number in uncounted
        volume.uncounted = int(is_unsure or is_noted or volume.is_index_stale)
    return found


def _check_journal(volumes: Sequence[Volume], metadata: Metadata) -> None:
    """Check that no volume has lost the end of its journal. Raises StoreDamaged.

    A volume without an index was not finished before the daemon ended: its log may have been cut since.
    """
    known = [volume for volume in volumes if volume.journal_last]
    for before, after in pairwise(known):
        is_next = after.number == before.number + 1 and before.journal_first and after.journal_first
        if is_next and before.journal_last + 1 < after.journal_first:
            raise StoreDamaged(
                f"entries {before.journal_last + 1} to {after.journal_first - 1} of the journal are missing from "
                f"{before.name}",
                hint=DAMAGED_HINT,
            )
    if not known or max(volume.journal_last for volume in known) >= metadata.position:
        return
    # The metadata may be ahead only of entries that were removed with their volume. A dropped volume leaves a gap in
    # the numbers, a rewritten one has a suffix.
    later = volumes[volumes.index(known[-1]) + 1 :]
    if all(each.number == known[-1].number + at and not each.path.suffix for at, each in enumerate(later, 1)):
        raise StoreDamaged(
            f"the metadata has entry {metadata.position} of the journal, and {known[-1].name} ends before it",
            hint=DAMAGED_HINT,
        )


def make_first(directory: Path, options: LevelDBOptions, before: Sequence[Listed] = ()) -> None:
    """List a new, empty volume after ``before``. Raises StoreUnusable."""
    number = len(before) + 1
    try:
        directory.mkdir(exist_ok=True)
        remove_unlisted(directory, before)
        path = directory / f"{number:08d}"
        Database(path, options.volume_shape(packed=True), create=True).close()
        sync_directory(path)
        write_list(directory, [*before, Listed(number, path.name, packed=True)])
    except OSError as error:
        raise opening_failed(error, directory) from error

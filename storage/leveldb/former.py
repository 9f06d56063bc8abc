"""Support for directories of earlier builds after their upgrade (``storage.leveldb.upgrade``).

The database of version 0.1 has become the first volume. It may be of any size, so it is not rewritten: its dead rows
are removed in place, as that version did, except payloads, which stay until the whole database is dead. And a build
between 0.1 and 0.2 may have lost its newest volume from the list.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from storage.leveldb.engine.database import MIB, Database, Shape
from storage.leveldb.engine.errors import FOREIGN, call_failed
from storage.leveldb.engine.manifest import check_files
from storage.leveldb.index import DeadRanges, part_within
from storage.leveldb.keeper_thread import Pauses
from storage.leveldb.volume import TABLES, Extent, Extents, Volume, save_index
from storage.leveldb.volume_list import Listed, unlisted

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Table
    from storage.leveldb.keeper import Keeper
    from storage.leveldb.operations import SetChange
    from storage.leveldb.options import LevelDBOptions

log = logging.getLogger(__name__)
#: Below this live part, dead rows are removed from the database of version 0.1.
SWEEP_BELOW = 0.8
#: Rows of about this many bytes are removed before LevelDB compacts around them, in one call that blocks the keeper.
SWEPT_BYTES = 16 << 20
#: Rows that are removed with one sync.
_PIECE_ROWS = 500


# --- the database of version 0.1 ----------------------------------------------------------------------


def large_shape(options: LevelDBOptions) -> Shape:
    """Return the layout of version 0.1's database: many merged tables."""
    return Shape(
        write_buffer_bytes=8 * MIB,
        block_cache_bytes=8 * MIB,
        max_file_bytes=8 * MIB,
        bloom_bits=10,
        paranoid_checks=options.paranoid_checks,
    )


def sweep(keeper: Keeper, until_s: float) -> Generator[float | SetChange | None, None, None]:
    """Remove the dead rows of the database in place, if they are many. Stops after ``until_s``. Raises StoreError."""
    for volume in keeper.volumes.sealed:
        is_candidate = volume.large and volume not in keeper.listed.damaged
        if is_candidate and volume.live_bytes < SWEEP_BELOW * volume.row_bytes:
            yield from _sweep(keeper, volume, until_s)


def _sweep(keeper: Keeper, volume: Volume, until_s: float) -> Generator[float | SetChange | None, None, None]:
    """Remove dead rows and compact the database around them, topic by topic."""
    for table in TABLES:
        for group, extent in volume.extents[table].items():
            if time.monotonic() > until_s:
                break
            parts = keeper.volumes.dead[table].dead_parts(extent.first, extent.last + b"\x00")
            if not parts or extent.live > SWEEP_BELOW * extent.size:
                continue
            rows = max(_PIECE_ROWS, SWEPT_BYTES * extent.rows // max(1, extent.size))
            for start, stop in parts:
                while start < stop:
                    end = yield from _remove(keeper, volume, table, start, stop, rows)
                    with keeper.databases.lease(volume) as database:
                        database.compact(table, start, end)
                    yield 0.0
                    start = end
            left = _without(keeper, volume, table, group, parts)
            yield from keeper.listed.replace_in_memory(volume, left)
            volume = left
    volume.measure()
    save_index(volume)


def _without(
    keeper: Keeper, volume: Volume, table: Table, group: bytes, parts: Sequence[tuple[bytes, bytes]]
) -> Volume:
    """Return a volume's summary without ascending parts of an extent whose rows were removed durably."""
    left = replace(volume, extents={})
    for each in TABLES:
        found = {name: replace(extent, volume=left) for name, extent in volume.extents[each].items()}
        if each is table and (shrunk := _shrunk(keeper, found.pop(group), table, parts)) is not None:
            found[group] = shrunk
        left.extents[each] = Extents(found)
    return left


def _shrunk(keeper: Keeper, extent: Extent, table: Table, removed: Sequence[tuple[bytes, bytes]]) -> Extent | None:
    gone = DeadRanges().added(removed)
    parts = list(gone.live_parts(extent.first, extent.last + b"\x00"))
    if not parts:
        return None
    part = part_within(extent.first, extent.last, parts)
    # ``live`` is the better estimate of the rest, unless rows died since the removal: these still count in ``size``.
    is_all = parts == list(keeper.volumes.dead[table].live_parts(extent.first, extent.last + b"\x00"))
    size = max(1, round(extent.live if is_all else extent.size * part))
    return replace(
        extent,
        size=size,
        live=min(extent.live, float(size)),
        rows=max(1, round(extent.rows * part)),
        first=parts[0][0],
        last=min(extent.last, parts[-1][1]),
    )


def _remove(
    keeper: Keeper, volume: Volume, table: Table, start: bytes, stop: bytes, max_rows: int
) -> Generator[float, None, bytes]:
    """Remove up to ``max_rows`` rows of a range. Returns where the rest begins, or ``stop``."""
    byte, removed, end = bytes([table]), 0, start
    pauses = Pauses()
    with keeper.databases.lease(volume) as database:
        try:
            with database.rows(table, start, stop, values=False) as rows:
                every = iter(rows)
                while some := list(islice(every, min(_PIECE_ROWS, max_rows - removed))):
                    yield pauses.next()
                    removed, end = removed + len(some), some[-1][0] + b"\x00"
                    keeper.sealed_rows.before_change(volume, database)
                    # Synced each time. Of several unsynced batches a power cut can tear one that others follow, which
                    # LevelDB treats as damage. And the rows must be gone durably before the dead ranges are forgotten.
                    with database.batch(sync=True) as batch:
                        for key, _ in some:
                            batch.delete(byte + key)
        except FOREIGN as error:
            raise call_failed(error, "removing dead rows") from error
    return end if removed == max_rows else stop


# --- a volume that the list has lost ------------------------------------------------------------------


def lost_by_a_race(directory: Path, listed: Sequence[Listed], options: LevelDBOptions) -> Volume | None:
    """Return a volume after the last listed one that has rows although the list lacks it.

    Versions before 0.2 could remove the newest volume from the list if a volume was sealed while another was dropped or
    rewritten. Its number is above all listed ones; a volume that was rightly removed has a lower number.

    Raises:
      StoreUnusable: there may be such a volume, and it cannot be opened.
    """
    for path in unlisted(directory, listed):
        if path.suffix or int(path.name) <= listed[-1].number:
            continue
        if not _has_files_of_rows(path):
            continue  # a new volume that was never listed
        # Errors are raised: ``remove_unlisted`` would remove acknowledged rows that cannot be read at the moment.
        check_files(path)
        database = Database(path, options.volume_shape(packed=True), create=False)
        volume = Volume(int(path.name), path, options.volume_shape(packed=True))
        try:
            for _ in volume.look_through(database):
                pass
        finally:
            database.close()
        if volume.is_empty and not volume.journal_last:
            continue
        log.warning(
            "a volume missing from the list was added again: it has acknowledged messages",
            extra={"volume": path.name, "rows": volume.rows, "journal": volume.journal_last},
        )
        return Volume(volume.number, path, volume.shape)
    return None


def _has_files_of_rows(path: Path) -> bool:
    """True if a folder has a table, or a log that was written. Raises OSError."""
    files = list(path.iterdir())
    return any(file.suffix in (".ldb", ".sst") or (file.suffix == ".log" and file.stat().st_size) for file in files)

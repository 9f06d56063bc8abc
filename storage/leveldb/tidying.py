"""Gives space back: volumes in which all rows are dead are dropped, those that mostly are dead are rewritten.

A volume is **dead** when each of its rows is in a dead range or was removed. Dropping it is striking it off the list and
removing its folder; nothing is read or written for it, unless rows were removed one by one: then a look shows that none
is left. A volume of which more than half is dead is written anew, with its neighbours of that kind, as one: slowly,
beside everything else, and what is changed in it meanwhile is changed again in the new one. The database of version 0.1
may be of any size: its dead rows are removed in place, as that version did.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from storage.base import StoreError, StoreUnusable
from storage.directory import sync_directory
from storage.leveldb.errors import FOREIGN, call_failed, without_folders
from storage.leveldb.packs import PACKED_TABLE, RowEdits, laid_out
from storage.leveldb.volume import TABLES, Volume
from storage.leveldb.volume_list import remove_volume
from storage.loop import nap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plainsong.protocol.effects import Table
    from storage.leveldb.metadata import Metadata
    from storage.leveldb.options import LevelDBOptions
    from storage.leveldb.volumes import Volumes

log = logging.getLogger(__name__)
#: A volume with a larger part of its bytes alive is left as it is.
REWRITE_BELOW = 0.5
#: The database of version 0.1 may be too large to be written anew: dead rows are removed from it, from here on.
SWEEP_BELOW = 0.8
#: How long a step rewrites volumes, at most, before it lets the next round come; one is always finished.
MAX_STEP_S = 20.0
#: Pause after each piece, as a multiple of what it took: rewriting takes a third of a core and of the disk at most.
_PAUSE_FACTOR = 2.0
_PIECE_ROWS = 500


class Stopped(StoreError):
    """The store is being closed or opened again; nothing failed."""


@dataclass(slots=True)
class Tidied:
    """What a step did, and what is left to do."""

    removed: int = 0
    """Volumes that are gone."""
    seal: Volume | None = None
    """The newest volume, when all in it is dead: seal it, and it can go."""
    forget: list[tuple[Table, bytes, bytes]] = field(default_factory=list)
    """Dead ranges of which no volume has rows any more."""


def tidy(volumes: Volumes, metadata: Metadata, options: LevelDBOptions, between: Callable[[], None]) -> Tidied:
    """Do one step. For one thread at a time, beside the one that commits.

    Args:
      between: called between volumes and between pieces of one; ends the step by raising ``Stopped``.
    Raises:
      Stopped: the step may be repeated.
      StoreError: the store must be opened again.
    """
    tidied = Tidied()
    if volumes.unpin_overdue():
        return tidied
    for volume in [volume for volume in volumes.all[:-1] if volume in volumes.touched]:
        between()
        # Rows that die from now on have it looked at again.
        volumes.touched.discard(volume)
        if _is_readable_and_dead(volumes, volume):
            _catch_up(metadata, [volume])
            with volume.changing:
                is_gone = volumes.replace([volume], None)
            if not is_gone:
                volumes.touched.add(volume)
                return tidied
            tidied.removed += 1
    newest = volumes.newest
    if not newest.is_empty and newest in volumes.touched and _is_readable_and_dead(volumes, newest):
        tidied.seal = newest
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + MAX_STEP_S and (sources := mostly_dead(volumes, options)):
        between()
        _catch_up(metadata, sources)
        try:
            if not rewrite(volumes, sources, between):
                return tidied
        except StoreError as error:
            _leave_alone(volumes, _unreadable(volumes, sources), error)
            continue
        tidied.removed += len(sources) - 1
    for volume in volumes.all[:-1]:
        if volume.large and volume.live_bytes < SWEEP_BELOW * volume.row_bytes:
            sweep(volumes, volume, begun_s + MAX_STEP_S, between)
    for table in TABLES:
        for start, stop in volumes.dead_ranges(table):
            if not volumes.has_rows(table, start, stop):
                tidied.forget.append((table, start, stop))
    return tidied


def _is_readable_and_dead(volumes: Volumes, volume: Volume) -> bool:
    try:
        return is_dead(volumes, volume)
    except StoreError as error:
        _leave_alone(volumes, [volume], error)
        return False


def _leave_alone(volumes: Volumes, damaged: Sequence[Volume], error: StoreError) -> None:
    """Do not tidy volumes again whose rows cannot be read: they are kept for an operator, and others are tidied.

    Raises ``error`` if it is something else.
    """
    if "Corruption" not in error.detail:
        raise error
    names = [volume.path.name for volume in damaged]
    log.error("volumes are damaged and not tidied", extra={"volumes": names, "why": error.detail})
    volumes.damaged.update(damaged)


def _unreadable(volumes: Volumes, sources: Sequence[Volume]) -> list[Volume]:
    """Those of several volumes whose rows cannot be read; all of them, if each can now."""
    found = []
    for volume in sources:
        try:
            for table in TABLES:
                with volumes.rows_of([volume], table) as rows:
                    for _ in rows:
                        pass
        except (StoreError, *FOREIGN):
            found.append(volume)
    return found or list(sources)


def is_dead(volumes: Volumes, volume: Volume) -> bool:
    """Whether no row of a volume is alive. Raises StoreError."""
    for table in TABLES:
        for _, extent in volumes.extents_of(volume, table):
            parts = volumes.live_parts(table, extent)
            if not parts:
                continue
            if extent.live * extent.rows > extent.size * 0.5:
                return False
            # Of what was removed one by one, counts may be wrong.
            for start, stop in parts:
                if volumes.first_in(volume, table, start, stop) is not None:
                    return False
    return True


def mostly_dead(volumes: Volumes, options: LevelDBOptions) -> list[Volume]:
    """Neighbours to be written anew as one, the oldest first; none: there is no need."""
    found: list[Volume] = []
    live = 0.0
    for volume in volumes.all[:-1]:
        worth = (
            not volume.large and volume not in volumes.damaged and volume.live_bytes < REWRITE_BELOW * volume.row_bytes
        )
        if worth and (not found or live + volume.live_bytes <= options.volume_bytes):
            found.append(volume)
            live += volume.live_bytes
        elif found:
            break
    return found


def rewrite(volumes: Volumes, sources: Sequence[Volume], between: Callable[[], None]) -> bool:
    """Write what is alive in neighbouring volumes to one that takes their place. Raises StoreError.

    Returns:
      False: a view came meanwhile, and nothing was changed.
    """
    for volume in sources:
        with volume.changing:
            volume.changed = set()
    target = volumes.successor(sources)
    try:
        _copy(volumes, sources, target, between)
        target.look_through(_Pauses(between))
        with ExitStack() as stack:
            for volume in sources:
                stack.enter_context(volume.changing)
            if _change_again(volumes, sources, target):
                target.look_through()
            sync_directory(target.path)
            if not volumes.replace(sources, target):
                return False
    except (StoreUnusable, OSError) as error:
        log.error("volumes cannot be rewritten", extra={"why": str(error)})
        raise StoreError(f"rewriting volumes: {without_folders(str(error))}") from error
    finally:
        for volume in sources:
            volume.changed = None
        if target not in volumes.all:
            if target.database is not None:
                target.database.close()
            if not volumes.list_unknown:
                remove_volume(target.path)
    try:
        target.write_index()
    except OSError as error:
        log.warning("a volume's index was not written", extra={"volume": target.path.name, "why": str(error)})
    volumes.close_idle()
    return True


def sweep(volumes: Volumes, volume: Volume, until_s: float, between: Callable[[], None]) -> None:
    """Remove the dead rows of a volume in place, and have LevelDB merge what is left, topic by topic. Raises StoreError."""
    for table in TABLES:
        for group, extent in volumes.extents_of(volume, table):
            if time.monotonic() > until_s or volumes.views:
                return
            dead = volumes.dead_parts(table, extent)
            if not dead or extent.live > SWEEP_BELOW * extent.size:
                continue
            for start, stop in dead:
                _remove(volumes, volume, table, start, stop, between)
                with volumes.entered(volume) as database:
                    database.compact(table, start, stop)
            volumes.shrink(table, group, extent, dead)
    volume.measure()
    try:
        volume.write_index()
    except OSError as error:
        log.warning("a volume's index was not written", extra={"volume": volume.path.name, "why": str(error)})


class _Pauses:
    """Called between pieces of work: asks whether there is to be another, and pauses for a few times as long as the last took."""

    def __init__(self, between: Callable[[], None]) -> None:
        self._between = between
        self._begun_s = time.monotonic()

    def __call__(self) -> None:
        self._between()
        nap(max(0.0, time.monotonic() - self._begun_s) * _PAUSE_FACTOR)
        self._begun_s = time.monotonic()


def _remove(
    volumes: Volumes, volume: Volume, table: Table, start: bytes, stop: bytes, between: Callable[[], None]
) -> None:
    byte = bytes([table])
    pause = _Pauses(between)
    with volumes.entered(volume) as database:
        try:
            with database.rows(table, start, stop, values=False) as rows:
                every = iter(rows)
                while some := list(islice(every, _PIECE_ROWS)):
                    pause()
                    # Synced each time: of several that were not, a power cut can tear one that has others behind it, and
                    # LevelDB takes that for damage. They are durable, too, before the dead ranges are forgotten.
                    with volume.changing, database.batch(sync=True) as batch:
                        for key, _ in some:
                            batch.delete(byte + key)
        except FOREIGN as error:
            raise call_failed(error, "removing dead rows") from error


def _catch_up(metadata: Metadata, volumes: Sequence[Volume]) -> None:
    """Make durable in the metadata what the journals of volumes have, which are to go. Raises StoreError."""
    last = max(volume.journal_last for volume in volumes)
    if last > metadata.durable:
        metadata.checkpoint()
    if last > metadata.durable:
        raise StoreError(f"the metadata has the journal up to entry {metadata.durable}, and {last} would be lost")


def _copy(volumes: Volumes, sources: Sequence[Volume], target: Volume, between: Callable[[], None]) -> None:
    database = target.open(create=True)
    pause = _Pauses(between)
    for table in TABLES:
        byte = bytes([table])
        try:
            with volumes.rows_of(sources, table) as rows:
                every = iter(rows)
                while some := list(islice(every, _PIECE_ROWS)):
                    pause()
                    if table is PACKED_TABLE and target.shape.packed:
                        some = list(laid_out(some))
                    with database.batch(sync=False) as batch:
                        for key, value in some:
                            batch.put(byte + key, value)
        except FOREIGN as error:
            raise call_failed(error, "rewriting volumes") from error
    between()
    database.flush_memory()


def _change_again(volumes: Volumes, sources: Sequence[Volume], target: Volume) -> bool:
    """Repeat in the new volume what was changed in the old ones since they were copied, if anything; durable behind it."""
    changed = {row for volume in sources for row in volume.changed or ()}
    database = target.open()
    with database.batch(sync=True) as batch:
        edits = RowEdits(database, batch.put, batch.delete)
        for table, key in changed:
            value = None
            for volume in reversed(sources):
                with volumes.entered(volume) as source:
                    value = source.get(table, key)
                if value is not None:
                    break
            if table is PACKED_TABLE and target.shape.packed:
                if value is None:
                    edits.remove(key)
                else:
                    edits.put(key, value)
            elif value is None:
                batch.delete(bytes([table]) + key)
            else:
                batch.put(bytes([table]) + key, value)
        edits.finish()
    return bool(changed)

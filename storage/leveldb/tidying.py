"""Frees space: drops volumes whose rows are all dead, and rewrites volumes most of whose rows are dead.

A row is dead if it is in a dead range or was removed. Dropping a volume removes it from the list, and removes its
folder once no reader needs it. That reads and writes no rows, unless rows were removed one by one, or payloads died:
then a scan confirms that none is left.

A volume that is more than half dead is rewritten, together with neighbours that are too, as one volume. This happens
slowly, and rows that change during the copy are changed again in the new volume. How much is dead is an estimate, so
the rows are counted first: each rewrite leaves less than half, and nothing is rewritten again before more rows have
died. Of payloads there is no estimate: their volume is counted after one dead range of them, after four times as many,
and so on, and once no more have died for a while. A volume from which rows were removed one by one is counted after a
kill, and if other rows of the topic died together. The database of version 0.1 is never rewritten
(``storage.leveldb.former``).

All of this is work of the keeper's thread (``storage.leveldb.keeper``): other rows may change between two steps.
"""

from __future__ import annotations

import logging
import time
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from storage.base import StoreError, StoreUnusable, Unreadable
from storage.directory import sync_directory
from storage.leveldb.engine.errors import FOREIGN, call_failed, without_folders
from storage.leveldb.engine.packs import PACKED_TABLE, laid_out
from storage.leveldb.former import sweep
from storage.leveldb.keeper_thread import Pauses
from storage.leveldb.open_databases import VolumeDamaged
from storage.leveldb.operations import ForgetDead, Seal
from storage.leveldb.row_writes import RowWrites
from storage.leveldb.volume import QUIET_STEPS, TABLES, Extent, Volume, save_index
from storage.leveldb.volume_list import remove_volume

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from storage.leveldb.engine.database import Database
    from storage.leveldb.keeper import Keeper
    from storage.leveldb.operations import SetChange
    from storage.leveldb.options import LevelDBOptions

log = logging.getLogger(__name__)
#: A volume with a larger live part is left alone.
REWRITE_BELOW = 0.5
#: Each count after quiet steps doubles their number, up to this, so that a volume in which payloads die now and then is
#: not read through each time.
MOST_QUIET_STEPS = 128 * QUIET_STEPS
#: Factor by which more payloads have to die before the next count of a volume, which reads all of it.
COUNT_FACTOR = 4
#: Time limit for the rewrites of one step of tidying; a rewrite that has begun is always finished.
MAX_STEP_S = 20.0
#: Time within a step for counts that only payloads require. The other volumes are counted in the next steps.
COUNTING_S = 5.0
_PIECE_ROWS = 500
#: Parts between dead ranges that are searched at a time for a live row: each is a seek in the database.
_PIECE_PARTS = 100


def tidy(keeper: Keeper, options: LevelDBOptions) -> Generator[float | SetChange | None, None, int]:
    """Do one step. Returns the number of volumes that were removed.

    Raises:
      Stopped: the step may be repeated.
      StoreError: the store must be reopened.
    """
    if keeper.volumes.views:
        return 0  # the files of a dropped volume would stay until the last view ends
    removed = 0
    changed = keeper.listed.touched - keeper.listed.damaged
    for volume in [each for each in keeper.volumes.sealed if each in changed]:
        volume.quiet_steps += 1
        if keeper.is_unsent(volume):
            continue
        yield 0.0
        if (yield from _is_readable_and_dead(keeper, volume)):
            yield from _drop(keeper, volume)
            removed += 1
    newest = keeper.volumes.newest
    is_candidate = not newest.is_empty and _may_be_removed(keeper, newest)
    if is_candidate and (yield from _is_readable_and_dead(keeper, newest)):
        seal = Seal(newest)
        yield seal
        yield 0.0
        is_dead = seal.error is None and (yield from _is_readable_and_dead(keeper, newest))
        # Check again, because commits may have added to its journal before it was sealed.
        if is_dead and _may_be_removed(keeper, newest):
            yield from _drop(keeper, newest)
            removed += 1
    begun_s = time.monotonic()
    until_s = begun_s + MAX_STEP_S
    while time.monotonic() < until_s and (sources := (yield from _mostly_dead(keeper, options, begun_s + COUNTING_S))):
        try:
            keeper.catch_up(sources)
            yield from rewrite(keeper, sources)
        except StoreError as error:
            if not (isinstance(error, VolumeDamaged) or "Corruption" in error.detail):
                raise
            _leave_alone(keeper, _unreadable(keeper, sources), error)
            continue
        removed += len(sources) - 1
    yield from sweep(keeper, until_s)
    current = keeper.volumes
    forget = [
        (table, start, stop)
        for table in TABLES
        for start, stop in current.dead[table].items()
        if not current.may_have(table, start, stop, dead_too=True)
    ]
    if forget:
        yield ForgetDead(forget)
    return removed


def _may_be_removed(keeper: Keeper, volume: Volume) -> bool:
    """True unless a volume is kept for an operator, or its journal for the second copy."""
    return volume not in keeper.listed.damaged and not keeper.is_unsent(volume)


def _drop(keeper: Keeper, volume: Volume) -> Generator[float | SetChange | None, None, None]:
    keeper.catch_up([volume])
    yield from keeper.listed.replace([volume], None)


# --- what is dead ---------------------------------------------------------------------------------


def _is_readable_and_dead(keeper: Keeper, volume: Volume) -> Generator[float, None, bool]:
    # The database of version 0.1 is never counted. When a count is due, its payloads are searched instead.
    is_search_due, known = volume.large and _is_count_due(volume, inf), volume.uncounted
    try:
        alive = yield from first_live_table(keeper, volume, between_payloads=is_search_due)
    except Unreadable as error:
        # The search has changed nothing, so the store need not be reopened.
        _leave_alone(keeper, [volume], error)
        return False
    if is_search_due and alive is Table.PAYLOAD:
        _note_counted(volume, known)
    return alive is None


def _leave_alone(keeper: Keeper, damaged: Sequence[Volume], error: StoreError) -> None:
    """Exclude volumes with unreadable rows from tidying: they are kept for an operator."""
    names = [volume.name for volume in damaged]
    log.error("volumes are damaged and not tidied", extra={"volumes": names, "why": error.detail})
    keeper.listed.damaged.update(damaged)


def _unreadable(keeper: Keeper, sources: Sequence[Volume]) -> list[Volume]:
    """Return the volumes whose rows cannot be read; all of them if each can be read now."""
    found = []
    for volume in sources:
        try:
            for table in TABLES:
                with keeper.now().rows_of([volume], table) as rows:
                    for _ in rows:
                        pass
        except (StoreError, *FOREIGN):
            found.append(volume)
    return found or list(sources)


def first_live_table(
    keeper: Keeper, volume: Volume, *, between_payloads: bool = False
) -> Generator[float, None, Table | None]:
    """Return the first table that has live rows in a volume; None if all its rows are dead. Raises StoreError.

    Nothing is added to a sealed volume, so a part that was found dead stays dead during the rest of the search. Rows
    may be added to the newest volume during the search: repeat it after sealing.

    Args:
      between_payloads: search between all dead ranges for live payloads, whatever the estimate is.
    """
    current, reads = keeper.volumes, keeper.now()
    pauses, searched = Pauses(), 0
    for table in TABLES:
        for extent in volume.extents[table].values():
            parts = list(current.dead[table].live_parts(extent.first, extent.last + b"\x00"))
            if not parts:
                continue
            is_estimated = not (between_payloads and table is Table.PAYLOAD)
            if is_estimated and extent.live * extent.rows > extent.size * 0.5:
                return table
            # The counts may be wrong if rows were removed one by one.
            for start, stop in parts:
                if reads.first_in(volume, table, start, stop) is not None:
                    return table
                searched += 1
                if searched % _PIECE_PARTS == 0:
                    yield pauses.next()
    return None


def _mostly_dead(
    keeper: Keeper, options: LevelDBOptions, until_s: float
) -> Generator[float | None, None, list[Volume]]:
    """Return neighbours to rewrite as one, the oldest first; empty if there is no need."""
    found: list[Volume] = []
    live = 0.0
    current = keeper.volumes
    # First make the changes that were handed over before this set was current: they were meant for rows of one volume,
    # and must not meet newer rows with the same keys in a merged one.
    yield None
    for volume in current.sealed:
        worth = volume in keeper.listed.touched and not volume.large and _may_be_removed(keeper, volume)
        worth = worth and (yield from _is_mostly_dead(keeper, volume, until_s))
        if worth and (not found or live + volume.live_bytes <= options.settings.volume_bytes):
            found.append(volume)
            live += volume.live_bytes
        elif found:
            break
    return found


def _is_mostly_dead(keeper: Keeper, volume: Volume, until_s: float) -> Generator[float, None, bool]:
    """True if most bytes of a volume are dead. Counts them if the estimate says so, or cannot tell."""
    # Before the count, so that rows that die during it cause another check.
    keeper.listed.touched.discard(volume)
    if volume.live_bytes < REWRITE_BELOW * volume.row_bytes or _is_count_due(volume, until_s):
        try:
            yield from _count_live(keeper, volume)
        except Unreadable as error:
            _leave_alone(keeper, [volume], error)
            return False
    is_mostly_dead = volume.live_bytes < REWRITE_BELOW * volume.row_bytes
    if is_mostly_dead or volume.uncounted:
        keeper.listed.touched.add(volume)
    return is_mostly_dead


def _is_count_due(volume: Volume, until_s: float) -> bool:
    """True if the estimate of the live bytes may be wrong and a count is due; False after ``until_s``."""
    is_due = volume.uncounted >= volume.count_at or volume.quiet_steps > volume.count_after_steps
    return volume.uncounted > 0 and is_due and time.monotonic() < until_s


def _count_live(keeper: Keeper, volume: Volume) -> Generator[float, None, None]:
    """Count the live bytes of a volume. Raises StoreError."""
    known = volume.uncounted
    try:
        for table in TABLES:
            yield from _count_live_rows(keeper, volume, table)
    except FOREIGN as error:
        raise call_failed(error, "counting rows") from error
    _note_counted(volume, known)
    was_stale, volume.is_index_stale = volume.is_index_stale, False
    # Saved, because a clean stop lists only the volumes that still have to be counted. Not saved if the keeper failed
    # during the count: the index would have the checksum of a log whose end may not be durable.
    if keeper.thread.failed is not None or not save_index(volume):
        volume.is_index_stale = was_stale
        volume.uncounted += max(1, known)
        volume.quiet_steps = 0


def _note_counted(volume: Volume, known: int) -> None:
    """Note that ``known`` changes need no further count, and when the next one is due."""
    volume.uncounted -= known
    if known >= volume.count_at:
        volume.count_at = COUNT_FACTOR * known
    elif known and volume.quiet_steps > volume.count_after_steps:
        volume.count_after_steps = min(2 * volume.count_after_steps, MOST_QUIET_STEPS)


def _count_live_rows(keeper: Keeper, volume: Volume, table: Table) -> Generator[float, None, None]:
    counted: dict[Extent, int] = dict.fromkeys(volume.extents[table].values(), 0)
    pauses = Pauses()
    with keeper.now().rows_of([volume], table) as rows:
        every = iter(rows)
        while some := list(islice(every, _PIECE_ROWS)):
            for key, value in some:
                found = volume.extent_of(table, key)
                if found is not None:
                    if not counted[found]:
                        # Rows that were removed before this moment are not counted, so they must not be subtracted.
                        found.removed, found.survived = 0, 1.0
                    counted[found] += len(key) + len(value)
            yield pauses.next()
    for extent, size in counted.items():
        extent.live = max(0, size - extent.removed) * extent.survived


# --- rewriting --------------------------------------------------------------------------------------


def rewrite(keeper: Keeper, sources: Sequence[Volume]) -> Generator[float | SetChange | None, None, None]:
    """Copy the live rows of neighbouring volumes to one that replaces them. Raises StoreError."""
    keeper.sealed_rows.rewriting, keeper.sealed_rows.changed = sources, set()
    target = keeper.listed.successor(sources)
    is_leased = False
    try:
        database = keeper.databases.acquire(target, create=True)
        is_leased = True
        yield from _copy(keeper, sources, target, database)
        yield from _pausing(target.look_through(database))
        # From here on nothing else changes the sources: there is no pause until the set names the target.
        if _change_again(keeper, sources, target, database):
            for _ in target.look_through(database):
                pass
        if target.is_unread:
            raise Unreadable("Corruption: the copied rows cannot be read back")
        sync_directory(target.path)
        placed = None if target.is_empty else target
        yield from keeper.listed.replace(sources, placed)
    except (StoreUnusable, OSError) as error:
        log.error("volumes cannot be rewritten", extra={"why": str(error)})
        raise StoreError(f"rewriting volumes: {without_folders(str(error))}") from error
    finally:
        keeper.sealed_rows.rewriting = ()
        if is_leased:
            keeper.databases.release(target)
        if target not in keeper.volumes.sealed and not keeper.listed.has(target):
            keeper.databases.discard(target)
            remove_volume(target.path)
    if placed is not None:
        save_index(target)
    keeper.databases.close_idle()


def _copy(
    keeper: Keeper, sources: Sequence[Volume], target: Volume, database: Database
) -> Generator[float, None, None]:
    pauses = Pauses()
    for table in TABLES:
        byte = bytes([table])
        try:
            with keeper.now().rows_of(sources, table) as rows:
                every = iter(rows)
                while some := list(islice(every, _PIECE_ROWS)):
                    yield pauses.next()
                    if table is PACKED_TABLE and target.shape.packed:
                        some = list(laid_out(some))
                    with database.batch(sync=False) as batch:
                        for key, value in some:
                            batch.put(byte + key, value)
        except FOREIGN as error:
            raise call_failed(error, "rewriting volumes") from error
    yield 0.0
    database.flush_memory()


def _change_again(keeper: Keeper, sources: Sequence[Volume], target: Volume, database: Database) -> bool:
    """Repeat in the target, durably, the changes made to the sources since the copy. Returns True if there were any.

    The batch is written even if it is empty: it fails if the copied rows are not in a synced table.
    """
    with database.batch(sync=True) as batch:
        writes = RowWrites(target, database, batch)
        for table, key in sorted(keeper.sealed_rows.changed):
            value = None
            for volume in reversed(sources):
                with keeper.databases.lease(volume) as source:
                    value = source.get(table, key)
                if value is not None:
                    break
            if value is None:
                writes.remove(table, key)
            else:
                writes.replace(table, key, value)
        writes.finish()
    return bool(keeper.sealed_rows.changed)


def _pausing(steps: Iterable[None]) -> Iterator[float]:
    pauses = Pauses()
    for _ in steps:
        yield pauses.next()

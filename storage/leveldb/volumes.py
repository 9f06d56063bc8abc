"""The volumes of a store: which is written, where a row is, and a scan over all of them.

Rows of a topic stand in the order of their ids, so mostly one volume's follow the other's, and a scan reads them one
after the other. Where volumes overlap (a payload stored late, a topic removed and copied back) their rows are merged;
of two with one key the newer volume's counts.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from storage.base import StoreDamaged, StoreError, StoreUnusable, Unreadable, chunks_of_runs, rolled_back
from storage.directory import DAMAGED_HINT, opening_failed, sync_directory
from storage.leveldb.compression import Stretch, is_worth_it
from storage.leveldb.database import Database, Shape
from storage.leveldb.errors import FOREIGN, call_failed, without_folders
from storage.leveldb.index import DeadRanges, Index, live_part
from storage.leveldb.manifest import check_files
from storage.leveldb.packs import RowEdits, is_of_topic
from storage.leveldb.view import PinnedView
from storage.leveldb.volume import AFTER_JOURNAL, JOURNAL, TABLES, Extent, Volume, runs_of
from storage.leveldb.volume_list import (
    Listed,
    ListUnknown,
    read_list,
    remove_beside_others,
    remove_unlisted,
    remove_volume,
    write_list,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Put
    from storage.base import Row
    from storage.leveldb.database import Readable, Snapshot
    from storage.leveldb.metadata import Metadata
    from storage.leveldb.options import LevelDBOptions

log = logging.getLogger(__name__)
#: The next volume is made when the newest is full to this part.
PREPARE_AT = 0.6
#: What a row takes in LevelDB's memory besides what it takes in the log.
MEMORY_ROW_BYTES = 36


#: From so many keys on, it is worth a look whether all of them are in one extent.
_MANY_KEYS = 8
#: Rows between a dead range and one that LevelDB cannot step over: those of a block, which has some KiB.
MAX_REST_ROWS = 10_000


class VolumeRange(NamedTuple):
    """Rows of a table in a volume: ``[start, stop)``."""

    start: bytes
    stop: bytes
    volume: Volume
    packed: bool
    """Whether some may be in packs."""
    largest: int
    """See ``Extent``."""


class Volumes:
    """The set. One thread writes the newest volume; any thread reads, and changes rows of sealed ones."""

    def __init__(self, directory: Path, options: LevelDBOptions, *, check: bool = True) -> None:
        """Use ``open``."""
        self._directory = directory
        self._options = options
        self._check = check
        self._lock = threading.Lock()
        self._listing = threading.Lock()
        self._uses = 0
        self._index = {table: Index() for table in TABLES}
        self.dead = {table: DeadRanges() for table in TABLES}
        self.all: list[Volume] = []
        self._spare: Volume | None = None
        self.list_unknown = False
        """A new list was perhaps not durable. The next opening removes what the list does not name; until then nobody."""
        #: Volumes of which rows have died.
        self.touched: set[Volume] = set()
        #: Volumes of which tidying could not read the rows: it leaves them alone until the next opening.
        self.damaged: set[Volume] = set()
        #: Views of the whole store: meanwhile no volume goes.
        self.views: list[PinnedView] = []
        #: Whether they are about to be closed.
        self.leaving = False

    # --- opening and closing -------------------------------------------------------------------

    @classmethod
    def open(cls, directory: Path, options: LevelDBOptions, *, check: bool = True) -> Volumes:
        """Open the set in ``directory``; ``catch_up`` comes before anything else.

        Raises:
          StoreUnusable: one of its kinds; nothing was changed.
        """
        volumes = cls(directory, options, check=check)
        listed = read_list(directory)
        if not listed:
            raise StoreDamaged(f"the list of volumes in {directory} is missing", hint=DAMAGED_HINT)
        for each in listed:
            volume = Volume(each.number, directory / each.folder, volumes._shape(each), large=each.large)
            if check:
                check_files(volume.path)
            volumes.all.append(volume)
        volumes.newest.open(check=False)
        try:
            remove_unlisted(directory, listed)
        except OSError as error:
            volumes.close()
            raise opening_failed(error, directory) from error
        return volumes

    def catch_up(self, metadata: Metadata) -> None:
        """Learn what is in each volume, and bring ``metadata`` up to date from the journal.

        Raises:
          StoreUnusable: one of its kinds.
          StoreError: the journal cannot be read.
        """
        for volume in self.all:
            is_newest = volume is self.newest
            if not volume.read_index():
                volume.open(check=self._check)
                volume.look_through()
                if not is_newest:
                    volume.write_index()
            if is_newest:
                volume.forget_index()
            volume.measure()
            for table in TABLES:
                for group, extent in volume.extents[table].items():
                    self._index[table].add(group, extent)
            if volume.journal_last > metadata.position:
                start = JOURNAL + _number(metadata.position + 1)
                for key, value in volume.open(check=self._check).own_rows(start, AFTER_JOURNAL):
                    metadata.replay(int.from_bytes(key[1:], "big"), value)
            self.close_idle()
        for table, start, stop in metadata.dead_ranges():
            self.mark_dead(table, start, stop)
        self.touched.update(self.all)

    def _shape(self, listed: Listed) -> Shape:
        if listed.large:
            return self._options.large_shape
        return self._options.volume_shape(compressed=listed.compressed, packed=listed.packed)

    @property
    def newest(self) -> Volume:
        """The one that is written."""
        return self.all[-1]

    @property
    def open_count(self) -> int:
        """How many are open."""
        return sum(volume.database is not None for volume in list(self.all))

    def bytes_on_disk(self) -> int:
        """The sizes of their files."""
        self.newest.measure()
        return sum(volume.size for volume in list(self.all))

    def close(self) -> None:
        """Close all of them, and end the views; no other thread may be inside."""
        for view in list(self.views):
            self.unpin(view)
        for volume in [*self.all, *([self._spare] if self._spare is not None else [])]:
            if volume.database is not None:
                volume.database.close()
                volume.database = None

    @contextmanager
    def entered(self, volume: Volume) -> Iterator[Database]:
        """A volume's database, open until the block ends. Raises StoreError."""
        with self._lock:
            volume.inside += 1
            self._uses += 1
            volume.used = self._uses
            database = volume.database
        try:
            if database is None:
                database = self._open_again(volume)
                self.close_idle()
            yield database
        finally:
            with self._lock:
                volume.inside -= 1

    def _open_again(self, volume: Volume) -> Database:
        with volume.opening:
            try:
                return volume.open(check=self._check)
            except StoreUnusable as error:
                log.error("a volume cannot be opened", extra={"volume": volume.path.name, "why": error.detail})
                raise StoreError(f"volume {volume.path.name} cannot be opened", hint=error.hint) from error

    @contextmanager
    def _entered_at(self, volume: Volume, view: PinnedView | None) -> Iterator[Readable]:
        """A volume as it is, or as it was in a view."""
        with self.entered(volume) as database, ExitStack() as stack:
            if view is None:
                yield database
                return
            with volume.changing:
                found = view.volumes[volume]
                if found is None:
                    # It has not changed since; it may do so while it is read.
                    found = stack.enter_context(closing(database.snapshot()))
            yield found

    def close_idle(self) -> None:
        """Close sealed volumes, the longest unused first, until no more are open than allowed."""
        while True:
            with self._lock:
                is_open = [volume for volume in self.all if volume.database is not None and volume is not self.newest]
                idle = [volume for volume in is_open if not volume.inside and not volume.snapshots]
                if len(is_open) < self._options.max_open_volumes or not idle:
                    return
                volume = min(idle, key=lambda each: each.used)
                if not volume.opening.acquire(blocking=False):
                    return
                database, volume.database = volume.database, None
            try:
                if database is not None:
                    database.close()
            finally:
                volume.opening.release()

    # --- reading -------------------------------------------------------------------------------

    def get(self, table: Table, key: bytes, view: PinnedView | None = None) -> bytes | None:
        """A row's value, None if there is none. Raises StoreError."""
        with self._pinned(table, key, key + b"\x00", view) as spans:
            for span in sorted(spans, key=lambda span: -span.volume.number):
                with self._entered_at(span.volume, view) as database:
                    value = database.get(table, key, packed=span.packed)
                if value is not None:
                    return value
        return None

    def may_have(self, table: Table, start: bytes, stop: bytes) -> bool:
        """Whether there may be rows in a range, told without the disk."""
        with self._lock:
            return any(True for _ in self._spans(table, start, stop))

    @contextmanager
    def chunks(
        self,
        table: Table,
        start: bytes,
        stop: bytes,
        first_chunk: int,
        *,
        reverse: bool = False,
        values: bool = True,
        cache: bool = False,
        view: PinnedView | None = None,
    ) -> Iterator[Iterator[Sequence[Row]]]:
        """The rows of ``[start, stop)``, now or in a view, as lists: see ``storage.base.chunks``.

        Iterating raises plyvel's errors, and StoreError.
        """
        with self._pinned(table, start, stop, view) as spans:
            runs = self._runs(table, _clusters(spans, reverse=reverse), reverse, values, cache, view, first_chunk)
            with closing(runs):
                yield chunks_of_runs(runs, first_chunk)

    def _runs(
        self,
        table: Table,
        clusters: Iterable[list[VolumeRange]],
        reverse: bool,
        values: bool,
        cache: bool,
        view: PinnedView | None,
        first: int = 0,
    ) -> Generator[Iterable[Row], None, None]:
        for cluster in clusters:
            with ExitStack() as stack:
                rows: list[Iterable[Row]] = []
                for span in sorted(cluster, key=lambda span: -span.volume.number):
                    database = stack.enter_context(self._entered_at(span.volume, view))
                    stop, last = span.stop, None
                    if reverse and self._borders_dead(table, span, view, reverse=False):
                        # On the way down LevelDB begins with the row behind, which may be one that cannot be read.
                        last = _last_before(database, table, span, values=values)
                        stop = span.stop if last is None else last[0]
                    options = {"reverse": reverse, "values": values, "cache": cache, "packed": span.packed}
                    found = database.rows(table, span.start, stop, **options, wanted=first, largest=span.largest)
                    each = stack.enter_context(found)
                    if self._borders_dead(table, span, view, reverse=reverse):
                        rest = partial(_few_rows, database, table, span.start, values=values) if reverse else None
                        each = _up_to_dead(each, span.stop, rest)
                    each = each if last is None else chain((last,), each)
                    rows.append(each)
                yield rows[0] if len(rows) == 1 else _newest_of(rows, reverse=reverse)

    def _borders_dead(self, table: Table, span: VolumeRange, view: PinnedView | None, *, reverse: bool) -> bool:
        """Whether a span ends, in the direction in which it is read, where a dead range begins."""
        with self._lock:
            dead = self.dead[table] if view is None else view.dead[table]
            places, place = (dead.stops, span.start) if reverse else (dead.starts, span.stop)
            at = bisect_left(places, place)
            return at < len(places) and places[at] == place

    def first_in(self, volume: Volume, table: Table, start: bytes, stop: bytes) -> bytes | None:
        """The first key of a range in one volume, dead or not."""
        with self.entered(volume) as database:
            try:
                with database.rows(table, start, stop, values=False) as rows:
                    row = next(iter(rows), None)
            except FOREIGN as error:
                raise call_failed(error, "scanning") from error
        return None if row is None else row[0]

    @contextmanager
    def _pinned(self, table: Table, start: bytes, stop: bytes, view: PinnedView | None) -> Iterator[list[VolumeRange]]:
        """The spans of a range; their volumes keep their files until the block ends."""
        with self._lock:
            spans = list(self._spans(table, start, stop, view))
            for span in spans:
                span.volume.pins += 1
        try:
            yield spans
        finally:
            with self._lock:
                for span in spans:
                    span.volume.pins -= 1
                left = {span.volume for span in spans if span.volume.gone and not span.volume.pins}
            for volume in left:
                self._remove_files(volume)

    @contextmanager
    def kept(self, volume: Volume) -> Iterator[Database]:
        """A volume's database, whose files stay until the block ends."""
        try:
            with self.entered(volume) as database:
                yield database
        finally:
            with self._lock:
                volume.pins -= 1
                left = volume.gone and not volume.pins
            if left:
                self._remove_files(volume)

    def _spans(self, table: Table, start: bytes, stop: bytes, view: PinnedView | None = None) -> Iterator[VolumeRange]:
        if start >= stop:
            return
        dead = self.dead[table] if view is None else view.dead[table]
        for extent in self._index[table].overlapping(start, stop):
            if view is not None and extent.volume not in view.volumes:
                continue
            low, high = max(start, extent.first), min(stop, extent.last + b"\x00")
            for first, end in dead.live_parts(low, high):
                yield VolumeRange(first, end, extent.volume, extent.packed, extent.largest)

    @contextmanager
    def rows_of(self, volumes: Sequence[Volume], table: Table) -> Iterator[Iterable[Row]]:
        """The live rows of some volumes alone; iterating raises plyvel's errors, and StoreError."""
        with self._lock:
            ranges = [
                VolumeRange(first, stop, volume, extent.packed, extent.largest)
                for volume in volumes
                for extent in volume.extents[table].values()
                for first, stop in self.dead[table].live_parts(extent.first, extent.last + b"\x00")
            ]
        runs = self._runs(table, _clusters(ranges, reverse=False), False, True, False, None)
        with closing(runs):
            yield chain.from_iterable(runs)

    def extents_of(self, volume: Volume, table: Table) -> list[tuple[bytes, Extent]]:
        """The extents of a volume now, with their groups; the thread that commits may add others meanwhile."""
        with self._lock:
            return list(volume.extents[table].items())

    def dead_ranges(self, table: Table) -> list[tuple[bytes, bytes]]:
        """The dead ranges of a table now."""
        with self._lock:
            return self.dead[table].items()

    def live_parts(self, table: Table, extent: Extent) -> list[tuple[bytes, bytes]]:
        """The parts of an extent that are in no dead range."""
        with self._lock:
            return list(self.dead[table].live_parts(extent.first, extent.last + b"\x00"))

    def dead_parts(self, table: Table, extent: Extent) -> list[tuple[bytes, bytes]]:
        """The parts of an extent that are in dead ranges."""
        found: list[tuple[bytes, bytes]] = []
        at = extent.first
        for start, stop in self.live_parts(table, extent):
            if at < start:
                found.append((at, start))
            at = stop
        if at <= extent.last:
            found.append((at, extent.last + b"\x00"))
        return found

    def shrink(self, table: Table, group: bytes, extent: Extent, removed: Sequence[tuple[bytes, bytes]]) -> None:
        """Note that the rows of some parts of an extent were removed, durably; ascending, as of ``dead_parts``."""
        with self._lock:
            ranges = DeadRanges([start for start, _ in removed], [stop for _, stop in removed])
            parts = list(ranges.live_parts(extent.first, extent.last + b"\x00"))
            if not parts:
                self._index[table].remove(extent.volume, [group])
                del extent.volume.extents[table][group]
                return
            part = live_part(extent, parts)
            # What has died since is still there; without such rows it is known better what is left.
            is_all = parts == list(self.dead[table].live_parts(extent.first, extent.last + b"\x00"))
            extent.size = max(1, round(extent.live if is_all else extent.size * part))
            extent.rows = max(1, round(extent.rows * part))
            extent.first, extent.last = parts[0][0], min(extent.last, parts[-1][1])

    def places(self, table: Table, key: bytes) -> list[Volume]:
        """The volumes that may have a row, ascending."""
        with self._lock:
            found = {
                extent.volume.number: extent.volume for extent in self._index[table].overlapping(key, key + b"\x00")
            }
        return [found[number] for number in sorted(found)]

    def places_of_each(self, table: Table, keys: Sequence[bytes]) -> list[list[Volume]]:
        """``places`` of each key; of rows that one volume has of one group, as cleaning removes them, by one look."""
        with self._lock:
            only = self._only_extent(table, keys)
            if only is not None:
                here: list[Volume] = [only.volume]
                return [here if only.first <= key <= only.last else [] for key in keys]
        return [self.places(table, key) for key in keys]

    def _only_extent(self, table: Table, keys: Sequence[bytes]) -> Extent | None:
        """The extent that alone may have any of these rows; None: there are several, or none."""
        if len(keys) < _MANY_KEYS:
            return None
        found = list(islice(self._index[table].overlapping(min(keys), max(keys) + b"\x00"), 2))
        return found[0] if len(found) == 1 else None

    # --- writing -------------------------------------------------------------------------------

    def may_pack(self, put: Put) -> bool:
        """Whether the newest volume may have these rows as packs: they are a topic's, and it has none between them."""
        first, last = put.prefix + put.suffixes[0], put.prefix + put.suffixes[-1]
        if len(put.suffixes[0]) != POSITION_BYTES or not is_of_topic(first):
            return False
        with self._lock:
            found = self._index[put.table].overlapping(first, last + b"\x00")
            return all(extent.volume is not self.newest for extent in found)

    def note(self, put: Put, *, packs: Sequence[Row] | None = None, packed: bool = False) -> None:
        """Add rows to what is known of the newest volume, before they are written to it.

        Args:
          packs: what is written of them.
          packed: whether some may be in packs.
        """
        volume = self.newest
        extents = volume.extents[put.table]
        with self._lock:
            if packs is not None:
                volume.memory_bytes += sum(len(key) + len(value) + MEMORY_ROW_BYTES for key, value in packs)
            volume.has_packs |= packed
            largest = max(map(len, put.values), default=0) if packs is None else 0
            for group, first, last, rows, size in runs_of(put):
                if packs is None:
                    volume.memory_bytes += size + rows * MEMORY_ROW_BYTES
                extent = extents.get(group)
                if extent is None:
                    extents[group] = extent = Extent(volume, first, last, rows, size, size, packed, largest)
                    self._index[put.table].add(group, extent)
                    continue
                extent.packed |= packed
                if extent.largest:
                    extent.largest = max(extent.largest, largest)
                extent.first, extent.last = min(extent.first, first), max(extent.last, last)
                extent.rows += rows
                extent.size += size
                extent.live += size

    def remove_in(self, volume: Volume, rows: Sequence[tuple[Table, bytes]]) -> bool:
        """Remove rows in a sealed volume, durably; False: it is in the set no more, nothing was done."""
        with volume.changing:
            if volume.gone:
                return False
            with self.entered(volume) as database:
                self._before_change(volume, database)
                with database.batch(sync=True) as batch:
                    edits = RowEdits(database, batch.put, batch.delete)
                    for table, key in rows:
                        if volume.may_be_packed(table, key):
                            remove_packed(edits, key)
                        else:
                            batch.delete(bytes([table]) + key)
                    edits.finish()
            self._note_changed(volume, rows)
        self.note_removed(volume, rows)
        return True

    def note_removed(self, volume: Volume, rows: Iterable[tuple[Table, bytes]]) -> None:
        """Subtract removed rows from what is alive in a volume."""
        keys: dict[Table, list[bytes]] = {}
        for table, key in rows:
            keys.setdefault(table, []).append(key)
        with self._lock:
            for table, removed in keys.items():
                only = self._only_extent(table, removed)
                if only is not None:
                    if only.volume is volume:
                        count = sum(only.first <= key <= only.last for key in removed)
                        only.live = max(0.0, only.live - count * (only.size / only.rows))
                    continue
                for key in removed:
                    for extent in self._index[table].overlapping(key, key + b"\x00"):
                        if extent.volume is volume:
                            extent.live = max(0.0, extent.live - extent.size / extent.rows)
            self.touched.add(volume)

    def roll_back_in(self, volume: Volume, keys: Sequence[bytes], pointer: int) -> bool:
        """Roll back messages of a sealed volume, durably; False: it is in the set no more, nothing was done."""
        with volume.changing:
            if volume.gone:
                return False
            with self.entered(volume) as database:
                self._before_change(volume, database)
                # Read again: a row that was removed meanwhile must not come back.
                found = ((key, database.get(Table.MESSAGE, key)) for key in keys)
                turned = list(rolled_back(((key, value) for key, value in found if value is not None), pointer))
                with database.batch(sync=True) as batch:
                    edits = RowEdits(database, batch.put, batch.delete)
                    for key, value in turned:
                        if volume.may_be_packed(Table.MESSAGE, key):
                            edits.put(key, value)
                        else:
                            batch.put(bytes([Table.MESSAGE]) + key, value)
                    edits.finish()
            self._note_changed(volume, [(Table.MESSAGE, key) for key, _ in turned])
        return True

    def _before_change(self, volume: Volume, database: Database) -> None:
        """Keep a sealed volume as it is for the views that have it."""
        with self._lock:
            for view in self.views:
                if view.volumes.get(volume, view.metadata) is None:
                    view.volumes[volume] = database.snapshot()
                    volume.snapshots += 1

    def _note_changed(self, volume: Volume, rows: Iterable[tuple[Table, bytes]]) -> None:
        if volume.changed is not None:
            volume.changed.update(rows)

    # --- what is dead --------------------------------------------------------------------------

    def mark_dead(self, table: Table, start: bytes, stop: bytes) -> None:
        """Take all rows of a range for dead, from now on."""
        with self._lock:
            dead = self.dead[table]
            dead.add(start, stop)
            for extent in self._index[table].overlapping(start, stop):
                self._estimate(table, extent)
                self.touched.add(extent.volume)

    def _estimate(self, table: Table, extent: Extent) -> None:
        parts = list(self.dead[table].live_parts(extent.first, extent.last + b"\x00"))
        extent.live = min(extent.live, extent.size * live_part(extent, parts))

    def rows_in(self, table: Table, start: bytes, stop: bytes) -> int:
        """Live rows in a range, as far as it is known without reading them: exact for extents that lie within."""
        rows = 0.0
        with self._lock:
            for extent in self._index[table].overlapping(start, stop):
                low, high = max(start, extent.first), min(stop, extent.last + b"\x00")
                rows += extent.rows * live_part(extent, list(self.dead[table].live_parts(low, high)))
        return round(rows)

    def has_rows(self, table: Table, start: bytes, stop: bytes) -> bool:
        """Whether any volume may have rows of a range, dead or alive."""
        with self._lock:
            return any(True for _ in self._index[table].overlapping(start, stop))

    def forget_dead(self, table: Table, start: bytes, stop: bytes) -> bool:
        """Forget a dead range, if it is one and no volume has rows in it; whether it was forgotten."""
        with self._lock:
            dead = self.dead[table]
            known = dead.joined(start, start)[:2] == (start, stop)
            if not known or any(True for _ in self._index[table].overlapping(start, stop)):
                return False
            dead.remove(start)
        return True

    def compact(self, table: Table, start: bytes, stop: bytes) -> None:
        """Rewrite the files of a range without the rows that were removed. Raises StoreError."""
        with self._lock:
            found = {extent.volume for extent in self._index[table].overlapping(start, stop)}
        for volume in sorted(found, key=lambda each: each.number):
            with volume.changing:
                if volume.gone:
                    continue
                with self.entered(volume) as database:
                    database.compact(table, start, stop)
            volume.measure()

    # --- views ---------------------------------------------------------------------------------

    def pin(self, metadata: Snapshot, max_s: float) -> PinnedView:
        """A view of what is there, for the thread that commits."""
        with self._listing, self._lock:
            volumes: dict[Volume, Snapshot | None] = dict.fromkeys(self.all)
            volumes[self.newest] = self.newest.open().snapshot()
            self.newest.snapshots += 1
            dead = {table: DeadRanges(list(ranges.starts), list(ranges.stops)) for table, ranges in self.dead.items()}
            view = PinnedView(metadata, volumes, dead, max_s)
            self.views.append(view)
        return view

    def unpin(self, view: PinnedView) -> None:
        """Let go of a view that nobody reads any more; else it goes with a later call, or when volumes are tidied."""
        with self._lock:
            if view not in self.views or not view.end():
                return
            self.views.remove(view)
            for volume, snapshot in view.volumes.items():
                if snapshot is not None:
                    volume.snapshots -= 1
                    snapshot.close()
            view.metadata.close()

    def unpin_overdue(self) -> bool:
        """Let go of the views whose time is over; whether any is left."""
        for view in list(self.views):
            if view.is_over:
                self.unpin(view)
        return bool(self.views)

    # --- a new one, and those that go ----------------------------------------------------------

    @property
    def is_filling(self) -> bool:
        """Whether the newest is so full that the next should be made."""
        return self._spare is None and self.newest.memory_bytes >= PREPARE_AT * self._options.volume_bytes

    @property
    def is_full(self) -> bool:
        """Whether the newest should be sealed."""
        return self.newest.memory_bytes >= self._options.volume_bytes

    def is_full_within(self, more_bytes: int) -> bool:
        """Whether the newest may have to be sealed once it has so many bytes more in memory."""
        return self.newest.memory_bytes + more_bytes >= self._options.volume_bytes

    def prepare(self) -> None:
        """Make the next volume, so that it can be written at once. Raises StoreError."""
        with self._listing:
            if self._spare is not None:
                return
            self._refuse_if_list_unknown()
            number = self.newest.number + 1
            listed = Listed(number, f"{number:08d}", compressed=self._compress_next(), packed=True)
            volume = Volume(listed.number, self._directory / listed.folder, self._shape(listed))
            try:
                # What a crash has left of an attempt was never listed.
                remove_volume(volume.path)
                volume.open(create=True)
                sync_directory(volume.path)
                self._write_list([*self.all, volume])
            except StoreUnusable as error:
                log.error("the next volume cannot be made", extra={"why": error.detail})
                detail = without_folders(error.detail)
                raise StoreError(f"the next volume cannot be made: {detail}", hint=error.hint) from error
            except OSError as error:
                raise call_failed(error, "making the next volume") from error
            else:
                self._spare = volume
            finally:
                if self._spare is None and volume.database is not None:
                    # Else LevelDB's lock in this process would refuse the folder to a later attempt.
                    volume.database.close()

    def _compress_next(self) -> bool:
        """Whether the next volume is to be compressed."""
        newest = self.newest
        if self._options.compression != "auto":
            return self._options.compression == "snappy"
        with self._lock:
            stretches = [
                Stretch(table, extent.first, extent.last, extent.size)
                for table in TABLES
                for extent in newest.extents[table].values()
            ]
        worth = is_worth_it(newest.open(), stretches)
        return newest.shape.compressed if worth is None else worth

    def seal(self) -> Volume:
        """Write to the next volume from now on; returns the one that was written until now."""
        self.prepare()
        old, new = self.newest, self._spare
        if new is None:
            raise StoreError("the next volume is missing")
        if old.database is not None:
            # Here, while no other thread may close it: LevelDB is going to remove the log.
            old.database.end_log()
        # Under both locks, so that no tidying that has read the set before puts an older one in its place.
        with self._listing, self._lock:
            self.all = [*self.all, new]
            self._spare = None
            self.touched.add(old)
            # Until ``kept``: what has been in memory is put into a table.
            old.pins += 1
        return old

    def successor(self, sources: Sequence[Volume]) -> Volume:
        """A volume to take the place of neighbours; it is not there yet."""
        number = sources[0].number
        again = max(int(volume.path.suffix[1:] or 0) for volume in sources) + 1
        chosen = self._options.compression
        compressed = chosen == "snappy" or (chosen == "auto" and any(volume.shape.compressed for volume in sources))
        listed = Listed(number, f"{number:08d}.{again}", compressed=compressed, packed=True)
        volume = Volume(number, self._directory / listed.folder, self._shape(listed))
        remove_volume(volume.path)
        return volume

    def replace(self, sources: Sequence[Volume], target: Volume | None) -> bool:
        """Put a volume in the place of neighbours, durably; None: they are struck off. Raises StoreError.

        Their files are removed once nobody reads them. Their locks for changes are held.

        Returns:
          False: there is a view, and nothing was done.
        """
        with self._listing:
            if self.views:
                return False
            self._refuse_if_list_unknown()
            at = self.all.index(sources[0])
            left = [volume for volume in self.all if volume not in sources]
            if target is not None:
                left.insert(at, target)
            try:
                self._write_list([*left, *([self._spare] if self._spare is not None else [])])
            except OSError as error:
                raise call_failed(error, "listing the volumes") from error
            with self._lock:
                self.all = left
                for volume in sources:
                    volume.gone = True
                    self.touched.discard(volume)
                    for table in TABLES:
                        self._index[table].remove(volume, volume.extents[table])
                if target is not None:
                    # Rows may have died while it was copied.
                    self.touched.add(target)
                    for table in TABLES:
                        for group, extent in target.extents[table].items():
                            self._index[table].add(group, extent)
                            self._estimate(table, extent)
                unread = [volume for volume in sources if not volume.pins]
        for volume in unread:
            self._remove_files(volume, lambda path: remove_beside_others(path, lambda: self.leaving))
        return True

    def _write_list(self, volumes: Sequence[Volume]) -> None:
        try:
            write_list(
                self._directory,
                [
                    Listed(each.number, each.path.name, each.large, each.shape.compressed, each.shape.packed)
                    for each in volumes
                ],
            )
        except ListUnknown:
            self.list_unknown = True
            raise

    def _refuse_if_list_unknown(self) -> None:
        if self.list_unknown:
            raise StoreError("the list of volumes was perhaps not written, and the store was not opened again")

    def _remove_files(self, volume: Volume, remove: Callable[[Path], None] = remove_volume) -> None:
        with volume.opening:
            database, volume.database = volume.database, None
            if database is not None:
                database.close()
            remove(volume.path)


def remove_packed(edits: RowEdits, key: bytes) -> None:
    """Remove a row that may be in a pack, but not one that cannot be read: nothing of it could be kept."""
    with suppress(Unreadable):
        edits.remove(key)


def make_first(directory: Path, options: LevelDBOptions, before: Sequence[Listed] = ()) -> None:
    """A set with an empty volume, behind those that are there. Raises StoreUnusable."""
    number = len(before) + 1
    try:
        directory.mkdir(exist_ok=True)
        remove_unlisted(directory, before)
        path = directory / f"{number:08d}"
        compressed = options.compression != "none"
        Database(path, options.volume_shape(compressed=compressed, packed=True), create=True).close()
        sync_directory(path)
        write_list(directory, [*before, Listed(number, path.name, compressed=compressed, packed=True)])
    except OSError as error:
        raise opening_failed(error, directory) from error


def _clusters(spans: list[VolumeRange], *, reverse: bool) -> list[list[VolumeRange]]:
    """The spans in the order of their keys; those that overlap are together."""
    found: list[list[VolumeRange]] = []
    end = b""
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start < end:
            found[-1].append(span)
            end = max(end, span.stop)
        else:
            found.append([span])
            end = span.stop
    return found[::-1] if reverse else found


def _last_before(database: Readable, table: Table, span: VolumeRange, *, values: bool) -> Row | None:
    """The row right before the end of a span, if its end says which that is."""
    key = span.stop[:-1]
    if not span.stop.endswith(b"\x00") or key < span.start:
        return None
    value = database.get(table, key)
    return None if value is None else (key, value if values else b"")


def _up_to_dead(rows: Iterable[Row], stop: bytes, rest: Callable[[bytes], list[Row]] | None) -> Iterator[Row]:
    """The rows of a span that ends at a dead range, in the direction in which they are read.

    LevelDB goes on to the row behind before it is asked whether that is wanted. Where damaged rows were set aside that
    row cannot be read, and need not be.

    Args:
      rest: on the way down, reads what is left below a key from the other side, where nothing is damaged.
    """
    rows = iter(rows)
    last = None
    while True:
        try:
            row = next(rows, None)
        except FOREIGN:
            if last is None or (rest is None and last + b"\x00" < stop):
                raise
            if rest is not None:
                yield from reversed(rest(last))
            return
        if row is None:
            return
        last = row[0]
        yield row


def _few_rows(database: Readable, table: Table, start: bytes, stop: bytes, *, values: bool) -> list[Row]:
    """The rows of a short range. Raises plyvel's errors, also when it is not short."""
    with database.rows(table, start, stop, values=values) as rows:
        found = list(islice(rows, MAX_REST_ROWS + 1))
    if len(found) > MAX_REST_ROWS:
        raise RuntimeError("a row that cannot be read stands far from those that were set aside")
    return found


def _newest_of(rows: list[Iterable[Row]], *, reverse: bool) -> Iterator[Row]:
    """Rows of several volumes, the newest first, in the order of their keys; of one key the first one counts."""
    before: bytes | None = None
    for row in merge(*rows, key=lambda row: row[0], reverse=reverse):
        if row[0] != before:
            before = row[0]
            yield row


def _number(position: int) -> bytes:
    return position.to_bytes(8, "big")

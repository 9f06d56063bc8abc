"""Point reads and scans of messages and payloads over the volumes of one pinned set.

The rows of a topic are in the order of their ids, so one volume's rows usually follow another's, and a scan reads the
volumes in sequence. Where volumes overlap (a payload stored late, a topic removed and copied back) their rows are
merged; of two rows with the same key, the newer volume's wins.
"""

from __future__ import annotations

from contextlib import ExitStack, closing, contextmanager
from functools import partial
from heapq import merge
from itertools import chain, islice
from typing import TYPE_CHECKING

from storage.base import chunks_of_runs
from storage.leveldb.engine.errors import FOREIGN, call_failed

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence

    from plainsong.protocol.effects import Table
    from storage.base import Row
    from storage.leveldb.engine.database import Readable
    from storage.leveldb.index import DeadRanges
    from storage.leveldb.open_databases import OpenDatabases
    from storage.leveldb.view import PinnedView
    from storage.leveldb.volume import Volume
    from storage.leveldb.volume_set import VolumeRange, VolumeSet

#: Rows between a dead range and a row that LevelDB cannot step over: no more than fit into a block of a few KiB.
MAX_REST_ROWS = 10_000


class VolumeReads:
    """Reads of one set of volumes, current or in a view. The set stays pinned while it is used."""

    def __init__(self, volumes: VolumeSet, databases: OpenDatabases, view: PinnedView | None = None) -> None:
        self.volumes = volumes
        self._databases = databases
        self._view = view

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return a row's value, None if there is none. Raises StoreError."""
        ranges = self.volumes.ranges(table, key, key + b"\x00")
        for each in sorted(ranges, key=lambda each: -each.volume.number):
            with self._opened(each.volume) as database:
                value = database.get(table, key, packed=each.packed)
            if value is not None:
                return value
        return None

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
    ) -> Iterator[Iterator[Sequence[Row]]]:
        """Yield the rows of ``[start, stop)`` as lists: see ``storage.base.chunks``.

        Iterating raises plyvel's errors, and StoreError.
        """
        ranges = self.volumes.ranges(table, start, stop)
        runs = self._runs(table, _clusters(ranges, reverse=reverse), reverse, values, cache, first_chunk)
        with closing(runs):
            yield chunks_of_runs(runs, first_chunk)

    @contextmanager
    def rows_of(self, volumes: Sequence[Volume], table: Table) -> Iterator[Iterator[Row]]:
        """Yield the live rows of some volumes; iterating raises plyvel's errors, and StoreError."""
        ranges = self.volumes.ranges_of(volumes, table)
        runs = self._runs(table, _clusters(ranges, reverse=False), False, True, False)
        with closing(runs):
            yield chain.from_iterable(runs)

    def first_in(self, volume: Volume, table: Table, start: bytes, stop: bytes) -> bytes | None:
        """Return the first key of a range in one volume, dead or not. Raises StoreError."""
        with self._databases.lease(volume) as database:
            try:
                with database.rows(table, start, stop, values=False) as rows:
                    row = next(iter(rows), None)
            except FOREIGN as error:
                raise call_failed(error, "scanning") from error
        return None if row is None else row[0]

    @contextmanager
    def _opened(self, volume: Volume) -> Iterator[Readable]:
        with self._databases.lease(volume) as database:
            if self._view is None:
                yield database
                return
            with self._view.rows_of(volume, database) as found:
                yield found

    def _runs(
        self,
        table: Table,
        clusters: Iterable[list[VolumeRange]],
        reverse: bool,
        values: bool,
        cache: bool,
        first: int = 0,
    ) -> Generator[Iterable[Row], None, None]:
        dead = self.volumes.dead[table]
        for cluster in clusters:
            with ExitStack() as stack:
                rows: list[Iterable[Row]] = []
                for each in sorted(cluster, key=lambda each: -each.volume.number):
                    database = stack.enter_context(self._opened(each.volume))
                    stop, last = each.stop, None
                    if reverse and dead.borders(each.stop, stops=False):
                        # Downwards, LevelDB begins with the row after the range, which may be unreadable.
                        last = _last_before(database, table, each, values=values)
                        stop = each.stop if last is None else last[0]
                    options = {"reverse": reverse, "values": values, "cache": cache, "packed": each.packed}
                    found = database.rows(table, each.start, stop, **options, wanted=first, largest=each.largest)
                    run: Iterable[Row] = stack.enter_context(found)
                    if _borders_dead(dead, each, reverse=reverse):
                        rest = partial(_few_rows, database, table, each.start, values=values) if reverse else None
                        run = _up_to_dead(run, each.stop, rest)
                    rows.append(run if last is None else chain((last,), run))
                yield rows[0] if len(rows) == 1 else _newest_of(rows, reverse=reverse)


def _borders_dead(dead: DeadRanges, each: VolumeRange, *, reverse: bool) -> bool:
    """True if a range ends, in the direction of reading, where a dead range begins."""
    return dead.borders(each.start, stops=True) if reverse else dead.borders(each.stop, stops=False)


def _clusters(ranges: list[VolumeRange], *, reverse: bool) -> list[list[VolumeRange]]:
    """Group the ranges in key order; overlapping ranges are in one group."""
    found: list[list[VolumeRange]] = []
    end = b""
    for each in sorted(ranges, key=lambda each: each.start):
        if found and each.start < end:
            found[-1].append(each)
            end = max(end, each.stop)
        else:
            found.append([each])
            end = each.stop
    return found[::-1] if reverse else found


def _last_before(database: Readable, table: Table, each: VolumeRange, *, values: bool) -> Row | None:
    """Return the last row before the end of a range, if its key can be derived from that end."""
    key = each.stop[:-1]
    if not each.stop.endswith(b"\x00") or key < each.start:
        return None
    value = database.get(table, key)
    return None if value is None else (key, value if values else b"")


def _up_to_dead(rows: Iterable[Row], stop: bytes, rest: Callable[[bytes], list[Row]] | None) -> Iterator[Row]:
    """Yield the rows of a range that ends, in the direction of reading, at a dead range.

    LevelDB reads the row after the range before it compares its key. If damaged rows were set aside, that row cannot be
    read and need not be.

    Args:
      rest: when reading downwards, reads the rows below a key from the other side, where nothing is damaged.
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
    """Return the rows of a short range. Raises plyvel's errors, and RuntimeError if the range is not short."""
    with database.rows(table, start, stop, values=values) as rows:
        found = list(islice(rows, MAX_REST_ROWS + 1))
    if len(found) > MAX_REST_ROWS:
        raise RuntimeError("a row that cannot be read is far from the rows that were set aside")
    return found


def _newest_of(rows: list[Iterable[Row]], *, reverse: bool) -> Iterator[Row]:
    """Merge the rows of several volumes, given newest first, in key order; of equal keys the first row wins."""
    before: bytes | None = None
    for row in merge(*rows, key=lambda row: row[0], reverse=reverse):
        if row[0] != before:
            before = row[0]
            yield row

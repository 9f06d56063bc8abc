"""The set of volumes: an immutable value with one writer, and the pins of its readers.

The commit thread replaces the set as a whole (``Sets.put``): when it seals the newest volume, when ranges die, when the
keeper hands in a replacement for sealed volumes, and when a view begins or ends. All others read a set that they have
pinned. A volume's files stay while a pinned set names the volume.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from storage.leveldb import threads
from storage.leveldb.index import DeadRanges, Groups, part_within
from storage.leveldb.volume import TABLES, Extent, extents_of_each

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from plainsong.protocol.effects import Table
    from storage.leveldb.engine.database import Snapshot
    from storage.leveldb.volume import Extents, Volume


class VolumeRange(NamedTuple):
    """Rows of a table in a volume: ``[start, stop)``."""

    start: bytes
    stop: bytes
    volume: Volume
    packed: bool
    """True if some rows may be in packs."""
    largest: int
    """See ``Extent``."""


class Index(Groups[tuple[Extent, ...]]):
    """The extents of one table in all sealed volumes. Immutable."""

    __slots__ = ()

    @classmethod
    def of(cls, all_extents: Iterable[Extents]) -> Index:
        """Return the index of some volumes."""
        return cls().replaced([], all_extents)

    def replaced(self, gone: Iterable[Volume], added: Iterable[Extents]) -> Index:
        """Return an index without the extents of ``gone``, and with ``added``."""
        by_name = dict(self._by_name)
        left_out = set(gone)
        if left_out:
            for name, extents in self._by_name.items():
                left = tuple(extent for extent in extents if extent.volume not in left_out)
                if left:
                    by_name[name] = left
                else:
                    del by_name[name]
        for each in added:
            for name, extent in each.items():
                by_name[name] = tuple(sorted((*by_name.get(name, ()), extent), key=lambda one: one.volume.number))
        return Index(by_name)

    def overlapping(self, start: bytes, stop: bytes) -> Iterator[Extent]:
        """Yield the extents that may have rows of ``[start, stop)``; within a group, older volumes first."""
        for extents in self.between(start, stop):
            for extent in extents:
                if extent.overlaps(start, stop):
                    yield extent

    def of_each(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, list[Extent]]]:
        """Yield each key that some extents may have, with those extents."""
        return extents_of_each(keys, self.overlapping)


class View(Protocol):
    """An open view: the part of ``storage.leveldb.view`` that the set's owners use."""

    @property
    def is_over(self) -> bool:
        """True once it has ended or expired."""
        ...

    @property
    def volumes(self) -> VolumeSet:
        """The pinned set."""
        ...

    def end(self) -> bool:
        """Start no more reads. Returns True, once, if no read is under way: the caller then has the keeper close it."""
        ...

    def close(self) -> list[Volume]:
        """Close the snapshots; return the volumes whose leases the caller must end."""
        ...

    def needs_snapshot(self, volume: Volume) -> bool:
        """True if a sealed volume is part of the view and has not changed since."""
        ...

    def add_snapshot(self, volume: Volume, snapshot: Snapshot) -> None:
        """Add a volume's snapshot."""


@dataclass(frozen=True, slots=True, eq=False)
class VolumeSet:
    """All volumes of a store, and where rows are. Immutable, except that the extents of ``newest`` grow."""

    sealed: tuple[Volume, ...]
    newest: Volume
    index: Mapping[Table, Index]
    """The extents of the sealed volumes."""
    dead: Mapping[Table, DeadRanges]
    views: tuple[View, ...] = ()
    number: int = 0
    """Position in the sequence of sets that have been current."""

    @classmethod
    def of(cls, volumes: Sequence[Volume], dead: Mapping[Table, DeadRanges]) -> VolumeSet:
        """Return the first set of a store that has just been opened; the last volume is the newest."""
        *sealed, newest = volumes
        index = {table: Index.of(volume.extents[table] for volume in sealed) for table in TABLES}
        return cls(tuple(sealed), newest, index, dead)

    @property
    def all(self) -> tuple[Volume, ...]:
        """Every volume, the newest last."""
        return (*self.sealed, self.newest)

    # --- following sets -----------------------------------------------------------------------

    def sealing(self, newest: Volume) -> VolumeSet:
        """Return the set after ``newest`` became the volume that is written."""
        index = {table: self.index[table].replaced([], [self.newest.extents[table]]) for table in TABLES}
        return self._next(sealed=self.all, newest=newest, index=index)

    def replacing(self, sources: Sequence[Volume], target: Volume | None) -> VolumeSet | None:
        """Return the set with ``target`` or nothing in place of neighbours; None if a source is not in the set."""
        if any(volume not in self.sealed for volume in sources):
            return None
        at = self.sealed.index(sources[0])
        sealed = [volume for volume in self.sealed if volume not in sources]
        added = []
        if target is not None:
            sealed.insert(at, target)
            added = [target]
        index = {
            table: self.index[table].replaced(sources, [volume.extents[table] for volume in added]) for table in TABLES
        }
        return self._next(sealed=tuple(sealed), index=index)

    def burying(self, table: Table, dead: DeadRanges) -> VolumeSet:
        """Return the set with these dead ranges of a table."""
        return self._next(dead={**self.dead, table: dead})

    def forgetting(self, table: Table, start: bytes, stop: bytes) -> VolumeSet | None:
        """Return the set without a dead range; None if there is no such range, or a volume still has rows in it."""
        dead = self.dead[table]
        if not dead.has(start, stop) or self.may_have(table, start, stop, dead_too=True):
            return None
        return self._next(dead={**self.dead, table: dead.removed(start)})

    def viewed(self, view: View) -> VolumeSet:
        """Return the set with another open view."""
        return self._next(views=(*self.views, view))

    def unviewed(self, view: View) -> VolumeSet:
        """Return the set without a view that has ended."""
        return self._next(views=tuple(each for each in self.views if each is not view))

    def _next(self, **changed: object) -> VolumeSet:
        return replace(self, number=self.number + 1, **changed)  # type: ignore[arg-type]  # names of fields

    # --- where rows are -----------------------------------------------------------------------

    def overlapping(self, table: Table, start: bytes, stop: bytes) -> Iterator[Extent]:
        """Yield the extents that may have rows of ``[start, stop)``; within a group, older volumes first."""
        yield from self.index[table].overlapping(start, stop)
        yield from self.newest.extents[table].overlapping(start, stop)

    def ranges(self, table: Table, start: bytes, stop: bytes) -> list[VolumeRange]:
        """Return the parts of ``[start, stop)`` that may have live rows, volume by volume."""
        if start >= stop:
            return []
        dead = self.dead[table]
        return [
            VolumeRange(first, end, extent.volume, extent.packed, extent.largest)
            for extent in self.overlapping(table, start, stop)
            for first, end in dead.live_parts(max(start, extent.first), min(stop, extent.last + b"\x00"))
        ]

    def ranges_of(self, volumes: Sequence[Volume], table: Table) -> list[VolumeRange]:
        """Return the parts of some volumes that may have live rows."""
        dead = self.dead[table]
        return [
            VolumeRange(first, stop, volume, extent.packed, extent.largest)
            for volume in volumes
            for extent in volume.extents[table].values()
            for first, stop in dead.live_parts(extent.first, extent.last + b"\x00")
        ]

    def may_have(self, table: Table, start: bytes, stop: bytes, *, dead_too: bool = False) -> bool:
        """True if a volume may have rows of a range; dead rows count only with ``dead_too``."""
        if start >= stop:
            return False
        dead = DeadRanges() if dead_too else self.dead[table]
        return any(
            True
            for extent in self.overlapping(table, start, stop)
            for _ in dead.live_parts(max(start, extent.first), min(stop, extent.last + b"\x00"))
        )

    def places(self, table: Table, key: bytes) -> list[Volume]:
        """Return the volumes that may have a row, the oldest first."""
        found = {extent.volume.number: extent.volume for extent in self.overlapping(table, key, key + b"\x00")}
        return [found[number] for number in sorted(found)]

    def rows_in(self, table: Table, start: bytes, stop: bytes) -> int:
        """Estimate the live rows in a range without reading; exact for extents that lie within it."""
        rows = 0.0
        for extent in self.overlapping(table, start, stop):
            low, high = max(start, extent.first), min(stop, extent.last + b"\x00")
            rows += extent.rows * part_within(extent.first, extent.last, self.dead[table].live_parts(low, high))
        return round(rows)


class Sets:
    """The current set, and the number of pins of each set.

    Only the commit thread calls ``put``. Any thread may read ``current``, pin and unpin.
    """

    def __init__(self, first: VolumeSet) -> None:
        self.current = first
        """The current set. Its volumes may lose their files unless the caller is their owner or has pinned the set."""
        #: Guards ``current``, except for readers of it alone, and ``_pins``. The innermost lock: nothing is called while
        #: it is held.
        self._lock = threads.Lock()
        self._pins: Counter[int] = Counter()

    def put(self, following: VolumeSet) -> None:
        """Replace the set. For the commit thread."""
        with self._lock:
            self.current = following

    def pin(self) -> VolumeSet:
        """Return the current set; its volumes keep their files until ``unpin``."""
        with self._lock:
            current = self.current
            self._pins[current.number] += 1
        return current

    def unpin(self, pinned: VolumeSet) -> bool:
        """End a pin. Returns True if it was the last one and the set is not current: files may wait to be removed."""
        with self._lock:
            self._pins[pinned.number] -= 1
            if self._pins[pinned.number]:
                return False
            del self._pins[pinned.number]
            return pinned is not self.current

    def oldest(self) -> int:
        """Return the number of the oldest pinned or current set. Older sets are never read again."""
        with self._lock:
            return min(self._pins, default=self.current.number)


def estimate_live(volume: Volume, volumes: VolumeSet) -> None:
    """Estimate the live bytes of a volume from the dead ranges and the known removals."""
    for table in TABLES:
        dead = volumes.dead[table]
        for extent in volume.extents[table].values():
            parts = dead.live_parts(extent.first, extent.last + b"\x00")
            extent.live = min(extent.live, extent.size * part_within(extent.first, extent.last, parts))

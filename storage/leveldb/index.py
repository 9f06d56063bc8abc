"""Which rows are in which volume, and which of them are dead: in memory, so that nothing is opened in vain.

A **group** is a prefix that the keys of a topic's generation share. Of each group a volume has an **extent**: its first
and last key, how many rows, how many bytes. A row's key begins with its group and lies between these keys; the row may
have been removed since. Callers hold the lock of ``storage.leveldb.volumes``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from storage.leveldb.volume import Extent, Volume


class Index:
    """The extents of one table in all volumes."""

    def __init__(self) -> None:
        self._groups: dict[bytes, list[Extent]] = {}
        #: The groups, ascending.
        self._names: list[bytes] = []

    def add(self, group: bytes, extent: Extent) -> None:
        """Add a volume's extent of a group; of a group there are those of later volumes behind those of earlier ones."""
        extents = self._groups.get(group)
        if extents is None:
            self._groups[group] = [extent]
            insort(self._names, group)
        else:
            insort(extents, extent, key=lambda each: each.volume.number)

    def remove(self, volume: Volume, groups: Iterable[bytes]) -> None:
        """Remove a volume's extents."""
        empty = False
        for group in groups:
            left = [extent for extent in self._groups.get(group, ()) if extent.volume is not volume]
            if left:
                self._groups[group] = left
            else:
                self._groups.pop(group, None)
                empty = True
        if empty:
            self._names = sorted(self._groups)

    def overlapping(self, start: bytes, stop: bytes) -> Iterator[Extent]:
        """The extents that may have rows of ``[start, stop)``."""
        for group in self._groups_of(start, stop):
            for extent in self._groups[group]:
                if extent.first < stop and extent.last >= start:
                    yield extent

    def _groups_of(self, start: bytes, stop: bytes) -> Iterator[bytes]:
        # A group that sorts before a range has keys in it only where the group is a prefix of the range's start.
        for end in range(len(start)):
            if start[:end] in self._groups:
                yield start[:end]
        yield from self._names[bisect_left(self._names, start) : bisect_left(self._names, stop)]


@dataclass(slots=True)
class DeadRanges:
    """Ranges of one table whose rows are all dead: disjoint, ascending, and none touches the next."""

    starts: list[bytes] = field(default_factory=list)
    stops: list[bytes] = field(default_factory=list)

    def joined(self, start: bytes, stop: bytes) -> tuple[bytes, bytes, list[bytes]]:
        """The range that ``[start, stop)`` forms with those it touches, and the starts of these."""
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        if low < high:
            start, stop = min(start, self.starts[low]), max(stop, self.stops[high - 1])
        return start, stop, self.starts[low:high]

    def add(self, start: bytes, stop: bytes) -> None:
        """Add ``[start, stop)``."""
        low, high = bisect_left(self.stops, start), bisect_right(self.starts, stop)
        start, stop, _ = self.joined(start, stop)
        self.starts[low:high] = [start]
        self.stops[low:high] = [stop]

    def remove(self, start: bytes) -> None:
        """Remove the range that begins at ``start``, if there is one."""
        at = bisect_left(self.starts, start)
        if at < len(self.starts) and self.starts[at] == start:
            del self.starts[at], self.stops[at]

    def live_parts(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The parts of ``[start, stop)`` that are in no dead range."""
        at = bisect_right(self.stops, start)
        while start < stop and at < len(self.starts) and self.starts[at] < stop:
            if start < self.starts[at]:
                yield start, self.starts[at]
            start = self.stops[at]
            at += 1
        if start < stop:
            yield start, stop

    def covers(self, start: bytes, last: bytes) -> bool:
        """Whether all keys from ``start`` to ``last``, both included, are dead."""
        at = bisect_right(self.starts, start) - 1
        return at >= 0 and self.stops[at] > last

    def items(self) -> list[tuple[bytes, bytes]]:
        """All ranges."""
        return list(zip(self.starts, self.stops, strict=True))


def live_part(extent: Extent, parts: Iterable[tuple[bytes, bytes]]) -> float:
    """Which part of an extent's rows is in these parts of it, judged by their keys as if rows were spread evenly."""
    shared = len(_common_prefix(extent.first, extent.last))
    low, high = _number(extent.first, shared), _number(extent.last, shared) + 1
    inside = sum(
        min(_number(stop, shared), high) - max(_number(start, shared), low)
        for start, stop in parts
        if stop > extent.first and start <= extent.last
    )
    return min(1.0, max(0.0, inside / (high - low)))


def _common_prefix(one: bytes, other: bytes) -> bytes:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return one[:at]


def _number(key: bytes, shared: int) -> int:
    return int.from_bytes(key[shared : shared + 8].ljust(8, b"\x00"), "big")

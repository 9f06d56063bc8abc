"""Maps by groups of keys, and ranges of dead keys: they locate rows in a set of volumes without the disk.

A **group** is the key prefix that all rows of one generation of a topic share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

V = TypeVar("V")


class Groups(Generic[V]):
    """Values by group, in the order of the groups.

    One owner adds groups, any thread reads: a group is in ``_by_name`` before it is in ``_names``, and ``_names`` is
    replaced, never changed.
    """

    __slots__ = ("_by_name", "_names")

    def __init__(self, by_name: Mapping[bytes, V] | None = None) -> None:
        self._by_name: dict[bytes, V] = dict(by_name or {})
        self._names: Sequence[bytes] = sorted(self._by_name)

    def __len__(self) -> int:
        return len(self._names)

    def get(self, group: bytes) -> V | None:
        """Return the value of a group, None if there is none."""
        return self._by_name.get(group)

    def items(self) -> list[tuple[bytes, V]]:
        """Return all groups with their values."""
        return [(name, self._by_name[name]) for name in self._names]

    def values(self) -> list[V]:
        """Return the values of all groups."""
        return [self._by_name[name] for name in self._names]

    def between(self, start: bytes, stop: bytes) -> Iterator[V]:
        """Yield the values of groups that may have keys in ``[start, stop)``."""
        # A group that sorts before the range has keys in it only if it is a prefix of the range's start.
        by_name, names = self._by_name, self._names
        for end in range(len(start)):
            found = by_name.get(start[:end])
            if found is not None:
                yield found
        for name in names[bisect_left(names, start) : bisect_left(names, stop)]:
            yield by_name[name]


@dataclass(frozen=True, slots=True)
class DeadRanges:
    """Ranges of one table whose rows are all dead: disjoint, ascending, not adjacent. Immutable."""

    starts: tuple[bytes, ...] = ()
    stops: tuple[bytes, ...] = ()

    def has(self, start: bytes, stop: bytes) -> bool:
        """True if ``[start, stop)`` is one of them."""
        at = bisect_left(self.starts, start)
        return at < len(self.starts) and (self.starts[at], self.stops[at]) == (start, stop)

    def added(self, ranges: Iterable[tuple[bytes, bytes]]) -> DeadRanges:
        """Return these ranges and ``ranges``."""
        return self.adding(ranges)[0]

    def adding(
        self, ranges: Iterable[tuple[bytes, bytes]]
    ) -> tuple[DeadRanges, list[tuple[bytes, bytes, Sequence[bytes]]]]:
        """Return these ranges and ``ranges``; for each of the latter, the range it became and the starts it joined."""
        starts, stops = list(self.starts), list(self.stops)
        steps: list[tuple[bytes, bytes, Sequence[bytes]]] = []
        for start, stop in ranges:
            low, high = bisect_left(stops, start), bisect_right(starts, stop)
            joined = starts[low:high]
            if joined:
                start, stop = min(start, starts[low]), max(stop, stops[high - 1])
            starts[low:high] = [start]
            stops[low:high] = [stop]
            steps.append((start, stop, joined))
        return DeadRanges(tuple(starts), tuple(stops)), steps

    def removed(self, start: bytes) -> DeadRanges:
        """Return these ranges without the one that begins at ``start``, if there is one."""
        at = bisect_left(self.starts, start)
        if at == len(self.starts) or self.starts[at] != start:
            return self
        return DeadRanges(self.starts[:at] + self.starts[at + 1 :], self.stops[:at] + self.stops[at + 1 :])

    def live_parts(self, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the parts of ``[start, stop)`` that are in no dead range."""
        at = bisect_right(self.stops, start)
        while start < stop and at < len(self.starts) and self.starts[at] < stop:
            if start < self.starts[at]:
                yield start, self.starts[at]
            start = self.stops[at]
            at += 1
        if start < stop:
            yield start, stop

    def dead_parts(self, start: bytes, stop: bytes) -> list[tuple[bytes, bytes]]:
        """Return the parts of ``[start, stop)`` that are in dead ranges."""
        found: list[tuple[bytes, bytes]] = []
        at = start
        for first, end in self.live_parts(start, stop):
            if at < first:
                found.append((at, first))
            at = end
        if at < stop:
            found.append((at, stop))
        return found

    def borders(self, key: bytes, *, stops: bool) -> bool:
        """True if a range begins at ``key``, or with ``stops`` ends there."""
        places = self.stops if stops else self.starts
        at = bisect_left(places, key)
        return at < len(places) and places[at] == key

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return all ranges."""
        return list(zip(self.starts, self.stops, strict=True))


def part_within(first: bytes, last: bytes, parts: Iterable[tuple[bytes, bytes]]) -> float:
    """Return the fraction of the keys from ``first`` to ``last`` that is in ``parts``, as if keys were spread evenly.

    A part that extends beyond the last key counts to the end, so a single key is either in a part or not.
    """
    shared = len(_common_prefix(first, last))
    low, high = _number(first, shared), _number(last, shared) + 1
    inside = 0
    for start, stop in parts:
        if stop <= first or start > last:
            continue
        begin = low if start <= first else _number(start, shared)
        end = high if stop > last else _number(stop, shared)
        inside += max(0, min(end, high) - max(begin, low))
    return min(1.0, max(0.0, inside / (high - low)))


def _common_prefix(one: bytes, other: bytes) -> bytes:
    at = 0
    while at < min(len(one), len(other)) and one[at] == other[at]:
        at += 1
    return one[:at]


def _number(key: bytes, shared: int) -> int:
    return int.from_bytes(key[shared : shared + 8].ljust(8, b"\x00"), "big")

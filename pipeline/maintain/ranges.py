"""Ranges of row keys, and how they are cut into parts that are worked on side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from protocol.ids import pack_position

if TYPE_CHECKING:
    from collections.abc import Iterable

    from protocol.effects import Table

#: ``expired``, ``generation``: every row of the range may be removed. ``invalid``: its rows that carry one of the
#: pointers are to be rolled back, and none is removed.
Why = Literal["expired", "generation", "invalid"]


@dataclass(frozen=True, slots=True)
class KeyRange:
    """``start <= key < stop`` of one table, and why its rows are of interest."""

    table: Table
    start: bytes
    stop: bytes
    why: Why
    pointers: tuple[int, ...] = ()
    """Write pointers of invalid transactions, ascending; for ``invalid`` alone."""

    def __contains__(self, key: bytes) -> bool:
        return self.start <= key < self.stop


def cut(whole: KeyRange, bounds: Iterable[bytes]) -> list[KeyRange]:
    """The range in parts, in key order: none overlaps another, none is empty, and together they are the whole.

    Args:
      bounds: keys at which parts begin, such as the start keys of a table's regions; in any order, those outside
        of the range count for nothing.
    """
    inside = sorted({bound for bound in bounds if whole.start < bound < whole.stop})
    starts = [whole.start, *inside]
    stops = [*inside, whole.stop]
    return [replace(whole, start=start, stop=stop) for start, stop in zip(starts, stops, strict=True) if start < stop]


def time_bounds(prefix: bytes, first_ms: int, last_ms: int, parts: int) -> list[bytes]:
    """Bounds that cut the message keys of one generation into ``parts`` of equal times, for a store without regions.

    Args:
      prefix: what the generation's keys start with.
      first_ms, last_ms: between which its messages were published.
    """
    length_ms = max(0, last_ms - first_ms)
    return [prefix + pack_position(first_ms + length_ms * part // parts, 0) for part in range(1, parts)]

"""Which file answers for which message: ranges of ids, and what happens where two of them overlap.

Every entry of an archive (a batch, or a day made of batches) holds all messages of one range of ids, ``start <= id <
end``. Where entries overlap, one of them answers and the others are not read there: a day before batches, among days
the one of the higher revision, among batches the one written first (a later copy of the same range may lack what
expired in between). So an entry that was only partly replaced, or two compactions at once, never show a row twice,
and a range is given up by an entry only when another one holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pipeline.archive.manifest import Manifest


class Range(NamedTuple):
    """Ids ``start <= id < end``, 20 bytes each."""

    start: bytes
    end: bytes


class Piece(NamedTuple):
    """The part of an entry that is read: ``start <= id < end``."""

    entry: Manifest
    start: bytes
    end: bytes

    @property
    def is_whole(self) -> bool:
        """Whether that is all of the entry."""
        return (self.start, self.end) == (self.entry.start, self.entry.end)


def pieces(entries: Iterable[Manifest]) -> list[Piece]:
    """What is read of each entry, in the order of the ids; no id is in two pieces.

    Args:
      entries: of one generation of one topic.
    """
    taken: list[Range] = []
    found: list[Piece] = []
    for entry in sorted(entries, key=lambda each: each.rank):
        free = minus(Range(entry.start, entry.end), taken)
        found += [Piece(entry, start, end) for start, end in free]
        taken = merged([*taken, *free])
    return sorted(found, key=lambda piece: piece.start)


def covered(entries: Iterable[Manifest]) -> list[Range]:
    """The ranges that are held by some entry, in order, as few as can be."""
    return merged(Range(entry.start, entry.end) for entry in entries)


def holes(entries: Sequence[Manifest], reached: Range | None = None) -> list[Range]:
    """What an archive should hold and does not: between its entries, before a batch that was not the first, and as
    far as its query came.

    Args:
      entries: of one generation of one topic.
      reached: from where and to where the query's checkpoint says that all is archived.
    """
    held = covered(entries)
    due = [] if reached is None else [reached]
    if held:
        # A batch with a number follows one that must be there, or a day in its place.
        is_headless = any(each.batch for each in entries if each.start == held[0].start)
        due.append(Range(bytes(20) if is_headless else held[0].start, held[-1].end))
    return [hole for each in merged(due) for hole in minus(each, held)]


def minus(whole: Range, taken: Sequence[Range]) -> list[Range]:
    """What is left of ``whole`` without ``taken``, which is in order and does not overlap itself."""
    left: list[Range] = []
    start = whole.start
    for each in taken:
        if each.end <= start or each.start >= whole.end:
            continue
        if each.start > start:
            left.append(Range(start, each.start))
        start = each.end
    if start < whole.end:
        left.append(Range(start, whole.end))
    return left


def merged(ranges: Iterable[Range]) -> list[Range]:
    """The same ids in ranges that neither overlap nor touch, in order; empty ones are left out."""
    found: list[Range] = []
    for each in sorted(each for each in ranges if each.start < each.end):
        if found and each.start <= found[-1].end:
            found[-1] = Range(found[-1].start, max(found[-1].end, each.end))
        else:
            found.append(each)
    return found

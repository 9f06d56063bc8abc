"""Runs of plain rows in packs, which readers get in wire form without decoding each row."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain
from typing import TYPE_CHECKING, overload

from plainsong.protocol.rows import PlainRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from storage.base import Row
    from storage.leveldb.engine.packs import Pack


class PlainPart(PlainRows):
    """Consecutive rows of a pack that have a payload and nothing else."""

    __slots__ = ("_first", "_pack", "_stop")

    def __init__(self, pack: Pack, first: int, stop: int) -> None:
        self._pack, self._first, self._stop = pack, first, max(first, stop)

    def __len__(self) -> int:
        return self._stop - self._first

    def __iter__(self) -> Iterator[Row]:
        return iter(self._pack.rows(self._first, self._stop))

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> PlainPart: ...

    def __getitem__(self, index: int | slice) -> Row | PlainPart:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("rows of a pack are sliced without steps")
            return PlainPart(self._pack, self._first + first, self._first + stop)
        at = range(self._first, self._stop)[index]
        return self._pack.key_at(at), self._pack.value_at(at)

    def within(self, most: int, most_bytes: int) -> int:
        """See ``PlainRows``."""
        return min(most, self._pack.within(self._first, self._stop, most_bytes))

    def sizes(self) -> list[int]:
        """See ``PlainRows``."""
        return self._pack.wire_sizes(self._first, self._stop)

    def wire(self) -> bytes:
        """See ``PlainRows``."""
        return self._pack.wire(self._first, self._stop)

    @property
    def wire_bytes(self) -> int:
        """The size of the wire form."""
        return self._pack.wire_bytes(self._first, self._stop)


class PlainParts(PlainRows):
    """Rows of several consecutive packs, usually small ones from commits of few messages."""

    __slots__ = ("_ends", "_parts")

    def __init__(self, parts: Sequence[PlainPart]) -> None:
        self._parts = parts
        #: Number of rows up to the end of each part.
        self._ends = list(accumulate(map(len, parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self._parts)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> PlainParts: ...

    def __getitem__(self, index: int | slice) -> Row | PlainParts:
        if isinstance(index, slice):
            first, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("rows of packs are sliced without steps")
            begins = zip(self._parts, (0, *self._ends), strict=False)
            cut = (part[max(0, first - begin) : max(0, stop - begin)] for part, begin in begins)
            return PlainParts([part for part in cut if part])
        at = range(len(self))[index]
        part = bisect_right(self._ends, at)
        return self._parts[part][at - (self._ends[part - 1] if part else 0)]

    def within(self, most: int, most_bytes: int) -> int:
        """See ``PlainRows``."""
        found = 0
        for part in self._parts:
            taken = part.within(most - found, most_bytes)
            found += taken
            if taken < len(part):
                break
            most_bytes -= part.wire_bytes
        return found

    def sizes(self) -> list[int]:
        """See ``PlainRows``."""
        return list(chain.from_iterable(part.sizes() for part in self._parts))

    def wire(self) -> bytes:
        """See ``PlainRows``."""
        return b"".join([part.wire() for part in self._parts])

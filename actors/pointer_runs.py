"""Which items of a chunk stand under which write pointer: runs of indexes, since transactions come in runs.

Three columns of numbers, 16 bytes a run: a chunk of single-message transactions has a run for every item, and
a tuple of them would cost more than the message.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from protocol.transactions.view import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.transactions.view import View

#: What one run costs in memory, arrays that grow ahead included.
RUN_BYTES = 18


class PointerRuns:
    """Disjoint runs, ascending; items in none of them have no pointer."""

    __slots__ = ("_highest", "_lowest", "_pointers", "_starts", "_stops")

    def __init__(self) -> None:
        self._starts: array[int] = array("I")
        self._stops: array[int] = array("I")
        self._pointers: array[int] = array("q")
        self._lowest = self._highest = 0

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """``(start, stop, pointer)`` each; the pointer as its rows have it, negative when rolled back."""
        return zip(self._starts, self._stops, self._pointers, strict=True)

    def add(self, start: int, stop: int, pointer: int) -> None:
        """Items ``start`` to ``stop``, exclusive, which come after all runs so far."""
        if self._stops and self._stops[-1] == start and self._pointers[-1] == pointer:
            self._stops[-1] = stop
            return
        self._insert(len(self), start, stop, pointer)

    def roll_back(self, pointer: int, start: int, stop: int) -> None:
        """Turn the sign of ``pointer`` in the items ``start`` to ``stop``, exclusive, that carry it."""
        index = bisect_right(self._stops, start)
        while index < len(self) and self._starts[index] < stop:
            if self._pointers[index] == pointer:
                index = self._turn(index, start, stop)
            index += 1

    def pieces(self, start: int, stop: int, view: View | None) -> list[tuple[int, int, Verdict, int]]:
        """The items ``start`` to ``stop`` as ``(start, stop, verdict, pointer)``; what is delivered is one piece."""
        if view is None or not self._starts or self._all_delivered(view):
            return [(start, stop, Verdict.DELIVER, 0)]
        out = []
        at = start
        for index in range(bisect_right(self._stops, start), len(self)):
            first, last = max(self._starts[index], start), min(self._stops[index], stop)
            if first >= stop:
                break
            pointer = self._pointers[index]
            verdict = view.verdict(pointer)
            if verdict is Verdict.DELIVER:
                continue
            if at < first:
                out.append((at, first, Verdict.DELIVER, 0))
            out.append((first, last, verdict, pointer))
            at = last
        if at < stop:
            out.append((at, stop, Verdict.DELIVER, 0))
        return out

    def between(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The runs within ``start`` to ``stop``, cut to it."""
        for index in range(bisect_right(self._stops, start), bisect_left(self._starts, stop)):
            yield max(self._starts[index], start), min(self._stops[index], stop), self._pointers[index]

    def _all_delivered(self, view: View) -> bool:
        return self._lowest > 0 and view.delivers_all(self._lowest, self._highest, lambda: self._pointers)

    def _turn(self, index: int, start: int, stop: int) -> int:
        """Split a run so that its part within the range can be turned; the index of that part."""
        first, last, pointer = self._starts[index], self._stops[index], self._pointers[index]
        if first < start:
            self._stops[index] = start
            index += 1
            self._insert(index, start, last, pointer)
        if stop < last:
            self._starts[index] = stop
            self._insert(index, max(first, start), stop, pointer)
        self._pointers[index] = -pointer
        self._lowest = min(self._lowest, -pointer)
        return index

    def _insert(self, index: int, start: int, stop: int, pointer: int) -> None:
        if not self._starts:
            self._lowest = self._highest = pointer
        self._starts.insert(index, start)
        self._stops.insert(index, stop)
        self._pointers.insert(index, pointer)
        self._lowest, self._highest = min(self._lowest, pointer), max(self._highest, pointer)

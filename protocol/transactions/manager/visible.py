"""What readers of committed messages may see: only what is durable, and one view for all until that changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from protocol.transactions.transaction import NO_TRANSACTION
from protocol.transactions.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable


class Change(NamedTuple):
    """What a step did to pointers, told here once it is durable."""

    opened: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    listed: tuple[int, ...] = ()
    unlisted: tuple[int, ...] = ()


class Visible:
    """The read pointer and both lists as the disk has them."""

    def __init__(self, read_pointer: int, in_progress: Iterable[int], invalids: Iterable[int]) -> None:
        self._read_pointer = read_pointer
        self._in_progress = set(in_progress)
        self._invalids = set(invalids)
        self._frozen_invalids = frozenset(self._invalids)
        self._view: View | None = None

    def apply(self, changes: Iterable[Change], read_pointer: int) -> None:
        """These changes are durable, in this order."""
        listed = False
        for change in changes:
            self._in_progress.update(change.opened)
            self._in_progress.difference_update(change.closed)
            self._invalids.update(change.listed)
            self._invalids.difference_update(change.unlisted)
            listed = listed or bool(change.listed or change.unlisted)
        if listed:
            self._frozen_invalids = frozenset(self._invalids)
        self._read_pointer = read_pointer
        self._view = None

    @property
    def read_pointer(self) -> int:
        """The highest pointer anybody may read."""
        return self._read_pointer

    def is_in_progress(self, pointer: int) -> bool:
        """Whether a pointer is in progress."""
        return pointer in self._in_progress

    def is_invalid(self, pointer: int) -> bool:
        """Whether a pointer is on the invalid list."""
        return pointer in self._invalids

    def in_progress(self) -> list[int]:
        """Pointers in progress, ascending."""
        return sorted(self._in_progress)

    def invalids(self) -> tuple[int, ...]:
        """The invalid list, ascending."""
        return tuple(sorted(self._invalids))

    def upper_bound(self) -> int:
        """Below this, and at it, nothing is undecided or invalid once the list is dealt with: Tephra's prune bound."""
        if not self._invalids and not self._in_progress:
            return self._read_pointer - 1
        return min(max(self._invalids, default=NO_TRANSACTION), min(self._in_progress, default=NO_TRANSACTION) - 1)

    def view(self) -> View:
        """The view of now; the same object until something changes."""
        if self._view is None:
            self._view = View(self._read_pointer, frozenset(self._in_progress), self._frozen_invalids)
        return self._view

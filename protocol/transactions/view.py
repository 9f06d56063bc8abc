"""What one transactional reader may see of a topic, row by row.

no pointer      delivered
negative        skipped: rolled back
visible         delivered
invalid         skipped
otherwise       the reader stops here: undecided, or begun after its snapshot
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING

from protocol.transactions.transaction import VisibilityLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from collections.abc import Set as AbstractSet

    from protocol.transactions.transaction import Transaction


#: Pointers that are compared one by one sooner than those of many rows are looked up.
_FEW = 64
#: What it costs at least to find out the pointers of rows, in pointers of a set looked at.
_LOOK = 256


class Verdict(IntEnum):
    """What becomes of a row."""

    DELIVER = 0
    SKIP = 1
    HOLD = 2


class View:
    """A snapshot to read with; never changes, so threads may share it."""

    __slots__ = ("_excluded", "_invalids", "_looked_up", "_own", "_ranges", "_read_pointer")

    def __init__(
        self,
        read_pointer: int,
        in_progress: AbstractSet[int],
        invalids: AbstractSet[int],
        own: AbstractSet[int] = frozenset(),
    ) -> None:
        self._read_pointer = read_pointer
        self._excluded = in_progress
        self._invalids = invalids
        self._own = own
        #: What has been spent so far on pointers that had to be looked up.
        self._looked_up = 0
        #: Lowest and highest of each set of those that are not delivered, once that is known.
        self._ranges: list[tuple[int, int]] | None = None

    @classmethod
    def of(cls, transaction: Transaction) -> View:
        """What a transaction sees."""
        own = set(transaction.pointers)
        own.add(transaction.write_pointer)
        if transaction.visibility_level is VisibilityLevel.SNAPSHOT_EXCLUDE_CURRENT:
            own.discard(transaction.write_pointer)
        return cls(
            transaction.read_pointer,
            frozenset(transaction.in_progress),
            frozenset(transaction.invalids),
            frozenset(own),
        )

    @property
    def parts(self) -> tuple[int, frozenset[int], frozenset[int], frozenset[int]]:
        """Its read pointer, and what is in progress, invalid and its own: what another one like it is made of."""
        return self._read_pointer, frozenset(self._excluded), frozenset(self._invalids), frozenset(self._own)

    def delivers_all(self, lowest: int, highest: int, pointers: Callable[[], Collection[int]]) -> bool:
        """Whether every row with one of some pointers is delivered, told at once; False may also mean: look closer.

        Args:
          lowest, highest: the least and the greatest of them; the greatest negative if one was rolled back.
          pointers: all of them; called only when the two do not say enough.
        """
        if not 0 < lowest <= highest <= self._read_pointer:
            return False
        hidden = len(self._excluded) + len(self._invalids)
        if hidden <= _FEW:
            if not any(lowest <= each <= highest for each in chain(self._excluded, self._invalids)):
                return True
        elif self._looked_up >= hidden:
            # Finding the ranges costs as much as has been spent on looking up, and mostly saves all that comes.
            if self._ranges is None:
                self._ranges = [(min(each), max(each)) for each in (self._excluded, self._invalids) if each]
            if all(highest < first or last < lowest for first, last in self._ranges):
                return True
        among = pointers()
        self._looked_up += max(len(among), _LOOK)
        return all(each.isdisjoint(among) for each in (self._excluded, self._invalids) if each)

    def verdict(self, pointer: int) -> Verdict:
        """What becomes of a row with this pointer, as it is stored: negative when it was rolled back."""
        if pointer < 0:
            return Verdict.SKIP
        if pointer in self._own:
            return Verdict.DELIVER
        if pointer in self._invalids:
            return Verdict.SKIP
        if pointer <= self._read_pointer and pointer not in self._excluded:
            return Verdict.DELIVER
        return Verdict.HOLD

"""What one transactional reader may see of a topic, row by row.

no pointer      delivered
negative        skipped: rolled back
visible         delivered
invalid         skipped
otherwise       the reader stops here: undecided, or begun after its snapshot
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from protocol.transactions.transaction import VisibilityLevel

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from protocol.transactions.transaction import Transaction


class Verdict(IntEnum):
    """What becomes of a row."""

    DELIVER = 0
    SKIP = 1
    HOLD = 2


class View:
    """A snapshot to read with; never changes, so threads may share it."""

    __slots__ = ("_excluded", "_invalids", "_own", "_read_pointer")

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

    def delivers_all(self, pointers: Iterable[int], lowest: int, highest: int) -> bool:
        """Whether every row with one of these pointers is delivered, told at once; False may also mean: look closer.

        Args:
          lowest: not above any of them, negative if one was rolled back.
          highest: not below any of them.
        """
        return (
            0 < lowest <= highest <= self._read_pointer
            and (not self._excluded or self._excluded.isdisjoint(pointers))
            and (not self._invalids or self._invalids.isdisjoint(pointers))
        )

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

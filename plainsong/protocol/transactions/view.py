"""The view of a transactional reader, from a snapshot or the durable state: a verdict on each row by its pointer.

no pointer      delivered
negative        skipped: rolled back
visible         delivered
invalid         skipped
otherwise       the reader stops here: undecided, or begun after the snapshot
"""

from __future__ import annotations

from enum import IntEnum
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import msgpack

from plainsong.protocol.errors import MalformedTransaction
from plainsong.protocol.ids import bound_at
from plainsong.protocol.transactions.transaction import NO_TRANSACTION, POINTERS_PER_MS, VisibilityLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from collections.abc import Set as AbstractSet

    from plainsong.protocol.transactions.transaction import Transaction

#: The highest possible pointer.
MAX_POINTER = (1 << 63) - 1
#: Up to this number of hidden pointers are compared one by one, before the pointers of many rows are extracted.
_FEW = 64
#: The minimum cost of extracting the pointers of rows, in comparisons with a hidden pointer.
_LOOK = 256


class Verdict(IntEnum):
    """A reader's treatment of a row."""

    DELIVER = 0
    SKIP = 1
    HOLD = 2


class View:
    """A snapshot to read with; immutable, so threads may share it."""

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
        #: The cost so far of extracting pointers.
        self._looked_up = 0
        #: Lowest and highest pointer of each hidden set, once computed.
        self._ranges: list[tuple[int, int]] | None = None

    @classmethod
    def of(cls, transaction: Transaction) -> View:
        """Return the view of a transaction."""
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

    @classmethod
    def without_service(cls, undecided: AbstractSet[int]) -> View:
        """Return a topic's own view: messages are committed unless their pointer is rolled back or ``undecided``.

        A topic forgets a pointer only once it is committed, or all its rows are rolled back.
        """
        return cls(MAX_POINTER, undecided, frozenset())

    @property
    def parts(self) -> tuple[int, frozenset[int], frozenset[int], frozenset[int]]:
        """Read pointer, pointers in progress, invalid and own ones: the arguments for an equal view."""
        return self._read_pointer, frozenset(self._excluded), frozenset(self._invalids), frozenset(self._own)

    def delivers_all(self, lowest: int, highest: int, pointers: Callable[[], Collection[int]]) -> bool:
        """Return True if rows with these pointers are all delivered; False: decide them one by one.

        Args:
          lowest, highest: the first and the last pointer in byte order; ``highest`` is negative if any was rolled back.
          pointers: returns all of them; called only if the two do not suffice.
        """
        if not 0 < lowest <= highest <= self._read_pointer:
            return False
        hidden = len(self._excluded) + len(self._invalids)
        if hidden <= _FEW:
            if not any(lowest <= each <= highest for each in chain(self._excluded, self._invalids)):
                return True
        elif self._looked_up >= hidden:
            # Computing the ranges costs as much as extracting has cost so far, and usually saves it from now on.
            if self._ranges is None:
                self._ranges = [(min(each), max(each)) for each in (self._excluded, self._invalids) if each]
            if all(highest < first or last < lowest for first, last in self._ranges):
                return True
        among = pointers()
        self._looked_up += max(len(among), _LOOK)
        return all(each.isdisjoint(among) for each in (self._excluded, self._invalids) if each)

    def verdict(self, pointer: int) -> Verdict:
        """Return the verdict on a row with this stored pointer, which is negative if it was rolled back."""
        if pointer < 0:
            return Verdict.SKIP
        if pointer in self._own:
            return Verdict.DELIVER
        if pointer in self._invalids:
            return Verdict.SKIP
        if pointer <= self._read_pointer and pointer not in self._excluded:
            return Verdict.DELIVER
        return Verdict.HOLD


# --- as of a moment --------------------------------------------------------------------------------
#
# A reader as of a moment sees everything committed by then, and is never held: transactions that were undecided then
# are skipped, whatever their outcome. Rows without a pointer are visible if they were published by then. The visibility
# of rows under a pointer depends only on the time of their transaction's decision, so that it is atomic over all
# topics, independent of the clocks of the topics' owners.


class Moment(NamedTuple):
    """The decisions of the transaction service by a moment."""

    at_ms: int
    undecided: frozenset[int]
    """Pointers issued up to the moment, and undecided then."""
    invalids: tuple[int, ...]
    first: int
    last: int
    """The first and the last pointer that the service has issued; 0 if none."""

    def view(self) -> AsOfView:
        """Return the view of readers as of the moment."""
        return AsOfView(self)

    def packed(self) -> bytes:
        """Encode the moment for another instance."""
        packed: bytes = msgpack.packb([self.at_ms, sorted(self.undecided), self.invalids, self.first, self.last])
        return packed

    @classmethod
    def unpack(cls, packed: bytes) -> Moment:
        """Decode the result of ``packed``. Raises MalformedTransaction."""
        try:
            at_ms, undecided, invalids, first, last = msgpack.unpackb(packed)
            return cls(int(at_ms), frozenset(map(int, undecided)), tuple(map(int, invalids)), int(first), int(last))
        except (TypeError, ValueError, msgpack.exceptions.UnpackException) as error:
            raise MalformedTransaction("the decisions up to a moment cannot be read") from error


class AsOfView(View):
    """The view of a reader as of a moment."""

    __slots__ = ("_issued", "at_ms", "bound")

    def __init__(self, moment: Moment) -> None:
        first_later = (moment.at_ms + 1) * POINTERS_PER_MS
        super().__init__(first_later - 1, moment.undecided, frozenset(moment.invalids))
        self.at_ms = moment.at_ms
        #: Messages without a pointer are visible before this bound.
        self.bound = bound_at(moment.at_ms + 1)
        self._issued = max(first_later, moment.first or first_later), moment.last

    def verdict(self, pointer: int) -> Verdict:
        verdict = super().verdict(pointer)
        return Verdict.SKIP if verdict is Verdict.HOLD else verdict

    def is_later(self, pointer: int) -> bool:
        """Return True if the service issued a pointer after the moment, so that its rows were written after it too."""
        return self._issued[0] <= abs(pointer) <= self._issued[1]


# --- the service's durable state: one view for all readers of committed messages, until it changes --


class Change(NamedTuple):
    """The changes of a step, applied once they are durable."""

    opened: tuple[int, ...] = ()
    closed: tuple[int, ...] = ()
    listed: tuple[int, ...] = ()
    unlisted: tuple[int, ...] = ()


class Visible:
    """The durable state for readers: read pointer, pointers in progress and invalid list."""

    def __init__(self, read_pointer: int, in_progress: Iterable[int], invalids: Iterable[int]) -> None:
        self._read_pointer = read_pointer
        self._in_progress = set(in_progress)
        self._invalids = set(invalids)
        self._frozen_invalids = frozenset(self._invalids)
        self._view: View | None = None

    def apply(self, changes: Iterable[Change], read_pointer: int) -> None:
        """Apply durable changes, in this order."""
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
        """The highest pointer that can be visible."""
        return self._read_pointer

    def is_in_progress(self, pointer: int) -> bool:
        return pointer in self._in_progress

    def is_invalid(self, pointer: int) -> bool:
        return pointer in self._invalids

    def in_progress(self) -> list[int]:
        """Return the pointers in progress, ascending."""
        return sorted(self._in_progress)

    def invalids(self) -> tuple[int, ...]:
        """Return the invalid list, ascending."""
        return tuple(sorted(self._invalids))

    def upper_bound(self) -> int:
        """Return Tephra's prune bound: once the list is processed, no pointer up to it is undecided or invalid."""
        if not self._invalids and not self._in_progress:
            return self._read_pointer - 1
        return min(max(self._invalids, default=NO_TRANSACTION), min(self._in_progress, default=NO_TRANSACTION) - 1)

    def view(self) -> View:
        """Return the present view; the same object until it changes."""
        if self._view is None:
            self._view = View(self._read_pointer, frozenset(self._in_progress), self._frozen_invalids)
        return self._view

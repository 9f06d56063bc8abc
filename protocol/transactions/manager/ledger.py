"""Everything the transaction service knows, and how its parts stay of one mind.

    open ──► committed, aborted ──► forgotten
      └────► invalid (its pointers on the list) ──► aborted, or invalid and off the list ──► forgotten

Rules decide; here a record only moves from one of these to the next.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from protocol.transactions.manager.conflicts import CommittedSets, PreparedSets
from protocol.transactions.manager.rows import Head
from protocol.transactions.transaction import NO_TRANSACTION, POINTERS_PER_MS, TransactionType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from protocol.transactions.manager.record import Record
    from protocol.transactions.manager.rows import LastPass
    from protocol.transactions.manager.settings import TransactionSettings

#: Outcomes forgotten in one commit at most, so that none becomes long.
_FORGET_ROWS = 1_000


class Ledger:
    """Transactions open, invalid and remembered; pointers; change sets."""

    def __init__(self, settings: TransactionSettings) -> None:
        self.settings = settings
        self.head = Head()
        self.by_pointer: dict[int, Record] = {}
        """Every record, by each of its pointers."""
        self.open: dict[int, Record] = {}
        self.in_progress: list[int] = []
        """Pointers of the open ones, ascending; ``shorts``: ids of the short ones among them."""
        self.shorts: list[int] = []
        self.invalid: list[int] = []
        """The invalid list, ascending."""
        self.outcomes: OrderedDict[int, Record] = OrderedDict()
        """Decided ones by their ids, in the order of the decisions; none of these has a pointer on the list."""
        self.prepared = PreparedSets()
        self.committed = CommittedSets()
        self.last_pass: LastPass | None = None
        self._deadlines: list[tuple[float, int]] = []

    def __repr__(self) -> str:
        return f"<Ledger {len(self.open)} open, {len(self.invalid)} invalid, {len(self.outcomes)} remembered>"

    # --- pointers ---------------------------------------------------------------------------------

    def next_pointer(self, now_ms: int) -> int:
        """A pointer above all ever issued; of this millisecond, if the clock has not gone back."""
        pointer = max(self.head.last + 1, now_ms * POINTERS_PER_MS)
        self.head.last = pointer
        self.head.first = self.head.first or pointer
        return pointer

    @property
    def first_short(self) -> int:
        """The id of the oldest short transaction that is open; NO_TRANSACTION if none is.

        Tephra takes a checkpoint of a long one for a short one here. To us it belongs to its transaction.
        """
        return self.shorts[0] if self.shorts else NO_TRANSACTION

    def forgotten(self, pointer: int) -> bool:
        """Whether a pointer that is in no record was issued here, and decided."""
        return 0 < self.head.first <= pointer <= self.head.forgotten

    # --- from one to the next ---------------------------------------------------------------------

    def begin(self, record: Record) -> None:
        """It is open now, with all its pointers."""
        self.open[record.transaction_id] = record
        if record.type is TransactionType.SHORT:
            insort(self.shorts, record.transaction_id)
        for pointer in record.pointers:
            self.by_pointer[pointer] = record
            insort(self.in_progress, pointer)
        heappush(self._deadlines, (record.deadline_s, record.transaction_id))
        if len(self._deadlines) > 2 * len(self.open) + 1_000:
            self._deadlines = [(each.deadline_s, each.transaction_id) for each in self.open.values()]
            heapify(self._deadlines)

    def add_checkpoint(self, record: Record, pointer: int) -> None:
        """An open one has one more pointer."""
        record.checkpoints += (pointer,)
        self.by_pointer[pointer] = record
        insort(self.in_progress, pointer)

    def close(self, record: Record) -> None:
        """It is open no more."""
        del self.open[record.transaction_id]
        if record.type is TransactionType.SHORT:
            _remove(self.shorts, record.transaction_id)
        for pointer in record.pointers:
            _remove(self.in_progress, pointer)

    def list_invalid(self, record: Record) -> None:
        """Those of its pointers that ``record.listed`` names are on the invalid list."""
        for pointer in record.pointers:
            self.by_pointer[pointer] = record
        for pointer in record.listed:
            insort(self.invalid, pointer)

    def unlist(self, record: Record, pointers: Iterable[int]) -> tuple[int, ...]:
        """Take those of ``pointers`` that are on the list from it; which these were."""
        gone = tuple(pointer for pointer in pointers if pointer in record.listed)
        for pointer in gone:
            _remove(self.invalid, pointer)
        record.listed = tuple(pointer for pointer in record.listed if pointer not in gone)
        return gone

    def remember(self, record: Record) -> None:
        """It is decided, and no pointer of it is on the list."""
        self.outcomes[record.transaction_id] = record
        self.outcomes.move_to_end(record.transaction_id)
        for pointer in record.pointers:
            self.by_pointer[pointer] = record

    # --- time -------------------------------------------------------------------------------------

    def forget(self, now_ms: int) -> list[Record]:
        """Forget outcomes that are too old or too many, oldest first; which."""
        gone: list[Record] = []
        horizon_ms = now_ms - self.settings.outcome_retention_ms
        while self.outcomes and len(gone) < _FORGET_ROWS:
            oldest = next(iter(self.outcomes.values()))
            if oldest.decided_ms > horizon_ms and len(self.outcomes) <= self.settings.max_outcomes:
                break
            if oldest.settling:
                break  # decided in this very commit
            self.outcomes.popitem(last=False)
            for pointer in oldest.pointers:
                del self.by_pointer[pointer]
            self.head.forgotten = max(self.head.forgotten, oldest.decided_at)
            gone.append(oldest)
        return gone

    def overdue(self, mono_s: float) -> Iterator[Record]:
        """Open ones whose time is over; those are left out whose commit is under way."""
        frozen: list[Record] = []
        while self._deadlines and self._deadlines[0][0] <= mono_s:
            _, transaction_id = heappop(self._deadlines)
            record = self.open.get(transaction_id)
            if record is None:
                continue
            if record.frozen:
                frozen.append(record)
            else:
                yield record
        for record in frozen:
            heappush(self._deadlines, (record.deadline_s, record.transaction_id))

    def next_deadline_s(self) -> float | None:
        """When the next one's time is over."""
        while self._deadlines:
            deadline_s, transaction_id = self._deadlines[0]
            record = self.open.get(transaction_id)
            if record is not None and not record.frozen:
                return deadline_s
            if record is not None:
                # Whoever waits for what is being written looks again when that is done.
                return min((each.deadline_s for each in self.open.values() if not each.frozen), default=None)
            heappop(self._deadlines)
        return None


def _remove(pointers: list[int], pointer: int) -> None:
    del pointers[bisect_left(pointers, pointer)]

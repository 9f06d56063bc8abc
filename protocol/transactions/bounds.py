"""What a snapshot bounds: how far readers see without gaps, and how far the invalid list may be pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.transactions.tephra_state import EntryType
from protocol.transactions.transaction import NO_TRANSACTION, POINTERS_PER_MS, Transaction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from protocol.transactions.tephra_state import ManagerState


def visibility_upper_bound(transaction: Transaction) -> int:
    """Up to here everything is decided, from a transaction's point of view: committed, aborted or invalid."""
    if transaction.in_progress:
        return transaction.in_progress[0] - 1
    return min(transaction.transaction_id - 1, transaction.read_pointer)


def prune_upper_bound(transaction: Transaction) -> int:
    """The highest pointer that may be pruned once all rows this snapshot calls invalid are rewritten.

    No transaction begun before the snapshot can add rows at or below it.
    """
    if not transaction.invalids and not transaction.in_progress:
        return transaction.read_pointer - 1
    last_invalid = transaction.invalids[-1] if transaction.invalids else NO_TRANSACTION
    first_in_progress = transaction.in_progress[0] if transaction.in_progress else NO_TRANSACTION
    return min(last_invalid, first_in_progress - 1)


def inactive_bound(now_ms: int, lifetime_ms: int) -> int:
    """Pointers at or below it are older than a transaction may live."""
    return (now_ms - lifetime_ms) * POINTERS_PER_MS - 1


def first_short_in_progress(types: Mapping[int, EntryType]) -> int:
    """The first pointer that is not a long transaction's own; a long one's checkpoints count as short, as in Tephra."""
    return min((pointer for pointer, kind in types.items() if kind is not EntryType.LONG), default=NO_TRANSACTION)


def reader_of(state: ManagerState) -> Transaction:
    """A transaction that sees what was committed when the state was taken, and writes nothing."""
    return Transaction(
        read_pointer=state.read_pointer,
        transaction_id=NO_TRANSACTION,
        write_pointer=NO_TRANSACTION,
        invalids=tuple(sorted(set(state.invalids))),
        in_progress=tuple(sorted(state.in_progress)),
        first_short_in_progress=first_short_in_progress(
            {pointer: entry.type for pointer, entry in state.in_progress.items()}
        ),
    )

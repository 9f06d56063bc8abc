"""What went wrong in the course of a transaction, and what its caller is told of it.

An error of ours whose outcome is ``not-applied`` is raised as what it is (so that ``except TransactionConflict``
and ``except TopicNotFound`` work as anywhere); everything else becomes the cause of a ``TransactionFailed``. What
went wrong after the first thing, and what became of the transaction, stands in its notes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plainsong.errors import CommittedWithErrors, DeadlineExceeded, TransactionFailed, TransactionTimedOut
from plainsong.protocol.errors import PlainsongError, RolledBack, TransactionExpired, TransactionNotInProgress

if TYPE_CHECKING:
    from plainsong.transactions.values import Transaction

_ENDS = {
    "aborted": "the transaction was undone",
    "invalid": "the transaction is invalid: no committed reader will see anything of it, but not everything was undone",
}


@dataclass(slots=True)
class Failures:
    """What went wrong, in order."""

    doing: str = ""
    """What is being done, for the words of the next failure."""
    errors: list[Exception] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, doing: str, error: Exception) -> None:
        """One more."""
        if not self.errors:
            self.doing = doing
        self.errors.append(error)
        self.notes.append(_said(doing, error))

    def without_first(self) -> Failures:
        """All but the first error, which is raised itself."""
        said = _said(self.doing, self.errors[0])
        return Failures(self.doing, self.errors[1:], [note for note in self.notes if note != said])

    def tell(self, error: BaseException, state: str | None) -> None:
        """Say all of it in the notes of what is raised."""
        error.add_note(_ENDS.get(state or "", f"the transaction is {state}"))
        for note in self.notes:
            error.add_note(note)
        if isinstance(error, TransactionFailed):
            error.others = tuple(self.errors)

    def after_commit(self, transaction: Transaction) -> CommittedWithErrors:
        """What is raised when the transaction stands and something failed nevertheless."""
        told = CommittedWithErrors(f"transaction {transaction.id} is committed; then {self.notes[0]}")
        told.others = tuple(self.errors[1:])
        told.__cause__ = self.errors[0]
        for note in self.notes[1:]:
            told.add_note(note)
        return told


def _said(doing: str, error: Exception) -> str:
    return f"{doing}: {type(error).__name__}: {error}"


def failure_of(transaction: Transaction, doing: str, error: Exception) -> PlainsongError:
    """What is raised for the first thing that went wrong; ``error`` itself, or with it as its cause."""
    late = timed_out(transaction, error)
    if late is not None:
        return late
    if isinstance(error, PlainsongError) and error.outcome == "not-applied":
        return error
    failed = TransactionFailed(f"transaction {transaction.id}: {doing}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def timed_out(transaction: Transaction, error: Exception) -> TransactionTimedOut | None:
    """What to say of an error that came because the transaction has taken too long; None: it has another reason."""
    refused = isinstance(error, (TransactionNotInProgress, RolledBack, TransactionExpired))
    late = isinstance(error, DeadlineExceeded) and error.outcome == "not-applied"
    if isinstance(error, TransactionTimedOut) or not (refused or late) or transaction.remaining_s > 0:
        return None
    told = TransactionTimedOut(
        f"transaction {transaction.id} is {transaction.age_s:.1f} s old, and its limit is {transaction.timeout_s:g} s",
        hint="do less in it, give it a longer timeout_s (the daemon's transactions.timeout_s is the default, "
        'transactions.max_timeout_s the most), or type="long" (transactions.long_timeout_s)',
    )
    told.__cause__ = error
    return told

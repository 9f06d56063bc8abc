"""How a transaction is undone: every member rolls back, whoever fails, and the service is told what is left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn, Protocol

from plainsong.core.attempts import outlasting
from plainsong.errors import NoTransaction
from plainsong.protocol.errors import PlainsongError, TransactionNotFound, TransactionNotInProgress
from plainsong.transactions import calls
from plainsong.transactions.failures import Failures, failure_of
from plainsong.transactions.messages import UNDO_S

if TYPE_CHECKING:
    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.transactions.members import Foreign, Member
    from plainsong.transactions.messages import TransactionMessages
    from plainsong.transactions.values import Transaction, TransactionState

log = logging.getLogger("plainsong.transaction")


class Enlisted(Protocol):
    """A reader inside the transaction, as far as its end is concerned; see ``plainsong.core.reading``."""

    @property
    def transactional(self) -> bool:
        """Whether its position is written into what the participants commit."""
        ...

    def settle(self) -> Steps[None]:
        """Keep the position of what the loop was done with."""
        ...


class Undoing:
    """The members of a transaction, and the way back."""

    def __init__(self, operations: Operations, others: list[Foreign], messages: TransactionMessages) -> None:
        self._operations = operations
        self._others = others
        self._readers: list[Enlisted] = []
        self.messages = messages
        self.transaction: Transaction | None = None
        #: Whether the commit has been asked for: whoever is interrupted then may not undo.
        self.deciding = False
        #: How the last one ended; None before the first, and while one is under way.
        self.state: TransactionState | None = None

    @property
    def _members(self) -> list[Member]:
        return [*self._others, self.messages]

    def needed(self, what: str) -> Transaction:
        """The transaction under way. Raises NoTransaction."""
        if self.transaction is None:
            ended = "none was begun" if self.state is None else f"the last one is {self.state.replace('_', ' ')}"
            raise NoTransaction(f"{what} needs a transaction, and {ended}", hint="direct=True stays outside of any")
        return self.transaction

    def abort(self, cause: BaseException | None = None) -> Steps[TransactionState | None]:
        """Undo everything; nothing happens when no transaction is under way.

        Args:
          cause: why; what fails meanwhile is told in its notes.
        Returns:
          ``aborted``, or ``invalid`` when not everything could be undone; None: there was nothing to abort.
        Raises:
          without a ``cause``, what failed first: TransactionFailed, or an error of the service's.
        """
        if self.transaction is None:
            return None
        failures = Failures("aborting")
        transaction = self.transaction
        yield from self._undo(transaction, failures)
        if cause is not None:
            failures.tell(cause, self.state)
        elif failures.errors:
            told = failure_of(transaction, failures.doing, failures.errors[0])
            failures.without_first().tell(told, self.state)
            raise told
        return self.state

    def _fail(self, failures: Failures, error: Exception) -> Steps[NoReturn]:
        """Undo, and raise what went wrong first."""
        transaction = self.transaction
        assert transaction is not None
        told = failure_of(transaction, failures.doing, error)
        later = Failures("aborting")
        yield from self._undo(transaction, later)
        later.tell(told, self.state)
        raise told

    def _undo(self, transaction: Transaction, failures: Failures) -> Steps[None]:
        """``rollback_tx`` on every member, then the service's decision; failures are collected, not raised."""
        clean = True
        for member in self._members:
            try:
                if not (yield from member.rollback_tx()):
                    clean = False
                    failures.notes.append(f"{member.name} did not roll back: rollback_tx did not return True")
            except Exception as error:  # noqa: BLE001 - the others have to be rolled back all the same
                clean = False
                failures.add(f"rolling back {member.name}", error)
        self.transaction, self.deciding, self._readers = None, False, []
        self.state = "aborted" if clean else "invalid"
        call = calls.abort(transaction.id) if clean else calls.invalidate(transaction.id)
        try:
            self.state = yield from self._operations.call(outlasting(call), self._undo_s)
        except PlainsongError as error:
            gone = isinstance(error, (TransactionNotFound, TransactionNotInProgress))
            failures.add("telling the service" if gone else "telling the service, so it ends at its time-out", error)

    @property
    def _undo_s(self) -> float:
        return min(self._operations.settings.deadline_s, UNDO_S)

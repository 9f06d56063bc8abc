"""The course of a transaction: every step, in which order, and what follows when one fails.

    begin → start_tx on each │ … the work … │ tx_changes → prepare → commit_tx on each → commit → post_tx_commit

A failure before the decision undoes: ``rollback_tx`` on every member, then the service is told ``abort`` when all
said True, else ``invalidate``; what failed first is raised, what failed after it is told in its notes. A failure
after the decision changes nothing of it. The one step that decides is asked about until somebody knows; only when
nobody does is the transaction in doubt, and then nothing is undone.

The order and the rules are Apache Tephra's; that messages come last, and that a lost answer to a commit is
asked for, are ours.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NoReturn

from plainsong.core.attempts import outlasting
from plainsong.errors import TransactionFailed, TransactionInProgress
from plainsong.protocol.errors import PlainsongError
from plainsong.transactions import calls, deciding
from plainsong.transactions.failures import Failures, failure_of, timed_out
from plainsong.transactions.members import Foreign
from plainsong.transactions.messages import TransactionMessages, left_s
from plainsong.transactions.undoing import Undoing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.protocol.requests import PublishRequest
    from plainsong.transactions.messages import Bounds
    from plainsong.transactions.participants import AnyParticipant
    from plainsong.transactions.undoing import Enlisted
    from plainsong.transactions.values import Transaction, TransactionKind

log = logging.getLogger("plainsong.transaction")


class Course(Undoing):
    """One transaction after the other, with the same participants. Its methods are steps, for one caller at a time.

    Args:
      participants: in the order in which they are asked; the messages come after them.
    """

    def __init__(
        self,
        operations: Operations,
        participants: Iterable[AnyParticipant],
        bounds: Bounds,
        *,
        kind: TransactionKind,
        timeout_s: int | None,
        client_id: str | None,
    ) -> None:
        once = {id(each): Foreign(each) for each in participants}
        super().__init__(operations, list(once.values()), TransactionMessages(operations, bounds))
        self._options = (kind, timeout_s, client_id)

    def enlist(self, reader: Enlisted) -> None:
        """A reader inside the transaction: its position is part of it."""
        self._readers.append(reader)

    def take(self, topic: str, request: PublishRequest) -> bool:
        """Publish with the commit; whether ``spill`` has to follow now. Raises NoTransaction."""
        self.needed("publish")
        return self.messages.take(topic, request)

    def spill(self) -> Steps[None]:
        """Store what is too much to be kept here. Raises what storing it is answered."""
        transaction = self.needed("publish")
        try:
            yield from self.messages.spill()
        except PlainsongError as error:
            late = timed_out(transaction, error)
            if late is None:
                raise
            raise late from error

    # --- who takes part --------------------------------------------------------------------------

    def add(self, participant: AnyParticipant) -> Steps[None]:
        """One more, before the messages; under way, it is told of the transaction. Again: nothing happens."""
        if any(each.participant is participant for each in self._others):
            return
        member = Foreign(participant)
        self._others.append(member)
        if self.transaction is not None:
            yield from member.start_tx(self.transaction)

    def remove(self, participant: AnyParticipant) -> bool:
        """Whether it was one of them. Raises TransactionInProgress while one is under way."""
        if self.transaction is not None:
            raise TransactionInProgress("participants cannot leave a transaction under way")
        before = len(self._others)
        self._others = [each for each in self._others if each.participant is not participant]
        return len(self._others) < before

    # --- start -----------------------------------------------------------------------------------

    def start(self) -> Steps[Transaction]:
        """Begin, and tell each member.

        Raises:
          TransactionInProgress: one is under way. What ``begin`` is answered. TransactionFailed: a member raised.
        """
        if self.transaction is not None:
            raise TransactionInProgress(
                f"transaction {self.transaction.id} is under way", hint="finish it, or abort it"
            )
        operations = self._operations
        transaction = yield from deciding.begun(operations, *self._options)
        self.transaction, self.deciding, self.state, self._readers = transaction, False, None, []
        started: list[Foreign] = []
        for member in self._members:
            try:
                yield from member.start_tx(transaction)
            except Exception as error:  # noqa: BLE001 - raised after the abort
                yield from self._not_started(transaction, started, member.name, error)
            if isinstance(member, Foreign):
                started.append(member)
        return transaction

    def _not_started(
        self, transaction: Transaction, started: list[Foreign], name: str, error: Exception
    ) -> Steps[NoReturn]:
        """Nothing has been done, so nothing is rolled back. An abort that fails is what is raised."""
        self.transaction, self.state = None, "aborted"
        told = failure_of(transaction, f"starting {name}", error)
        for member in started:
            try:
                yield from member.abandon_tx()
            except Exception as failed:  # noqa: BLE001 - the failed start is what is raised
                told.add_note(f"{member.name} did not let go: {failed!r}")
        try:
            self.state = yield from self._operations.call(calls.abort(transaction.id), self._undo_s)
        except PlainsongError as failed:
            failed.add_note(f"after {name} had failed to start: {error!r}")
            raise failed from error
        raise told

    # --- finish ----------------------------------------------------------------------------------

    def finish(self) -> Steps[None]:
        """Commit.

        Raises:
          NoTransaction: none is under way. TransactionConflict, TransactionTooLarge, TransactionTimedOut, any other
            error whose outcome is not-applied, TransactionFailed around everything else: it was undone.
          CommittedWithErrors: it stands. TransactionInDoubt: nobody knows.
        """
        transaction = self.needed("finish")
        failures = Failures("saving positions")
        try:
            yield from self._save_positions(transactional=True)
            changes = yield from self._changes(failures)
            if changes:
                failures.doing = "detecting conflicts"
                call = outlasting(calls.prepare(transaction.id, changes))
                yield from self._operations.call(call, left_s(self._operations, transaction))
            yield from self._persist(failures)
        except Exception as error:  # noqa: BLE001 - raised after the undoing
            yield from self._fail(failures, error)
        yield from self._decide(transaction)
        yield from self._after_commit(transaction)

    def _changes(self, failures: Failures) -> Steps[list[bytes]]:
        union: dict[bytes, None] = {}
        for member in self._members:
            failures.doing = f"collecting the changes of {member.name}"
            union.update(dict.fromkeys((yield from member.tx_changes())))
        return list(union)

    def _persist(self, failures: Failures) -> Steps[None]:
        for member in self._members:
            failures.doing = f"persisting {member.name}"
            if not (yield from member.commit_tx()):
                raise TransactionFailed(f"{failures.doing}: commit_tx did not return True")

    def _decide(self, transaction: Transaction) -> Steps[None]:
        failures = Failures("committing")
        self.deciding = True
        try:
            yield from deciding.committed(self._operations, transaction)
        except PlainsongError as error:
            if error.outcome == "unknown":
                self.transaction, self.state = None, "unknown"
                raise
            yield from self._fail(failures, error)
        self.transaction, self.deciding, self.state = None, False, "committed"

    def _after_commit(self, transaction: Transaction) -> Steps[None]:
        """Everybody is told, whoever fails."""
        failures = Failures("following the commit")
        steps: list[tuple[str, Callable[[], Steps[None]]]] = [
            (f"following the commit: {member.name}", member.post_tx_commit) for member in self._members
        ]
        steps.append(("saving positions", lambda: self._save_positions(transactional=False)))
        for doing, step in steps:
            try:
                yield from step()
            except Exception as error:  # noqa: BLE001 - told at the end
                failures.add(doing, error)
        self._readers = []
        if failures.errors:
            raise failures.after_commit(transaction)

    def _save_positions(self, *, transactional: bool) -> Steps[None]:
        for reader in self._readers:
            if reader.transactional is transactional:
                yield from reader.settle()

    # --- checkpoint ------------------------------------------------------------------------------

    def checkpoint(self) -> Steps[Transaction]:
        """Persist what there is, and go on under a new write pointer. Raises as ``finish`` does: it was undone."""
        transaction = self.needed("checkpoint")
        failures = Failures()
        try:
            yield from self._persist(failures)
            failures.doing = "making a checkpoint"
            call = outlasting(calls.checkpoint(transaction))
            transaction = yield from self._operations.call(call, left_s(self._operations, transaction))
            self.transaction = transaction
            for member in self._members:
                failures.doing = f"updating {member.name}"
                yield from member.update_tx(transaction)
        except Exception as error:  # noqa: BLE001 - raised after the undoing
            yield from self._fail(failures, error)
        return transaction

    # --- interruptions -------------------------------------------------------------------------

    def interrupted(self) -> Steps[None]:
        """Somebody ended the steps in the middle: undo, unless the commit may have been taken and stands. Raises nothing."""
        transaction = self.transaction
        if transaction is None:
            return
        if self.deciding:
            try:
                yield from self._decide(transaction)
            except PlainsongError as error:
                log.warning("transaction %d, after an interruption: %s", transaction.id, error.detail)
                return
            try:
                yield from self._after_commit(transaction)
            except PlainsongError as error:
                log.warning("transaction %d is committed: %s", transaction.id, error.detail)
            return
        failures = Failures("aborting")
        yield from self._undo(transaction, failures)
        for failed in failures.errors:
            log.warning("transaction %d, after an interruption: %r", transaction.id, failed)

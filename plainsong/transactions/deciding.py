"""The two requests whose answers matter most: the one that begins, and the one that decides."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.core.attempts import outlasting
from plainsong.core.effects import Send
from plainsong.errors import Closed, TransactionFailed, TransactionInDoubt
from plainsong.protocol.errors import PlainsongError, TransactionConflict, TransactionNotInProgress
from plainsong.transactions import calls

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.transactions.values import Transaction, TransactionKind, TransactionState

T = TypeVar("T")

#: How often somebody is asked what became of a commit: a commit and a fence may cross once, not for ever.
MAX_QUESTIONS = 3


def begun(
    operations: Operations, kind: TransactionKind, timeout_s: int | None, client_id: str | None
) -> Steps[Transaction]:
    """A transaction, whose time counts from when it was asked for: never later than the service's own clock."""
    clock = operations.clock
    call = calls.begin(kind, timeout_s, default_client_id() if client_id is None else client_id, clock)
    transaction, sent_s = yield from _noting_last_send(operations.call(call), clock)
    return replace(transaction, begun_s=sent_s)


def default_client_id() -> str:
    """Who we are, for those who look at what is under way: the machine and the process."""
    return f"{platform.node() or 'unknown'}:{os.getpid()}"


def _noting_last_send(steps: Steps[T], clock: Callable[[], float]) -> Steps[tuple[T, float]]:
    """The same steps; beside their result when the last request left."""
    sent_s = clock()
    given: Any = None
    while True:
        try:
            effect = steps.send(given)
        except StopIteration as done:
            return done.value, sent_s
        if isinstance(effect, Send):
            sent_s = clock()
        given = yield effect


def committed(operations: Operations, transaction: Transaction) -> Steps[None]:
    """Commit, and come back when it is certain.

    Raises:
      PlainsongError: with the outcome ``not-applied``: it is certainly not committed, and never will be by this
        request. TransactionInDoubt: nobody knows.
    """
    try:
        yield from operations.call(outlasting(calls.commit(transaction.id)))
    except (TransactionNotInProgress, TransactionConflict) as error:
        # A commit that took is answered like the first time: so no earlier attempt took either.
        error.outcome = "not-applied"
        raise
    except Exception as error:
        # Closed by another thread: the request may have left.
        if isinstance(error, PlainsongError) and error.outcome == "not-applied" and not isinstance(error, Closed):
            raise
        yield from _asked(operations, transaction, error)


def _asked(operations: Operations, transaction: Transaction, error: Exception) -> Steps[None]:
    """Nobody answered the commit: ask what became of it."""
    state: TransactionState = "unknown"
    for _ in range(MAX_QUESTIONS):
        try:
            state = (yield from operations.call(outlasting(calls.get(transaction.id)))).state
            if state == "in_progress":
                # The commit may still be on its way: shut the door before saying that it did not take.
                state = yield from operations.call(outlasting(calls.invalidate(transaction.id)))
            break
        except TransactionNotInProgress:
            continue  # it was decided between the two
        except PlainsongError as failed:
            raise _in_doubt(transaction, f"nobody can be asked: {failed.detail}") from error
    if state == "committed":
        return
    if state in ("aborted", "invalid"):
        raise TransactionFailed(f"the commit of transaction {transaction.id} did not take: it is {state}") from error
    raise _in_doubt(transaction, f"the service calls it {state.replace('_', ' ')}") from error


def _in_doubt(transaction: Transaction, why: str) -> TransactionInDoubt:
    return TransactionInDoubt(
        f"the commit of transaction {transaction.id} was sent, its answer got lost, and {why}",
        hint=f"ask later: client.transactions.get({transaction.id}), or plainsong tx show {transaction.id}",
        transaction_id=transaction.id,
    )

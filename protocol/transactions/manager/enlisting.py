"""Enlisting: before a topic writes rows of a transaction for the first time, the service knows of it, durably.

So a commit or an abort, by this owner of the service or the next one, knows every topic that could still write, and
asks each of them to close the pointer first. What has not been issued here is nobody's to decide: it is let pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import Overloaded, TransactionNotInProgress

if TYPE_CHECKING:
    from protocol.transactions.manager.asks import Enlist
    from protocol.transactions.manager.ledger import Ledger
    from protocol.transactions.manager.step import Now, Step


def enlist(ledger: Ledger, step: Step, ask: Enlist, now: Now) -> bool:
    """One more topic of an open transaction; False: the pointer was not issued here.

    Raises:
      TransactionNotInProgress: it is decided, or being decided.
      Overloaded: the transaction has as many topics as it may.
    """
    record = ledger.by_pointer.get(ask.pointer)
    if record is None:
        if ledger.forgotten(ask.pointer):
            raise _over(ask.pointer, "decided")
        return False
    if record.state != "in_progress":
        raise _over(ask.pointer, record.state)
    if record.aborting or record.frozen:
        raise _over(ask.pointer, "being aborted" if record.aborting else "being committed")
    if ask.name not in record.topics:
        if len(record.topics) >= ledger.settings.max_topics:
            raise Overloaded(
                f"transaction {record.transaction_id} writes to {len(record.topics)} topics",
                hint="commit it, and go on in another one",
            )
        step.enlist(record, ask.name, now.wall_ms)
    return True


def nothing(ledger: Ledger, step: Step, ask: object, now: Now) -> None:
    """Nothing changes."""
    del ledger, step, ask, now


def _over(pointer: int, what: str) -> TransactionNotInProgress:
    return TransactionNotInProgress(f"write pointer {pointer} is {what}", hint="begin a new transaction")

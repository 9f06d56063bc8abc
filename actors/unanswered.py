"""What those hear whose request was under way when the transaction service fell, or another instance took it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.supervision import moved
from protocol.errors import OutcomeUnknown, PlainsongError, TransactionsUnavailable
from protocol.transactions.manager.asks import InvalidBefore, ListAll, LookAt, Nothing
from storage.base import Deposed, NothingWritten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actors.mailbox import Ticket
    from protocol.transactions.manager.step import Step

#: Asks that change nothing, so that a failure cannot leave their outcome open.
READS = (InvalidBefore, ListAll, LookAt, Nothing)


def unknown(why: str) -> OutcomeUnknown:
    """Nobody knows."""
    return OutcomeUnknown(why, hint="ask what became of the transaction, or send it again")


def fail(tickets: Iterable[Ticket[Any]], step: Step | None, error: BaseException, *, shared: bool) -> None:
    """Tell everybody whose request was under way that nobody knows what became of it; what was refused, was.

    ``shared``: unless another instance has the service, whose word may be another one.
    """
    refused = [ticket for ticket, answer in step.answers if isinstance(answer, PlainsongError)] if step else []
    for ticket, answer in step.answers if step and not shared else ():
        if isinstance(answer, PlainsongError):
            ticket.settle(answer)  # type: ignore[attr-defined]  # the core gives back what it was given
    why = error.detail if isinstance(error, PlainsongError) else "the daemon failed"
    nothing_happened = step is None or not step.writes or isinstance(error, NothingWritten)
    nothing_happened |= isinstance(error, Deposed) and error.happened is False
    for ticket in tickets:
        if not (nothing_happened or isinstance(ticket.ask, READS) or ticket in refused):
            ticket.settle(unknown(why))
        elif isinstance(error, Deposed):
            ticket.settle(moved())
        else:
            ticket.settle(TransactionsUnavailable(why, hint="nothing happened; ask again"))

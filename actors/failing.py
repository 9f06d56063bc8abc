"""What those hear whose request was under way when an actor fell: that nothing happened, or that nobody knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, StorageFailed
from protocol.topic.asks import Describe, ListReaders, Look, Stats
from protocol.topic.pointer_asks import ListPointers
from protocol.topic.producers.asks import GetProducer, ListProducers
from storage.base import Deposed, NothingWritten

if TYPE_CHECKING:
    from collections.abc import Iterable

    from actors.mailbox import Ticket
    from protocol.names import TopicName
    from protocol.topic.step import Step

#: Asks that change nothing, so that a failure cannot leave their outcome open.
READS = (Describe, GetProducer, ListPointers, ListProducers, ListReaders, Look, Stats)


def changed_hands(name: TopicName) -> NoOwner:
    """What everybody hears of a topic that is not, or not any more, this instance's."""
    return NoOwner(f"another instance owns topic {name}", hint="nothing happened; ask again")


def fail(
    name: TopicName, tickets: Iterable[Ticket[Any]], step: Step | None, error: BaseException, *, shared: bool
) -> None:
    """Tell everybody whose request was under way what became of it, as far as anybody knows.

    Args:
      shared: whether the store is: then a refusal may come from a state that is not the topic's any more, and is not
        told. Else what was refused, was.
    """
    if not shared:
        for ticket, answer in step.answers if step else ():
            if isinstance(answer, PlainsongError):
                ticket.settle(answer)  # type: ignore[attr-defined]  # the core gives back what it was given
    refused = {id(ticket) for ticket, answer in step.answers if isinstance(answer, PlainsongError)} if step else set()
    nothing_happened = _did_not_happen(step, error)
    why = error.detail if isinstance(error, PlainsongError) else "the daemon failed"
    for ticket in tickets:
        if not (nothing_happened or isinstance(ticket.ask, READS) or id(ticket) in refused):
            ticket.settle(OutcomeUnknown(why, hint="read the topic to see whether it happened, or send it again"))
        elif isinstance(error, Deposed):
            ticket.settle(changed_hands(name))
        else:
            ticket.settle(StorageFailed(why, hint="nothing happened; ask again"))


def _did_not_happen(step: Step | None, error: BaseException) -> bool:
    """Whether it is certain that nothing of a step was written."""
    if step is None or not step.operations or isinstance(error, NothingWritten):
        return True
    return isinstance(error, Deposed) and error.happened is False

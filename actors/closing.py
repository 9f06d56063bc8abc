"""Commits that wait until every enlisted topic has closed their pointers, wherever it is.

frozen    nobody is enlisted any more
closing   each topic answers in its turn, at the owner it has now: what it wrote is durable, and it writes no more
closed    the commit goes on, if it has been frozen all the time
missing   topics that did not answer in time: the commit did not happen, and the transaction is in progress
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from actors.settling import close_pointers
from protocol.errors import TransactionsUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from actors.mailbox import Ticket
    from actors.settling import AskTopic
    from protocol.names import TopicName
    from protocol.transactions.manager.core import ManagerCore
    from protocol.transactions.manager.settings import TransactionSettings

log = logging.getLogger(__name__)

#: Topics named when a commit could not reach them.
MAX_NAMED = 5


class Closing:
    """The commits of one service that wait, and those that have waited."""

    def __init__(
        self,
        ask: AskTopic,
        settings: TransactionSettings,
        back: Callable[[Ticket[Any]], None],
        thawed: Callable[[], None],
    ) -> None:
        """``back``: takes a ticket whose topics are closed; ``thawed``: is told that time counts again for somebody."""
        self._ask = ask
        self._settings = settings
        self._back = back
        self._thawed = thawed
        #: By transaction and freezing; and which freezing those had that are on their way back.
        self._waiting: dict[tuple[int, int], list[Ticket[Any]]] = {}
        self._closed: dict[Ticket[Any], int] = {}

    def sets_aside(
        self, core: ManagerCore, ticket: Ticket[Any], topics: Collection[TopicName], nursery: trio.Nursery
    ) -> bool:
        """Whether a commit has to wait for ``topics``; else nobody is enlisted between this and the step."""
        transaction_id: int = ticket.ask.transaction_id  # type: ignore[attr-defined]  # it is a Commit
        freezing = self._closed.pop(ticket, 0)
        if freezing and core.is_frozen(transaction_id, freezing):
            return False
        freezing = core.freeze(transaction_id) if topics else 0
        if not freezing:
            return False
        waiting = self._waiting.setdefault((transaction_id, freezing), [])
        waiting.append(ticket)
        if len(waiting) == 1:
            nursery.start_soon(self._close, core, (transaction_id, freezing), waiting, topics)
        return True

    async def _close(
        self,
        core: ManagerCore,
        frozen: tuple[int, int],
        waiting: Sequence[Ticket[Any]],
        topics: Collection[TopicName],
    ) -> None:
        deadline_s = trio.current_time() + self._settings.commit_deadline_s
        missing = await close_pointers(self._ask, topics, core.pointers(frozen[0]), deadline_s)
        if self._waiting.get(frozen) is not waiting:
            return  # the service fell: those who waited know
        del self._waiting[frozen]
        if not missing:
            for ticket in waiting:
                self._closed[ticket] = frozen[1]
                self._back(ticket)
            return
        core.thaw(*frozen)
        self._thawed()
        named = ", ".join(map(str, sorted(missing)[:MAX_NAMED]))
        log.warning("commit given up for now", extra={"transaction": frozen[0], "topics": len(missing), "first": named})
        down = f"{len(missing)} topics do not answer: {named}"
        for ticket in waiting:
            ticket.settle(TransactionsUnavailable(down, hint="nothing happened; commit again"))

    def forsake(self) -> list[Ticket[Any]]:
        """All that wait, or have waited; nothing becomes of them here."""
        gone = [*self._closed, *(each for tickets in self._waiting.values() for each in tickets)]
        self._waiting.clear()
        self._closed.clear()
        return gone

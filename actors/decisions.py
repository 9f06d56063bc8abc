"""Before a transaction is decided, its topics close its pointers for a commit, or roll it back for an abort.

A commit waits until every enlisted topic, on any instance, has closed the transaction's pointers:

    frozen    no further topic can be enlisted
    closing   each topic answers at its current owner: its messages are durable, and it writes no more of them
    closed    the commit continues, if the transaction has stayed frozen
    missing   topics did not answer in time: the commit did not happen, and the transaction is in progress

The deadline counts from the latest answer, so a transaction with many topics can take longer.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import (
    PlainsongError,
    ShuttingDown,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionsUnavailable,
    Unavailable,
)
from plainsong.protocol.plurals import counted
from plainsong.protocol.topic.asks import ClosePointers, ListPointers, RollBackPointer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

    from actors.mailbox import Ticket
    from actors.pointers import PointerLocations
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import TransactionStatus
    from plainsong.protocol.transactions.ledger import TransactionSettings
    from plainsong.protocol.transactions.manager import ManagerCore

    #: Asks a topic at its owner.
    AskTopic = Callable[[TopicName, Ask[Any]], Awaitable[Any]]
    #: True if a caller may see a topic of a transaction.
    Sees = Callable[[TransactionStatus, TopicName], bool]

log = logging.getLogger(__name__)
#: Topics named when a commit could not reach them.
MAX_NAMED_TOPICS = 5
_Asked = TypeVar("_Asked", ClosePointers, RollBackPointer)


class PointerClosing:
    """One service's commits that wait for topics, or that are being returned to the actor."""

    def __init__(
        self,
        ask: AskTopic,
        settings: TransactionSettings,
        resume: Callable[[Ticket[Any]], None],
        on_thawed: Callable[[], None],
    ) -> None:
        """
        Args:
          resume: takes back a ticket once its topics have closed the pointers.
          on_thawed: called when a transaction's time-out runs again.
        """
        self._ask = ask
        self._settings = settings
        self._resume = resume
        self._on_thawed = on_thawed
        #: Waiting tickets by transaction and freeze, and the freeze of each ticket on its way back.
        self._waiting: dict[tuple[int, int], list[Ticket[Any]]] = {}
        self._closed: dict[Ticket[Any], int] = {}

    def defer(
        self, core: ManagerCore, ticket: Ticket[Any], topics: Collection[TopicName], nursery: trio.Nursery
    ) -> bool:
        """Return True if a commit has to wait for ``topics``; if not, none is enlisted between this and the step."""
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
        patience_s = self._settings.commit_deadline_s
        missing = await close_pointers(self._ask, topics, core.pointers(frozen[0]), patience_s)
        if self._waiting.get(frozen) is not waiting:
            return  # the service fell, and has completed the waiting tickets
        del self._waiting[frozen]
        if not missing:
            for ticket in waiting:
                self._closed[ticket] = frozen[1]
                self._resume(ticket)
            return
        core.thaw(*frozen)
        self._on_thawed()
        named = ", ".join(map(str, sorted(missing)[:MAX_NAMED_TOPICS]))
        log.warning("commit given up for now", extra={"transaction": frozen[0], "topics": len(missing), "first": named})
        down = f"no answer from {counted(len(missing), 'topic')}: {named}"
        for ticket in waiting:
            ticket.settle(TransactionsUnavailable(down, hint="nothing happened; commit again"))

    def waiting(self) -> list[Ticket[Any]]:
        """Return all tickets."""
        return [*self._closed, *(each for tickets in self._waiting.values() for each in tickets)]

    def abandon(self) -> list[Ticket[Any]]:
        """Drop all tickets, and return them for the caller to complete."""
        gone = self.waiting()
        self._waiting.clear()
        self._closed.clear()
        return gone


# --- requests to topics, each at its owner, until no topic answers ---------------------------------
#
# Each attempt asks all topics of a transaction again. So the deadline counts from the last answer: if it counted from
# the start, a transaction with many topics could never be decided. A topic that does not answer ends the attempt
# after the others have answered.
#
# An attempt takes at most one deadline for every sixteen requests, which is enough if each is answered within the
# deadline. Without that bound, fifteen silent topics could leave one slot to thousands of slow ones, in sequence.
# Committed readers would wait for all of them, since a transaction does not time out during its commit.


#: Concurrent requests.
_TOPICS_AT_ONCE = 16
#: Pauses before an unavailable topic is asked again; the last one repeats.
_PAUSES_S = (0.02, 0.1, 0.5, 1.0)


async def roll_back(index: PointerLocations, ask: AskTopic, pointers: Iterable[int], patience_s: float) -> set[int]:
    """Roll these pointers back in every topic that has rows of them; return those without a visible row left.

    The authority must already refuse writes under them. An unavailable topic is asked again until no topic has answered
    for ``patience_s``. Idempotent. Never raises.
    """
    wanted = tuple(pointers)
    asked = [
        (name, RollBackPointer(pointer, by_client=False)) for pointer in wanted for name in index.topics_of((pointer,))
    ]
    done = {(name, what.pointer) for name, what in await _ask_all(ask, asked, patience_s)}
    # The index lists a topic before it writes, so the topics found above include all writes that were under way.
    return {pointer for pointer in wanted if all((name, pointer) in done for name in index.topics_of((pointer,)))}


async def close_pointers(
    ask: AskTopic, topics: Iterable[TopicName], pointers: Sequence[int], patience_s: float
) -> set[TopicName]:
    """Have these topics close pointers; return the topics that did not in time.

    The transaction must be frozen, so that no more topics are enlisted. In the other topics the messages under these
    pointers are durable, and no more are written. Gives up once no topic has answered for ``patience_s``. Never raises.
    """
    wanted, what = set(topics), ClosePointers(pointers)
    closed = await _ask_all(ask, [(name, what) for name in sorted(wanted)], patience_s)
    return wanted.difference(name for name, _ in closed)


async def _ask_all(
    ask: AskTopic, wanted: Sequence[tuple[TopicName, _Asked]], patience_s: float
) -> list[tuple[TopicName, _Asked]]:
    """Send all requests; return those done before ``patience_s`` passed without an answer, or the total time was up."""
    done: list[tuple[TopicName, _Asked]] = []
    limit = trio.CapacityLimiter(_TOPICS_AT_ONCE)
    rounds = -(-len(wanted) // _TOPICS_AT_ONCE)
    last_s = trio.current_time() + rounds * patience_s
    with trio.move_on_after(patience_s) as scope:

        async def one(name: TopicName, what: _Asked) -> None:
            async with limit:
                if await _ask_until_answered(ask, name, what):
                    done.append((name, what))
                scope.deadline = min(trio.current_time() + patience_s, last_s)

        async with trio.open_nursery() as nursery:
            for name, what in wanted:
                nursery.start_soon(one, name, what)
    return done


async def _ask_until_answered(ask: AskTopic, name: TopicName, wanted: Ask[Any]) -> bool:
    """Ask until there is an answer; return False if the topic refused."""
    backoff = Backoff(_PAUSES_S)
    while True:
        try:
            await ask(name, wanted)
        except (Unavailable, ShuttingDown):
            pass  # the topic recovers, or moves to another owner
        except PlainsongError as error:
            what = "rollback refused" if isinstance(wanted, RollBackPointer) else "closing refused"
            log.warning(what, extra={"topic": str(name), "asked": repr(wanted), "why": error.detail})
            return False
        else:
            return True
        await trio.sleep(backoff.failed())


#: Concurrent aborts.
_ABORTS_AT_ONCE = 256


async def abort_all(abort: Callable[[int], Awaitable[object]], transaction_ids: Iterable[int]) -> None:
    """Abort transactions; one that has been decided or forgotten is not a failure. Raises the first other error."""
    failures: list[PlainsongError] = []
    limit = trio.CapacityLimiter(_ABORTS_AT_ONCE)

    async def one(transaction_id: int) -> None:
        async with limit:
            try:
                await abort(transaction_id)
            except (TransactionNotFound, TransactionNotInProgress):
                pass
            except PlainsongError as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        for transaction_id in transaction_ids:
            nursery.start_soon(one, transaction_id)
    if failures:
        raise failures[0]


# --- the topics of undecided transactions, and the messages that they hide -------------------------


#: How long topics may take to answer.
_STATUS_TIMEOUT_S = 2.0
#: Topics asked for one answer; if there are more, the number of hidden messages is unknown.
_MAX_STATUS_TOPICS = 200
_STATUS_REQUESTS_AT_ONCE = 16


async def with_topics(
    statuses: Sequence[TransactionStatus],
    index: PointerLocations,
    ask: AskTopic,
    sees: Sees | None = None,
) -> list[TransactionStatus]:
    """Add the topics to each status, and the number of hidden messages to those in progress.

    Args:
      sees: True if the caller may see a topic of a transaction; other topics are omitted, and not counted. None: all.
    """
    topics = {
        status.transaction_id: sorted(
            name for name in index.topics_of(status.pointers) if sees is None or sees(status, name)
        )
        for status in statuses
    }
    holding = {name for each in statuses if each.state == "in_progress" for name in topics[each.transaction_id]}
    hidden = await _hidden(sorted(holding)[:_MAX_STATUS_TOPICS], ask)
    return [
        replace(
            each,
            topics=tuple(topics[each.transaction_id]),
            hidden_messages=_hidden_by(each, topics[each.transaction_id], hidden) if each.state == "in_progress" else 0,
        )
        for each in statuses
    ]


def _hidden_by(
    status: TransactionStatus, topics: Iterable[TopicName], hidden: dict[TopicName, dict[int, int]]
) -> int | None:
    """Return the number of messages that a transaction hides, None if unknown; its first pointer hides all after it."""
    count = 0
    for name in topics:
        if name not in hidden:
            return None
        count += max(hidden[name].get(pointer, 0) for pointer in status.pointers)
    return count


async def _hidden(topics: Sequence[TopicName], ask: AskTopic) -> dict[TopicName, dict[int, int]]:
    """Return for each topic that answers in time: the number of messages that each pointer hides in it."""
    found: dict[TopicName, dict[int, int]] = {}
    if not topics:
        return found
    limit = trio.CapacityLimiter(_STATUS_REQUESTS_AT_ONCE)

    async def one(name: TopicName) -> None:
        async with limit:
            try:
                found[name] = {view.pointer: view.hidden for view in await ask(name, ListPointers())}
            except PlainsongError:
                return  # deleted or unavailable: the number is unknown

    with trio.move_on_after(_STATUS_TIMEOUT_S):
        async with trio.open_nursery() as nursery:
            for name in topics:
                nursery.start_soon(one, name)
    return found

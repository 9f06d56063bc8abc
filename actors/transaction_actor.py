"""The actor of the transaction service: the one writer of its rows, and its whole life on one screen.

    load ──► wait ──► step ──► commit ──► wait …
      ▲                          │
      └──────── fall ◄───────────┘ the store failed: everybody learns that nobody knows

Two kinds of request take a way round. A commit under whose pointers a topic is writing waits until it is not; where
topics may be other instances', each that is enlisted is asked to close them. An abort of what has rows goes to the
topics first, and comes back when they are rolled back, or could not be in time; one that a crash interrupted goes on
after the load.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import trio

from actors.closing import Closing
from actors.mailbox import Ticket
from actors.settling import roll_back
from actors.supervision import moved
from actors.unanswered import fail, unknown
from protocol.effects import Table
from protocol.errors import PlainsongError, TransactionsUnavailable
from protocol.names import TopicName
from protocol.transactions.manager.asks import (
    Abort,
    CloseFirst,
    Commit,
    FinishAbort,
    RollFirst,
)
from protocol.transactions.manager.loading import Loading
from protocol.transactions.manager.rows import SERVICE_RANGE
from protocol.transactions.manager.step import Now
from protocol.transactions.mirrored import Changes
from storage.base import Deposed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actors.clock import Clock
    from actors.mailbox import Mailbox
    from actors.pointer_index import PointerIndex
    from actors.settling import AskTopic
    from actors.whereabouts import Everywhere
    from protocol.transactions.manager.core import ManagerCore
    from protocol.transactions.manager.settings import TransactionSettings
    from protocol.transactions.manager.step import Step
    from storage.base import Claim, Row, Store

#: What the service's rows are claimed and written as: no topic has an empty namespace.
SERVICE_NAME = TopicName("", "transactions")


class TransactionActor:
    """Owns the ledger; everybody else holds its mailbox, or looks between two steps."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        index: PointerIndex,
        ask: AskTopic,
        settings: TransactionSettings,
        mailbox: Mailbox,
        on_settled: Callable[[Step], object],
        everywhere: Everywhere | None = None,
    ) -> None:
        """``everywhere``: given where topics are enlisted, and others may claim the service; filled at each load."""
        self._store = store
        self._everywhere = everywhere
        self._where = index if everywhere is None else everywhere
        self._clock = clock
        self._index = index
        self._ask = ask
        self._settings = settings
        self._mailbox = mailbox
        self._on_settled = on_settled
        self.core: ManagerCore | None = None
        self.claim: Claim | None = None
        #: What became of pointers since this owner began, and who waits for more.
        self.changes = Changes(-1)
        self.changed = trio.Event()
        #: Tickets that come from inside, and jump the queue.
        self._returning: list[Ticket[Any]] = []
        self._pause = trio.CancelScope()
        self._frozen: set[Ticket[Any]] = set()
        self._closing = Closing(ask, settings, self._return, self._look_at_time)
        self._aborting: dict[int, list[Ticket[Any]]] = {}

    async def run(self, on_loaded: Callable[[], None], nursery: trio.Nursery) -> None:
        """Serve the mailbox until it is closed; what goes round to topics runs in ``nursery``.

        Raises what the store raises, after everybody whose request was under way has been told.
        """
        claim = await self._store.claim(SERVICE_NAME)
        core = await self._load()
        if self._everywhere is None:
            core.enlist_nobody()
        else:
            await self._everywhere.load(self._store, core)
        self.core, self.claim, self.changes = core, claim, Changes(claim.epoch)
        on_loaded()
        try:
            for unfinished in core.being_aborted():
                self._go_round(core, unfinished, (), nursery)
            while True:
                try:
                    tickets = await self._wait(core)
                except trio.EndOfChannel:
                    return
                await self._commit(core, claim, tickets, nursery)
        except Deposed:
            self._forsake(moved)
            raise
        finally:
            self.core = None
            self._forsake(self._mailbox.closed_for or _fell)  # closed: it is leaving, or moves
            self.wake_mirrors()

    async def _load(self) -> ManagerCore:
        loading = Loading()

        def take(rows: list[Row]) -> bool:
            loading.feed(rows)
            return True

        await self._store.scan(Table.METADATA, *SERVICE_RANGE, take)
        return loading.core(self._settings, self._now())

    async def _wait(self, core: ManagerCore) -> Sequence[Ticket[Any]]:
        """What has arrived or come back, or nothing once a time-out is due."""
        if self._returning:
            await trio.lowlevel.checkpoint()
        else:
            deadline_s = core.next_deadline_s()
            with trio.CancelScope(deadline=inf if deadline_s is None else deadline_s) as self._pause:
                return await self._mailbox.receive_batch(self._settings.commit_requests, self._settings.mailbox_bytes)
        tickets, self._returning = self._returning, []
        return tickets

    def _look_at_time(self) -> None:
        """Somebody's time may be over that was not counted before."""
        self._pause.cancel()

    def _return(self, ticket: Ticket[Any]) -> None:
        """A ticket comes from inside."""
        self._returning.append(ticket)
        self._pause.cancel()

    # --- one commit -------------------------------------------------------------------------------

    async def _commit(
        self, core: ManagerCore, claim: Claim, tickets: Sequence[Ticket[Any]], nursery: trio.Nursery
    ) -> None:
        """One step and, if it has something to write, one commit; then, and only then, the answers."""
        step: Step | None = None
        ready = [ticket for ticket in tickets if not self._set_aside(core, ticket, nursery)]
        try:
            step = core.step([(ticket, ticket.ask) for ticket in ready], self._now())
            operations = core.operations(step)
            if operations:
                await self._store.write(operations, claim=claim)
            elif ready and self._everywhere is not None:
                await self._store.check(claim)
            answers = core.settled(step)
        except BaseException as error:
            fail(ready, step, error, shared=self._everywhere is not None)
            raise
        if self._everywhere is not None:
            self._everywhere.dropped(step.decided)
        self._tell_mirrors([each for change in step.changes for part in change for each in part] + step.forgotten)
        self._index.decided(step.decided)
        for pointer in step.invalidated:
            self._index.wake(pointer)
        self._on_settled(step)
        for ticket, answer in answers:
            if isinstance(answer, RollFirst):
                self._go_round(core, answer, (_as_ticket(ticket),), nursery)
            elif isinstance(answer, CloseFirst):
                self._return(_as_ticket(ticket))
            else:
                _as_ticket(ticket).settle(answer)

    def _set_aside(self, core: ManagerCore, ticket: Ticket[Any], nursery: trio.Nursery) -> bool:
        """Whether a commit has to wait. Nothing is awaited between this and the step, so nothing comes in between."""
        ask = ticket.ask
        if isinstance(ask, Abort):
            ask.has_rows = bool(self._where.topics_of(core.pointers(ask.transaction_id)))
        elif isinstance(ask, Commit):
            pointers = core.pointers(ask.transaction_id)
            if self._everywhere is not None:
                return self._closing.sets_aside(core, ticket, self._where.topics_of(pointers), nursery)
            if self._index.busy(pointers) and core.freeze(ask.transaction_id):
                self._frozen.add(ticket)
                nursery.start_soon(self._wait_for_quiet, ticket, pointers)
                return True
        return False

    def wake_mirrors(self) -> None:
        """Whoever waits for changes looks."""
        self.changed.set()
        self.changed = trio.Event()

    def _tell_mirrors(self, pointers: Sequence[int]) -> None:
        if pointers:
            self.changes.took(pointers)
            self.wake_mirrors()

    async def _wait_for_quiet(self, ticket: Ticket[Any], pointers: Sequence[int]) -> None:
        await self._index.quiet(pointers)
        if ticket in self._frozen:  # else the actor fell meanwhile, and has said so
            self._frozen.discard(ticket)
            self._return(ticket)

    # --- aborts that go round ---------------------------------------------------------------------

    def _go_round(
        self, core: ManagerCore, first: RollFirst, tickets: Iterable[Ticket[Any]], nursery: trio.Nursery
    ) -> None:
        """Roll back everywhere, then finish the abort; whoever asks meanwhile gets the same answer."""
        waiting = self._aborting.get(first.transaction_id)
        if waiting is not None:
            waiting.extend(tickets)
            return
        self._aborting[first.transaction_id] = list(tickets)
        nursery.start_soon(self._round, core, first)

    async def _round(self, core: ManagerCore, first: RollFirst) -> None:
        deadline_s = trio.current_time() + self._settings.abort_deadline_s
        reached = await roll_back(self._where, self._ask, first.pointers, deadline_s)
        if self.core is not core:
            return  # it fell: those who waited know, and the next one goes round again
        ticket: Ticket[Any] = Ticket(FinishAbort(first.transaction_id, complete=len(reached) == len(first.pointers)))
        self._return(ticket)
        answer: object
        try:
            answer = await ticket.wait(lambda _: None)
        except PlainsongError as error:
            answer = error
        if self.core is core:
            for each in self._aborting.pop(first.transaction_id, ()):
                each.settle(answer)

    # --- the end ----------------------------------------------------------------------------------

    def _forsake(self, nothing_happened: Callable[[], PlainsongError]) -> None:
        """Tell those who went round that their way has ended; a begun abort goes on after the next load."""
        for ticket in (*self._frozen, *self._closing.forsake()):
            ticket.settle(nothing_happened())
        self._frozen.clear()
        rolling = [ticket for waiting in self._aborting.values() for ticket in waiting]
        self._aborting.clear()
        for ticket in (*rolling, *self._returning):
            ticket.settle(unknown("the transaction service fell, or is leaving"))
        self._returning.clear()

    def _now(self) -> Now:
        return Now(self._clock.now_ms(), trio.current_time())


def _fell() -> TransactionsUnavailable:
    return TransactionsUnavailable("the transaction service fell", hint="nothing happened; ask again")


def _as_ticket(ticket: object) -> Ticket[Any]:
    return ticket  # type: ignore[return-value]  # the core gives back what it was given

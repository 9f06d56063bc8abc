"""The actor of the transaction service: the one writer of the ledger; see ``actors/actor.py`` for its life cycle."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any

import trio

from actors.actor import Actor, Supervision
from actors.decisions import PointerClosing, roll_back
from actors.mailbox import Ticket
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, TransactionsUnavailable
from plainsong.protocol.transactions.asks import (
    Abort,
    CloseFirst,
    Commit,
    FinishAbort,
    InvalidBefore,
    ListAll,
    LookAt,
    Nothing,
    RollFirst,
)
from plainsong.protocol.transactions.ledger import MANY_INVALID, ManagerNow, ManagerStep
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from plainsong.protocol.transactions.manager import LedgerLoader, ManagerCore
from plainsong.protocol.transactions.replica import PointerChanges
from storage.base import SERVICE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actors.actor import Answers
    from actors.decisions import AskTopic
    from actors.mailbox import Mailbox, RunQueue
    from actors.observe import Clock, TransactionObserver
    from actors.pointers import ClusterPointerLocations, PointerIndex
    from plainsong.protocol.effects import Operation
    from plainsong.protocol.transactions.ledger import TransactionSettings
    from storage.base import Claim, Deposed, Row, Store

log = logging.getLogger(__name__)

#: Requests that change nothing, so that a failed commit cannot leave their outcome unknown.
TRANSACTION_READS = (InvalidBefore, ListAll, LookAt, Nothing)
#: How long callers wait for the first load: shorter than the time-out of requests between instances.
FIRST_LOAD_TIMEOUT_S = 3.0


class TransactionActor(Actor[ManagerCore, ManagerStep]):
    """Owns the ledger; others read it between two turns.

    Two kinds of request take a detour before they are answered. A commit waits while a topic writes under its pointers;
    if topics may be owned by other instances, each enlisted topic is asked to close the pointers. An abort of a
    transaction with rows goes to the topics first, and returns when they have rolled back or the deadline has passed.
    An abort that a crash interrupted continues after the load.
    """

    reads = TRANSACTION_READS

    def __init__(
        self,
        store: Store,
        clock: Clock,
        index: PointerIndex,
        ask: AskTopic,
        settings: TransactionSettings,
        mailbox: Mailbox,
        on_settled: Callable[[ManagerStep], object],
        run_queue: RunQueue,
        cluster_locations: ClusterPointerLocations | None = None,
    ) -> None:
        """``cluster_locations``: for a shared store, where topics are enlisted; filled by each load."""
        super().__init__(
            store,
            mailbox,
            commit_requests=settings.commit_requests,
            commit_bytes=settings.mailbox_bytes,
            run_queue=run_queue,
        )
        self._cluster_locations = cluster_locations
        self._locations = index if cluster_locations is None else cluster_locations
        self._clock = clock
        self._index = index
        self._ask = ask
        self._settings = settings
        self._on_settled = on_settled
        #: Where detours run; set before ``run``.
        self.nursery: trio.Nursery
        #: Changes of pointers under the present claim, and the event of the next change.
        self.changes = PointerChanges(-1)
        self.changed = trio.Event()
        #: The kinds of requests that may take a detour: called before the step; True if the ticket has to wait first.
        self._detours: dict[type[object], Callable[[ManagerCore, Ticket[Any]], bool]] = {
            Abort: self._find_rows,
            Commit: self._waits_for_topics,
        }
        #: Tickets that return from a detour; they are served before the mailbox.
        self._returning: list[Ticket[Any]] = []
        #: Commits that wait until no topic writes under their pointers.
        self._frozen: set[Ticket[Any]] = set()
        self._closing = PointerClosing(ask, settings, self._return, mailbox.wake)
        #: True if the log says, since the load, that begins of Tephra's clients wait for the disk.
        self._reported_many_invalid = False
        #: Aborts that topics are rolling back, by transaction.
        self._aborting: dict[int, list[Ticket[Any]]] = {}

    # --- life -------------------------------------------------------------------------------------

    async def _load(self) -> tuple[ManagerCore, Claim]:
        claim = await self._store.claim(SERVICE_NAME)
        loader = LedgerLoader()

        def take(rows: Sequence[Row]) -> bool:
            loader.feed(rows)
            return True

        # A begin's row may be in a later commit than the head that has its pointer, and in a topic's: so a crash must
        # leave neither a part of a commit nor a commit without those begun before it.
        defers_begins = self._store.traits.ordered_commits
        if defers_begins:
            # A topic's commit under way may have a begin row that this load must find. No commit can add more: without
            # a core there are no begins.
            await self._index.no_writes()
        await self._store.scan(Table.METADATA, *SERVICE_RANGE, take)
        core = loader.core(self._settings, self._now(), defers_begins=defers_begins)
        lost, invalid = len(core.ledger.unwritten), len(core.ledger.invalid)
        if lost:
            log.warning("begins of Tephra's clients lost", extra={"lost": lost, "invalid": invalid})
        if self._cluster_locations is None:
            core.drop_enlistments()
        else:
            await self._cluster_locations.load(self._store, core)
        return core, claim

    def _begin(self, core: ManagerCore, claim: Claim) -> None:
        self.changes = PointerChanges(claim.epoch)
        self._index.begins = core
        self._reported_many_invalid = False
        for unfinished in core.unfinished_aborts():
            self._roll_back_first(core, unfinished, ())

    def _has_mail(self) -> bool:
        return bool(self._returning) or super()._has_mail()

    def _return(self, ticket: Ticket[Any]) -> None:
        """Queue a ticket that returns from its detour."""
        self._returning.append(ticket)
        self._has_arrived()

    async def _close(self, core: ManagerCore, claim: Claim) -> None:
        """Write the rows that no commit has included; detours end with the actor."""
        for operations in core.close():
            await self._store.write(operations, claim=claim)

    def _end(self, core: ManagerCore, error: Callable[[], PlainsongError]) -> None:
        """End the detours, and forget begins without a row.

        An abort that has begun continues after the next load, so its outcome is unknown.
        """
        self._index.begins = None
        for ticket in (*self._frozen, *self._closing.abandon()):
            ticket.settle(error())
        self._frozen.clear()
        rolling_back = [ticket for waiting in self._aborting.values() for ticket in waiting]
        self._aborting.clear()
        for ticket in (*rolling_back, *self._returning):
            ticket.settle(self._outcome_unknown("the transaction service failed, or is shutting down"))
        self._returning.clear()
        self.wake_replicas()

    # --- one turn ---------------------------------------------------------------------------------

    def _ready(self, core: ManagerCore, tickets: Sequence[Ticket[Any]]) -> Sequence[Ticket[Any]]:
        """Return the tickets back from a detour and the new ones, except those that have to take one first.

        No other task runs between this and the step.
        """
        if self._returning:
            returned, self._returning = self._returning, []
            tickets = [*returned, *tickets]
        ready = []
        for ticket in tickets:
            detour = self._detours.get(type(ticket.ask))
            if detour is None or not detour(core, ticket):
                ready.append(ticket)
        return ready

    def _step(self, core: ManagerCore, tickets: Sequence[Ticket[Any]]) -> ManagerStep:
        return core.step([(ticket, ticket.ask) for ticket in tickets], self._now())

    def _operations(self, core: ManagerCore, step: ManagerStep) -> Sequence[Operation]:
        return core.operations(step)

    def _commit_begins(self, step: ManagerStep) -> None:
        """Do nothing: no reader depends on writes under way."""

    def _commit_ends(self, step: ManagerStep, *, is_durable: bool) -> None:
        """Do nothing; see ``_commit_begins``."""

    def _settled(self, core: ManagerCore, step: ManagerStep) -> Answers:
        return core.settled(step)

    def _settle(self, core: ManagerCore, step: ManagerStep, answers: Answers) -> None:
        if self._cluster_locations is not None:
            self._cluster_locations.dropped(step.decided)
            self._notify_replicas(step)
        self._index.decided(step.decided)
        for pointer in step.invalidated:
            self._index.wake(pointer)
        self._on_settled(step)
        if core.ledger.has_many_invalid is not self._reported_many_invalid:
            self._report_many_invalid(core)
        for ticket, answer in answers:
            if isinstance(answer, RollFirst):
                self._roll_back_first(core, answer, (ticket,))
            elif isinstance(answer, CloseFirst):
                self._return(ticket)
            else:
                ticket.settle(answer)

    def _report_many_invalid(self, core: ManagerCore) -> None:
        """Log that begins of Tephra's clients wait for the disk from now on, or no longer."""
        self._reported_many_invalid = core.ledger.has_many_invalid
        extra = {"invalid": len(core.ledger.invalid), "bound": MANY_INVALID}
        if self._reported_many_invalid:
            log.warning("many invalid transactions: starts of Tephra's clients wait for the disk", extra=extra)
        else:
            log.info("starts of Tephra's clients no longer wait for the disk", extra=extra)

    def wake_replicas(self) -> None:
        """Wake replicas that wait for a change."""
        self.changed.set()
        self.changed = trio.Event()

    def _notify_replicas(self, step: ManagerStep) -> None:
        """Record the changed pointers for the replicas on other instances."""
        pointers = [each for change in step.changes for part in change for each in part] + step.forgotten
        if pointers:
            self.changes.record(pointers)
            self.wake_replicas()

    def _now(self) -> ManagerNow:
        return ManagerNow(self._clock.now_ms(), trio.current_time())

    def end_late(self, refusal: Callable[[], PlainsongError]) -> None:
        """See ``Actor.end_late``; requests on a detour may still take effect."""
        super().end_late(refusal)
        for ticket in (*self._returning, *self._frozen, *self._closing.waiting(), *chain(*self._aborting.values())):
            ticket.settle(self._outcome_unknown(refusal().detail))

    # --- commits that wait for topics -------------------------------------------------------------

    def _waits_for_topics(self, core: ManagerCore, ticket: Ticket[Any]) -> bool:
        """Return True if a commit has to wait until no topic writes under its pointers."""
        ask = ticket.ask
        assert isinstance(ask, Commit)
        pointers = core.pointers(ask.transaction_id)
        if self._cluster_locations is not None:
            return self._closing.defer(core, ticket, self._locations.topics_of(pointers), self.nursery)
        if not (self._index.busy(pointers) and core.freeze(ask.transaction_id)):
            return False
        self._frozen.add(ticket)
        self.nursery.start_soon(self._wait_for_writes, ticket, pointers)
        return True

    async def _wait_for_writes(self, ticket: Ticket[Any], pointers: Sequence[int]) -> None:
        await self._index.quiet(pointers)
        if ticket in self._frozen:  # otherwise the actor fell, and has completed it
            self._frozen.discard(ticket)
            self._return(ticket)

    # --- aborts that topics roll back first -------------------------------------------------------

    def _find_rows(self, core: ManagerCore, ticket: Ticket[Any]) -> bool:
        """Tell an abort whether its transaction has rows: then the step answers RollFirst, and it takes its detour."""
        ask = ticket.ask
        assert isinstance(ask, Abort)
        ask.has_rows = bool(self._locations.topics_of(core.pointers(ask.transaction_id)))
        return False

    def _roll_back_first(self, core: ManagerCore, first: RollFirst, tickets: Iterable[Ticket[Any]]) -> None:
        """Roll back the transaction's rows in every topic, then finish the abort; later requests share its answer."""
        waiting = self._aborting.get(first.transaction_id)
        if waiting is not None:
            waiting.extend(tickets)
            return
        self._aborting[first.transaction_id] = list(tickets)
        self.nursery.start_soon(self._roll_back, core, first)

    async def _roll_back(self, core: ManagerCore, first: RollFirst) -> None:
        reached = await roll_back(self._locations, self._ask, first.pointers, self._settings.abort_deadline_s)
        if self.core is not core:
            return  # the actor fell and completed the callers' tickets; the next load starts the rollback again
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

    # --- errors for callers -----------------------------------------------------------------------

    def _moved(self) -> NoOwner:
        return service_moved()

    def _fall_error(self) -> PlainsongError:
        if self._mailbox.closed_for is not None:
            return self._mailbox.closed_for()  # the daemon shuts down, or the service moves
        return TransactionsUnavailable("the transaction service failed", hint="nothing happened; retry")

    def _unavailable(self, why: str) -> PlainsongError:
        return TransactionsUnavailable(why, hint="nothing happened; retry")

    def _outcome_unknown(self, why: str) -> PlainsongError:
        return OutcomeUnknown(why, hint="look up the transaction's outcome, or send the request again")


def service_moved() -> NoOwner:
    """Return the error of a call that did nothing because another instance owns the service."""
    return NoOwner("another instance owns the transaction service", hint="nothing happened; retry")


def service_not_loaded() -> TransactionsUnavailable:
    """Return the error of a call that did nothing because the actor is not loaded yet, or has fallen."""
    return TransactionsUnavailable(
        "the transaction service is being loaded", hint=("publishing and polling without transactions still work")
    )


class ServiceSupervision(Supervision):
    """Keeps the service's actor running.

    Callers wait for its first load, as for a topic that is opened. After a fall or a failed load they are refused at
    once until it is loaded again; otherwise every transaction request would hang.
    """

    def __init__(self, mailbox: Mailbox, observer: TransactionObserver) -> None:
        super().__init__(mailbox, "transaction service")
        self._observer = observer
        self._on_loaded: Callable[[], None] = lambda: None
        mailbox.closed_for = service_not_loaded

    async def run(self, actor: TransactionActor, on_loaded: Callable[[], None]) -> None:
        """Run the actor until it is closed or deposed. ``on_loaded``: called after each load."""
        self._on_loaded = on_loaded
        await self._supervise(actor.run)

    async def first_load(self) -> None:
        """Wait until the first load has ended or will not be attempted, up to ``FIRST_LOAD_TIMEOUT_S``."""
        if not self.first_load_ended.is_set():
            with trio.move_on_after(FIRST_LOAD_TIMEOUT_S):
                await self.first_load_ended.wait()

    def close(self, *, given_away: bool = False) -> None:
        """See ``Supervision.close``; callers that wait for the first load are refused at once."""
        super().close(given_away=given_away)
        self.first_load_ended.set()

    @property
    def _moved(self) -> Callable[[], NoOwner]:
        return service_moved

    def _refuse(self, error: Exception) -> None:
        self.mailbox.closed_for = service_not_loaded
        self.mailbox.drain(service_not_loaded)

    def _report_loaded(self, load_s: float) -> None:
        self._observer.loaded(load_s)
        self._on_loaded()

    def _report_fall(self, error: Exception) -> None:
        self._observer.fell(error)

    def _report_deposed(self, error: Deposed) -> None:
        log.warning("transaction service taken over", extra={"why": str(error)})

"""The transaction service: begins, decides and remembers transactions; its actor, and its replication.

Routes, Thrift, topics and readers call ``TransactionService``. Its actor has the life cycle of every actor
(``actors/actor.py``): when it crashes it is loaded again from disk, at once and then with growing pauses. Until then
every call, and every publish under a pointer, fails with TransactionsUnavailable; plain publishes and polls continue.
"""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from actors.actor import Actor, Supervision, as_ticket
from actors.decisions import PointerClosing, abort_all, roll_back, with_topics
from actors.mailbox import Mailbox, SingleFlight, Ticket, Turns
from actors.observe import NoTransactionObserver, TransactionObserver
from actors.pointers import ClusterPointerLocations
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, Overloaded, PlainsongError, TransactionsUnavailable
from plainsong.protocol.names import TopicName
from plainsong.protocol.tephra.state import encode_snapshot, manager_state
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.asks import (
    Abort,
    CloseFirst,
    Commit,
    CompletePass,
    FinishAbort,
    InvalidBefore,
    ListAll,
    LookAt,
    Nothing,
    RollFirst,
)
from plainsong.protocol.transactions.ledger import ManagerNow, ManagerStep, TransactionSettings
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from plainsong.protocol.transactions.manager import LedgerLoader, ManagerCore, pruning_figures
from plainsong.protocol.transactions.replica import UNKNOWN_VERSION, PointerChanges, replica_update
from plainsong.protocol.transactions.transaction import TransactionType
from storage.base import Deposed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actors.actor import Answers
    from actors.decisions import AskTopic, Sees
    from actors.observe import Clock
    from actors.pointers import PointerIndex, PointerLocations
    from plainsong.protocol.effects import Ask, Operation
    from plainsong.protocol.transactions.asks import (
        Begun,
        Decision,
        PruningFigures,
        ServiceFigures,
        State,
        TransactionStatus,
    )
    from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion
    from plainsong.protocol.transactions.transaction import Standing, Transaction
    from plainsong.protocol.transactions.view import Moment, View
    from storage.base import Claim, Row, Store

log = logging.getLogger(__name__)
A = TypeVar("A")


class TransactionService:
    """Implements ``Authority``; every call except ``close`` raises TransactionsUnavailable while it is down."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        pointers: PointerIndex,
        ask: AskTopic,
        settings: TransactionSettings | None = None,
        observer: TransactionObserver | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Create the service; ``run`` loads it.

        Args:
          ask: asks a topic at its owner. On a shared store topics must be enlisted.
          turns: those of the topics, to share commits with them; None: its own.
        """
        self.settings = settings or TransactionSettings()
        self._clock = clock
        cluster_locations = ClusterPointerLocations() if store.traits.shared else None
        self._locations: PointerLocations = pointers if cluster_locations is None else cluster_locations
        self._ask_topic = ask
        self._is_shared = store.traits.shared
        self._observer = observer or NoTransactionObserver()
        self._mailbox = Mailbox(self.settings.mailbox_requests, self.settings.mailbox_bytes)
        self._supervision = ServiceSupervision(self._mailbox, self._observer)
        self._turns = turns or Turns(store)
        self._actor = TransactionActor(
            store, clock, pointers, ask, self.settings, self._mailbox, self._settled, self._turns, cluster_locations
        )
        self._replicas = ReplicaServer(store, self._actor, self._supervision, lambda: self.close(given_away=True))

    def __repr__(self) -> str:
        return f"<TransactionService {self._actor.core!r} waiting={len(self._mailbox)}>"

    # --- life -------------------------------------------------------------------------------------

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Serve until closed; loads from disk, and again after each fall. ``on_loaded``: called after each load."""
        async with trio.open_nursery() as nursery:
            self._actor.nursery = nursery
            await self._supervision.run(self._actor, on_loaded)
            nursery.cancel_scope.cancel()

    def close(self, *, given_away: bool = False) -> None:
        """Refuse new requests, serve those that wait, then let ``run`` return.

        An abort that topics are rolling back continues after the next load.

        Args:
          given_away: another instance is to own the service.
        """
        self._supervision.close(given_away=given_away)
        self._actor.wake_replicas()

    @property
    def actor(self) -> TransactionActor:
        """The owner of the ledger."""
        return self._actor

    @property
    def deposed(self) -> bool:
        """True if another instance owns the service, or is to own it."""
        return self._supervision.is_elsewhere

    @property
    def known(self) -> ReplicaUpdate | None:
        """The update for a replica without any state; None while the service is not loaded."""
        core = self._actor.core
        return None if core is None else replica_update(core, self._actor.changes, UNKNOWN_VERSION)

    async def pointer_locations(self) -> PointerLocations:
        """Return where undecided pointers have rows; always current."""
        await trio.lowlevel.checkpoint()
        return self._locations

    def _settled(self, step: ManagerStep) -> None:
        for state in set(step.outcomes):
            self._observer.decided(state, step.outcomes.count(state))
        if step.timed_out:
            self._observer.timed_out(step.timed_out)
        for _ in range(step.conflicts):
            self._observer.conflicted()

    async def fresh(self) -> None:
        """Ensure that ``view`` shows every transaction whose commit was acknowledged before this call.

        Raises:
          TransactionsUnavailable: the state is unknown at present. NoOwner: another instance owns the service.
        """
        await self._replicas.fresh()

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        """Return the changes since ``known``, as soon as there are any, or after ``wait_ms``.

        Raises:
          TransactionsUnavailable, NoOwner: see ``fresh``. Overloaded: too many replicas wait.
        """
        return await self._replicas.sync(known, wait_ms)

    # --- without waiting --------------------------------------------------------------------------

    def standing(self, pointer: int) -> Standing:
        """Return the standing of a pointer. Raises TransactionsUnavailable while the service is not loaded."""
        return self._core().standing(pointer)

    def view(self) -> View:
        """Return what readers of committed messages may see now. Raises TransactionsUnavailable."""
        return self._core().view()

    def view_now(self) -> View | None:
        """Return ``view`` if it has every commit that was acknowledged before the call; None: call ``fresh`` first."""
        core = self._actor.core
        return None if core is None or self._is_shared or self.deposed else core.view()

    def figures(self) -> ServiceFigures:
        """Return figures for metrics. Raises TransactionsUnavailable."""
        return self._core().figures()

    def invalids(self) -> tuple[int, ...]:
        """Return the pointers on the invalid list, ascending. Raises TransactionsUnavailable."""
        return self._core().visible.invalids()

    def begin_pass(self) -> CompletePass:
        """Return the list and the prune bound for the janitor's next pass. Raises TransactionsUnavailable."""
        visible = self._core().visible
        return CompletePass(self._clock.now_ms(), visible.invalids(), visible.upper_bound())

    def pruning(self) -> PruningFigures:
        """Return figures for pruning by hand. Raises TransactionsUnavailable."""
        return pruning_figures(self._core(), self._locations.oldest_by_topic())

    def snapshot(self) -> bytes:
        """Return the complete durable state in Tephra's snapshot format V4. Raises TransactionsUnavailable."""
        core = self._core()
        return encode_snapshot(manager_state(core.ledger, core.visible, self._clock.now_ms()))

    # --- durable when answered --------------------------------------------------------------------

    async def begin(
        self,
        type: TransactionType = TransactionType.SHORT,  # noqa: A002  # the contract's word
        timeout_s: int | None = None,
        client_id: str = "unknown",
        owner: str | None = None,
    ) -> Begun:
        """Begin a transaction; it is durable when this returns.

        Tephra's clients write to other stores under its pointer, where a pointer on no list counts as committed.

        Raises:
          InvalidParameter: a time-out that is not positive, over the maximum, or given for a long transaction; a bad
            client id.
          Overloaded: too many are open or invalid.
        """
        return await self.ask(asks.Begin(type, timeout_s, client_id, owner, durable=True))

    async def prepare(self, transaction_id: int, changes: Sequence[bytes]) -> None:
        """Set or replace a transaction's change set, and check it for conflicts.

        Raises:
          ChangeConflict: with a transaction committed since it began.
          TransactionTooLarge: too many keys, or too many bytes of them.
          TransactionNotFound, TransactionNotInProgress.
        """
        await self.ask(asks.Prepare(transaction_id, changes, sum(map(len, changes))))

    async def commit(self, transaction_id: int) -> Decision:
        """Make a transaction visible atomically; a repeated commit gets the same answer while it is remembered.

        Raises:
          ChangeConflict: the transaction stays in progress, to be prepared again or aborted.
          TransactionNotFound: unknown, or forgotten.
          TransactionNotInProgress: aborted, invalid, or timed out.
        """
        answer = await self.ask(asks.Commit(transaction_id))
        assert not isinstance(answer, asks.CloseFirst)  # the actor handles it
        return answer

    async def abort(self, transaction_id: int) -> Decision:
        """Roll back a transaction's rows in every topic, then forget its pointers.

        The resulting state is ``aborted``, or ``invalid`` for a long transaction or if a topic could not be reached in
        time. Aborting an invalid transaction does the same. The abort continues if its caller is cancelled.

        Raises:
          TransactionNotFound: unknown, or forgotten; Thrift answers this as a success.
          TransactionNotInProgress: committed.
        """
        answer = await self.ask(asks.Abort(transaction_id))
        assert not isinstance(answer, asks.RollFirst)  # the actor handles it
        return answer

    async def invalidate(self, transaction_id: int) -> Decision:
        """Hide a transaction permanently; its rows stay. Raises TransactionNotFound, TransactionNotInProgress."""
        return await self.ask(asks.Invalidate(transaction_id))

    async def checkpoint(self, transaction_id: int, transaction: Transaction | None = None) -> Begun:
        """Return a new write pointer for a transaction; its snapshot stays the one it began with.

        Args:
          transaction: the client's copy; without it the snapshot is computed from the remembered outcomes.
        Raises:
          InvalidParameter: without ``transaction``, too much has been forgotten since it began.
          TransactionNotFound, TransactionNotInProgress, Overloaded.
        """
        return await self.ask(asks.Checkpoint(transaction_id, transaction))

    async def truncate(self, pointers: Sequence[int]) -> int:
        """Roll back the rows of pointers, then remove these from the invalid list; return how many.

        A pointer stays if one of its topics could not be reached in time.
        """
        invalid = set(self.invalids()).intersection(pointers)
        reached = await roll_back(self._locations, self._ask_topic, invalid, self.settings.abort_deadline_s)
        return await self.ask(asks.Unlist(sorted(reached)))

    async def truncate_before(self, before_ms: int) -> int:
        """Truncate all pointers issued before a time. Raises InvalidParameter if one of them is in progress."""
        return await self.truncate(await self.invalid_before(before_ms))

    async def invalid_before(self, before_ms: int) -> Sequence[int]:
        """Return the invalid pointers issued before a time. Raises InvalidParameter if one is still in progress."""
        return await self.ask(asks.InvalidBefore(before_ms))

    async def reset(self) -> None:
        """Roll back and forget open and invalid transactions, and drop change sets; ids keep rising, outcomes stay."""
        open_ = await self.ask(asks.ListAll("in_progress", limit=self.settings.max_open))
        await abort_all(self.abort, [status.transaction_id for status in open_])
        await self.truncate(self.invalids())
        await self.ask(asks.ForgetChanges())

    async def enlist(self, pointer: int, name: TopicName) -> tuple[int, ...]:
        """Enlist a topic that is about to write under a pointer; return all pointers of the transaction.

        Raises:
          TransactionNotInProgress: the transaction is decided, being decided, or was not issued here.
          Overloaded: too many topics.
        """
        return await self.ask(asks.Enlist(pointer, name))

    async def complete(self, passed: CompletePass) -> int:
        """Record a complete pass of the janitor, and prune the invalid list; return how many were pruned."""
        return await self.ask(asks.KeepPass(passed))

    # --- reads ------------------------------------------------------------------------------------

    async def look(self, transaction_id: int, sees: Sees | None = None) -> TransactionStatus:
        """Return the status of a transaction, by its id or a checkpoint's pointer; ``unknown`` if it is forgotten.

        ``sees``: see ``with_topics``.
        """
        status = await self.ask(asks.LookAt(transaction_id))
        return (await with_topics([status], self._locations, self._ask_topic, sees))[0]

    async def listed(
        self, state: State | None = None, limit: int = 1_000, after: int = 0, sees: Sees | None = None
    ) -> list[TransactionStatus]:
        """Return transactions, oldest first: of one state, or (None) all that are in progress or invalid.

        ``after``: see ``ListAll``; ``sees``: see ``with_topics``.
        """
        statuses = await self.ask(asks.ListAll(state, limit, after))
        return await with_topics(statuses, self._locations, self._ask_topic, sees)

    async def as_of(self, at_ms: int) -> Moment:
        """Return what had been decided by a moment; later decisions get a later time.

        Raises:
          AsOfTooOld: some of it has been forgotten. InvalidParameter: the moment is in the future.
        """
        return await self.ask(asks.AsOf(at_ms))

    def owner_of(self, pointer: int) -> str | None:
        """Return the name that began a pointer's transaction; None if it had none, ``""`` if it is forgotten here.

        Raises TransactionsUnavailable.
        """
        record = self._core().ledger.by_pointer.get(pointer)
        if record is None:
            record = self._core().ledger.outcomes.get(pointer)
        return "" if record is None else record.owner

    def id_of(self, pointer: int) -> int:
        """Return the id of a pointer's transaction; the pointer itself if it is unknown, or while the service loads."""
        core = self._actor.core
        record = None if core is None else core.ledger.by_pointer.get(pointer)
        return pointer if record is None else record.transaction_id

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all pointers of a pointer's transaction, or only itself. Raises TransactionsUnavailable."""
        return self._core().pointers_of(pointer)

    def open_of(self, name: str) -> int:
        """Return the number of a name's transactions that are open, or about to begin. Raises TransactionsUnavailable."""
        waiting = sum(1 for ask in self._mailbox.asks() if isinstance(ask, asks.Begin) and ask.owner == name)
        return waiting + sum(1 for record in self._core().ledger.open.values() if record.owner == name)

    @property
    def has_loaded(self) -> bool:
        """True once the first load, for which callers wait, has ended."""
        return self._supervision.first_load_ended.is_set()

    def put(self, ask: Ask[A], settled: Callable[[A | Exception], object]) -> None:
        """Ask without waiting; call only once it ``has_loaded``.

        Args:
          settled: see ``Future.on_settled``.
          Raises what ``Mailbox.put`` raises.
        """
        ticket = Ticket(ask)
        ticket.on_settled(settled)
        self._mailbox.put(ticket, wake=False)
        self._turns.wake_for(self._actor)

    async def ask(self, ask: Ask[A]) -> A:
        """Ask once the first load has ended; return the answer. Raises what ``Mailbox.ask`` raises."""
        await self._supervision.first_load()
        return await self._mailbox.ask(ask)

    def _core(self) -> ManagerCore:
        if self._actor.core is None:
            raise service_not_loaded()
        return self._actor.core


#: The name under which the service's rows are claimed and written; no topic has an empty namespace.
SERVICE_NAME = TopicName("", "transactions")
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
        turns: Turns,
        cluster_locations: ClusterPointerLocations | None = None,
    ) -> None:
        """``cluster_locations``: for a shared store, where topics are enlisted; filled by each load."""
        super().__init__(
            store,
            mailbox,
            commit_requests=settings.commit_requests,
            commit_bytes=settings.mailbox_bytes,
            turns=turns,
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
        #: Tickets that return from a detour; they are served before the mailbox.
        self._returning: list[Ticket[Any]] = []
        #: Commits that wait until no topic writes under their pointers.
        self._frozen: set[Ticket[Any]] = set()
        self._closing = PointerClosing(ask, settings, self._return, mailbox.wake)
        #: Aborts that topics are rolling back, by transaction.
        self._aborting: dict[int, list[Ticket[Any]]] = {}

    # --- life -------------------------------------------------------------------------------------

    async def _load(self) -> tuple[ManagerCore, Claim]:
        claim = await self._store.claim(SERVICE_NAME)
        loader = LedgerLoader()

        def take(rows: Sequence[Row]) -> bool:
            loader.feed(rows)
            return True

        # Begin rows go into commits of topics, so the service's later writes must not overtake those.
        defers_begins = self._store.traits.in_order and not self._shared
        if defers_begins:
            # A topic's commit under way may have a begin row that this load must find. No commit can add more: without
            # a core there are no begins.
            await self._index.no_writes()
        await self._store.scan(Table.METADATA, *SERVICE_RANGE, take)
        core = loader.core(self._settings, self._now(), defers_begins=defers_begins)
        if self._cluster_locations is None:
            core.drop_enlistments()
        else:
            await self._cluster_locations.load(self._store, core)
        return core, claim

    def _begin(self, core: ManagerCore, claim: Claim) -> None:
        self.changes = PointerChanges(claim.epoch)
        self._index.begins = core
        for unfinished in core.unfinished_aborts():
            self._roll_back_first(core, unfinished, ())

    def _has_mail(self) -> bool:
        return bool(self._returning) or super()._has_mail()

    def _return(self, ticket: Ticket[Any]) -> None:
        """Queue a ticket that returns from its detour."""
        self._returning.append(ticket)
        self._has_arrived()

    async def _close(self, core: ManagerCore, claim: Claim) -> None:
        """Write the begins that no commit has included; detours end with the actor."""
        operations = core.close()
        if operations:
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
        """Return the tickets back from a detour and the new ones, except commits that have to wait for topics first."""
        if self._returning:
            returned, self._returning = self._returning, []
            tickets = [*returned, *tickets]
        return [ticket for ticket in tickets if not self._defer(core, ticket)]

    def _step(self, core: ManagerCore, tickets: Sequence[Ticket[Any]]) -> ManagerStep:
        return core.step([(ticket, ticket.ask) for ticket in tickets], self._now())

    def _operations(self, core: ManagerCore, step: ManagerStep) -> Sequence[Operation]:
        return core.operations(step)

    def _commit_begins(self, step: ManagerStep) -> None:
        """Do nothing: no reader depends on writes under way."""

    def _commit_ends(self, step: ManagerStep, *, is_durable: bool) -> None:
        """Do nothing; see ``_commit_begins``."""

    def _committed(self, core: ManagerCore, step: ManagerStep) -> None:
        """Do nothing: ``_settled`` completes the step in the core."""

    def _settled(self, core: ManagerCore, step: ManagerStep) -> Answers:
        return core.settled(step)

    def _settle(self, core: ManagerCore, step: ManagerStep, answers: Answers) -> None:
        if self._cluster_locations is not None:
            self._cluster_locations.dropped(step.decided)
        self._notify_replicas([each for change in step.changes for part in change for each in part] + step.forgotten)
        self._index.decided(step.decided)
        for pointer in step.invalidated:
            self._index.wake(pointer)
        self._on_settled(step)
        for ticket, answer in answers:
            if isinstance(answer, RollFirst):
                self._roll_back_first(core, answer, (as_ticket(ticket),))
            elif isinstance(answer, CloseFirst):
                self._return(as_ticket(ticket))
            else:
                as_ticket(ticket).settle(answer)

    def wake_replicas(self) -> None:
        """Wake replicas that wait for a change."""
        self.changed.set()
        self.changed = trio.Event()

    def _notify_replicas(self, pointers: Sequence[int]) -> None:
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

    def _defer(self, core: ManagerCore, ticket: Ticket[Any]) -> bool:
        """Return True if a commit has to wait; no other task runs between this and the step."""
        ask = ticket.ask
        if isinstance(ask, Abort):
            ask.has_rows = bool(self._locations.topics_of(core.pointers(ask.transaction_id)))
        elif isinstance(ask, Commit):
            pointers = core.pointers(ask.transaction_id)
            if self._cluster_locations is not None:
                return self._closing.defer(core, ticket, self._locations.topics_of(pointers), self.nursery)
            if self._index.busy(pointers) and core.freeze(ask.transaction_id):
                self._frozen.add(ticket)
                self.nursery.start_soon(self._wait_for_writes, ticket, pointers)
                return True
        return False

    async def _wait_for_writes(self, ticket: Ticket[Any], pointers: Sequence[int]) -> None:
        await self._index.quiet(pointers)
        if ticket in self._frozen:  # else the actor crashed, and has completed it
            self._frozen.discard(ticket)
            self._return(ticket)

    # --- aborts that topics roll back first -------------------------------------------------------

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
            return  # the actor crashed and completed the callers' tickets; the next load starts the rollback again
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

    def _crash_error(self) -> PlainsongError:
        if self._mailbox.closed_for is not None:
            return self._mailbox.closed_for()  # the daemon shuts down, or the service moves
        return TransactionsUnavailable("the transaction service failed", hint="nothing happened; retry")

    def _unavailable(self, why: str) -> PlainsongError:
        return TransactionsUnavailable(why, hint="nothing happened; retry")

    def _outcome_unknown(self, why: str) -> PlainsongError:
        return OutcomeUnknown(why, hint="look up the transaction's outcome, or send the request again")


def service_moved() -> NoOwner:
    """Return the error for: another instance owns the service; nothing happened."""
    return NoOwner("another instance owns the transaction service", hint="nothing happened; retry")


def service_not_loaded() -> TransactionsUnavailable:
    """Return the error for: the actor is not loaded yet, or has fallen; nothing happened."""
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


#: Maximum of instances that wait for changes.
MAX_REPLICAS = 1_000


class ReplicaServer:
    """Answers replicas for one service; on a shared store, only after checking that its claim holds."""

    def __init__(
        self, store: Store, actor: TransactionActor, supervision: ServiceSupervision, deposed: Callable[[], object]
    ) -> None:
        """``deposed``: called if another instance has claimed the service in the store."""
        self._store = store
        self._actor = actor
        self._supervision = supervision
        self._deposed = deposed
        self._checking = SingleFlight(self._check)
        self._waiting = 0

    async def fresh(self) -> None:
        """See ``TransactionService.fresh``."""
        await self._supervision.first_load()
        self._here()
        if self._store.traits.shared:
            await self._checking()
        else:
            await trio.lowlevel.checkpoint()

    async def _check(self) -> None:
        core, claim = self._here(), self._actor.claim
        assert claim is not None  # there is a core
        try:
            await self._store.check(claim)
        except Deposed:
            self._deposed()
            raise service_moved() from None
        except PlainsongError as error:
            raise TransactionsUnavailable(error.detail, hint="ask again") from error
        if self._actor.core is not core:
            raise service_not_loaded()

    async def sync(self, known: ReplicaVersion, wait_ms: int) -> ReplicaUpdate:
        """See ``TransactionService.sync``."""
        await self._supervision.first_load()
        self._here()
        if wait_ms and known == self._actor.changes.version:
            await self._change(wait_ms)
        await self.fresh()
        return replica_update(self._here(), self._actor.changes, known)

    async def _change(self, wait_ms: int) -> None:
        if self._waiting >= MAX_REPLICAS:
            raise Overloaded(f"{self._waiting} instances already wait for the transaction service")
        self._waiting += 1
        try:
            with trio.move_on_after(wait_ms / 1000):
                await self._actor.changed.wait()
        finally:
            self._waiting -= 1

    def _here(self) -> ManagerCore:
        if self._supervision.is_elsewhere:
            raise service_moved()
        if self._actor.core is None:
            raise service_not_loaded()
        return self._actor.core

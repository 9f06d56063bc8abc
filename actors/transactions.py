"""The transaction service: begins, decides and remembers transactions; its actor, and its answers to replicas.

The transaction service: begins, decides and remembers transactions, for routes, Thrift, topics and readers.

It is supervised like a topic: when its actor falls it is loaded again from disk, at once and then with growing
pauses. Meanwhile every call raises TransactionsUnavailable, publishes under a pointer are refused with it, and
plain publishes and polls go on.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from actors.actor import Supervision, service_moved, service_not_loaded
from actors.decisions import PointerClosing, abort_all, roll_back, with_topics
from actors.mailbox import Mailbox, SingleFlight, Ticket
from actors.observe import NoTransactionObserver, TransactionObserver
from actors.pointers import ClusterPointerLocations
from plainsong.protocol.effects import Table
from plainsong.protocol.errors import OutcomeUnknown, Overloaded, PlainsongError, TransactionsUnavailable
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
from plainsong.protocol.transactions.ledger import ManagerNow, TransactionSettings
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from plainsong.protocol.transactions.manager import LedgerLoader, pruning_figures
from plainsong.protocol.transactions.replica import UNKNOWN_VERSION, PointerChanges, replica_update
from plainsong.protocol.transactions.transaction import TransactionType
from storage.base import Deposed, NothingWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actors.decisions import AskTopic
    from actors.observe import Clock
    from actors.pointers import PointerIndex, PointerLocations
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.transactions.asks import (
        Begun,
        Decision,
        PruningFigures,
        ServiceFigures,
        State,
        TransactionStatus,
    )
    from plainsong.protocol.transactions.ledger import ManagerStep
    from plainsong.protocol.transactions.manager import ManagerCore
    from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion
    from plainsong.protocol.transactions.transaction import Standing, Transaction
    from plainsong.protocol.transactions.view import View
    from storage.base import Claim, Row, Store

A = TypeVar("A")


class TransactionService:
    """Implements ``Authority``; every call but ``close`` raises TransactionsUnavailable while it is down."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        pointers: PointerIndex,
        ask: AskTopic,
        settings: TransactionSettings | None = None,
        observer: TransactionObserver | None = None,
    ) -> None:
        """``ask``: asks a topic wherever its owner is. On a store that others may claim, topics have to be enlisted."""
        self.settings = settings or TransactionSettings()
        self._clock = clock
        everywhere = ClusterPointerLocations() if store.traits.shared else None
        self._where: PointerLocations = pointers if everywhere is None else everywhere
        self._ask_topic = ask
        self._observer = observer or NoTransactionObserver()
        self._mailbox = Mailbox(self.settings.mailbox_requests, self.settings.mailbox_bytes)
        self._supervision = Supervision(self._mailbox, self._observer)
        self._actor = TransactionActor(
            store, clock, pointers, ask, self.settings, self._mailbox, self._settled, everywhere
        )
        self._mirrors = ReplicaServer(store, self._actor, self._supervision, lambda: self.close(elsewhere=True))

    def __repr__(self) -> str:
        return f"<TransactionService {self._actor.core!r} waiting={len(self._mailbox)}>"

    # --- life -------------------------------------------------------------------------------------

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Serve until closed; loads itself from disk, again after each failure. ``on_loaded``: after each load."""
        async with trio.open_nursery() as nursery:
            await self._supervision.run(lambda loaded: self._actor.run(loaded, nursery), on_loaded)
            nursery.cancel_scope.cancel()

    def close(self, *, elsewhere: bool = False) -> None:
        """Take no more; what was asked is served, then ``run`` returns. ``elsewhere``: another instance is to own it.

        An abort that is on its way through the topics goes on after the next start.
        """
        self._supervision.close(elsewhere=elsewhere)
        self._actor.wake_mirrors()

    @property
    def deposed(self) -> bool:
        """Whether another instance has the service, or is to have it."""
        return self._supervision.elsewhere

    @property
    def known(self) -> ReplicaUpdate | None:
        """All that it would tell an instance that knows nothing; None while it is not loaded."""
        core = self._actor.core
        return None if core is None else replica_update(core, self._actor.changes, UNKNOWN_VERSION)

    async def where(self) -> PointerLocations:
        """Where undecided transactions have rows: never stale."""
        await trio.lowlevel.checkpoint()
        return self._where

    def _settled(self, step: ManagerStep) -> None:
        for state in set(step.outcomes):
            self._observer.decided(state, step.outcomes.count(state))
        if step.timed_out:
            self._observer.timed_out(step.timed_out)
        for _ in range(step.conflicts):
            self._observer.conflicted()

    async def fresh(self) -> None:
        """Afterwards ``view`` shows every transaction whose commit was acknowledged before this was called.

        Raises:
          TransactionsUnavailable: nobody can say just now. NoOwner: another instance has the service.
        """
        await self._mirrors.fresh()

    async def sync(self, known: ReplicaVersion, wait_ms: int = 0) -> ReplicaUpdate:
        """What has changed since ``known``, as soon as something has, or after ``wait_ms``.

        Raises:
          TransactionsUnavailable, NoOwner: as ``fresh``. Overloaded: too many wait.
        """
        return await self._mirrors.sync(known, wait_ms)

    # --- at once ----------------------------------------------------------------------------------

    def standing(self, pointer: int) -> Standing:
        """What became of a pointer. Raises TransactionsUnavailable while that cannot be known."""
        return self._core().standing(pointer)

    def view(self) -> View:
        """What readers of committed messages may see now. Raises TransactionsUnavailable."""
        return self._core().view()

    def figures(self) -> ServiceFigures:
        """Numbers for metrics. Raises TransactionsUnavailable."""
        return self._core().figures()

    def invalids(self) -> tuple[int, ...]:
        """Pointers on the invalid list, ascending. Raises TransactionsUnavailable."""
        return self._core().visible.invalids()

    def begin_pass(self) -> CompletePass:
        """What the janitor's next pass is about. Raises TransactionsUnavailable."""
        visible = self._core().visible
        return CompletePass(self._clock.now_ms(), visible.invalids(), visible.upper_bound())

    def pruning(self) -> PruningFigures:
        """What an operator needs for pruning by hand. Raises TransactionsUnavailable."""
        return pruning_figures(self._core(), self._where.oldest_by_topic())

    def snapshot(self) -> bytes:
        """All of the durable state in Tephra's snapshot format V4. Raises TransactionsUnavailable."""
        core = self._core()
        return encode_snapshot(manager_state(core.ledger, core.visible, self._clock.now_ms()))

    # --- asked, and durable when answered ---------------------------------------------------------

    async def begin(
        self,
        type: TransactionType = TransactionType.SHORT,  # noqa: A002  # the contract's word
        timeout_s: int | None = None,
        client_id: str = "unknown",
    ) -> Begun:
        """Begin a transaction.

        Raises:
          InvalidParameter: a time-out that is not above 0, over the maximum, or given with a long one; a bad client id.
          Overloaded: too many are open or invalid.
        """
        return await self._ask(asks.Begin(type, timeout_s, client_id))

    async def prepare(self, transaction_id: int, changes: Sequence[bytes]) -> None:
        """Say what it changed, in place of what it said before, and learn whether that conflicts.

        Raises:
          ChangeConflict: with a transaction committed since it began.
          TransactionTooLarge: too many keys, or too many bytes of them.
          TransactionNotFound, TransactionNotInProgress.
        """
        await self._ask(asks.Prepare(transaction_id, changes, sum(map(len, changes))))

    async def commit(self, transaction_id: int) -> Decision:
        """Make it visible, all of it in the same moment; again, as long as it is remembered, it says so again.

        Raises:
          ChangeConflict: it stays in progress, and is to be prepared again or aborted.
          TransactionNotFound: never heard of, or forgotten.
          TransactionNotInProgress: aborted, invalid, or its time is over.
        """
        answer = await self._ask(asks.Commit(transaction_id))
        assert not isinstance(answer, asks.CloseFirst)  # the actor has them closed
        return answer

    async def abort(self, transaction_id: int) -> Decision:
        """Roll back its rows in every topic, then forget its pointers.

        The state says what it came to: ``aborted``, or ``invalid`` for a long one, and for one with a topic that
        could not be reached in time. A late abort of an invalid one is the same. Whoever asks may leave.

        Raises:
          TransactionNotFound: never heard of, or forgotten; Thrift answers that as if it had worked.
          TransactionNotInProgress: committed.
        """
        answer = await self._ask(asks.Abort(transaction_id))
        assert not isinstance(answer, asks.RollFirst)  # the actor goes that way itself
        return answer

    async def invalidate(self, transaction_id: int) -> Decision:
        """Hide it for ever without touching its rows. Raises TransactionNotFound, TransactionNotInProgress."""
        return await self._ask(asks.Invalidate(transaction_id))

    async def checkpoint(self, transaction_id: int, transaction: Transaction | None = None) -> Begun:
        """A new write pointer; the snapshot stays the one it began with.

        Args:
          transaction: as the client has it; without, the snapshot is worked out from what is remembered.
        Raises:
          InvalidParameter: without ``transaction``, too much has been forgotten since it began.
          TransactionNotFound, TransactionNotInProgress, Overloaded.
        """
        return await self._ask(asks.Checkpoint(transaction_id, transaction))

    async def truncate(self, pointers: Sequence[int]) -> int:
        """Take pointers from the invalid list, after rolling back what rows they have; how many went.

        Those with a topic that could not be reached in time stay.
        """
        invalid = set(self.invalids()).intersection(pointers)
        deadline_s = trio.current_time() + self.settings.abort_deadline_s
        reached = await roll_back(self._where, self._ask_topic, invalid, deadline_s)
        return await self._ask(asks.Unlist(sorted(reached)))

    async def truncate_before(self, before_ms: int) -> int:
        """The same for all that were issued before a time. Raises InvalidParameter when one in progress was too."""
        pointers = await self._ask(asks.InvalidBefore(before_ms))
        return await self.truncate(pointers)

    async def reset(self) -> None:
        """Roll back everything open and invalid, and forget it and all change sets; ids go on rising, outcomes stay known."""
        open_ = await self._ask(asks.ListAll("in_progress", limit=self.settings.max_open))
        await abort_all(self.abort, [status.transaction_id for status in open_])
        await self.truncate(self.invalids())
        await self._ask(asks.ForgetChanges())

    async def enlist(self, pointer: int, name: TopicName) -> bool:
        """A topic is about to write under a pointer; False: it was not issued here, and is nobody's to decide.

        Raises:
          TransactionNotInProgress: it is decided, or being decided. Overloaded: too many topics.
        """
        return await self._ask(asks.Enlist(pointer, name))

    async def complete(self, passed: CompletePass) -> int:
        """The janitor has passed every topic without a failure: keep that, and prune what may go; how many went."""
        return await self._ask(asks.KeepPass(passed))

    # --- asked, changes nothing -------------------------------------------------------------------

    async def look(self, transaction_id: int) -> TransactionStatus:
        """What is known of one, by its id or a checkpoint's pointer; state ``unknown`` when nothing is."""
        status = await self._ask(asks.LookAt(transaction_id))
        return (await with_topics([status], self._where, self._ask_topic))[0]

    async def listed(self, state: State | None = None, limit: int = 1_000) -> list[TransactionStatus]:
        """Transactions, oldest first: of one state, or (None) those in progress and invalid."""
        statuses = await self._ask(asks.ListAll(state, limit))
        return await with_topics(statuses, self._where, self._ask_topic)

    async def _ask(self, ask: Ask[A]) -> A:
        await self._supervision.tried()
        return await self._mailbox.ask(ask)

    def _core(self) -> ManagerCore:
        if self._actor.core is None:
            raise service_not_loaded()
        return self._actor.core


# --- transaction actor -----------------------------------------------------------------------------
#
# The actor of the transaction service: the one writer of its rows, and its whole life on one screen.
#
#     load ──► wait ──► step ──► commit ──► wait …
#       ▲                          │
#       └──────── fall ◄───────────┘ the store failed: everybody learns that nobody knows
#
# Two kinds of request take a way round. A commit under whose pointers a topic is writing waits until it is not;
# where topics may be other instances', each that is enlisted is asked to close them. An abort of what has rows goes
# to the topics first, and comes back when they are rolled back, or could not be in time; one that a crash
# interrupted goes on after the load.


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
        on_settled: Callable[[ManagerStep], object],
        everywhere: ClusterPointerLocations | None = None,
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
        self.changes = PointerChanges(-1)
        self.changed = trio.Event()
        #: Tickets that come from inside, and jump the queue.
        self._returning: list[Ticket[Any]] = []
        self._pause = trio.CancelScope()
        self._frozen: set[Ticket[Any]] = set()
        self._closing = PointerClosing(ask, settings, self._return, self._look_at_time)
        self._aborting: dict[int, list[Ticket[Any]]] = {}

    async def run(self, on_loaded: Callable[[], None], nursery: trio.Nursery) -> None:
        """Serve the mailbox until it is closed; what goes round to topics runs in ``nursery``.

        Raises what the store raises, after everybody whose request was under way has been told.
        """
        claim = await self._store.claim(SERVICE_NAME)
        core = await self._load()
        if self._everywhere is None:
            core.drop_enlistments()
        else:
            await self._everywhere.load(self._store, core)
        self.core, self.claim, self.changes = core, claim, PointerChanges(claim.epoch)
        on_loaded()
        try:
            for unfinished in core.unfinished_aborts():
                self._go_round(core, unfinished, (), nursery)
            while True:
                try:
                    tickets = await self._wait(core)
                except trio.EndOfChannel:
                    return
                await self._commit(core, claim, tickets, nursery)
        except Deposed:
            self._forsake(service_moved)
            raise
        finally:
            self.core = None
            self._forsake(self._mailbox.closed_for or _fell)  # closed: it is leaving, or moves
            self.wake_mirrors()

    async def _load(self) -> ManagerCore:
        loading = LedgerLoader()

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
        step: ManagerStep | None = None
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
            fail_transaction_requests(ready, step, error, shared=self._everywhere is not None)
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
            self.changes.record(pointers)
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
            ticket.settle(outcome_unknown("the transaction service fell, or is leaving"))
        self._returning.clear()

    def _now(self) -> ManagerNow:
        return ManagerNow(self._clock.now_ms(), trio.current_time())


def _fell() -> TransactionsUnavailable:
    return TransactionsUnavailable("the transaction service fell", hint="nothing happened; ask again")


def _as_ticket(ticket: object) -> Ticket[Any]:
    return ticket  # type: ignore[return-value]  # the core gives back what it was given


# --- serving mirrors -------------------------------------------------------------------------------
#
# What the transaction service says to those who read, here and at other instances: how far it is, and that it is
# so.


#: Instances that wait for changes at the same time.
MAX_REPLICAS = 1_000


class ReplicaServer:
    """Answers for one service; where others may claim it, never without having seen that it is still the one."""

    def __init__(
        self, store: Store, actor: TransactionActor, supervision: Supervision, deposed: Callable[[], object]
    ) -> None:
        """``deposed``: called when the store says that another instance has claimed the service."""
        self._store = store
        self._actor = actor
        self._supervision = supervision
        self._deposed = deposed
        self._checking = SingleFlight(self._check)
        self._waiting = 0

    async def fresh(self) -> None:
        """See ``TransactionService.fresh``."""
        await self._supervision.tried()
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
        await self._supervision.tried()
        self._here()
        if wait_ms and known == self._actor.changes.version:
            await self._change(wait_ms)
        await self.fresh()
        return replica_update(self._here(), self._actor.changes, known)

    async def _change(self, wait_ms: int) -> None:
        if self._waiting >= MAX_REPLICAS:
            raise Overloaded(f"{self._waiting} instances wait for the transaction service")
        self._waiting += 1
        try:
            with trio.move_on_after(wait_ms / 1000):
                await self._actor.changed.wait()
        finally:
            self._waiting -= 1

    def _here(self) -> ManagerCore:
        if self._supervision.elsewhere:
            raise service_moved()
        if self._actor.core is None:
            raise service_not_loaded()
        return self._actor.core


# --- unanswered ------------------------------------------------------------------------------------
#
# What those hear whose request was under way when the transaction service fell, or another instance took it.


#: Asks that change nothing, so that a failure cannot leave their outcome open.
TRANSACTION_READS = (InvalidBefore, ListAll, LookAt, Nothing)


def outcome_unknown(why: str) -> OutcomeUnknown:
    """Nobody knows."""
    return OutcomeUnknown(why, hint="ask what became of the transaction, or send it again")


def fail_transaction_requests(
    tickets: Iterable[Ticket[Any]], step: ManagerStep | None, error: BaseException, *, shared: bool
) -> None:
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
        if not (nothing_happened or isinstance(ticket.ask, TRANSACTION_READS) or ticket in refused):
            ticket.settle(outcome_unknown(why))
        elif isinstance(error, Deposed):
            ticket.settle(service_moved())
        else:
            ticket.settle(TransactionsUnavailable(why, hint="nothing happened; ask again"))

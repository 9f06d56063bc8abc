"""The transaction service: begins, decides and remembers transactions.

Routes, Thrift, topics and readers call ``TransactionService``. Its actor (``actors/transaction_actor.py``) has the life
cycle of every actor: when it falls it is loaded again from disk, at once and then with growing pauses. Until then
every call, and every publish under a pointer, fails with TransactionsUnavailable; plain publishes and polls continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

from actors.decisions import abort_all, roll_back, with_topics
from actors.ledger_reads import LedgerReads
from actors.mailbox import Mailbox, RunQueue, Ticket
from actors.observe import NoTransactionObserver
from actors.pointers import ClusterPointerLocations
from actors.replica_server import ReplicaServer
from actors.transaction_actor import ServiceSupervision, TransactionActor
from plainsong.protocol.transactions import asks
from plainsong.protocol.transactions.ledger import TransactionSettings
from plainsong.protocol.transactions.replica import UNKNOWN_VERSION, replica_update

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.decisions import AskTopic, Sees
    from actors.observe import Clock, TransactionObserver
    from actors.pointers import PointerIndex, PointerLocations
    from plainsong.protocol.effects import Ask
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.asks import CompletePass, Decision, State, TransactionStatus
    from plainsong.protocol.transactions.ledger import ManagerStep
    from plainsong.protocol.transactions.replica import ReplicaUpdate, ReplicaVersion
    from plainsong.protocol.transactions.view import Moment, View
    from storage.base import Store

A = TypeVar("A")


class TransactionService(LedgerReads):
    """Implements ``Authority``; every call except ``close`` raises TransactionsUnavailable while it is down."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        pointers: PointerIndex,
        ask: AskTopic,
        settings: TransactionSettings | None = None,
        observer: TransactionObserver | None = None,
        run_queue: RunQueue | None = None,
    ) -> None:
        """Create the service; ``run`` loads it.

        Args:
          ask: asks a topic at its owner. On a shared store topics must be enlisted.
          run_queue: that of the topics, to share commits with them; None: a separate one.
        """
        self.settings = settings or TransactionSettings()
        cluster_locations = ClusterPointerLocations() if store.traits.shared else None
        self._ask_topic = ask
        self._is_shared = store.traits.shared
        self._observer = observer or NoTransactionObserver()
        self._mailbox = Mailbox(self.settings.mailbox_requests, self.settings.mailbox_bytes)
        self._supervision = ServiceSupervision(self._mailbox, self._observer)
        self._run_queue = run_queue or RunQueue(store)
        actor = TransactionActor(
            store, clock, pointers, ask, self.settings, self._mailbox, self._settled, self._run_queue, cluster_locations
        )
        super().__init__(actor, clock, pointers if cluster_locations is None else cluster_locations)
        self._replicas = ReplicaServer(store, self._actor, self._supervision, lambda: self.close(given_away=True))

    def __repr__(self) -> str:
        return f"<TransactionService {self._actor.core!r} waiting={len(self._mailbox)}>"

    # --- life -------------------------------------------------------------------------------------

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Serve until closed. Load from disk, and again after each fall; ``on_loaded`` is called after each load."""
        async with trio.open_nursery() as nursery:
            self._actor.nursery = nursery
            await self._supervision.run(self._actor, on_loaded)
            nursery.cancel_scope.cancel()

    def close(self, *, given_away: bool = False) -> None:
        """Refuse new requests, answer those that wait, then let ``run`` return.

        An abort that topics are rolling back continues after the next load.

        Args:
          given_away: another instance will own the service.
        """
        self._supervision.close(given_away=given_away)
        self._actor.wake_replicas()

    @property
    def actor(self) -> TransactionActor:
        """The owner of the ledger."""
        return self._actor

    @property
    def deposed(self) -> bool:
        """True if another instance owns the service, or will own it."""
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

    def view_now(self) -> View | None:
        """Return ``view`` if it has every commit that was acknowledged before the call; None: call ``fresh`` first."""
        core = self._actor.core
        return None if core is None or self._is_shared or self.deposed else core.view()

    # --- durable when answered --------------------------------------------------------------------

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

    def open_of(self, name: str) -> int:
        """Return the number of a name's transactions, open or about to begin. Raises TransactionsUnavailable."""
        waiting = sum(1 for ask in self._mailbox.asks() if isinstance(ask, asks.Begin) and ask.owner == name)
        return waiting + sum(1 for record in self._core().ledger.open.values() if record.owner == name)

    @property
    def has_loaded(self) -> bool:
        """True once the first load, for which callers wait, has ended."""
        return self._supervision.first_load_ended.is_set()

    def put(
        self,
        ask: Ask[A],
        settled: Callable[[A | Exception], object],
        prepare: Callable[[A | Exception], object] | None = None,
    ) -> None:
        """Ask without waiting; call only once it ``has_loaded``.

        Args:
          settled, prepare: see ``Ticket``. ``prepare`` is also called with answers that are not final, and not given.
        Raises what ``Mailbox.put`` raises.
        """
        self._mailbox.put(Ticket(ask, settled, prepare), wake=False)
        self._run_queue.wake_for(self._actor)

    async def ask(self, ask: Ask[A]) -> A:
        """Ask once the first load has ended; return the answer. Raises what ``Mailbox.ask`` raises."""
        await self._supervision.first_load()
        return await self._mailbox.ask(ask)

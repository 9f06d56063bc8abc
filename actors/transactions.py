"""The transaction service: begins, decides and remembers transactions, for routes, Thrift, topics and readers.

It is supervised like a topic: when its actor falls it is loaded again from disk, at once and then with growing
pauses. Meanwhile every call raises TransactionsUnavailable, publishes under a pointer are refused with it, and
plain publishes and polls go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import trio

from actors.aborting import abort_all
from actors.blame import with_topics
from actors.mailbox import Mailbox
from actors.serving_mirrors import Mirrors
from actors.settling import roll_back
from actors.supervision import Supervision, not_loaded
from actors.transaction_actor import TransactionActor
from actors.transaction_observer import TransactionObserver as TransactionObserver
from actors.transaction_observer import Unwatched
from actors.whereabouts import Everywhere
from protocol.transactions.manager import asks
from protocol.transactions.manager.answers import CompletePass
from protocol.transactions.manager.invalid_list import pruning_figures
from protocol.transactions.manager.looking import manager_state
from protocol.transactions.manager.settings import TransactionSettings
from protocol.transactions.mirrored import UNKNOWN, synced
from protocol.transactions.tephra_state import encode_snapshot
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from actors.clock import Clock
    from actors.pointer_index import PointerIndex
    from actors.settling import AskTopic as AskTopic
    from actors.whereabouts import Whereabouts
    from protocol.names import TopicName
    from protocol.topic.asks import Ask
    from protocol.transactions.authority import Standing
    from protocol.transactions.manager.answers import (
        Begun,
        Decision,
        PruningFigures,
        ServiceFigures,
        State,
        TransactionStatus,
    )
    from protocol.transactions.manager.core import ManagerCore
    from protocol.transactions.manager.step import Step
    from protocol.transactions.mirrored import Synced, Version
    from protocol.transactions.transaction import Transaction
    from protocol.transactions.view import View
    from storage.base import Store

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
        everywhere = Everywhere() if store.traits.shared else None
        self._where: Whereabouts = pointers if everywhere is None else everywhere
        self._ask_topic = ask
        self._observer = observer or Unwatched()
        self._mailbox = Mailbox(self.settings.mailbox_requests, self.settings.mailbox_bytes)
        self._supervision = Supervision(self._mailbox, self._observer)
        self._actor = TransactionActor(
            store, clock, pointers, ask, self.settings, self._mailbox, self._settled, everywhere
        )
        self._mirrors = Mirrors(store, self._actor, self._supervision, lambda: self.close(elsewhere=True))

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
    def known(self) -> Synced | None:
        """All that it would tell an instance that knows nothing; None while it is not loaded."""
        core = self._actor.core
        return None if core is None else synced(core, self._actor.changes, UNKNOWN)

    async def where(self) -> Whereabouts:
        """Where undecided transactions have rows: never stale."""
        await trio.lowlevel.checkpoint()
        return self._where

    def _settled(self, step: Step) -> None:
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

    async def sync(self, known: Version, wait_ms: int = 0) -> Synced:
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
            raise not_loaded()
        return self._actor.core

"""The topic actor: the one writer of one topic. See ``actors/actor.py`` for the life cycle of actors.

A commit updates the scan cache, and wakes readers that wait for a pointer it rolled back. Polls that find nothing are
parked in the core, and answered by a later step, at their deadline, or empty when the topic is closed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import trio

from actors.actor import Actor, as_ticket, complete_all
from actors.loading import load_topic
from actors.mailbox import RunQueue
from actors.observe import NoObserver
from actors.ownership import Alone
from actors.pointers import PointerIndex
from actors.settings import CommitConfig
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, StorageFailed
from plainsong.protocol.ids import after
from plainsong.protocol.topic.asks import (
    CheckPublish,
    Describe,
    DescribeChain,
    GetProducer,
    ListPointers,
    ListProducers,
    ListReaders,
    Look,
    OpenProducer,
    Publish,
    PublishEach,
    PublishStaged,
    PublishUnder,
    SetReader,
    Stats,
    StoreUnder,
)
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import transactional_pointers
from plainsong.protocol.topic.producer_state import INHERITED
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.topic.step import MANY_ROWS, Step
from plainsong.protocol.transactions.transaction import NoAuthority

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from actors.actor import Answers, Turn
    from actors.cache import TopicCache
    from actors.mailbox import Mailbox, Ticket
    from actors.observe import Clock, Observer, SpaceGuard
    from actors.ownership import Ownership
    from actors.pointers import Enlistments, Term
    from plainsong.protocol.effects import Operation
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import Span
    from plainsong.protocol.topic.producer_state import NamespacePolicy
    from plainsong.protocol.transactions.transaction import Authority
    from storage.base import Claim, Store

#: Topics that write their high-water marks concurrently when they close.
MAX_CLOSING = 64
#: Topics that load concurrently: with a limit the first ones are ready early, instead of all at the end. Equals the
#: default number of connections to HBase.
MAX_OPENING = 16
#: On a shared store, reading this many rows at a load takes no extra calls, whereas writing a mark takes calls just
#: when the next owner is loading every topic.
FEW_ROWS = 1000
#: Requests that change nothing, so that a failed commit cannot leave their outcome unknown.
TOPIC_READS = (
    CheckPublish,
    Describe,
    DescribeChain,
    GetProducer,
    ListPointers,
    ListProducers,
    ListReaders,
    Look,
    Stats,
)
#: The time for steps that do not need it (``TopicCore.needs_time``).
_NO_TIME = Now(0, 0.0)
#: Requests that publish messages.
PUBLISHES = (Publish, PublishEach, PublishStaged, PublishUnder)
#: While a commit of only such requests is under way, polls can be answered: what they read does not depend on it.
_ADDS = (Publish, PublishEach, PublishUnder, StoreUnder, OpenProducer, SetReader, *TOPIC_READS)


@dataclass(slots=True)
class TopicEnvironment:
    """The objects and settings that all topic actors share."""

    store: Store
    clock: Clock
    space: SpaceGuard
    limits: TopicLimits = field(default_factory=TopicLimits)
    commits: CommitConfig = field(default_factory=CommitConfig)
    observer: Observer = field(default_factory=NoObserver)
    pointers: PointerIndex = field(default_factory=PointerIndex)
    """The topics with rows of each write pointer."""
    authority: Authority = field(default_factory=NoAuthority)
    """Decides transactions."""
    policies: Mapping[str, NamespacePolicy] = field(default_factory=dict)
    """The producer policies of namespaces that have one: ``Namespaces.policies``."""
    ownership: Ownership = field(default_factory=Alone)
    """The topics that this instance owns."""
    enlistments: Enlistments | None = None
    """Needed if another instance may decide transactions; None: topics are not enlisted."""
    run_queue: RunQueue = field(default_factory=RunQueue)
    """Runs the turns of actors that have mail."""
    closings: trio.CapacityLimiter = field(default_factory=partial(trio.CapacityLimiter, MAX_CLOSING))
    """Limits how many topics close concurrently."""
    openings: trio.CapacityLimiter = field(default_factory=partial(trio.CapacityLimiter, MAX_OPENING))
    """Limits how many topics load concurrently."""


class TopicActor(Actor[TopicCore, Step]):
    """Owns the state of one topic."""

    reads = TOPIC_READS

    def __init__(self, name: TopicName, environment: TopicEnvironment, mailbox: Mailbox, cache: TopicCache) -> None:
        super().__init__(
            environment.store,
            mailbox,
            commit_requests=environment.commits.max_requests,
            commit_bytes=environment.commits.max_bytes,
            run_queue=environment.run_queue,
        )
        self.name = name
        self._commit_begun_s = 0.0
        self._commit_took_s = 0.0
        self._environment = environment
        self._cache = cache
        self._term: Term | None = None
        self._loop_s = trio.lowlevel.current_clock().current_time

    def __repr__(self) -> str:
        return f"<TopicActor {self.name} {self.core!r}>"

    @property
    def is_idle(self) -> bool:
        """True if the topic can be closed without an effect on any caller."""
        if self._turn is not None or len(self._mailbox) or (self.core and len(self.core.parking)):
            return False
        return not self._environment.pointers.waiting(self.name)

    def look_now(self, look: Look) -> Span | None:
        """Answer a look without a step; None if a step is under way or due, so that the mailbox must be used."""
        core = self.core
        if core is None or self._shared or self._failure is not None:
            return None
        if self._turn is not None:
            is_plain = self._answers_late and only_adds(self._turn) and self._mailbox.closed_for is None
        else:
            is_plain = self._mailbox.is_empty
        if not is_plain or self.name in self._environment.pointers.decided_topics:
            return None  # a step must apply the changes first
        return core.look_now(look, self._now())

    def _shows_before(self, turn: Turn[Step]) -> bool:
        """True if, during the turn under way, the core still shows what polls could read before it."""
        return only_adds(turn) and self.name not in self._environment.pointers.decided_topics

    def _wait_in_turn(self, core: TopicCore, turn: Turn[Step]) -> None:
        """See ``Actor._wait_in_turn``: polls of the turn itself, and those that arrived later, are parked."""
        step = turn.step
        if self._shows_before(turn):
            if step is not None and step.looks:
                parked = {ticket for ticket, look in step.looks if core.park_in_turn(ticket, look)}
                step.looks = [each for each in step.looks if each[0] not in parked]
                turn.tickets = [ticket for ticket in turn.tickets if ticket not in parked]
            self._mailbox.take_each(lambda ticket: self._parks(core, ticket))
        complete_all(core.overdue(self._now()))
        self._wake_by(self._deadline_in_turn_s(core))

    @staticmethod
    def _parks(core: TopicCore, ticket: Ticket[Any]) -> bool:
        return isinstance(ticket.ask, Look) and not ticket.abandoned and core.park_in_turn(ticket, ticket.ask)

    def _deadline_in_turn_s(self, core: TopicCore) -> float | None:
        return core.parking.next_deadline_s()

    def _refuse_in_turn(self, core: TopicCore, turn: Turn[Step], refusal: Callable[[], PlainsongError]) -> None:
        """Answer waiting polls by the state before the turn, if possible; refuse other requests."""
        if self._shows_before(turn):
            self._mailbox.refuse(refusal, but=(Look,))
            now = self._now()
            answers: Answers = []
            for ticket in self._ready(core, self._mailbox.take(self._commit_requests, self._commit_bytes)):
                if isinstance(ticket.ask, Look):  # all other requests were refused
                    answers += core.look_in_turn(ticket, ticket.ask, now)
            complete_all(answers)
        self._mailbox.refuse(refusal)
        self._wait_in_turn(core, turn)

    def end_late(self, refusal: Callable[[], PlainsongError]) -> None:
        """See ``Actor.end_late``."""
        super().end_late(refusal)
        if self._turn is not None and self.core is not None:
            self._refuse_in_turn(self.core, self._turn, refusal)

    # --- life -------------------------------------------------------------------------------------

    async def _load(self) -> tuple[TopicCore, Claim]:
        """Claim and load the topic. Raises NoOwner if the topic was given away while it waited for its turn."""
        environment = self._environment
        async with environment.openings:
            if not environment.ownership.is_mine(self.name):
                raise topic_moved(self.name)  # a claim now would depose its next owner for nothing
            claim = await environment.store.claim(self.name)
            state = await load_topic(
                self.name,
                environment.store,
                environment.limits,
                environment.authority,
                lacks=claim.lacks,
                epoch=claim.epoch,
            )
        return TopicCore(state), claim

    def _begin(self, core: TopicCore, claim: Claim) -> None:
        del claim
        pointers, enlistments = self._environment.pointers, self._environment.enlistments
        # The index has most pointers from their rows; those that an interrupted commit left are found only by the load.
        # On a shared store the index has no pointers of a topic that is not open.
        changed = transactional_pointers(core.state.pending if self._shared else core.state.changed)
        pointers.begin(self.name, changed)
        pointers.end(changed)
        self._term = core.state.enlistment = None if enlistments is None else enlistments.begin(self.name)
        self._mailbox.on_leave = core.leave

    async def _close(self, core: TopicCore, claim: Claim) -> None:
        """Answer the parked polls with empty pages; write a high-water mark if it shortens the next load."""
        few_rows = FEW_ROWS if self._shared else 0
        pointers = self._environment.pointers
        step, answers = core.close(pointers.take_decided(self.name), few_rows=few_rows)
        if not self._shared:
            complete_all(answers)
        try:
            async with self._environment.closings:
                if self._shared and answers:  # an empty answer is correct only if no other owner has published since
                    await self._store.check(claim)
                complete_all(answers)
                if step.operations:
                    await self._write_last(core, step, claim)
                    self._drop_pointers(core, step)
        except BaseException as error:
            self._fail([as_ticket(ticket) for ticket, _ in answers], None, (), error)
            raise

    async def _write_last(self, core: TopicCore, step: Step, claim: Claim) -> None:
        is_durable = False
        self._commit_begins(step)
        try:
            await self._environment.store.write(self._operations(core, step), claim=claim)
            is_durable = True
        finally:
            self._commit_ends(step, is_durable=is_durable)

    def _end(self, core: TopicCore, error: Callable[[], PlainsongError]) -> None:
        self._cache.clear()
        if self._shared:
            self._environment.pointers.leave(self.name)
        self._environment.pointers.wake(self.name)
        if self._environment.enlistments is not None and self._term is not None:
            self._environment.enlistments.end(self.name, self._term)
        _, parked = core.close()
        for ticket, _ in parked:
            as_ticket(ticket).settle(error())

    # --- one turn ---------------------------------------------------------------------------------

    def _ready(self, core: TopicCore, tickets: Sequence[Ticket[Any]]) -> Sequence[Ticket[Any]]:
        """Drop polls of cancelled callers: once parked, they would never be removed."""
        del core
        return [ticket for ticket in tickets if not (ticket.abandoned and isinstance(ticket.ask, Look))]

    def _step(self, core: TopicCore, tickets: Sequence[Ticket[Any]]) -> Step:
        pointers = self._environment.pointers
        decided = pointers.take_decided(self.name) if self.name in pointers.decided_topics else ()
        return core.step([(ticket, ticket.ask) for ticket in tickets], self._now(decided))

    def _operations(self, core: TopicCore, step: Step) -> Sequence[Operation]:
        """Put begin rows of new transactions before the step's rows: no message is durable without its begin."""
        del core
        begins = self._environment.pointers.begins
        if step.pointers and step.operations and begins is not None:
            return [*begins.begins(step.pointers), *step.operations]
        return step.operations

    def _commit_begins(self, step: Step) -> None:
        """Mark the step's pointers in the index as being written, until the commit ends."""
        self._commit_begun_s = perf_counter()
        if step.pointers:
            self._environment.pointers.begin(self.name, step.pointers)

    def _commit_ends(self, step: Step, *, is_durable: bool) -> None:
        self._commit_took_s = perf_counter() - self._commit_begun_s
        if step.pointers:
            pointers = self._environment.pointers
            pointers.end(step.pointers)
            if is_durable and pointers.begins is not None:
                pointers.begins.begun(step.pointers)

    def _committed(self, core: TopicCore, step: Step) -> None:
        pointers = self._environment.pointers
        if step.dropped:
            self._drop_pointers(core, step)
        self._update_cache(core, step)
        if step.rolled_back:
            for pointer in {pointer for pointer, _, _ in step.rolled_back}:
                pointers.wake(pointer)
        if step.frees_readers:
            pointers.wake(self.name)
        if step.looks:
            # A poll whose caller left during the commit was not parked yet, so ``leave`` could not remove it.
            step.looks = [(ticket, look) for ticket, look in step.looks if not as_ticket(ticket).abandoned]

    def _drop_pointers(self, core: TopicCore, step: Step) -> None:
        """Remove pointers without rows from the index."""
        dropped = [each for each in step.dropped if each not in core.state.pending]
        self._environment.pointers.drop(self.name, dropped)

    def _update_cache(self, core: TopicCore, step: Step) -> None:
        """Apply a commit to the scan cache."""
        if step.renewed:
            self._cache.clear()
        since, before = step.since, None
        for batch_prefix, batch in step.row_batches:
            if batch.restart is not None:
                self._cache.start_over()
                since, before = batch.restart, None
            items = batch.item_count
            if items:
                if before is not None:
                    # If the cache has dropped the previous batch for lack of room, it is complete from after it.
                    since = after(before.last_id)
                expiries, pointers, attributes = batch.expiries, batch.pointers, batch.attributes
                if items >= MANY_ROWS:
                    wire, offsets = batch.wire()
                    self._cache.append_wire(batch_prefix, wire, offsets, expiries, since, pointers, attributes)
                else:
                    self._cache.append(batch_prefix, batch.items, expiries, since, pointers, attributes)
                before = batch
        for pointer, first, last in step.rolled_back:
            self._cache.roll_back(core.state.prefix, pointer, first, last)

    def _settled(self, core: TopicCore, step: Step) -> Answers:
        if step.operations:
            self._committed(core, step)
        return core.settled(step, self._now() if core.needs_time(step) else _NO_TIME)

    def _settle(self, core: TopicCore, step: Step, answers: Answers) -> None:
        del core
        complete_all(answers)
        # After the answers, so that counting does not delay them.
        observer = self._environment.observer
        if step.messages:
            publishes = sum(1 for ticket, _ in answers if isinstance(ticket.ask, PUBLISHES))
            observer.committed(publishes, step.messages, self._commit_took_s)
        if step.producer_outcomes:
            observer.producer_events(step.producer_outcomes)

    def _now(self, decided: Iterable[int] = ()) -> Now:
        environment = self._environment
        policy = environment.policies.get(self.name.namespace, INHERITED)
        return Now(environment.clock.now_ms(), self._loop_s(), environment.space.low, tuple(decided), policy)

    # --- errors for callers -----------------------------------------------------------------------

    def _moved(self) -> NoOwner:
        return topic_moved(self.name)

    def _fall_error(self) -> PlainsongError:
        return StorageFailed("the topic is being reloaded", hint="poll again")

    def _unavailable(self, why: str) -> PlainsongError:
        return StorageFailed(why, hint="nothing happened; retry")

    def _outcome_unknown(self, why: str) -> PlainsongError:
        return OutcomeUnknown(why, hint="read the topic to check whether it happened, or send it again")


def only_adds(turn: Turn[Step]) -> bool:
    """True if no request of a turn changes what polls may read of earlier messages."""
    return all(isinstance(ticket.ask, _ADDS) for ticket in turn.tickets)


def topic_moved(name: TopicName) -> NoOwner:
    """Return the error for a request that had no effect because another instance owns the topic, or is about to."""
    return NoOwner(f"another instance owns topic {name}", hint="nothing happened; retry")

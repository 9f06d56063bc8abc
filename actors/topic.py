"""The topic actor: the one writer of one topic, and its whole life.

The topic actor: the one writer of one topic, and its whole life on one screen.

    load ──► wait ──► step ──► commit ──► wait …
      ▲                          │
      └──────── fall ◄───────────┘ the store failed: everybody learns that nobody knows
                                   another owner has come: the end, and nobody is told what may be old

*wait* on the mailbox or the nearest deadline; *step*: the core decides, without waiting; *commit*: make the
rows durable, and only then settle the answers. While a commit is in its thread requests gather, and the next
one carries them all: that is the group commit. Where others may claim the topic, a step that answers without
having written asks the store whether it is ours still: one check for all that gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from actors.loading import load_topic
from actors.observe import NoObserver
from actors.ownership import Alone
from actors.pointers import PointerIndex
from plainsong.protocol.errors import NoOwner, OutcomeUnknown, PlainsongError, StorageFailed
from plainsong.protocol.ids import ID_BYTES, after
from plainsong.protocol.topic.asks import (
    Describe,
    GetProducer,
    ListPointers,
    ListProducers,
    ListReaders,
    Look,
    Publish,
    PublishEach,
    PublishStaged,
    PublishUnder,
    Stats,
)
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import transactional_pointers
from plainsong.protocol.topic.producer_state import INHERITED
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.transactions.transaction import NoAuthority
from storage.base import Deposed, NothingWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from actors.cache import TopicCache
    from actors.mailbox import Mailbox, Ticket
    from actors.observe import Clock, Observer, SpaceGuard
    from actors.ownership import Ownership
    from actors.pointers import Enlistments
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.core import Answers
    from plainsong.protocol.topic.producer_state import NamespacePolicy
    from plainsong.protocol.topic.step import Step
    from plainsong.protocol.transactions.transaction import Authority
    from storage.base import Claim, Store

#: Topics that are let go and write down where they were, at the same time; parked polls are answered before.
CLOSING_AT_ONCE = 64
#: Topics that are opened at once: those that come first are there first, instead of all at the end. As many as a store
#: on HBase has connections by default.
OPENING_AT_ONCE = 16
#: On a shared store so many rows are read in as many calls as none, while a mark takes calls just when the next owner
#: makes some for every topic.
FEW_ROWS = 1000
#: Asks whose messages a commit publishes.
PUBLISHES = (Publish, PublishEach, PublishStaged, PublishUnder)


def _says_nothing(namespace: str) -> NamespacePolicy:
    """There are no properties of namespaces."""
    del namespace
    return INHERITED


@dataclass(slots=True)
class TopicEnvironment:
    """What every topic actor works with; shared by all of them."""

    store: Store
    clock: Clock
    space: SpaceGuard
    limits: TopicLimits = field(default_factory=TopicLimits)
    commit_requests: int = 1024
    """Requests one commit may carry."""
    commit_bytes: int = 8 << 20
    """Bytes of requests after which a commit takes no more; a single larger one still goes whole."""
    observer: Observer = field(default_factory=NoObserver)
    pointers: PointerIndex = field(default_factory=PointerIndex)
    """Which topics have rows of which write pointers."""
    authority: Authority = field(default_factory=NoAuthority)
    """Who decides transactions."""
    policy: Callable[[str], NamespacePolicy] = field(default=_says_nothing)
    """What a namespace says about producers: ``Namespaces.policy``."""
    ownership: Ownership = field(default_factory=Alone)
    """Which topics are ours."""
    enlistments: Enlistments | None = None
    """What topics are enlisted for, where transactions may be decided at another instance; None: they need not be."""
    closings: trio.CapacityLimiter = field(default_factory=partial(trio.CapacityLimiter, CLOSING_AT_ONCE))
    """Who waits its turn while many topics are let go."""
    openings: trio.CapacityLimiter = field(default_factory=partial(trio.CapacityLimiter, OPENING_AT_ONCE))
    """Who waits its turn while many topics are opened."""


class TopicActor:
    """Owns the state of one topic; everybody else holds only its mailbox."""

    def __init__(self, name: TopicName, around: TopicEnvironment, mailbox: Mailbox, cache: TopicCache) -> None:
        self.name = name
        self._around = around
        self._mailbox = mailbox
        self._cache = cache
        self._core: TopicCore | None = None
        self._stepping = False
        self._shared = around.store.traits.shared

    def __repr__(self) -> str:
        return f"<TopicActor {self.name} {self._core!r}>"

    @property
    def core(self) -> TopicCore | None:
        """The rules at work, to look at; None while loading."""
        return self._core

    @property
    def idle(self) -> bool:
        """Whether nobody would notice if it were let go now."""
        return not (self._stepping or len(self._mailbox) or (self._core and len(self._core.parking)))

    async def run(self, on_loaded: Callable[[], None] = lambda: None) -> None:
        """Serve the mailbox until it is closed; ``on_loaded`` is called once the topic is there.

        Raises what the store raises, after everybody whose request was under way has been told; NoOwner when the topic
        was given away before its turn came.
        """
        told: Callable[[], PlainsongError] = _loading_again
        around = self._around
        async with around.openings:
            if not around.ownership.is_mine(self.name):
                raise topic_moved(self.name)  # meanwhile: nobody else is to be replaced for it
            claim = await around.store.claim(self.name)
            state = await load_topic(self.name, around.store, around.limits, around.authority, lacks=claim.lacks)
            core = TopicCore(state)
        self._core = core
        # Most are there from their rows; what a commit that was cut off left behind is known only now. Where others
        # write too, nothing is known of a topic that is not open.
        changed = transactional_pointers(core.state.pending if self._shared else core.state.changed)
        around.pointers.begin(self.name, changed)
        around.pointers.end(changed)
        term = None if around.enlistments is None else around.enlistments.begin(self.name)
        core.state.enlistment = term
        self._mailbox.on_leave = core.leave
        on_loaded()
        try:
            while True:
                try:
                    tickets = await self._wait(core)
                except trio.EndOfChannel:
                    await self._close(core, claim)
                    return
                await self._commit(core, claim, tickets)
        except Deposed:
            told = partial(topic_moved, self.name)
            raise
        finally:
            self._core = None
            self._cache.clear()
            if self._shared:
                around.pointers.leave(self.name)
            if around.enlistments is not None and term is not None:
                around.enlistments.end(self.name, term)
            _, waiting = core.close()
            for ticket, _ in waiting:
                _as_ticket(ticket).settle(told())

    async def _wait(self, core: TopicCore) -> Sequence[Ticket[Any]]:
        """What has arrived, or nothing once a deadline has come."""
        deadline_s = core.next_deadline_s()
        if deadline_s is None:
            return await self._receive()
        with trio.move_on_at(deadline_s):
            return await self._receive()
        return ()

    async def _receive(self) -> Sequence[Ticket[Any]]:
        tickets = await self._mailbox.receive_batch(self._around.commit_requests, self._around.commit_bytes)
        return [ticket for ticket in tickets if not (ticket.abandoned and isinstance(ticket.ask, Look))]

    async def _commit(self, core: TopicCore, claim: Claim, tickets: Sequence[Ticket[Any]]) -> None:
        """One step and, if it has something to write, one commit; then, and only then, the answers."""
        self._stepping = True
        step: Step | None = None
        answers: Answers = []
        try:
            decided = self._around.pointers.take_decided(self.name)
            step = core.step([(ticket, ticket.ask) for ticket in tickets], self._now(decided))
            if step.operations:
                await self._write(core, step, claim)
                _drop_abandoned_looks(step)
            answers = core.settled(step, self._now())
            if self._shared and answers and not step.operations:
                await self._around.store.check(claim)
        except BaseException as error:
            parked = [_as_ticket(ticket) for ticket, _ in answers]
            fail_topic_requests(self.name, [*tickets, *parked], step, error, shared=self._shared)
            raise
        finally:
            self._stepping = False
        if step.producer_outcomes:
            self._around.observer.told(step.producer_outcomes)
        _settle(answers)

    async def _write(self, core: TopicCore, step: Step, claim: Claim) -> None:
        begun_s = trio.current_time()
        await self._write_operations(core, step, claim)
        self._remember(core.state.prefix, step)
        for pointer in {pointer for pointer, _, _ in step.rolled_back}:
            self._around.pointers.wake(pointer)
        if step.messages:
            publishes = sum(1 for ticket, _ in step.answers if isinstance(_as_ticket(ticket).ask, PUBLISHES))
            self._around.observer.committed(publishes, step.messages, trio.current_time() - begun_s)

    async def _write_operations(self, core: TopicCore, step: Step, claim: Claim) -> None:
        """The commit itself; whoever decides a transaction meanwhile knows that rows of it are being written."""
        pointers = self._around.pointers
        pointers.begin(self.name, step.pointers)
        try:
            await self._around.store.write(step.operations, claim=claim)
        finally:
            pointers.end(step.pointers)
        pointers.drop(self.name, [each for each in step.dropped if each not in core.state.pending])

    def _remember(self, prefix: bytes, step: Step) -> None:
        """Bring the scan cache to what is durable now."""
        if step.renewed:
            self._cache.clear()
        since = step.since
        for roll_prefix, roll in step.row_batches:
            if roll.restart is not None:
                self._cache.clear()
                since = roll.restart
            if roll.items:
                self._cache.append(roll_prefix, roll.items, roll.expiries, since, roll.pointers, roll.attributes)
                # A cache that had to give up this roll at once begins anew behind it.
                since = after(roll.items[-1][1 : 1 + ID_BYTES])
        for pointer, first, last in step.rolled_back:
            self._cache.roll_back(prefix, pointer, first, last)

    async def _close(self, core: TopicCore, claim: Claim) -> None:
        """Answer the parked polls, empty; leave a high-water mark, where it makes the next load shorter."""
        few_rows = FEW_ROWS if self._shared else 0
        step, answers = core.close(self._around.pointers.take_decided(self.name), few_rows=few_rows)
        if not self._shared:
            _settle(answers)
        try:
            async with self._around.closings:
                if self._shared and answers:  # empty is a true answer only if nobody else has published since
                    await self._around.store.check(claim)
                _settle(answers)
                if step.operations:
                    await self._write_operations(core, step, claim)
        except BaseException as error:
            fail_topic_requests(
                self.name, [_as_ticket(ticket) for ticket, _ in answers], None, error, shared=self._shared
            )
            raise

    def _now(self, decided: Iterable[int] = ()) -> Now:
        around = self._around
        policy = around.policy(self.name.namespace)
        return Now(around.clock.now_ms(), trio.current_time(), around.space.low, tuple(decided), policy)


def _as_ticket(ticket: object) -> Ticket[Any]:
    return ticket  # type: ignore[return-value]  # the core gives back what it was given


def _settle(answers: Answers) -> None:
    for ticket, answer in answers:
        _as_ticket(ticket).settle(answer)


def _drop_abandoned_looks(step: Step) -> None:
    """Whoever left during the commit was not parked yet: nobody would take it out of the parking again."""
    step.looks = [(ticket, look) for ticket, look in step.looks if not _as_ticket(ticket).abandoned]


def _loading_again() -> PlainsongError:
    return StorageFailed("the topic is being loaded again", hint="poll again")


# --- failing ---------------------------------------------------------------------------------------
#
# What those hear whose request was under way when an actor fell: that nothing happened, or that nobody knows.


#: Asks that change nothing, so that a failure cannot leave their outcome open.
TOPIC_READS = (Describe, GetProducer, ListPointers, ListProducers, ListReaders, Look, Stats)


def topic_moved(name: TopicName) -> NoOwner:
    """What everybody hears of a topic that is not, or not any more, this instance's."""
    return NoOwner(f"another instance owns topic {name}", hint="nothing happened; ask again")


def fail_topic_requests(
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
        if not (nothing_happened or isinstance(ticket.ask, TOPIC_READS) or id(ticket) in refused):
            ticket.settle(OutcomeUnknown(why, hint="read the topic to see whether it happened, or send it again"))
        elif isinstance(error, Deposed):
            ticket.settle(topic_moved(name))
        else:
            ticket.settle(StorageFailed(why, hint="nothing happened; ask again"))


def _did_not_happen(step: Step | None, error: BaseException) -> bool:
    """Whether it is certain that nothing of a step was written."""
    if step is None or not step.operations or isinstance(error, NothingWritten):
        return True
    return isinstance(error, Deposed) and error.happened is False

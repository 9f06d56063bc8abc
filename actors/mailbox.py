"""The mailbox of an actor: requests wait in it as tickets, within bounds, and every ticket is settled in the end.

A ticket is a future; calls over links use futures as well (``broker.link.flow``).

``ask`` queues a ticket without waiting (a full mailbox raises Overloaded, and nothing happened), then waits for the
answer. If the caller is cancelled, a request that the actor has received still happens. An actor that falls or ends
settles every ticket it has received, so that no caller waits forever.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import outcome
import trio

from plainsong.protocol.errors import Overloaded, PlainsongError, ShuttingDown
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from plainsong.protocol.effects import Ask
    from storage.base import Store

A = TypeVar("A")


class Future(Generic[A]):
    """The outcome of a request, and the one task that waits for it."""

    __slots__ = ("_notify", "_outcome", "_prepare", "_task", "abandoned")

    def __init__(self) -> None:
        #: True if its caller was cancelled while it waited.
        self.abandoned = False
        self._outcome: outcome.Outcome[A] | None = None
        self._task: trio.lowlevel.Task | None = None
        #: Set by a ``Ticket``.
        self._notify: Callable[[Any], object] | None = None
        self._prepare: Callable[[Any], object] | None = None

    @property
    def is_settled(self) -> bool:
        """True if ``wait`` would return at once."""
        return self._outcome is not None

    def settle(self, answer: A | Exception) -> None:
        """Give the answer or the error. Only the first call counts."""
        if self._outcome is not None:
            return
        if self._notify is not None:
            self._outcome = _ANSWERED
            self._notify(answer)
            return
        self._outcome = outcome.Error(answer) if isinstance(answer, Exception) else outcome.Value(answer)
        if self._task is not None:
            trio.lowlevel.reschedule(self._task, self._outcome)
            self._task = None

    def prepare(self, answer: A | Exception) -> None:
        """Let the caller prepare for an answer that is not final; its effects must stay hidden."""
        if self._prepare is not None and self._outcome is None:
            self._prepare(answer)

    async def wait(self, on_leave: Callable[[Any], object] | None = None) -> A:
        """Return the answer, or raise the error. If the caller is cancelled, call ``on_leave`` with this future."""
        if self._outcome is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            return self._outcome.unwrap()
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            self.abandoned = True
            if on_leave is not None:
                on_leave(self)
            return trio.lowlevel.Abort.SUCCEEDED

        answer: A = await trio.lowlevel.wait_task_rescheduled(abort)
        return answer


#: The outcome of a future whose answer went to a callback.
_ANSWERED: outcome.Outcome[Any] = outcome.Value(None)


class Ticket(Future[A]):
    """One request to an actor, and the future of its answer."""

    __slots__ = ("ask", "taken")

    def __init__(
        self,
        ask: Ask[A],
        notify: Callable[[Any], object] | None = None,
        prepare: Callable[[Any], object] | None = None,
    ) -> None:
        """``notify``, ``prepare``: called with the answer or the error, instead of waking a task.

        They run within the actor's work, so they must neither wait nor raise. ``prepare`` may be called first with the
        answer that is expected; its effects must stay hidden.
        """
        # Repeats ``Future.__init__`` to save a call for every request.
        self.abandoned = False
        self._outcome = None
        self._task = None
        self._notify = notify
        self._prepare = prepare
        self.ask = ask
        #: True once the actor has received it.
        self.taken = False


R = TypeVar("R")
_NOTHING_FOUND = object()


class Prepared(Generic[R]):
    """An actor's answer in the form that its caller needs, made while the disk works if the actor prepares the answer.

    Args:
      make: converts an answer or an error.
      give: receives the result. Like ``make``, it must neither wait nor raise.
    """

    __slots__ = ("_found", "_give", "_made", "_make")

    def __init__(self, make: Callable[[Any], R], give: Callable[[R], object]) -> None:
        self._make = make
        self._give = give
        self._found: object = _NOTHING_FOUND
        self._made: R

    def prepare(self, found: object) -> None:
        """See ``Ticket``."""
        self._found, self._made = found, self._make(found)

    def settled(self, found: object) -> None:
        """Give the answer, whether or not it is the one that was prepared."""
        self._give(self._made if found is self._found else self._make(found))


class Mailbox:
    """A bounded queue of tickets with one receiver, which may fall and restart while the mailbox stays open."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._queue: deque[Ticket[Any]] = deque()
        self._max_requests = max_requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._is_closed = False
        self._receiver: trio.lowlevel.Task | None = None
        #: Called for a ticket whose sender does not run the turn; set by the running actor. None: ``wake`` is called.
        self.on_mail: Callable[[], object] | None = None
        #: Called with the ticket of a caller that was cancelled; set by the running actor.
        self.on_leave: Callable[[Ticket[Any]], object] = _drop_abandoned
        #: Makes the error for new requests; None while requests are accepted.
        self.closed_for: Callable[[], PlainsongError] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def bytes(self) -> int:
        """Memory of the waiting tickets, by their ``size``."""
        return self._bytes

    async def ask(self, ask: Ask[A]) -> A:
        """Queue ``ask``, and wait for its answer.

        Raises:
          Overloaded: the mailbox is full; nothing happened.
          ShuttingDown, Recovering: refused; nothing happened.
          OutcomeUnknown: the actor fell during the commit; it may have happened.
          PlainsongError: the core refuses it.
        """
        ticket = Ticket(ask)
        self.put(ticket)
        return await ticket.wait(self._left)

    def put(self, ticket: Ticket[Any], *, wake: bool = True) -> None:
        """Queue a ticket, without waiting. Raises what ``ask`` raises for a refused ticket.

        Args:
          wake: False if the caller runs the actor's turn.
        """
        if self.closed_for is not None:
            raise self.closed_for()
        size = ticket.ask.size
        if self._bytes and self._bytes + size > self._max_bytes:
            raise Overloaded(f"the topic's queue is full: {self._bytes} bytes")
        if self._is_closed:
            raise ShuttingDown("the daemon is shutting down")
        if len(self._queue) >= self._max_requests:
            raise Overloaded(f"the topic's queue is full: {counted(len(self._queue), 'request')}")
        self._queue.append(ticket)
        self._bytes += size
        if wake:
            (self.on_mail or self.wake)()

    @property
    def is_empty(self) -> bool:
        """True if no ticket waits, and new ones are accepted."""
        return not (self._queue or self._is_closed or self.closed_for is not None)

    @property
    def is_closed(self) -> bool:
        """True if new tickets are refused permanently."""
        return self._is_closed

    def asks(self) -> Iterator[Ask[Any]]:
        """Yield the requests that wait."""
        return (ticket.ask for ticket in self._queue)

    async def wait(self, deadline_s: float | None = None) -> None:
        """Wait until ``wake`` is called, the deadline passes, or the mailbox is closed."""
        if self._is_closed:
            await trio.lowlevel.checkpoint_if_cancelled()
        elif deadline_s is None:
            await self._park()
        else:
            with trio.move_on_at(deadline_s):
                await self._park()

    async def _park(self) -> None:
        self._receiver = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._receiver = None
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def take(self, max_requests: int, max_bytes: int) -> list[Ticket[Any]]:
        """Remove and return waiting tickets, within the bounds; at least one if any waits."""
        tickets: list[Ticket[Any]] = []
        size = 0
        while self._queue and len(tickets) < max_requests and (size < max_bytes or not tickets):
            ticket = self._queue.popleft()
            ticket.taken = True
            size += ticket.ask.size
            tickets.append(ticket)
        self._bytes -= size
        return tickets

    def wake(self) -> None:
        """Wake the receiver, if it waits."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            trio.lowlevel.reschedule(receiver)

    def _left(self, ticket: Ticket[Any]) -> None:
        # Looked up late: a new actor may have started since the ticket was queued.
        self.on_leave(ticket)

    def drain(self, error: Callable[[], PlainsongError]) -> None:
        """Settle all waiting tickets with an error: nothing happened."""
        while self._queue:
            ticket = self._queue.popleft()
            self._bytes -= ticket.ask.size
            ticket.settle(error())

    def take_each(self, takes: Callable[[Ticket[Any]], bool]) -> None:
        """Remove the waiting tickets for which ``takes`` returns True: it has received them."""
        kept: deque[Ticket[Any]] = deque()
        for ticket in self._queue:
            if takes(ticket):
                ticket.taken = True
                self._bytes -= ticket.ask.size
            else:
                kept.append(ticket)
        self._queue = kept

    def refuse(self, error: Callable[[], PlainsongError], *, but: tuple[type[Ask[Any]], ...] = ()) -> None:
        """Settle waiting tickets with an error: nothing happened; those of the classes in ``but`` stay."""
        kept: deque[Ticket[Any]] = deque()
        for ticket in self._queue:
            if isinstance(ticket.ask, but):
                kept.append(ticket)
            else:
                self._bytes -= ticket.ask.size
                ticket.settle(error())
        self._queue = kept

    def close(self) -> None:
        """Refuse new tickets; waiting ones can still be taken. Idempotent."""
        self._is_closed = True
        self.wake()


def _drop_abandoned(ticket: Ticket[Any]) -> None:
    """Do nothing: without a running actor only the queue refers to the ticket."""


class _Round:
    """One call, pending or under way, and the callers that share it."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: Exception | None = None
        self.happened = False


class SingleFlight:
    """Makes one call at a time; each call serves all callers that arrived before it began.

    A caller that arrives during a call waits for the next one: the call under way may already have read old state.
    """

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self._turn = trio.Lock()
        self._next: _Round | None = None

    async def __call__(self) -> None:
        """Return after a call that began after this one. Raises what that call raised."""
        while True:
            mine = self._next
            if mine is None:
                mine = self._next = _Round()
                await self._lead(mine)
            else:
                await mine.over.wait()
            if mine.error is not None:
                raise mine.error.with_traceback(None)
            if mine.happened:
                return

    async def _lead(self, mine: _Round) -> None:
        """Make the call. If the leader is cancelled, one of the other callers makes the next one."""
        try:
            async with self._turn:
                self._next = None
                try:
                    await self._call()
                    mine.happened = True
                except Exception as error:  # noqa: BLE001  # raised again, for each caller
                    mine.error = error
        finally:
            if self._next is mine:
                self._next = None
            mine.over.set()


# --- turns -----------------------------------------------------------------------------------------
#
# Due turns are always run for all actors together, so that their writes share one commit. They are run by
#
#     the server       once it has read the requests of one turn of the event loop
#     an actor's task  for requests of other tasks, and at its deadline
#     ``run``          at the end of a commit that a thread wrote, before its answers are given, so that the disk does
#                      not idle. A commit that the event loop writes itself follows the answers.


class RunnableActor(Protocol):
    """An actor."""

    def turn_now(self) -> None:
        """Take a turn for the waiting mail; neither waits nor raises."""

    def turn_refused(self, refusal: Callable[[], PlainsongError]) -> None:
        """Refuse waiting requests that would change something; neither waits nor raises."""

    def wake(self) -> None:
        """Wake the actor's task, which runs the turns that are due."""


class RunQueue:
    """The actors whose turn is due. Use it only on the event loop."""

    def __init__(self, store: Store | None = None) -> None:
        """``store``: writes their shared commits; None if they do not share commits."""
        self._store = store
        self._due: dict[RunnableActor, None] = {}
        #: True while a server runs the turns; otherwise the actors' tasks do.
        self.has_server = False
        self._running = False
        #: True while the server reads requests; it then calls ``run_due``.
        self._is_reading = False
        self._read_sockets: Callable[[], None] = lambda: None
        self._wake: Callable[[], None] = lambda: None
        #: Makes the error for requests that would change something; None if they are not refused.
        self.refusal: Callable[[], PlainsongError] | None = None
        #: Called before a turn without a commit is answered (with a commit, the store checks). Raises StoreError if the
        #: turn must not be answered, because another process may have taken over. None: no check is needed.
        self.check: Callable[[], object] | None = None

    @property
    def may_spin(self) -> bool:
        """True if the event loop may busy-wait for the next request: no thread of the store is working."""
        return self._store is not None and self._store.is_idle

    def attach(self, read_sockets: Callable[[], None], wake: Callable[[], None]) -> None:
        """Let a server run the turns from now on.

        Args:
          read_sockets: reads the requests that have arrived, which may make more turns due.
          wake: makes the server read requests and call ``run_due`` in the next turn of the event loop.
        """
        self.has_server, self._read_sockets, self._wake = True, read_sockets, wake

    def detach(self) -> None:
        """Let the actors' tasks run the turns again."""
        self.has_server, self._read_sockets = False, lambda: None
        self.run_due()  # the server will no longer run these

    def begin(self) -> None:
        """Record that the server is reading requests, and will call ``run_due`` afterwards."""
        self._is_reading = True

    def soon(self, actor: RunnableActor) -> None:
        """Mark the actor's turn as due. The caller must call ``run_due`` before it yields, or wake a task that does."""
        self._due[actor] = None

    def wake_for(self, actor: RunnableActor) -> None:
        """Mark the actor's turn as due. The server runs it with the others that are due; without one it is run now."""
        self._due[actor] = None
        if not self.has_server:
            self.run_due()
        elif not (self._is_reading or self._running):  # otherwise the server is about to run it
            self._wake()

    def run(self) -> None:
        """Read the requests that have arrived, and run the due turns, before answers are given.

        So a thread writes the next commit while the answers are given. If the event loop writes commits itself, the
        turns run after the answers. Does nothing while turns are running.
        """
        if self._running:
            return
        if self._store is not None and self._store.writes_inline:
            if self._due:
                self._run_later()
            return
        self._running = True
        try:
            self._read_sockets()
            self._take_turns()
        finally:
            self._running = False

    def _run_later(self) -> None:
        if self.has_server:
            self._wake()
        else:
            for actor in self._due:  # the first one may have fallen, and its task then runs no turns
                actor.wake()

    def run_due(self) -> None:
        """Run every due turn; their writes are one commit if the event loop writes it."""
        self._is_reading = False
        if self._running:
            return
        store = self._store
        self._running = True
        try:
            # A turn leaves mail that exceeds the bounds of a commit, and is then due again.
            while self._due:
                if store is not None:
                    store.gather_writes()
                try:
                    self._take_turns()
                finally:
                    if store is not None:
                        store.write_gathered()
        finally:
            self._running = False

    def _take_turns(self) -> None:
        if self.refusal is not None:
            self._refuse_turns(self.refusal)
        while self._due:
            actor, _ = self._due.popitem()
            actor.turn_now()

    def _refuse_turns(self, refusal: Callable[[], PlainsongError]) -> None:
        while self._due:
            actor, _ = self._due.popitem()
            actor.turn_refused(refusal)

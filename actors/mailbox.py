"""The mailbox of an actor: tickets, bounds, an answer for every caller; and calls that many callers share.

The mailbox: how anybody asks an actor, and how everybody is answered in the end.

``ask`` puts a ticket in without waiting (full: Overloaded, nothing happened) and waits for its answer. A
caller may leave; what the actor has taken still happens. Whoever falls or closes settles every ticket it
had taken, so nobody waits for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import trio

from actors.future import Future
from plainsong.protocol.errors import Overloaded, PlainsongError, ShuttingDown

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from plainsong.protocol.effects import Ask

A = TypeVar("A")


class Ticket(Future[A]):
    """One ask of an actor."""

    __slots__ = ("ask", "taken")

    def __init__(self, ask: Ask[A]) -> None:
        super().__init__()
        self.ask = ask
        #: Whether the actor has received it.
        self.taken = False


class Mailbox:
    """A bounded queue of tickets with one receiver, which may fall and come back while it stays open."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._send, self._receive = trio.open_memory_channel[Ticket[Any]](max_requests)
        self._max_bytes = max_bytes
        self._bytes = 0
        self.on_leave: Callable[[Ticket[Any]], object] = _nobody_to_tell
        #: Why nothing is taken just now; None while the receiver is well.
        self.closed_for: Callable[[], PlainsongError] | None = None

    def __len__(self) -> int:
        return self._receive.statistics().current_buffer_used

    @property
    def bytes(self) -> int:
        """What the waiting tickets hold in memory."""
        return self._bytes

    async def ask(self, ask: Ask[A]) -> A:
        """The answer to ``ask``.

        Raises:
          Overloaded: the mailbox is full; nothing happened.
          ShuttingDown, Recovering: not taken; nothing happened.
          OutcomeUnknown: the actor fell while writing; it may have happened.
          PlainsongError: whatever the rules refuse.
        """
        ticket = Ticket(ask)
        self.put(ticket)
        return await ticket.wait(self._left)

    def put(self, ticket: Ticket[Any]) -> None:
        """Queue a ticket, without waiting. Raises as ``ask`` does for what is not taken."""
        if self.closed_for is not None:
            raise self.closed_for()
        size = ticket.ask.size
        if self._bytes and self._bytes + size > self._max_bytes:
            raise Overloaded(f"{self._bytes} bytes wait for this topic already")
        try:
            self._send.send_nowait(ticket)
        except trio.WouldBlock:
            raise Overloaded(f"{len(self)} requests wait for this topic already") from None
        except trio.ClosedResourceError:
            raise ShuttingDown("the daemon is shutting down") from None
        self._bytes += size

    async def receive_batch(self, max_requests: int, max_bytes: int) -> list[Ticket[Any]]:
        """At least one ticket, and whatever else has arrived, within the bounds.

        Raises:
          trio.EndOfChannel: closed, and everything that was put in has been received.
        """
        tickets = [await self._receive.receive()]
        size = tickets[0].ask.size
        try:
            while len(tickets) < max_requests and size < max_bytes:
                ticket = self._receive.receive_nowait()
                tickets.append(ticket)
                size += ticket.ask.size
        except (trio.WouldBlock, trio.EndOfChannel):
            pass
        self._bytes -= size
        for ticket in tickets:
            ticket.taken = True
        return tickets

    def _left(self, ticket: Ticket[Any]) -> None:
        # Asked when the caller leaves: the receiver may be another one than when the ticket was put in.
        self.on_leave(ticket)

    def drain(self, error: Callable[[], PlainsongError]) -> None:
        """Settle everything that waits, unread."""
        try:
            while True:
                ticket = self._receive.receive_nowait()
                self._bytes -= ticket.ask.size
                ticket.settle(error())
        except (trio.WouldBlock, trio.EndOfChannel):
            pass

    def close(self) -> None:
        """Take no more; the receiver gets what is in, then EndOfChannel. Idempotent."""
        self._send.close()


def _nobody_to_tell(ticket: Ticket[Any]) -> None:
    """No actor is running: the ticket is dropped when it is received."""


# --- together --------------------------------------------------------------------------------------
#
# One call for all who wanted it before it began: whoever comes later waits for the next one.


class _Round:
    """A call to come, or under way, and those who share it."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: Exception | None = None
        self.happened = False


class SingleFlight:
    """Calls one after the other, each for all who gathered while the one before was under way."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self._turn = trio.Lock()
        self._next: _Round | None = None

    async def __call__(self) -> None:
        """Returns after a call that began later than this. Raises what that raised."""
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
        """Make the call; when whoever leads is cancelled, one of the others leads the next round."""
        try:
            async with self._turn:
                self._next = None
                try:
                    await self._call()
                    mine.happened = True
                except Exception as error:  # noqa: BLE001  # it is raised again, for each of them
                    mine.error = error
        finally:
            if self._next is mine:
                self._next = None
            mine.over.set()

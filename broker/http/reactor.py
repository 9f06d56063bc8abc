"""The reactor: one task that waits for the sockets of all connections at once.

If each task waited for its own socket, trio would need a kernel registration, a deadline and an event loop iteration
for each read, which costs more than a small request itself. Here each socket is registered once, edge-triggered, in a
separate epoll, and one task waits for that. For an idle connection it calls ``readable``, which may answer a request
directly; otherwise it wakes the connection's task.

If a client sends its next request right after an answer, the event loop is already asleep, and waking it takes as long
as serving the request. While a single such client is active, the reactor spins briefly for its next request
(``_busy_poll``).
"""

from __future__ import annotations

import logging
import select
from collections import deque
from contextlib import asynccontextmanager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import trio
from trio.lowlevel import wait_readable

from broker.http.deadlines import Deadlines
from storage.loop import Waker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from typing import NoReturn

    from actors.mailbox import RunQueue

log = logging.getLogger("plainsong.http")
_RINGS = select.EPOLLIN | select.EPOLLET
_EDGES = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
#: Limit on sockets served in one turn of the event loop, so that other tasks run soon.
MAX_READY = 128
#: A client is quick if its next request arrives within this time of its answer, including the time to wake the task.
QUICK_S = 120e-6
#: The reactor spins after this many consecutive turns with only quick requests of one client.
QUICK_TURNS = 3
#: The limits of one spin: its time, and its calls of epoll, which take a microsecond each.
SPIN_S = 60e-6
MAX_POLLS = 100
#: Busy polling ends after this time in any case, so that the event loop and other tasks run.
BUSY_POLL_S = 2e-3
#: How long to wait for the rest of a request's body without a task.
GATHER_S = 1.0


class Socket(Protocol):
    """Any object with a file descriptor."""

    def fileno(self) -> int: ...


class Member(Protocol):
    """A connection registered with the reactor."""

    def readable(self, events: int = 0) -> None:
        """Handle arrived data, or the end of input. Called in the reactor's task: it neither waits nor raises.

        Args:
          events: the event mask from epoll.
        """

    def give_up(self) -> None:
        """End the connection: it was idle for ``keep_alive_s``, or has failed. It neither waits nor raises."""

    def wake(self) -> None:
        """Leave the request to the connection's task: its body has not arrived in ``GATHER_S``."""


class _ReadyTasks(trio.abc.Instrument):
    """The runnable tasks that were scheduled after ``watch`` and have not run yet.

    Trio's statistics do not include tasks that are due in the current turn of the event loop.
    """

    def __init__(self) -> None:
        self.tasks: set[trio.lowlevel.Task] = set()
        self._watches = False

    def watch(self) -> None:
        """Start to record tasks. Idempotent."""
        if not self._watches:
            self._watches = True
            trio.lowlevel.add_instrument(self)

    def leave(self) -> None:
        """Stop recording, so that the event loop has no overhead. Idempotent."""
        if self._watches:
            self._watches = False
            trio.lowlevel.remove_instrument(self)
            self.tasks.clear()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``: the task is runnable."""
        self.tasks.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """See ``trio.abc.Instrument``: the task is about to run."""
        self.tasks.discard(task)


@asynccontextmanager
async def open_reactor(
    keep_alive_s: float, turns: RunQueue | None = None, waker: Waker | None = None
) -> AsyncIterator[Reactor]:
    """Run a reactor for the connections of all listeners, so that their requests share turns and commits.

    Args:
      keep_alive_s: see ``Reactor.resting``.
      turns: the run queue of the actors that handlers ask without a task; None: there are no such handlers.
      waker: see ``Reactor``.
    """
    reactor = Reactor(keep_alive_s, waker)
    if turns is not None:
        turns.attach(reactor.read_sockets, reactor.wake)
        reactor.before_reading = turns.begin
        reactor.after_reading = turns.run_due
        reactor.ended = turns.detach
        reactor.may_spin = lambda: turns.may_spin
    try:
        async with trio.open_nursery() as nursery:
            for runs in (reactor, reactor.resting, reactor.gathering):
                nursery.start_soon(runs.run)
            yield reactor
            nursery.cancel_scope.cancel()
    finally:
        if turns is not None:
            turns.detach()
        reactor.close()


class Reactor:
    """Waits for the sockets of all its members. ``run``, and the ``run`` of both its deadlines, must keep running."""

    def __init__(self, keep_alive_s: float, waker: Waker | None = None) -> None:
        """Create it in the event loop that runs it; ``close`` frees its descriptors.

        Args:
          waker: the store's; registered only while the reactor runs, so that it wakes the event loop.
        """
        self._store_waker = waker
        #: Called before and after reading the requests of each turn of the event loop.
        self.before_reading: Callable[[], None] = lambda: None
        self.after_reading: Callable[[], None] = lambda: None
        #: Called when ``run`` ends.
        self.ended: Callable[[], None] = lambda: None
        #: Returns True if spinning takes no time from other threads.
        self.may_spin: Callable[[], bool] = lambda: False
        #: Number of sockets with events in this turn, and the descriptor of the last one.
        self._told = 0
        self._client = -1
        self._ended_s = 0.0
        #: Number of consecutive turns with a single request of the same client, each soon after the last.
        self._quick_turns = 0
        self._ready = _ReadyTasks()
        self._epoll = select.epoll()
        #: Wakes the reactor's task for reasons other than a socket.
        self._waker = Waker()
        self._epoll.register(self._waker, _RINGS)
        self._members: dict[int, Member] = {}
        self._again: deque[Member] = deque()
        #: Members idle for at most ``keep_alive_s``, and members whose current request has an incomplete body.
        self.resting = Deadlines[Member](keep_alive_s, lambda member: member.give_up())
        self.gathering = Deadlines[Member](GATHER_S, lambda member: member.wake())

    def close(self) -> None:
        self._epoll.close()
        self._waker.close()

    def add(self, sock: Socket, member: Member) -> None:
        """Notify ``member`` of all events of ``sock`` from now on, and of pending ones."""
        self._members[sock.fileno()] = member
        self._epoll.register(sock, _EDGES)

    def remove(self, sock: Socket, member: Member) -> None:
        """Unregister a member. Idempotent."""
        if self._members.get(sock.fileno()) is member:
            del self._members[sock.fileno()]
            self._epoll.unregister(sock)
        self.resting.drop(member)
        self.gathering.drop(member)

    def again(self, member: Member) -> None:
        """Call ``readable`` soon, without an event from epoll: there may be more to read."""
        if not self._again:
            self._waker.wake()
        self._again.append(member)

    def wake(self) -> None:
        """Make the next turn of the event loop read all sockets, and call ``after_reading``."""
        self._waker.wake()

    async def run(self) -> NoReturn:
        """Serve the sockets until cancelled."""
        with self._hearing():
            while True:
                await wait_readable(self._epoll)
                began_s = perf_counter()
                client = self._client
                self._told = 0
                self.before_reading()
                self.read_sockets()
                self.after_reading()
                if self._told == 1 and self._client == client and began_s - self._ended_s < QUICK_S:
                    self._quick_turns += 1
                    self._ready.watch()
                    if self._quick_turns >= QUICK_TURNS:
                        self._busy_poll(began_s + BUSY_POLL_S)
                else:
                    self._quick_turns = 0
                    self._ready.leave()
                self._ended_s = perf_counter()

    def _busy_poll(self, until_s: float) -> None:
        """Serve the next requests of one client without sleeping in between.

        Returns once any task is runnable, and after ``BUSY_POLL_S`` at the latest, so that the event loop can collect
        the events that only it gets from the kernel.
        """
        client = self._client
        while self.may_spin() and not self._again and not self._ready.tasks:
            spin_until_s = perf_counter() + SPIN_S
            for _ in range(MAX_POLLS):
                found = self._epoll.poll(0, MAX_READY)
                if found or perf_counter() > spin_until_s:
                    break
            if not found:
                self._quick_turns = 0
                break
            self._told = 0
            self.before_reading()
            self._notify_all(found)
            self.after_reading()
            if self._told != 1 or self._client != client or perf_counter() > until_s:
                break
        if self._again:
            self._waker.wake()  # its last edge may have been taken just now

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        waker = self._store_waker
        if waker is not None:
            self._epoll.register(waker, _RINGS)
            waker.is_watched = True
        try:
            yield
        finally:
            self._ready.leave()
            if waker is not None:
                waker.is_watched = False
                self._epoll.unregister(waker)
            self.ended()

    def read_sockets(self) -> None:
        """Serve everything that has arrived, without waiting."""
        for _ in range(len(self._again)):
            self._tell(self._again.popleft(), 0)
        self._notify_all(self._epoll.poll(0, MAX_READY))
        if self._again:
            self._waker.wake()  # its last edge may have been taken just now

    def _notify_all(self, found: Sequence[tuple[int, int]]) -> None:
        members = self._members
        for descriptor, events in found:
            member = members.get(descriptor)
            if member is not None:
                self._told += 1
                self._client = descriptor
                self._tell(member, events)

    @staticmethod
    def _tell(member: Member, events: int) -> None:
        try:
            member.readable(events)
        except Exception:
            log.exception("a connection failed")
            member.give_up()

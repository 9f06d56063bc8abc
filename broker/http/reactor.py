"""The reactor: one task that waits for the sockets of all connections at once.

A task of its own for every wait costs trio a registration with the kernel, a deadline and a turn of the loop for each
read: with small requests more than the requests themselves. Here each socket is registered once, edge-triggered, in an
epoll of its own, and one task waits for that. For a connection that rests it calls ``readable``, which may answer a
request on the spot; otherwise it wakes the connection's task.

A client that sends its next request as soon as it has its answer does so before the event loop has gone to sleep and
been woken, which takes as long as serving the request. While one such client is all that there is, the reactor spins for
a moment until its next request is there (``_busy_poll``).
"""

from __future__ import annotations

import logging
import select
from collections import OrderedDict, deque
from contextlib import contextmanager
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import trio
from trio.lowlevel import wait_readable

from storage.loop import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import NoReturn

log = logging.getLogger("plainsong.http")
_RINGS = select.EPOLLIN | select.EPOLLET
_EDGES = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
#: Sockets served in one turn of the loop, so that other tasks are never far from theirs.
MAX_READY = 128
#: A client is quick that sends its next request so soon after its answer, with the time it takes to be woken for it.
QUICK_S = 120e-6
#: From so many quick requests of one client on, one turn of the loop after the other, the reactor spins.
QUICK_TURNS = 3
#: It spins for so long, and asks the kernel so often, at a microsecond each.
SPIN_S = 60e-6
MAX_POLLS = 100
#: After so long other tasks have their turn, whatever comes.
BUSY_POLL_S = 2e-3
#: How often connections that rest too long, and requests that wait too long, are looked for.
SWEEP_S = 0.25
#: So many are ended in one turn of the loop.
SWEPT_AT_ONCE = 8


class Socket(Protocol):
    """Anything with a descriptor."""

    def fileno(self) -> int: ...


class Member(Protocol):
    """A connection in the reactor."""

    def readable(self, events: int = 0) -> None:
        """Something has come, or the other side has gone. Called in the reactor's task: it neither waits nor raises.

        Args:
          events: what epoll told of it.
        """

    def give_up(self) -> None:
        """End the connection: nothing came for ``keep_alive_s``, or it has failed. It neither waits nor raises."""


class _ReadyTasks(trio.abc.Instrument):
    """The tasks that were scheduled and have not had their turn; those scheduled before ``watch`` are not among them.

    Trio's statistics leave out those whose turn is in the present round of the event loop.
    """

    def __init__(self) -> None:
        self.tasks: set[trio.lowlevel.Task] = set()
        self._watches = False

    def watch(self) -> None:
        """Know of them from now on. Idempotent."""
        if not self._watches:
            self._watches = True
            trio.lowlevel.add_instrument(self)

    def leave(self) -> None:
        """Cost the event loop nothing. Idempotent."""
        if self._watches:
            self._watches = False
            trio.lowlevel.remove_instrument(self)
            self.tasks.clear()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        """It can run."""
        self.tasks.add(task)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        """It runs."""
        self.tasks.discard(task)


class Reactor:
    """Waits for all its members. Run ``run`` and ``sweep``, both until cancelled."""

    def __init__(self, keep_alive_s: float, bell: Bell | None = None) -> None:
        """Use it in ``run``; ``close`` frees it.

        Args:
          bell: that of a store, which it hears while it runs: the event loop is awake then, and that is all.
        """
        self._keep_alive_s = keep_alive_s
        self._loop_s = trio.lowlevel.current_clock().current_time
        self._store_bell = bell
        #: Called before the requests of each turn of the loop are taken in, and after.
        self.takes_in: Callable[[], None] = lambda: None
        self.took_in: Callable[[], None] = lambda: None
        #: Called when it takes in no more.
        self.ended: Callable[[], None] = lambda: None
        #: Whether spinning takes nothing from other threads.
        self.may_spin: Callable[[], bool] = lambda: False
        #: How many sockets had something in this turn, and which was the last.
        self._told = 0
        self._client = -1
        self._ended_s = 0.0
        #: How many turns in a row had a request of one and the same client only, each soon behind the turn before.
        self._quick_turns = 0
        self._ready = _ReadyTasks()
        self._epoll = select.epoll()
        #: Wakes the reactor's task for what came by no socket.
        self._bell = Bell()
        self._epoll.register(self._bell, _RINGS)
        self._members: dict[int, Member] = {}
        self._again: deque[Member] = deque()
        #: Member → since when it rests; the longest first.
        self._resting: OrderedDict[Member, float] = OrderedDict()
        #: By time-out: member → when its request has waited too long, and what to do then; the oldest first.
        self._timed: dict[float, OrderedDict[Member, tuple[float, Callable[[], object]]]] = {}

    def close(self) -> None:
        """Free the epoll."""
        self._epoll.close()
        self._bell.close()

    def add(self, sock: Socket, member: Member) -> None:
        """Have ``member`` told of what comes from now on; also of what has come before."""
        self._members[sock.fileno()] = member
        self._epoll.register(sock, _EDGES)

    def remove(self, sock: Socket, member: Member) -> None:
        """Forget a member. Idempotent."""
        if self._members.get(sock.fileno()) is member:
            del self._members[sock.fileno()]
            self._epoll.unregister(sock)
        self._resting.pop(member, None)
        self.answered(member)

    def again(self, member: Member) -> None:
        """Call ``readable`` soon, although no edge will come: there may be more to read."""
        if not self._again:
            self._bell.ring()
        self._again.append(member)

    def wake(self) -> None:
        """Have the next turn of the event loop take in what has come, and call ``took_in``."""
        self._bell.ring()

    def rests(self, member: Member) -> None:
        """The member waits for its next request from now on."""
        self._resting.pop(member, None)
        self._resting[member] = self._loop_s()

    def works(self, member: Member) -> None:
        """The member does not rest any more."""
        self._resting.pop(member, None)

    def expire(self, member: Member, timeout_s: float, expired: Callable[[], object]) -> None:
        """Call ``expired`` if the member's request is not answered in ``timeout_s``; there are few different ones."""
        if timeout_s == inf:
            return
        waiting = self._timed.get(timeout_s)
        if waiting is None:
            waiting = self._timed[timeout_s] = OrderedDict()
        waiting[member] = (self._loop_s() + timeout_s, expired)

    def answered(self, member: Member) -> None:
        """The member's request is answered."""
        for waiting in self._timed.values():
            waiting.pop(member, None)

    async def run(self) -> NoReturn:
        """Serve the sockets."""
        with self._hearing():
            while True:
                await wait_readable(self._epoll)
                began_s = perf_counter()
                client = self._client
                self._told = 0
                self.takes_in()
                self.take_in()
                self.took_in()
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
        """Serve one client's next requests without sleeping in between.

        It ends when a task can run, and after ``BUSY_POLL_S`` for what the event loop learns of the kernel only.
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
            self.takes_in()
            self._tell_all(found)
            self.took_in()
            if self._told != 1 or self._client != client or perf_counter() > until_s:
                break
        if self._again:
            self._bell.ring()  # its last edge may have been taken just now

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        bell = self._store_bell
        if bell is not None:
            self._epoll.register(bell, _RINGS)
            bell.is_heard = True
        try:
            yield
        finally:
            self._ready.leave()
            if bell is not None:
                bell.is_heard = False
                self._epoll.unregister(bell)
            self.ended()

    def take_in(self) -> None:
        """Serve what has come by now, without waiting."""
        for _ in range(len(self._again)):
            self._tell(self._again.popleft(), 0)
        self._tell_all(self._epoll.poll(0, MAX_READY))
        if self._again:
            self._bell.ring()  # its last edge may have been taken just now

    def _tell_all(self, found: Sequence[tuple[int, int]]) -> None:
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

    async def sweep(self) -> NoReturn:
        """End what takes too long, a little at a time: a thousand may be due at once, and each wakes a task."""
        while True:
            await trio.sleep(SWEEP_S)
            now_s = trio.current_time()
            for waiting in list(self._timed.values()):
                ended = 0
                while waiting:
                    member, (due_s, expired) = next(iter(waiting.items()))
                    if due_s > now_s:
                        break
                    del waiting[member]
                    expired()
                    ended += 1
                    if not ended % SWEPT_AT_ONCE:
                        await trio.lowlevel.checkpoint()
            ended = 0
            while self._resting:
                member, since_s = next(iter(self._resting.items()))
                if since_s + self._keep_alive_s > now_s:
                    break
                del self._resting[member]
                member.give_up()
                ended += 1
                if not ended % SWEPT_AT_ONCE:
                    await trio.lowlevel.checkpoint()

"""The reactor: one task that waits for the sockets of all connections at once.

A task of its own for every wait costs trio a registration with the kernel, a deadline and a turn of the loop for each
read: with small requests more than the requests themselves. Here each socket is registered once, edge-triggered, in an
epoll of its own, and one task waits for that. For a connection that rests it calls ``readable``, which may answer a
request on the spot; otherwise it wakes the connection's task.
"""

from __future__ import annotations

import logging
import select
from collections import OrderedDict, deque
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Protocol

import trio
from trio.lowlevel import wait_readable

from storage.loop import Bell

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import NoReturn

log = logging.getLogger("plainsong.http")
_RINGS = select.EPOLLIN | select.EPOLLET
_EDGES = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLET
#: Sockets served in one turn of the loop, so that other tasks are never far from theirs.
MAX_READY = 128
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


class Reactor:
    """Waits for all its members. Run ``run`` and ``sweep``, both until cancelled."""

    def __init__(self, keep_alive_s: float, bell: Bell | None = None) -> None:
        """Use it in ``run``; ``close`` frees it.

        Args:
          bell: that of a store, which it hears while it runs: the event loop is awake then, and that is all.
        """
        self._keep_alive_s = keep_alive_s
        self._store_bell = bell
        #: Called behind the requests of each turn of the loop, some of which may have been started.
        self.took_in: Callable[[], None] = lambda: None
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

    def rests(self, member: Member) -> None:
        """The member waits for its next request from now on."""
        self._resting.pop(member, None)
        self._resting[member] = trio.current_time()

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
        waiting[member] = (trio.current_time() + timeout_s, expired)

    def answered(self, member: Member) -> None:
        """The member's request is answered."""
        for waiting in self._timed.values():
            waiting.pop(member, None)

    async def run(self) -> NoReturn:
        """Serve the sockets."""
        with self._hearing():
            while True:
                await wait_readable(self._epoll)
                self.take_in()
                self.took_in()

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        bell = self._store_bell
        if bell is None:
            yield
            return
        self._epoll.register(bell, _RINGS)
        bell.is_heard = True
        try:
            yield
        finally:
            bell.is_heard = False
            self._epoll.unregister(bell)

    def take_in(self) -> None:
        """Serve what has come by now, without waiting."""
        for _ in range(len(self._again)):
            self._tell(self._again.popleft(), 0)
        members = self._members
        for descriptor, events in self._epoll.poll(0, MAX_READY):
            member = members.get(descriptor)
            if member is not None:
                self._tell(member, events)
        if self._again:
            self._bell.ring()  # its last edge may have been taken just now

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

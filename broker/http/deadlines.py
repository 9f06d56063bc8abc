"""Time-outs of many requests or connections, without a task or a timer for each."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

M = TypeVar("M")
#: Resolution of time-outs, except shorter ones: a member may expire this much later.
LATE_S = 0.1
#: Number of members that expire in one turn of the event loop: thousands may be due at once, and each may wake a task.
EXPIRED_AT_ONCE = 8


class Deadlines(Generic[M]):
    """Calls ``expired`` for each member that is not dropped in time. Create it in the event loop; keep ``run`` running.

    All members have the same time-out, so the one that was added first is due first: a queue takes less time than a
    heap. Members are hashed by identity.

    Args:
      expired: it must neither wait nor raise.
    """

    __slots__ = ("_added", "_due_s", "_expired", "_now_s", "_sleeps", "_timeout_s")

    def __init__(self, timeout_s: float, expired: Callable[[M], object]) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._now_s = trio.lowlevel.current_clock().current_time
        #: In the order in which they are due.
        self._due_s: dict[M, float] = {}
        self._added = trio.Event()
        self._sleeps = False

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, member: M) -> None:
        """Start the time-out of a member, or start it again."""
        due_s = self._due_s
        due_s.pop(member, None)
        due_s[member] = self._now_s() + self._timeout_s
        if self._sleeps:
            self._sleeps = False
            self._added.set()

    def drop(self, member: M) -> None:
        """Cancel the time-out. Idempotent."""
        self._due_s.pop(member, None)

    async def run(self) -> NoReturn:
        """Expire due members, until cancelled."""
        while True:
            if not self._due_s:
                self._added, self._sleeps = trio.Event(), True
                await self._added.wait()
            soonest_s = self._now_s() + min(LATE_S, self._timeout_s)
            await trio.sleep_until(max(next(iter(self._due_s.values()), 0.0), soonest_s))
            now_s = self._now_s()
            due = list(takewhile(lambda item: item[1] <= now_s, self._due_s.items()))  # noqa: B023 - used at once
            for count, (member, due_s) in enumerate(due, 1):
                if self._due_s.get(member) == due_s:
                    del self._due_s[member]
                    self._expired(member)
                if not count % EXPIRED_AT_ONCE:
                    await trio.lowlevel.checkpoint()

"""How many file descriptors connections may have: the rest is for the store's files, and for what answers."""

from __future__ import annotations

import resource
from math import inf
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

#: Descriptors that no connection gets: LevelDB keeps 500 tables open, and logs, threads and links have theirs.
NOT_FOR_CONNECTIONS = 600
#: Of all that are allowed, so many stay free for files that are opened while connections take the others.
SPARE = 128
#: How long ``GET /readyz`` says that connections were refused.
SHOWN_S = 10.0
#: A front end reports refusals to the owning process this often at most.
REPORT_S = 1.0


class Descriptors:
    """The limit on open files of this process, and whether connections were refused for it, here or at a front end.

    Args:
      report: called for refusals, at most once in ``REPORT_S``.
    """

    def __init__(self, report: Callable[[], None] = lambda: None) -> None:
        self._refused_s = -inf
        self._report = report
        self._reported_s = -inf

    @property
    def allowed(self) -> float:
        """How many files this process may have open."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return inf if soft == resource.RLIM_INFINITY else soft

    def connections(self, wanted: int) -> int:
        """How many connections may be open, ``wanted`` at most. A quarter of a small limit is for them."""
        allowed = self.allowed
        return int(min(wanted, max(allowed - NOT_FOR_CONNECTIONS, allowed // 4)))

    @property
    def spare(self) -> float:
        """How many descriptors stay free."""
        return min(SPARE, self.allowed // 4)

    def has_room_for(self, descriptor: int) -> bool:
        """True if a connection may keep this descriptor.

        The kernel gives the lowest that is free: whatever has the others, only the last ones are left.
        """
        return descriptor < self.allowed - self.spare

    def refused(self) -> None:
        """A connection was refused since it had no descriptor, or one of the last."""
        self._refused_s = trio.current_time()
        if self._refused_s >= self._reported_s + REPORT_S:
            self._reported_s = self._refused_s
            self._report()

    @property
    def are_short(self) -> bool:
        """True if connections were refused lately."""
        return trio.current_time() < self._refused_s + SHOWN_S

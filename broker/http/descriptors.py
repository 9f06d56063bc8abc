"""The limit of file descriptors for connections: the rest is for the store's files, and for serving requests."""

from __future__ import annotations

import resource
from math import inf
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

#: Reserved for other uses: LevelDB keeps 500 tables open; logs, threads and links need some, too.
NOT_FOR_CONNECTIONS = 600
#: Number of descriptors kept free, for files that are opened while connections use all others.
SPARE = 128
#: Time for which ``GET /readyz`` reports that connections were refused.
SHOWN_S = 10.0
#: The shortest time between two reports of a front end to the owning process.
REPORT_S = 1.0


class Descriptors:
    """The limit on open files of this process, and recent refusals because of it, here or at a front end.

    Args:
      report: called after refusals, at most once per ``REPORT_S``.
    """

    def __init__(self, report: Callable[[], None] = lambda: None) -> None:
        self._refused_s = -inf
        self._report = report
        self._reported_s = -inf

    @property
    def allowed(self) -> float:
        """The limit on open files of this process."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return inf if soft == resource.RLIM_INFINITY else soft

    def connections(self, wanted: int) -> int:
        """Return ``wanted``, or what the limit on open files allows, which is at least a quarter of it."""
        allowed = self.allowed
        return int(min(wanted, max(allowed - NOT_FOR_CONNECTIONS, allowed // 4)))

    @property
    def spare(self) -> float:
        """Number of descriptors to keep free."""
        return min(SPARE, self.allowed // 4)

    def has_room_for(self, descriptor: int) -> bool:
        """True if a connection may keep this descriptor.

        The kernel assigns the lowest free number, so a high number shows that few are left.
        """
        return descriptor < self.allowed - self.spare

    def refused(self) -> None:
        """Record that a connection was refused for lack of descriptors."""
        self._refused_s = trio.current_time()
        if self._refused_s >= self._reported_s + REPORT_S:
            self._reported_s = self._refused_s
            self._report()

    @property
    def are_short(self) -> bool:
        """True if connections were refused in the last ``SHOWN_S``."""
        return trio.current_time() < self._refused_s + SHOWN_S

"""Threads beside the event loop: how they wake it, and how they let it have the interpreter lock."""

from __future__ import annotations

import os
import select


def nap(seconds: float) -> None:
    """Sleep in a thread, so that the event loop gets the lock: giving it up is not enough, since waking takes a moment.

    ``time.sleep`` would fail under libfaketime when the clock is set back.
    """
    select.select((), (), (), seconds)


class Bell:
    """Wakes the event loop from another thread, for a part of what trio's own way costs, while somebody hears it.

    Whoever waits for a descriptor of epolls anyway hears it there, edge-triggered: nothing has to be read or registered
    anew for each ring. What has come to pass meanwhile is looked for by whoever was woken for it.
    """

    def __init__(self) -> None:
        #: Whether a ring wakes the event loop. Set there; a ring while this changes is not lost, since the loop then runs.
        self.is_heard = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For an epoll."""
        return self._descriptor

    def ring(self) -> None:
        """Wake the event loop, from any thread."""
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Free the descriptor; nobody rings any more. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

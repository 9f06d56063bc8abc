"""Threads next to the event loop: how they wake it, and how they leave it the interpreter lock."""

from __future__ import annotations

import os
import select


def nap(seconds: float) -> None:
    """Sleep in a thread, so that the event loop gets the lock: giving it up is not enough, since waking takes a moment.

    ``time.sleep`` would fail under libfaketime when the clock is set back.
    """
    select.select((), (), (), seconds)


class Bell:
    """Wakes the event loop from another thread at a part of the cost of trio's own way, while a server listens to it.

    A server that waits for an epoll registers the descriptor there, edge-triggered: nothing has to be read or registered
    again for each ring. The loop then looks for what has been done.
    """

    def __init__(self) -> None:
        #: True if a ring wakes the event loop. Set there; a ring while this changes is not lost, because the loop runs then.
        self.is_heard = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """For an epoll."""
        return self._descriptor

    def ring(self) -> None:
        """Wake the event loop, from any thread."""
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Free the descriptor; no thread rings any more. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

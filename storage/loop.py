"""Threads and the event loop: waking the loop, and giving it the interpreter lock."""

from __future__ import annotations

import os
import select


def nap(seconds: float) -> None:
    """Sleep in a thread so that the event loop gets the interpreter lock.

    It is not enough to release the lock, since the loop's thread takes some time to wake.

    ``time.sleep`` would fail under libfaketime when the clock is set back.
    """
    select.select((), (), (), seconds)


class Waker:
    """Wakes the event loop from another thread, at a fraction of the cost of trio's own way if a server watches it.

    A server that waits on an epoll registers the descriptor with it, edge-triggered, so that nothing has to be read or
    registered again for each wake-up. The loop then checks for completed work.
    """

    def __init__(self) -> None:
        #: True if a server watches the descriptor. Set by the event loop; a wake-up during the change is not lost,
        #: since the loop runs then.
        self.is_watched = False
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the descriptor, for an epoll."""
        return self._descriptor

    def wake(self) -> None:
        """Wake the event loop, from any thread."""
        os.eventfd_write(self._descriptor, 1)

    def close(self) -> None:
        """Close the descriptor; no thread may wake the loop any longer. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

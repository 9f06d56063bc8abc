"""Stops a run when a signal asks for it: an attempt under way may end by itself within a grace period, waits end at once.

Everything that waits here waits for file descriptors, one of which is the stop's own. What waits inside of others'
code (a long poll) is left by an exception that the signal handler raises.
"""

from __future__ import annotations

import math
import select
import signal
import socket
from contextlib import contextmanager, suppress
from time import monotonic
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType
    from typing import Self


class Stopped(BaseException):
    """The end was asked for. The message at hand, if there was one, was given back: it is the next one's first."""


class Stop:
    """Whether the end was asked for, and until when what is under way may go on.

    Args:
      grace_s: for what is under way, from the first signal on; the second signal ends it at once.
    """

    def __init__(self, grace_s: float = 30.0) -> None:
        self._grace_s = grace_s
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._asked_s: float | None = None
        self._times = 0
        self._raises = False
        #: The first signal; 0: none, or it was no signal that asked.
        self.signal = 0

    # --- asking ----------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask for the end; a second time: for an end at once. From anywhere, signal handlers too."""
        self._times += 1
        if self._asked_s is None:
            self._asked_s = monotonic()
        with suppress(OSError):  # full, which is readable enough; or nobody waits any more
            self._writing.send(b"\0")

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Let SIGTERM and SIGINT ask, for as long as the block lasts. In the main thread."""
        before = {number: signal.signal(number, self._heard_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        """Nobody will ask or wait any more."""
        self._reading.close()
        self._writing.close()

    def _heard_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = self.signal or number
        self.ask()
        if self._raises:
            self._raises = False
            raise Stopped

    # --- being asked -----------------------------------------------------------------------------

    @property
    def asked(self) -> bool:
        """Whether the end was asked for."""
        return self._asked_s is not None

    @property
    def until_s(self) -> float:
        """Until when, on the monotonic clock, what is under way may go on."""
        if self._asked_s is None:
            return math.inf
        return self._asked_s + self._grace_s if self._times == 1 else -math.inf

    def check(self) -> None:
        """Raises Stopped when the end was asked for."""
        if self.asked:
            raise Stopped

    def fileno(self) -> int:
        """Readable when something was asked for since ``listened``."""
        return self._reading.fileno()

    def listened(self) -> None:
        """What was asked for is known: ``fileno`` is not readable any more."""
        with suppress(BlockingIOError):
            self._reading.recv(4096)

    def pause(self, seconds: float) -> None:
        """Wait. Raises Stopped as soon as the end is asked for."""
        until_s = monotonic() + seconds
        self.check()
        while (left_s := until_s - monotonic()) > 0:
            if select.select([self], [], [], left_s)[0]:
                self.listened()
                self.check()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A block that the first signal leaves with Stopped, wherever it is: one whose work may be thrown away."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

"""Stops a run on a signal: an attempt under way may finish within a grace period, waits end at once.

Our own waits include the stop's file descriptor. A wait inside other code (a long poll) is ended by an exception that
the signal handler raises.
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
    """The run was stopped. The current message, if any, was not processed and comes first next time."""


class Stop:
    """Records whether a stop was requested, and how long an attempt under way may continue.

    Args:
      grace_s: for an attempt under way, from the first request; a second request ends it at once.
    """

    def __init__(self, grace_s: float = 30.0) -> None:
        self._grace_s = grace_s
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        self._asked_s: float | None = None
        self._times = 0
        self._raises = False
        #: The first signal; 0: none, or the request was not a signal.
        self.signal = 0

    def ask(self) -> None:
        """Requests a stop; the second time, an immediate one. Safe in signal handlers and from any thread."""
        self._times += 1
        if self._asked_s is None:
            self._asked_s = monotonic()
        with suppress(OSError):  # the socket is full, so readable; or closed
            self._writing.send(b"\0")

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Lets SIGTERM and SIGINT request a stop during the block. Only in the main thread."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def close(self) -> None:
        self._reading.close()
        self._writing.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signal = self.signal or number
        self.ask()
        if self._raises:
            self._raises = False
            raise Stopped

    @property
    def asked(self) -> bool:
        return self._asked_s is not None

    @property
    def until_s(self) -> float:
        """The time on the monotonic clock until which an attempt under way may continue."""
        if self._asked_s is None:
            return math.inf
        return self._asked_s + self._grace_s if self._times == 1 else -math.inf

    def check(self) -> None:
        """Raises Stopped when a stop was requested."""
        if self.asked:
            raise Stopped

    def fileno(self) -> int:
        """Readable when a stop was requested since the last ``acknowledge``."""
        return self._reading.fileno()

    def acknowledge(self) -> None:
        """Makes ``fileno`` unreadable until the next request."""
        with suppress(BlockingIOError):
            self._reading.recv(4096)

    def pause(self, seconds: float) -> None:
        """Sleeps. Raises Stopped as soon as a stop is requested."""
        until_s = monotonic() + seconds
        self.check()
        while (left_s := until_s - monotonic()) > 0:
            if select.select([self], [], [], left_s)[0]:
                self.acknowledge()
                self.check()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Lets the first signal raise Stopped anywhere in the block: for work that may be discarded."""
        self._raises = True
        try:
            self.check()
            yield
        finally:
            self._raises = False

"""Limits on small frames of HTTP/2 and WebSockets, each of which takes as much processor time as thousands of bytes."""

from __future__ import annotations

import logging

import trio

log = logging.getLogger("plainsong.http")
#: A token bucket of frames without content, for each connection: its size, and its refill per second.
CONTROL_BURST = 1000
CONTROLS_PER_S = 100
#: Content, sent or received, refills it too: one control frame for this many bytes, which is twice as many frames as a
#: client needs that updates its window after each frame of content.
BYTES_PER_CONTROL = 4 << 10
#: The shortest time between two log lines about refusals of one kind.
LOG_PAUSE_S = 60.0


class FrameAllowance:
    """A connection's allowance of frames without content: pings, settings, empty fragments, unknown frames."""

    __slots__ = ("_left", "_since_s")

    def __init__(self) -> None:
        self._left = float(CONTROL_BURST)
        self._since_s = trio.current_time()

    def content(self, size_bytes: int) -> None:
        """Record that ``size_bytes`` of content were sent or received."""
        self._left = min(self._left + size_bytes / BYTES_PER_CONTROL, CONTROL_BURST)

    def control(self, frames: int = 1) -> bool:
        """Spend ``frames`` control frames. Return False if there were too many: the connection must end."""
        now_s = trio.current_time()
        self._left = min(self._left + CONTROLS_PER_S * (now_s - self._since_s), CONTROL_BURST) - frames
        self._since_s = now_s
        return self._left >= 0


class CountedWarning:
    """A warning about clients' behaviour: logged at once the first time, then at most once a minute, with a count."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._count = 0
        self._again_s = float("-inf")

    def __call__(self, why: str) -> None:
        self._count += 1
        now_s = trio.current_time()
        if now_s >= self._again_s:
            log.warning(self._text, extra={"count": self._count, "last": why})
            self._count, self._again_s = 0, now_s + LOG_PAUSE_S

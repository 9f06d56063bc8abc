"""What small frames may cost: those of HTTP/2 and of WebSockets, which take as much processor time as thousands of bytes."""

from __future__ import annotations

import logging

import trio

log = logging.getLogger("plainsong.http")
#: Frames without content that a connection may send at once, and further ones a second.
CONTROL_BURST = 1000
CONTROLS_PER_S = 100
#: For so many bytes of content, sent or received, a connection may send a control frame: twice as often as clients do that
#: open their window after each frame.
BYTES_PER_CONTROL = 4 << 10
#: How often refusals of one kind are logged.
LOG_PAUSE_S = 60.0


class FrameAllowance:
    """Counts the frames of a connection that have no content: pings, settings, empty pieces, unknown ones."""

    __slots__ = ("_left", "_since_s")

    def __init__(self) -> None:
        self._left = float(CONTROL_BURST)
        self._since_s = trio.current_time()

    def content(self, size_bytes: int) -> None:
        """So much content was sent or received."""
        self._left = min(self._left + size_bytes / BYTES_PER_CONTROL, CONTROL_BURST)

    def control(self, frames: int = 1) -> bool:
        """Takes control frames into account. False: there were too many, which ends the connection."""
        now_s = trio.current_time()
        self._left = min(self._left + CONTROLS_PER_S * (now_s - self._since_s), CONTROL_BURST) - frames
        self._since_s = now_s
        return self._left >= 0


class CountedWarning:
    """A warning about what clients do: one line for the first, then one a minute at most, with their number."""

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

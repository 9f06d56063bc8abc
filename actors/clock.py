"""The machine's clock, watched: the only place of the daemon that asks what time it is."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time in milliseconds since 1970; may jump either way."""

    regressions: int
    """How often it was seen to go back."""

    def now_ms(self) -> int:
        """The time now."""
        ...


class SystemClock:
    """The operating system's clock; counts how often it was seen to go back."""

    def __init__(self) -> None:
        self.regressions = 0
        self._last_ms = 0

    def now_ms(self) -> int:
        """The time now."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms < self._last_ms:
            self.regressions += 1
        self._last_ms = now_ms
        return now_ms

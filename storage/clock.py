"""The time of day of this machine."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return the time of day in milliseconds since 1970; it may be set back."""
    return time.time_ns() // 1_000_000

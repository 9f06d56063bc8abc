"""The clocks of a standby, and how far the primary's is ahead of them: ids must not begin before those that it assigned."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class StandbyClock:
    """This machine's clocks, and a lower bound of how far the primary's clock is ahead of ``steady_ms``."""

    def __init__(self, now_ms: Callable[[], int], now_s: Callable[[], float]) -> None:
        """Args:
        now_ms: the time of day.
        now_s: monotonic seconds.
        """
        self.now_ms = now_ms
        self.now_s = now_s
        #: The time of day when ``now_s`` was at 0, by this machine's time of day at the start.
        self._zero_ms = now_ms() - round(1000 * now_s())
        self.ahead_ms = 0
        """The bound, from the lease and the segments; a segment is read some time after its last commit."""

    @property
    def steady_ms(self) -> int:
        """The time of day, without the steps of this machine's clock since the start."""
        return self._zero_ms + round(1000 * self.now_s())

    def note(self, time_ms: int) -> None:
        """Note a time that the primary's clock had reached."""
        self.ahead_ms = max(self.ahead_ms, time_ms - self.steady_ms)

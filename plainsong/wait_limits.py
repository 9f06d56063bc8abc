"""How long a reader waits for messages: the time-outs of ``get`` and of idling."""

from __future__ import annotations

from math import ceil, inf

#: How much longer than its wait the last poll before a time-out may take. For ``get`` it grows if answers take longer.
GRACE_S = 0.25


class WaitLimits:
    """When a reader gives up waiting for messages. Every ``now_s`` is in seconds of the same monotonic clock."""

    def __init__(self, idle_timeout_s: float | None) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._idle_until_s = inf
        self._get_until_s = inf
        self._get_grace_s = GRACE_S
        #: True if ``get`` has asked the daemon, which it does once even if its time is over. True between calls of ``get``.
        self.has_asked = True

    # --- what begins and ends --------------------------------------------------------------------

    def begin_get(self, timeout_s: float | None, now_s: float) -> None:
        """Limits the wait for the next message. None: no limit."""
        self._get_until_s = inf if timeout_s is None else now_s + timeout_s
        self.has_asked = False

    def end_get(self) -> None:
        """Ends the limit of ``get``."""
        self._get_until_s = inf
        self.has_asked = True

    def begin_idling(self, now_s: float) -> None:
        """Starts the idle time, unless it has begun. All topics are at their end: reading a backlog is not idling."""
        if self._idle_timeout_s is not None and self._idle_until_s == inf:
            self._idle_until_s = now_s + self._idle_timeout_s

    def end_idling(self) -> None:
        """Ends the idle time."""
        self._idle_until_s = inf

    # --- what they allow -------------------------------------------------------------------------

    def is_over(self, now_s: float) -> bool:
        """True if the time of ``get`` or of idling is over."""
        return self.left_s(now_s) <= 0

    def is_idle_over(self, now_s: float) -> bool:
        """True if the idle time is over, with which the reader ends."""
        return now_s >= self._idle_until_s

    def left_s(self, now_s: float) -> float:
        """How long the reader may wait; negative after the limit, infinite without one."""
        return min(self._get_until_s, self._idle_until_s) - now_s

    def wait_ms(self, most_ms: int, now_s: float) -> int:
        """How long a poll may wait, at most ``most_ms``."""
        left_s = self.left_s(now_s)
        return min(most_ms, max(0, ceil(left_s * 1000))) if left_s < inf else most_ms

    def calls_until_s(self, now_s: float) -> float:
        """When the calls of this wait are cut off."""
        return min(max(self._get_until_s, now_s) + self._get_grace_s, self._idle_until_s + GRACE_S)

    # --- answers ---------------------------------------------------------------------------------

    def note_answer(self, now_s: float) -> None:
        """An answer has arrived. If it was late, the longer grace period stays: the next answer may be as late."""
        if now_s <= self._get_until_s + GRACE_S:
            self._get_grace_s = GRACE_S

    def note_cut_off(self, most_s: float) -> None:
        """A call was cut off before its answer: doubles the grace period of ``get``, up to ``most_s``."""
        self._get_grace_s = min(2 * self._get_grace_s, max(GRACE_S, most_s))

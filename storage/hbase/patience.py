"""How long attempts at one thing go on, and how they pause: for calls and for scans alike."""

from __future__ import annotations

import trio

from storage.base import StoreError

#: What breaks a connection: another attempt may find another one.
BROKEN = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
#: Pauses between attempts; the last one repeats.
_PAUSES_S = (0.0, 0.05, 0.2, 0.5, 1.0)


class Patience:
    """With one thing that is attempted until it is done, or its time is over."""

    def __init__(self, doing: str, *, timeout_s: float, attempt_s: float) -> None:
        self.failures = 0
        """Since it began, or went on."""
        self._doing = doing
        self._timeout_s = timeout_s
        self._attempt_s = attempt_s
        self._deadline_s = trio.current_time() + timeout_s

    @property
    def attempt_s(self) -> float:
        """How long the next attempt may take."""
        return min(self._attempt_s, self.left_s)

    @property
    def left_s(self) -> float:
        """How long all further attempts may take."""
        return max(0.0, self._deadline_s - trio.current_time())

    def went_on(self) -> None:
        """A part of it is done: the next has all the time again."""
        self.failures = 0
        self._deadline_s = trio.current_time() + self._timeout_s

    async def after(self, error: BaseException) -> None:
        """Pause after an attempt that failed. Raises StoreError: there is no time for another one."""
        pause_s = _PAUSES_S[min(self.failures, len(_PAUSES_S) - 1)]
        self.failures += 1
        if trio.current_time() + pause_s >= self._deadline_s:
            raise StoreError(
                f"{self._doing} had no answer in {self._timeout_s:g} s: {str(error) or repr(error)}",
                hint="are HBase and its Thrift gateways there?",
            ) from error
        await trio.sleep(pause_s)

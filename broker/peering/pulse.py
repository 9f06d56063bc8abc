"""Whether the other side of a link is there: it is asked when nothing has come for a while, and when it is in doubt."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Callable

#: What of the time to prove itself a side has in any case: an answer may be here that nobody has read yet.
_AT_LEAST = 0.1


class Pulse:
    """What is known of one other side. Whoever reads sets ``received`` whenever anything came."""

    def __init__(self, ping: Callable[[], object]) -> None:
        """``ping``: asks the other side for a word."""
        self.received = False
        self._ping = ping
        #: Since when it has been asked without anything having come; inf: it has not been asked.
        self._asked_s = inf
        self._heard_s = trio.current_time()
        self._times_heard = 0

    async def silent(self, silence_s: float) -> str:
        """Returns, with the words for it, once nothing has come for so many seconds, not even an answer to a ping."""
        pause_s = silence_s / 3
        self._heard_s = trio.current_time()
        while True:
            woken_s = trio.current_time() + pause_s
            await trio.sleep_until(woken_s)
            if trio.current_time() - woken_s > pause_s:
                self._heard()  # it was we who slept: what came meanwhile is unread
            elif self._asked_for_s() >= silence_s - pause_s:
                return self._words()

    async def proven(self, within_s: float) -> str:
        """Returns when something has come, "", or was not within that time of a ping, with the words for it.

        A ping that is not answered yet counts from when it left: who was silent before has little time left.
        """
        while True:
            if self.received:
                self._heard()  # that was before the doubt
            begun_s, times = trio.current_time(), self._times_heard
            until_s = max(begun_s + within_s - self._asked_for_s(), begun_s + within_s * _AT_LEAST)
            await trio.sleep_until(until_s)
            if self.received or self._times_heard > times:
                return ""
            if trio.current_time() - until_s <= within_s:
                return self._words()
            self._heard()  # it was we who slept

    def _asked_for_s(self) -> float:
        """How long it has been asked without a word from it; it is asked now unless it has been, or was heard lately."""
        if self.received:
            self._heard()
        elif self._asked_s == inf:
            self._ping()
            self._asked_s = trio.current_time()
        return max(0.0, trio.current_time() - self._asked_s)

    def _heard(self) -> None:
        self.received, self._asked_s, self._heard_s = False, inf, trio.current_time()
        self._times_heard += 1

    def _words(self) -> str:
        return f"nothing was heard for {trio.current_time() - self._heard_s:.1f} s, not even an answer to a ping"

"""Deadlines of requests without a task. All have the same time-out, so the oldest is due first."""

from __future__ import annotations

from typing import NoReturn, Protocol

import trio

#: Resolution of deadlines: a request may expire this much later.
LATE_S = 0.1
#: Deadlines that expire in one turn of the event loop: a thousand may be due at once.
ENDED_AT_ONCE = 64


class Waits(Protocol):
    """Something with a deadline."""

    def expire(self) -> None:
        """The deadline has passed. It must neither wait nor raise."""


class Deadlines:
    """Calls ``expire`` for everything that is not dropped within ``timeout_s``. Keep ``run`` running."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._due_s: dict[Waits, float] = {}
        self._added = trio.Event()
        self._sleeps = False

    def __len__(self) -> int:
        return len(self._due_s)

    def add(self, waits: Waits) -> None:
        """Start the time-out of ``waits``, which is hashed by identity."""
        self._due_s[waits] = trio.current_time() + self.timeout_s
        if self._sleeps:
            self._sleeps = False
            self._added.set()

    def drop(self, waits: Waits) -> None:
        """Cancel the time-out. Idempotent."""
        self._due_s.pop(waits, None)

    async def run(self) -> NoReturn:
        """Expire due requests, until cancelled."""
        while True:
            if not self._due_s:
                self._added, self._sleeps = trio.Event(), True
                await self._added.wait()
            await trio.sleep_until(max(next(iter(self._due_s.values()), 0.0), trio.current_time() + LATE_S))
            now_s, ended = trio.current_time(), 0
            while self._due_s:
                waits, due_s = next(iter(self._due_s.items()))
                if due_s > now_s:
                    break
                del self._due_s[waits]
                waits.expire()
                ended += 1
                if not ended % ENDED_AT_ONCE:
                    await trio.lowlevel.checkpoint()

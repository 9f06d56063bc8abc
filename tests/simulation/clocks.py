"""Simulated time, used by the event loop, and the instances' wall clocks, which follow it imperfectly."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf

import trio

from tests.simulation.scheduling import is_alone

#: The wall clocks' initial time: 2023-11-14.
START_MS = 1_700_000_000_000


class SimulatedTime(trio.abc.Clock):
    """Time that stops while a task can run, and jumps to the next deadline when none can.

    Like ``trio.testing.MockClock``, which needs two rounds of the event loop for each jump. Everything that is only
    simulated (network, disks, idle clients) waits by ``sleep`` and ``at``, at a quarter of the cost of a Trio deadline.
    """

    def __init__(self) -> None:
        self._now_s, self._idle_rounds = 0.0, 0
        self._numbers = count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def start_clock(self) -> None:
        """Do nothing: it needs no start."""

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Called by Trio when no task can run."""
        if self._due and self._due[0][0] <= deadline:
            self._now_s, _, call = heappop(self._due)
            call()
            return 0.0
        if deadline < inf:
            self._now_s = max(self._now_s, deadline)
            return 0.0
        # At the end of a history a socket wakes Trio at once. Until then there is always a deadline.
        self._idle_rounds += 1
        if self._idle_rounds > 10:
            raise RuntimeError("all tasks wait, and nothing will wake them")
        return 0.1

    def at(self, due_s: float, call: Callable[[], object]) -> None:
        """Run ``call`` on the event loop at ``due_s``, or as soon after as no task can run."""
        heappush(self._due, (max(due_s, self._now_s), next(self._numbers), call))

    async def sleep(self, seconds: float) -> None:
        """Sleep like ``trio.sleep``."""
        due_s = max(self._now_s + seconds, self._now_s)
        if not (self._due and self._due[0][0] <= due_s) and is_alone(due_s):
            self._now_s = due_s
            return
        task: trio.lowlevel.Task | None = trio.lowlevel.current_task()

        def wake() -> None:
            if task is not None:
                trio.lowlevel.reschedule(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            nonlocal task
            task = None
            return trio.lowlevel.Abort.SUCCEEDED

        self.at(due_s, wake)
        await trio.lowlevel.wait_task_rescheduled(abort)


def time_now() -> SimulatedTime:
    """Return the clock of the running history."""
    clock = trio.lowlevel.current_clock()
    assert isinstance(clock, SimulatedTime)
    return clock


class SimulatedClock:
    """A wall clock that follows the simulated time with an offset and a rate."""

    def __init__(self) -> None:
        self.regressions = 0
        self._from_ms = float(START_MS)
        self._since_s = trio.current_time()
        self._rate = 1.0
        self._last_ms = 0

    def now_ms(self) -> int:
        now_ms = int(self._exact_ms())
        self.regressions += now_ms < self._last_ms
        self._last_ms = now_ms
        return now_ms

    def peek_ms(self) -> int:
        """Return the clock's time without the side effects of reading it."""
        return int(self._exact_ms())

    def _exact_ms(self) -> float:
        return self._from_ms + (trio.current_time() - self._since_s) * 1000 * self._rate

    def jump(self, by_s: float) -> None:
        self._from_ms, self._since_s = self._exact_ms() + by_s * 1000, trio.current_time()

    def drift(self, rate: float) -> None:
        self._from_ms, self._since_s, self._rate = self._exact_ms(), trio.current_time(), rate

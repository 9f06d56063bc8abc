"""Runs Trio's event loop as a thread of a schedule, with the schedule's clock and its threads as workers.

The loop is the real one. Its wait in the kernel, for a descriptor or a deadline, becomes a wait of the schedule.
"""

from __future__ import annotations

import select
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from random import Random
from typing import Any
from unittest import mock

import outcome
import trio
import trio._core._run as internals

from tests.schedules import scheduler as sched

#: If Trio has no deadline, it sleeps for this time, which the schedule treats as unlimited.
_FOR_EVER_S = 86_400.0


class _Clock(trio.abc.Clock):
    """The schedule's time."""

    def start_clock(self) -> None:
        """Do nothing: the schedule's clock is already running."""

    def current_time(self) -> float:
        return sched.monotonic()

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - sched.scheduler().now_s


class _Epoll:
    """A ``select.epoll`` that lets other threads of the schedule run while it waits."""

    def __init__(self) -> None:
        self._real = _EPOLL()
        self._found: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def poll(self, timeout: float = -1, maxevents: int = -1) -> list[tuple[int, int]]:
        """Wait like epoll's; events that a check between two switches finds are kept and returned."""

        def is_ready() -> bool:
            self._found = self._found or self._real.poll(0, maxevents)
            return bool(self._found)

        if timeout and not is_ready():
            sched.scheduler().wait_until(is_ready, timeout if 0 <= timeout < _FOR_EVER_S else None)
        is_ready()
        found, self._found = self._found, []
        return found


_EPOLL = select.epoll


async def _in_thread(call: Callable[..., Any], *arguments: Any, limiter: Any = None, **_: Any) -> Any:
    """Replaces ``trio.to_thread.run_sync``."""
    await trio.lowlevel.checkpoint_if_cancelled()
    token, task = trio.lowlevel.current_trio_token(), trio.lowlevel.current_task()

    def run() -> None:
        result: outcome.Outcome[Any]
        try:
            result = outcome.Value(call(*arguments))
        except Exception as error:  # noqa: BLE001  # it is the caller's; the end of a schedule is not
            result = outcome.Error(error)
        token.run_sync_soon(trio.lowlevel.reschedule, task, outcome.Value(result))
        sched.point()

    async with limiter if limiter is not None else nullcontext():
        sched.Thread(target=run, name="worker").start()
        result = await trio.lowlevel.wait_task_rescheduled(lambda _: trio.lowlevel.Abort.FAILED)
    return result.unwrap()


@contextmanager
def patched_loop(random: Random) -> Iterator[None]:
    """Within the block, event loops run as threads of the schedule; ``random`` chooses the order of runnable tasks."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(select, "epoll", _Epoll))
        stack.enter_context(mock.patch.object(trio.to_thread, "run_sync", _in_thread))
        stack.enter_context(mock.patch.object(trio.from_thread, "check_cancelled", return_value=None))
        # As hypothesis does.
        stack.enter_context(mock.patch.object(internals, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        stack.enter_context(mock.patch.object(internals, "_r", random))
        yield


def run(main: Callable[[], Awaitable[None]]) -> None:
    """Call ``trio.run`` in the current thread of the schedule; of an exception group, raise the first exception."""
    try:
        trio.run(main, clock=_Clock())
    except BaseExceptionGroup as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from group

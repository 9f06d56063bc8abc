"""Calls in trio's threads: every blocking call of the daemon goes through here.

The system may refuse a thread: a container's bound on pids, ``ulimit -u``, a unit's TasksMax. Trio then raises a bare
RuntimeError. But trio reuses the threads that it has started, so the call waits until one is free.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import trio

from plainsong.protocol.errors import Overloaded
from storage.directory import NO_THREADS_HINT

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
#: How long a call waits for a thread, and how often it retries.
MAX_WAIT_S = 5.0
_ASK_EVERY_S = 0.02
NO_THREAD = "the daemon has reached its limit on threads"


class NoThread(Overloaded):
    """The system allows the process no more threads: the call was not begun."""

    title = "No thread is available"


async def in_thread(
    call: Callable[[*Ts], T],
    *args: *Ts,
    limiter: trio.CapacityLimiter | None = None,
    abandon_on_cancel: bool = False,
    max_wait_s: float = MAX_WAIT_S,
) -> T:
    """Return the result of ``call`` in a thread; see ``trio.to_thread.run_sync``.

    Args:
      max_wait_s: how long to wait if the system refuses a thread and all others are in use.
    Raises:
      NoThread: after that time.
    """
    is_begun = False

    def run(*args: *Ts) -> T:
        nonlocal is_begun
        is_begun = True
        return call(*args)

    until_s = trio.current_time() + max_wait_s if max_wait_s < inf else inf
    while True:
        try:
            return await trio.to_thread.run_sync(run, *args, limiter=limiter, abandon_on_cancel=abandon_on_cancel)
        except RuntimeError as error:
            if is_begun or not is_refused(error):
                raise
            if trio.current_time() >= until_s:
                raise NoThread(NO_THREAD, hint=NO_THREADS_HINT) from error
        await trio.sleep(_ASK_EVERY_S)


def is_refused(error: BaseException) -> bool:
    """True if an error is the one that Python raises when the system refuses a thread."""
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)

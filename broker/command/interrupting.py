"""Ctrl-C ends a command where it waits, not in the middle of a line.

An exception that is raised anywhere would end whoever writes for all, and leave those who wait for that writing to wait
for ever: one copy of five hundred hung so.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def until_ctrl_c(work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work``; Ctrl-C cancels it. A second one, while it tidies up, interrupts whatever is done.

    Raises:
      KeyboardInterrupt: it was cancelled; in a group.
      whatever ``work`` raises; in a group.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as whoever started it wants: nohup, a job beside others
        await work()
        return
    async with trio.open_nursery() as nursery:
        await nursery.start(_wait_for_ctrl_c)
        await work()
        nursery.cancel_scope.cancel()


async def _wait_for_ctrl_c(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        task_status.started()
        await anext(aiter(signals))
    raise KeyboardInterrupt

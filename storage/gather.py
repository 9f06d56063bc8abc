"""Concurrent calls that may happen in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

#: Calls that run at a time.
_MAX_CONCURRENT = 8


async def gather(calls: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Run all calls, a few at a time. Raises the first error; the other calls are cancelled."""
    waiting = list(calls)
    if len(waiting) == 1:
        await waiting[0]()
        return
    left = iter(waiting)
    failed: list[Exception] = []

    async def work(nursery: trio.Nursery) -> None:
        for call in left:
            try:
                await call()
            except Exception as error:  # noqa: BLE001 - raised below, without a group around it
                failed.append(error)
                nursery.cancel_scope.cancel()
                return

    async with trio.open_nursery() as nursery:
        for _ in range(min(_MAX_CONCURRENT, len(waiting))):
            nursery.start_soon(work, nursery)
    if failed:
        raise failed[0]

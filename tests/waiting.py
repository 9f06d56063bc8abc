"""Lets trio tests wait for a state by polling; ``eventually`` in the daemon's harness does the same for threads."""

from __future__ import annotations

from collections.abc import Callable

import trio

from tests.patience import PATIENCE_S


async def until(holds: Callable[[], object], *, every_s: float = 0.002) -> None:
    """Return once ``holds()`` is true.

    Args:
      every_s: the interval between checks; use 0 if the test's clock is stopped.
    """
    with trio.fail_after(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - no event is set when it becomes true
            await trio.sleep(every_s)

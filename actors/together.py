"""One call for all who wanted it before it began: whoever comes later waits for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


class _Round:
    """A call to come, or under way, and those who share it."""

    def __init__(self) -> None:
        self.over = trio.Event()
        self.error: Exception | None = None
        self.happened = False


class Together:
    """Calls one after the other, each for all who gathered while the one before was under way."""

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self._turn = trio.Lock()
        self._next: _Round | None = None

    async def __call__(self) -> None:
        """Returns after a call that began later than this. Raises what that raised."""
        while True:
            mine = self._next
            if mine is None:
                mine = self._next = _Round()
                await self._lead(mine)
            else:
                await mine.over.wait()
            if mine.error is not None:
                raise mine.error.with_traceback(None)
            if mine.happened:
                return

    async def _lead(self, mine: _Round) -> None:
        """Make the call; when whoever leads is cancelled, one of the others leads the next round."""
        try:
            async with self._turn:
                self._next = None
                try:
                    await self._call()
                    mine.happened = True
                except Exception as error:  # noqa: BLE001  # it is raised again, for each of them
                    mine.error = error
        finally:
            if self._next is mine:
                self._next = None
            mine.over.set()

"""Runs steps on an event loop."""

from __future__ import annotations

from inspect import isawaitable
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from plainsong.core.effects import Blocking, Now, Pause, Send, Tell

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from plainsong.core.effects import Answer, Effect, Failure, Steps

T = TypeVar("T")


class AsyncShell:
    """Carries out what steps ask for, in the calling task.

    Args:
      carry: sends a request and brings its answer.
      sleep, clock: the event loop's, unless a test has its own.
    """

    def __init__(
        self,
        carry: Callable[[Send], Awaitable[Answer | Failure]],
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        clock: Callable[[], float] = anyio.current_time,
    ) -> None:
        self._carry = carry
        self._sleep = sleep
        self._clock = clock

    async def run(self, steps: Steps[T]) -> T:
        """The result of ``steps``, or what they raise. What interrupts them (not an ``Exception``) ends them."""
        try:
            effect = steps.send(None)
            while True:
                try:
                    result = await self._done(effect)
                except Exception as error:  # noqa: BLE001 - the steps decide what follows from it
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            steps.close()

    async def _done(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return await self._carry(effect)
        if isinstance(effect, Now):
            return self._clock()
        if isinstance(effect, Pause):
            return await self._sleep(effect.seconds)
        if isinstance(effect, Tell):
            told = effect.work()
            return await told if isawaitable(told) else told
        assert isinstance(effect, Blocking)
        return await anyio.to_thread.run_sync(effect.work)

"""Runs steps with sockets and sleeps."""

from __future__ import annotations

import time
from inspect import iscoroutine
from typing import TYPE_CHECKING, Any, TypeVar

from plainsong.core.effects import Blocking, Now, Pause, Send, Tell

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.core.effects import Answer, Effect, Failure, Steps

T = TypeVar("T")


class Shell:
    """Carries out what steps ask for, in the calling thread; shared by any number of them.

    Args:
      carry: sends a request and brings its answer.
      sleep, clock: the world's, unless a test has its own.
    """

    def __init__(
        self,
        carry: Callable[[Send], Answer | Failure],
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._carry = carry
        self._sleep = sleep
        self._clock = clock

    def run(self, steps: Steps[T]) -> T:
        """The result of ``steps``, or what they raise. What interrupts them (not an ``Exception``) ends them."""
        try:
            effect = steps.send(None)
            while True:
                try:
                    result = self._done(effect)
                except Exception as error:  # noqa: BLE001 - the steps decide what follows from it
                    effect = steps.throw(error)
                else:
                    effect = steps.send(result)
        except StopIteration as done:
            value: T = done.value
            return value
        finally:
            steps.close()

    def _done(self, effect: Effect) -> Any:
        if isinstance(effect, Send):
            return self._carry(effect)
        if isinstance(effect, Now):
            return self._clock()
        if isinstance(effect, Pause):
            return self._sleep(effect.seconds)
        if isinstance(effect, Tell):
            told = effect.work()
            if iscoroutine(told):
                told.close()
                raise TypeError("an asynchronous participant takes part in transactions of an AsyncClient only")
            return told
        assert isinstance(effect, Blocking)
        return effect.work()

"""The future of a request under way: of an actor's ticket, and of a call over a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import outcome
import trio

if TYPE_CHECKING:
    from collections.abc import Callable

A = TypeVar("A")


class Future(Generic[A]):
    """The outcome of a request, and the one task that waits for it."""

    __slots__ = ("_on_settled", "_outcome", "_task", "abandoned")

    def __init__(self) -> None:
        #: Whether its caller was cancelled while it waited.
        self.abandoned = False
        self._outcome: outcome.Outcome[A] | None = None
        self._task: trio.lowlevel.Task | None = None
        self._on_settled: Callable[[Any], object] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether ``wait`` would return at once."""
        return self._outcome is not None

    def settle(self, answer: A | Exception) -> None:
        """Gives the answer, or the error instead of one. Only the first counts."""
        if self._outcome is not None:
            return
        self._outcome = outcome.Error(answer) if isinstance(answer, Exception) else outcome.Value(answer)
        if self._task is not None:
            trio.lowlevel.reschedule(self._task, self._outcome)
            self._task = None
        if self._on_settled is not None:
            self._on_settled(answer)

    def on_settled(self, notify: Callable[[Any], object]) -> None:
        """Has ``notify`` called with the answer, instead of a task that waits; to be set before it is settled.

        It is called in the middle of the answering task's work: it neither waits nor raises.
        """
        self._on_settled = notify

    async def wait(self, on_leave: Callable[[Any], object] | None = None) -> A:
        """Returns the answer, or raises the error. A caller that is cancelled calls ``on_leave`` with this future."""
        if self._outcome is not None:
            await trio.lowlevel.checkpoint_if_cancelled()
            return self._outcome.unwrap()
        self._task = trio.lowlevel.current_task()

        def abort(_: object) -> trio.lowlevel.Abort:
            self._task = None
            self.abandoned = True
            if on_leave is not None:
                on_leave(self)
            return trio.lowlevel.Abort.SUCCEEDED

        answer: A = await trio.lowlevel.wait_task_rescheduled(abort)
        return answer

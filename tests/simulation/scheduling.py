"""Trio's event loop in simulated histories: the seed determines the order of tasks, and unnecessary work is skipped.

A history takes about 1,800 rounds of the event loop, most of them for one task. Each round does three things besides
running tasks, which are skipped: it asks the kernel about sockets, although there are none, looks for instruments, and
shuffles a single task. Four in ten rounds could only run the current task again, and are skipped entirely; ``is_alone``
detects them. Cancel scopes register or remove their deadlines about 1,300 times, with a context manager made from a
generator; here it is an object. None of this changes a history.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from math import inf
from random import Random
from typing import Any

import trio
import trio._core._run as internals


class Orders(Random):
    """Orders of the runnable tasks in a round."""

    #: Tasks of the current round that have not run yet; the event loop takes them from this list.
    batch: Sequence[Any] = ()

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """Shuffle like ``Random.shuffle``, which draws nothing for a single item."""
        self.batch = x
        if len(x) > 1:
            super().shuffle(x)


class DeadlineChange:
    """Replaces ``CancelScope._might_change_registered_deadline``, for runs that are not guests."""

    __slots__ = ("_scope",)

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        """Do nothing: the registered deadline is compared on exit."""

    def __exit__(self, *_: object) -> None:
        scope = self._scope
        old = scope._registered_deadline
        new = inf if scope._cancel_status is None or scope._cancel_called else scope._deadline
        if old != new:
            scope._registered_deadline = new
            deadlines = internals.GLOBAL_RUN_CONTEXT.runner.deadlines
            if old != inf:
                deadlines.remove(old, scope)
            if new != inf:
                deadlines.add(new, scope)


def _changes(scope: trio.CancelScope) -> DeadlineChange:
    return DeadlineChange(scope)


def is_alone(until_s: float) -> bool:
    """True if the calling task, which is not cancelled, is the only runnable one, and no deadline expires up to that
    time, so that rounds of the event loop would only run it again."""
    context = internals.GLOBAL_RUN_CONTEXT
    return (
        not internals._r.batch  # type: ignore[attr-defined]  # these are Orders
        and not context.runner.runq
        and not context.task._cancel_status.effectively_cancelled
        and context.runner.deadlines.next_deadline() > until_s
    )


_checkpoint = trio.lowlevel.checkpoint


async def _checkpoint_among_others() -> None:
    """See ``trio.lowlevel.checkpoint``."""
    if not is_alone(trio.current_time()):
        await _checkpoint()


@contextmanager
def scheduled_by(seed: int) -> Iterator[None]:
    """Within the block, run Trio with an order of tasks that the seed determines."""
    manager, ask_kernel = internals.TheIOManager, internals.TheIOManager.get_events
    before = internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r
    change = trio.CancelScope._might_change_registered_deadline

    def get_events(self: Any, timeout_s: float) -> Any:
        """Ask the kernel only when the loop sleeps: the only socket is the one through which a signal wakes it."""
        return ask_kernel(self, timeout_s) if timeout_s else []

    internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = True, Orders(seed)  # as hypothesis does
    manager.get_events = get_events  # type: ignore[method-assign]
    trio.CancelScope._might_change_registered_deadline = _changes  # type: ignore[method-assign,assignment]
    trio.lowlevel.checkpoint = _checkpoint_among_others
    try:
        yield
    finally:
        internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = before
        manager.get_events = ask_kernel  # type: ignore[method-assign]
        trio.CancelScope._might_change_registered_deadline = change  # type: ignore[method-assign]
        trio.lowlevel.checkpoint = _checkpoint


def without_instruments() -> None:
    """Disable instruments in the calling run, since Trio looks for them several times per round, in Python."""
    internals.GLOBAL_RUN_CONTEXT.runner.instruments = {}  # type: ignore[assignment]

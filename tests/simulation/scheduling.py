"""Trio's event loop in simulated histories: one order of tasks for a seed, and nothing done that nobody needs there.

A history makes some 1,800 rounds of the event loop, most of them for one task. Three things that each round does
beside its tasks are left out here: asking the kernel about sockets, of which there are none, looking for instruments,
and shuffling a single task. Four in ten of the rounds could only take the task that runs once more, and are left out as
a whole: ``is_alone`` says when. Some 1,300 times, a cancel scope notes its deadline or forgets it, each time by a
generator in a context manager; that is an object here. No history becomes another for any of this.
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
    """Orders of the tasks that can go on in one round."""

    #: Those of the round under way that have not had their turn yet: the event loop takes them from this list.
    batch: Sequence[Any] = ()

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """As ``Random.shuffle``, which draws nothing for one."""
        self.batch = x
        if len(x) > 1:
            super().shuffle(x)


class DeadlineChange:
    """As ``CancelScope._might_change_registered_deadline``, for runs that are no guests."""

    __slots__ = ("_scope",)

    def __init__(self, scope: trio.CancelScope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        """What is registered is compared at the end."""

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
    """Whether the calling task, which is not cancelled, is the only one that can go on, and no deadline comes up to
    that time: rounds of the event loop would take it again, and nothing else."""
    context = internals.GLOBAL_RUN_CONTEXT
    return (
        not internals._r.batch  # type: ignore[attr-defined]  # these are Orders
        and not context.runner.runq
        and not context.task._cancel_status.effectively_cancelled
        and context.runner.deadlines.next_deadline() > until_s
    )


_checkpoint = trio.lowlevel.checkpoint


async def _checkpoint_among_others() -> None:
    """As ``trio.lowlevel.checkpoint``."""
    if not is_alone(trio.current_time()):
        await _checkpoint()


@contextmanager
def scheduled_by(seed: int) -> Iterator[None]:
    """Runs of Trio in this context take their tasks in an order that the seed gives."""
    manager, ask_kernel = internals.TheIOManager, internals.TheIOManager.get_events
    before = internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r
    change = trio.CancelScope._might_change_registered_deadline

    def get_events(self: Any, timeout_s: float) -> Any:
        """No socket is waited for but the one by which a signal wakes the loop when it sleeps."""
        return ask_kernel(self, timeout_s) if timeout_s else []

    internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = True, Orders(seed)  # as hypothesis has it
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
    """The run that calls this looks for none any more: Trio asks for them several times a round, in Python."""
    internals.GLOBAL_RUN_CONTEXT.runner.instruments = {}  # type: ignore[assignment]

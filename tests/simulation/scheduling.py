"""Trio's event loop in simulated histories: one order of tasks for a seed, and nothing done that nobody needs there.

A history makes some 1,600 rounds of the event loop, most of them for one task. Three things that each round does
beside its tasks are left out here: asking the kernel about sockets, of which there are none, looking for instruments,
and shuffling a single task.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from random import Random
from typing import Any

import trio._core._run as internals


class Orders(Random):
    """Orders of the tasks that can go on in one round."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        """As ``Random.shuffle``, which draws nothing for one."""
        if len(x) > 1:
            super().shuffle(x)


@contextmanager
def scheduled_by(seed: int) -> Iterator[None]:
    """Runs of Trio in this context take their tasks in an order that the seed gives."""
    manager, ask_kernel = internals.TheIOManager, internals.TheIOManager.get_events
    before = internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r

    def get_events(self: Any, timeout_s: float) -> Any:
        """No socket is waited for but the one by which a signal wakes the loop when it sleeps."""
        return ask_kernel(self, timeout_s) if timeout_s else []

    internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = True, Orders(seed)  # as hypothesis has it
    manager.get_events = get_events  # type: ignore[method-assign]
    try:
        yield
    finally:
        internals._ALLOW_DETERMINISTIC_SCHEDULING, internals._r = before
        manager.get_events = ask_kernel  # type: ignore[method-assign]


def without_instruments() -> None:
    """The run that calls this looks for none any more: Trio asks for them several times a round, in Python."""
    internals.GLOBAL_RUN_CONTEXT.runner.instruments = {}  # type: ignore[assignment]

"""What a faulty store was told: which calls fail, and which wait at a gate."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Literal

import trio

Op = Literal["claim", "write", "discard", "get", "scan", "reclaim"]


@dataclass(slots=True)
class Fault:
    """One call that fails."""

    after: int
    """Calls to let pass first."""
    applied: bool | int
    """Whether it happened all the same; a number: so many rows of it."""


@dataclass(slots=True)
class _Gate:
    opened: trio.Event = field(default_factory=trio.Event)
    reached: trio.Event = field(default_factory=trio.Event)


class Faults:
    """The faults of one store, told synchronously, so that a hypothesis machine can tell them between its steps."""

    def __init__(self) -> None:
        #: How often each operation was called.
        self.calls: Counter[Op] = Counter()
        self._faults: defaultdict[Op, list[Fault]] = defaultdict(list)
        self._gates: dict[Op, _Gate] = {}

    def fail_next(self, op: Op, *, applied: bool | int = False, after: int = 0) -> None:
        """Let a call of ``op`` raise StoreError; a write or discard also leaves the store to be claimed again.

        Args:
          op: the operation.
          applied: whether it happened all the same; a number: so many rows of it.
          after: calls of ``op`` to let pass first.
        """
        self._faults[op].append(Fault(after, applied))

    def fail_no_more(self) -> None:
        """Forget the faults that have not come yet."""
        self._faults.clear()

    def stall(self, op: Op) -> None:
        """Let calls of ``op`` wait, before they do anything, until ``release``."""
        self._gates.setdefault(op, _Gate())

    async def stalled(self, op: Op) -> None:
        """Return when a call of ``op`` waits; ``stall`` was called before."""
        await self._gates[op].reached.wait()

    def release(self, op: Op) -> None:
        """Let the stalled calls of ``op`` go on."""
        gate = self._gates.pop(op, None)
        if gate is not None:
            gate.opened.set()

    def release_all(self) -> None:
        """Let every stalled call go on."""
        for op in list(self._gates):
            self.release(op)

    async def arrive(self, op: Op) -> Fault | None:
        """Count a call of ``op``, wait at its gate, and give the fault that is due."""
        self.calls[op] += 1
        fault = self._due(op)
        await trio.lowlevel.checkpoint()
        gate = self._gates.get(op)
        if gate is not None:
            gate.reached.set()
            await gate.opened.wait()
        return fault

    def _due(self, op: Op) -> Fault | None:
        due = None
        for fault in list(self._faults[op]):
            if fault.after == 0 and due is None:
                due = fault
                self._faults[op].remove(fault)
            elif fault.after > 0:
                fault.after -= 1
        return due

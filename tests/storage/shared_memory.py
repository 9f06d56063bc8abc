"""A store in memory that several instances in a process share: owners and epochs without HBase.

For fast tests of handovers in ``actors`` and ``broker``. A claim deposes the previous owner, as on HBase.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from storage.base import Claim, Deposed
from storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.protocol.effects import Expect, Operation
    from plainsong.protocol.names import TopicName


class SharedMemory:
    """The tables, and each topic's epoch. Each instance has its own store on these tables."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.epochs: dict[TopicName, int] = {}

    def store(self) -> SharedMemoryStore:
        """Make a store for one more instance."""
        return SharedMemoryStore(self)


class SharedMemoryStore(MemoryStore):
    """``storage.base.Store`` of one instance."""

    traits = replace(MemoryStore.traits, shared=True)

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__()
        self._shared = shared
        self.tables = shared.memory.tables
        #: Claims, commits and checks wait for this event, as for a slow gateway. Tests clear it.
        self.reachable = trio.Event()
        self.reachable.set()

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``. Begins a new epoch."""
        await self._arrive()
        epoch = self._shared.epochs[name] = self._shared.epochs.get(name, 0) + 1
        return Claim(name, epoch)

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``."""
        await self._arrive()
        self._refuse_if_deposed(claim)

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``. Checks the claim, compares and applies in one step."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            await self._arrive()
            self._refuse_if_deposed(claim)
            self.compare(expect)
            self.apply(commit)

    async def _arrive(self) -> None:
        await self._enter()
        await self.reachable.wait()

    def _refuse_if_deposed(self, claim: Claim) -> None:
        if self._shared.epochs.get(claim.name) != claim.epoch:
            raise Deposed(f"topic {claim.name} is no longer owned in epoch {claim.epoch}", happened=False)

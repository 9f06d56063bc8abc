"""Memory that several instances of one process share: a store with owners, epochs and fences, without HBase.

What ``actors`` and ``broker`` do when a topic changes hands is tried out on it quickly; the promises are those of
every store, and a claim deposes the owner before, as on HBase.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from storage.base import Claim, Deposed
from storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.effects import Expect, Operation
    from protocol.names import TopicName


class SharedMemory:
    """The tables, and who owns which topic; each instance has a store of its own on them."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.epochs: dict[TopicName, int] = {}

    def store(self) -> SharedMemoryStore:
        """What one more instance opens."""
        return SharedMemoryStore(self)


class SharedMemoryStore(MemoryStore):
    """``storage.base.Store`` of one instance."""

    traits = replace(MemoryStore.traits, shared=True)

    def __init__(self, shared: SharedMemory) -> None:
        super().__init__()
        self._shared = shared
        self.tables = shared.memory.tables
        #: Commits and checks wait for this one, as they wait for a gateway that is slow; it is set, most often.
        self.reachable = trio.Event()
        self.reachable.set()

    async def claim(self, name: TopicName) -> Claim:
        """See ``Store.claim``: a new epoch."""
        await self._arrive()
        epoch = self._shared.epochs[name] = self._shared.epochs.get(name, 0) + 1
        return Claim(name, epoch)

    async def check(self, claim: Claim) -> None:
        """See ``Store.check``."""
        await self._arrive()
        self._refuse_if_deposed(claim)

    async def write(self, commit: Sequence[Operation], *, claim: Claim, expect: Sequence[Expect] = ()) -> None:
        """See ``Store.write``: compared and applied in one moment, in which the claim holds."""
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
            raise Deposed(f"topic {claim.name} is not owned in epoch {claim.epoch} any more", happened=False)

"""An in-memory object store that can be unavailable, refuse requests, lose answers, and execute requests late."""

from __future__ import annotations

from random import Random

import trio

from storage.replication.carry import ObjectStoreRefused, ObjectStoreUnavailable
from storage.replication.protocol import Fetched, Verdict


class MemoryObjects:
    """``storage.replication.carry.Objects``."""

    can_exchange = True

    def __init__(self) -> None:
        self.found: dict[str, tuple[bytes, str]] = {}
        self.away = False
        self.refuses = False
        self._versions = 0
        self.asked = 0

    async def get(self, name):
        await self._asked()
        found = self.found.get(name)
        return None if found is None else Fetched(*found)

    async def create(self, name, data):
        if not await self._writes():
            return Verdict.UNKNOWN
        if name in self.found:
            return Verdict.REFUSED
        self._put(name, data)
        return self.answer()

    async def exchange(self, name, data, etag):
        if not await self._writes():
            return Verdict.UNKNOWN
        if self.found.get(name, (b"", ""))[1] != etag:
            return Verdict.REFUSED
        self._put(name, data)
        return self.answer()

    async def names(self, prefix):
        await self._asked()
        return sorted(name for name in self.found if name.startswith(f"{prefix}/"))

    async def remove(self, names):
        await self._asked()
        for name in names:
            self.found.pop(name, None)

    def answer(self):
        return Verdict.DONE

    def _put(self, name, data):
        self._versions += 1
        self.found[name] = (bytes(data), str(self._versions))

    async def _asked(self):
        self.asked += 1
        await trio.lowlevel.checkpoint()
        if self.refuses:
            raise ObjectStoreRefused("no right")
        if self.away:
            raise ObjectStoreUnavailable("away")

    async def _writes(self):
        try:
            await self._asked()
        except ObjectStoreUnavailable:
            return False
        return True


class FaultyObjects(MemoryObjects):
    """Refuses some requests, and loses answers to others, which take effect immediately, later, or never."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = Random(seed)
        self._late: list[tuple[str, bytes]] = []
        self.calm = False

    async def create(self, name, data):
        if not self.calm:
            await trio.sleep(self.random.choice([0, 0, 0.001, 0.01]))
            if self._late and self.random.random() < 0.5:
                await super().create(*self._late.pop())
            chance = self.random.random()
            if chance < 0.1:
                return Verdict.UNKNOWN
            if chance < 0.2:
                self._late.append((name, data))
                return Verdict.UNKNOWN
            if chance < 0.25:
                return Verdict.REFUSED if name not in self.found else await super().create(name, data)
        return await super().create(name, data)

    def answer(self):
        return Verdict.UNKNOWN if not self.calm and self.random.random() < 0.1 else Verdict.DONE

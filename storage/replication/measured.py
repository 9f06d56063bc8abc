"""Measures how long the object store takes for a write, for operators."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from storage.replication.carry import WrappedObjects
from storage.replication.protocol import Verdict

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from storage.replication.carry import Objects

#: Number of writes that the percentiles cover.
KEPT = 1000


class PutTimes:
    """How long the last writes took."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=KEPT)
        self.on_put: Callable[[float], object] = lambda _: None
        """Called with the seconds of each write."""

    def took(self, seconds: float) -> None:
        """Add a write."""
        self._seconds.append(seconds)
        self.on_put(seconds)

    @property
    def count(self) -> int:
        """Number of writes recorded."""
        return len(self._seconds)

    def percentile_s(self, share: float) -> float | None:
        """Return the time within which this share of the last writes ended; None if there was none."""
        ordered = sorted(self._seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


class MeasuredObjects(WrappedObjects):
    """``storage.replication.carry.Objects`` whose completed writes are measured."""

    def __init__(self, objects: Objects, times: PutTimes) -> None:
        super().__init__(objects)
        self._times = times

    async def create(self, name: str, data: bytes) -> Verdict:
        """See ``Objects``."""
        return await self._measured(self._objects.create(name, data))

    async def exchange(self, name: str, data: bytes, etag: str) -> Verdict:
        """See ``Objects``."""
        return await self._measured(self._objects.exchange(name, data, etag))

    async def _measured(self, write: Awaitable[Verdict]) -> Verdict:
        begun_s = trio.current_time()
        verdict = await write
        if verdict is Verdict.DONE:
            self._times.took(trio.current_time() - begun_s)
        return verdict

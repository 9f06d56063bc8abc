"""Epochs for claims: taken from one counter in blocks, so that a thousand claims are not a thousand turns at one row.

An epoch is given once, and to one claim. A claim needs one above all that its topic ever had, which its head tells: of
a block that others have overtaken nothing is used any more. Claims of names without a namespace, the services, take
theirs from the counter itself: what they write where no head decides (``cells.py``) is ordered by epochs alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from protocol.keys import SYSTEM
from storage.hbase.packed import FAMILY

if TYPE_CHECKING:
    from storage.hbase.pool import Pool

#: Where epochs are counted, for all topics: the last one that was given.
EPOCHS_KEY, EPOCHS_COLUMN = SYSTEM + b"o", FAMILY + b":n"
#: What an instance takes at a time; those that it does not use are nobody's.
BLOCK = 100


class Epochs:
    """Those of one instance."""

    def __init__(self, pool: Pool, counter: bytes) -> None:
        """``counter``: the table that it is in."""
        self._pool = pool
        self._counter = counter
        self._block = range(0)
        self._taking = trio.Lock()

    async def above(self, epoch: int) -> int:
        """One that is above ``epoch``, which was given before. Raises StoreError."""
        async with self._taking:
            if not self._block or self._block[-1] <= epoch:
                last = await self._count(BLOCK)
                self._block = range(last - BLOCK + 1, last + 1)
            self._block = range(max(self._block.start, epoch + 1), self._block.stop)
            taken, self._block = self._block[0], self._block[1:]
            return taken

    async def latest(self) -> int:
        """One above all that were given to whomever. Raises StoreError."""
        return await self._count(1)

    async def _count(self, step: int) -> int:
        return int(await self._pool.call("atomicIncrement", self._counter, EPOCHS_KEY, EPOCHS_COLUMN, step))

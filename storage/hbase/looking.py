"""Looking at a store in HBase without owning anything of it: scans that block, for commands without an event loop.

Nothing is claimed and nothing is written; daemons on the same tables go on. What is seen is what counts at that time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from storage.hbase.store import HBaseStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from protocol.effects import Table
    from storage.base import Row
    from storage.hbase.gateway import Address
    from storage.hbase.settings import HBaseOptions


class Looking:
    """The rows of a store, as ``storage.explain`` walks over them."""

    def __init__(self, addresses: Sequence[Address], options: HBaseOptions) -> None:
        """See that it can be opened, tables and all. Raises StoreUnusable."""
        self._addresses = addresses
        self._options = replace(options, create_tables=False)
        trio.run(self._open)

    async def _open(self) -> None:
        async with await HBaseStore.open(self._addresses, self._options):
            pass

    def scan(self, table: Table, start: bytes, stop: bytes, feed: Callable[[list[Row]], bool]) -> None:
        """As ``Store.scan``, upwards. Raises StoreError, StoreUnusable."""
        trio.run(partial(self._scan, table, start, stop, feed))

    async def _scan(self, table: Table, start: bytes, stop: bytes, feed: Callable[[list[Row]], bool]) -> None:
        async with await HBaseStore.open(self._addresses, self._options) as store:
            await store.scan(table, start, stop, feed)

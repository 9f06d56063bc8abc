"""Putting rows of messages and payloads: if absent, so that nobody's late attempt replaces what was acknowledged.

absent                                       put
the same bytes                               an attempt of ours had landed: done
of a commit that can never take place        nobody will see it: replaced
anything else                                another owner is at work
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from protocol.keys import metadata_key, topic_prefix
from storage.base import Deposed, StoreError
from storage.hbase.gateway import thrift
from storage.hbase.packed import CELL, pack, stamp_of
from storage.hbase.stamps import NOBODYS
from storage.hbase.tables import hashed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from protocol.effects import Put, Table
    from storage.base import Claim
    from storage.hbase.owners import Owners
    from storage.hbase.packed import Packed
    from storage.hbase.pool import Pool
    from storage.hbase.tables import Tables


class Putting:
    """Puts rows, packed."""

    def __init__(self, pool: Pool, tables: Tables, owners: Owners, *, max_cell_bytes: int) -> None:
        self._pool = pool
        self._tables = tables
        self._owners = owners
        self._max_cell_bytes = max_cell_bytes

    def calls(self, operation: Put, claim: Claim) -> Iterator[Callable[[], Awaitable[None]]]:
        """What puts the operation's rows, in as few rows of HBase as its cells allow; in whatever order.

        They raise:
          Deposed: another owner has put something there.
          StoreError: the rows up to some may be there; they count when the commit does.
        """
        keys = [operation.prefix + suffix for suffix in operation.suffixes]
        # Rows of another topic than the claim's, which only tests of stores write, are decided by no head.
        own = not keys or topic_prefix(keys[0]) == metadata_key(claim.name)
        stamp = self._owners.next_stamp(claim) if own else NOBODYS
        for packed in pack(keys, operation.values, stamp, self._max_cell_bytes):
            yield partial(self._put, operation.table, packed, claim)

    async def _put(self, table: Table, packed: Packed, claim: Claim) -> None:
        row = hashed(packed.key)
        name = self._tables[table]
        mutation = thrift.Mutation(column=CELL, value=packed.cell)
        before: bytes | None = None
        while not await self._pool.call("checkAndPut", name, row, CELL, before, mutation, {}):
            found = await self._pool.call("getRow", name, row, {})
            before = found[0].columns[CELL].value if found and CELL in found[0].columns else None
            if before == packed.cell:
                return
            if before is not None and not (await self._owners.head_of(metadata_key(claim.name))).is_void(
                stamp := stamp_of(before)
            ):
                if stamp.epoch <= claim.epoch:
                    raise StoreError(f"row {packed.key.hex()} was put before with other bytes")
                raise Deposed(f"row {packed.key.hex()} of {name.decode()} was put in epoch {stamp.epoch}")

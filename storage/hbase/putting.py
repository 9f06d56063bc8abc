"""Putting rows of messages and payloads: if absent, so that nobody's late attempt replaces what was acknowledged.

absent                                put
the same bytes                        an attempt of ours had landed: done
of an owner before, behind its fence  nobody can see it: replaced
anything else                         another owner is at work
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.keys import metadata_key
from storage.base import Deposed, StoreError
from storage.hbase.gateway import thrift
from storage.hbase.packed import CELL, epoch_of, pack
from storage.hbase.tables import hashed

if TYPE_CHECKING:
    from protocol.effects import Put
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

    async def put(self, operation: Put, claim: Claim) -> None:
        """Put the operation's rows, in order, in as few rows of HBase as its cells allow.

        Raises:
          Deposed: another owner has put something there.
          StoreError: the rows up to some may be there, whole.
        """
        keys = [operation.prefix + suffix for suffix in operation.suffixes]
        for packed in pack(keys, operation.values, claim.epoch, self._max_cell_bytes):
            await self._put(operation.table, packed, claim)

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
            if before is not None and not await self._is_void(table, packed.key, before, claim):
                raise Deposed(f"row {packed.key.hex()} of {name.decode()} was put in epoch {epoch_of(before)}")

    async def _is_void(self, table: Table, key: bytes, cell: bytes, claim: Claim) -> bool:
        """Whether nobody sees this cell, since its owner had been replaced when it came."""
        epoch = epoch_of(cell)
        if epoch > claim.epoch:
            return False
        if epoch == claim.epoch:
            raise StoreError(f"row {key.hex()} was put before with other bytes")
        if table is Table.PAYLOAD:
            # This owner gives out positions behind all that it found acknowledged.
            return True
        return (await self._owners.head_of(metadata_key(claim.name))).hides(epoch, key)

"""Rows of the metadata table that no head decides about: one cell, compared and set, never by an older owner.

    cell v    epoch:u64  01 value | 00        00: the row is gone

Who writes them has claimed a name without a namespace, and those claims have epochs in the order of time, whatever the
name (``epochs.py``): so a cell says whether it may be replaced.
A row that is removed stays as a cell that says so: HBase has no compare-and-delete through its gateway, and a plain
delete that was long under way would remove what a later owner has put. Such rows are few: properties of namespaces, and
what whoever opens a store says about it. They count as soon as they are there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from protocol.keys import DamagedRow
from storage.base import Deposed, StoreConflict
from storage.hbase.gateway import thrift
from storage.hbase.packed import CELL

if TYPE_CHECKING:
    from storage.hbase.pool import Pool

_EPOCH = struct.Struct(">Q")
_THERE, _GONE = b"\x01", b"\x00"
_HEAD_BYTES = _EPOCH.size + 1


def cell_of(epoch: int, value: bytes | None) -> bytes:
    """A cell with a value, or (None) one that says that the row is gone."""
    return _EPOCH.pack(epoch) + (_GONE if value is None else _THERE + value)


def value_in(cell: bytes | None) -> bytes | None:
    """The row's value; None: there is no such row. Raises DamagedRow."""
    if cell is None:
        return None
    mark = cell[_EPOCH.size : _HEAD_BYTES]
    if mark not in (_THERE, _GONE):
        raise DamagedRow(f"a metadata cell begins with {cell[:_HEAD_BYTES].hex()}")
    return cell[_HEAD_BYTES:] if mark == _THERE else None


def epoch_in(cell: bytes | None) -> int:
    """Whose it is; 0: nobody's. Raises DamagedRow."""
    if cell is None:
        return 0
    value_in(cell)
    epoch: int = _EPOCH.unpack_from(cell)[0]
    return epoch


class Cells:
    """The metadata table, cell by cell."""

    def __init__(self, pool: Pool, table: bytes) -> None:
        self._pool = pool
        self._table = table

    async def get(self, key: bytes) -> bytes | None:
        """The cell of a row. Raises StoreError."""
        rows = await self._pool.call("getRow", self._table, key, {})
        return rows[0].columns[CELL].value if rows and CELL in rows[0].columns else None

    async def swap(self, key: bytes, before: bytes | None, after: bytes) -> bool:
        """Put ``after`` where ``before`` is (None: nothing). Raises StoreError.

        True also when an attempt whose answer was lost has done it.
        """
        mutation = thrift.Mutation(column=CELL, value=after)
        if await self._pool.call("checkAndPut", self._table, key, CELL, before, mutation, {}):
            return True
        return await self.get(key) == after

    async def put(self, key: bytes, value: bytes | None, epoch: int) -> None:
        """Put a value, or (None) that the row is gone.

        Raises:
          Deposed: a later owner has written it.
          StoreError: unknown.
        """
        while True:
            before = await self.get(key)
            if epoch_in(before) > epoch:
                raise Deposed(f"row {key.hex()} was written by a later owner")
            after = cell_of(epoch, value)
            if before == after or (before is None and value is None) or await self.swap(key, before, after):
                return

    async def put_expected(self, key: bytes, expected: bytes | None, value: bytes | None, epoch: int) -> None:
        """As ``put``, if the value is ``expected``. Raises StoreConflict: nothing happened."""
        while True:
            before = await self.get(key)
            after = cell_of(epoch, value)
            if before == after and expected != value:
                return  # an attempt before
            if value_in(before) != expected:
                raise StoreConflict(f"row {key.hex()} of the metadata table has changed")
            if epoch_in(before) > epoch:
                raise Deposed(f"row {key.hex()} was written by a later owner")
            if (before is None and value is None) or await self.swap(key, before, after):
                return

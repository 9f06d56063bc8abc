"""Rows of the metadata table: with two cells, from which a head selects the valid one, or with one cell.

Rows of topics and of the transaction service have two cells, one of which is valid:

    cells a, b    stamp  01 value | 00        00: the row is removed
    governed by   ns:topic:  and  00 kind ns:topic: …     the head of the topic
                  00 'x' …                                the head of the transaction service

The valid cell is that of the last commit that took effect. The owner puts the next value into the other cell, by
compare-and-set; that cell becomes valid with its commit. So a value stays readable until the next one is certain, and a
late put of a deposed owner either finds an unexpected cell or is never read. Only the owner of the head writes these
rows; all other rows of the table have one cell, see ``Cells``.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.keys import SERVICE, SYSTEM, DamagedRow, topic_prefix
from storage.base import Deposed, StoreConflict, StoreError
from storage.hbase.gateway import thrift
from storage.hbase.layout import CELL, FAMILY, STAMP, Stamp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from storage.hbase.layout import Head
    from storage.hbase.pool import Pool

SLOTS = (FAMILY + b":a", FAMILY + b":b")
#: ``metadata_key`` of the name that the transaction service claims.
SERVICE_PREFIX = b":transactions:"
_THERE, _GONE = b"\x01", b"\x00"
_SLOT_HEAD_BYTES = STAMP.size + 1
#: Rows whose cells are cached, so that a write need not read them first. Larger cells are not cached.
_MAX_KNOWN = 4096
_MAX_KNOWN_BYTES = 1024
_ATTEMPTS = 100


def governor(key: bytes) -> bytes | None:
    """Return ``ns:topic:`` of the head that governs a row of the metadata table; None if none does."""
    if not key.startswith(SYSTEM):
        prefix = topic_prefix(key)
        return prefix if prefix and prefix == key else None
    if key.startswith(SYSTEM + SERVICE):
        return SERVICE_PREFIX
    return topic_prefix(key[2:]) or None


def slot_of(stamp: Stamp, value: bytes | None) -> bytes:
    """Encode a cell with a value, or with None, a cell that marks the row as removed."""
    return stamp.encode() + (_GONE if value is None else _THERE + value)


class SlotPair(NamedTuple):
    """The two cells of a row."""

    a: bytes | None = None
    b: bytes | None = None

    @classmethod
    def of(cls, columns: Mapping[bytes, bytes]) -> SlotPair:
        """Make the pair from the columns of an HBase row."""
        return cls(*map(columns.get, SLOTS))

    def stamps(self) -> list[Stamp]:
        """Return the stamps of the existing cells. Raises DamagedRow."""
        return [_stamp_of(cell) for cell in self if cell]

    def valid(self, head: Head) -> int | None:
        """Return the index of the valid cell; None if there is none. Raises DamagedRow."""
        counting = [(stamp, at) for at, cell in enumerate(self) if cell and head.counts(stamp := _stamp_of(cell))]
        return max(counting)[1] if counting else None

    def value(self, head: Head) -> bytes | None:
        """Return the row's value; None if there is no such row. Raises DamagedRow."""
        at = self.valid(head)
        if at is None:
            return None
        cell = self[at]
        assert cell is not None  # ``valid`` returns existing cells only
        return cell[_SLOT_HEAD_BYTES:] if cell[STAMP.size : _SLOT_HEAD_BYTES] == _THERE else None

    def is_beyond(self, head: Head) -> bool:
        """True if an owner later than the head's has written here, which means that the head is stale."""
        return any(cell is not None and _stamp_of(cell).epoch > head.last.epoch for cell in self)

    def put(self, at: int, cell: bytes) -> SlotPair:
        """Return the pair with one cell replaced."""
        return SlotPair(cell, self.b) if at == 0 else SlotPair(self.a, cell)


def _stamp_of(cell: bytes) -> Stamp:
    if cell[STAMP.size : _SLOT_HEAD_BYTES] not in (_THERE, _GONE):
        raise DamagedRow(f"a metadata cell begins with {cell[:_SLOT_HEAD_BYTES].hex()}")
    return Stamp(*STAMP.unpack_from(cell))


class Slots:
    """Writes rows with two cells, for the owner of their head."""

    def __init__(self, pool: Pool, table: bytes) -> None:
        self._pool = pool
        self._table = table
        self._known: OrderedDict[bytes, SlotPair] = OrderedDict()

    async def get(self, key: bytes) -> SlotPair:
        """Return the cells of a row. Raises StoreError."""
        rows = await self._pool.call("getRow", self._table, key, {})
        return SlotPair.of({column: cell.value for column, cell in rows[0].columns.items()}) if rows else SlotPair()

    async def put(self, key: bytes, value: bytes | None, stamp: Stamp, head: Head) -> None:
        """Put the value that the row has after the commit of ``stamp``; None removes the row.

        Args:
          head: the owner's head before that commit.
        Raises:
          Deposed: a later owner has written the row; judged by this outdated head, its cell would seem invalid.
          StoreError: the outcome is unknown.
        """
        after = slot_of(stamp, value)
        pair = self._known.pop(key, None)
        if pair is None:
            # Most uncached rows are new, so assume that. If the row exists, its first cell does, and the swap fails.
            pair = SlotPair() if value is not None else await self.get(key)
        for _ in range(_ATTEMPTS):
            if pair.is_beyond(head):
                raise Deposed(f"row {key.hex()} was written by a later owner")
            at = 0 if pair.valid(head) != 0 else 1
            if pair[at] == after or (value is None and pair.value(head) is None):
                break
            if await self._swap(key, SLOTS[at], pair[at], after):
                pair = pair.put(at, after)
                break
            pair = await self.get(key)
        else:
            raise StoreError(
                f"row {key.hex()} of the metadata table is being written by other instances", hint="try again"
            )
        self._remember(key, pair)

    async def _swap(self, key: bytes, column: bytes, before: bytes | None, after: bytes) -> bool:
        mutation = thrift.Mutation(column=column, value=after)
        return bool(await self._pool.call("checkAndPut", self._table, key, column, before, mutation, {}))

    def _remember(self, key: bytes, pair: SlotPair) -> None:
        if sum(len(cell or b"") for cell in pair) <= _MAX_KNOWN_BYTES:
            self._known[key] = pair
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def forget(self, prefix: bytes) -> None:
        """Drop the cached rows that this head governs, because other instances may have written them."""
        for key in [key for key in self._known if governor(key) == prefix]:
            del self._known[key]


# --- cells -----------------------------------------------------------------------------------------
#
# Rows of the metadata table that no head governs have one cell, which an earlier owner cannot replace:
#
#     cell v    epoch:u64  01 value | 00        00: the row is removed
#
# Their writer has claimed a name without a namespace. The epochs of such claims increase over time across all names
# (``owners.Epochs``), so the cell's epoch decides if it may be replaced. Removing a row puts a cell that marks it as
# removed: the gateway has no compare-and-delete, and a plain delete that arrives late would remove a later owner's value.
# Such rows are few: properties of namespaces, and rows about the whole store. A put takes effect immediately.


_EPOCH = struct.Struct(">Q")

_CELL_HEAD_BYTES = _EPOCH.size + 1


def cell_of(epoch: int, value: bytes | None) -> bytes:
    """Encode a cell with a value, or with None, a cell that marks the row as removed."""
    return _EPOCH.pack(epoch) + (_GONE if value is None else _THERE + value)


def value_in(cell: bytes | None) -> bytes | None:
    """Return the row's value; None if there is no such row. Raises DamagedRow."""
    if cell is None:
        return None
    mark = cell[_EPOCH.size : _CELL_HEAD_BYTES]
    if mark not in (_THERE, _GONE):
        raise DamagedRow(f"a metadata cell begins with {cell[:_CELL_HEAD_BYTES].hex()}")
    return cell[_CELL_HEAD_BYTES:] if mark == _THERE else None


def epoch_in(cell: bytes | None) -> int:
    """Return the epoch of the cell's writer; 0 if there is no cell. Raises DamagedRow."""
    if cell is None:
        return 0
    value_in(cell)
    epoch: int = _EPOCH.unpack_from(cell)[0]
    return epoch


class Cells:
    """Reads and writes rows with one cell."""

    def __init__(self, pool: Pool, table: bytes) -> None:
        self._pool = pool
        self._table = table

    async def get(self, key: bytes) -> bytes | None:
        """Return the cell of a row; None if there is no cell. Raises StoreError."""
        rows = await self._pool.call("getRow", self._table, key, {})
        return rows[0].columns[CELL].value if rows and CELL in rows[0].columns else None

    async def swap(self, key: bytes, before: bytes | None, after: bytes) -> bool:
        """Replace ``before`` (None: no cell) with ``after``; return False if the cell has changed. Raises StoreError.

        Also returns True if an earlier attempt, whose answer was lost, has replaced it.
        """
        mutation = thrift.Mutation(column=CELL, value=after)
        if await self._pool.call("checkAndPut", self._table, key, CELL, before, mutation, {}):
            return True
        return await self.get(key) == after

    async def put(self, key: bytes, value: bytes | None, epoch: int) -> None:
        """Put a value; None marks the row as removed.

        Raises:
          Deposed: a later owner has written it.
          StoreError: the outcome is unknown.
        """
        while True:
            before = await self.get(key)
            if epoch_in(before) > epoch:
                raise Deposed(f"row {key.hex()} was written by a later owner")
            after = cell_of(epoch, value)
            if before == after or (before is None and value is None) or await self.swap(key, before, after):
                return

    async def put_expected(self, key: bytes, expected: bytes | None, value: bytes | None, epoch: int) -> None:
        """Do ``put`` if the current value is ``expected``; ``swap`` recognizes that an unanswered attempt succeeded.

        Raises:
          StoreConflict: the current value is a different one; nothing happened. Also what ``put`` raises.
        """
        while True:
            before = await self.get(key)
            after = cell_of(epoch, value)
            if value_in(before) != expected:
                raise StoreConflict(f"row {key.hex()} of the metadata table has changed")
            if epoch_in(before) > epoch:
                raise Deposed(f"row {key.hex()} was written by a later owner")
            if (before is None and value is None) or await self.swap(key, before, after):
                return

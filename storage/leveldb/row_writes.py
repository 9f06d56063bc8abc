"""Writes rows of one volume: as packs, into packs, or one by one. Only this module chooses between these forms.

Three rules keep a pack whole (``storage.leveldb.engine.packs``):

    new rows become packs only if they are of one generation of a topic, and no row of it in this volume is between them
    a row that may lie within a pack is changed by ``RowEdits``, which writes the whole pack again
    ``Volume.may_be_packed`` is never False for a row in a pack: ``packed`` of an extent is set before the pack is
    written
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from storage.base import StoreError
from storage.leveldb.engine.packs import MARK, PACKED_TABLE, are_many, is_of_topic, packs_of, stored
from storage.leveldb.engine.row_edits import RowEdits

if TYPE_CHECKING:
    from plainsong.protocol.effects import Put
    from storage.base import Row
    from storage.leveldb.engine.database import Database
    from storage.leveldb.volume import Volume

_TABLE_BYTE = {table: bytes([table]) for table in Table}


class RowWrites:
    """Changes of a volume's rows within one batch; ``finish`` ends it. For the volume's owner. Raises StoreError."""

    __slots__ = ("_batch", "_database", "_edits", "_volume")

    def __init__(self, volume: Volume, database: Database, batch: Any) -> None:
        """``batch`` belongs to ``database``, which is the volume's."""
        self._volume = volume
        self._database = database
        self._batch = batch
        self._edits: RowEdits | None = None

    def insert(self, put: Put) -> None:
        """Put new rows into the newest volume, and record them in its summary."""
        if put.table is PACKED_TABLE and self._volume.shape.packed and put.values and self._insert_packed(put):
            return
        self._volume.note(put, packs=None, packed=False)
        # The daemon's hottest loop: only the put.
        add, prefix = self._batch.put, _TABLE_BYTE[put.table] + put.prefix
        for suffix, value in zip(put.suffixes, put.values, strict=True):
            add(prefix + suffix, value)

    def _insert_packed(self, put: Put) -> bool:
        """Put new rows as packs, into packs, or as packs of one. Returns False, without effect, if none are needed."""
        volume, prefix, suffixes, values = self._volume, put.prefix, put.suffixes, put.values
        packs = self._packs(put) if are_many(values) else None
        if packs is not None:
            volume.note(put, packs=packs, packed=True)
            self._in_packs().add(packs)
            return True
        if volume.has_packs and volume.has_packs_between(prefix + suffixes[0], prefix + suffixes[-1]):
            edits = self._in_packs()
            volume.note(put, packs=None, packed=True)
            for suffix, value in zip(suffixes, values, strict=True):
                edits.put(prefix + suffix, value)
            return True
        if max(values) >= MARK and any(value[:1] == MARK for value in values):
            volume.note(put, packs=None, packed=True)
            for suffix, value in zip(suffixes, values, strict=True):
                self._batch.put(_TABLE_BYTE[PACKED_TABLE] + prefix + suffix, stored(value))
            return True
        return False

    def _packs(self, put: Put) -> list[Row] | None:
        """Return the packs of new rows; None if they must not, or need not, be packed."""
        first, last = put.prefix + put.suffixes[0], put.prefix + put.suffixes[-1]
        if len(put.suffixes[0]) != POSITION_BYTES or not is_of_topic(first):
            return None
        if any(self._volume.extents[put.table].overlapping(first, last + b"\x00")):
            return None
        return packs_of(put.prefix, put.suffixes, put.values, may_expire=put.may_expire)

    def replace(self, table: Table, key: bytes, value: bytes) -> None:
        """Replace the value of a row that the volume has."""
        if self._volume.may_be_packed(table, key):
            self._in_packs().put(key, value)
        else:
            is_packed = table is PACKED_TABLE and self._volume.shape.packed
            self._batch.put(_TABLE_BYTE[table] + key, stored(value) if is_packed else value)

    def remove(self, table: Table, key: bytes, *, if_readable: bool = False) -> None:
        """Remove a row if there is one, and subtract its size from the volume's live bytes.

        If the database has no such row yet, because the same batch writes it, or if its size cannot be read, the volume
        has to be counted.

        Args:
          if_readable: leave a row in a damaged pack, none of whose rows can be read or kept.
        """
        is_packed = self._volume.may_be_packed(table, key)
        size = self._size_of(table, key, packed=is_packed)
        if size is None:
            self._volume.note_uncounted(1)
        else:
            self._volume.note_removed(table, key, size)
        if not is_packed:
            self._batch.delete(_TABLE_BYTE[table] + key)
        elif if_readable:
            self._in_packs().remove_if_readable(key)
        else:
            self._in_packs().remove(key)

    def _size_of(self, table: Table, key: bytes, *, packed: bool) -> int | None:
        """Return the bytes of a row's key and value; None if there is no such row, or it cannot be read."""
        try:
            value = self._database.get(table, key, packed=packed)
        except StoreError:
            return None
        return None if value is None else len(key) + len(value)

    def _in_packs(self) -> RowEdits:
        if self._edits is None:
            self._edits = RowEdits(self._database, self._batch)
        return self._edits

    def finish(self) -> int:
        """Put the changed packs; returns their bytes."""
        return 0 if self._edits is None else self._edits.finish()

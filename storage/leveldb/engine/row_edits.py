"""Changes of single rows in packs."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from storage.base import Unreadable
from storage.leveldb.engine.packs import PACKED_TABLE, Pack, split, stored

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plainsong.protocol.effects import Table
    from storage.base import Row

_TABLE_BYTE = bytes([PACKED_TABLE])


class _Rows(Protocol):
    """The source of the rows that are changed."""

    def first_from(self, table: Table, key: bytes) -> Row | Pack | None: ...


class _Edit:
    """A pack that is being changed."""

    __slots__ = ("first", "key", "rows")

    def __init__(self, pack: Pack) -> None:
        self.key, self.first = pack.key, pack.key_at(0)
        self.rows = dict(pack.rows())


class RowEdits:
    """Changes of single rows within a batch; ``finish`` ends it. For rows that may be in packs, or become part of one.

    A pack with changed rows is read, and written again by ``finish``. The batch may add packs as well. It may have any
    other rows that are in no pack: their keys are not those of packs, so the order of the two does not matter.
    """

    def __init__(self, database: _Rows, batch: Any) -> None:
        """``batch``: from ``Database.batch``."""
        self._database = database
        self._put: Callable[[bytes, bytes], object] = batch.put
        self._delete: Callable[[bytes], object] = batch.delete
        self._edits: dict[bytes, _Edit] = {}
        self._last: _Edit | None = None
        #: Packs that this batch has put: their keys, ascending, and their values.
        self._new_keys: list[bytes] = []
        self._new: dict[bytes, bytes] = {}

    def add(self, packs: Iterable[Row]) -> None:
        """Put packs whose rows come after all others of their group."""
        for key, value in packs:
            self._put(_TABLE_BYTE + key, value)
            if key not in self._new:
                insort(self._new_keys, key)
            self._new[key] = value

    def put(self, key: bytes, value: bytes) -> None:
        """Put a row. Raises StoreError: the pack that may contain it cannot be read."""
        edit = self._edit_of(key)
        if edit is None:
            self._put(_TABLE_BYTE + key, stored(value))
        else:
            edit.rows[key] = value

    def remove(self, key: bytes) -> None:
        """Remove a row if there is one. Raises StoreError: the pack that may contain it cannot be read."""
        edit = self._edit_of(key)
        if edit is None:
            self._delete(_TABLE_BYTE + key)
        else:
            edit.rows.pop(key, None)

    def remove_if_readable(self, key: bytes) -> None:
        """Remove a row, unless its pack is damaged: no row of such a pack can be read or kept.

        Raises:
          StoreError: the pack cannot be read for another reason; nothing was removed.
        """
        try:
            self.remove(key)
        except Unreadable as error:
            if "Corruption" not in error.detail:
                raise

    def _edit_of(self, key: bytes) -> _Edit | None:
        """Return the pack that contains the key or would contain it; None if there is none."""
        if self._last is not None and self._last.first <= key <= self._last.key:
            return self._last
        at = bisect_left(self._new_keys, key)
        if at < len(self._new_keys):
            name = self._new_keys[at]
            edit = self._taken_apart(Pack(name, self._new[name]), key)
            if edit is not None:
                return edit
        found = self._database.first_from(PACKED_TABLE, key)
        return self._taken_apart(found, key) if isinstance(found, Pack) else None

    def _taken_apart(self, pack: Pack, key: bytes) -> _Edit | None:
        """Return the edit of ``pack``, whose last key is not before ``key``; None if the pack begins after ``key``."""
        edit = self._edits.get(pack.key)
        if edit is None and pack.key_at(0) <= key:
            edit = self._edits[pack.key] = _Edit(pack)
        if edit is None or edit.first > key:
            return None
        self._last = edit
        return edit

    def finish(self) -> int:
        """Put the changed packs; returns their bytes."""
        size = 0
        for name, edit in self._edits.items():
            packs: list[Row] = []
            for _, run in groupby(sorted(edit.rows.items()), lambda row: len(row[0])):
                keys, values = zip(*run, strict=True)
                packs += split(b"", keys, values, list(map(len, values)))
            if all(key != name for key, _ in packs):
                self._delete(_TABLE_BYTE + name)
            for key, value in packs:
                self._put(_TABLE_BYTE + key, value)
                size += len(key) + len(value)
        return size

"""Message and payload rows as HBase keeps them: many in one row, since one row is what it writes as a whole.

    row key   hash:u8  key of the last row in it
    cell v    01  epoch:u64  shared:u16  tail:u16  count:u32  (tail bytes, size:u32) × count  values
    cell t…   pointer:i64  first tail  →  last tail     rows of this pointer from first to last are rolled back
    cell r…   first tail  →  last tail                  rows from first to last are removed

All rows of one begin with the first ``shared`` bytes of its key, and end with tails of one length. Cells t and r come
later, from the row's owner, and only ever say more. A row has the key of its last one, so that a scan that begins in
its middle finds it.
"""

from __future__ import annotations

import struct
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from protocol.keys import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES, DamagedRow, topic_prefix
from storage.rolled import rolled_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from storage.base import Row

FAMILY = b"d"
CELL = b"d:v"
ROLLED, REMOVED = b"d:t", b"d:r"
FORMAT = 1
#: As many as a position's sequence ids in one millisecond.
MAX_ROWS = 1 << 16
_HEAD = struct.Struct(">BQHHI")
_POINTER = struct.Struct(">q")
#: What a row in it takes besides its tail and its value.
_SIZE_BYTES = 4


class Packed(NamedTuple):
    """One row of HBase."""

    key: bytes
    """Of the last row in it, without the hash."""
    cell: bytes


def pack(keys: Sequence[bytes], values: Sequence[bytes], epoch: int, max_cell_bytes: int) -> Iterator[Packed]:
    """Rows with ascending keys, in as few rows of HBase as the bound on cells allows.

    No later row belongs between two that share one: rows of a generation, and those of a pointer, are written in their
    order; whatever else there may be shares one with its neighbours only.
    """
    at = 0
    while at < len(keys):
        placed = _is_placed(keys[at])
        end, size = at, _HEAD.size
        while end < len(keys) and end - at < MAX_ROWS and len(keys[end]) == len(keys[at]):
            size += len(keys[end]) + _SIZE_BYTES + len(values[end])
            if end > at and (size > max_cell_bytes or not (placed or _are_neighbours(keys[end - 1], keys[end]))):
                break
            end += 1
        yield _pack(keys[at:end], values[at:end], epoch)
        at = end


def _is_placed(key: bytes) -> bool:
    """Whether a key ends in a position, behind a topic and what belongs to it."""
    return len(key) - len(topic_prefix(key)) in (MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES) and b":" in key


def _are_neighbours(key: bytes, other: bytes) -> bool:
    return int.from_bytes(key, "big") + 1 == int.from_bytes(other, "big")


def _pack(keys: Sequence[bytes], values: Sequence[bytes], epoch: int) -> Packed:
    shared = len(commonprefix((keys[0], keys[-1])))  # noqa: RUF071 - character by character is what is wanted
    tail = len(keys[-1]) - shared
    head = struct.Struct(f">{tail}sI")
    heads = [head.pack(key[shared:], len(value)) for key, value in zip(keys, values, strict=True)]
    return Packed(keys[-1], b"".join([_HEAD.pack(FORMAT, epoch, shared, tail, len(keys)), *heads, *values]))


def epoch_of(cell: bytes) -> int:
    """Whose commit a cell is of. Raises DamagedRow."""
    if len(cell) < _HEAD.size or cell[0] != FORMAT:
        raise DamagedRow(f"a cell begins with {cell[:1].hex()}, which this version does not know")
    epoch: int = _HEAD.unpack_from(cell)[1]
    return epoch


def shared_of(key: bytes, cell: bytes) -> bytes:
    """What the keys of all its rows begin with. Raises DamagedRow."""
    epoch_of(cell)
    return key[: _HEAD.unpack_from(cell)[2]]


def unpack(key: bytes, columns: Mapping[bytes, bytes]) -> list[Row]:
    """The rows that are in a row of HBase now, in key order.

    Args:
      key: of the row, without the hash.
      columns: its cells, by column.
    Raises:
      DamagedRow: the cell cannot be read.
    """
    cell = columns.get(CELL, b"")
    epoch_of(cell)
    _, _, shared, tail, count = _HEAD.unpack_from(cell)
    head = struct.Struct(f">{tail}sI")
    at = _HEAD.size + count * head.size
    prefix = key[:shared]
    rows: list[Row] = []
    try:
        for rest, size in head.iter_unpack(cell[_HEAD.size : at]):
            rows.append((prefix + rest, cell[at : at + size]))
            at += size
    except struct.error as error:
        raise DamagedRow(f"a cell of {len(cell)} bytes ends early") from error
    if at != len(cell) or len(rows) != count:
        raise DamagedRow(f"a cell has {len(cell)} bytes, its parts say {at}")
    return _changed(rows, prefix, columns) if len(columns) > 1 else rows


def _changed(rows: list[Row], prefix: bytes, columns: Mapping[bytes, bytes]) -> list[Row]:
    """What later cells make of the rows."""
    for column, last in columns.items():
        if column.startswith(REMOVED):
            first, stop = prefix + column[len(REMOVED) :], prefix + last
            rows = [row for row in rows if not first <= row[0] <= stop]
        elif column.startswith(ROLLED):
            at = len(ROLLED) + _POINTER.size
            (pointer,) = _POINTER.unpack_from(column, len(ROLLED))
            first, stop = prefix + column[at:], prefix + last
            turned = dict(rolled_back([row for row in rows if first <= row[0] <= stop], pointer))
            rows = [(key, turned.get(key, value)) for key, value in rows]
    return rows


def rolling_cell(shared: int, pointer: int, first: bytes, last: bytes) -> tuple[bytes, bytes]:
    """Column and value that roll a pointer's rows back, from key ``first`` to key ``last``."""
    return ROLLED + _POINTER.pack(pointer) + first[shared:], last[shared:]


def removing_cells(shared: int, keys: Sequence[bytes], gone: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Columns and values that remove those of the row's ``keys`` (all, in order) that are ``gone``, run by run."""
    cells: list[tuple[bytes, bytes]] = []
    first: bytes | None = None
    last = b""
    for key in keys:
        if key in gone:
            first, last = first or key, key
        elif first is not None:
            cells.append((REMOVED + first[shared:], last[shared:]))
            first = None
    if first is not None:
        cells.append((REMOVED + first[shared:], last[shared:]))
    return cells

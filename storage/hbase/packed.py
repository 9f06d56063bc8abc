"""Message and payload rows as HBase keeps them: many in one row, since one row is what it writes as a whole.

    row key   hash:u8  key of the last row in it
    cell v    01  stamp  shared:u16  tail:u16  count:u32  (tail bytes, size:u32) × count  values
    cell t…   stamp  pointer:i64  first tail  last tail  →  01     rows of this pointer in between are rolled back
    cell r…   stamp  first tail  last tail  →  01                  rows in between, both included, are removed

A stamp is 16 bytes (``stamps.py``). All rows of one begin with the first ``shared`` bytes of its key, and end with tails
of one length. Cells t and r come later, and only ever say more: what they say is in their names, so that none replaces another. They are about the cell v with their stamp, so that one
that comes late says nothing about what has taken its place. A row has the key of its last one, so that a scan that
begins in its middle finds it.
"""

from __future__ import annotations

import struct
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from protocol.keys import MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES, DamagedRow, topic_prefix
from storage.hbase.stamps import STAMP, Stamp
from storage.rolled import rolled_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from storage.base import Row

FAMILY = b"d"
CELL = b"d:v"
ROLLED, REMOVED = b"d:t", b"d:r"
#: What stands in cells whose names say it all.
SAID = b"\x01"
FORMAT = 1
#: As many as a position's sequence ids in one millisecond.
MAX_ROWS = 1 << 16
_HEAD = struct.Struct(">BQQHHI")
_POINTER = struct.Struct(">q")
#: What a row in it takes besides its tail and its value.
_SIZE_BYTES = 4


class Packed(NamedTuple):
    """One row of HBase."""

    key: bytes
    """Of the last row in it, without the hash."""
    cell: bytes


def pack(keys: Sequence[bytes], values: Sequence[bytes], stamp: Stamp, max_cell_bytes: int) -> Iterator[Packed]:
    """Rows with ascending keys, in as few rows of HBase as the bound on cells allows.

    No later row belongs between two that share one: rows of a generation, and those of a pointer, are written in their
    order; whatever else there may be shares one with its neighbours only.
    """
    if keys and _fits(keys, values, max_cell_bytes):
        yield _pack(keys, values, stamp)
        return
    at = 0
    while at < len(keys):
        placed = _is_placed(keys[at])
        end, size = at, _HEAD.size
        while end < len(keys) and end - at < MAX_ROWS and len(keys[end]) == len(keys[at]):
            size += len(keys[end]) + _SIZE_BYTES + len(values[end])
            if end > at and (size > max_cell_bytes or not (placed or _are_neighbours(keys[end - 1], keys[end]))):
                break
            end += 1
        yield _pack(keys[at:end], values[at:end], stamp)
        at = end


def _fits(keys: Sequence[bytes], values: Sequence[bytes], max_cell_bytes: int) -> bool:
    """Whether all of them go into one row of HBase, as most commits do."""
    size = _HEAD.size + len(keys) * (len(keys[0]) + _SIZE_BYTES) + sum(map(len, values))
    same = len(set(map(len, keys))) == 1 and _is_placed(keys[0])
    return len(keys) <= MAX_ROWS and size <= max_cell_bytes and same


def _is_placed(key: bytes) -> bool:
    """Whether a key ends in a position, behind a topic and what belongs to it."""
    return len(key) - len(topic_prefix(key)) in (MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES) and b":" in key


def _are_neighbours(key: bytes, other: bytes) -> bool:
    return int.from_bytes(key, "big") + 1 == int.from_bytes(other, "big")


def _pack(keys: Sequence[bytes], values: Sequence[bytes], stamp: Stamp) -> Packed:
    shared = len(commonprefix((keys[0], keys[-1])))  # noqa: RUF071 - character by character is what is wanted
    tail = len(keys[-1]) - shared
    head = struct.Struct(f">{tail}sI")
    heads = [head.pack(key[shared:], len(value)) for key, value in zip(keys, values, strict=True)]
    return Packed(keys[-1], b"".join([_HEAD.pack(FORMAT, *stamp, shared, tail, len(keys)), *heads, *values]))


def stamp_of(cell: bytes) -> Stamp:
    """Which commit a cell is of. Raises DamagedRow."""
    if len(cell) < _HEAD.size or cell[0] != FORMAT:
        raise DamagedRow(f"a cell begins with {cell[:1].hex()}, which this version does not know")
    return Stamp(*STAMP.unpack_from(cell, 1))


def unpack(key: bytes, columns: Mapping[bytes, bytes]) -> list[Row]:
    """The rows that are in a row of HBase now, in key order.

    Args:
      key: of the row, without the hash.
      columns: its cells, by column.
    Raises:
      DamagedRow: the cell cannot be read.
    """
    cell = columns.get(CELL, b"")
    stamp_of(cell)
    _, _, _, shared, tail, count = _HEAD.unpack_from(cell)
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
    return _changed(rows, prefix, columns, cell[1 : 1 + STAMP.size]) if len(columns) > 1 else rows


def _changed(rows: list[Row], prefix: bytes, columns: Mapping[bytes, bytes], stamp: bytes) -> list[Row]:
    """What later cells make of the rows."""
    removed, rolled = REMOVED + stamp, ROLLED + stamp
    for column in columns:
        if column.startswith(removed):
            first, last = _ends(prefix, column[len(removed) :])
            rows = [row for row in rows if not first <= row[0] <= last]
        elif column.startswith(rolled):
            (pointer,) = _POINTER.unpack_from(column, len(rolled))
            first, last = _ends(prefix, column[len(rolled) + _POINTER.size :])
            turned = dict(rolled_back([row for row in rows if first <= row[0] <= last], pointer))
            rows = [(key, turned.get(key, value)) for key, value in rows]
    return rows


def _ends(prefix: bytes, tails: bytes) -> tuple[bytes, bytes]:
    """First and last key of what a cell is about."""
    return prefix + tails[: len(tails) // 2], prefix + tails[len(tails) // 2 :]


def rolling_column(cell: bytes, pointer: int, first: bytes, last: bytes) -> bytes:
    """The column that rolls a pointer's rows in ``cell`` back, from key ``first`` to key ``last``."""
    stamp, shared = _about(cell)
    return ROLLED + stamp + _POINTER.pack(pointer) + first[shared:] + last[shared:]


def removing_columns(cell: bytes, keys: Sequence[bytes], gone: set[bytes]) -> list[bytes]:
    """Columns that remove those of the cell's ``keys`` (all that are there, in order) that are ``gone``, run by run."""
    stamp, shared = _about(cell)
    columns: list[bytes] = []
    run: list[bytes] = []
    for key in (*keys, None):
        if key is not None and key in gone:
            run.append(key)
        elif run:
            columns.append(REMOVED + stamp + run[0][shared:] + run[-1][shared:])
            run = []
    return columns


def _about(cell: bytes) -> tuple[bytes, int]:
    """The stamp, as other cells have it, and what keys share."""
    return stamp_of(cell).encode(), _HEAD.unpack_from(cell)[3]

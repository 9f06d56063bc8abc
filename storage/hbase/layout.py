"""The layout in HBase: row keys, stamps and heads of commits, packed rows, and the kinds of system rows."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from os.path import commonprefix
from typing import TYPE_CHECKING, NamedTuple

from plainsong.protocol.keys import (
    HIGH_WATER,
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    POINTER,
    PRODUCER,
    PRODUCERS,
    READER,
    SYSTEM,
    DamagedRow,
    topic_prefix,
)
from storage.base import rolled_back

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from storage.base import Row

HASHES = 256


def hashed(key: bytes) -> bytes:
    """Return the key as used in the message and payload tables."""
    return blake2b(topic_prefix(key), digest_size=1).digest() + key


def is_within_topic(start: bytes, stop: bytes) -> bool:
    """True if all keys of ``[start, stop)`` belong to one topic."""
    prefix = topic_prefix(start)
    return prefix != b"" and stop <= prefix[:-1] + b";"


# --- stamps ----------------------------------------------------------------------------------------
#
# A stamp identifies the commit that a row or cell of HBase belongs to; a topic's head decides which stamps count.
#
#     stamp     epoch:u64 serial:u64      the owner's epoch, and the number of its commit; 0 0: no owner, always counts
#     head      01 stamp stamp            the last commit of the current owner; the last one of the previous owner
#     fence     serial:u64                the last commit of an epoch that counts
#
# All rows and cells of a commit carry its stamp, and count once the head has reached it. A row that is put later under
# a stamp that the head has skipped, or in an epoch without a fence, never counts.


STAMP = struct.Struct(">QQ")
_HEAD_STRUCT = struct.Struct(">BQQQQ")
_HEAD_FORMAT = 1
_SERIAL = struct.Struct(">Q")


class Stamp(NamedTuple):
    """Identifies the commit that a row or cell belongs to."""

    epoch: int
    serial: int
    """Counts from 1; 0 is the state before the first commit of the epoch."""

    def encode(self) -> bytes:
        """Encode it for the beginning of a cell."""
        return STAMP.pack(*self)


NO_OWNER = Stamp(0, 0)


def encode_serial(serial: int) -> bytes:
    """Encode a fence's value."""
    return _SERIAL.pack(serial)


def decode_serial(value: bytes) -> int:
    """Decode a fence's value. Raises DamagedRow."""
    if len(value) != _SERIAL.size:
        raise DamagedRow(f"a fence has {len(value)} bytes")
    serial: int = _SERIAL.unpack(value)[0]
    return serial


@dataclass(frozen=True, slots=True)
class Head:
    """Decides which rows of a topic count."""

    last: Stamp = NO_OWNER
    """The owner's last commit."""
    before: Stamp = NO_OWNER
    """The last commit of the latest earlier owner that made any."""
    fences: Mapping[int, int] = field(default_factory=dict)
    """For earlier owners: epoch → serial of the last commit."""

    def encode(self) -> bytes:
        """Encode the head's cell. Fences have their own cells."""
        return _HEAD_STRUCT.pack(_HEAD_FORMAT, *self.last, *self.before)

    @classmethod
    def decode(cls, cell: bytes | None, fences: Mapping[int, int]) -> Head:
        """Decode the head's cell; None: the topic was never claimed. Raises DamagedRow."""
        if cell is None:
            return cls()
        if len(cell) != _HEAD_STRUCT.size or cell[0] != _HEAD_FORMAT:
            raise DamagedRow(f"a head of {len(cell)} bytes begins with {cell[:1].hex()}")
        _, epoch, serial, epoch_before, serial_before = _HEAD_STRUCT.unpack(cell)
        return cls(Stamp(epoch, serial), Stamp(epoch_before, serial_before), fences)

    def claimed(self, epoch: int) -> Head:
        """Return the head of the next owner, before its first commit."""
        if not self.last.serial:
            return Head(Stamp(epoch, 0), self.before, self.fences)
        fences = {**self.fences, self.before.epoch: self.before.serial} if self.before.epoch else self.fences
        return Head(Stamp(epoch, 0), self.last, fences)

    def committed(self) -> Head:
        """Return the head after the owner's next commit."""
        return replace(self, last=Stamp(self.last.epoch, self.last.serial + 1))

    def counts(self, stamp: Stamp) -> bool:
        """True if the commit of ``stamp`` took effect."""
        for known in (self.last, self.before):
            if stamp.epoch == known.epoch:
                return stamp.serial <= known.serial
        return stamp == NO_OWNER or stamp.serial <= self.fences.get(stamp.epoch, 0)

    def outcome_of(self, stamp: Stamp) -> bool | None:
        """True if a commit of an earlier owner took effect; None if that was too long ago to tell, or is undecided.

        Once this is the head, no later attempt of that commit can take effect.
        """
        if stamp.epoch >= self.last.epoch:
            return None
        known = {self.before.epoch: self.before.serial, **self.fences}
        return stamp.serial <= known[stamp.epoch] if stamp.epoch in known else None

    def is_void(self, stamp: Stamp) -> bool:
        """True if the commit of ``stamp`` will never count: its owner was replaced first."""
        return stamp.epoch < self.last.epoch and not self.counts(stamp)


# --- packed ----------------------------------------------------------------------------------------
#
# One row of HBase contains many message or payload rows, because HBase writes a single row atomically.
#
#     row key   hash:u8  key of the last row in it
#     cell v    01  stamp  shared:u16  tail:u16  count:u32  (tail bytes, size:u32) × count  values
#     cell t…   stamp  pointer:i64  first tail  last tail  →  01     rows of this pointer in between are rolled back
#     cell r…   stamp  first tail  last tail  →  01                  rows from first to last, inclusive, are removed
# A stamp is 16 bytes long. All rows inside share the first ``shared`` bytes of the key, and have tails of equal length.
# Cells t and r are added later. Their names contain the change, so that none replaces another, and the stamp of the
# cell v that they change, so that a cell that is put late does not affect a newer cell v. The key is that of the last
# row inside, so that a scan that begins in the middle finds it.


FAMILY = b"d"
CELL = b"d:v"
ROLLED, REMOVED = b"d:t", b"d:r"
#: The value of cells whose names contain all information.
PRESENT = b"\x01"
PACKED_FORMAT = 1
#: The number of sequence ids in one millisecond.
MAX_ROWS = 1 << 16
_PACKED_STRUCT = struct.Struct(">BQQHHI")
_POINTER = struct.Struct(">q")
#: Bytes per row inside, in addition to its tail and value.
_SIZE_BYTES = 4


class Packed(NamedTuple):
    """One row of HBase."""

    key: bytes
    """The key of the last row in it, without the hash."""
    cell: bytes


def pack(keys: Sequence[bytes], values: Sequence[bytes], stamp: Stamp, max_cell_bytes: int) -> Iterator[Packed]:
    """Pack rows with ascending keys into as few rows of HBase as the bound on cells allows.

    No later row may belong between two rows that are packed together. The rows of a generation or a pointer are written
    in order; other rows are packed only with direct neighbours.
    """
    if keys and _fits(keys, values, max_cell_bytes):
        yield _pack(keys, values, stamp)
        return
    at = 0
    while at < len(keys):
        placed = _is_placed(keys[at])
        end, size = at, _PACKED_STRUCT.size
        while end < len(keys) and end - at < MAX_ROWS and len(keys[end]) == len(keys[at]):
            size += len(keys[end]) + _SIZE_BYTES + len(values[end])
            if end > at and (size > max_cell_bytes or not (placed or _are_neighbours(keys[end - 1], keys[end]))):
                break
            end += 1
        yield _pack(keys[at:end], values[at:end], stamp)
        at = end


def _fits(keys: Sequence[bytes], values: Sequence[bytes], max_cell_bytes: int) -> bool:
    """True if all rows fit into one row of HBase, as in most commits."""
    size = _PACKED_STRUCT.size + len(keys) * (len(keys[0]) + _SIZE_BYTES) + sum(map(len, values))
    same = len(set(map(len, keys))) == 1 and _is_placed(keys[0])
    return len(keys) <= MAX_ROWS and size <= max_cell_bytes and same


def _is_placed(key: bytes) -> bool:
    """True if a key is that of a message or payload: a topic and a tail that ends in a position."""
    return len(key) - len(topic_prefix(key)) in (MESSAGE_TAIL_BYTES, PAYLOAD_TAIL_BYTES) and b":" in key


def _are_neighbours(key: bytes, other: bytes) -> bool:
    return int.from_bytes(key, "big") + 1 == int.from_bytes(other, "big")


def _pack(keys: Sequence[bytes], values: Sequence[bytes], stamp: Stamp) -> Packed:
    shared = len(commonprefix((keys[0], keys[-1])))  # noqa: RUF071 - compares character by character, as intended
    tail = len(keys[-1]) - shared
    head = struct.Struct(f">{tail}sI")
    heads = [head.pack(key[shared:], len(value)) for key, value in zip(keys, values, strict=True)]
    return Packed(
        keys[-1], b"".join([_PACKED_STRUCT.pack(PACKED_FORMAT, *stamp, shared, tail, len(keys)), *heads, *values])
    )


def stamp_of(cell: bytes) -> Stamp:
    """Return the stamp of a cell. Raises DamagedRow."""
    if len(cell) < _PACKED_STRUCT.size or cell[0] != PACKED_FORMAT:
        raise DamagedRow(f"a cell begins with {cell[:1].hex()}, which this version does not know")
    return Stamp(*STAMP.unpack_from(cell, 1))


def unpack(key: bytes, columns: Mapping[bytes, bytes]) -> list[Row]:
    """Return the rows that a packed row of HBase still has, in key order.

    Args:
      key: the row's key, without the hash.
      columns: its cells by column.
    Raises:
      DamagedRow: the cell cannot be read.
    """
    cell = columns.get(CELL, b"")
    stamp_of(cell)
    _, _, _, shared, tail, count = _PACKED_STRUCT.unpack_from(cell)
    head = struct.Struct(f">{tail}sI")
    at = _PACKED_STRUCT.size + count * head.size
    prefix = key[:shared]
    rows: list[Row] = []
    try:
        for rest, size in head.iter_unpack(cell[_PACKED_STRUCT.size : at]):
            rows.append((prefix + rest, cell[at : at + size]))
            at += size
    except struct.error as error:
        raise DamagedRow(f"a cell of {len(cell)} bytes ends early") from error
    if at != len(cell) or len(rows) != count:
        raise DamagedRow(f"a cell has {len(cell)} bytes, its parts say {at}")
    if not rows or rows[-1][0] != key:
        raise DamagedRow(f"the last of {count} rows in a cell is not {key.hex()}")
    return _changed(rows, prefix, columns, cell[1 : 1 + STAMP.size]) if len(columns) > 1 else rows


def _changed(rows: list[Row], prefix: bytes, columns: Mapping[bytes, bytes], stamp: bytes) -> list[Row]:
    """Apply the cells that were added later to the rows."""
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
    """Return the first and last key in the name of a cell."""
    return prefix + tails[: len(tails) // 2], prefix + tails[len(tails) // 2 :]


def rolling_column(cell: bytes, pointer: int, first: bytes, last: bytes) -> bytes:
    """Return the column that rolls back a pointer's rows in ``cell`` from key ``first`` to key ``last``."""
    stamp, shared = _about(cell)
    return ROLLED + stamp + _POINTER.pack(pointer) + first[shared:] + last[shared:]


def removing_columns(cell: bytes, keys: Sequence[bytes], gone: set[bytes]) -> list[bytes]:
    """Return the columns that remove the ``gone`` keys among the cell's ``keys`` (all, in order), one for each run."""
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
    """Return the stamp for names of later cells, and the number of bytes that keys share."""
    return stamp_of(cell).encode(), _PACKED_STRUCT.unpack_from(cell)[3]


# --- kinds -----------------------------------------------------------------------------------------
#
# A topic's head row records the kinds of its system rows, so that loading the topic skips the others.
#
#     cell k           this row records kinds, from the first claim on
#     cell k kind:u8   there may be rows of this kind; never removed
#
# A commit that puts the first row of a kind puts this cell too, before it moves the head. So a reader of the head finds
# the kinds of all rows that count by it. A claim reads the row and then replaces exactly that head, so it can tell
# which kinds the topic lacks. Cells that are put late only cause useless reads.


KINDS_COLUMN = FAMILY + b":k"
KIND_PRESENT = b"\x01"
#: The kinds that loading a topic reads.
ALL_KINDS = frozenset((HIGH_WATER, READER, POINTER, PRODUCER, PRODUCERS))


def kind_of(key: bytes) -> bytes | None:
    """Return the kind of a row of the metadata table; None if it is not a system row."""
    return key[1:2] if key.startswith(SYSTEM) else None


def are_kinds_recorded(columns: Mapping[bytes, bytes]) -> bool:
    """True if a head's row records kinds."""
    return KINDS_COLUMN in columns


def kinds_in(columns: Mapping[bytes, bytes]) -> set[bytes]:
    """Return the recorded kinds: there may be rows of these."""
    return {
        column[len(KINDS_COLUMN) :] for column in columns if column.startswith(KINDS_COLUMN) and column != KINDS_COLUMN
    }

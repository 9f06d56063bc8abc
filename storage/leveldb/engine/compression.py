"""Decides if the tables of a new volume are compressed, by a sample of the rows of the volume before.

LevelDB compresses each block with snappy, and stores it uncompressed if that saves less than an eighth. On payloads that do
not compress (random text, compressed or encrypted bytes) that wastes a quarter of the writing threads' time.
"""

from __future__ import annotations

import zlib
from itertools import accumulate, islice
from typing import TYPE_CHECKING, NamedTuple

from storage.leveldb.engine.database import KIB, MIB
from storage.leveldb.engine.errors import FOREIGN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plainsong.protocol.effects import Table
    from storage.base import Row
    from storage.leveldb.engine.database import Readable

#: A new volume is compressed if that saves this part of what a sample has.
WORTH_SAVING = 0.1
#: Of blocks of which zlib saves this part, snappy saves the eighth below which LevelDB stores a block as it was: tried with
#: random characters, numbers, words, records and what is between them (``tests/storage/test_compression.py``).
_SAVED_OF_A_BLOCK = 0.19
#: Bytes of rows of which LevelDB makes a block of a volume.
VOLUME_BLOCK_BYTES = 16 * KIB
#: Blocks that are looked at, spread evenly over the bytes of a volume.
_SAMPLES = 24
#: Rows of a block that are read, at most: those of 16 KiB, unless they are tiny.
_BLOCK_ROWS = 400
#: Bytes that are read, at most: where rows are large, fewer blocks are looked at.
_MAX_READ_BYTES = 4 * MIB
#: Between two keys that LevelDB writes out, keys have only what differs from the key before.
_RESTART_ROWS = 16


class Stretch(NamedTuple):
    """Rows of a table from one key to another, both included, and their bytes."""

    table: Table
    first: bytes
    last: bytes
    size: int


def is_worth_it(database: Readable, stretches: Sequence[Stretch]) -> bool | None:
    """True if compression saves enough of the rows in ``stretches``; None: there are none, or they cannot be read."""
    ends = list(accumulate(stretch.size for stretch in stretches))
    total = ends[-1] if ends else 0
    at = read = size = stored = 0
    for sample in range(_SAMPLES if total else 0):
        place = total * sample // _SAMPLES
        while ends[at] <= place:
            at += 1
        stretch = stretches[at]
        start = _key_at(stretch, 1 - (ends[at] - place) / stretch.size)
        try:
            with database.rows(stretch.table, start, stretch.last + b"\x00") as rows:
                block = _block(islice(rows, _BLOCK_ROWS))
        except FOREIGN:
            # A reader of these rows will report it.
            return None
        read += len(block)
        size += len(block[:VOLUME_BLOCK_BYTES])
        stored += _stored_bytes(block[:VOLUME_BLOCK_BYTES])
        if read >= _MAX_READ_BYTES:
            break
    return size - stored >= WORTH_SAVING * size if size else None


def _key_at(stretch: Stretch, part: float) -> bytes:
    """A key at a part of a stretch, as if rows were spread evenly over its keys."""
    shared = 0
    end = min(len(stretch.first), len(stretch.last))
    while shared < end and stretch.first[shared] == stretch.last[shared]:
        shared += 1
    low, high = (int.from_bytes(key[shared : shared + 8].ljust(8, b"\x00")) for key in (stretch.first, stretch.last))
    if not part:
        return stretch.first
    return stretch.first[:shared] + (low + int((high - low) * part)).to_bytes(8)


def _block(rows: Iterable[Row]) -> bytes:
    """Rows as LevelDB lays them out in a block, as far as matters for compression."""
    found: list[bytes] = []
    size, before = 0, b""
    for number, (key, value) in enumerate(rows):
        shared = 0
        if number % _RESTART_ROWS:
            end = min(len(key), len(before))
            while shared < end and key[shared] == before[shared]:
                shared += 1
        before = key
        lengths = bytes((shared & 0x7F, len(key) - shared + 8 & 0x7F, len(value) & 0x7F))
        found += (lengths, key[shared:], b"\x01", number.to_bytes(7, "little"), value)
        size += len(key) - shared + 11 + len(value)
        if size >= VOLUME_BLOCK_BYTES:
            break
    return b"".join(found)


def _stored_bytes(block: bytes) -> int:
    """About what LevelDB would store of a block.

    Snappy only refers to what came before, and has no shorter code for what is frequent. Nor has zlib with fixed codes.
    """
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15, strategy=zlib.Z_FIXED)
    size = len(compressor.compress(block)) + len(compressor.flush())
    return size if size < len(block) * (1 - _SAVED_OF_A_BLOCK) else len(block)

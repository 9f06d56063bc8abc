"""Decides if the tables of a new volume are compressed, from a sample of the previous volume's rows.

LevelDB compresses each block with snappy, and stores it uncompressed if that saves less than an eighth. For payloads
that do not compress (random text, compressed or encrypted bytes) that wastes a quarter of the writing threads' time.
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

#: Compress a new volume if that saves this part of a sample.
WORTH_SAVING = 0.1
#: If zlib saves this part of a block, snappy saves the eighth below which LevelDB stores a block uncompressed. Found by
#: trials with random characters, numbers, words, records and mixtures (``tests/storage/test_compression.py``).
_SAVED_OF_A_BLOCK = 0.19
#: Bytes of rows in a block of a volume.
VOLUME_BLOCK_BYTES = 16 * KIB
#: Blocks in a sample, spread evenly over the bytes of a volume.
_SAMPLES = 24
#: Rows read for a block, at most; enough for 16 KiB unless they are tiny.
_BLOCK_ROWS = 400
#: Bytes read, at most: if rows are large, fewer blocks are sampled.
_MAX_READ_BYTES = 4 * MIB
#: LevelDB writes one key in this many whole; of the others, only the part that differs from the previous key.
_RESTART_ROWS = 16


class Stretch(NamedTuple):
    """Rows of a table between two keys, both included, and their size in bytes."""

    table: Table
    first: bytes
    last: bytes
    size: int


def is_worth_it(database: Readable, stretches: Sequence[Stretch]) -> bool | None:
    """True if compression saves enough on these rows; None if there are none or they cannot be read."""
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
    """Return a key at a fraction of a stretch, as if rows were spread evenly over its keys."""
    shared = 0
    end = min(len(stretch.first), len(stretch.last))
    while shared < end and stretch.first[shared] == stretch.last[shared]:
        shared += 1
    low, high = (int.from_bytes(key[shared : shared + 8].ljust(8, b"\x00")) for key in (stretch.first, stretch.last))
    if not part:
        return stretch.first
    return stretch.first[:shared] + (low + int((high - low) * part)).to_bytes(8)


def _block(rows: Iterable[Row]) -> bytes:
    """Lay rows out as LevelDB does in a block, as far as it matters for compression."""
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
    """Estimate the bytes that LevelDB would store for a block.

    Snappy has only back-references, no entropy coding. zlib with fixed Huffman codes is the closest match.
    """
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15, strategy=zlib.Z_FIXED)
    size = len(compressor.compress(block)) + len(compressor.flush())
    return size if size < len(block) * (1 - _SAVED_OF_A_BLOCK) else len(block)

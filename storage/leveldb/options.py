"""Sizes of the store: what it keeps in memory, and how large a volume becomes."""

from __future__ import annotations

from dataclasses import dataclass

from storage.leveldb.engine.compression import VOLUME_BLOCK_BYTES
from storage.leveldb.engine.database import KIB, MIB, Shape

#: So small that LevelDB keeps the tables of a volume where they are: above a tenth of a table it would move the second
#: one to a level whose bound of 10 MiB makes it merge.
_VOLUME_FILE_BYTES = 1 * MIB
#: What LevelDB keeps of each open volume.
_VOLUME_CACHE_BYTES = 256 * KIB


@dataclass(frozen=True, slots=True)
class LevelDBOptions:
    """Sizes in bytes. Memory at load is two to three write buffers, besides caches."""

    write_buffer_bytes: int = 32 * MIB
    """Rows kept in memory, besides the log, before they become a table file."""
    volume_bytes: int = 112 * MIB
    """Rows of a volume, as they are in memory. At three and a half write buffers LevelDB merges nothing in it: that
    would begin with the fifth table."""
    block_cache_bytes: int = 8 * MIB
    """Decompressed blocks of the metadata kept for point reads; scans do not fill it."""
    max_open_volumes: int = 32
    """Volumes held open, each with a few descriptors, its tables mapped, and some 300 KiB of their indexes."""
    paranoid_checks: bool = True
    """Refuse a log or manifest that has a damaged record, instead of dropping it with what follows in its block."""
    compression: str = "auto"
    """Of the tables of new volumes: snappy, none, or auto, by a sample of what was written to the volume before."""
    max_inline_s: float = 0.002
    """The longest that the event loop may take to write a small commit itself, in seconds; 0: a thread writes them all."""
    max_readers: int = 4
    """Threads that read at once. More than a few gain nothing under one interpreter lock; each keeps a list of rows."""

    def volume_shape(self, *, compressed: bool = True, packed: bool = False) -> Shape:
        """Of a volume."""
        return Shape(
            write_buffer_bytes=self.write_buffer_bytes,
            block_cache_bytes=_VOLUME_CACHE_BYTES,
            max_file_bytes=_VOLUME_FILE_BYTES,
            block_bytes=VOLUME_BLOCK_BYTES,
            paranoid_checks=self.paranoid_checks,
            compressed=compressed,
            packed=packed,
        )

    @property
    def large_shape(self) -> Shape:
        """Of the database of version 0.1: many tables that were merged."""
        return Shape(
            write_buffer_bytes=8 * MIB,
            block_cache_bytes=8 * MIB,
            max_file_bytes=8 * MIB,
            bloom_bits=10,
            paranoid_checks=self.paranoid_checks,
        )

    @property
    def metadata_shape(self) -> Shape:
        """Of the database of the metadata: small rows that are replaced often."""
        return Shape(
            write_buffer_bytes=min(4 * MIB, self.write_buffer_bytes),
            block_cache_bytes=self.block_cache_bytes,
            max_file_bytes=4 * MIB,
            bloom_bits=10,
            paranoid_checks=self.paranoid_checks,
        )

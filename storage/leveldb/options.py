"""Sizes of the store: memory, volumes and files."""

from __future__ import annotations

from dataclasses import dataclass

from storage.leveldb.engine.database import KIB, MIB, Shape

#: Small enough for LevelDB to leave the tables of a volume where they are: above a tenth of a table's size it would
#: move the second table to a level whose bound of 10 MiB makes it merge.
_VOLUME_FILE_BYTES = 1 * MIB
#: Rows in a block of a volume.
_VOLUME_BLOCK_BYTES = 16 * KIB
#: LevelDB's block cache for each open volume.
_VOLUME_CACHE_BYTES = 256 * KIB


@dataclass(frozen=True, slots=True)
class LevelDBOptions:
    """Sizes in bytes. Memory under load is two to three write buffers plus the caches."""

    write_buffer_bytes: int = 32 * MIB
    """Rows kept in memory, in addition to the log, until they become a table file."""
    volume_bytes: int = 112 * MIB
    """Size of a volume's rows in memory. At three and a half write buffers LevelDB never merges in it: that would
    begin with the fifth table."""
    block_cache_bytes: int = 8 * MIB
    """Decompressed blocks of the metadata, cached for point reads; scans do not fill the cache."""
    max_open_volumes: int = 32
    """Volumes held open, each with a few descriptors, its tables mapped, and about 300 KiB of table indexes."""
    paranoid_checks: bool = True
    """Refuse a log or manifest with a damaged record, instead of dropping it and the rest of its block."""
    max_inline_s: float = 0.002
    """The longest time, in seconds, that an inline commit of the event loop may take; 0: all commits use the thread."""
    max_readers: int = 4
    """Threads that read at once. More than a few gain nothing under the interpreter lock; each holds a list of rows."""

    def volume_shape(self, *, packed: bool = False) -> Shape:
        """Return the layout of a volume."""
        return Shape(
            write_buffer_bytes=self.write_buffer_bytes,
            block_cache_bytes=_VOLUME_CACHE_BYTES,
            max_file_bytes=_VOLUME_FILE_BYTES,
            block_bytes=_VOLUME_BLOCK_BYTES,
            paranoid_checks=self.paranoid_checks,
            packed=packed,
        )

    @property
    def large_shape(self) -> Shape:
        """The layout of version 0.1's database: many merged tables."""
        return Shape(
            write_buffer_bytes=8 * MIB,
            block_cache_bytes=8 * MIB,
            max_file_bytes=8 * MIB,
            bloom_bits=10,
            paranoid_checks=self.paranoid_checks,
        )

    @property
    def metadata_shape(self) -> Shape:
        """The layout of the metadata's database: small rows that are replaced often."""
        return Shape(
            write_buffer_bytes=min(4 * MIB, self.write_buffer_bytes),
            block_cache_bytes=self.block_cache_bytes,
            max_file_bytes=4 * MIB,
            bloom_bits=10,
            paranoid_checks=self.paranoid_checks,
        )

"""Sizes of the store: memory, volumes and files."""

from __future__ import annotations

from dataclasses import dataclass, field

from storage.config import StorageConfig
from storage.leveldb.engine.database import KIB, MIB, Shape

#: Small enough for LevelDB to leave the tables of a volume where they are: above a tenth of a table's size it would
#: move the second table to a level whose bound of 10 MiB makes it merge.
_VOLUME_FILE_BYTES = 1 * MIB
#: Bytes of rows in a block of a volume.
_VOLUME_BLOCK_BYTES = 16 * KIB
#: LevelDB's block cache for each open volume.
_VOLUME_CACHE_BYTES = 256 * KIB


@dataclass(frozen=True, slots=True)
class LevelDBOptions:
    """The settings, and other sizes. Memory under load is two to three write buffers plus the caches."""

    settings: StorageConfig = field(default_factory=StorageConfig)
    max_open_volumes: int = 32
    """Volumes held open, each with a few descriptors, its tables mapped, and about 300 KiB of table indexes."""
    paranoid_checks: bool = True
    """Refuse a log or manifest with a damaged record, instead of dropping it and the rest of its block."""
    max_readers: int = 4
    """Threads that read at once. More than a few gain nothing under the interpreter lock; each holds a list of rows."""

    def volume_shape(self, *, packed: bool = False) -> Shape:
        """Return the layout of a volume."""
        return Shape(
            write_buffer_bytes=self.settings.write_buffer_bytes,
            block_cache_bytes=_VOLUME_CACHE_BYTES,
            max_file_bytes=_VOLUME_FILE_BYTES,
            block_bytes=_VOLUME_BLOCK_BYTES,
            paranoid_checks=self.paranoid_checks,
            packed=packed,
        )

    @property
    def metadata_shape(self) -> Shape:
        """The layout of the metadata's database: small rows that are replaced often."""
        return Shape(
            write_buffer_bytes=min(4 * MIB, self.settings.write_buffer_bytes),
            block_cache_bytes=self.settings.block_cache_bytes,
            max_file_bytes=4 * MIB,
            bloom_bits=10,
            paranoid_checks=self.paranoid_checks,
        )

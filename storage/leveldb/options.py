"""What can be chosen about LevelDB, with the measurements behind each default.

Measured on two cores and a local SSD: commits of 1000 rows of 100 B, synced, 1.5 M rows.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LevelDBOptions:
    """Sizes in bytes. Memory at load is about twice the write buffer, plus the block cache."""

    write_buffer_bytes: int = 8 * MIB
    """Rows kept in memory, besides the log, before they become a table file.

    4 MiB wrote 1.17 to 1.30 M rows/s, 8 MiB 1.28 M, 16 and 32 MiB no more than 1.33 M, but +10 and +30 MB
    resident. Smaller: more, smaller files to compact. Larger: also a longer start, since the log is read again.
    """
    block_cache_bytes: int = 8 * MIB
    """Decompressed blocks kept for point reads; scans do not fill it."""
    max_file_bytes: int = 8 * MIB
    """The size of a table file. At LevelDB's own 2 MiB, 50 GB would be 25 000 files, at the same speed."""
    max_open_files: int = 500
    """Table files held open, each a descriptor; the usual limit of a process is 1024, and sockets need theirs."""
    bloom_bits: int = 10
    """Bits per key that spare a point read of an absent row its disk access: 10 spare 99 of 100."""
    paranoid_checks: bool = True
    """Refuse a log or manifest that has a damaged record, instead of dropping it with what follows in its block."""
    max_readers: int = 8
    """Threads that read at once. More than a few gain nothing beside one interpreter lock; each holds a list of rows."""

"""Bounds the freed memory that the process keeps for reuse.

By default glibc first returns memory to the kernel as soon as more than 128 KiB are free at the end of its heap, and
maps larger blocks separately; but each large block that is freed raises both limits, up to 64 and 32 MiB, and then holes
between blocks are never returned. After bodies of up to 3 MiB in eight threads a process kept 103 MiB; with fixed limits
it keeps 18. The limits are above the blocks of a page of 10 000 messages, so that its memory need not be mapped and
cleared again for the next page. It is no faster than glibc's own limits once these have grown
(docs/measurements/rent.md).
"""

from __future__ import annotations

import ctypes
import os

#: Blocks of at least this size are mapped separately, and returned at once.
MAPPED_BYTES = 4 << 20
#: Free memory at the end of a heap is returned beyond this size.
KEPT_BYTES = 8 << 20
#: glibc's ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``, and the environment variables that set them.
_TRIM, _MMAP = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def bound_freed_memory() -> bool:
    """Make the allocator keep up to ``KEPT_BYTES`` of each heap. True if it does.

    Changes nothing if the environment configures or replaces the allocator, or if it is not glibc's.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP, MAPPED_BYTES)) and bool(mallopt(_TRIM, KEPT_BYTES))

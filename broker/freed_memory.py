"""Keeps freed memory in the process for reuse.

By default glibc returns memory to the kernel as soon as more than 128 KiB are free at the end of its heap (later up to
twice the size of the largest block freed so far), and maps each large block separately. A page of 10 000 messages is
one block of a megabyte and twenty of a tenth of that, all freed once it is sent. So each page returned its memory, and
the kernel mapped and cleared it again for the next one, which cost a fifth of the processor time of a page.
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


def keep_freed_memory() -> bool:
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

"""How much freed memory the process keeps for what comes next.

glibc gives memory back to the kernel as soon as more than 128 KiB at the end of its heap are free, twice the size of the
largest block at most, and has a mapping for each large block. A page of 10 000 messages is one block of a megabyte and
twenty of a tenth of that, all freed when it has been sent: so each page gave all of it back, and had the kernel map and
clear it again, 640 pages of memory at a time. Measured with one client that reads page after page: 7.6 ms of processor
time a page instead of 6.1, and 8.9 instead of 7.3 of messages that came in small requests.
"""

from __future__ import annotations

import ctypes
import os

#: Blocks from this size on are mapped by themselves, and given back at once.
MAPPED_BYTES = 4 << 20
#: What is free at the end of a heap is given back beyond this.
KEPT_BYTES = 8 << 20
#: glibc's ``M_TRIM_THRESHOLD`` and ``M_MMAP_THRESHOLD``, and the variables by which an operator sets them.
_TRIM, _MMAP = -1, -3
_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Have the allocator keep up to ``KEPT_BYTES`` of each heap; whether it does.

    It is left alone where the environment says how it is to work or brings another, and where it is not glibc's.
    """
    if any(os.environ.get(name) for name in _VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP, MAPPED_BYTES)) and bool(mallopt(_TRIM, KEPT_BYTES))

"""LevelDB's log format: blocks of records, each with a header of checksum, length and kind.

Source: LevelDB's document ``log_format.md``. Logs and manifests use it.
"""

from __future__ import annotations

import struct

BLOCK_BYTES = 32768
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4

"""LevelDB's log format: blocks of records, each a checksum, a length and a kind before its bytes.

Source: LevelDB's document ``log_format.md``. Logs and manifests have it.
"""

from __future__ import annotations

import struct

BLOCK_BYTES = 32768
HEADER = struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4

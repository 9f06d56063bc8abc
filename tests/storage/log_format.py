"""LevelDB's log in Python: a writer, and a reader that behaves like LevelDB's own with strict checks.

The reader follows ``db/log_reader.cc`` of LevelDB 1.22 line by line, so that thousands of images can be read without
opening a database for each. ``test_torn_end.py`` compares it with LevelDB itself.
"""

from __future__ import annotations

from storage.leveldb.engine.log_format import BLOCK_BYTES, FIRST, FULL, HEADER, LAST, MIDDLE


class Refused(Exception):
    """LevelDB would refuse to open a database with this log."""


def _table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """Return the checksum of a record's kind and bytes, as stored in its header."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def append(log: bytearray, record: bytes) -> None:
    """Append a record to a log."""
    rest, begins = record, True
    while True:
        left = BLOCK_BYTES - len(log) % BLOCK_BYTES
        if left < HEADER.size:
            log += bytes(left)
            continue
        part, rest = rest[: left - HEADER.size], rest[left - HEADER.size :]
        kind = ((MIDDLE, LAST), (FIRST, FULL))[begins][not rest]
        log += HEADER.pack(masked_crc(bytes([kind]) + part), len(part), kind) + part
        begins = False
        if not rest:
            return


def read(log: bytes, known: int = 0) -> list[bytes]:
    """Return all complete records. Raises Refused where LevelDB reports corruption.

    Args:
      known: the length of the log's beginning that is known to be good, where checksums are not verified.
    """
    records: list[bytes] = []
    parts: list[bytes] | None = None
    for block_at in range(0, len(log), BLOCK_BYTES):
        block = log[block_at : block_at + BLOCK_BYTES]
        is_last = len(block) < BLOCK_BYTES
        at = 0
        while at + HEADER.size <= len(block):
            crc, length, kind = HEADER.unpack_from(block, at)
            end = at + HEADER.size + length
            if end > len(block):
                if is_last:
                    return records
                raise Refused("bad record length")
            if kind == 0 and length == 0:
                if parts is not None:
                    raise Refused("error in middle of record")
                break
            if block_at + end > known and masked_crc(block[at + HEADER.size - 1 : end]) != crc:
                raise Refused("checksum mismatch")
            part = block[at + HEADER.size : end]
            at = end
            if kind in (FULL, FIRST):
                if parts is not None and any(parts):
                    raise Refused("partial record without end")
                parts = [part]
            elif kind in (MIDDLE, LAST):
                if parts is None:
                    raise Refused("missing start of fragmented record")
                parts.append(part)
            else:
                raise Refused("unknown record type")
            if kind in (FULL, LAST):
                records.append(b"".join(parts))
                parts = None
        else:
            if is_last:
                return records
    return records

"""Leaves out what a power cut, or a kill, has torn at the end of a log, where LevelDB takes it for damage.

The log of the database that is written is longer than what was written to it (``storage.leveldb.newest_log``), and
what nobody has written reads as zeros. When the power goes during a sync, the disk may have stored any sectors of the
commit under way and not the others, which then read as zeros too; file systems that make a file longer may have
stored later pages and not an earlier one. LevelDB passes over zeros where a record could begin, and refuses the rest.

Only the last record can be torn, since every commit is synced before the next one is written, and nothing is written
to a log again once LevelDB has read it. It was never acknowledged. A record is taken for torn when

* nothing begins behind it,
* a sector of its own, or what it has of its first or last one, reads as zeros, or it ends in zeros: a write that was
  cut off has stored its beginning,
* and the database opens without it.

Anything else is damage.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storage.leveldb.manifest import BLOCK_BYTES, FIRST, FULL, HEADER, LAST, MIDDLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

#: What a disk stores whole or not at all.
SECTOR_BYTES = 512
#: So many zeros at the end of a record say that the rest of it was not written.
_CUT_BYTES = 8
#: From so many bytes of a header on, those behind them do not tell where the record ends: its length is among them.
_LENGTH_AT = 5
_LOG = re.compile(r"\d{6,}\.log\Z")


def logs_among(names: Iterable[str]) -> list[str]:
    """The names of logs among those of a database's files."""
    return [name for name in names if _LOG.match(name)]


def newest_log_of(names: Iterable[str]) -> str | None:
    """The name of the newest log among those of a database's files."""
    return max(logs_among(names), key=lambda name: int(name[:-4]), default=None)


def torn_end(directory: Path) -> tuple[Path, int] | None:
    """The newest log of a database and where its torn record begins; None when it does not end in one."""
    name = newest_log_of(os.listdir(directory))
    if name is None:
        return None
    start = torn_record((directory / name).read_bytes())
    return None if start is None else (directory / name, start)


def torn_record(data: bytes) -> int | None:
    """Where the last record of a log begins, if it may be torn. It is found by headers alone: no checksum is looked at."""
    written = len(data.rstrip(b"\0"))
    start = None
    inside = lost = False
    at = end = 0
    while at + HEADER.size <= len(data) and (inside or at < written):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        if not inside:
            if lost:
                return None  # another record, or what it has left, stands behind the torn one
            start = at
        if _is_lost(data, at, written):
            # Of its first block nothing more can be told; the next one begins with a header again.
            inside = lost = True
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        size = HEADER.size + length
        if kind not in ((MIDDLE, LAST) if inside else (FULL, FIRST)) or size > left:
            return None
        inside = kind in (FIRST, MIDDLE)
        at += size
        end = at
    if start is None:
        return None
    return start if lost or _has_hole(data, start, len(data) if inside else min(end, len(data)), written) else None


def _is_lost(data: bytes, at: int, written: int) -> bool:
    """Whether the header at ``at`` was not stored, or not the part of it that says how long the record is."""
    sector_end = at - at % SECTOR_BYTES + SECTOR_BYTES
    if sector_end - at >= _LENGTH_AT and not any(data[at:sector_end]):
        return True
    if sector_end - at < HEADER.size and not any(data[sector_end : sector_end + SECTOR_BYTES]):
        return True
    # The write was cut off within the header: its last byte, the kind, is missing.
    return data[at + HEADER.size - 1] == 0 and at + HEADER.size > written


def _has_hole(data: bytes, start: int, end: int, written: int) -> bool:
    """Whether a sector of a record, or what it has of its first or last one, reads as zeros, or its end does."""
    if end - written >= _CUT_BYTES:
        return True
    return any(
        not any(data[max(sector, start) : sector + SECTOR_BYTES])
        for sector in range(start - start % SECTOR_BYTES, end, SECTOR_BYTES)
    )


@contextmanager
def left_out(log: Path, start: int) -> Iterator[None]:
    """The log without what begins at ``start``; it is whole again when the block fails."""
    with log.open("rb") as file:
        file.seek(start)
        torn = file.read()
    os.truncate(log, start)
    try:
        yield
    except BaseException:
        with log.open("ab") as file:
            file.write(torn)
        raise

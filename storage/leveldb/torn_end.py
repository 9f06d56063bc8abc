"""Leaves out what a power cut has torn, where LevelDB takes it for damage.

LevelDB leaves out a record at the end of its log that is too short. But when the power goes during a sync, file
systems may have stored the later pages of the record and its length, and not an earlier page, which then reads as
zeros: the checksum is wrong, and LevelDB refuses to open. Only the last record can be such a one, since a commit is
synced before the next is written, and it was never acknowledged.

A record is taken for torn when no other begins behind it, a page of the file has nothing but zeros from the record's
beginning, or its own, to its end, and the database opens without it. Anything else is damage.
"""

from __future__ import annotations

import os
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storage.leveldb.manifest import BLOCK_BYTES, FIRST, FULL, HEADER, LAST

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGE_BYTES = 4096
_LOG = re.compile(r"\d{6,}\.log\Z")


def torn_end(directory: Path) -> tuple[Path, int] | None:
    """The newest log of a database and where its torn record begins; None when it does not end in one."""
    logs = sorted((path for path in directory.iterdir() if _LOG.match(path.name)), key=lambda path: int(path.stem))
    if not logs:
        return None
    data = logs[-1].read_bytes()
    start = _last_record(data)
    if start is None or not _has_hole(data, start):
        return None
    return logs[-1], start


def _last_record(data: bytes) -> int | None:
    """Where the last record begins, found by headers alone; None when another could begin behind damage."""
    at, start, whole, damaged = 0, None, True, False
    while at + HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        if not FULL <= kind <= LAST or HEADER.size + length > left:
            if whole:  # the header is where a record should begin
                start, whole = at, False
            damaged = True
            at += left
            continue
        if kind in (FULL, FIRST):
            if damaged:
                return None
            start = at
        whole = kind in (FULL, LAST)
        at += HEADER.size + length
    return start


def _has_hole(data: bytes, start: int) -> bool:
    """Whether a page, or what the record has of its first one, is all zeros."""
    for page in range(start - start % _PAGE_BYTES, len(data), _PAGE_BYTES):
        part = data[max(page, start) : page + _PAGE_BYTES]
        if part and not any(part):
            return True
    return False


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

"""Removes a torn record, left by a power cut or a kill at the end of a log or manifest, so that LevelDB opens the file.

Both files have LevelDB's log format. The log being written is longer than its records (``newest_log``), and the rest
reads as zeros. If the power fails during a sync, the disk may have stored any sectors of the record; the others read as
zeros too. A file system that extends a file may have stored later pages and not an earlier one. LevelDB skips zeros
where a record could begin, and refuses the rest.

Only the last record can be torn. In a log, every commit is synced before the next one is written, and LevelDB never
appends to a log that it has read: the torn commit was never acknowledged. In a manifest, LevelDB syncs each edit before
it removes a file that the edit makes obsolete: the state before the torn edit is complete. A record counts as torn if

* nothing begins after it,
* it ends in zeros, as after a write that was cut off; or one of its sectors reads as zeros (of its first and last
  sector only the record's part counts),
* and a copy of the database opens without it, with the log that the manifest then names.

Everything else is damage. The file itself is cut, and synced, only after the copy has opened.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from storage.leveldb.engine.log_format import BLOCK_BYTES, FIRST, FULL, HEADER, LAST, MIDDLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

#: The unit that a disk stores whole or not at all.
SECTOR_BYTES = 512
#: A record with at least this many zeros at its end counts as cut off.
_CUT_BYTES = 8
#: If a header has at least this many bytes before the end of a sector, part of its length is there: if these bytes are
#: all zeros, the end of the record is unknown.
_LENGTH_AT = 5
_LOG = re.compile(r"\d{6,}\.log\Z")
_MANIFEST = re.compile(r"MANIFEST-\d{6,}\Z")
#: The folder of the copy; LevelDB ignores names that it does not know.
_COPY_NAME = "without-torn-records"
_NEVER_CHANGED = {".ldb", ".sst"}


def logs_among(names: Iterable[str]) -> list[str]:
    """Return those of the names that belong to logs."""
    return [name for name in names if _LOG.match(name)]


def newest_log_of(names: Iterable[str]) -> str | None:
    """Return the name of the newest log; None if there is none."""
    return max(logs_among(names), key=lambda name: int(name[:-4]), default=None)


def torn_ends(directory: Path) -> list[tuple[Path, int]]:
    """Return the newest log and the manifest of a database if they end in a torn record, with the record's offset."""
    names = [newest_log_of(os.listdir(directory)), _manifest_of(directory)]
    found = [(directory / name, torn_record((directory / name).read_bytes())) for name in names if name is not None]
    return [(file, start) for file, start in found if start is not None]


def _manifest_of(directory: Path) -> str | None:
    """Return the name of the manifest; None if there is none."""
    try:
        name = (directory / "CURRENT").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    return name if _MANIFEST.match(name) and (directory / name).is_file() else None


def torn_record(data: bytes) -> int | None:
    """Return the offset of the last record of a log if it may be torn. Reads only headers, no checksums."""
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
                return None  # another record, or a part of one, follows the torn one
            start = at
        if _is_lost(data, at, written):
            # The rest of its first block is unknown; the next block begins with a header again.
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
    """True if the header at ``at``, or the part of it with the record's length, was not stored."""
    sector_end = at - at % SECTOR_BYTES + SECTOR_BYTES
    if sector_end - at >= _LENGTH_AT and not any(data[at:sector_end]):
        return True
    if sector_end - at < HEADER.size and not any(data[sector_end : sector_end + SECTOR_BYTES]):
        return True
    # The write was cut off within the header: its last byte, the kind, is missing.
    return data[at + HEADER.size - 1] == 0 and at + HEADER.size > written


def _has_hole(data: bytes, start: int, end: int, written: int) -> bool:
    """True if a sector of a record, its part of its first or last sector, or its end reads as zeros."""
    if end - written >= _CUT_BYTES:
        return True
    return any(
        not any(data[max(sector, start) : sector + SECTOR_BYTES])
        for sector in range(start - start % SECTOR_BYTES, end, SECTOR_BYTES)
    )


@contextmanager
def copy_without(directory: Path, torn: Sequence[tuple[Path, int]]) -> Iterator[Path]:
    """Copy a database without torn records; the copy is removed at the end. Tables are shared. Raises OSError."""
    copy = directory / _COPY_NAME
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    try:
        for file in directory.iterdir():
            if file.suffix in _NEVER_CHANGED:
                (copy / file.name).hardlink_to(file)
            elif file.is_file() and file.name not in ("LOCK", "LOG", "LOG.old"):
                shutil.copyfile(file, copy / file.name)
        for file, start in torn:
            os.truncate(copy / file.name, start)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def cut(file: Path, start: int) -> None:
    """Remove a torn record, durably. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, start)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

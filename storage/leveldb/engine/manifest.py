"""Checks, before LevelDB opens a directory, that files exist which LevelDB assumes to exist.

LevelDB trusts its manifest. If the manifest has lost its end, LevelDB opens an older state without an error and removes
the newer tables as leftovers. The sign is a log that the older state names and that was removed since: LevelDB does not
check for it, so this module does. Sources of the formats: LevelDB's documents ``log_format.md`` and ``impl.md``, and
the tags of ``db/version_edit.cc``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from storage.base import StoreDamaged
from storage.directory import DAMAGED_HINT, opening_failed
from storage.leveldb.engine.log_format import BLOCK_BYTES, FIRST, FULL, HEADER, LAST, MIDDLE
from storage.leveldb.engine.torn_end import torn_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CURRENT = re.compile(r"MANIFEST-\d{6,}\n\Z")
# Tags of a version edit with the fields of each: n is a number, s a string with its length.
_LOG_NUMBER = 2
_FIELDS = {1: "s", 2: "n", 3: "n", 4: "n", 5: "ns", 6: "nn", 7: "nnnss", 9: "n"}


def check_files(rows: Path) -> None:
    """Check that ``rows`` is a database with a manifest and the log that the manifest names.

    Raises:
      StoreDamaged: a file is missing; nothing was changed.
    """
    try:
        current = (rows / "CURRENT").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        raise _damaged(rows, "its file CURRENT is missing") from None
    except OSError as error:
        raise opening_failed(error, rows) from error
    if not _CURRENT.match(current):
        raise _damaged(rows, f"its file CURRENT names no manifest, but {current[:40]!r}")
    name = current.strip()
    try:
        manifest = (rows / name).read_bytes()
    except FileNotFoundError:
        raise _damaged(rows, f"its file {name} is missing") from None
    except OSError as error:
        raise opening_failed(error, rows) from error
    log = newest_log(manifest)
    if log and not _has_log(rows, log):
        torn = torn_record(manifest)
        if torn is None or not _has_log(rows, newest_log(manifest[:torn])):
            raise _damaged(rows, f"{log:06d}.log is missing, or {name} is incomplete")


def _has_log(rows: Path, number: int) -> bool:
    return (rows / f"{number:06d}.log").exists()


def newest_log(manifest: bytes) -> int:
    """Return the number of the log that the last readable edit names; 0 if no edit names one."""
    log = 0
    for record in _records(manifest):
        try:
            for tag, number in _numbers(record):
                if tag == _LOG_NUMBER:
                    log = number
        except (IndexError, KeyError):
            # LevelDB itself refuses such an edit, with a reason.
            break
    return log


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the whole records of a file in log format, up to a torn end."""
    parts: list[bytes] = []
    at = 0
    while at + HEADER.size <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER.size:
            at += left
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        at += HEADER.size
        if kind not in (FULL, FIRST, MIDDLE, LAST) or at + length > len(data):
            return
        parts = [] if kind in (FULL, FIRST) else parts
        parts.append(data[at : at + length])
        at += length
        if kind in (FULL, LAST):
            yield b"".join(parts)


def _numbers(edit: bytes) -> Iterator[tuple[int, int]]:
    """Yield ``(tag, number)`` for each field of an edit; for fields of several numbers, the first one."""
    at = 0
    while at < len(edit):
        tag, at = _varint(edit, at)
        first = 0
        for index, kind in enumerate(_FIELDS[tag]):
            number, at = _varint(edit, at)
            if index == 0:
                first = number
            if kind == "s":
                at += number
        yield tag, first


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while True:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number, at
        shift += 7


def _damaged(rows: Path, what: str) -> StoreDamaged:
    return StoreDamaged(f"the store in {rows} is damaged: {what}", hint=DAMAGED_HINT)

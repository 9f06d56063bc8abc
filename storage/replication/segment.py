"""A segment of the commit log: consecutive commits of one epoch, as one object that is never replaced.

    head      "PLSG"  format:u8  mode:u8  epoch:u64  number:u64  run:16
              first commit:u64  last commit:u64  first time:i64  last time:i64
              SHA-256 of the object before it:32  bytes of the commits:u32
    commits   one zlib stream of: commit …
    checksum  CRC-32 of all bytes before it:u32

    commit    time:i64  changes:u32  change …
    change    table:u8  key length:u32  key  [value length:u32  value]      table | 80: the row is removed

The commits have consecutive numbers, so only the first is stored. A segment without commits opens a log: its last
commit is the one before its first, and a base up to that commit belongs to it.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"PLSG"
FORMAT = 1
#: Modes of a primary; the log says which one was in force, whatever the settings say now.
ASYNC, SYNC = 1, 2
RUN_BYTES = 16
HASH_BYTES = 32
#: Stands for the object before the first one of a log.
NOTHING_BEFORE = bytes(HASH_BYTES)
#: Bounds a reader's memory. A segment is closed at a few mebibytes, but a single commit may have many large rows.
MAX_COMMITS_BYTES = 1 << 30
_HEAD = struct.Struct(f">4sBBQQ{RUN_BYTES}sQQqq{HASH_BYTES}sI")
_COMMIT = struct.Struct(">qI")
_LENGTH = struct.Struct(">I")
#: The next level takes twice the time and saves a twentieth of the space, as for backups.
_LEVEL = 1
_REMOVED = 0x80
_TABLES = {int(table): table for table in Table}


class DamagedLog(StorageFailed):
    """An object of the commit log is not as it was written, or does not follow the one before it."""

    title = "The commit log is damaged"


@dataclass(frozen=True, slots=True)
class Change:
    """A row that a commit put, or removed if ``value`` is None."""

    table: Table
    key: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Commit:
    """The changes of one synced batch of a store."""

    time_ms: int
    changes: Sequence[Change]


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive commits of one epoch."""

    epoch: int
    number: int
    """The segment's own; numbers of an epoch count up from 1."""
    run: bytes
    """16 random bytes of the process that wrote it."""
    mode: int
    """``ASYNC`` or ``SYNC``."""
    first: int
    """The number of the first commit."""
    before: bytes
    """SHA-256 of the object before it in the log: a segment, or the seal that named this epoch."""
    commits: Sequence[Commit]
    first_ms: int = 0
    """Times of the first and last commit. An opening segment has the time at which its log began in both."""
    last_ms: int = 0

    @property
    def last(self) -> int:
        """The number of the last commit; one less than ``first`` if there are none."""
        return self.first + len(self.commits) - 1


def segment_of(
    *, epoch: int, number: int, run: bytes, mode: int, first: int, before: bytes, commits: Sequence[Commit]
) -> Segment:
    """Return a segment of at least one commit, with its times."""
    times = [commit.time_ms for commit in commits]
    return Segment(epoch, number, run, mode, first, before, tuple(commits), times[0], times[-1])


def digest(data: bytes) -> bytes:
    """Return what the next object of the log calls this one."""
    return hashlib.sha256(data).digest()


def is_segment(data: bytes) -> bool:
    """True if an object of the log claims to be a segment, not a seal."""
    return data.startswith(MAGIC)


def encode_segment(segment: Segment) -> bytes:
    """Encode a segment. Equal segments have equal bytes."""
    body = b"".join(map(_encoded, segment.commits))
    head = _HEAD.pack(
        MAGIC,
        FORMAT,
        segment.mode,
        segment.epoch,
        segment.number,
        segment.run,
        segment.first,
        segment.last,
        segment.first_ms,
        segment.last_ms,
        segment.before,
        len(body),
    )
    data = head + zlib.compress(body, _LEVEL)
    return data + _LENGTH.pack(zlib.crc32(data))


def decode_segment(data: bytes) -> Segment:
    """Decode and check a segment. Raises DamagedLog."""
    if len(data) < _HEAD.size + _LENGTH.size or not is_segment(data):
        raise DamagedLog(f"{len(data)} bytes are not a segment")
    _, form, mode, epoch, number, run, first, last, first_ms, last_ms, before, size = _HEAD.unpack_from(data)
    if form > FORMAT:
        raise DamagedLog(f"a segment has format {form}; this version reads {FORMAT}", hint="use a newer plainsong")
    if _LENGTH.unpack(data[-_LENGTH.size :])[0] != zlib.crc32(data[: -_LENGTH.size]):
        raise DamagedLog("a segment's checksum is wrong")
    commits = _decoded(_inflated(data[_HEAD.size : -_LENGTH.size], size))
    segment = Segment(epoch, number, run, mode, first, before, commits, first_ms, last_ms)
    times = (commits[0].time_ms, commits[-1].time_ms) if commits else (first_ms, first_ms)
    if mode not in (ASYNC, SYNC) or segment.last != last or times != (first_ms, last_ms):
        raise DamagedLog("the head of a segment contradicts its commits")
    return segment


def _inflated(stream: bytes, size: int) -> bytes:
    inflating = zlib.decompressobj()
    try:
        body = inflating.decompress(stream, size + 1) if size <= MAX_COMMITS_BYTES else b""
    except zlib.error as error:
        raise DamagedLog(f"a segment cannot be decompressed: {error}") from error
    if len(body) != size or not inflating.eof or inflating.unused_data:
        raise DamagedLog(f"a segment does not have the {size} bytes of commits that it claims")
    return body


def _encoded(commit: Commit) -> bytes:
    parts = [_COMMIT.pack(commit.time_ms, len(commit.changes))]
    for change in commit.changes:
        if change.value is None:
            parts += (bytes([change.table | _REMOVED]), _LENGTH.pack(len(change.key)), change.key)
        else:
            parts += (bytes([change.table]), _LENGTH.pack(len(change.key)), change.key)
            parts += (_LENGTH.pack(len(change.value)), change.value)
    return b"".join(parts)


def _decoded(body: bytes) -> tuple[Commit, ...]:
    commits: list[Commit] = []
    reader = _Bytes(body)
    try:
        while reader.at < len(body):
            time_ms, count = _COMMIT.unpack(reader.take(_COMMIT.size))
            commits.append(Commit(time_ms, tuple(_change(reader) for _ in range(count))))
    except (KeyError, EOFError) as error:
        raise DamagedLog("the commits of a segment cannot be parsed") from error
    return tuple(commits)


def _change(reader: _Bytes) -> Change:
    (kind,) = reader.take(1)
    table = _TABLES[kind & ~_REMOVED]
    key = reader.take_counted()
    return Change(table, key, None if kind & _REMOVED else reader.take_counted())


class _Bytes:
    """Takes parts off the front of some bytes. Raises EOFError if there are too few."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        part = self._data[self.at : self.at + size]
        if len(part) < size:
            raise EOFError
        self.at += size
        return part

    def take_counted(self) -> bytes:
        return self.take(_LENGTH.unpack(self.take(_LENGTH.size))[0])

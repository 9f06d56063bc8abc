"""A segment of the commit log: consecutive commits of one epoch, as one object that is never replaced.

    head      "PLSG"  format:u8  mode:u8  epoch:u64  number:u64  run:16
              first commit:u64  last commit:u64  first time:i64  last time:i64
              SHA-256 of the object before it:32  bytes of the commits:u32
    commits   one zlib stream of: commit …
    checksum  CRC-32 of all bytes before it:u32

    commit    time:i64  changes:u32  change …
    change    table:u8  key length:u32  key  [value length:u32  value]      table | 80: the row is removed
              table | 40: a range is removed; the key is its start, the value its stop
              table | 20: a run of rows whose keys share a prefix and a length: prefix length:u32  prefix  rows:u32
              bytes of each suffix:u32  suffixes  length of each value:u32  values

The commits have consecutive numbers, so only the first is stored. A segment without commits has as its last commit the
one before its first. It opens a log, to which a base up to that commit belongs, or says that a mode is in force.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import StorageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

MAGIC = b"PLSG"
FORMAT = 1
#: Modes of a primary; the log says which one was in force, whatever the settings say now.
ASYNC, SYNC = 1, 2
_MODE_NAMES: dict[int, Literal["async", "sync"]] = {ASYNC: "async", SYNC: "sync"}
#: By their names in the settings.
MODES: dict[str, int] = {name: mode for mode, name in _MODE_NAMES.items()}
RUN_BYTES = 16
HASH_BYTES = 32
#: Used as the digest of the object before the first one of a log.
NOTHING_BEFORE = bytes(HASH_BYTES)
#: Bounds a reader's memory. A segment is closed at a few mebibytes, but a single commit may have many large rows.
MAX_COMMITS_BYTES = 1 << 30
_HEAD = struct.Struct(f">4sBBQQ{RUN_BYTES}sQQqq{HASH_BYTES}sI")
_COMMIT = struct.Struct(">qI")
_LENGTH = struct.Struct(">I")
#: The next level takes twice the time and saves a twentieth of the space, as for backups.
_LEVEL = 1
_REMOVED, _RANGE, _RUN = 0x80, 0x40, 0x20
_TABLES = {int(table): table for table in Table}
#: A run of fewer rows would be no shorter than the rows one by one.
_MIN_RUN = 2


def mode_name(mode: int) -> Literal["async", "sync"] | None:
    """Return the name of a mode; None if it is not known yet."""
    return _MODE_NAMES.get(mode)


class DamagedLog(StorageFailed):
    """An object of the commit log differs from what was written, or does not follow the one before it."""

    title = "The commit log is damaged"


@dataclass(frozen=True, slots=True)
class Change:
    """A row that a commit put, or removed if ``value`` is None."""

    table: Table
    key: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class RemovedRange:
    """All rows of ``[start, stop)`` are removed, and none will be put there again."""

    table: Table
    start: bytes
    stop: bytes


@dataclass(frozen=True, slots=True)
class Commit:
    """The changes of one synced batch of a store, in order. ``Put`` stands for many rows, each like a ``Change``."""

    time_ms: int
    changes: Sequence[Change | RemovedRange | Put]


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
    """Return the digest by which the next object of the log refers to this one."""
    return hashlib.sha256(data).digest()


def is_segment(data: bytes) -> bool:
    """True if an object of the log claims to be a segment, not a seal."""
    return data.startswith(MAGIC)


def commits_bytes(data: bytes) -> int:
    """Return the bytes of a segment's commits before compression, as its head says; 0 for any other object."""
    return int(_HEAD.unpack_from(data)[-1]) if is_segment(data) and len(data) >= _HEAD.size else 0


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
    count, parts = 0, [b""]
    for change in commit.changes:
        if isinstance(change, Put):
            count += _add_rows(parts, change)
            continue
        count += 1
        if isinstance(change, RemovedRange):
            _add_row(parts, change.table | _RANGE, change.start, change.stop)
        elif change.value is None:
            parts += (bytes([change.table | _REMOVED]), _LENGTH.pack(len(change.key)), change.key)
        else:
            _add_row(parts, change.table, change.key, change.value)
    parts[0] = _COMMIT.pack(commit.time_ms, count)
    return b"".join(parts)


def _add_row(parts: list[bytes], kind: int, key: bytes, value: bytes) -> None:
    parts += (bytes([kind]), _LENGTH.pack(len(key)), key, _LENGTH.pack(len(value)), value)


def _add_rows(parts: list[bytes], put: Put) -> int:
    """Add the rows of a put, as one run if there are several and their keys are of one length. Returns the changes."""
    suffixes, values = put.suffixes, put.values
    sizes = set(map(len, suffixes))
    if len(suffixes) < _MIN_RUN or len(sizes) > 1:
        for suffix, value in zip(suffixes, values, strict=True):
            _add_row(parts, put.table, put.prefix + suffix, value)
        return len(suffixes)
    parts += (bytes([put.table | _RUN]), _LENGTH.pack(len(put.prefix)), put.prefix)
    parts += (_LENGTH.pack(len(suffixes)), _LENGTH.pack(sizes.pop()), *suffixes)
    parts += (struct.pack(f">{len(values)}I", *map(len, values)), *values)
    return 1


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


def _change(reader: _Bytes) -> Change | RemovedRange | Put:
    (kind,) = reader.take(1)
    if kind & _RUN:
        return _run(reader, _TABLES[kind & ~_RUN])
    table = _TABLES[kind & ~(_REMOVED | _RANGE)]
    key = reader.take_counted()
    if kind & _REMOVED:
        if kind & _RANGE:
            raise KeyError(kind)
        return Change(table, key, None)
    value = reader.take_counted()
    return RemovedRange(table, key, value) if kind & _RANGE else Change(table, key, value)


def _run(reader: _Bytes, table: Table) -> Put:
    prefix = reader.take_counted()
    count, size = reader.take_number(), reader.take_number()
    if count < _MIN_RUN:
        raise KeyError(count)
    joined = reader.take(count * size)
    suffixes = [joined[at * size : (at + 1) * size] for at in range(count)]
    lengths = struct.unpack(f">{count}I", reader.take(count * _LENGTH.size))
    return Put(table, prefix, suffixes, [reader.take(length) for length in lengths])


class _Bytes:
    """Reads parts of some bytes in order. Raises EOFError if there are too few."""

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
        return self.take(self.take_number())

    def take_number(self) -> int:
        number: int = _LENGTH.unpack(self.take(_LENGTH.size))[0]
        return number

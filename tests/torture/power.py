"""Possible states of a directory after a power cut: images built from the log that ``disk.c`` keeps of every change and
sync.

The file system is assumed to keep a journal, as ext4, XFS and Btrfs do:

* the content of a file is durable up to its last sync. Any part of later writes may survive. If they extended the file,
  its last block may be torn, or a block of zeros may be in the middle. If the file had been extended before
  (``ftruncate``), any of its sectors may survive, and the others read as before;
* names are created, changed and removed in order, so a prefix of all these changes survives. A sync of a file or
  directory makes all changes to its names durable, and all earlier changes.

``docs/stores.md`` states that the store relies on the second point.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from random import Random
from typing import Literal

_HEAD = struct.Struct("<IiQQII")
_TRUNCATES = 0o1000
BLOCK = 4096
SECTOR = 512
Style = Literal["lost", "kept", "torn", "holes"]
"""Unsynced data: all lost; all kept; a prefix kept, its last write torn; all kept except some blocks or sectors."""
STYLES: tuple[Style, ...] = ("lost", "kept", "torn", "holes")
_KIND = ("open_", "write", "sync", "rename", "unlink", "mkdir", "truncate", "rmdir")


@dataclass(frozen=True, slots=True)
class Record:
    """One successful call."""

    kind: str
    fd: int
    at_s: float
    """Time at which it ended, by the monotonic clock."""
    number: int
    one: bytes
    two: bytes


def read_log(log: Path) -> list[Record]:
    """Read all records, except the last if a kill has truncated it."""
    data, at, records = log.read_bytes(), 0, []
    while at + _HEAD.size <= len(data):
        kind, fd, at_ns, number, one, two = _HEAD.unpack_from(data, at)
        start = at + _HEAD.size
        at = start + one + two
        if at > len(data):
            break
        records.append(Record(_KIND[kind], fd, at_ns / 1e9, number, data[start : start + one], data[start + one : at]))
    return records


@dataclass(slots=True, eq=False)
class File:
    """A file, whatever its name: all writes, and the number of synced ones."""

    changes: list[tuple[int, bytes | None]] = field(default_factory=list)
    """``(offset, bytes)``, or ``(size, None)`` for a truncation to a size."""
    synced: int = 0


@dataclass(slots=True)
class Change:
    """A change of names: ``was`` is None for a new one, ``now`` None for a removed one."""

    was: str | None
    now: str | None
    file: File | None
    """None for a directory."""

    def concerns(self, path: str, file: File | None) -> bool:
        if file is not None:
            return self.file is file
        return any(name is not None and (name == path or _parent(name) == path) for name in (self.was, self.now))


def _parent(path: str) -> str:
    return str(PurePosixPath(path).parent)


class Disk:
    """The state of a disk after some records. It ignores syncs of files whose names end with ``lies``."""

    def __init__(self, root: Path, lies: str = "") -> None:
        self.root, self._lies = str(root), lies
        self.journal: list[Change] = []
        self.durable = 0
        """Number of name changes that are certain to survive."""
        self.names: dict[str, File | None] = {}
        self._open: dict[int, tuple[str, File | None]] = {}

    @classmethod
    def that_was_reported(cls, root: Path, records: Iterable[Record], lies: str = "") -> Disk:
        """Return a disk to which all these records were applied."""
        disk = cls(root, lies)
        for each in records:
            disk.apply(each)
        return disk

    def apply(self, record: Record) -> None:
        getattr(self, f"_{record.kind}")(record)

    def _open_(self, record: Record) -> None:
        path = record.one.decode()
        if path not in self.names:
            is_directory = path == self.root
            file = None if is_directory else File()
            self._change(Change(None, path, file))
        found = self.names[path]
        if found is not None and record.number & _TRUNCATES and found.changes:
            found.changes.append((0, None))
        self._open[record.fd] = path, found

    def _write(self, record: Record) -> None:
        file = self._open[record.fd][1]
        assert file is not None
        file.changes.append((record.number, record.one))

    def _truncate(self, record: Record) -> None:
        file = self._open[record.fd][1]
        assert file is not None
        file.changes.append((record.number, None))

    def _sync(self, record: Record) -> None:
        path, file = self._open[record.fd]
        if self._lies and path.endswith(self._lies):
            return
        if file is not None:
            file.synced = len(file.changes)
        for at in range(len(self.journal), self.durable, -1):
            if self.journal[at - 1].concerns(path, file):
                self.durable = at
                return

    def _rename(self, record: Record) -> None:
        was, now = record.one.decode(), record.two.decode()
        if was in self.names:  # LevelDB writes its own log outside the recorded names
            self._change(Change(was, now, self.names[was]))

    def _unlink(self, record: Record) -> None:
        path = record.one.decode()
        if path in self.names:
            self._change(Change(path, None, self.names[path]))

    def _mkdir(self, record: Record) -> None:
        self._change(Change(None, record.one.decode(), None))

    _rmdir = _unlink

    def _change(self, change: Change) -> None:
        self.journal.append(change)
        _apply(self.names, change)

    # --- images --------------------------------------------------------------------------------

    def image(self, directory: Path, style: Style, rng: Random) -> None:
        """Build a state that a power cut may leave now, in a directory that does not exist yet."""
        last = {"lost": self.durable, "kept": len(self.journal)}.get(style)
        survive = rng.randint(self.durable, len(self.journal)) if last is None else last
        names: dict[str, File | None] = {}
        for change in self.journal[:survive]:
            _apply(names, change)
        directory.mkdir(parents=True)
        for path, file in sorted(names.items()):
            place = directory / PurePosixPath(path).relative_to(self.root)
            if file is None:
                place.mkdir(exist_ok=True)
            else:
                place.write_bytes(_content(file, style, rng))


def _apply(names: dict[str, File | None], change: Change) -> None:
    if change.was is not None:
        names.pop(change.was, None)
        for path in [each for each in names if change.file is None and each.startswith(change.was + "/")]:
            moved = names.pop(path)
            if change.now is not None:
                names[change.now + path[len(change.was) :]] = moved
    if change.now is not None:
        names[change.now] = change.file


def _content(file: File, style: Style, rng: Random) -> bytes:
    content = bytearray()
    for offset, data in file.changes[: file.synced]:
        _change_content(content, offset, data)
    rest = file.changes[file.synced :]
    if not rest or style == "lost":
        return bytes(content)
    synced = bytes(content)
    if style == "torn":
        rest = rest[: rng.randint(0, len(rest))]
    before = synced
    for offset, data in rest:
        before = bytes(content)
        _change_content(content, offset, data)
    if style == "torn" and rest and rest[-1][1] is not None:
        offset, data = rest[-1]
        assert data is not None
        cut = offset + rng.randint(0, len(data))
        if rng.random() < 0.5:
            cut = max(offset, cut - cut % SECTOR)
        content[cut:] = before[cut:]
    if style == "holes":
        lengths = [size for size, data in rest if data is None]
        _make_holes(content, synced, max(len(synced), *lengths) if lengths else len(synced), rng)
    return bytes(content)


def _make_holes(content: bytearray, synced: bytes, length: int, rng: Random) -> None:
    """Revert some sectors of a file within its preallocated length; zero a block in the extension beyond it."""
    share = rng.choice([0.1, 0.5, 0.9])
    fixed = min(length, len(content))
    before = synced.ljust(fixed, b"\0")
    for first in range(0, fixed, SECTOR):
        end = min(first + SECTOR, fixed)
        if content[first:end] != before[first:end] and rng.random() < share:
            content[first:end] = before[first:end]
    if len(content) > fixed:
        block = rng.randrange(fixed // BLOCK, (len(content) - 1) // BLOCK + 1) * BLOCK
        start, end = max(block, fixed), min(block + BLOCK, len(content))
        content[start:end] = bytes(end - start)


def _change_content(content: bytearray, offset: int, data: bytes | None) -> None:
    if len(content) < offset:
        content.extend(bytes(offset - len(content)))
    if data is None:
        del content[offset:]
    else:
        content[offset : offset + len(data)] = data

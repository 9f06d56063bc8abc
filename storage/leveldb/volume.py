"""A volume: one LevelDB with the messages and payloads of a stretch of time, and what is known of it while it is closed.

The newest volume is written. A sealed one is read, opened when needed; rows in it may be removed or rolled back in
place, each time synced, so that it can be closed at any moment. The file ``NAME.index`` beside a volume says what is in
it. A sealed one may lack it: it is read through at the next start. The newest has it only while nobody writes.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import MESSAGE_TAIL_BYTES, topic_prefix
from storage.directory import sync_directory
from storage.leveldb.database import MIB, Database, Shape, size_of
from storage.leveldb.errors import FOREIGN, call_failed
from storage.leveldb.packs import PACKED_TABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Put

#: The tables whose rows are in volumes.
TABLES = (Table.MESSAGE, Table.PAYLOAD)
#: First byte of the keys of the journal: what each commit changes in the metadata, by its number.
JOURNAL = b"\x00"
AFTER_JOURNAL = b"\x01"
#: Volumes above this are not read through to index them: first and last keys are looked up, rows estimated.
MAX_COUNTED_BYTES = 512 * MIB
_INDEX_SUFFIX = ".index"
_LIST_ROWS = 1000
_LAST = b"\xff" * 64
_TYPICAL_ROW_BYTES = 200
_GENERATION_BYTES = MESSAGE_TAIL_BYTES - POSITION_BYTES


#: What follows the group in a key: a position; of payload keys a write pointer before it, whose first byte stays with
#: the group, since pointers of transactions begin with 0 and staged ones, which sort behind them, with f.
TAIL_BYTES = {Table.MESSAGE: POSITION_BYTES, Table.PAYLOAD: POSITION_BYTES + 7}


def group_of(table: Table, key: bytes) -> bytes:
    """The group of a key; empty for keys of no known form."""
    end = len(key) - TAIL_BYTES[table]
    return key[:end] if end > 0 else b""


def runs_of(put: Put) -> Sequence[tuple[bytes, bytes, bytes, int, int]]:
    """The rows of a put by their groups: group, first key, last key, rows, bytes."""
    suffixes, values, prefix = put.suffixes, put.values, put.prefix
    if not suffixes:
        return ()
    end = len(prefix) - (TAIL_BYTES[put.table] - POSITION_BYTES)
    if len(suffixes[0]) == POSITION_BYTES and end > 0:
        # What the daemon writes: all rows of a put have one group.
        size = (put.value_bytes if put.size is None else put.size) + len(values) * (len(prefix) + POSITION_BYTES)
        return ((prefix[:end], prefix + suffixes[0], prefix + suffixes[-1], len(values), size),)
    rows = ((prefix + suffix, len(value)) for suffix, value in zip(suffixes, values, strict=True))
    runs: list[tuple[bytes, bytes, bytes, int, int]] = []
    for group, run in groupby(rows, lambda row: group_of(put.table, row[0])):
        found = list(run)
        keys = [key for key, _ in found]
        runs.append((group, min(keys), max(keys), len(found), sum(len(key) + size for key, size in found)))
    return runs


@dataclass(slots=True, eq=False)
class Extent:
    """The rows of a group in a volume."""

    volume: Volume
    first: bytes
    last: bytes
    rows: int
    size: int
    """Bytes of keys and values."""
    live: float
    """Those of them that are not known to be dead; an estimate."""
    packed: bool = False
    """Whether some may be in packs."""
    largest: int = 0
    """No row's value has more bytes, of those that are in no pack; 0: no bound is known."""


@dataclass(eq=False)
class Volume:
    """A volume. Its numbers and extents are read and changed under the lock of the set it is in."""

    number: int
    path: Path
    shape: Shape
    large: bool = False
    """Whether it is the database of version 0.1."""
    extents: dict[Table, dict[bytes, Extent]] = field(default_factory=lambda: {table: {} for table in TABLES})
    journal_last: int = 0
    """The number of the last entry of the journal in it; 0: it has none."""
    database: Database | None = None
    inside: int = 0
    """Calls that use ``database``: it is not closed meanwhile."""
    pins: int = 0
    """Scans and views that may still come to it: its files are not removed meanwhile."""
    used: int = 0
    """When it was last used; a count of uses of the set."""
    size: int = 0
    """Bytes of its files, when last measured."""
    memory_bytes: int = 0
    """Of the newest volume: what its rows would take in LevelDB's memory, all together."""
    snapshots: int = 0
    """Of views: its database is not closed meanwhile."""
    gone: bool = False
    """It is in the set no more: nothing is to be changed in it."""
    opening: threading.Lock = field(default_factory=threading.Lock)
    """Held while its database is opened or closed: LevelDB does neither twice at once."""
    changing: threading.Lock = field(default_factory=threading.Lock)
    """Held while rows of a sealed volume are removed or rolled back, and while it is replaced."""
    changed: set[tuple[Table, bytes]] | None = None
    """While it is being rewritten: the rows that were changed since."""
    has_packs: bool = False
    """Whether any of its rows may be in packs."""
    is_unread: bool = False
    """Whether it could not be read through: which of its rows are in packs is not known."""

    @property
    def is_empty(self) -> bool:
        """Whether no row was put into it; also for threads that do not hold the lock."""
        return not any(self.extents.values())

    @property
    def rows(self) -> int:
        """Rows that were put into it."""
        return sum(extent.rows for groups in self.extents.values() for extent in groups.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of their keys and values."""
        return sum(extent.size for groups in self.extents.values() for extent in groups.values())

    @property
    def live_bytes(self) -> float:
        """Those that are not known to be dead; an estimate."""
        return sum(extent.live for groups in self.extents.values() for extent in groups.values())

    def may_be_packed(self, table: Table, key: bytes) -> bool:
        """Whether a row is in a pack, or would be; also for threads that do not hold the lock."""
        return table is PACKED_TABLE and (self.is_unread or self.has_packs_between(key, key))

    def has_packs_between(self, first: bytes, last: bytes) -> bool:
        """Whether any pack that is known of may have a row between two keys, both included."""
        if not self.has_packs:
            return False
        # A pack has rows of one generation of a topic, whatever other keys are between them.
        group = first[: len(topic_prefix(first)) + _GENERATION_BYTES]
        if not last.startswith(group):
            return True
        extent = self.extents[PACKED_TABLE].get(group)
        return extent is not None and extent.packed and extent.first <= last and first <= extent.last

    def open(self, *, create: bool = False, check: bool = True) -> Database:
        """Open its database if it is closed. Raises StoreUnusable."""
        if self.database is None:
            self.database = Database(self.path, self.shape, create=create, check=check)
        return self.database

    def measure(self) -> None:
        """Update ``size``."""
        self.size = size_of(self.path)

    def write_index(self) -> None:
        """Write what is known of the volume beside it, so that it need not be read at the next start."""
        groups = {
            str(int(table)): [
                [
                    *map(bytes.hex, (group, extent.first, extent.last)),
                    *(extent.rows, extent.size, round(extent.live), extent.packed, extent.largest),
                ]
                for group, extent in extents.items()
            ]
            for table, extents in self.extents.items()
        }
        known = {"number": self.number, "journal_last": self.journal_last, "memory_bytes": self.memory_bytes}
        content = json.dumps({**known, "extents": groups}).encode()
        temporary = self.path.with_name(self.path.name + _INDEX_SUFFIX + ".tmp")
        with temporary.open("wb") as file:
            file.write(b"%08x\n" % zlib.crc32(content) + content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(index_path(self.path))

    def forget_index(self) -> None:
        """Remove that file, durably: what is written from now on is not in it. Raises OSError."""
        index_path(self.path).unlink(missing_ok=True)
        sync_directory(self.path.parent)

    def read_index(self) -> bool:
        """Read that file; whether it was there, and whole."""
        try:
            check, _, content = index_path(self.path).read_bytes().partition(b"\n")
            if int(check, 16) != zlib.crc32(content):
                return False
            found: dict[str, Any] = json.loads(content)
            if found["number"] != self.number:
                return False
            self.journal_last, self.memory_bytes = int(found["journal_last"]), int(found["memory_bytes"])
            for table in TABLES:
                for group, first, last, rows, size, live, *more in found["extents"][str(int(table))]:
                    # What an earlier version wrote lacks the last of these, or both.
                    packed, largest = more[0] if more else False, more[1] if len(more) > 1 else 0
                    keys = bytes.fromhex(first), bytes.fromhex(last)
                    extent = Extent(self, *keys, rows, size, float(live), packed, largest)
                    self.extents[table][bytes.fromhex(group)] = extent
                    self.has_packs |= extent.packed
                    self.is_unread |= extent.packed and not group
        except (OSError, ValueError, KeyError, TypeError):
            return False
        return True

    def look_through(self, between: Callable[[], None] = lambda: None) -> None:
        """Find out from its rows what is in it.

        Args:
          between: is called between lists of rows.

        Raises:
          StoreUnusable: it cannot be opened.
          StoreError: the journal in it cannot be read.
        """
        database = self.open()
        self.measure()
        for table in TABLES:
            try:
                look = self._counted if self.size <= MAX_COUNTED_BYTES else self._sampled
                self.extents[table] = look(database, table, between)
            except FOREIGN as error:
                # Every key may be in it, so that a reader meets the damage, and only one that comes to it.
                call_failed(error, "reading a volume through")
                anything = Extent(self, b"", b"\xff" * 64, 1, self.size, self.size)
                self.extents[table] = {b"": anything}
                self.is_unread = True
        if self.shape.packed:
            # Which of them are is not known.
            for extent in self.extents[PACKED_TABLE].values():
                extent.packed = self.has_packs = True
        last = database.last_own_key(JOURNAL, AFTER_JOURNAL)
        self.journal_last = int.from_bytes(last[1:], "big") if last is not None else 0
        self.memory_bytes = self.row_bytes

    def _counted(self, database: Database, table: Table, between: Callable[[], None]) -> dict[bytes, Extent]:
        """Every group, with its rows and bytes counted."""
        found: dict[bytes, Extent] = {}
        with database.rows(table, b"", _LAST) as rows:
            every = iter(rows)
            while some := list(islice(every, _LIST_ROWS)):
                first, last = some[0][0], some[-1][0]
                same = group_of(table, first)
                if same and same == group_of(table, last):
                    # All between them begin with it, too: no need to look at each.
                    self._count(found, same, some)
                else:
                    for group, run in groupby(some, lambda row: group_of(table, row[0])):
                        self._count(found, group, list(run))
                between()
        return found

    def _count(self, found: dict[bytes, Extent], group: bytes, rows: list[tuple[bytes, bytes]]) -> None:
        sizes = [len(value) for _, value in rows]
        size, largest = sum(sizes) + len(rows) * len(rows[0][0]), max(sizes)
        extent = found.get(group)
        if extent is None:
            found[group] = Extent(self, rows[0][0], rows[-1][0], len(rows), size, size, largest=largest)
        else:
            extent.largest = max(extent.largest, largest)
            extent.last = rows[-1][0]
            extent.rows += len(rows)
            extent.size += size
            extent.live += size

    def _sampled(self, database: Database, table: Table, between: Callable[[], None]) -> dict[bytes, Extent]:
        """Every group by its first and last key; the bytes of all are shared out equally."""
        found: dict[bytes, Extent] = {}
        at = b""
        while True:
            with database.rows(table, at, _LAST) as rows:
                row = next(iter(rows), None)
            if row is None:
                break
            key = row[0]
            group = group_of(table, key)
            last, at = key, key + b"\x00"
            if group:
                at = group + _LAST
                with database.rows(table, group, at, reverse=True, values=False) as rows:
                    last = next(iter(rows))[0]
            if group in found:
                found[group].last = last
            else:
                found[group] = Extent(self, key, last, 1, 0, 0)
            between()
        for extent in found.values():
            extent.size = self.size // len(found)
            extent.live = extent.size
            extent.rows = max(1, extent.size // _TYPICAL_ROW_BYTES)
        return found


def index_path(path: Path) -> Path:
    """The file about the volume at ``path``."""
    return path.with_name(path.name + _INDEX_SUFFIX)

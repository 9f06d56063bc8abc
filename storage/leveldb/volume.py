"""A volume: one LevelDB with the messages and payloads of a period, and a summary of it in memory.

The newest volume is written. A sealed one is read, and opened on demand; rows in it may be removed or rolled back in
place, each time synced, so that it can be closed at any moment. The file ``NAME.index`` next to a volume stores the
summary. If a sealed volume lacks it, the next start reads the volume through. The newest volume has it only while no
daemon runs.

A volume has one owner: the commit thread until it is sealed, then the keeper (``storage.leveldb.keeper``).
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from bisect import insort
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES
from plainsong.protocol.keys import MESSAGE_TAIL_BYTES, topic_prefix
from storage.base import StoreDamaged, Unreadable
from storage.directory import DAMAGED_HINT, sync_directory
from storage.leveldb.engine.database import MIB, Database, Shape, size_of
from storage.leveldb.engine.errors import FOREIGN, call_failed
from storage.leveldb.engine.packs import PACKED_TABLE
from storage.leveldb.index import Groups, part_within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from plainsong.protocol.effects import Put
    from storage.leveldb.index import DeadRanges

log = logging.getLogger(__name__)
#: The tables whose rows are in volumes.
TABLES = (Table.MESSAGE, Table.PAYLOAD)
#: First byte of the journal's keys; the number of the commit's entry follows. The value is its changes to the metadata.
JOURNAL = b"\x00"
AFTER_JOURNAL = b"\x01"
#: Larger volumes are not read through for their index: first and last keys are looked up, and rows are estimated.
MAX_COUNTED_BYTES = 512 * MIB
#: A row's size in LevelDB's memory beyond its size in the log.
MEMORY_ROW_BYTES = 36
#: Steps of tidying without further dead payloads after which a volume is counted for the first time.
QUIET_STEPS = 10
#: From this number of keys on, first check if one extent has all of them.
_MANY_KEYS = 8
_INDEX_SUFFIX = ".index"
_LIST_ROWS = 1000
_LAST = b"\xff" * 64
_TYPICAL_ROW_BYTES = 200
_GENERATION_BYTES = MESSAGE_TAIL_BYTES - POSITION_BYTES


#: Bytes of a key after its group. Of a message key, the position. Of a payload key, also the write pointer except its
#: first byte, which belongs to the group: pointers of transactions begin with 0, staged ones, which sort last, with f.
TAIL_BYTES = {Table.MESSAGE: POSITION_BYTES, Table.PAYLOAD: POSITION_BYTES + 7}


def group_of(table: Table, key: bytes) -> bytes:
    """Return the group of a key; empty for a key of no known form."""
    end = len(key) - TAIL_BYTES[table]
    return key[:end] if end > 0 else b""


def runs_of(put: Put) -> Sequence[tuple[bytes, bytes, bytes, int, int]]:
    """Split the rows of a put by group. Returns (group, first key, last key, rows, bytes) for each."""
    suffixes, values, prefix = put.suffixes, put.values, put.prefix
    if not suffixes:
        return ()
    end = len(prefix) - (TAIL_BYTES[put.table] - POSITION_BYTES)
    if len(suffixes[0]) == POSITION_BYTES and end > 0:
        # The daemon's own puts: all rows have one group.
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
    """The rows of a group in a volume: their keys are between ``first`` and ``last``; rows may have been removed since.

    While the volume is the newest, only the commit thread changes an extent, before it writes the rows, and ``first``
    and ``last`` only move apart. So a reader that sees an older value misses no row that was committed before the read
    began. Once the volume is sealed, only ``live``, ``removed`` and ``survived`` change, and only the keeper uses them.
    """

    volume: Volume
    first: bytes
    last: bytes
    rows: int
    size: int
    """Bytes of keys and values."""
    live: float
    """Estimated bytes of rows that are neither removed nor dead. For the volume's owner."""
    packed: bool = False
    """True if some rows may be in packs."""
    largest: int = 0
    """Size of the largest value outside packs; 0 if no bound is known."""
    removed: int = 0
    """Bytes of the rows that were removed since a count of the rows began. For the volume's owner."""
    survived: float = 1.0
    """Estimated share of the other rows that has not died since. For the volume's owner."""

    def overlaps(self, start: bytes, stop: bytes) -> bool:
        """True if it may have rows of ``[start, stop)``."""
        return self.first < stop and self.last >= start

    def remove(self, size: int) -> None:
        """Subtract the bytes of a row that was removed."""
        self.live = max(0.0, self.live - size)
        self.removed += size

    def note_dead(self, died: Iterable[tuple[bytes, bytes]], alive: Iterable[tuple[bytes, bytes]]) -> None:
        """Subtract the rows of the ranges ``died``, which were alive until now; ``alive`` are those that still are.

        ``live`` shrinks in proportion to the keys that were alive, not to all keys. So nothing is left when the last of
        them die, even if a count found most of the bytes in a small range of keys.
        """
        if not (gone := part_within(self.first, self.last, died)):
            return
        left = part_within(self.first, self.last, alive)
        share = left / (gone + left)
        self.live *= share
        self.survived *= share


def note_dead(
    overlapping: Callable[[bytes, bytes], Iterator[Extent]], died: Iterable[tuple[bytes, bytes]], dead: DeadRanges
) -> dict[Volume, int]:
    """Subtract ranges that died just now from the live bytes of the extents that have rows there.

    Args:
      dead: all dead ranges, with those that died just now.
    Returns:
      For each volume, how often one of those ranges overlaps an extent of it.
    """
    found: dict[Extent, list[tuple[bytes, bytes]]] = {}
    for part in died:
        for extent in overlapping(*part):
            found.setdefault(extent, []).append(part)
    ranges: Counter[Volume] = Counter()
    for extent, parts in found.items():
        extent.note_dead(parts, dead.live_parts(extent.first, extent.last + b"\x00"))
        ranges[extent.volume] += len(parts)
    return ranges


def extents_of_each(
    keys: Sequence[bytes], overlapping: Callable[[bytes, bytes], Iterator[Extent]]
) -> Iterator[tuple[bytes, list[Extent]]]:
    """Yield each key that some extents may have, with those extents.

    Cleaning passes many keys of one extent, which are then looked up together.
    """
    found = list(islice(overlapping(min(keys), max(keys) + b"\x00"), 2)) if len(keys) >= _MANY_KEYS else None
    for key in keys:
        if found is None or len(found) > 1:
            extents = list(overlapping(key, key + b"\x00"))
        else:
            extents = [extent for extent in found if extent.first <= key <= extent.last]
        if extents:
            yield key, extents


class Extents(Groups[Extent]):
    """The extents of one table in one volume. Its owner adds to it."""

    __slots__ = ()

    def add(self, group: bytes, extent: Extent) -> None:
        """Add a group. For the volume's owner."""
        self._by_name[group] = extent
        names = list(self._names)
        insort(names, group)
        self._names = names

    def overlapping(self, start: bytes, stop: bytes) -> Iterator[Extent]:
        """Yield the extents that may have rows of ``[start, stop)``."""
        for extent in self.between(start, stop):
            if extent.overlaps(start, stop):
                yield extent

    def of_each(self, keys: Sequence[bytes]) -> Iterator[tuple[bytes, list[Extent]]]:
        """Yield each key that some extents may have, with those extents."""
        return extents_of_each(keys, self.overlapping)


@dataclass(eq=False)
class Volume:
    """A volume and its owner's summary of it."""

    number: int
    path: Path
    shape: Shape
    large: bool = False
    """True for the database of version 0.1."""
    extents: dict[Table, Extents] = field(default_factory=lambda: {table: Extents() for table in TABLES})
    uncounted: int = 0
    """Changes since the rows were last counted of which no estimate tells how many bytes died: dead ranges of payloads,
    because the payloads of one publish are a tiny part of the keys, and far from those of the next; removals that may
    complete such ranges; and unknown ones before the start. For its owner."""
    count_at: int = 1
    """The rows are counted again once ``uncounted`` is as large, or has not grown for a while."""
    quiet_steps: int = 0
    """Steps of tidying since ``uncounted`` last grew."""
    count_after_steps: int = QUIET_STEPS
    """The rows are counted after more quiet steps than this."""
    noted_uncounted: frozenset[int] | None = None
    """Numbers of the volumes that had to be counted when this newest one was closed; None if that is not known."""
    is_index_stale: bool = False
    """True if rows were removed one by one since its index was written with the right live bytes. The index is marked,
    or missing, so that the rows are counted after the next start. For its owner."""
    journal_first: int = 0
    """Number of its first journal entry, if it was written or read through since the start; else 0."""
    journal_last: int = 0
    """Number of its last journal entry; 0 if it has none."""
    size: int = 0
    """Size of its files, as last measured."""
    memory_bytes: int = 0
    """For the newest volume: total size of its rows in LevelDB's memory."""
    has_packs: bool = False
    """True if some of its rows may be in packs."""
    is_unread: bool = False
    """True if it could not be read through: any of its rows may be in packs."""
    is_known: bool = False
    """True if its index is valid, so that it need not be read through."""

    @property
    def name(self) -> str:
        """The name of its folder: unique, also over time."""
        return self.path.name

    @property
    def is_empty(self) -> bool:
        """True if no row was ever put into it."""
        return not any(map(len, self.extents.values()))

    def all_extents(self) -> Iterator[Extent]:
        """Yield the extents of all tables."""
        for extents in self.extents.values():
            yield from extents.values()

    @property
    def rows(self) -> int:
        """The number of rows that were put into it."""
        return sum(extent.rows for extent in self.all_extents())

    @property
    def row_bytes(self) -> int:
        """Bytes of the keys and values of these rows."""
        return sum(extent.size for extent in self.all_extents())

    @property
    def live_bytes(self) -> float:
        """Estimated bytes of rows that are neither removed nor dead. For its owner."""
        return sum(extent.live for extent in self.all_extents())

    def note(self, put: Put, *, packs: Sequence[tuple[bytes, bytes]] | None, packed: bool) -> None:
        """Add rows that are about to be written. For the owner of the newest volume.

        Args:
          packs: the packs that are written instead of the rows, if any.
          packed: True if some rows may be in packs.
        """
        if packs is not None:
            self.memory_bytes += sum(len(key) + len(value) + MEMORY_ROW_BYTES for key, value in packs)
        if packed:
            self.has_packs = True
        largest = max(map(len, put.values), default=0) if packs is None else 0
        extents = self.extents[put.table]
        for group, first, last, rows, size in runs_of(put):
            if packs is None:
                self.memory_bytes += size + rows * MEMORY_ROW_BYTES
            extent = extents.get(group)
            if extent is None:
                extents.add(group, Extent(self, first, last, rows, size, size, packed, largest))
                continue
            if packed:
                extent.packed = True
            if extent.largest:
                extent.largest = max(extent.largest, largest)
            if first < extent.first:
                extent.first = first
            if last > extent.last:
                extent.last = last
            extent.rows += rows
            extent.size += size
            extent.live += size

    def note_uncounted(self, ranges: int) -> None:
        """Note changes for ``uncounted``. For its owner."""
        self.uncounted += ranges
        self.quiet_steps = 0

    def extent_of(self, table: Table, key: bytes) -> Extent | None:
        """Return the extent of a row; None if the volume has no such row."""
        extents = self.extents[table]
        return extents.get(group_of(table, key)) or extents.get(b"")

    def note_removed(self, table: Table, key: bytes, size: int) -> None:
        """Subtract a row that is about to be removed; ``size`` is that of its key and value. For its owner."""
        if (extent := self.extent_of(table, key)) is not None:
            extent.remove(size)

    def mark_index_stale(self) -> None:
        """Mark its index durably, before rows are removed; remove it if that fails. For its owner. Raises OSError."""
        self.is_index_stale = True
        if save_index(self):
            sync_directory(self.path.parent)
        else:
            self.forget_index()

    def may_be_packed(self, table: Table, key: bytes) -> bool:
        """True if a row is in a pack or would become part of one."""
        return table is PACKED_TABLE and self.shape.packed and (self.is_unread or self.has_packs_between(key, key))

    def has_packs_between(self, first: bytes, last: bytes) -> bool:
        """True if a known pack may have a row between two keys, both included."""
        if not self.has_packs:
            return False
        # All rows of a pack belong to one generation of a topic, whatever keys are between its first and last.
        group = first[: len(topic_prefix(first)) + _GENERATION_BYTES]
        if not last.startswith(group):
            return True
        extent = self.extents[PACKED_TABLE].get(group)
        return extent is not None and extent.packed and extent.first <= last and first <= extent.last

    def measure(self) -> None:
        """Update ``size``."""
        self.size = size_of(self.path)

    # --- the index file ------------------------------------------------------------------------

    def write_index(self, metadata: Path | None = None, uncounted: Iterable[int] = ()) -> None:
        """Write the summary to the index file, so that the next start need not read the volume. Raises OSError.

        Args:
          metadata: the folder of the metadata's database, at a clean stop: its logs are noted too, and ``uncounted``.
          uncounted: numbers of the volumes that have to be counted.
        """
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
        counted = not (self.uncounted or self.is_index_stale)
        noted: dict[str, object] = {**known, **_note_logs(self.path), "counted": counted}
        if metadata is not None:
            noted |= {"metadata": _note_logs(metadata), "uncounted": list(uncounted)}
        content = json.dumps({**noted, "extents": groups}).encode()
        temporary = self.path.with_name(self.path.name + _INDEX_SUFFIX + ".tmp")
        with temporary.open("wb") as file:
            file.write(b"%08x\n" % zlib.crc32(content) + content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(index_path(self.path))

    def forget_index(self) -> None:
        """Remove the index file, durably, because later rows are not in it. Raises OSError."""
        index_path(self.path).unlink(missing_ok=True)
        sync_directory(self.path.parent)

    def read_index(self, metadata: Path, *, check: bool = True) -> dict[str, int] | None:
        """Read the index file, before the databases are opened.

        Args:
          metadata: the folder of the metadata's database.
          check: check that the logs have not changed since.
        Returns:
          The lengths of the logs when the file was written; None if it is missing or damaged, or if a build between 0.1
          and 0.2 wrote it without the logs or with fewer values for each extent.
        Raises:
          StoreDamaged: a log has changed: commits are missing.
          OSError: a log cannot be read.
        """
        try:
            checksum, _, content = index_path(self.path).read_bytes().partition(b"\n")
            if int(checksum, 16) != zlib.crc32(content):
                return None
            found: dict[str, Any] = json.loads(content)
            if found["number"] != self.number:
                return None
            logs = _noted_logs(found)
            of_metadata = _noted_logs(found["metadata"]) if "metadata" in found else {}
            self.is_index_stale = not found.get("counted", False)  # the first builds of 0.2 did not write it
            self.journal_last, self.memory_bytes = int(found["journal_last"]), int(found["memory_bytes"])
            if "uncounted" in found:  # written at a clean stop, with ``metadata``
                self.noted_uncounted = frozenset(found["uncounted"])
            for table in TABLES:
                for group, first, last, rows, size, live, packed, largest in found["extents"][str(int(table))]:
                    keys = bytes.fromhex(first), bytes.fromhex(last)
                    extent = Extent(self, *keys, rows, size, float(live), packed, largest)
                    self.extents[table].add(bytes.fromhex(group), extent)
                    self.has_packs |= extent.packed
                    self.is_unread |= extent.packed and not group
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.extents = {table: Extents() for table in TABLES}
            return None
        if check:
            for folder, noted in ((self.path, logs), (metadata, of_metadata)):
                for name, (length, crc) in noted.items():
                    check_log(folder / name, length, crc)
        return {name: length for name, (length, _) in logs.items()}

    # --- reading it through --------------------------------------------------------------------

    def look_through(self, database: Database) -> Iterator[None]:
        """Rebuild the summary from the rows; yields between lists of rows.

        Raises:
          StoreError: the journal in it cannot be read.
        """
        self.measure()
        for table in TABLES:
            try:
                look = self._counted if self.size <= MAX_COUNTED_BYTES else self._sampled
                found: dict[bytes, Extent] = {}
                yield from look(database, table, found)
            except FOREIGN as error:
                # Assume every key, so that a reader that needs the damaged block, and only that, gets the error.
                call_failed(error, "reading a whole volume")
                found = {b"": Extent(self, b"", b"\xff" * 64, 1, self.size, self.size)}
                self.is_unread = True
            if self.shape.packed and table is PACKED_TABLE:
                # It is unknown which of them are in packs.
                for extent in found.values():
                    extent.packed = self.has_packs = True
            self.extents[table] = Extents(found)
        self.look_at_journal(database)
        self.memory_bytes = self.row_bytes

    def look_at_journal(self, database: Database) -> None:
        """Update ``journal_first`` and ``journal_last`` from the volume. Raises StoreError."""
        last = database.outermost_own_key(JOURNAL, AFTER_JOURNAL, last=True)
        try:
            first = database.outermost_own_key(JOURNAL, AFTER_JOURNAL)
        except Unreadable:
            first = None  # only a check needs the first number
        self.journal_first = int.from_bytes(first[1:], "big") if first is not None else 0
        self.journal_last = int.from_bytes(last[1:], "big") if last is not None else 0

    def _counted(self, database: Database, table: Table, found: dict[bytes, Extent]) -> Iterator[None]:
        """Find every group, and count its rows and bytes."""
        with database.rows(table, b"", _LAST) as rows:
            every = iter(rows)
            while some := list(islice(every, _LIST_ROWS)):
                first, last = some[0][0], some[-1][0]
                same = group_of(table, first)
                if same and same == group_of(table, last):
                    # Then all rows between them have the same group.
                    self._count(found, same, some)
                else:
                    for group, run in groupby(some, lambda row: group_of(table, row[0])):
                        self._count(found, group, list(run))
                yield

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

    def _sampled(self, database: Database, table: Table, found: dict[bytes, Extent]) -> Iterator[None]:
        """Find every group by its first and last key. Assumes that all groups have the same number of bytes."""
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
            yield
        for extent in found.values():
            extent.size = self.size // len(found)
            extent.live = extent.size
            extent.rows = max(1, extent.size // _TYPICAL_ROW_BYTES)


def save_index(volume: Volume) -> bool:
    """Write a volume's index. Returns False if that failed, which is logged.

    The next start then uses the former index, or reads the volume through if there is none.
    """
    try:
        volume.write_index()
    except OSError as error:
        log.warning("a volume's index was not written", extra={"volume": volume.name, "why": str(error)})
        return False
    return True


def index_path(path: Path) -> Path:
    """Return the path of the index file of the volume at ``path``."""
    return path.with_name(path.name + _INDEX_SUFFIX)


def log_sizes(path: Path) -> dict[str, int]:
    """Return the lengths of the logs in a folder."""
    with os.scandir(path) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.name.endswith(".log")}


def _note_logs(path: Path) -> dict[str, dict[str, int]]:
    """Return the lengths and checksums of the logs in a folder, for an index. Raises OSError."""
    logs = log_sizes(path)
    return {"logs": logs, "log_checks": {name: log_checksum(path / name, size) for name, size in logs.items()}}


def _noted_logs(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the length and the checksum of each log in an index."""
    return {name: (size, found["log_checks"][name]) for name, size in found["logs"].items()}


def log_checksum(log: Path, size: int) -> int:
    """Return the CRC-32 of the first ``size`` bytes of a log. Raises OSError."""
    found, left = 0, size
    with log.open("rb") as file:
        while left > 0 and (some := file.read(min(left, MIB))):
            found = zlib.crc32(some, found)
            left -= len(some)
    return found


def check_log(log: Path, size: int, checksum: int) -> None:
    """Check that a log still begins with the bytes that it had when its volume's index was written, if it exists.

    All of these bytes were acknowledged. LevelDB alone does not notice their loss: it skips sectors that read as zeros,
    and takes a damaged last record for one that a power cut has torn.

    Args:
      size: the number of these bytes. The log of a sealed volume may have grown since.
      checksum: of these bytes.
    Raises:
      StoreDamaged: the log is shorter or differs.
      OSError: the log cannot be read.
    """
    try:
        found = log.stat().st_size
        if found >= size and log_checksum(log, size) == checksum:
            return
    except FileNotFoundError:
        return  # its rows are in a table by now; ``check_files`` finds out if LevelDB needs the log
    if found < size:
        detail = f"{log} has {found} bytes but had {size} when it was closed: commits are missing"
    else:
        detail = f"{log} has changed since it was closed: commits in it are damaged or missing"
    raise StoreDamaged(detail, hint=DAMAGED_HINT)

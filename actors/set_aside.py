"""Setting aside: rows of a topic that block readers are copied to a file unchanged, and removed from the topic.

    1  the raw rows are written to a file, and synced         a crash leaves a file; the topic is unchanged
    2  the topic records the range                          from then on readers are notified of it
    3  the rows are removed                                 readers continue after them

A crash between these steps leaves the rows in place: set them aside again, which writes another file.
"""

from __future__ import annotations

import base64
import json
import logging
import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import LowSpace, NotFound, OutcomeUnknown
from plainsong.protocol.ids import FIRST_BOUND, POSITION_BYTES, ordinal, position_at, unpack_position
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.topic.asks import Cleaned, Look, NoteSetAside, PlanCleaning, SliceCleaned, Stats
from storage.base import StoreError, read_rows
from storage.cleaning import counted, is_message, is_payload, is_reference, payloads_of
from storage.damage import read_around
from storage.directory import sync_directory
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import IO

    from actors.directory import Directory
    from actors.observe import Clock
    from actors.scrub import Scrub
    from plainsong.protocol.names import TopicName
    from plainsong.protocol.topic.asks import Slice, Span
    from storage.base import RawRow, Row, Store
    from storage.damage import Gap

log = logging.getLogger(__name__)
#: In the scrub's findings, an id that ends in these bytes is a bound right after the row at its position.
BEHIND = bytes(9) + b"\x01"
#: The format of the file, stated in its first line.
FILE_FORMAT = 1


@dataclass(slots=True)
class SetAsideRange:
    """The rows between two ids."""

    first: bytes
    """The positions of the first and the last row."""
    last: bytes
    messages: int = 0
    bytes: int = 0
    rows: int = 0
    """Readable rows of both tables."""
    damaged: int = 0
    """Readable rows that cannot be parsed."""
    gaps: list[Gap] = field(default_factory=list)
    """Ranges that cannot be read."""
    file: str | None = None
    """The file with the rows, relative to the data directory; None if nothing was changed."""

    @property
    def known_rows(self) -> int | None:
        """The number of rows; None if some cannot be read and thus not counted."""
        return None if self.gaps else self.rows


class SetAsides:
    """Sets rows aside, on the owner of their topic.

    Args:
      folder: the data directory.
      scrub: drops its findings in the removed ranges.
    """

    def __init__(
        self, store: Store, directory: Directory, clock: Clock, folder: Path, delete_grace_ms: int, scrub: Scrub
    ) -> None:
        self._store = store
        self._directory = directory
        self._clock = clock
        self._folder = folder
        self._delete_grace_ms = delete_grace_ms
        self._scrub = scrub
        self._turn = trio.Lock()

    async def set_aside(self, name: TopicName, first_id: bytes, last_id: bytes, *, dry_run: bool) -> SetAsideRange:
        """Set aside the rows from one id to another, both included; with ``dry_run`` only inspect them.

        Raises:
          TopicNotFound, NotFound (there are no rows between them), GenerationChanged, LowSpace: nothing happened.
          StoreError: it may have happened in part; it is safe to repeat.
        """
        async with self._turn:
            prefix = b"" if dry_run else await self._save(name)
            found = await self._directory.ask(name, Stats())
            look = await self._directory.ask(name, Look(FIRST_BOUND))
            start, stop = _keys(look, first_id, last_id)
            work = _Work(name, look, found.slices)
            path = None if dry_run else _free_path(self._folder / "set-aside", name, look.generation, first_id, last_id)
            try:
                await work.read(self._store, start, stop, path, self._clock.now_ms())
                stretch = work.stretch(start)
                if path is not None:
                    stretch.file = str(path.relative_to(self._folder))
                    await in_thread(work.keep, path)
            except OSError as error:
                raise LowSpace(
                    f"the rows cannot be written to {self._folder / 'set-aside'}: {error.strerror}",
                    hint="free some space there; nothing was changed",
                ) from error
            finally:
                work.close()
            if dry_run:
                return stretch
            with trio.CancelScope(shield=True):
                # The caller may be cancelled; rows that the topic has recorded must still be removed.
                await self._remove(name, work, stretch, prefix)
        log.warning(
            "rows were set aside",
            extra={"topic": str(name), "rows": stretch.rows, "unreadable": len(stretch.gaps), "file": stretch.file},
        )
        return stretch

    async def _save(self, name: TopicName) -> bytes:
        """Save the producers' state, which cannot be recovered from removed rows; return the prefix of the rows."""
        try:
            return (await self._directory.ask(name, PlanCleaning(self._delete_grace_ms))).prefix
        except OutcomeUnknown as error:
            # The outcome does not matter: no row was touched, and saving the state again is safe.
            raise StoreError(
                f"{error.detail}; no row was touched", hint="check the disk, and run the command again"
            ) from error

    async def _remove(self, name: TopicName, work: _Work, stretch: SetAsideRange, prefix: bytes) -> None:
        if stretch.gaps:
            # New messages may have keys in the damaged block's range; they can be read only if they are in new files.
            await self._store.begin_files()
        note = NoteSetAside(work.span.generation, stretch.first, stretch.last, stretch.known_rows)
        await self._directory.ask(name, note)
        if work.payloads:
            await self._store.drop(Table.PAYLOAD, work.payloads)
        await self._store.drop(Table.MESSAGE, [(work.start, work.stop)])
        await self._directory.ask(name, Cleaned(prefix, work.cleaned()))
        await self._scrub.forget(
            name, [(Table.MESSAGE, work.start, work.stop)] + [(Table.PAYLOAD, *each) for each in work.payloads]
        )


class _Work:
    """Reads the rows of a range, and writes them to a file."""

    def __init__(self, name: TopicName, span: Span, slices: Sequence[Slice]) -> None:
        self.span = span
        self.start = self.stop = b""
        self.payloads: list[tuple[bytes, bytes]] = []
        """Ranges of payload rows that the messages refer to."""
        self._name = name
        self._slices = slices
        self._removed: dict[int, list[int]] = {}
        """Index of a slice → its messages and bytes in this range."""
        self._found = SetAsideRange(b"", b"")
        self._last_key = b""
        self._file: IO[str] | None = None
        self._part: Path | None = None

    async def read(self, store: Store, start: bytes, stop: bytes, path: Path | None, now_ms: int) -> None:
        """Read the range, into a file if ``path`` is given. Raises NotFound, OSError, StoreError."""
        end = self.span.prefix + _watermark(self.span) + b"\x00"
        if path is not None:
            await in_thread(self._begin, path, now_ms)
        gaps = await self._read(store, Table.MESSAGE, start, stop, end)
        if gaps:
            # Extend the range to the next readable row: reads that begin or end there must not enter the block.
            stop = max(stop, gaps[-1].stop)
            behind = await read_rows(store, Table.MESSAGE, stop, end, limit=1, values=False)
            stop = behind[0][0] if behind else end
        self.start, self.stop = start, stop
        self._found.gaps += gaps
        for each in list(self.payloads):
            self._found.gaps += await self._read(store, Table.PAYLOAD, *each, each[1])
        if not self._found.rows and not self._found.gaps:
            raise NotFound(f"topic {self._name} has no rows between these ids", hint="GET …/messages lists them")

    async def _read(self, store: Store, table: Table, start: bytes, stop: bytes, end: bytes) -> list[Gap]:
        """Read a range; for unreadable parts, write what the store can still return."""
        gaps = await read_around(store, table, start, stop, end, self._take(table))
        if self._file is not None:
            for gap in gaps:
                await store.scan_raw(table, gap.start, gap.stop, partial(self._keep_raw, table))
        return gaps

    def _keep_raw(self, table: Table, rows: list[RawRow]) -> None:
        """Write the store's raw rows. Called in the thread that reads them."""
        assert self._file is not None
        for row in rows:
            cells = {column.hex(): _base64(cell) for column, cell in row.cells.items()}
            raw = {"key": row.key.hex(), "cells": cells}
            self._file.write(json.dumps({"table": table.name.lower(), "raw": raw}) + "\n")

    def _begin(self, path: Path, now_ms: int) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left in path.parent.glob("*.part"):  # left by a daemon that was killed; only one call runs at a time
            left.unlink()
        self._part = path.with_suffix(".part")
        descriptor = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file = os.fdopen(descriptor, "w", encoding="ascii")
        about = {"format": FILE_FORMAT, "topic": str(self._name), "generation": self.span.generation, "atMs": now_ms}
        self._file.write(json.dumps(about) + "\n")

    def _take(self, table: Table) -> Callable[[Sequence[Row]], None]:
        """Return a function that takes rows of a table, for the thread that reads them."""
        is_whole = is_message if table is Table.MESSAGE else is_payload

        def take(rows: Sequence[Row]) -> None:
            for row in rows:
                self._found.rows += 1
                whole = is_whole(row)
                self._found.damaged += not whole
                if table is Table.MESSAGE:
                    self._count(row)
                    if whole and is_reference(row):
                        self.payloads.append(payloads_of(row))
                if self._file is not None:
                    kept = {"table": table.name.lower(), "key": row[0].hex(), "value": _base64(row[1])}
                    self._file.write(json.dumps(kept) + "\n")

        return take

    def _count(self, row: Row) -> None:
        self._found.first = self._found.first or row[0][-POSITION_BYTES:]
        self._last_key = row[0]
        try:
            messages, size = counted(row)
        except DamagedRow:
            messages, size = 1, len(row[1])
        self._found.messages += messages
        self._found.bytes += size
        published_ms, _ = unpack_position(row[0][-POSITION_BYTES:])
        for number, one in enumerate(self._slices):
            if one.first_ms <= published_ms <= one.last_ms:
                removed = self._removed.setdefault(number, [0, 0])
                removed[0] += messages
                removed[1] += size
                return

    def stretch(self, start: bytes) -> SetAsideRange:
        """Return the result, from the first to the last row; an unreadable part is counted at its maximum extent."""
        found = self._found
        size = len(self.span.prefix)
        if found.gaps:
            found.first = min(each for each in (found.first, _position_from(start[size:])) if each)
            found.last = _position_before(self.stop[size:])
        else:
            found.last = self._last_key[size:]
        return found

    def keep(self, path: Path) -> None:
        """Complete the file, and give it its name durably. Blocks."""
        assert self._file is not None
        assert self._part is not None
        for gap in self._found.gaps:
            self._file.write(
                json.dumps({"unreadable": {"from": gap.start.hex(), "to": gap.stop.hex(), "why": gap.why}}) + "\n"
            )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.rename(path)
        self._part = None
        sync_directory(path.parent)
        sync_directory(path.parent.parent)

    def close(self) -> None:
        """Close the file, and remove an incomplete one."""
        if self._file is not None:
            with suppress(OSError):  # a full disk fails again here
                self._file.close()
        if self._part is not None:
            self._part.unlink(missing_ok=True)

    def cleaned(self) -> tuple[SliceCleaned, ...]:
        """Return the messages and bytes that were removed from each slice of the topic's usage."""
        found = []
        for number, (messages, size) in self._removed.items():
            one = self._slices[number]
            found.append(SliceCleaned(one.first_ms, one.last_ms, messages, size, one.own_expiry_ms))
        return tuple(found)


def _keys(span: Span, first_id: bytes, last_id: bytes) -> tuple[bytes, bytes]:
    """Return ``[start, stop)`` of the message rows from one id to another; stored messages have one row."""
    start = span.prefix + first_id[:POSITION_BYTES] + (b"\x00" if first_id.endswith(BEHIND) else b"")
    last = min(last_id[:POSITION_BYTES], _watermark(span))
    return start, span.prefix + last + b"\x00"


def _watermark(span: Span) -> bytes:
    """Return the position of the last row that readers may see."""
    return (span.watermark or FIRST_BOUND)[:POSITION_BYTES]


def _position_from(tail: bytes) -> bytes:
    """Return the first position that is not below the end of a key."""
    at = ordinal(tail[:POSITION_BYTES].ljust(POSITION_BYTES, b"\x00"))
    return position_at(at + (len(tail) > POSITION_BYTES))


def _position_before(tail: bytes) -> bytes:
    """Return the last position that is below the end of a key."""
    at = ordinal(tail[:POSITION_BYTES].ljust(POSITION_BYTES, b"\x00"))
    return position_at(at - (len(tail) <= POSITION_BYTES))


def _free_path(folder: Path, name: TopicName, generation: int, first_id: bytes, last_id: bytes) -> Path:
    """Return the path of a file that does not exist: earlier files are never overwritten."""
    stem = f"{name.namespace}.{name.topic}-{generation}-{first_id[:10].hex()}-{last_id[:10].hex()}"
    path, number = folder / f"{stem}.ndjson", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.ndjson"
    return path


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")

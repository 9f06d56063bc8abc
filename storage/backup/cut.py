"""A cut of a store, from which a backup is read: its topics, their objects page by page, and the bytes of each.

It keeps only a view of the store, the bounds of recently listed objects and some of their bytes, so memory does not
grow with the backup. Rows are read in small steps with the pauses of `Pace`, so that publishes and polls continue.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES, pack_position
from plainsong.protocol.keys import (
    COPYING,
    HIGH_WATER,
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    POINTER,
    PRODUCER,
    PRODUCERS,
    READER,
    SERVICE,
    SYSTEM,
    DamagedRow,
    generation_prefix,
    metadata_key,
    stop_after,
    system_key,
    topic_of,
    topic_prefix,
    topic_range,
)
from plainsong.protocol.records import HighWater, Metadata
from plainsong.protocol.transactions.ledger_rows import SERVICE_RANGE
from storage.backup.objects import Window, WindowedRows, encode_row, keyed_windows
from storage.base import Unreadable
from storage.damage import Gap, approach, behind, last_before, shown_place
from storage.pace import paced_rows
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

    from plainsong.protocol.answers.service import BackupLeftOut, BackupObject, BackupTopic, ObjectTable, RowTable
    from plainsong.protocol.names import TopicName
    from storage.base import Row, StoreView
    from storage.pace import Pace

#: A page ends after this many objects or seconds.
PAGE_OBJECTS = 500
PAGE_S = 2.0
#: Number of objects whose bounds are remembered: those of the last pages.
KNOWN_OBJECTS = 4 * PAGE_OBJECTS
#: Bytes of the latest objects that are kept: an incremental backup usually needs only the last ones.
KEPT_BYTES = 16 << 20
#: The same if rows may change before the objects are fetched; those of the transaction service change all the time.
KEPT_CHANGING_BYTES = 64 << 20
#: Largest span of an object: of messages, 2^26 ms (under 19 hours) of publish times, above 16 bits of sequence ids; of
#: payloads, 2^46 write pointers, of which a million are issued per millisecond, above 80 bits of time and sequence id.
_MESSAGE_BITS = 26 + 16
_PAYLOAD_BITS = 46 + 80
_GENERATION_BYTES = 4
#: Names of the tables in a manifest. A topic's metadata comes first.
TABLES: dict[RowTable, Table] = {"metadata": Table.METADATA, "messages": Table.MESSAGE, "payloads": Table.PAYLOAD}
_KIND_STOP = SYSTEM + b"\xff"
#: The kinds of a topic's rows that this version knows.
_TOPIC_KINDS = (HIGH_WATER, READER, POINTER, PRODUCER, PRODUCERS)


class NotListed(KeyError):
    """No object of this name was listed recently."""


@dataclass(frozen=True, slots=True)
class CutTopic:
    """A topic in a cut."""

    name: TopicName
    metadata: Metadata | None
    """None if its row cannot be read."""

    def shown(self) -> BackupTopic:
        """Return its manifest entry, without objects."""
        metadata = self.metadata
        return {
            "namespace": self.name.namespace,
            "topic": self.name.topic,
            "generation": None if metadata is None else metadata.generation,
            "properties": {} if metadata is None else metadata.properties.stored(),
            "deletedMs": None if metadata is None else metadata.deleted_ms,
        }


class CutObject(NamedTuple):
    """A listed object."""

    sha256: str
    table: ObjectTable
    rows: int
    bytes: int
    from_ms: int | None
    to_ms: int | None

    def shown(self) -> BackupObject:
        """Return its manifest entry."""
        return {
            "sha256": self.sha256,
            "table": self.table,
            "rows": self.rows,
            "bytes": self.bytes,
            "fromMs": self.from_ms,
            "toMs": self.to_ms,
        }


class LeftOut(NamedTuple):
    """A range whose rows cannot be read, and are in no object."""

    table: RowTable
    first: str
    """An id for messages, a key in hex for other rows. ``last`` has the same form and is included."""
    last: str
    why: str

    @classmethod
    def of(cls, table: RowTable, gap: Gap) -> LeftOut:
        """Make the range from a gap."""
        within = TABLES[table]
        last = last_before(within, gap.stop)
        size = len(topic_prefix(gap.start)) + _GENERATION_BYTES
        if within is not Table.METADATA and gap.stop[:size] != gap.start[:size]:
            last = gap.start[:size] + b"\xff" * POSITION_BYTES  # it extends to the end of the topic
        return cls(table, shown_place(within, gap.start), shown_place(within, last), gap.why)

    def shown(self) -> BackupLeftOut:
        """Return its manifest entry."""
        return {"table": self.table, "from": self.first, "to": self.last, "why": self.why}


class _Bounds(NamedTuple):
    table: Table
    first: bytes
    last: bytes
    about: TopicName | None
    """The topic whose rows of metadata these are, which are not one range; None for other rows."""


@dataclass(slots=True)
class Page:
    """Some objects of a topic, or of no topic."""

    objects: list[CutObject] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    """A range may be on two pages. If it is of metadata, the topic has no objects and cannot be restored."""
    next: str | None = None
    """Start of the next page; None on the last one."""
    line: str | None = None
    """On the last page: the last position given in the topic, 20 hex digits; None if none was."""


class Cut:
    """The contents of a backup, valid while its view is.

    A topic's rows of metadata are listed before its messages. If the view is not of one moment, the result is then a
    state from which the topic's owner could start after a crash: it replays messages after the high-water mark.

    Args:
      view: a view of the store. If it does not show one moment, rows, and with them objects, may change between two reads.
      around_damage: leave out and report unreadable rows, except those of the transaction service, without which it is
        unknown what is committed.
    """

    def __init__(self, view: StoreView, pace: Pace, *, around_damage: bool = False) -> None:
        self._view = view
        self._pace = pace
        self._around_damage = around_damage
        self.left_out: list[LeftOut] = []
        """Ranges among the names of topics."""
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0
        self._most_kept_bytes = KEPT_BYTES if view.exact else KEPT_CHANGING_BYTES
        self._known: OrderedDict[str, _Bounds] = OrderedDict()
        self._kinds: list[bytes] = []
        self._others: list[bytes] = []
        #: The last key of the messages that were listed last.
        self._listed_to = b""

    async def look(self) -> None:
        """Find the kinds of rows in the store. Raises StoreError."""
        start = SYSTEM
        while True:
            try:
                row = await self._first(start, _KIND_STOP)
            except Unreadable:
                if not self._around_damage:
                    raise
                good = await behind(self._view, Table.METADATA, start, _KIND_STOP)
                # Any kind in this range may be hidden in the gap: each is read, and its unreadable rows are left out.
                last = _KIND_STOP if good is None else good
                hidden = [bytes([kind]) for kind in range(start[1] if len(start) > 1 else 0, last[1] + 1)]
                self._kinds += [kind for kind in hidden if kind in _TOPIC_KINDS]
                self._others += [kind for kind in hidden if kind not in (*_TOPIC_KINDS, SERVICE, COPYING)]
                if good is None:
                    return
                start = good
                continue
            if not row:
                return
            kind = row[0][1:2]
            start = SYSTEM + bytes([kind[0] + 1])
            if kind not in (SERVICE, COPYING, *self._kinds, *self._others):
                (self._kinds if topic_prefix(row[0][2:]) else self._others).append(kind)

    async def topics(self) -> list[CutTopic]:
        """Return every topic, including deleted ones, by name. Raises StoreError."""
        found: list[CutTopic] = []

        def take(rows: Sequence[Row]) -> None:
            found.extend(CutTopic(topic_of(key)[0], _metadata(value)) for key, value in rows)

        gaps: list[Gap] = []
        async with aclosing(self._steps(Table.METADATA, *topic_range(), take, gaps)) as steps:
            async for _ in steps:
                pass
        self.left_out += [LeftOut.of("metadata", gap) for gap in gaps]
        return found

    async def _steps(
        self, table: Table, start: bytes, stop: bytes, work: Callable[[Sequence[Row]], object], gaps: list[Gap] | None
    ) -> AsyncGenerator[int, None]:
        """Read a range in steps as ``paced_rows`` does; add unreadable ranges to ``gaps`` if they may be left out.

        Raises StoreError. Unreadable is raised if ``gaps`` is None or nothing may be left out.
        """
        at = start

        def seen(rows: Sequence[Row]) -> None:
            nonlocal at
            work(rows)
            at = rows[-1][0] + b"\x00"

        while True:
            try:
                async with aclosing(paced_rows(self._view, table, at, stop, self._pace, seen)) as steps:
                    async for size in steps:
                        yield size
                return
            except Unreadable as error:
                if gaps is None or not self._around_damage:
                    raise
                at = await approach(self._view, table, at, stop, seen)
                if at >= stop:
                    return  # the damage is after the range
                good = await behind(self._view, table, at, stop)
                gaps.append(Gap(at, stop if good is None else good, error.detail))
                if good is None:
                    return
                at = good

    # --- pages ---------------------------------------------------------------------------------

    async def service(self) -> Page:
        """Return the objects of the transaction service. Raises StoreError."""
        return self._listed(await self._gathered([SERVICE_RANGE], None), "service")

    async def metadata(self) -> Page:
        """Return the objects of rows that belong to no topic. Raises StoreError."""
        ranges = [(SYSTEM + kind, stop_after(SYSTEM + kind)) for kind in self._others]
        gaps: list[Gap] = []
        page = self._listed(await self._gathered(ranges, gaps), "metadata")
        page.left_out += [LeftOut.of("metadata", gap) for gap in gaps]
        return page

    async def page(self, name: TopicName, after: str | None) -> Page:
        """Return objects of a topic from ``Page.next`` on. Raises StoreError; ValueError: ``after`` is not a place."""
        page = Page()
        until_s = trio.current_time() + PAGE_S
        at, floor = _place(after)
        if at == "metadata":
            gaps: list[Gap] = []
            rows = await self._about(name, gaps)
            if gaps:
                # Without these rows its messages cannot be read.
                page.left_out += [LeftOut.of("metadata", gap) for gap in gaps]
                return page
            page.objects += self._listed(rows, "metadata", name).objects
            at = "messages"
        row = await self._view.get(Table.METADATA, metadata_key(name))
        metadata = None if row is None else _metadata(row)
        if metadata is None:
            return page
        prefix = generation_prefix(name, metadata.generation)
        for table in ("messages", "payloads"):
            if at != table:
                continue
            stopped_at = await self._windows(prefix, table, floor, page, until_s)
            if stopped_at is not None:
                page.next = f"{table}.{stopped_at:x}"
                return page
            at, floor = "payloads", 0
        page.line = await self._line(name, metadata.generation, prefix)
        return page

    async def _windows(self, prefix: bytes, table: RowTable, floor: int, page: Page, until_s: float) -> int | None:
        """Add a table's objects to a page. Returns where the next one begins, None if there are no more."""
        tail_bytes = (MESSAGE_TAIL_BYTES if table == "messages" else PAYLOAD_TAIL_BYTES) - _GENERATION_BYTES
        bits = _MESSAGE_BITS if table == "messages" else _PAYLOAD_BITS
        if floor >= 1 << 8 * tail_bytes:
            return None
        windowed = WindowedRows(prefix, tail_bytes, bits, floor)
        start, stop = prefix + floor.to_bytes(tail_bytes, "big"), stop_after(prefix)
        gaps: list[Gap] = []
        try:
            async with aclosing(self._steps(TABLES[table], start, stop, windowed.feed, gaps)) as steps:
                async for _ in steps:
                    if windowed.is_due:
                        await self._add(windowed.windows(complete=False), table, page)
                        if len(page.objects) >= PAGE_OBJECTS or trio.current_time() >= until_s:
                            return windowed.floor
        finally:
            page.left_out += [LeftOut.of(table, gap) for gap in gaps]
        await self._add(windowed.windows(complete=True), table, page)
        return None

    async def _add(self, windows: Iterator[Window], table: RowTable, page: Page) -> None:
        while True:
            begun_s = trio.current_time()
            window = await in_thread(next, windows, None)
            if window is None:
                return
            name = await in_thread(_name_of, window.data)
            await self._pace.rest(trio.current_time() - begun_s, 0)
            page.objects.append(CutObject(name, table, window.count, len(window.data), *window.times_ms))
            self._remember(name, _Bounds(TABLES[table], window.first, window.last, None), window.data)
            if table == "messages":
                self._listed_to = window.last

    async def _line(self, name: TopicName, generation: int, prefix: bytes) -> str | None:
        """Return the last position of the listed messages, or a later one from the high-water mark."""
        last = [self._listed_to[len(prefix) :]] if self._listed_to.startswith(prefix) else []
        value = await self._view.get(Table.METADATA, system_key(HIGH_WATER, name, generation))
        if value is not None:
            try:
                mark = HighWater.decode(value)
                if mark.floor[1] >= 0:
                    last.append(pack_position(*mark.floor))
            except DamagedRow:
                pass
        return max(last).hex() if last else None

    # --- rows of metadata, which are few ---------------------------------------------------------

    async def _about(self, name: TopicName, gaps: list[Gap]) -> list[Row]:
        """Return the rows of metadata about a topic, by key."""
        key = metadata_key(name)
        ranges = [(SYSTEM + kind + key, stop_after(SYSTEM + kind + key)) for kind in self._kinds]
        return await self._gathered([*ranges, (key, key + b"\x00")], gaps)

    async def _gathered(self, ranges: Sequence[tuple[bytes, bytes]], gaps: list[Gap] | None) -> list[Row]:
        found: list[Row] = []
        for start, stop in ranges:
            async with aclosing(self._steps(Table.METADATA, start, stop, found.extend, gaps)) as steps:
                async for _ in steps:
                    pass
        return found

    def _listed(self, rows: Sequence[Row], table: ObjectTable, about: TopicName | None = None) -> Page:
        page = Page()
        for window in keyed_windows(rows):
            name = _name_of(window.data)
            page.objects.append(CutObject(name, table, window.count, len(window.data), None, None))
            self._remember(name, _Bounds(Table.METADATA, window.first, window.last, about), window.data)
        return page

    # --- objects -------------------------------------------------------------------------------

    def _remember(self, name: str, bounds: _Bounds, data: bytes) -> None:
        if name not in self._kept:
            self._kept[name] = data
            self._kept_bytes += len(data)
        self._kept.move_to_end(name)
        while self._kept_bytes > self._most_kept_bytes and len(self._kept) > 1:
            _, gone = self._kept.popitem(last=False)
            self._kept_bytes -= len(gone)
        self._known[name] = bounds
        self._known.move_to_end(name)
        while len(self._known) > KNOWN_OBJECTS:
            self._known.popitem(last=False)

    async def object(self, name: str) -> bytes:
        """Return an object's bytes. Raises NotListed, even if only its rows have changed since; StoreError."""
        if (data := self._kept.get(name)) is not None:
            await trio.lowlevel.checkpoint()
            return data
        bounds = self._known.get(name)
        if bounds is None:
            raise NotListed(name)
        parts: list[bytes] = []
        if bounds.about is not None:
            rows = await self._about(bounds.about, [])
            parts += [encode_row(row) for row in rows if bounds.first <= row[0] <= bounds.last]
        else:
            work = partial(_encode_into, parts)
            stop = bounds.last + b"\x00"
            async with aclosing(self._steps(bounds.table, bounds.first, stop, work, [])) as steps:
                async for _ in steps:
                    pass
        data = b"".join(parts)
        if await in_thread(_name_of, data) != name:
            raise NotListed(name)
        return data

    async def _first(self, start: bytes, stop: bytes) -> Row | None:
        found: list[Row] = []

        def take(rows: Sequence[Row]) -> bool:
            found.append(rows[0])
            return False

        await self._view.scan(Table.METADATA, start, stop, take, first_chunk=1, values=False)
        return found[0] if found else None


def _encode_into(parts: list[bytes], rows: list[Row]) -> None:
    parts += map(encode_row, rows)


def _name_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _metadata(value: bytes) -> Metadata | None:
    try:
        return Metadata.decode(value)
    except DamagedRow:
        return None


def _place(after: str | None) -> tuple[str, int]:
    """Return the table and the place in it where a page begins. Raises ValueError."""
    if after is None:
        return "metadata", 0
    table, dot, floor = after.partition(".")
    if table not in ("messages", "payloads") or not dot or len(floor) > 40:
        raise ValueError(f"{after[:60]!r} is not a place in a topic")
    at = int(floor, 16)
    if at < 0:
        raise ValueError(f"{after[:60]!r} is not a place in a topic")
    return table, at

"""The scrub: reads every row of this instance from the disk and parses it, at a bounded rate, and says what it found.

A block that is damaged fails to be read when somebody needs it, perhaps after the last backup that has its rows was
removed. A round finds it before. Nothing is moved or mended: the store has one copy, and a backup has the other.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.keys import (
    MESSAGE_TAIL_BYTES,
    PAYLOAD_TAIL_BYTES,
    DamagedRow,
    metadata_key,
    stop_after,
    topic_of,
    topic_prefix,
    topic_range,
)
from plainsong.protocol.names import TopicName
from storage.base import StoreError, read_rows
from storage.cleaning import is_message, is_payload
from storage.inspect.describe import describe
from storage.pace import Pace, paced_rows

if TYPE_CHECKING:
    from actors.directory import Directory
    from actors.observe import Clock
    from storage.base import Row, Store

log = logging.getLogger(__name__)
#: Before the first round behind a start, which has enough to do.
FIRST_AFTER_S = 3600.0
#: Findings that are kept; further ones are counted.
MAX_FINDINGS = 1_000
#: Who scrubs rows of no topic, among instances that share a store.
_NO_TOPIC = TopicName("", "transactions")
_FIRST, _LAST = b"", b"\xff" * 8
_TAIL_BYTES = {Table.MESSAGE: MESSAGE_TAIL_BYTES, Table.PAYLOAD: PAYLOAD_TAIL_BYTES}
_FILE = re.compile(r"\b\d+\.(?:ldb|sst|log)\b")


@dataclass(slots=True)
class ScrubFinding:
    """Rows of a table that cannot be read, or not be parsed; neighbours in one finding."""

    table: Table
    first: bytes
    """The key of the first of them, or the first that may be damaged."""
    last: bytes
    why: str
    name: TopicName | None = None
    generation: int | None = None
    rows: int | None = None
    """None: nobody knows."""

    def shown(self) -> dict[str, object]:
        """Ready for JSON; messages by their ids, other rows by their keys in hex."""
        file = _FILE.search(self.why)
        return {
            "namespace": None if self.name is None else self.name.namespace,
            "topic": None if self.name is None else self.name.topic,
            "generation": self.generation,
            "table": self.table.name.lower(),
            "from": _shown_place(self.table, self.first),
            "to": _shown_place(self.table, self.last),
            "rows": self.rows,
            "why": self.why,
            "file": None if file is None else file.group(),
        }


@dataclass(slots=True)
class ScrubReport:
    """The round that is under way, or the last one."""

    state: Literal["off", "waiting", "running", "stopped"] = "waiting"
    """``stopped``: it could not go on, and is begun again later."""
    started_ms: int | None = None
    last_complete_ms: int | None = None
    rows: int = 0
    bytes: int = 0
    findings: list[ScrubFinding] = field(default_factory=list)
    """Of the round under way; until it has found something, those of the round before."""
    more: int = 0
    """Findings beyond those that are kept."""

    def shown(self) -> dict[str, object]:
        """Ready for JSON."""
        return {
            "state": self.state,
            "startedMs": self.started_ms,
            "lastCompleteMs": self.last_complete_ms,
            "rows": self.rows,
            "bytes": self.bytes,
            "findings": [each.shown() for each in self.findings],
            "moreFindings": self.more,
        }


class Scrub:
    """Rounds over all rows that this instance owns.

    Args:
      interval_s: between the beginnings of two rounds; 0: only when asked.
    """

    def __init__(self, store: Store, directory: Directory, clock: Clock, interval_s: int, bytes_per_s: int) -> None:
        self._store = store
        self._directory = directory
        self._clock = clock
        self._interval_s = interval_s
        self._pace = Pace(bytes_per_s)
        self._asked = trio.Event()
        self._found: list[ScrubFinding] = []
        self.report = ScrubReport("waiting" if interval_s else "off")

    def start_now(self) -> bool:
        """Begin a round now; False: one is under way."""
        if self.report.state == "running":
            return False
        self._asked.set()
        return True

    async def run(self) -> None:
        """Round after round. One that cannot go on is logged; the next one comes."""
        pause_s = FIRST_AFTER_S
        while True:
            with trio.move_on_after(pause_s if self._interval_s else float("inf")):
                await self._asked.wait()
            self._asked = trio.Event()
            begun_s = trio.current_time()
            try:
                await self.round()
            except PlainsongError as error:
                self.report.state = "stopped"
                log.warning("scrub stopped, trying again later", extra={"why": str(error)})
            pause_s = max(60.0, self._interval_s - (trio.current_time() - begun_s))

    async def round(self) -> None:
        """Read every row once. Raises StoreError: which rows there are could not be read."""
        report = self.report
        report.state, report.started_ms, report.rows, report.bytes = "running", self._clock.now_ms(), 0, 0
        self._found, more = [], report.more
        report.more = 0
        before = report.findings
        if self._is_mine(_NO_TOPIC):
            await self._range(Table.METADATA, _FIRST, _LAST, None)
        names = await self._names()
        for name in names:
            if self._is_mine(name):
                prefix = metadata_key(name)
                for table in (Table.MESSAGE, Table.PAYLOAD):
                    await self._range(table, prefix, stop_after(prefix), name)
        report.findings = self._found
        report.state, report.last_complete_ms = "waiting" if self._interval_s else "off", self._clock.now_ms()
        if len(before) + more != len(self._found) + report.more or self._found:
            log.warning("scrub found damaged rows", extra={"findings": len(self._found) + report.more})
        log.info("scrub complete", extra={"rows": report.rows, "bytes": report.bytes})

    def _is_mine(self, name: TopicName) -> bool:
        return self._directory.environment.ownership.is_mine(name)

    async def _names(self) -> list[TopicName]:
        found: list[TopicName] = []
        start, stop = topic_range()
        while rows := await read_rows(self._store, Table.METADATA, start, stop, limit=1000, values=False):
            for key, _ in rows:
                try:
                    found.append(topic_of(key)[0])
                except DamagedRow:
                    continue
            start = rows[-1][0] + b"\x00"
        return found

    async def _range(self, table: Table, start: bytes, stop: bytes, name: TopicName | None) -> None:
        """Read a range to its end, past whatever cannot be read."""
        while True:
            steps = _Steps(self, table, name, start)
            try:
                async for size in paced_rows(self._store, table, start, stop, self._pace, steps.look):
                    self.report.bytes += size
                return
            except StoreError as error:
                await self._approach(steps, table, stop)
                good = await self._behind(table, steps.next, stop)
                last = stop if good is None else good
                generation = _generation(table, steps.next) or _generation(table, last)
                self._note(ScrubFinding(table, steps.next, last, error.detail, name, generation))
                if good is None:
                    return
                start = good

    async def _approach(self, steps: _Steps, table: Table, stop: bytes) -> None:
        """Read row by row up to the first that cannot be: of a list that failed none came."""
        while True:
            try:
                rows = await read_rows(self._store, table, steps.next, stop, limit=1)
            except StoreError:
                return
            if not rows:
                return
            steps.look(rows)

    async def _behind(self, table: Table, bad: bytes, stop: bytes) -> bytes | None:
        """The first key behind a damaged block from which on rows can be read; None: there is none before ``stop``.

        It is looked for in steps that double, then by halves: one block, or many, cost a few dozen reads.
        """
        width = len(stop) + _TAIL_BYTES.get(table, 16)
        low, end = _number(bad, width), _number(stop, width)
        step = 1
        while low + step < end and not await self._can_read(table, _key(low + step, width), stop):
            step *= 2
        if low + step >= end:
            return None
        bad_at, good_at = low + step // 2, low + step
        while good_at - bad_at > 1:
            middle = (bad_at + good_at) // 2
            if await self._can_read(table, _key(middle, width), stop):
                good_at = middle
            else:
                bad_at = middle
        return _key(good_at, width)

    async def _can_read(self, table: Table, start: bytes, stop: bytes) -> bool:
        try:
            await read_rows(self._store, table, start, stop, limit=1)
        except StoreError:
            return False
        return True

    def _note(self, finding: ScrubFinding) -> None:
        if len(self._found) >= MAX_FINDINGS:
            self.report.more += 1
            return
        self._found.append(finding)
        # What is found is told at once: a round may take days.
        self.report.findings = self._found


class _Steps:
    """Parses the rows of a range; in the thread that reads them."""

    def __init__(self, scrub: Scrub, table: Table, name: TopicName | None, start: bytes) -> None:
        self._scrub = scrub
        self._table = table
        self._name = name
        self.next = start
        """Where the first row stands that has not been read."""
        self._open: ScrubFinding | None = None

    def look(self, rows: list[Row]) -> None:
        for row in rows:
            why = _fault(self._table, row)
            if not why:
                self._open = None
            elif self._open is not None:
                self._open.last, self._open.rows = row[0], (self._open.rows or 0) + 1
            else:
                described = describe(self._table, *row)
                name, generation = self._name or described.name, described.generation
                self._open = ScrubFinding(self._table, row[0], row[0], why, name, generation, 1)
                self._scrub._note(self._open)
        self._scrub.report.rows += len(rows)
        self.next = rows[-1][0] + b"\x00"


def _fault(table: Table, row: Row) -> str:
    """Why a row cannot be parsed; empty: it can."""
    if (table is Table.MESSAGE and is_message(row)) or (table is Table.PAYLOAD and is_payload(row)):
        return ""
    return describe(table, *row).problem or ("" if table is Table.METADATA else "it names no rows of payloads")


def _generation(table: Table, key: bytes) -> int | None:
    """That of a key, or of a place between two keys; None where there is none."""
    at = len(topic_prefix(key))
    if table is Table.METADATA or not at or len(key) < at + 4:
        return None
    return int.from_bytes(key[at : at + 4], "big")


def _shown_place(table: Table, key: bytes) -> str:
    """A place among messages as an id, which need not be a message's; any other in hex."""
    at = len(topic_prefix(key))
    if table is not Table.MESSAGE or not at:
        return key.hex()
    position = key[at + 4 : at + MESSAGE_TAIL_BYTES].ljust(MESSAGE_TAIL_BYTES - 4, b"\x00")
    behind = len(key) > at + MESSAGE_TAIL_BYTES
    return position.hex() + "0" * 19 + ("1" if behind else "0")


def _number(key: bytes, width: int) -> int:
    return int.from_bytes(key[:width].ljust(width, b"\x00"), "big")


def _key(number: int, width: int) -> bytes:
    return number.to_bytes(width, "big")

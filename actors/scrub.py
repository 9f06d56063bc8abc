"""The scrub: reads every row of this instance from the disk and parses it, at a bounded rate, and says what it found.

A block that is damaged fails to be read when somebody needs it, perhaps after the last backup that has its rows was
removed. A round finds it before. Nothing is moved or mended: the store has one copy, and a backup has the other.

A round may take days. It goes on behind a topic whose rows the store does not give just now, and is complete once it has
read those too; after a restart it goes on behind the last topic that it has read.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import not_
from typing import TYPE_CHECKING, Any, Literal

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
from storage.base import StoreError, Unreadable
from storage.cleaning import is_message, is_payload
from storage.damage import approach, behind, last_before, read_around, shown_place
from storage.directory import write_whole
from storage.inspect.describe import describe
from storage.pace import Pace, paced_rows

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from actors.directory import Directory
    from actors.observe import Clock
    from storage.base import Row, Store

log = logging.getLogger(__name__)
#: Before the first round behind a start, which has enough to do.
FIRST_AFTER_S = 3600.0
#: Findings that are kept; further ones are counted. And topics that could not be read and are shown.
MAX_FINDINGS = 1_000
#: Such topics that are named in the log.
MAX_NAMED = 5
#: How far a round is, is written no more often than this; after a crash it goes on from there.
KEEP_EVERY_S = 60.0
#: A round that is older than so many intervals is not gone on with: what it has read is long ago.
MAX_INTERVALS = 4
#: Who scrubs rows of no topic, among instances that share a store.
_NO_TOPIC = TopicName("", "transactions")
_TAIL_BYTES = {Table.MESSAGE: MESSAGE_TAIL_BYTES, Table.PAYLOAD: PAYLOAD_TAIL_BYTES}
_FIRST, _LAST = b"", b"\xff" * 8
#: What a round has reached that has been everywhere: behind the key of any topic.
_EVERYWHERE = b"\xff"


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
    file: str | None = None
    """Where the store keeps them, relative to its directory; None: the store does not say."""

    def kept(self) -> dict[str, object]:
        """As the file of the report has it."""
        return {
            "table": self.table.name,
            "first": self.first.hex(),
            "last": self.last.hex(),
            "why": self.why,
            "name": None if self.name is None else list(self.name),
            "generation": self.generation,
            "rows": self.rows,
            "file": self.file,
        }

    @classmethod
    def of_kept(cls, kept: dict[str, Any]) -> ScrubFinding:
        """The reverse. Raises ValueError, KeyError, TypeError."""
        name = kept["name"]
        return cls(
            Table[kept["table"]],
            bytes.fromhex(kept["first"]),
            bytes.fromhex(kept["last"]),
            str(kept["why"]),
            None if name is None else TopicName(*name),
            kept["generation"],
            kept["rows"],
            kept["file"],
        )

    def shown(self) -> dict[str, object]:
        """Ready for JSON; messages by their ids, other rows by their keys in hex."""
        return {
            "namespace": None if self.name is None else self.name.namespace,
            "topic": None if self.name is None else self.name.topic,
            "generation": self.generation,
            "table": self.table.name.lower(),
            "from": shown_place(self.table, self.first),
            "to": shown_place(self.table, self.last),
            "rows": self.rows,
            "why": self.why,
            "file": self.file,
        }


@dataclass(slots=True)
class ScrubReport:
    """The round that is under way, or the last one."""

    state: Literal["off", "waiting", "running", "stopped"] = "waiting"
    """``stopped``: it could not go on, or not read every topic, and goes on later."""
    started_ms: int | None = None
    last_complete_ms: int | None = None
    rows: int = 0
    bytes: int = 0
    findings: list[ScrubFinding] = field(default_factory=list)
    """Of the round under way, and those of the round before where this one has not been yet."""
    more: int = 0
    """Findings beyond those that are kept."""
    unread: dict[TopicName, str] = field(default_factory=dict)
    """Topics whose rows the store did not give in this round, which says nothing of the rows, and why."""

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
            "unread": [
                {"namespace": name.namespace, "topic": name.topic, "why": why}
                for name, why in islice(self.unread.items(), MAX_FINDINGS)
            ],
            "moreUnread": max(0, len(self.unread) - MAX_FINDINGS),
        }


class Scrub:
    """Rounds over all rows that this instance owns.

    Args:
      interval_s: between the beginnings of two rounds; 0: only when asked.
      file: keeps the last report over restarts; None: nothing does.
    """

    def __init__(
        self,
        store: Store,
        directory: Directory,
        clock: Clock,
        interval_s: int,
        bytes_per_s: int,
        file: Path | None = None,
    ) -> None:
        self._store = store
        self._directory = directory
        self._clock = clock
        self._interval_s = interval_s
        self._pace = Pace(bytes_per_s, is_far=store.traits.shared)
        self._asked = trio.Event()
        self._found: list[ScrubFinding] = []
        self._before: list[ScrubFinding] = []
        """Of the round before."""
        self._has_news = False
        """Whether something was found that is not in the file yet."""
        self._reached = b""
        """The key of the last topic that the round has dealt with; empty: there is none to go on behind."""
        self._kept_s = float("-inf")
        """When the file was written, on the monotonic clock."""
        self._file = file
        self.report = ScrubReport("waiting" if interval_s else "off")
        self._read_kept()

    def start_now(self) -> bool:
        """Begin a round now; False: one is under way."""
        if self.report.state == "running":
            return False
        self._asked.set()
        return True

    async def run(self) -> None:
        """Round after round. One that cannot go on is logged, and goes on later; one that is asked for begins anew."""
        pause_s = FIRST_AFTER_S
        while True:
            with trio.move_on_after(pause_s if self._interval_s else float("inf")):
                await self._asked.wait()
            go_on = not self._asked.is_set() and self._goes_on()
            self._asked = trio.Event()
            begun_s = trio.current_time()
            try:
                is_complete = await self.round(go_on=go_on)
                left_s = self._interval_s - (trio.current_time() - begun_s)
                pause_s = max(60.0, left_s) if is_complete else FIRST_AFTER_S
            except PlainsongError as error:
                self.report.state = "stopped"
                log.warning("scrub stopped, trying again in an hour", extra={"why": str(error)})
                pause_s = FIRST_AFTER_S

    def _goes_on(self) -> bool:
        """Whether the last round did not come to its end, and is gone on with instead of a new one."""
        age_ms = self._clock.now_ms() - (self.report.started_ms or 0)
        if self._reached == _EVERYWHERE:
            # All that it lacks is what it could not read. That must not keep all else from the next round for ever.
            return age_ms < self._interval_s * 1000
        return self._reached != b"" and age_ms < MAX_INTERVALS * self._interval_s * 1000

    async def round(self, *, go_on: bool = False) -> bool:
        """Read every row once; whether that was possible.

        Args:
          go_on: the last round, with what it has found: behind the last topic that it has dealt with, and then those
            that could not be read.
        Raises:
          StoreError: the store failed, or is away, for what is not the rows of one topic.
        """
        report, had = self.report, len(self.report.findings) + self.report.more
        report.state = "running"
        if not (go_on and self._reached):
            await self._begin()
        names, unnamed = await self._topics()
        await self._read_topics(names)
        self._reached = _EVERYWHERE
        if self._is_mine(_NO_TOPIC):
            self._take_back({each.name for each in self._found}.difference(names))
            for start, stop in unnamed:
                await self._rows_of(start, stop, None)
        for each in self._found:
            # Where a whole place cannot be read, its first key may be before that of any row.
            each.file = await self._store.file_of(each.table, each.first)
            each.file = each.file or await self._store.file_of(each.table, each.last)
        if report.unread:
            await self._end_incomplete()
            return False
        report.findings, self._before, self._reached = self._found, [], b""
        report.state, report.last_complete_ms = "waiting" if self._interval_s else "off", self._clock.now_ms()
        await self._keep()
        if had != len(self._found) + report.more or self._found:
            log.warning("scrub found damaged rows", extra={"findings": len(self._found) + report.more})
        log.info("scrub complete", extra={"rows": report.rows, "bytes": report.bytes})
        return True

    async def _begin(self) -> None:
        """A new round; it reads what is of no topic. Raises StoreError."""
        report = self.report
        report.started_ms, report.rows, report.bytes, report.more = self._clock.now_ms(), 0, 0, 0
        report.unread = {}
        self._found, self._before, self._reached = [], report.findings, b""
        if self._is_mine(_NO_TOPIC):
            await self._range(Table.METADATA, _FIRST, _LAST, None)

    async def _read_topics(self, names: Sequence[TopicName]) -> None:
        """Read these topics, but for those that the round has read; one that the store does not give is noted."""
        report, there = self.report, set(names)
        report.unread = {name: why for name, why in report.unread.items() if name in there}
        # First those that were not read yet: the others cost the store's time-out each, while it does not give them.
        left = [name for name in names if metadata_key(name) > self._reached]
        for name in [*left, *report.unread]:
            prefix = metadata_key(name)
            self._take_back({name})
            try:
                if self._is_mine(name):
                    await self._rows_of(prefix, stop_after(prefix), name)
                report.unread.pop(name, None)
            except StoreError as error:
                report.unread[name] = error.detail
                await trio.lowlevel.checkpoint()  # a store that is closed refuses without one
            self._reached = max(self._reached, prefix)
            if trio.current_time() - self._kept_s >= KEEP_EVERY_S:
                await self._keep()

    def _take_back(self, names: Collection[TopicName | None]) -> None:
        """Before rows of topics are read of which the round may have read a part: it finds again what it found there."""
        again = [each.name in names and each.table is not Table.METADATA for each in self._found]
        if any(again):
            taken = [*compress(self._found, again)]
            places = {(each.table, each.first) for each in taken}
            self._before = [*taken, *(each for each in self._before if (each.table, each.first) not in places)]
            self._found = [*compress(self._found, map(not_, again))]
            self._tell()

    async def _end_incomplete(self) -> None:
        """The round has been everywhere, but some topics were not given. What was found before stays told."""
        report = self.report
        report.state = "stopped"
        await self._keep()
        named = ", ".join(map(str, islice(report.unread, MAX_NAMED)))
        log.warning(
            "scrub could not read every topic, trying these again in an hour",
            extra={"topics": len(report.unread), "first": named, "why": next(iter(report.unread.values()))},
        )

    # --- over restarts ------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Write the report; what is wrong with that is only logged: the next round says the same."""
        self._has_news, self._kept_s = False, trio.current_time()
        if self._file is None:
            return
        report = self.report
        kept = {
            "format": 1,
            "startedMs": report.started_ms,
            "lastCompleteMs": report.last_complete_ms,
            "rows": report.rows,
            "bytes": report.bytes,
            "moreFindings": report.more,
            "findings": [each.kept() for each in report.findings],
            # Of a round that has not come to its end: what it has reached, which of the findings are its own, and what
            # it could not read.
            "reached": self._reached.hex(),
            "found": len(self._found),
            "unread": [[*name, why] for name, why in report.unread.items()],
        }
        try:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(write_whole, self._file, json.dumps(kept).encode())
        except OSError as error:
            log.warning("the scrub's report is not kept", extra={"why": str(error)})

    def _read_kept(self) -> None:
        """The report of before the restart, if there is one that can be read."""
        if self._file is None:
            return
        report = self.report
        try:
            kept = json.loads(self._file.read_bytes())
            findings = [ScrubFinding.of_kept(each) for each in kept["findings"]]
            complete_ms = kept["lastCompleteMs"]
            # Earlier versions kept none of these, and began anew after a restart.
            reached, found = bytes.fromhex(kept.get("reached", "")), int(kept.get("found", 0))
            unread = {TopicName(namespace, topic): str(why) for namespace, topic, why in kept.get("unread", ())}
            report.started_ms, report.last_complete_ms = kept["startedMs"], complete_ms and int(complete_ms)
            report.rows, report.bytes, report.more = int(kept["rows"]), int(kept["bytes"]), int(kept["moreFindings"])
            report.findings, report.unread = findings[:MAX_FINDINGS], unread
            self._found, self._before, self._reached = report.findings[:found], report.findings[found:], reached
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the scrub's last report cannot be read", extra={"why": str(error)})

    def _is_mine(self, name: TopicName) -> bool:
        return self._directory.environment.ownership.is_mine(name)

    async def _topics(self) -> tuple[list[TopicName], list[tuple[bytes, bytes]]]:
        """The topics, and ranges of keys with the rows of those whose names cannot be read, which is noted already."""
        found: list[TopicName] = []
        keys = [b""]

        def take(rows: Sequence[Row]) -> None:
            for key, _ in rows:
                try:
                    found.append(topic_of(key)[0])
                except DamagedRow:
                    continue
                keys.append(key)

        start, stop = topic_range()
        gaps = await read_around(self._store, Table.METADATA, start, stop, stop, take)
        unnamed = []
        for gap in gaps:
            # Rows of a topic begin with its key. Those of the topics beside a gap are no part of it.
            at = bisect_left(keys, gap.start)
            before, after = keys[at - 1], keys[at] if at < len(keys) else stop
            unnamed.append((stop_after(before) if before else start, after))
        return found, unnamed

    async def _rows_of(self, start: bytes, stop: bytes, name: TopicName | None) -> None:
        for table in (Table.MESSAGE, Table.PAYLOAD):
            await self._range(table, start, stop, name)

    async def _range(self, table: Table, start: bytes, stop: bytes, name: TopicName | None) -> None:
        """Read a range to its end, past whatever cannot be read."""
        while True:
            steps = _Steps(self, table, name, start)
            try:
                async for size in paced_rows(self._store, table, start, stop, self._pace, steps.look):
                    self.report.bytes += size
                    if self._has_news:
                        await self._keep()  # a round may take days, and be cut off by the end of the daemon
                return
            except Unreadable as error:
                await approach(self._store, table, steps.next, stop, steps.look)
                good = await behind(self._store, table, steps.next, stop)
                last = _end_of(table, start, stop) if good is None else last_before(table, good)
                generation = _generation(table, steps.next) or _generation(table, last)
                self._note(ScrubFinding(table, steps.next, last, error.detail, name, generation))
                await self._keep()
                if good is None:
                    return
                start = good

    async def forget(self, name: TopicName, ranges: Sequence[tuple[Table, bytes, bytes]]) -> None:
        """The rows of these ranges of a topic are gone, and with them what was found there."""

        def is_gone(each: ScrubFinding) -> bool:
            return each.name == name and any(
                each.table is table and start <= _first_of(each, start) < stop for table, start, stop in ranges
            )

        self._found = [each for each in self._found if not is_gone(each)]
        self._before = [each for each in self._before if not is_gone(each)]
        self.report.findings = [each for each in self.report.findings if not is_gone(each)]
        await self._keep()

    def _note(self, finding: ScrubFinding) -> None:
        if len(self._found) >= MAX_FINDINGS:
            self.report.more += 1
            return
        self._found.append(finding)
        self._tell()
        self._has_news = True

    def _tell(self) -> None:
        """What is found is told at once; what the round before has found, until this one has been everywhere."""
        places = {(each.table, each.first) for each in self._found}
        self.report.findings = [
            *self._found,
            *(each for each in self._before if (each.table, each.first) not in places),
        ][:MAX_FINDINGS]


class _Steps:
    """Parses the rows of a range; in the thread that reads them."""

    def __init__(self, scrub: Scrub, table: Table, name: TopicName | None, start: bytes) -> None:
        self._scrub = scrub
        self._table = table
        self._name = name
        self.next = start
        """Where the first row stands that has not been read."""
        self._open: ScrubFinding | None = None

    def look(self, rows: Sequence[Row]) -> None:
        for row in rows:
            why = _fault(self._table, row)
            if not why:
                self._open = None
                continue
            described = describe(self._table, *row)
            name, generation = self._name or described.name, described.generation
            if self._open is not None and (self._open.name, self._open.generation) == (name, generation):
                self._open.last, self._open.rows = row[0], (self._open.rows or 0) + 1
            else:
                self._open = ScrubFinding(self._table, row[0], row[0], why, name, generation, 1)
                self._scrub._note(self._open)
        self._scrub.report.rows += len(rows)
        self.next = rows[-1][0] + b"\x00"


def _fault(table: Table, row: Row) -> str:
    """Why a row cannot be parsed; empty: it can."""
    if (table is Table.MESSAGE and is_message(row)) or (table is Table.PAYLOAD and is_payload(row)):
        return ""
    return describe(table, *row).problem or ("" if table is Table.METADATA else "it names no rows of payloads")


def _end_of(table: Table, start: bytes, stop: bytes) -> bytes:
    """The last key that a row of a topic can have; of other rows, where the range ends."""
    size = len(topic_prefix(start))
    return start[:size] + b"\xff" * _TAIL_BYTES[table] if size and table in _TAIL_BYTES else stop


def _first_of(finding: ScrubFinding, beside: bytes) -> bytes:
    """Where a finding begins; one from the beginning of a topic's rows, in the generation of the key ``beside`` it."""
    size = len(topic_prefix(beside)) + 4
    return finding.first if len(finding.first) >= size else beside[:size].ljust(len(beside), b"\x00")


def _generation(table: Table, key: bytes) -> int | None:
    """That of a key, or of a place between two keys; None where there is none."""
    at = len(topic_prefix(key))
    if table is Table.METADATA or not at or len(key) < at + 4:
        return None
    return int.from_bytes(key[at : at + 4], "big")

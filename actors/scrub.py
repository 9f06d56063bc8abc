"""The scrub: reads every row of this instance from disk and parses it, at a bounded rate, and reports damage.

Without it, a damaged block is noticed only when a reader needs it, perhaps after the last backup with its rows was
removed. The scrub repairs nothing: the store has only one copy, and any other is in a backup.

A round may take days. It skips topics whose rows the store cannot return at present, and is complete once it has read
those too. After a restart it continues after the last topic that it has read.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import compress, islice
from math import inf
from operator import not_
from typing import TYPE_CHECKING, Any, Literal

import trio

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.keys import (
    DamagedRow,
    metadata_key,
    stop_after,
    topic_of,
    topic_prefix,
    topic_range,
)
from plainsong.protocol.names import TopicName
from storage.base import SERVICE_NAME, StoreError, Unreadable
from storage.cleaning import is_message, is_payload
from storage.damage import TAIL_BYTES, approach, behind, last_before, read_around, shown_place
from storage.directory import write_whole
from storage.inspect.describe import describe
from storage.pace import Pace, paced_rows
from storage.threaded import in_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from actors.directory import Directory
    from actors.observe import Clock
    from plainsong.protocol.answers.service import ScrubFindingRow, ScrubState
    from storage.base import Row, Store

log = logging.getLogger(__name__)
#: Delay of the first round, so as not to add load to the start; also the delay before a retry.
FIRST_AFTER_S = 3600.0
#: How many findings are kept, the rest is only counted; and how many unreadable topics are shown.
MAX_FINDINGS = 1_000
#: Unreadable topics named in the log.
MAX_NAMED = 5
#: The minimum interval between writes of a round's progress, from which it continues after a crash.
KEEP_EVERY_S = 60.0
#: A round older than this number of intervals is not continued: its first reads are too long ago.
MAX_INTERVALS = 4
_FIRST, _LAST = b"", b"\xff" * 8
_SHOWN_TABLES: dict[Table, Literal["metadata", "message", "payload"]] = {
    Table.METADATA: "metadata",
    Table.MESSAGE: "message",
    Table.PAYLOAD: "payload",
}
#: The value of ``_reached`` once a round has passed all topics: it sorts after the key of any topic.
_EVERYWHERE = b"\xff"


@dataclass(slots=True)
class ScrubFinding:
    """Adjacent rows of a table that cannot be read or parsed."""

    table: Table
    first: bytes
    """The key of the first of them, or the first that may be damaged."""
    last: bytes
    why: str
    name: TopicName | None = None
    generation: int | None = None
    rows: int | None = None
    """None: unknown."""
    file: str | None = None
    """The store's file with these rows, relative to its directory; None: unknown."""

    def kept(self) -> dict[str, object]:
        """Return the finding in the form of the report's file."""
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
        """Parse the result of ``kept``. Raises ValueError, KeyError, TypeError."""
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

    def shown(self) -> ScrubFindingRow:
        """Return the finding ready for JSON, with messages by id, and other rows by key in hex."""
        return {
            "namespace": None if self.name is None else self.name.namespace,
            "topic": None if self.name is None else self.name.topic,
            "generation": self.generation,
            "table": _SHOWN_TABLES[self.table],
            "from": shown_place(self.table, self.first),
            "to": shown_place(self.table, self.last),
            "rows": self.rows,
            "why": self.why,
            "file": self.file,
        }


@dataclass(slots=True)
class ScrubReport:
    """The round under way, or the last one."""

    state: Literal["off", "waiting", "running", "stopped"] = "waiting"
    """``stopped``: it could not continue, or could not read every topic; it continues later."""
    started_ms: int | None = None
    last_complete_ms: int | None = None
    rows: int = 0
    bytes: int = 0
    findings: list[ScrubFinding] = field(default_factory=list)
    """Findings of the round under way, and those of the previous round in the part it has not reached yet."""
    more: int = 0
    """The number of findings that were not kept."""
    unread: dict[TopicName, str] = field(default_factory=dict)
    """Topics whose rows the store could not return in this round, and why; the rows may be intact."""

    def shown(self) -> ScrubState:
        """Return the report ready for JSON."""
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
      interval_s: between the starts of two rounds; 0: only on request.
      file: stores the last report across restarts; None if it is not stored.
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
        """Findings of the previous round that this one has not confirmed or refuted yet."""
        self._has_news = False
        """True if a finding is not in the file yet."""
        self._reached = b""
        """The key of the last topic that the round has handled; empty: there is no round to continue."""
        self._kept_s = float("-inf")
        """When the file was last written, on the monotonic clock."""
        self._file = file
        self.report = ScrubReport("waiting" if interval_s else "off")
        self._read_kept()

    def start_now(self) -> bool:
        """Begin a round now; return False if one is under way."""
        if self.report.state == "running":
            return False
        self._asked.set()
        return True

    async def run(self) -> None:
        """Run rounds until cancelled. A failed round is logged and continued later; a requested round starts over."""
        pause_s = FIRST_AFTER_S
        while True:
            with trio.move_on_after(pause_s if self._interval_s else float("inf")):
                await self._asked.wait()
            go_on = not self._asked.is_set() and self._continues()
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

    def _continues(self) -> bool:
        """Return True if the last round did not end and is recent enough to be continued."""
        age_ms = self._clock.now_ms() - (self.report.started_ms or 0)
        if self._reached == _EVERYWHERE:
            # Only unreadable topics are missing. They must not delay the next round forever.
            return age_ms < self._interval_s * 1000
        return self._reached != b"" and age_ms < MAX_INTERVALS * self._interval_s * 1000

    async def round(self, *, go_on: bool = False) -> bool:
        """Read every row once; return True if all could be read.

        Args:
          go_on: continue the last round, with its findings, after the last topic that it has handled; then read the
            topics that it could not read.
        Raises:
          StoreError: the store failed, or is unavailable, for rows that belong to no single topic.
        """
        report, had = self.report, len(self.report.findings) + self.report.more
        report.state = "running"
        if not (go_on and self._reached):
            await self._begin()
        names, unnamed = await self._topics()
        await self._read_topics(names)
        self._reached = _EVERYWHERE
        if self._is_mine(SERVICE_NAME):  # on a shared store, its owner scrubs the rows that belong to no topic
            self._take_back({each.name for each in self._found}.difference(names))
            for start, stop in unnamed:
                await self._rows_of(start, stop, None)
        for each in self._found:
            # The first key of an unreadable range may sort before any row.
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
        """Begin a new round, and read the rows that belong to no topic. Raises StoreError."""
        report = self.report
        report.started_ms, report.rows, report.bytes, report.more = self._clock.now_ms(), 0, 0, 0
        report.unread = {}
        self._found, self._before, self._reached = [], report.findings, b""
        if self._is_mine(SERVICE_NAME):
            await self._range(Table.METADATA, _FIRST, _LAST, None)

    async def _read_topics(self, names: Sequence[TopicName]) -> None:
        """Read the topics that the round has not read yet, and note those that the store cannot return."""
        report, there = self.report, set(names)
        report.unread = {name: why for name, why in report.unread.items() if name in there}
        # Failed topics last: each costs the store's time-out while it cannot return them.
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
                await trio.lowlevel.checkpoint()  # a closed store raises without one
            self._reached = max(self._reached, prefix)
            if trio.current_time() - self._kept_s >= KEEP_EVERY_S:
                await self._keep()

    def _take_back(self, names: Collection[TopicName | None]) -> None:
        """Move the findings of topics back to those of the previous round, before these topics are read again."""
        again = [each.name in names and each.table is not Table.METADATA for each in self._found]
        if any(again):
            taken = [*compress(self._found, again)]
            places = {(each.table, each.first) for each in taken}
            self._before = [*taken, *(each for each in self._before if (each.table, each.first) not in places)]
            self._found = [*compress(self._found, map(not_, again))]
            self._tell()

    async def _end_incomplete(self) -> None:
        """End a round in which some topics could not be read. Earlier findings stay in the report."""
        report = self.report
        report.state = "stopped"
        await self._keep()
        named = ", ".join(map(str, islice(report.unread, MAX_NAMED)))
        log.warning(
            "scrub could not read every topic, trying these again in an hour",
            extra={"topics": len(report.unread), "first": named, "why": next(iter(report.unread.values()))},
        )

    # --- across restarts ----------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Write the report. A failure is only logged: the next round finds the same."""
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
            # State of an unfinished round: position, how many of the findings are its own, unreadable topics.
            "reached": self._reached.hex(),
            "found": len(self._found),
            "unread": [[*name, why] for name, why in report.unread.items()],
        }
        try:
            with trio.CancelScope(shield=True):
                await in_thread(write_whole, self._file, json.dumps(kept).encode(), max_wait_s=inf)
        except OSError as error:
            log.warning("the scrub's report was not saved", extra={"why": str(error)})

    def _read_kept(self) -> None:
        """Load the report from before the restart, if there is one that can be read."""
        if self._file is None:
            return
        report = self.report
        try:
            kept = json.loads(self._file.read_bytes())
            findings = [ScrubFinding.of_kept(each) for each in kept["findings"]]
            complete_ms = kept["lastCompleteMs"]
            # Files of earlier versions have none of these; the round then starts over.
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
        """Return the topics, and key ranges that may have rows of topics with unreadable names (noted already)."""
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
            # Rows of a topic begin with its key, so narrow a gap to exclude the rows of the topics next to it.
            at = bisect_left(keys, gap.start)
            before, after = keys[at - 1], keys[at] if at < len(keys) else stop
            unnamed.append((stop_after(before) if before else start, after))
        return found, unnamed

    async def _rows_of(self, start: bytes, stop: bytes, name: TopicName | None) -> None:
        for table in (Table.MESSAGE, Table.PAYLOAD):
            await self._range(table, start, stop, name)

    async def _range(self, table: Table, start: bytes, stop: bytes, name: TopicName | None) -> None:
        """Read a range to its end, past unreadable parts."""
        while True:
            steps = _Steps(self, table, name, start)
            try:
                async for size in paced_rows(self._store, table, start, stop, self._pace, steps.look):
                    self.report.bytes += size
                    if self._has_news:
                        await self._keep()  # a round may take days, and the daemon may stop before it ends
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
        """Drop the findings in ranges of a topic whose rows were removed."""

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
        """Update the reported findings: those of this round at once, then those of the previous one until it ends."""
        places = {(each.table, each.first) for each in self._found}
        self.report.findings = [
            *self._found,
            *(each for each in self._before if (each.table, each.first) not in places),
        ][:MAX_FINDINGS]


class _Steps:
    """Parses the rows of a range, in the thread that reads them."""

    def __init__(self, scrub: Scrub, table: Table, name: TopicName | None, start: bytes) -> None:
        self._scrub = scrub
        self._table = table
        self._name = name
        self.next = start
        """The key from which rows have not been read yet."""
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
    """Return why a row cannot be parsed; empty if it can."""
    if (table is Table.MESSAGE and is_message(row)) or (table is Table.PAYLOAD and is_payload(row)):
        return ""
    return describe(table, *row).problem or ("" if table is Table.METADATA else "it names no rows of payloads")


def _end_of(table: Table, start: bytes, stop: bytes) -> bytes:
    """Return the last key that a row of the topic can have; for rows of no topic, the end of the range."""
    size = len(topic_prefix(start))
    return start[:size] + b"\xff" * TAIL_BYTES[table] if size and table in TAIL_BYTES else stop


def _first_of(finding: ScrubFinding, beside: bytes) -> bytes:
    """Return the first key of a finding; if that has no generation, the first key in the generation of ``beside``."""
    size = len(topic_prefix(beside)) + 4
    return finding.first if len(finding.first) >= size else beside[:size].ljust(len(beside), b"\x00")


def _generation(table: Table, key: bytes) -> int | None:
    """Return the generation in a key, or in a position between two keys; None if there is none."""
    at = len(topic_prefix(key))
    if table is Table.METADATA or not at or len(key) < at + 4:
        return None
    return int.from_bytes(key[at : at + 4], "big")

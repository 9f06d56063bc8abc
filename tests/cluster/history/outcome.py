"""The final state that each kind of reader must see, and the time from which each message was certainly visible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from tests.cluster.history.records import History, Poll, Row, Transaction, Write

Unit = Transaction | Write
"""A set of messages that become visible together: a transaction for committed readers, a request for others."""
Face = tuple[str, bool]
"""``(topic, committed)``: a topic as seen by committed or by uncommitted readers."""


@dataclass(slots=True)
class Stretch:
    """The messages of a log that one kind of reader must see, in log order."""

    ids: list[bytes]
    payloads: list[bytes]
    units: list[Unit]
    last_at: dict[Unit, int]
    """Index of each unit's last message."""
    known_s: list[float]
    """The time from which each message was certainly visible."""
    soonest_s: list[float]
    """Minimum of ``known_s`` from each index on."""


class Outcome:
    """A history's logs, with an index of the requests."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.writes = {payload: write for write in history.writes for payload in write.payloads}
        self.by_pointer = {pointer: each for each in history.transactions for pointer in each.pointers}
        self.rows = {
            topic: {payload: row for row in rows if (payload := row[1])} for topic, rows in history.logs.items()
        }
        self.seen_s: dict[tuple[Unit, bool], float] = {}
        """The time at which a reader of that kind first saw part of a unit."""
        self._see()
        self.stretches = {(topic, committed): self._stretch(topic, committed) for topic, committed in self._faces()}

    def unit(self, write: Write, committed: bool) -> Unit:
        return write.transaction if committed and write.transaction is not None else write

    def row(self, write: Write, payload: bytes) -> Row | None:
        """Return a payload's row in the final log; None if it is missing."""
        return self.rows.get(write.topic, {}).get(payload)

    def places(self, write: Write) -> list[Row]:
        """Return the rows of a write that are in the final log."""
        return [row for payload in write.payloads if (row := self.row(write, payload)) is not None]

    def told_s(self, unit: Unit, committed: bool) -> float:
        """Return when a client first got a response that implies visibility for such readers; ``inf`` if never."""
        if isinstance(unit, Transaction):
            return unit.committed_s
        if committed and unit.transaction is not None:
            return inf
        return unit.ended_s

    def units_of(self, poll: Poll) -> set[Unit]:
        """Return the units with at least one message in the poll's result."""
        return {
            self.unit(write, poll.committed)
            for _, payload in poll.messages
            if (write := self.writes.get(payload)) is not None
        }

    def _faces(self) -> Iterator[Face]:
        for topic in self.history.logs:
            yield from ((topic, False), (topic, True))

    def _see(self) -> None:
        for poll in self.history.polls:
            for unit in self.units_of(poll):
                key = unit, poll.committed
                self.seen_s[key] = min(self.seen_s.get(key, inf), poll.ended_s)

    def _stretch(self, topic: str, committed: bool) -> Stretch:
        found: list[tuple[bytes, bytes, Unit]] = []
        for message_id, payload, pointer in self.history.logs[topic]:
            write = self.writes.get(payload)
            if write is not None and (not committed or self._is_committed(pointer)):
                found.append((message_id, payload, self.unit(write, committed)))
        units = [unit for _, _, unit in found]
        known_s = [min(self.told_s(unit, committed), self.seen_s.get((unit, committed), inf)) for unit in units]
        soonest_s = list(accumulate(reversed(known_s), min))[::-1]
        last_at = {unit: at for at, unit in enumerate(units)}
        return Stretch([i for i, _, _ in found], [p for _, p, _ in found], units, last_at, known_s, soonest_s)

    def _is_committed(self, pointer: int) -> bool:
        if pointer <= 0:
            return pointer == 0
        owner = self.by_pointer.get(pointer)
        return owner is not None and owner.state == "committed"

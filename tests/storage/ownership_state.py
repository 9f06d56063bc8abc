"""The rules and the state of the model of the HBase store's protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Identifies the commit that wrote something: epoch and serial.
Stamp = tuple[int, int]
MESSAGES, PAYLOADS = "messages", "payloads"


@dataclass(frozen=True)
class Rules:
    """The parts of the protocol."""

    put_if_absent: bool = True
    """If true, rows are put only if absent; otherwise unconditionally."""
    only_void_replaced: bool = True
    """If true, an existing row is replaced only if it will never count; otherwise always."""
    verified: bool = True
    """If true, a request is answered when the head has moved; otherwise when the rows are written."""
    compared: bool = True
    """If true, the head is compared and set; otherwise put."""
    filtered: bool = True
    """If true, the head determines which message rows count; otherwise all do."""
    payloads_filtered: bool = True
    """If true, the head determines which payload rows count; otherwise all do."""
    two_cells: bool = True
    """If true, metadata has two cells, and the head determines which one counts; otherwise one, which always counts."""
    later_respected: bool = True
    """If true, an owner that finds a later owner's metadata considers itself replaced; otherwise it continues."""
    fences_kept: bool = True
    """If true, fences that a claim drops from the head are kept; otherwise only the last owner's commits are known."""
    new_epoch: bool = True
    """If true, a reopened topic gets a new epoch; otherwise its old one."""
    epoch_above: bool = True
    """If true, an instance uses only allocated epochs above the head's; otherwise any that remains."""
    kind_said: bool = True
    """If true, the existence of metadata is recorded next to the head before its commit; otherwise some time later."""


class Head(NamedTuple):
    """The topic's head, with the fences."""

    last: Stamp = (0, 0)
    fences: tuple[tuple[int, int], ...] = ()

    def counts(self, stamp: Stamp) -> bool:
        epoch, serial = stamp
        return serial <= (self.last[1] if epoch == self.last[0] else dict(self.fences).get(epoch, 0))

    def claimed(self, epoch: int, *, keep: bool) -> Head:
        return Head((epoch, 0), (*(self.fences if keep else ()), self.last) if self.last[1] else self.fences)


class Row(NamedTuple):
    """An HBase row."""

    stamp: Stamp
    what: tuple[int, ...]
    """A message's number; for a reference ``(-1, first, last)``, the payload rows that it publishes."""


class Cell(NamedTuple):
    """A metadata row: the completed requests, and their positions."""

    stamp: Stamp
    done: int
    first: int
    last: int


class Flight(NamedTuple):
    """A put in flight."""

    table: str
    """``messages``, ``payloads``, ``cell``, ``kind`` or ``head``."""
    key: int
    before: object
    after: object
    epoch: int


def order(flight: Flight) -> tuple[object, ...]:
    """Return a sort key for puts, because the order of a set differs between runs."""
    return flight.epoch, flight.table, flight.key, flight.after[0]  # type: ignore[index]  # a row, a cell or a head


class Owner(NamedTuple):
    """An instance that believes it owns the topic."""

    number: int
    head: Head
    phase: str = "claimed"
    """claimed → metadata → idle → putting → moving → idle"""
    done: int = 0
    first: int = 0
    last: int = 0
    """Position of the last row that it has seen."""
    cells: tuple[Cell | None, Cell | None] = (None, None)
    waits: frozenset[Flight] = frozenset()
    said: bool = False
    """True if it has seen that the existence of metadata is recorded."""


class State(NamedTuple):
    """The whole state."""

    head: Head = Head()
    rows: frozenset[tuple[str, int, Row]] = frozenset()
    cells: tuple[Cell | None, Cell | None] = (None, None)
    flights: frozenset[Flight] = frozenset()
    owners: tuple[Owner, ...] = ()
    said: bool = False
    """True if the existence of metadata is recorded next to the head."""
    claims: int = 0
    given: frozenset[int] = frozenset()
    """Used epochs."""
    told: int = 0
    """Requests that were acknowledged to the client."""
    asked: int = 0
    """Number of the owner that the client waits for; 0: none."""
    position: int = 0
    read: tuple[int, ...] = ()
    """The reader's position, and the messages that it has read."""

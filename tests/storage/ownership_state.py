"""What the model of the HBase store's protocol consists of: its rules, and everything there is at a moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Of which commit something is: epoch and serial.
Stamp = tuple[int, int]
MESSAGES, PAYLOADS = "messages", "payloads"


@dataclass(frozen=True)
class Rules:
    """What the protocol is made of."""

    put_if_absent: bool = True
    """Rows are put where there is none; else over whatever is there."""
    only_void_replaced: bool = True
    """Where there is one, only such is replaced as will never count; else any."""
    verified: bool = True
    """An answer is given when the head was moved; else when the rows are there."""
    compared: bool = True
    """The head is compared and set; else put."""
    filtered: bool = True
    """Message rows count as the head says; else all do."""
    payloads_filtered: bool = True
    """Payload rows too."""
    two_cells: bool = True
    """Metadata has two cells, of which one counts as the head says; else one, which counts as it is."""
    later_respected: bool = True
    """An owner that finds a later one's metadata knows that it was replaced; else it goes on."""
    fences_kept: bool = True
    """What the head loses at a claim is kept; else only the last owner's commits are known."""
    new_epoch: bool = True
    """A topic that is opened again gets an epoch of its own; else the one it had."""
    epoch_above: bool = True
    """Epochs that an instance took before are given only above the head's; else whatever it has left."""
    kind_said: bool = True
    """That there is metadata is said beside the head before a commit with it takes place; else some time later."""


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
    """A row of HBase."""

    stamp: Stamp
    what: tuple[int, ...]
    """A message's number; of a reference (-1, first, last): the payload rows it publishes."""


class Cell(NamedTuple):
    """A row of metadata: what of the requests is done, and where."""

    stamp: Stamp
    done: int
    first: int
    last: int


class Flight(NamedTuple):
    """A put that is under way."""

    table: str
    """``messages``, ``payloads``, ``cell``, ``kind`` or ``head``."""
    key: int
    before: object
    after: object
    epoch: int


def order(flight: Flight) -> tuple[object, ...]:
    """By which puts are sorted: sets have no order that is the same in every run."""
    return flight.epoch, flight.table, flight.key, flight.after[0]  # type: ignore[index]  # a row, a cell or a head


class Owner(NamedTuple):
    """An instance that believes to own the topic."""

    number: int
    head: Head
    phase: str = "claimed"
    """claimed → metadata → idle → putting → moving → idle"""
    done: int = 0
    first: int = 0
    last: int = 0
    """Position of the last row that it knows of."""
    cells: tuple[Cell | None, Cell | None] = (None, None)
    waits: frozenset[Flight] = frozenset()
    said: bool = False
    """Whether it knows that it is said that there is metadata."""


class State(NamedTuple):
    """Everything there is."""

    head: Head = Head()
    rows: frozenset[tuple[str, int, Row]] = frozenset()
    cells: tuple[Cell | None, Cell | None] = (None, None)
    flights: frozenset[Flight] = frozenset()
    owners: tuple[Owner, ...] = ()
    said: bool = False
    """Whether it is said beside the head that there is metadata."""
    claims: int = 0
    given: frozenset[int] = frozenset()
    """Epochs that were given."""
    told: int = 0
    """Requests that the client knows are done."""
    asked: int = 0
    """The owner it waits for, by number; 0: none."""
    position: int = 0
    read: tuple[int, ...] = ()
    """How far the reader is, and what it has been given."""

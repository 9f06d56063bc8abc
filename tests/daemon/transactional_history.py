"""The history of transactions over several topics: the writes of their clients with the answers, and the reads.

The last reading of a topic, made after all work has ended, is its *log*: all messages ever, with their write pointers.
Payloads must be unique across all topics. ``transactional_checker.check`` finds what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND

Kind = Literal[
    "lost",  # reported as stored or committed, and missing
    "resurrected",  # never sent, refused, or reported as undone, and there
    "doubled",  # a message is there twice
    "not turned",  # a message of an aborted transaction that was not rolled back
    "unordered",  # ids do not strictly increase in a page, or start before it
    "dirty",  # a transactional reader saw an uncommitted message
    "vanished",  # an uncommitted reader saw what is not in the log
    "passed over",  # a reader skipped a message that is in its log
    "torn",  # one part of a transaction or request was seen, and another was not
    "late",  # visible before the poll began, and missing at its end
    "held forever",  # held by a transaction that is decided, unknown, or past its time-out
]


class Anomaly(NamedTuple):
    """An observation that must never happen."""

    kind: Kind
    text: str


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction and the answers to its client. Times are seconds of one monotonic clock."""

    id: int
    expires_ms: int
    pointers: set[int] = field(default_factory=set)
    asked_s: float = inf
    """When its commit was first requested."""
    committed_s: float = inf
    """When an answer first reported it as committed."""
    undone_s: float = inf
    """When an answer first reported it as aborted or invalid."""
    state: str = ""
    """Its state in the end, according to the service."""

    def __post_init__(self) -> None:
        self.pointers.add(self.id)


@dataclass(slots=True, eq=False)
class Request:
    """The messages of one publish or store; ``outcome``: whether they are in the log."""

    topic: str
    payloads: tuple[bytes, ...]
    transaction: Transaction | None = None
    outcome: Literal["acknowledged", "unknown", "refused"] = "unknown"
    ended_s: float = inf
    """When it was acknowledged."""
    rolled_back: Literal["no", "perhaps", "yes"] = "no"
    """Rolled back on its own, by the range of its rows."""


@dataclass(frozen=True, slots=True)
class Page:
    """A poll and its answer. ``since`` is its inclusive start."""

    reader: str
    topic: str
    messages: tuple[tuple[bytes, bytes], ...]
    transactional: bool
    view_s: tuple[float, float]
    """The view was made between these times: around the poll, or the snapshot's begin."""
    asked_s: float
    answered_s: float
    asked_ms: int = 0
    since: bytes = FIRST_BOUND
    through: bytes | None = None
    end: str = "end"
    held_by: int | None = None
    view: int | None = None
    """Pages with the same number were read with the same view."""


@dataclass(slots=True)
class Log:
    """All rows of a topic, read after all work has ended: ``(id, payload, pointer)``, negative if rolled back."""

    topic: str
    rows: Sequence[tuple[bytes, bytes, int]]

"""The history of transactions over several topics: their clients' writes with the answers, and the reads.

A topic's last read, made after all work has ended, is its *log*: all messages ever written, with their write pointers.
Payloads must be unique across all topics. ``transactional_checker.check`` finds the anomalies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND

Kind = Literal[
    "lost",  # reported as stored or committed, but missing
    "resurrected",  # never sent, refused, or reported as undone, but there
    "doubled",  # a message occurs twice
    "not turned",  # a message of an aborted transaction that was not rolled back
    "unordered",  # ids do not strictly increase in a page, or start before it
    "dirty",  # a transactional reader saw an uncommitted message
    "vanished",  # an uncommitted reader saw a message that is not in the log
    "passed over",  # a reader skipped a message that is in its log
    "torn",  # one part of a transaction or request was seen, but not another
    "late",  # visible before the poll began, but missing at its end
    "held forever",  # blocked by a transaction that is decided, unknown, or past its time-out
]


class Anomaly(NamedTuple):
    """An observation that must never happen."""

    kind: Kind
    text: str


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction and the answers to its client. Times are in seconds of one monotonic clock."""

    id: int
    expires_ms: int
    pointers: set[int] = field(default_factory=set)
    asked_s: float = inf
    """The time at which its commit was first requested."""
    committed_s: float = inf
    """The time at which an answer first reported it as committed."""
    undone_s: float = inf
    """The time at which an answer first reported it as aborted or invalid."""
    state: str = ""
    """Its final state, according to the service."""

    def __post_init__(self) -> None:
        self.pointers.add(self.id)


@dataclass(slots=True, eq=False)
class Request:
    """The messages of one publish or store; ``outcome`` says whether they are in the log."""

    topic: str
    payloads: tuple[bytes, ...]
    transaction: Transaction | None = None
    outcome: Literal["acknowledged", "unknown", "refused"] = "unknown"
    ended_s: float = inf
    """The time at which it was acknowledged."""
    rolled_back: Literal["no", "perhaps", "yes"] = "no"
    """Rollback of this request alone, by the range of its rows."""


@dataclass(frozen=True, slots=True)
class Page:
    """A poll and its answer. ``since`` is its inclusive start."""

    reader: str
    topic: str
    messages: tuple[tuple[bytes, bytes], ...]
    transactional: bool
    view_s: tuple[float, float]
    """The view was taken between these times, which surround the poll or the snapshot's begin."""
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

"""The history of transactions over several topics: what their clients wrote and were told, and what readers saw.

The last reading of a topic, made when all is quiet, is its *log*: every message there ever was, with its write pointer.
Payloads must be unlike each other, in all topics together. ``transactional_checker.check`` says what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND

Kind = Literal[
    "lost",  # told it was there, or committed, and it is not
    "resurrected",  # never sent, refused, or told it was undone, and there all the same
    "doubled",  # a message is there twice
    "not turned",  # a message of an aborted transaction that was not rolled back
    "unordered",  # ids do not strictly increase in a page, or start before it
    "dirty",  # a transactional reader saw what was not committed, or not yet
    "vanished",  # an uncommitted reader saw what is not in the log
    "passed over",  # a reader went past a message that is in its log
    "torn",  # a part of a transaction, or of a request, was seen and another part was not
    "late",  # there before the reader asked, and it was told there is no more
    "held for ever",  # held by what is decided, unknown, or was to be over by then
]


class Anomaly(NamedTuple):
    """One thing that must never be."""

    kind: Kind
    text: str


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction and what its client knows of it. Times are of one monotonic clock, in seconds."""

    id: int
    expires_ms: int
    pointers: set[int] = field(default_factory=set)
    asked_s: float = inf
    """When its commit was first asked for."""
    committed_s: float = inf
    """When somebody was first told that it is committed."""
    undone_s: float = inf
    """When somebody was first told that it is aborted or invalid."""
    state: str = ""
    """What the service says in the end."""

    def __post_init__(self) -> None:
        self.pointers.add(self.id)


@dataclass(slots=True, eq=False)
class Request:
    """The messages of one publish, or store; ``outcome`` is about their being in the log."""

    topic: str
    payloads: tuple[bytes, ...]
    transaction: Transaction | None = None
    outcome: Literal["acknowledged", "unknown", "refused"] = "unknown"
    ended_s: float = inf
    """When it was acknowledged."""
    rolled_back: Literal["no", "perhaps", "yes"] = "no"
    """By itself, by the range of its rows."""


@dataclass(frozen=True, slots=True)
class Page:
    """What one poll was answered. ``since`` is its inclusive start."""

    reader: str
    topic: str
    messages: tuple[tuple[bytes, bytes], ...]
    transactional: bool
    view_s: tuple[float, float]
    """The view was made after the first of these and before the second: around the poll, or the snapshot's begin."""
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
    """All of a topic, read when all is quiet: ``(id, payload, pointer)``, negative when rolled back."""

    topic: str
    rows: Sequence[tuple[bytes, bytes, int]]

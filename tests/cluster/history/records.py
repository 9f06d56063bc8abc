"""The records of a cluster's clients: every write and its outcome, every transaction, every page that was read.

All times are seconds of one monotonic clock, that of the machine on which all clients run. Payloads must be unique
across all topics. A topic is read a last time after all clients have ended, and the result is its *log*;
``checker.check`` compares the other records with it, and returns the contradictions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND

Kind = Literal[
    "lost",  # acknowledged, or committed according to a response, and missing in the end
    "vanished",  # read, and missing in the end
    "doubled",  # a message exists twice, or two messages got the same id
    "applied anyway",  # refused, reported as undone, or never sent, and yet present
    "split",  # only part of a request or a transaction is present, or was seen
    "reordered",  # a page is out of order, two readers saw different orders, or a producer's later sequence came first
    "backwards",  # a request sent after a response got a smaller id
    "behind",  # a message is in the log at a place that a reader had passed
    "uncommitted",  # a committed reader saw an uncommitted message, or one whose commit had not been requested
    "stale",  # acknowledged or seen before a poll began, which returned the end without it
    "commit unseen",  # the same for a transaction that was reported as committed
    "held by the decided",  # a committed reader was held by a decided transaction, or by one without messages there
    "forgotten",  # an opening returned a lower sequence id than was acknowledged before
    "foretold",  # an opening returned a sequence id that had not been sent
    "not fenced",  # a superseded session of a producer was acknowledged, or shares its epoch
]
Outcome = Literal["acknowledged", "refused", "unknown"]
End = Literal["end", "more", "held"]


class Anomaly(NamedTuple):
    """An observation that must never happen."""

    kind: Kind
    text: str


@dataclass(slots=True, eq=False)
class Transaction:
    """A transaction, and the responses about it."""

    id: int
    begun_s: float = 0.0
    """When it was requested."""
    told_s: float = inf
    """When the response with its id arrived."""
    pointers: set[int] = field(default_factory=set)
    asked_s: float = inf
    """When its commit was first requested."""
    committed_s: float = inf
    """When a response first reported it as committed."""
    undone_s: float = inf
    """When a response first reported it as aborted or invalid."""
    state: str = ""
    """Its state at the end, according to the service."""

    def __post_init__(self) -> None:
        self.pointers.add(self.id)


@dataclass(slots=True, eq=False)
class Write:
    """The messages of one publish, which a producer may send several times with the same sequence ids."""

    topic: str
    payloads: tuple[bytes, ...]
    began_s: float
    """When it was first sent."""
    transaction: Transaction | None = None
    producer: str | None = None
    epoch: int | None = None
    sequences: tuple[int, ...] = ()
    unanswered: int = 0
    """Number of attempts with an unknown outcome."""
    ended_s: float = inf
    """When it was first acknowledged."""
    receipts: list[tuple[bytes, bytes]] = field(default_factory=list)
    """First and last id, from every acknowledgement that had them."""

    def sent(self) -> None:
        """Record an attempt; from here on it may take effect."""
        self.unanswered += 1

    def refused(self) -> None:
        """Record that the last attempt did not take effect."""
        self.unanswered -= 1

    def acknowledged(self, at_s: float, first_id: bytes | None = None, last_id: bytes | None = None) -> None:
        """Record that it took effect."""
        self.ended_s = min(self.ended_s, at_s)
        if first_id is not None and last_id is not None:
            self.receipts.append((first_id, last_id))

    @property
    def outcome(self) -> Outcome:
        if self.ended_s < inf:
            return "acknowledged"
        return "unknown" if self.unanswered else "refused"

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.payloads[0]!r} … in {self.topic}"


@dataclass(frozen=True, slots=True)
class Opening:
    """A producer's session, with the last sequence id that the service returned; -1 if there was none."""

    producer: str
    topic: str
    began_s: float
    ended_s: float
    epoch: int
    last_sequence: int


@dataclass(frozen=True, slots=True)
class Poll:
    """A poll and its response."""

    reader: str
    instance: str
    topic: str
    committed: bool
    began_s: float
    ended_s: float
    messages: tuple[tuple[bytes, bytes], ...]
    """``(id, payload)``."""
    since: bytes = FIRST_BOUND
    """Its inclusive start."""
    through: bytes | None = None
    """The position to continue from, exclusively, according to the response; the poll has passed all before it."""
    end: End = "end"
    held_by: int | None = None
    view: int | None = None
    """Polls with the same number were answered from one view, over several topics."""

    @property
    def last(self) -> bytes:
        """The last id it passed; empty if none."""
        return max([message_id for message_id, _ in self.messages[-1:]] + [self.through or b""])

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.reader} at {self.instance}"


Row = tuple[bytes, bytes, int]
"""``(id, payload, pointer)``: 0 for a plain message, negative when rolled back."""


@dataclass(slots=True)
class History:
    """The records of all clients."""

    writes: list[Write] = field(default_factory=list)
    transactions: list[Transaction] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    logs: dict[str, Sequence[Row]] = field(default_factory=dict)
    """Topic → its log."""

    def summary(self) -> str:
        """Return its counts in one line."""
        outcomes = _counted(write.outcome for write in self.writes)
        states = _counted(each.state or "open" for each in self.transactions)
        instances = len({poll.instance for poll in self.polls})
        messages = sum(map(len, self.logs.values()))
        return (
            f"writes {_said(outcomes)}; transactions {_said(states)}; {len(self.openings)} openings; "
            f"{len(self.polls)} polls at {instances} instances; {messages} messages"
        )


def _counted(words: Iterable[str]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for word in words:
        counts[word] = counts.get(word, 0) + 1
    return counts


def _said(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {word}" for word, count in sorted(counts.items())) or "none"

"""What the clients of a cluster note: every write and what became of it, every transaction, every page that was read.

All times are seconds of one monotonic clock, that of the machine all clients run on. Payloads must be unlike each
other, in all topics together. The last reading of a topic, made when all is quiet, is its *log*; ``checker.check`` says
what is wrong with it, and with everything that was seen before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from plainsong.protocol.ids import FIRST_BOUND

Kind = Literal[
    "lost",  # acknowledged, or told to be committed, and not there in the end
    "vanished",  # read, and not there in the end
    "doubled",  # a message is there twice, or two were given one id
    "applied all the same",  # refused, told to be undone, or never sent; and there
    "split",  # a part of a request, or of a transaction, is there, or was seen alone
    "reordered",  # a page out of order; two readers, two orders; a producer's later sequence first
    "backwards",  # who asked after an answer was given a smaller id
    "behind",  # a reader had passed the place where a message is there now
    "uncommitted",  # a committed reader saw what is not committed, or whose commit nobody had asked for
    "stale",  # acknowledged, or seen, before a reader asked, who was told there is no more
    "commit unseen",  # the same of a transaction that was told to be committed
    "held by the decided",  # a committed reader was held by what is decided, or has nothing there
    "forgotten",  # a producer that opened was told less than was acknowledged before
    "foretold",  # a producer that opened was told of a sequence id that had not been sent
    "not fenced",  # a producer that another had opened again was acknowledged something, or shares its epoch
]
Outcome = Literal["acknowledged", "refused", "unknown"]
End = Literal["end", "more", "held"]


class Anomaly(NamedTuple):
    """One thing that must never be."""

    kind: Kind
    text: str


@dataclass(slots=True, eq=False)
class Transaction:
    """One transaction, and what clients were told of it."""

    id: int
    begun_s: float = 0.0
    """When its begin was asked for."""
    told_s: float = inf
    """When that was answered."""
    pointers: set[int] = field(default_factory=set)
    asked_s: float = inf
    """When its commit was first asked for."""
    committed_s: float = inf
    """When somebody was first told that it is committed."""
    undone_s: float = inf
    """When somebody was first told that it is aborted, or invalid."""
    state: str = ""
    """What the service says in the end."""

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
    """How often it was sent and nobody knows what became of it."""
    ended_s: float = inf
    """When it was first acknowledged."""
    receipts: list[tuple[bytes, bytes]] = field(default_factory=list)
    """First and last id, of every acknowledgement that gave them."""

    def sent(self) -> None:
        """It leaves; from here on it may happen."""
        self.unanswered += 1

    def refused(self) -> None:
        """What left last did not happen."""
        self.unanswered -= 1

    def acknowledged(self, at_s: float, first_id: bytes | None = None, last_id: bytes | None = None) -> None:
        """It happened."""
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
        """For texts."""
        return f"{self.payloads[0]!r} … in {self.topic}"


@dataclass(frozen=True, slots=True)
class Opening:
    """A producer's session and the last sequence id it was told; -1 when there was none."""

    producer: str
    topic: str
    began_s: float
    ended_s: float
    epoch: int
    last_sequence: int


@dataclass(frozen=True, slots=True)
class Poll:
    """What one poll was answered, and where it was asked."""

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
    """Where it said to go on, exclusively; everything up to there has been passed."""
    end: End = "end"
    held_by: int | None = None
    view: int | None = None
    """Polls with the same number were answered from one view, over several topics."""

    @property
    def last(self) -> bytes:
        """The last id it passed; empty when it passed none."""
        return max([message_id for message_id, _ in self.messages[-1:]] + [self.through or b""])

    @property
    def name(self) -> str:
        """For texts."""
        return f"{self.reader} at {self.instance}"


Row = tuple[bytes, bytes, int]
"""``(id, payload, pointer)``: 0 for a plain message, negative when rolled back."""


@dataclass(slots=True)
class History:
    """Everything that anybody noted."""

    writes: list[Write] = field(default_factory=list)
    transactions: list[Transaction] = field(default_factory=list)
    openings: list[Opening] = field(default_factory=list)
    polls: list[Poll] = field(default_factory=list)
    logs: dict[str, Sequence[Row]] = field(default_factory=dict)
    """By topic."""

    def summary(self) -> str:
        """What it is made of, in a line."""
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

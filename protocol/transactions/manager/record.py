"""One transaction as the service keeps it: from its begin until its outcome is forgotten, in one row.

    transaction row   y type  n client  s started  e expires  b visibility bound  r read pointer  c checkpoints
                      p a commit or prepare conflicted: prepare first   a being aborted
                      o outcome  d when (ms)  w last pointer issued before  l pointers on the invalid list

A decision rewrites this one row, so it is there or not, whatever else of a commit reached the disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.keys import DamagedRow
from protocol.records import pack_record, unpack_record
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from typing import Any

    from protocol.names import TopicName
    from protocol.transactions.manager.answers import State

_MAX_POINTER = (1 << 63) - 1
_STATES: tuple[State, ...] = ("in_progress", "committed", "aborted", "invalid")


@dataclass(slots=True, eq=False)
class Record:
    """A transaction, open or decided."""

    transaction_id: int
    type: TransactionType
    client_id: str
    started_ms: int
    expires_ms: int
    bound: int
    """Up to here everything was decided when it began."""
    read_pointer: int
    """What it began to read with."""
    checkpoints: tuple[int, ...] = ()
    must_prepare: bool = False
    """It conflicted: a commit is refused until a prepare succeeds."""
    aborting: bool = False
    """Its rows are being rolled back: it can't be committed any more."""
    state: State = "in_progress"
    decided_ms: int = 0
    decided_at: int = 0
    """The last pointer issued before the decision."""
    listed: tuple[int, ...] = ()
    """Those of its pointers that are on the invalid list."""
    deadline_s: float = field(default=0.0, repr=False)
    """When its time is over, on the service's monotonic clock; not kept."""
    frozen: int = 0
    """Its commit waits for what is being written under it: which freezing this is, 0 for none; not kept."""
    settling: bool = False
    """It is decided, but not durably yet; not kept."""
    topics: set[TopicName] = field(default_factory=set)
    """Enlisted: those that have, or may have, rows of it. Each is kept in a row of its own."""

    @property
    def pointers(self) -> tuple[int, ...]:
        """The id, then those of its checkpoints; ascending."""
        return (self.transaction_id, *self.checkpoints)

    @property
    def write_pointer(self) -> int:
        """The newest."""
        return self.checkpoints[-1] if self.checkpoints else self.transaction_id

    def encode(self) -> bytes:
        """The row's value."""
        record: dict[str, object] = {
            "y": int(self.type),
            "n": self.client_id,
            "s": self.started_ms,
            "e": self.expires_ms,
            "b": self.bound,
            "r": self.read_pointer,
        }
        if self.checkpoints:
            record["c"] = self.checkpoints
        if self.must_prepare:
            record["p"] = True
        if self.aborting:
            record["a"] = True
        if self.state != "in_progress":
            record |= {"o": _STATES.index(self.state), "d": self.decided_ms, "w": self.decided_at}
        if self.listed:
            record["l"] = self.listed
        return pack_record(record)

    @classmethod
    def decode(cls, transaction_id: int, value: bytes) -> Record:
        """Read the row's value. Raises DamagedRow."""
        record = unpack_record(value, "transaction")
        try:
            return _decoded(transaction_id, record)
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise DamagedRow(f"the row of transaction {transaction_id} has not what it needs: {error!r}") from error


def _decoded(transaction_id: int, record: dict[str, Any]) -> Record:
    client_id = record["n"]
    if not isinstance(client_id, str):
        raise TypeError("a client id is text")
    return Record(
        transaction_id,
        TransactionType(record["y"]),
        client_id,
        started_ms=number(record["s"]),
        expires_ms=number(record["e"]),
        bound=number(record["b"]),
        read_pointer=number(record["r"]),
        checkpoints=tuple(map(number, record.get("c", ()))),
        must_prepare=record.get("p", False) is True,
        aborting=record.get("a", False) is True,
        state=_STATES[number(record.get("o", 0))],
        decided_ms=number(record.get("d", 0)),
        decided_at=number(record.get("w", 0)),
        listed=tuple(map(number, record.get("l", ()))),
    )


def number(value: object) -> int:
    """A number of a row. Raises ValueError when it is none, or no pointer or time could be so large."""
    if not isinstance(value, int) or isinstance(value, bool) or not -1 <= value <= _MAX_POINTER:
        raise ValueError(f"{str(value)[:40]!r} is no pointer and no time")
    return value

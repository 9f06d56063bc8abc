"""A transaction as clients see it, and the authority that decides the standing of its write pointers.

A transaction is a snapshot of the decisions at its begin, with pointers of its own to write under. Rules and names are
those of Tephra's ``Transaction``, release 0.16.1. Pointers are 64-bit numbers; the three lists are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

#: No transaction; also the pointer of a reader that sees everything committed.
NO_TRANSACTION = (1 << 63) - 1
#: Maximum of pointers issued per millisecond: a pointer divided by this is the time of its issue, in milliseconds.
POINTERS_PER_MS = 1_000_000
#: The states by which transactions can be listed.
STATES: tuple[Literal["in_progress", "invalid", "committed", "aborted"], ...] = (
    "in_progress",
    "invalid",
    "committed",
    "aborted",
)


class TransactionType(IntEnum):
    """Short or long, with different time-outs; the numbers are the wire format's."""

    SHORT = 1
    LONG = 2


class VisibilityLevel(IntEnum):
    """Decides which of its own writes a transaction sees; the numbers are the wire format's."""

    SNAPSHOT = 1
    SNAPSHOT_EXCLUDE_CURRENT = 2
    SNAPSHOT_ALL = 3


@dataclass(slots=True)
class Transaction:
    """One transaction, or a snapshot to read with."""

    read_pointer: int
    """The highest readable pointer, inclusive."""
    transaction_id: int
    """The first write pointer, which identifies the transaction permanently."""
    write_pointer: int
    """The pointer for writes: the id, or the pointer of the newest checkpoint."""
    invalids: tuple[int, ...] = ()
    in_progress: tuple[int, ...] = ()
    first_short_in_progress: int = NO_TRANSACTION
    type: TransactionType = TransactionType.SHORT
    checkpoint_write_pointers: tuple[int, ...] = ()
    """Pointers of checkpoints, including the current one, without the id."""
    visibility_level: VisibilityLevel = VisibilityLevel.SNAPSHOT

    @property
    def pointers(self) -> tuple[int, ...]:
        """Every pointer its writes may carry: the id, then its checkpoints."""
        return (self.transaction_id, *self.checkpoint_write_pointers)


def issued_ms(pointer: int) -> int:
    """Return when a pointer was issued, in milliseconds since 1970."""
    return pointer // POINTERS_PER_MS


# --- authorities -----------------------------------------------------------------------------------
#
# A topic's interface to the decisions on transactions: of the daemon's own service, a Tephra service, or nothing.


#: The standing of a pointer. ``committed`` and ``aborted`` are durable, so that a topic may forget the pointer.
#: ``deciding``: its commit is under way; writes and rollbacks are refused, and the pointer must not be forgotten yet. A
#: pointer that is being aborted is ``invalid`` until it is ``aborted``. ``unknown``: the authority did not issue it.
Standing = Literal["in_progress", "deciding", "committed", "aborted", "invalid", "unknown"]


class Authority(Protocol):
    """Decides the standing of write pointers. Called on the event loop, so it never waits."""

    def standing(self, pointer: int) -> Standing:
        """Return the standing of a pointer, a transaction's first one or a checkpoint's."""
        ...

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """Return all known write pointers of a pointer's transaction; only the pointer itself if that is unknown."""
        ...


class NoAuthority:
    """The authority without a transaction service: clients manage pointers themselves."""

    def standing(self, pointer: int) -> Standing:
        del pointer
        return "unknown"

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        return (pointer,)


#: The durable standing of a pointer, in a replica: ``pruned`` ones were invalid and have no visible rows left,
#: ``forgotten`` ones are in no list.
Durable = Literal["in_progress", "invalid", "committed", "aborted", "pruned", "forgotten"]

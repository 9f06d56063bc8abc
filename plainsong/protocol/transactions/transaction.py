"""A transaction as clients know it, and the authority that knows the standing of its write pointers.

A transaction is a snapshot of what was decided when it began, with pointers of its own to write under. Rules and names
are those of Tephra's ``Transaction``, release 0.16.1. Pointers are 64-bit numbers; the three lists are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

#: No transaction; also the pointer of a reader that sees all that is committed.
NO_TRANSACTION = (1 << 63) - 1
#: Most pointers issued per millisecond: a pointer divided by this is the time of its issue, in milliseconds.
POINTERS_PER_MS = 1_000_000


class TransactionType(IntEnum):
    """Short or long, with different time-outs; the numbers are those of the wire."""

    SHORT = 1
    LONG = 2


class VisibilityLevel(IntEnum):
    """Which of its own writes a transaction sees; the numbers are those of the wire."""

    SNAPSHOT = 1
    SNAPSHOT_EXCLUDE_CURRENT = 2
    SNAPSHOT_ALL = 3


@dataclass(slots=True)
class Transaction:
    """One transaction, or a snapshot to read with."""

    read_pointer: int
    """The highest pointer readable, inclusive."""
    transaction_id: int
    """The first write pointer; the transaction's name for life."""
    write_pointer: int
    """The pointer for writes: the id until a checkpoint, then that of the newest checkpoint."""
    invalids: tuple[int, ...] = ()
    in_progress: tuple[int, ...] = ()
    first_short_in_progress: int = NO_TRANSACTION
    type: TransactionType = TransactionType.SHORT
    checkpoint_write_pointers: tuple[int, ...] = ()
    """Pointers of checkpoints, with the current one and without the id."""
    visibility_level: VisibilityLevel = VisibilityLevel.SNAPSHOT

    @property
    def pointers(self) -> tuple[int, ...]:
        """Every pointer its writes may carry: the id, then its checkpoints."""
        return (self.transaction_id, *self.checkpoint_write_pointers)


def issued_ms(pointer: int) -> int:
    """When a pointer was issued, in milliseconds since 1970."""
    return pointer // POINTERS_PER_MS


# --- authorities -----------------------------------------------------------------------------------
#
# What decides transactions, from a topic's point of view: the daemon's own service, a Tephra, or nothing.


#: The standing of a pointer. ``committed`` and ``aborted`` are durable, so that a topic may forget the pointer.
#: ``deciding``: its commit is under way; nothing may be added or rolled back any more, nothing is forgotten yet. A
#: pointer that is being aborted is ``invalid`` until it is ``aborted``. ``unknown``: the authority did not issue it.
Standing = Literal["in_progress", "deciding", "committed", "aborted", "invalid", "unknown"]


class Authority(Protocol):
    """Knows the standing of write pointers. Called on the event loop, so it never waits."""

    def standing(self, pointer: int) -> Standing:
        """The standing of a pointer, a transaction's first or a checkpoint's."""
        ...

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        """All write pointers of a pointer's transaction, as far as is known; itself if no transaction is."""
        ...


class NoAuthority:
    """The authority without a transaction service: pointers are the clients' own business."""

    def standing(self, pointer: int) -> Standing:
        del pointer
        return "unknown"

    def pointers_of(self, pointer: int) -> tuple[int, ...]:
        return (pointer,)


#: The durable standing of a pointer, as a replica has it: ``pruned`` ones were invalid and have no rows left,
#: ``forgotten`` ones are in no list.
Durable = Literal["in_progress", "invalid", "committed", "aborted", "pruned", "forgotten"]

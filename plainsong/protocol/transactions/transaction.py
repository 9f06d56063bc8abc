"""A transaction as clients know it, and the authority that says what became of its write pointers.

A transaction as Tephra's clients know it: a snapshot of what was decided when it began, and its own pointers.

Rules and names are Tephra's (``Transaction``, release 0.16.1); pointers are 64-bit numbers, and the three lists
are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, Protocol

#: No transaction; also the pointer of a reader that sees the latest of everything.
NO_TRANSACTION = (1 << 63) - 1
#: Pointers issued per millisecond at most: a pointer divided by it is the time it was issued, in milliseconds.
POINTERS_PER_MS = 1_000_000


class TransactionType(IntEnum):
    """How long it may take; the numbers are the wire's."""

    SHORT = 1
    LONG = 2


class VisibilityLevel(IntEnum):
    """How much of its own a transaction sees; the numbers are the wire's."""

    SNAPSHOT = 1
    SNAPSHOT_EXCLUDE_CURRENT = 2
    SNAPSHOT_ALL = 3


@dataclass(slots=True)
class Transaction:
    """One transaction, or a snapshot that somebody reads with."""

    read_pointer: int
    """The highest pointer readable, inclusive."""
    transaction_id: int
    """The first write pointer; the transaction's name for life."""
    write_pointer: int
    """What to stamp writes with now: the id until a checkpoint, then the newest checkpoint's pointer."""
    invalids: tuple[int, ...] = ()
    in_progress: tuple[int, ...] = ()
    first_short_in_progress: int = NO_TRANSACTION
    type: TransactionType = TransactionType.SHORT
    checkpoint_write_pointers: tuple[int, ...] = ()
    """Pointers of checkpoints, the current one included, the id not."""
    visibility_level: VisibilityLevel = VisibilityLevel.SNAPSHOT

    @property
    def pointers(self) -> tuple[int, ...]:
        """Every pointer its writes may carry: the id, then its checkpoints."""
        return (self.transaction_id, *self.checkpoint_write_pointers)


def issued_ms(pointer: int) -> int:
    """When a pointer was issued, in milliseconds since 1970."""
    return pointer // POINTERS_PER_MS


# --- authority -------------------------------------------------------------------------------------
#
# Who decides transactions, as far as a topic needs to know: the daemon's own service, a Tephra, or nobody.


#: What an authority says of a pointer. ``committed`` and ``aborted`` are durable, so that its rows may be forgotten.
#: ``deciding``: its commit is under way; nothing may be added or rolled back any more, nothing is forgotten yet. One
#: that is being aborted is ``invalid`` until it is ``aborted``. ``unknown``: not issued by it.
Standing = Literal["in_progress", "deciding", "committed", "aborted", "invalid", "unknown"]


class Authority(Protocol):
    """What is known about write pointers; asked on the event loop, never waits."""

    def standing(self, pointer: int) -> Standing:
        """What became of a pointer, a checkpoint's or a transaction's first."""
        ...


class NoAuthority:
    """No transaction service: every pointer is its clients' own business."""

    def standing(self, pointer: int) -> Standing:
        """Always unknown."""
        del pointer
        return "unknown"


# --- mirrored --------------------------------------------------------------------------------------


#: What a pointer is to a mirror: ``pruned`` ones were invalid and have no rows left, ``forgotten`` ones are in no list.
Durable = Literal["in_progress", "invalid", "committed", "aborted", "pruned", "forgotten"]

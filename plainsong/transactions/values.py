"""What is known of transactions: the one that was begun, and what the service tells of any."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from plainsong.protocol.transactions.transaction import issued_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TransactionKind = Literal["short", "long"]
#: ``unknown``: never issued by this service, or so long ago that the outcome is not kept any more.
TransactionState = Literal["in_progress", "committed", "aborted", "invalid", "unknown"]

#: Reading inside a transaction ends when this part of its time is used up, so that the rest is left for the commit.
READING_PART = 0.9


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transaction as it stands: its names, its snapshot, and the time it has.

    For one of a service elsewhere, ``id``, ``write_pointer`` and ``snapshot`` are enough.
    """

    id: int
    """Its name for life: what the service is asked about."""
    write_pointer: int
    """What messages are stamped with now: the id, until a checkpoint."""
    snapshot: bytes = b""
    """What its polls see, as Tephra's codec writes it."""
    read_pointer: int = 0
    expires_ms: int | None = None
    """When it times out, by the daemon's clock, in milliseconds since 1970."""
    timeout_s: float = float("inf")
    """How long it may take in all."""
    begun_s: float = 0.0
    """When it was asked for, by ``clock``: never later than the service began it."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    pointers: tuple[int, ...] = ()
    """Every write pointer it has had, oldest first; empty: the id alone."""
    service: str = ""
    """What tells the service that began it from others, which may have used the same id; empty: unknown."""

    @property
    def age_s(self) -> float:
        """Seconds since it was asked for."""
        return self.clock() - self.begun_s

    @property
    def remaining_s(self) -> float:
        """Seconds until it times out, by this computer's clock; 0 when it has. Infinite when that is not known."""
        return max(0.0, self.timeout_s - self.age_s)

    @property
    def reading_s(self) -> float:
        """Seconds for which reading inside it goes on: until 90 % of its time are over."""
        return max(0.0, READING_PART * self.timeout_s - self.age_s)


@dataclass(frozen=True, slots=True)
class TransactionStatus:
    """What the service knows of a transaction."""

    id: int
    write_pointer: int
    state: TransactionState
    type: TransactionKind | None = None
    client_id: str | None = None
    started_ms: int | None = None
    expires_ms: int | None = None
    decided_ms: int | None = None
    """When it was committed, aborted or made invalid, by the daemon's clock; None: it is open, or nobody knows."""
    topics: tuple[str, ...] = ()
    """Those with undecided messages of it, as ``namespace:topic``."""
    hidden_messages: int | None = None
    """How many messages wait behind it, for readers of committed ones."""
    kept_until_ms: int | None = None
    """Until when the service will remember this outcome."""
    service: str = ""
    """Whose word this is, as in ``Transaction``."""

    @property
    def issued_ms(self) -> int:
        """When its pointer was issued, by the daemon's clock, in milliseconds since 1970."""
        return issued_ms(self.id)


@dataclass(frozen=True, slots=True)
class Pruning:
    """What one needs to know to prune the list of invalid transactions by hand."""

    invalid: int
    """How many are on it."""
    oldest_invalid: int | None
    safe_bound: int | None
    """No row is left of any invalid pointer up to this one; None before the first complete pass."""
    last_pass_ms: int | None
    """When the last complete pass over all topics ended, in milliseconds since 1970, by the daemon's clock."""
    max_lifetime_ms: int
    """The age beyond which a pointer is refused; 0: none."""
    oldest_by_topic: Mapping[str, int]
    """The oldest undecided pointer with rows in it, of the topics (``namespace:topic``) that have one, oldest first."""
    topics: int
    """How many topics have one; ``oldest_by_topic`` may show fewer."""
    kept_because: str | None
    """Why nothing is pruned by itself; None: it is."""
    figures: Mapping[str, Any]
    """All of it as the daemon says it."""

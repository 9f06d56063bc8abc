"""What became of the transactions whose messages were found: the daemon is asked about each write pointer once.

    DECISIONS  pointer, transaction, client, state, begun_ms, decided_ms

A daemon remembers outcomes for a time (``transactions.outcome_retention_s``). Of a pointer it does not know, the state
is ``unknown``, and all that is left is the pointer itself: this service's pointers say when they were issued.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql.types import LongType, StringType, StructField, StructType

from protocol.errors import TransactionsUnavailable
from protocol.transactions.transaction import issued_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from plainsong.sync.transactions import Transactions
    from plainsong.transactions.values import TransactionStatus

DECISIONS = StructType(
    [
        StructField("pointer", LongType()),
        StructField("transaction", LongType()),
        StructField("client", StringType()),
        StructField("state", StringType()),
        StructField("begun_ms", LongType()),
        StructField("decided_ms", LongType()),
    ]
)
#: A pointer that nobody knows was issued at the time it says if that is no longer before its first message.
MAX_AGE_MS = 25 * 3600 * 1000


class Found(NamedTuple):
    """A write pointer that messages carry, made positive, and when the first of them was published."""

    pointer: int
    first_publish_ms: int


class Decision(NamedTuple):
    """A row of ``DECISIONS``."""

    pointer: int
    transaction: int
    client: str | None
    state: str
    begun_ms: int | None
    decided_ms: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the service said, and what it could not be asked."""

    decisions: Sequence[Decision]
    unavailable: str | None = None
    """Why the service said nothing; None: it answered."""


def ask_about(found: Iterable[Found], transactions: Transactions, *, step: Callable[[], None] = lambda: None) -> Asked:
    """What became of each pointer.

    Args:
      step: called behind each question.
    Raises:
      PlainsongError: what goes wrong on the way. That the daemon has no service is an answer.
    """
    decisions: list[Decision] = []
    unavailable = None
    for each in found:
        if unavailable is None:
            try:
                decisions.append(_told(each, transactions.get(each.pointer)))
                step()
                continue
            except TransactionsUnavailable as error:
                unavailable = error.detail
        decisions.append(_unknown(each))
    return Asked(decisions, unavailable)


def not_asked(found: Iterable[Found], why: str) -> Asked:
    """The same where there is nobody to ask."""
    return Asked([_unknown(each) for each in found], why)


def _told(found: Found, status: TransactionStatus) -> Decision:
    if status.state == "unknown":
        return _unknown(found)
    return Decision(found.pointer, status.id, status.client_id, status.state, status.started_ms, status.decided_ms)


def _unknown(found: Found) -> Decision:
    begun_ms = issued_ms(found.pointer)
    believed = 0 <= found.first_publish_ms - begun_ms <= MAX_AGE_MS
    return Decision(found.pointer, found.pointer, None, "unknown", begun_ms if believed else None, None)

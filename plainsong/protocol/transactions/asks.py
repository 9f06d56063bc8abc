"""The requests to the transaction service, each with the type of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plainsong.protocol.effects import Ask
from plainsong.protocol.errors import TransactionConflict
from plainsong.protocol.transactions.transaction import TransactionType
from plainsong.protocol.transactions.view import Moment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.transaction import Transaction

#: The state of a transaction.
State = Literal["in_progress", "committed", "aborted", "invalid", "unknown"]

# --- deciding a transaction ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """A transaction that has begun, or got a new write pointer by a checkpoint."""

    transaction: Transaction
    expires_ms: int
    """When it becomes invalid if it is undecided, in milliseconds since 1970."""
    service: int = 0
    """Identifies the service, as others may issue the same ids; see ``Head.service``."""


@dataclass(slots=True)
class Begin(Ask[Begun]):
    """Begin a transaction. ``timeout_s``: None for the default of its type.

    Raises:
      InvalidParameter: a time-out that is not positive, over the maximum, or given for a long transaction; a bad client
        id.
      Overloaded: too many are open or invalid.
    """

    type: TransactionType = TransactionType.SHORT
    timeout_s: int | None = None
    client_id: str = "unknown"
    owner: str | None = None
    """The name that begins it, if any."""
    tephra: bool = False
    """True for Tephra's clients: if a crash loses the begin, its pointer is invalid."""


@dataclass(slots=True)
class Checkpoint(Ask[Begun]):
    """Issue a new write pointer; the transaction's snapshot stays the one it began with.

    ``transaction``: the client's copy; without it the snapshot is computed from the remembered outcomes.

    Raises:
      InvalidParameter: without ``transaction``, too much has been forgotten since it began.
      TransactionNotFound, TransactionNotInProgress, Overloaded.
    """

    transaction_id: int
    transaction: Transaction | None = None


@dataclass(slots=True)
class Prepare(Ask[None]):
    """Check a change set for conflicts, and keep it until the commit; replaces an earlier one.

    ``tephra``: True for Tephra's clients: a crash before the commit may lose the change set of a short transaction that
    such a client began.

    Raises:
      ChangeConflict: with a transaction committed since it began.
      TransactionTooLarge: too many keys, or too many bytes of them.
      TransactionNotFound, TransactionNotInProgress.
    """

    transaction_id: int
    changes: Sequence[bytes]
    size: int = 0
    tephra: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """The state of a transaction after a request."""

    transaction_id: int
    state: State
    changed: bool
    """True if this request changed the state; False if it had this state before."""


@dataclass(frozen=True, slots=True)
class CloseFirst:
    """The answer to a commit when enlisted topics must close the transaction's pointers first."""


@dataclass(slots=True)
class Commit(Ask["Decision | CloseFirst"]):
    """Commit; no write under its pointers may be under way. A repeated one has the same answer while it is remembered.

    Raises:
      ChangeConflict: also if a crash may have lost its change set; the transaction stays in progress, to be prepared again or aborted.
      TransactionNotFound: unknown, or forgotten.
      TransactionNotInProgress: aborted, invalid, or timed out.
    """

    transaction_id: int


@dataclass(frozen=True, slots=True)
class RollFirst:
    """The answer to an abort when rows of these pointers must be rolled back in every topic first."""

    transaction_id: int
    pointers: tuple[int, ...]


@dataclass(slots=True)
class Abort(Ask["Decision | RollFirst"]):
    """Abort; if it has rows, this only begins the abort, and ``FinishAbort`` completes it."""

    transaction_id: int
    has_rows: bool = False


@dataclass(slots=True)
class FinishAbort(Ask[Decision]):
    """Complete an abort; ``complete``: True if its rows were rolled back in every topic."""

    transaction_id: int
    complete: bool


@dataclass(slots=True)
class Invalidate(Ask[Decision]):
    """Move its pointers to the invalid list."""

    transaction_id: int


class ChangeConflict(TransactionConflict):
    """A committed transaction changed one of the keys, or may have; with the fields of Tephra's exception.

    ``key``: None if the change set is not known, since a crash may have lost it.
    """

    def __init__(self, transaction_id: int, key: bytes | None, client_id: str | None = None) -> None:
        self.transaction_id = transaction_id
        self.key = None if key is None else shown_key(key)
        self.client_id = client_id
        other = f"client {client_id!r}" if client_id else "a client that is no longer known"
        why = f"changed {self.key}, which {other} has changed since it began"
        if key is None:
            why = "has no change set to check for conflicts: the service was started again after its begin"
        super().__init__(f"transaction {transaction_id} {why}", hint="roll back, abort, and run the transaction again")


def shown_key(key: bytes) -> str:
    r"""Format a key of a change set: printable ASCII unchanged, every other byte as ``\xHH``."""
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02X}" for byte in key)


# --- enlisting topics ------------------------------------------------------------------------------


@dataclass(slots=True)
class Enlist(Ask[tuple[int, ...]]):
    """Enlist a topic, which is about to write under a pointer. Answers all pointers of the transaction."""

    pointer: int
    name: TopicName


@dataclass(slots=True)
class Nothing(Ask[None]):
    """Do nothing; the answer proves that the service is the current one and up to date."""


# --- the status of transactions --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TransactionStatus:
    """The status of a transaction; for an ``unknown`` one only the id is set."""

    transaction_id: int
    state: State
    write_pointer: int
    """The newest one; the id for an unknown transaction."""
    type: TransactionType | None = None
    client_id: str | None = ""
    """None if it must not be shown."""
    started_ms: int = 0
    expires_ms: int = 0
    kept_until_ms: int | None = None
    """A decided transaction is remembered at least until then, unless ``max_outcomes`` others follow; None if it is
    undecided, unknown, or on the invalid list."""
    decided_ms: int | None = None
    """When it was decided, in milliseconds since 1970; None if it is undecided or unknown."""
    pointers: tuple[int, ...] = ()
    """The id and the pointers of its checkpoints."""
    topics: tuple[TopicName, ...] = ()
    """Topics in which it has undecided rows."""
    hidden_messages: int | None = 0
    """Messages that it hides from transactional readers, in all ``topics``; None if a topic did not answer."""
    service: int = 0
    """The answering service, as in ``Begun``; 0 if it has not issued a pointer."""
    owner: str | None = None
    """The name that began it."""


@dataclass(slots=True)
class LookAt(Ask[TransactionStatus]):
    """Look up a transaction by any of its pointers."""

    pointer: int


@dataclass(slots=True)
class AsOf(Ask[Moment]):
    """Find the transactions decided by a moment, in milliseconds since 1970."""

    at_ms: int


@dataclass(slots=True)
class ListAll(Ask["list[TransactionStatus]"]):
    """List the transactions of a state, or (None) the open and the invalid ones, oldest first."""

    state: State | None = None
    limit: int = 1_000
    after: int = 0
    """Begin after the transaction with this id, the last one of the previous page."""


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Numbers for metrics and ``status``, taken without waiting."""

    open: int
    """Transactions in progress, without checkpoints."""
    invalid: int
    outcomes: int
    oldest_open_ms: int | None
    """When the oldest open transaction began."""


# --- pruning the invalid list ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CompletePass:
    """The state at the beginning of a janitor's pass; passed to ``KeepPass`` once it has reached every topic."""

    begun_ms: int
    invalids: tuple[int, ...]
    """Pointers on the invalid list, ascending; their rows must be rolled back."""
    bound: int
    """After the pass, no row up to this pointer, inclusive, is undecided (Tephra's prune upper bound)."""


@dataclass(slots=True)
class KeepPass(Ask[int]):
    """Record a pass that reached every topic. Answers the number of pruned pointers."""

    passed: CompletePass


@dataclass(slots=True)
class Unlist(Ask[int]):
    """Remove pointers from the invalid list; their rows must be rolled back everywhere. Answers how many were on it."""

    pointers: Sequence[int]


@dataclass(slots=True)
class InvalidBefore(Ask["tuple[int, ...]"]):
    """Find invalid pointers issued before a time. Raises InvalidTruncateTime if one issued then is in progress."""

    before_ms: int


@dataclass(slots=True)
class ForgetChanges(Ask[None]):
    """Forget all committed change sets."""


@dataclass(frozen=True, slots=True)
class PruningFigures:
    """Figures for operators about pruning the invalid list."""

    invalid: int
    """Pointers on the list."""
    oldest_invalid: int | None
    oldest_by_topic: Mapping[TopicName, int]
    """Topic → the oldest undecided or invalid pointer with rows there."""
    safe_bound: int | None
    """No row has an invalid pointer up to this one; None before the first complete pass."""
    last_pass_ms: int | None
    """When the last complete pass began."""
    max_lifetime_ms: int
    kept_because: str | None
    """The reason if pointers are not pruned automatically, else None."""

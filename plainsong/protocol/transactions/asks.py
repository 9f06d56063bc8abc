"""What the transaction service can be asked, and what it answers: plain data for routes, Thrift, links and the janitor.

What the transaction service answers: plain data for routes, the Thrift interface and the janitor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from plainsong.protocol.effects import Ask
from plainsong.protocol.errors import TransactionConflict
from plainsong.protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from plainsong.protocol.names import TopicName
    from plainsong.protocol.transactions.transaction import Transaction

#: What has become of a transaction.
State = Literal["in_progress", "committed", "aborted", "invalid", "unknown"]


@dataclass(frozen=True, slots=True)
class Begun:
    """A transaction that has begun, or got a new write pointer by a checkpoint."""

    transaction: Transaction
    expires_ms: int
    """When it becomes invalid unless it is decided before; milliseconds since 1970."""
    service: int = 0
    """The first pointer that this service ever issued: tells it from others, which may issue the same ids."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What a transaction is now."""

    transaction_id: int
    state: State
    changed: bool
    """Whether this very request made it so; False: it was so before."""


@dataclass(frozen=True, slots=True)
class TransactionStatus:
    """All that is known of one transaction; of an ``unknown`` one, its id."""

    transaction_id: int
    state: State
    write_pointer: int
    """The newest; the id for an unknown one."""
    type: TransactionType | None = None
    client_id: str = ""
    started_ms: int = 0
    expires_ms: int = 0
    kept_until_ms: int | None = None
    """Until when a decided one is remembered at least, unless ``max_outcomes`` others come; None: not decided,
    unknown, or invalid and on the list."""
    decided_ms: int | None = None
    """When it was decided, in milliseconds since 1970; None: it was not, or nobody knows."""
    pointers: tuple[int, ...] = ()
    """The id and those of its checkpoints."""
    topics: tuple[TopicName, ...] = ()
    """Where it has rows that are not settled."""
    hidden_messages: int | None = 0
    """Messages that transactional readers cannot pass because of it, the largest over its topics; None: a topic
    did not say."""
    service: int = 0
    """Whose word this is, as in ``Begun``; 0: it has not begun any."""


@dataclass(frozen=True, slots=True)
class CompletePass:
    """A pass of the janitor over all topics, as it begins: hand it back when every one of them was passed."""

    begun_ms: int
    invalids: tuple[int, ...]
    """Pointers on the invalid list, ascending: rows that carry one are to be rolled back."""
    bound: int
    """When the pass is complete, no row below or at this pointer is undecided (Tephra's prune upper bound)."""


@dataclass(frozen=True, slots=True)
class PruningFigures:
    """What an operator needs for pruning the invalid list, by hand or not."""

    invalid: int
    """Pointers on the list."""
    oldest_invalid: int | None
    oldest_by_topic: Mapping[TopicName, int]
    """The oldest undecided or invalid pointer each topic still has rows of."""
    safe_bound: int | None
    """Invalid pointers up to it are in no row any more; None: no pass was complete yet."""
    last_pass_ms: int | None
    """When the last complete pass began."""
    max_lifetime_ms: int
    kept_because: str | None
    """Why nothing is pruned by itself; None: it is."""


@dataclass(frozen=True, slots=True)
class ServiceFigures:
    """Numbers for metrics and ``status``, taken without waiting."""

    open: int
    """Transactions in progress, checkpoints not counted."""
    invalid: int
    outcomes: int
    oldest_open_ms: int | None
    """When the longest open one began."""
    committed_bytes: int
    """What change sets occupy that somebody may still conflict with."""


class ChangeConflict(TransactionConflict):
    """A committed transaction changed one of the keys; has what Tephra's exception carries."""

    def __init__(self, transaction_id: int, key: bytes, client_id: str | None) -> None:
        self.transaction_id = transaction_id
        self.key = shown_key(key)
        self.client_id = client_id
        other = f"client {client_id!r}" if client_id else "a client that is not known any more"
        super().__init__(
            f"transaction {transaction_id} changed {self.key}, which {other} has changed since it began",
            hint="roll back, abort, and run it again",
        )


def shown_key(key: bytes) -> str:
    r"""A key of a change set for people: what is printable as it is, everything else as ``\xHH``."""
    return "".join(chr(byte) if 32 <= byte < 127 else f"\\x{byte:02X}" for byte in key)


# --- asks ------------------------------------------------------------------------------------------
#
# What the transaction service can be asked, each with the type of its answer.


@dataclass(slots=True)
class Begin(Ask[Begun]):
    """Begin a transaction; ``timeout_s`` None: the default of its type."""

    type: TransactionType = TransactionType.SHORT
    timeout_s: int | None = None
    client_id: str = "unknown"


@dataclass(slots=True)
class Prepare(Ask[None]):
    """Check a change set, and keep it until the commit."""

    transaction_id: int
    changes: Sequence[bytes]
    size: int = 0


@dataclass(frozen=True, slots=True)
class CloseFirst:
    """The answer to a commit of what topics are enlisted for, and that is not frozen: they are to close it first."""


@dataclass(slots=True)
class Commit(Ask["Decision | CloseFirst"]):
    """Commit; nothing may be in the middle of being written under its pointers."""

    transaction_id: int


@dataclass(frozen=True, slots=True)
class RollFirst:
    """The answer to an abort that is not over: rows of these pointers are to be rolled back everywhere."""

    transaction_id: int
    pointers: tuple[int, ...]


@dataclass(slots=True)
class Abort(Ask["Decision | RollFirst"]):
    """Abort; with rows somewhere that only begins it, and ``FinishAbort`` ends it."""

    transaction_id: int
    has_rows: bool = False


@dataclass(slots=True)
class FinishAbort(Ask[Decision]):
    """Its rows were rolled back in every topic, or not in all of them."""

    transaction_id: int
    complete: bool


@dataclass(slots=True)
class Invalidate(Ask[Decision]):
    """Move its pointers to the invalid list."""

    transaction_id: int


@dataclass(slots=True)
class Checkpoint(Ask[Begun]):
    """A new write pointer; ``transaction`` as the client has it, if it said."""

    transaction_id: int
    transaction: Transaction | None = None


@dataclass(slots=True)
class Unlist(Ask[int]):
    """Take pointers from the invalid list whose rows are rolled back everywhere; how many went."""

    pointers: Sequence[int]


@dataclass(slots=True)
class InvalidBefore(Ask["tuple[int, ...]"]):
    """Invalid pointers issued before a time. Raises InvalidTruncateTime when one in progress was too."""

    before_ms: int


@dataclass(slots=True)
class ForgetChanges(Ask[None]):
    """Forget all committed change sets."""


@dataclass(slots=True)
class KeepPass(Ask[int]):
    """A pass reached every topic; how many pointers were pruned for it."""

    passed: CompletePass


@dataclass(slots=True)
class Enlist(Ask[bool]):
    """A topic is about to write rows of a pointer; False: nobody here has issued it."""

    pointer: int
    name: TopicName


@dataclass(slots=True)
class Nothing(Ask[None]):
    """Whoever is answered knows that this is the service, and that it is up to date."""


@dataclass(slots=True)
class LookAt(Ask[TransactionStatus]):
    """What is known of one transaction, by any of its pointers."""

    pointer: int


@dataclass(slots=True)
class ListAll(Ask["list[TransactionStatus]"]):
    """Transactions of a state, or (None) the open and the invalid ones, oldest first."""

    state: State | None = None
    limit: int = 1_000

"""What the transaction service can be asked, each with the type of its answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from protocol.topic.asks import Ask
from protocol.transactions.manager.answers import Begun, Decision, TransactionStatus
from protocol.transactions.transaction import TransactionType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.names import TopicName
    from protocol.transactions.manager.answers import CompletePass, State
    from protocol.transactions.transaction import Transaction


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

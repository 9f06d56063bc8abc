"""What a client raises: the daemon's errors, told by code, and what can happen on the way to it.

    plainsong.protocol.errors.PlainsongError            every one has code, outcome, detail, hint
    ├── what the daemon answered: TopicNotFound, TopicExists, Overloaded, OutcomeUnknown, …
    ├── ConnectFailed         nobody answered the door: nothing happened
    ├── ConnectionLost        the connection broke before a whole answer: unknown, unless it was only reading
    ├── DeadlineExceeded      a time limit passed: its outcome says whether nothing happened or nobody knows
    ├── UnexpectedAnswer      somebody answered, who is not our daemon or of a later version
    ├── NotSent               a publisher was closed with messages left: how many, and what is known of them
    ├── BufferFull            a publisher's buffer is full, and it was asked not to wait: nothing happened
    ├── MessageDropped        best effort gave this message up
    ├── PositionNotSaved      a reader's position could not be read or written: reading again delivers again
    ├── NotEncodable          a serializer cannot write this value: nothing happened
    ├── TransactionFailed     a participant failed, and the transaction was undone
    │   └── CommittedWithErrors   a participant failed after the commit, which stands
    ├── TransactionInDoubt    nobody can be asked whether the transaction was committed
    ├── TransactionTimedOut   it took longer than it may, and was not committed
    ├── TransactionInProgress a second one was begun where one is under way: nothing happened
    ├── NoTransaction         none is under way, or it has ended: nothing happened
    ├── SequenceIdsMixed      some messages of a producer have sequence ids and some have none: nothing happened
    ├── ProducerStopped       an earlier message of this producer was not delivered: nothing happened to this one
    ├── MaxTransactionSizeExceeded    a write would pass the bound of a lightweight transaction: nothing happened
    ├── TransactionOutcomeUnknown     nobody can know whether a lightweight transaction took
    └── Closed                the client, publisher or reader has been closed: nothing happened

``outcome`` is of the one call that raised: ``not-applied`` (change it or try again), ``applied``, or
``unknown`` (it may have happened). No other exception leaves this package on account of the network.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.protocol.errors import (
    BY_CODE,
    AlreadyPublished,
    BadRequest,
    BodyTooLarge,
    Conflict,
    DeduplicationDisabled,
    Forbidden,
    GenerationChanged,
    Gone,
    Internal,
    InvalidMessageId,
    InvalidName,
    InvalidParameter,
    InvalidProperty,
    InvalidSequenceIds,
    LowSpace,
    MalformedTransaction,
    MessageTooLarge,
    MethodNotAllowed,
    NoMessages,
    NotFound,
    Outcome,
    OutcomeUnknown,
    Overloaded,
    PartialDuplicate,
    PlainsongError,
    PositionChanged,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    QuotaExceeded,
    Recovering,
    RolledBack,
    SequenceConsumed,
    ShuttingDown,
    StorageFailed,
    TooLarge,
    TooManyProducers,
    TopicExists,
    TopicFull,
    TopicNotFound,
    TransactionConflict,
    TransactionExpired,
    TransactionNotFound,
    TransactionNotInProgress,
    TransactionRefused,
    TransactionRequired,
    TransactionsUnavailable,
    TransactionTooLarge,
    Unauthenticated,
    Unavailable,
    UnsupportedMediaType,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AlreadyPublished",
    "BadRequest",
    "BodyTooLarge",
    "BufferFull",
    "Closed",
    "CommittedWithErrors",
    "Conflict",
    "ConnectFailed",
    "ConnectionLost",
    "DeadlineExceeded",
    "DeduplicationDisabled",
    "Forbidden",
    "GenerationChanged",
    "Gone",
    "Internal",
    "InvalidMessageId",
    "InvalidName",
    "InvalidParameter",
    "InvalidProperty",
    "InvalidSequenceIds",
    "LowSpace",
    "MalformedTransaction",
    "MaxTransactionSizeExceeded",
    "MessageDropped",
    "MessageTooLarge",
    "NoMessages",
    "NoTransaction",
    "NotEncodable",
    "NotFound",
    "NotSent",
    "Outcome",
    "OutcomeUnknown",
    "Overloaded",
    "PartialDuplicate",
    "PlainsongError",
    "PositionChanged",
    "PositionNotSaved",
    "ProducerExpired",
    "ProducerFenced",
    "ProducerNotFound",
    "ProducerStopped",
    "QuotaExceeded",
    "Recovering",
    "RolledBack",
    "SequenceConsumed",
    "SequenceIdsMixed",
    "ShuttingDown",
    "StorageFailed",
    "TooLarge",
    "TooManyProducers",
    "TopicExists",
    "TopicFull",
    "TopicNotFound",
    "TransactionConflict",
    "TransactionExpired",
    "TransactionFailed",
    "TransactionInDoubt",
    "TransactionInProgress",
    "TransactionNotFound",
    "TransactionNotInProgress",
    "TransactionOutcomeUnknown",
    "TransactionRefused",
    "TransactionRequired",
    "TransactionTimedOut",
    "TransactionTooLarge",
    "TransactionsUnavailable",
    "Unauthenticated",
    "Unavailable",
    "UnexpectedAnswer",
]


class ConnectFailed(Unavailable):
    """No connection came about at any of the URLs: nothing happened."""

    code = "connect_failed"
    title = "The daemon cannot be reached"


class ConnectionLost(PlainsongError):
    """The connection broke after the request had begun to leave, before a whole answer came: unknown."""

    code = "connection_lost"
    title = "The connection broke before the answer came"
    outcome: Outcome = "unknown"


class DeadlineExceeded(PlainsongError):
    """A request's or a call's time was over. ``outcome``: ``not-applied`` when no attempt can have taken, else ``unknown``."""

    code = "deadline_exceeded"
    title = "The time is over"

    def __init__(self, detail: str = "", *, outcome: Outcome = "not-applied", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.outcome = outcome


class UnexpectedAnswer(PlainsongError):
    """An answer that no daemon of this version gives: a proxy's page, a redirect, a body that does not decode."""

    code = "unexpected_answer"
    title = "This is no answer of ours"
    outcome: Outcome = "unknown"


class NotSent(PlainsongError):
    """A publisher ended with messages whose publishing did not come to a good end.

    ``unsent``: never happened. ``unknown``: sent, and nobody knows. Each message's own future says the same.
    """

    code = "not_sent"
    title = "Not everything was sent"

    def __init__(self, unsent: int, unknown: int) -> None:
        detail = f"{unsent} messages were not sent, of {unknown} nobody knows"
        super().__init__(detail, hint="their futures say which; give close a longer timeout_s")
        self.unsent = unsent
        self.unknown = unknown
        self.outcome = "unknown" if unknown else "not-applied"


class BufferFull(PlainsongError):
    """The publisher's buffer has no room, or the message is larger than all of it: nothing happened."""

    code = "buffer_full"
    title = "The buffer is full"


class MessageDropped(PlainsongError):
    """Best effort gave the message up; ``outcome`` says whether it may have been published all the same."""

    code = "message_dropped"
    title = "The message was given up"

    def __init__(self, detail: str = "", *, outcome: Outcome = "not-applied", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.outcome = outcome


class PositionNotSaved(PlainsongError):
    """A position could not be read or written. What was read since the last one that could will be delivered again."""

    code = "position_not_saved"
    title = "The position cannot be kept"


class NotEncodable(PlainsongError):
    """The serializer cannot make bytes of a value: nothing happened. ``__cause__`` is its own error."""

    code = "not_encodable"
    title = "This value cannot be written"


class Closed(PlainsongError):
    """Used after it was closed, or outside of its ``with`` block: nothing happened."""

    code = "closed"
    title = "It is closed"


class TransactionFailed(PlainsongError):
    """A participant failed, and the transaction was undone: no transactional reader will see anything of it.

    ``__cause__`` is what went wrong first, if that was an exception; ``others`` is what went wrong after it, in
    order, while undoing. The notes (``__notes__``) tell the same, and what became of the transaction.
    """

    code = "transaction_failed"
    title = "The transaction failed and was undone"

    def __init__(self, detail: str = "", *, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.others: Sequence[BaseException] = ()


class CommittedWithErrors(TransactionFailed):
    """The transaction is committed, and stays so; some participants failed afterwards, in ``post_tx_commit``."""

    code = "committed_with_errors"
    title = "The transaction is committed, but what follows a commit failed"
    outcome: Outcome = "applied"


class TransactionInDoubt(PlainsongError):
    """The commit was asked for, and nobody can tell what became of it. Nothing was undone, since it may stand.

    Ask again later: ``client.transactions.get(error.transaction_id)`` knows for as long as outcomes are kept.
    """

    code = "transaction_in_doubt"
    title = "Nobody knows whether the transaction was committed"
    outcome: Outcome = "unknown"

    def __init__(self, detail: str = "", *, hint: str = "", transaction_id: int = 0) -> None:
        super().__init__(detail, hint=hint)
        self.transaction_id = transaction_id


class TransactionTimedOut(TransactionNotInProgress):
    """The transaction took longer than it may: it was not committed. Says its age, its limit, and where that is set."""

    code = "transaction_timed_out"
    title = "The transaction took too long"


class TransactionInProgress(PlainsongError):
    """A transaction is under way here already; there are none inside of others. Nothing happened."""

    code = "transaction_in_progress"
    title = "A transaction is under way here"


class NoTransaction(PlainsongError):
    """No transaction is under way, or the one meant has ended. Nothing happened."""

    code = "no_transaction"
    title = "There is no transaction under way"


class SequenceIdsMixed(InvalidSequenceIds, ValueError):
    """Some messages of one producer have sequence ids and some have none. Nothing happened."""

    title = "All messages have sequence ids, or none"


class ProducerStopped(PlainsongError):
    """An earlier message of this producer was not delivered, and this one must not overtake it: nothing happened to it.

    ``__cause__`` is what became of the earlier one. Open the producer again, and go on after its ``last_sequence_id``.
    """

    code = "producer_stopped"
    title = "The producer has stopped"


class MaxTransactionSizeExceeded(TransactionTooLarge):
    """This write would make the lightweight transaction larger than it may be: it is not part of it, and it is still open."""

    title = "A lightweight transaction may not be as large"


class TransactionOutcomeUnknown(OutcomeUnknown):
    """Nobody can know whether a lightweight transaction took: whoever knew has been deleted. It was not sent again."""

    title = "Nobody knows whether this transaction took"


# --- errors as they are answered -----------------------------------------------------------------


def _narrowed(cls: type[PlainsongError]) -> type[PlainsongError]:
    """The subclass that has no code of its own but this one: ``Overloaded`` for ``Unavailable``.

    Of those beside it: a daemon in the same process has some that say more than an answer does.
    """
    beside = [narrow for narrow in cls.__subclasses__() if narrow.__module__ == cls.__module__]
    return next((narrow for narrow in beside if narrow.code == cls.code), cls)


#: Every code and the narrowest class that carries it, so that users can catch either.
NARROWEST = {code: _narrowed(cls) for code, cls in BY_CODE.items()}


#: What a code that this version does not know is told as.
BY_STATUS: dict[int, type[PlainsongError]] = {
    400: BadRequest,
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    405: MethodNotAllowed,
    409: Conflict,
    410: Gone,
    413: TooLarge,
    415: UnsupportedMediaType,
    429: QuotaExceeded,
    500: Internal,
    503: Unavailable,
}


def problem_error(problem: Mapping[str, Any], status: int = 0) -> PlainsongError:
    """The error that a problem+json object tells; a code of a later version is kept as it is."""
    code = str(problem.get("code", ""))
    status = status or int(problem.get("status", 500))
    cls = NARROWEST.get(code) or BY_STATUS.get(status, PlainsongError)
    error = cls(str(problem.get("detail", "")), hint=str(problem.get("hint", "")))
    if error.code != code and code:
        vars(error)["code"] = code
    outcome = problem.get("outcome")
    if outcome in ("not-applied", "applied", "unknown"):
        error.outcome = outcome
    return error

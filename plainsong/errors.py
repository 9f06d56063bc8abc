"""The errors that a client raises: the daemon's, by code, and those of the connection and the client itself.

    plainsong.errors.PlainsongError                     every error has code, outcome, detail, hint
    ├── returned by the daemon: TopicNotFound, TopicExists, Overloaded, OutcomeUnknown, …
    ├── ConnectFailed         no daemon accepted a connection: nothing happened
    ├── ConnectionLost        the connection broke before a whole answer: unknown; a read changes nothing
    ├── DeadlineExceeded      a time limit passed: not-applied or unknown, as ``outcome`` says
    ├── UnexpectedAnswer      the answer is not from a daemon, or from a later version
    ├── NotSent               a publisher was closed with undelivered messages: ``unsent`` and ``unknown`` count them
    ├── BufferFull            a publisher's buffer is full, and its overflow is not ``wait``: nothing happened
    ├── MessageDropped        a best-effort publisher gave this message up
    ├── PositionNotSaved      a reader's position could not be loaded or saved: messages will be delivered again
    ├── NotEncodable          a serializer cannot write this value: nothing happened
    ├── TransactionFailed     a participant failed, and the transaction was undone
    │   └── CommittedWithErrors   a participant failed after the commit, which stands
    ├── TransactionInDoubt    the client cannot find out whether the transaction was committed
    ├── TransactionTimedOut   the transaction passed its time limit and was not committed
    ├── TransactionInProgress a transaction was begun inside another: nothing happened
    ├── NoTransaction         no transaction is under way, or it has ended: nothing happened
    ├── SequenceIdsMixed      some messages of a producer have sequence ids and some have none: nothing happened
    ├── ProducerStopped       an earlier message of this producer was not delivered: nothing happened to this one
    ├── MaxTransactionSizeExceeded    a write would exceed the limit of a lightweight transaction: nothing happened
    ├── TransactionOutcomeUnknown     the client cannot find out whether a lightweight transaction was published
    └── Closed                the client, publisher or reader has been closed: nothing happened

``outcome`` describes the call that raised: ``not-applied`` (correct or repeat it), ``applied``, or ``unknown`` (it may
have happened). Network failures raise no other exceptions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.hints import in_python
from plainsong.protocol import errors as protocol_errors
from plainsong.protocol.errors import (
    BY_CODE,
    AlreadyPublished,
    AsOfTooOld,
    AuditUnavailable,
    AuthenticationUnavailable,
    BackupRunning,
    BadRequest,
    BodyTooLarge,
    ClusterUnavailable,
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
    MalformedBody,
    MalformedTransaction,
    MessageTooLarge,
    MethodNotAllowed,
    NoMessages,
    NoOwner,
    NotFound,
    Outcome,
    OutcomeUnknown,
    Overloaded,
    PartialDuplicate,
    PartlyCleaned,
    PlainsongError,
    PositionChanged,
    PreconditionFailed,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    QuotaExceeded,
    Recovering,
    ReplicationUnavailable,
    RequestTooLarge,
    RolledBack,
    SequenceConsumed,
    ShuttingDown,
    Standby,
    StorageFailed,
    TlsRequired,
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
    UnknownField,
    UnsupportedMediaType,
)
from plainsong.protocol.plurals import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = [
    "AlreadyPublished",
    "AsOfTooOld",
    "AuditUnavailable",
    "AuthenticationUnavailable",
    "BackupRunning",
    "BadRequest",
    "BodyTooLarge",
    "BufferFull",
    "Closed",
    "ClusterUnavailable",
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
    "MalformedBody",
    "MalformedTransaction",
    "MaxTransactionSizeExceeded",
    "MessageDropped",
    "MessageTooLarge",
    "MethodNotAllowed",
    "NoMessages",
    "NoOwner",
    "NoTransaction",
    "NotEncodable",
    "NotFound",
    "NotSent",
    "Outcome",
    "OutcomeUnknown",
    "Overloaded",
    "PartialDuplicate",
    "PartlyCleaned",
    "PlainsongError",
    "PositionChanged",
    "PositionNotSaved",
    "PreconditionFailed",
    "ProducerExpired",
    "ProducerFenced",
    "ProducerNotFound",
    "ProducerStopped",
    "QuotaExceeded",
    "Recovering",
    "ReplicationUnavailable",
    "RequestTooLarge",
    "RolledBack",
    "SequenceConsumed",
    "SequenceIdsMixed",
    "ShuttingDown",
    "Standby",
    "StorageFailed",
    "TlsRequired",
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
    "UnknownField",
    "UnsupportedMediaType",
]


class ConnectFailed(Unavailable):
    """The client could not connect to any of its URLs: nothing happened."""

    code = "connect_failed"
    title = "The daemon cannot be reached"
    is_first: bool = False
    """True if no daemon has ever answered this client, which then does not retry (``wait_for_daemon_s``)."""
    patience_left_s: float | None = None
    """Seconds for which the client will still try to reach a daemon for the first time; None once one has answered."""


class ConnectionLost(PlainsongError):
    """The connection broke after the first byte of the request and before the complete answer: unknown."""

    code = "connection_lost"
    title = "The connection broke before the answer arrived"
    outcome: Outcome = "unknown"


class DeadlineExceeded(PlainsongError):
    """A request or call passed its time limit.

    ``outcome`` is ``not-applied`` if no attempt can have taken effect, else ``unknown``.
    """

    code = "deadline_exceeded"
    title = "The call timed out"

    def __init__(self, detail: str = "", *, outcome: Outcome = "not-applied", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.outcome = outcome


class UnexpectedAnswer(PlainsongError):
    """The answer is not from a daemon of this version: a proxy's page, a redirect, a body that does not decode."""

    code = "unexpected_answer"
    title = "This answer is not from Plainsong"
    outcome: Outcome = "unknown"


class NotSent(PlainsongError):
    """A publisher was flushed or closed with undelivered messages.

    ``unsent`` messages were not published; ``unknown`` messages may have been. Each message's future says the same.
    ``causes`` has the distinct errors; the first is also ``__cause__``, and quoted in the text.
    """

    code = "not_sent"
    title = "Some messages were not sent"

    def __init__(self, unsent: int, unknown: int, causes: Iterable[PlainsongError] = ()) -> None:
        details: dict[str, PlainsongError] = {}
        for cause in causes:
            details.setdefault(cause.detail, cause)
        detail = _not_sent(unsent, unknown)
        if details:
            others = len(details) - 1
            more = f", and {counted(others, 'other error')}" if others else ""
            detail += f": {next(iter(details))}{more}"
        first = next(iter(details.values()), None)
        hint = "their futures say which"
        if first is None or unknown:
            hint += "; pass a longer timeout_s to close"
        super().__init__(detail, hint=first.hint if first is not None and first.hint else hint)
        self.unsent = unsent
        self.unknown = unknown
        self.outcome = "unknown" if unknown else "not-applied"
        #: The distinct errors, in the order in which they occurred; the first is also ``__cause__``.
        self.causes = tuple(details.values())
        self.__cause__ = first


def not_sent_by_all(errors: Sequence[NotSent]) -> NotSent:
    """Combine the errors of several publishers."""
    causes = [cause for each in errors for cause in each.causes]
    return NotSent(sum(each.unsent for each in errors), sum(each.unknown for each in errors), causes)


def _not_sent(unsent: int, unknown: int) -> str:
    if not unknown:
        return f"{counted(unsent, 'message')} not sent"
    if not unsent:
        return f"{counted(unknown, 'message')} may not have been sent"
    return f"{counted(unsent, 'message')} not sent, and {unknown} that may have been"


class BufferFull(PlainsongError):
    """The publisher's buffer has no room, or the message is larger than all of it: nothing happened."""

    code = "buffer_full"
    title = "The buffer is full"


class MessageDropped(PlainsongError):
    """The publisher gave up on the message. ``outcome`` says whether it may have been published nevertheless."""

    code = "message_dropped"
    title = "The message was dropped"

    def __init__(self, detail: str = "", *, outcome: Outcome = "not-applied", hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.outcome = outcome


class PositionNotSaved(PlainsongError):
    """A position could not be loaded or saved. Messages read since the last save will be delivered again."""

    code = "position_not_saved"
    title = "The position cannot be loaded or saved"


class NotEncodable(PlainsongError):
    """The serializer cannot encode a value: nothing happened. ``__cause__`` is the serializer's error."""

    code = "not_encodable"
    title = "This value cannot be serialized"


class Closed(PlainsongError):
    """The object was used after its close, or outside its ``with`` block: nothing happened."""

    code = "closed"
    title = "The object is closed"


class TransactionFailed(PlainsongError):
    """A participant failed, and the transaction was undone: no transactional reader sees any of it.

    ``__cause__`` is the first exception, if there was one; ``others`` has the later ones, in order. The notes
    (``__notes__``) list the same and say how the transaction ended.
    """

    code = "transaction_failed"
    title = "The transaction failed and was undone"

    def __init__(self, detail: str = "", *, hint: str = "") -> None:
        super().__init__(detail, hint=hint)
        self.others: Sequence[BaseException] = ()


class CommittedWithErrors(TransactionFailed):
    """The transaction is committed. A participant failed afterwards, in ``post_tx_commit``."""

    code = "committed_with_errors"
    title = "The transaction is committed, but a step after the commit failed"
    outcome: Outcome = "applied"


class TransactionInDoubt(PlainsongError):
    """The commit was sent, and its outcome could not be found out. Nothing was undone, since the commit may stand.

    Query it later with ``client.transactions.get(error.transaction_id)``, while the service keeps the outcome.
    """

    code = "transaction_in_doubt"
    title = "The outcome of the transaction is unknown"
    outcome: Outcome = "unknown"

    def __init__(self, detail: str = "", *, hint: str = "", transaction_id: int = 0) -> None:
        super().__init__(detail, hint=hint)
        self.transaction_id = transaction_id


class TransactionTimedOut(TransactionNotInProgress):
    """The transaction passed its time limit and was not committed.

    The detail has the transaction's age and limit, the hint the settings.
    """

    code = "transaction_timed_out"
    title = "The transaction took too long"


class TransactionInProgress(PlainsongError):
    """A transaction is already under way here; transactions do not nest. Nothing happened."""

    code = "transaction_in_progress"
    title = "A transaction is already in progress here"


class NoTransaction(PlainsongError):
    """No transaction is under way, or it has ended. Nothing happened."""

    code = "no_transaction"
    title = "There is no transaction in progress"


class SequenceIdsMixed(InvalidSequenceIds, ValueError):
    """Some messages of one producer have sequence ids and some have none. Nothing happened."""

    title = "Give all messages sequence ids, or none"


class ProducerStopped(PlainsongError):
    """An earlier message of this producer was not delivered, and this one must not overtake it: it was not sent.

    ``__cause__`` is the error of the earlier message. Open the producer again and continue after its ``last_sequence_id``.
    """

    code = "producer_stopped"
    title = "The producer has stopped"


class MaxTransactionSizeExceeded(TransactionTooLarge):
    """This write would exceed the size limit of its lightweight transaction, which stays open without it."""

    title = "The lightweight transaction is too large"


class TransactionOutcomeUnknown(OutcomeUnknown):
    """The daemon can no longer tell whether a lightweight transaction was stored. The client did not send it again."""

    title = "The outcome of the lightweight transaction is unknown"


# A traceback names a class by the module that users import it from.
for _name in __all__:
    _each = globals()[_name]
    if isinstance(_each, type) and _each.__module__ == protocol_errors.__name__:
        _each.__module__ = __name__


# --- decoding error answers ----------------------------------------------------------------------


def _narrowed(cls: type[PlainsongError]) -> type[PlainsongError]:
    """The subclass with the same code, such as ``Overloaded`` for ``Unavailable``.

    Ignores subclasses outside the protocol's module: a daemon in the same process defines more specific ones.
    """
    beside = [narrow for narrow in cls.__subclasses__() if vars(protocol_errors).get(narrow.__name__) is narrow]
    return next((narrow for narrow in beside if narrow.code == cls.code), cls)


#: The narrowest class for each code, so that users can catch it or its base class.
NARROWEST = {code: _narrowed(cls) for code, cls in BY_CODE.items()}


#: The class for a code that this version does not know.
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
    """Decode a problem+json object. An unknown code is kept in ``code``."""
    code = str(problem.get("code", ""))
    status = status or int(problem.get("status", 500))
    cls = NARROWEST.get(code) or BY_STATUS.get(status, PlainsongError)
    error = cls(str(problem.get("detail", "")), hint=in_python(str(problem.get("hint", ""))))
    if error.code != code and code:
        vars(error)["code"] = code
    outcome = problem.get("outcome")
    if outcome in ("not-applied", "applied", "unknown"):
        error.outcome = outcome
    return error

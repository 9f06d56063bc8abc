"""Everything that can go wrong, each with its stable code and whether the request happened.

    PlainsongError
    ├── BadRequest            the client can correct it              ├── TooLarge
    ├── Unauthenticated, Forbidden                                   ├── UnsupportedMediaType
    ├── NotFound, MethodNotAllowed                                   ├── QuotaExceeded
    ├── Conflict              with the current state                 ├── Unavailable    try again later
    ├── PreconditionFailed    it has changed since it was read        └── Internal       a bug in Plainsong
    └── Gone                  it existed once

An error has a ``code`` (machine-readable, listed in docs/http.md, never changed) and an ``outcome``. It is
independent of HTTP: one table in ``broker/http/messages.py`` maps classes to statuses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

#: The request did not happen, it happened, or that is not known.
Outcome = Literal["not-applied", "applied", "unknown"]


class PlainsongError(Exception):
    """The root. ``detail`` says what is wrong in this case, ``hint`` what to do about it."""

    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "The request failed"
    outcome: Outcome = "not-applied"
    #: Seconds after which a retry makes sense; None where it does not.
    retry_after_s: int | None = None

    def __init__(self, detail: str = "", *, hint: str = "") -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.hint = hint

    def __str__(self) -> str:
        """The detail and the hint, so that a traceback says what to do."""
        return f"{self.detail} (hint: {self.hint})" if self.hint else self.detail

    def __reduce__(self) -> tuple[object, ...]:
        # Subclasses have their own arguments, which the default pickling of exceptions would lose.
        return _restored, (type(self), self.args), self.__dict__


def _restored(cls: type[PlainsongError], arguments: tuple[object, ...]) -> PlainsongError:
    """For pickle, which then restores the attributes."""
    return cls.__new__(cls, *arguments)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the known word nearest to ``word``, or all of them when none is near."""
    from difflib import get_close_matches  # rarely needed: only for misspelt words

    choices = sorted(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(choices)


# --- the client can correct it -----------------------------------------------------------------


class BadRequest(PlainsongError):
    """The request itself is wrong; sending it again unchanged fails again."""

    code = "invalid_parameter"
    title = "The request is not valid"


class InvalidParameter(BadRequest):
    """A query parameter or header has a value that is not allowed."""


class TlsRequired(BadRequest):
    """The port speaks TLS, and the request was sent without it."""

    code = "tls_required"
    title = "This port speaks TLS"


class MalformedBody(BadRequest):
    """The body does not decode; the detail names the position."""

    code = "malformed_body"
    title = "The body does not decode"


class UnknownField(BadRequest):
    """A body has an unknown field; the hint names the nearest known one."""

    code = "unknown_field"
    title = "The body has an unknown field"


class InvalidName(BadRequest):
    """A namespace, topic or reader name that is not allowed."""

    code = "invalid_name"
    title = "The name is not allowed"


class InvalidProperty(BadRequest):
    """A topic property that is unknown or has a value that is not allowed."""

    code = "invalid_property"
    title = "The property is not allowed"


class InvalidMessageId(BadRequest):
    """A message id that is not 20 bytes (40 hex digits)."""

    code = "invalid_message_id"
    title = "The message id is not valid"


class InvalidSequenceIds(BadRequest):
    """Sequence ids that are negative, not increasing, or not one per message."""

    code = "invalid_sequence_ids"
    title = "The sequence ids are not valid"


class NoMessages(BadRequest):
    """A publish or store without messages."""

    code = "no_messages"
    title = "The request has no messages"


class TransactionRequired(BadRequest):
    """The topic, or this request, needs a write pointer."""

    code = "transaction_required"
    title = "A write pointer is required"


class TransactionRefused(BadRequest):
    """The topic accepts no write pointers."""

    code = "transaction_refused"
    title = "The topic accepts no write pointers"


class MalformedTransaction(BadRequest):
    """A transaction snapshot that does not decode."""

    code = "malformed_transaction"
    title = "The transaction does not decode"


class Unauthenticated(PlainsongError):
    """The client is not authenticated."""

    code = "unauthenticated"
    title = "Authentication is required"
    #: The challenge, as in ``WWW-Authenticate`` (RFC 6750).
    challenge: str = ""


class Forbidden(PlainsongError):
    """The client has no permission for this."""

    code = "forbidden"
    title = "Permission is denied"
    #: The verb that is missing, and on what, as in ``WWW-Authenticate`` (RFC 6750); empty: no verb would help.
    challenge: str = ""


class NotFound(PlainsongError):
    """Nothing exists under this name."""

    code = "not_found"
    title = "Nothing exists under this name"


class TopicNotFound(NotFound):
    """The topic does not exist."""

    code = "topic_not_found"
    title = "There is no such topic"


class TransactionNotFound(NotFound):
    """The transaction is not known."""

    code = "transaction_not_found"
    title = "There is no such transaction"


class ProducerNotFound(NotFound):
    """The producer is not known."""

    code = "producer_not_found"
    title = "There is no such producer"


class MethodNotAllowed(PlainsongError):
    """The path is right, the method is not."""

    code = "method_not_allowed"
    title = "The method is not allowed for this path"


# --- conflicts with the current state ----------------------------------------------------------


class Conflict(PlainsongError):
    """The request conflicts with the current state."""

    code = "conflict"
    title = "The request conflicts with the current state"


class TopicExists(Conflict):
    """A topic of this name exists already."""

    code = "topic_exists"
    title = "The topic exists already"


class PositionChanged(Conflict):
    """A reader's position is not the expected one."""

    code = "position_changed"
    title = "The reader's position is not the expected one"


class GenerationChanged(Conflict):
    """The topic has been re-created since."""

    code = "generation_changed"
    title = "The topic has been re-created since"


class AlreadyPublished(Conflict):
    """The messages stored under this write pointer have been published: nothing can be added."""

    code = "already_published"
    title = "The stored messages are already published"


class RolledBack(Conflict):
    """The write pointer was rolled back in this topic."""

    code = "rolled_back"
    title = "The write pointer was rolled back"


class TransactionExpired(Conflict):
    """The write pointer is older than the longest lifetime of a transaction."""

    code = "transaction_expired"
    title = "The transaction is too old"


class TransactionNotInProgress(Conflict):
    """The transaction is committed, aborted or invalid, or one of these is under way."""

    code = "transaction_not_in_progress"
    title = "The transaction is not in progress"


class TransactionConflict(Conflict):
    """Another transaction changed the same key and was committed first."""

    code = "transaction_conflict"
    title = "Two transactions changed the same key"


class ProducerFenced(Conflict):
    """A newer session of this producer has been opened: the older one can store nothing more."""

    code = "producer_fenced"
    title = "A newer session of this producer has been opened"


class PartialDuplicate(Conflict):
    """A part of an atomic request was stored before, so that it cannot be stored as a whole."""

    code = "partial_duplicate"
    title = "Part of the request was stored before"


class SequenceConsumed(Conflict):
    """The sequence ids were used under another write pointer, or only one of the uses had one; use new ids."""

    code = "sequence_consumed"
    title = "The sequence ids were used under another write pointer"


class DeduplicationDisabled(Conflict):
    """Deduplication is off for the topic: it has no producer sessions."""

    code = "deduplication_disabled"
    title = "Deduplication is off for this topic"


class PreconditionFailed(PlainsongError):
    """The topic is not in the state that the request's ``If-Match`` names."""

    code = "precondition_failed"
    title = "The topic has changed since it was read"


class BackupRunning(Conflict):
    """Another backup is running; only one can run at a time."""

    code = "backup_running"
    title = "Another backup is running"
    retry_after_s = 20


class Gone(PlainsongError):
    """The topic or producer existed once, and cannot be restored."""

    code = "partly_cleaned"
    title = "Rows of the deleted topic have been removed"


class PartlyCleaned(Gone):
    """A deleted topic whose rows are already being removed."""


class ProducerExpired(Gone):
    """The session's producer has been forgotten: the topic does not know which of its messages were stored."""

    code = "producer_expired"
    title = "The producer has been forgotten"


class AsOfTooOld(Gone):
    """A read as of a moment so long ago that it is no longer known what had been committed by then."""

    code = "as_of_too_old"
    title = "That moment is too long ago to read"


# --- too large, of the wrong type, too often ---------------------------------------------------


class TooLarge(PlainsongError):
    """A bound on sizes is exceeded."""

    code = "request_too_large"
    title = "The request is too large"


class RequestTooLarge(TooLarge):
    """The messages of one request are too large together, or too many."""


class BodyTooLarge(TooLarge):
    """The body, or what it decompresses to, is over ``http.max_body_bytes``."""

    code = "body_too_large"
    title = "The body is too large"


class MessageTooLarge(TooLarge):
    """One message is over ``topic.max_message_bytes``; the detail names its index."""

    code = "message_too_large"
    title = "A message is too large"


class TransactionTooLarge(TooLarge):
    """The change set of a transaction, or an atomic request, exceeds its bound."""

    code = "transaction_too_large"
    title = "The transaction is too large"


class UnsupportedMediaType(PlainsongError):
    """The ``Content-Type`` is not supported."""

    code = "unsupported_media_type"
    title = "The content type is not supported"


class QuotaExceeded(PlainsongError):
    """The client has used up its quota."""

    code = "quota_exceeded"
    title = "The quota is used up"
    retry_after_s = 1
    #: The quota of a name or a topic that is used up, as in ``RateLimit-Policy`` and ``RateLimit``; empty: another one.
    policy: str = ""
    state: str = ""
    #: True if the connection has to end, because there are too many.
    ends_connection: bool = False


# --- try again later ---------------------------------------------------------------------------


class Unavailable(PlainsongError):
    """The request is valid but cannot be served now."""

    code = "overloaded"
    title = "The service is not available now"
    retry_after_s = 1


class AuthenticationUnavailable(Unavailable):
    """The OpenID provider's tokens cannot be checked now: its keys cannot be fetched."""

    code = "authentication_unavailable"
    title = "The provider's tokens cannot be checked now"
    retry_after_s = 5


class AuditUnavailable(Unavailable):
    """The change was not made, since it could not be recorded."""

    code = "audit_unavailable"
    title = "The change cannot be recorded now"
    retry_after_s = 5


class Overloaded(Unavailable):
    """A queue or another bounded resource is full: the request was not accepted."""

    title = "The service is overloaded"


class Recovering(Unavailable):
    """The topic is being loaded from disk after a failure: the request was not accepted."""

    code = "recovering"
    title = "The topic is being reloaded"


class ShuttingDown(Unavailable):
    """The daemon is shutting down: the request was not accepted."""

    code = "shutting_down"
    title = "The daemon is shutting down"


class NoOwner(Unavailable):
    """The topic has no owner at the moment, or another instance owns it: the request was not accepted."""

    code = "no_owner"
    title = "The topic is moving to another owner"


class Standby(Unavailable):
    """The daemon follows another one, the primary, and serves nothing itself: the request was not accepted."""

    code = "standby"
    title = "This daemon is a standby"


class ClusterUnavailable(Unavailable):
    """ZooKeeper does not answer: topics cannot change owners; they are still served."""

    code = "cluster_unavailable"
    title = "The cluster cannot be changed at the moment"


class LowSpace(Unavailable):
    """Free disk space is below ``storage.min_free_bytes``: publishes are refused, polls are still served."""

    code = "low_space"
    title = "The disk is nearly full"
    retry_after_s = 5


class TopicFull(Unavailable):
    """The topic has reached its ``max_bytes``; messages that expire make room."""

    code = "topic_full"
    title = "The topic is full"
    retry_after_s = 5


class StorageFailed(Unavailable):
    """The store failed before anything was written, or while reading."""

    code = "storage_failed"
    title = "The store failed"


class ReplicationUnavailable(Unavailable):
    """Acknowledged changes must be in the second copy, which cannot be written now, or a standby may have taken over,
    since the primary's lease has not been renewed: the request was not accepted."""

    code = "replication_unavailable"
    title = "The second copy is not available"
    retry_after_s = 5


class OutcomeUnknown(Unavailable):
    """The store failed while writing: the request may have happened."""

    code = "outcome_unknown"
    title = "The outcome of the request is unknown"
    outcome: Outcome = "unknown"


class TooManyProducers(Unavailable):
    """The topic remembers the maximum number of producers, and all of them were active recently."""

    code = "too_many_producers"
    title = "The topic has too many producers"
    retry_after_s = 60


class TransactionsUnavailable(Unavailable):
    """The transaction service is down or switched off; requests without transactions are served."""

    code = "transactions_unavailable"
    title = "The transaction service is not available"


class Internal(PlainsongError):
    """A bug in Plainsong. The log has the traceback, the answer never does."""

    outcome: Outcome = "unknown"


def _by_code(root: type[PlainsongError]) -> dict[str, type[PlainsongError]]:
    found: dict[str, type[PlainsongError]] = {}
    waiting = [root]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.code, cls)
        waiting.extend(cls.__subclasses__())
    return found


#: The most general class of every code, with which a client converts an answer back into an error.
BY_CODE: dict[str, type[PlainsongError]] = _by_code(PlainsongError)

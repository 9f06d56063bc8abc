"""Everything that can go wrong, each with its stable code and whether the request happened.

    PlainsongError
    ├── BadRequest            the caller can change it               ├── TooLarge
    ├── Unauthenticated, Forbidden                                   ├── UnsupportedMediaType
    ├── NotFound, MethodNotAllowed                                   ├── QuotaExceeded
    ├── Conflict              something else came first              ├── Unavailable    try again later
    ├── Gone                  it was here once                       └── Internal       a bug of ours

An error knows its ``code`` (the words of docs/http.md, machine-readable, never changed) and its
``outcome``; it knows nothing of HTTP. One table in ``broker/http/messages.py`` turns classes into statuses.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

#: What the caller most needs to know: nothing happened, it happened, or nobody can say.
Outcome = Literal["not-applied", "applied", "unknown"]


class PlainsongError(Exception):
    """The root. ``detail`` says what is wrong here, ``hint`` what to do about it."""

    code: ClassVar[str] = "internal"
    title: ClassVar[str] = "Something went wrong"
    outcome: Outcome = "not-applied"
    #: Seconds after which a retry makes sense; only set where one does.
    retry_after_s: int | None = None

    def __init__(self, detail: str = "", *, hint: str = "") -> None:
        super().__init__(detail or self.title)
        self.detail = detail or self.title
        self.hint = hint


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint naming the known word nearest to ``word``, or all of them when none is near."""
    choices = sorted(known)
    close = get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(choices)


# --- the caller can change it ------------------------------------------------------------------


class BadRequest(PlainsongError):
    """The request itself is wrong; sending it again as it is will not help."""

    code = "invalid_parameter"
    title = "The request cannot be served as it is"


class InvalidParameter(BadRequest):
    """A query parameter or header has a value that is not allowed."""


class MalformedBody(BadRequest):
    """The body does not decode; the detail names the position."""

    code = "malformed_body"
    title = "The body does not decode"


class UnknownField(BadRequest):
    """A body has a field we do not know; the hint names the nearest one."""

    code = "unknown_field"
    title = "The body has an unknown field"


class InvalidName(BadRequest):
    """A namespace, topic or reader name that is not allowed."""

    code = "invalid_name"
    title = "This name is not allowed"


class InvalidProperty(BadRequest):
    """A topic property that is unknown or has a value that is not allowed."""

    code = "invalid_property"
    title = "This property is not allowed"


class InvalidMessageId(BadRequest):
    """A message id that is not 20 bytes (40 hex digits)."""

    code = "invalid_message_id"
    title = "This is no message id"


class InvalidSequenceIds(BadRequest):
    """Sequence ids that are negative, not increasing, or not one per message."""

    code = "invalid_sequence_ids"
    title = "These sequence ids cannot be used"


class NoMessages(BadRequest):
    """A publish or store that carries nothing."""

    code = "no_messages"
    title = "There is no message in the request"


class TransactionRequired(BadRequest):
    """The topic, or this call, wants a write pointer."""

    code = "transaction_required"
    title = "A write pointer is required"


class TransactionRefused(BadRequest):
    """The topic takes no write pointers."""

    code = "transaction_refused"
    title = "A write pointer is refused here"


class MalformedTransaction(BadRequest):
    """A transaction snapshot that does not decode."""

    code = "malformed_transaction"
    title = "The transaction does not decode"


class Unauthenticated(PlainsongError):
    """The caller has not said who it is."""

    code = "unauthenticated"
    title = "Who are you?"


class Forbidden(PlainsongError):
    """The caller may not do this."""

    code = "forbidden"
    title = "This is not allowed"


class NotFound(PlainsongError):
    """Nothing is there under this name."""

    code = "not_found"
    title = "There is nothing here"


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
    title = "This method is not allowed here"


# --- something else came first -----------------------------------------------------------------


class Conflict(PlainsongError):
    """The request contradicts what is there."""

    code = "conflict"
    title = "The request contradicts what is there"


class TopicExists(Conflict):
    """A topic of this name is already there."""

    code = "topic_exists"
    title = "This topic exists already"


class PositionChanged(Conflict):
    """A reader's position is not the expected one."""

    code = "position_changed"
    title = "The position is not the expected one"


class GenerationChanged(Conflict):
    """The topic has been re-created since."""

    code = "generation_changed"
    title = "The topic has been re-created since"


class AlreadyPublished(Conflict):
    """What was stored under this write pointer has been published: nothing can be added."""

    code = "already_published"
    title = "The stored messages have been published"


class RolledBack(Conflict):
    """The write pointer was rolled back in this topic."""

    code = "rolled_back"
    title = "The write pointer was rolled back"


class TransactionExpired(Conflict):
    """The write pointer is older than a transaction may live."""

    code = "transaction_expired"
    title = "The transaction is too old"


class TransactionNotInProgress(Conflict):
    """The transaction was committed, aborted or invalidated before."""

    code = "transaction_not_in_progress"
    title = "The transaction is not in progress"


class TransactionConflict(Conflict):
    """Another transaction has changed the same and was committed first."""

    code = "transaction_conflict"
    title = "Two transactions changed the same"


class ProducerFenced(Conflict):
    """Somebody has opened a session of this producer since: the older one may store nothing more."""

    code = "producer_fenced"
    title = "Another session of this producer has been opened"


class PartialDuplicate(Conflict):
    """An atomic request of which a part was stored before: all of it or nothing."""

    code = "partial_duplicate"
    title = "A part of this was stored before"


class SequenceConsumed(Conflict):
    """These sequence ids were used under another write pointer, or under one; they are never used again."""

    code = "sequence_consumed"
    title = "These sequence ids have been used"


class DeduplicationDisabled(Conflict):
    """Deduplication is switched off here: there are no producer sessions."""

    code = "deduplication_disabled"
    title = "Deduplication is switched off here"


class Gone(PlainsongError):
    """It was here once, and cannot come back."""

    code = "partly_cleaned"
    title = "It is not all there any more"


class PartlyCleaned(Gone):
    """A deleted topic whose rows are already being removed."""


class ProducerExpired(Gone):
    """The session's producer is remembered no more: what became of its messages is not known here."""

    code = "producer_expired"
    title = "This producer is remembered no more"


# --- too large, of the wrong kind, too often ---------------------------------------------------


class TooLarge(PlainsongError):
    """A bound on sizes was passed."""

    code = "request_too_large"
    title = "This is too large"


class RequestTooLarge(TooLarge):
    """The messages of one request are together too large, or too many."""


class BodyTooLarge(TooLarge):
    """The body, or what it decompresses to, is over ``http.max_body_bytes``."""

    code = "body_too_large"
    title = "The body is too large"


class MessageTooLarge(TooLarge):
    """One message is over ``topic.max_message_bytes``; the detail names its index."""

    code = "message_too_large"
    title = "A message is too large"


class TransactionTooLarge(TooLarge):
    """The change set of a transaction, or an atomic request, passes its bound."""

    code = "transaction_too_large"
    title = "The transaction is too large"


class UnsupportedMediaType(PlainsongError):
    """The ``Content-Type`` is none we read."""

    code = "unsupported_media_type"
    title = "This content type is not read here"


class QuotaExceeded(PlainsongError):
    """A client's own quota is used up."""

    code = "quota_exceeded"
    title = "Your quota is used up"
    retry_after_s = 1


# --- try again later ---------------------------------------------------------------------------


class Unavailable(PlainsongError):
    """We cannot serve this now; nothing is wrong with the request."""

    code = "overloaded"
    title = "Not now"
    retry_after_s = 1


class Overloaded(Unavailable):
    """A queue is full: the request was not taken."""

    title = "Too much is waiting already"


class Recovering(Unavailable):
    """The topic is being loaded from disk after a failure: the request was not taken."""

    code = "recovering"
    title = "The topic is being loaded again"


class ShuttingDown(Unavailable):
    """The daemon is leaving: the request was not taken."""

    code = "shutting_down"
    title = "The daemon is shutting down"


class NoOwner(Unavailable):
    """The topic has no owner just now, or another one than whoever was asked: the request was not taken."""

    code = "no_owner"
    title = "The topic is changing its owner"


class ClusterUnavailable(Unavailable):
    """ZooKeeper does not answer: nothing can be changed about who owns what; topics are served all the same."""

    code = "cluster_unavailable"
    title = "The cluster cannot be changed just now"


class LowSpace(Unavailable):
    """Free disk space is below ``storage.min_free_bytes``: publishes wait, polls go on."""

    code = "low_space"
    title = "The disk is nearly full"
    retry_after_s = 5


class TopicFull(Unavailable):
    """The topic holds as much as its ``max_bytes`` allows, until something expires."""

    code = "topic_full"
    title = "The topic is full"
    retry_after_s = 5


class StorageFailed(Unavailable):
    """The store failed before anything was written, or while reading."""

    code = "storage_failed"
    title = "The store does not answer"


class OutcomeUnknown(Unavailable):
    """The store failed while writing: the request may have happened."""

    code = "outcome_unknown"
    title = "Nobody knows whether this happened"
    outcome: Outcome = "unknown"


class TooManyProducers(Unavailable):
    """The topic remembers as many producers as it may, and none of them has been idle for long."""

    code = "too_many_producers"
    title = "There are too many producers"
    retry_after_s = 60


class TransactionsUnavailable(Unavailable):
    """The transaction service is down or switched off; plain work goes on."""

    code = "transactions_unavailable"
    title = "The transaction service is not available"


class Internal(PlainsongError):
    """A bug of ours. The log has the traceback, the answer never does."""

    outcome: Outcome = "unknown"


def _by_code(root: type[PlainsongError]) -> dict[str, type[PlainsongError]]:
    found: dict[str, type[PlainsongError]] = {}
    waiting = [root]
    while waiting:
        cls = waiting.pop()
        found.setdefault(cls.code, cls)
        waiting.extend(cls.__subclasses__())
    return found


#: Every code and the most general class that carries it: what a client turns answers back with.
BY_CODE: dict[str, type[PlainsongError]] = _by_code(PlainsongError)

"""Explains errors: ``GET /errors/{code}``, the URL in the type of every problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.api.answers import json_answer
from broker.http.messages import Answer, status_of
from plainsong.protocol.errors import BY_CODE, Internal, NotFound, nearest

if TYPE_CHECKING:
    from broker.http.messages import Request
    from plainsong.protocol.answers.problems import ErrorType

#: Equal to the table in docs/http.md; a test compares them.
WHAT_TO_DO = {
    "malformed_body": "correct what the detail names, at that position",
    "unknown_field": "correct the name; the hint suggests the nearest one",
    "invalid_name": "use another name",
    "invalid_property": "correct the property; the hint says what is allowed",
    "invalid_parameter": "correct the parameter or field",
    "invalid_message_id": "send 40 hex digits (20 bytes in Avro)",
    "invalid_sequence_ids": "send ascending ids, one for each message",
    "no_messages": "send at least one message",
    "transaction_required": (
        "add a write pointer: the topic accepts no publish without one, and a store or rollback always needs one"
    ),
    "transaction_refused": "the topic accepts no write pointers: use another topic, or change its `transactional`",
    "malformed_transaction": "send the snapshot unchanged, as the begin returned it",
    "tls_required": "the port speaks TLS: use `https://`",
    "unauthenticated": "send `Authorization: Bearer` with a token that is known, not expired and not revoked",
    "forbidden": (
        "the caller's name lacks the verb that the detail names; or the request used a host name that is not the daemon's, "
        "or came from a web page of another origin: the hint names the setting that allows it"
    ),
    "not_found": "check the path, or the reader's name",
    "topic_not_found": "create the topic, or check its name",
    "transaction_not_found": "begin another transaction: this one was never begun here, or has been forgotten",
    "producer_not_found": "open a session: the producer is unknown or has been forgotten",
    "method_not_allowed": "use a method listed in `Allow`",
    "conflict": "the current state does not allow it: the detail says why, the hint what to do",
    "topic_exists": "use the existing topic, or delete it first",
    "position_changed": "another client moved the reader: read its position",
    "generation_changed": "the topic was re-created: start over",
    "backup_running": "another backup is running: wait, or end it",
    "already_published": (
        "nothing more can be stored under this pointer: publish directly, or begin another transaction"
    ),
    "rolled_back": "begin another transaction",
    "transaction_expired": "begin another transaction; the pointer is too old",
    "transaction_not_in_progress": (
        "begin another transaction: this one was decided, has timed out, or was never begun here; the detail says which"
    ),
    "transaction_conflict": "roll back, abort, and run the transaction again",
    "producer_fenced": "a newer session of this name was opened: stop, or open another",
    "partial_duplicate": "send only messages above the last sequence id",
    "sequence_consumed": (
        "use new sequence ids; if the outcome is `unknown`, first check whether the messages are stored"
    ),
    "deduplication_disabled": "publish without a producer, or switch deduplication on",
    "partly_cleaned": "it cannot be restored; create it again",
    "as_of_too_old": "read as of a later moment: the detail names the earliest",
    "producer_expired": "the topic no longer remembers what it stored: open a session, and decide what to send",
    "precondition_failed": "the topic has changed since it was read: read it again, then decide",
    "body_too_large": "send several requests",
    "message_too_large": "split the message, or store it elsewhere and publish a reference to it",
    "request_too_large": "send fewer messages, values or topics at a time",
    "transaction_too_large": "change less in one transaction, or raise `transactions.max_change_set_bytes`; send less in one atomic request",
    "unsupported_media_type": "send one of the types that the detail lists",
    "quota_exceeded": "wait for `Retry-After`; if the quota is of readers, delete unused ones",
    "internal": "a bug in Plainsong: report it with the `X-Request-Id`",
    "overloaded": "a queue or another bounded resource is full: retry after a pause",
    "authentication_unavailable": (
        "the OpenID provider's keys cannot be fetched, so its tokens cannot be checked: "
        "retry; the daemon's own tokens still work"
    ),
    "audit_unavailable": (
        'with `security.audit = "required"`, a change that cannot be recorded is refused: retry '
        "when `system:audit` can be written"
    ),
    "standby": "the daemon is a standby: send the request to the primary, which the detail names",
    "recovering": "the topic is being reloaded: retry",
    "no_owner": "the topic is moving to another instance, or its owner cannot be reached: retry, at any instance",
    "cluster_unavailable": (
        "ZooKeeper does not answer, so pins and drains cannot change: retry; topics are still served"
    ),
    "shutting_down": "retry; the daemon is shutting down",
    "low_space": "free some disk space; polls still work",
    "topic_full": (
        "retry when messages have expired, or raise `max_bytes`; a request that is larger by itself gets "
        "413 `request_too_large`"
    ),
    "storage_failed": "the store cannot be read, or one of its rows is damaged: retry, and check the log",
    "replication_unavailable": (
        'with `replication.mode = "sync"`, the object store does not answer, or has no complete base yet; or with a '
        "standby, the primary has not renewed its lease there: retry, also at the standby"
    ),
    "outcome_unknown": (
        "the store or its second copy failed during a write or timed out, or the owner was lost before it answered: with "
        "a producer send it again, otherwise check whether it happened"
    ),
    "transactions_unavailable": (
        "the transaction service is unavailable or switched off: retry, or do without it; the hint says which"
    ),
    "too_many_producers": "retry later, use fewer names, or raise `deduplication.max_producers`",
}


@dataclass(frozen=True, slots=True)
class Problems:
    """The route that explains errors."""

    async def explain(self, request: Request) -> Answer:
        """Return one error, as JSON, or as text for people. Raises NotFound: there is no such code."""
        request.parameters()
        code = request.path["code"]
        if code not in WHAT_TO_DO:
            raise NotFound(f"unknown error code {code[:80]!r}", hint=nearest(code, WHAT_TO_DO))
        # BY_CODE has the root of all errors for ``internal``, which has no outcome of its own.
        kind = Internal if code == Internal.code else BY_CODE[code]
        status, what_to_do = status_of(kind()), WHAT_TO_DO[code]
        accepted = request.headers.get("accept", "")
        if "text/" in accepted and "application/json" not in accepted:
            text = f"{status} {code}\n{kind.title}\n\nOutcome: {kind.outcome}\nWhat to do: {what_to_do}\n"
            return Answer(200, text.encode(), "text/plain; charset=utf-8")
        shown: ErrorType = {
            "type": f"/errors/{code}",
            "code": code,
            "title": kind.title,
            "status": status,
            "outcome": kind.outcome,
            "whatToDo": what_to_do,
        }
        return json_answer(shown)

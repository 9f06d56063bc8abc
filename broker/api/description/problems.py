"""Explains errors: ``GET /errors/{code}``, the URL in the type of every problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from broker.api.answers import json_answer
from broker.http.messages import Answer, status_of
from plainsong.protocol.errors import BY_CODE, Internal, NotFound, nearest

if TYPE_CHECKING:
    from broker.http.messages import Request

#: Equal to the table in docs/http.md; a test compares them.
WHAT_TO_DO = {
    "malformed_body": "send what the detail says is missing or wrong at that position",
    "unknown_field": "correct the name; the hint has the nearest one",
    "invalid_name": "use another name",
    "invalid_property": "correct the property; the hint says what is allowed",
    "invalid_parameter": "correct the parameter or field",
    "invalid_message_id": "send 40 hex digits (20 bytes in Avro)",
    "invalid_sequence_ids": "send ascending ids, one for each message",
    "no_messages": "send at least one message",
    "transaction_required": "bring a write pointer: the topic takes no other publishes, and a store and a rollback always need one",
    "transaction_refused": "the topic takes no write pointers: use another, or change its `transactional`",
    "malformed_transaction": "send the snapshot as it was answered",
    "tls_required": "the port speaks TLS: use `https://`",
    "unauthenticated": "send `Authorization: Bearer` and a token that is known, not expired and not revoked",
    "forbidden": "the request came by a host name that is not the daemon's, or from a web page of another origin; the hint names the setting that allows it",
    "not_found": "check the path, or the reader's name",
    "topic_not_found": "create the topic, or check its name",
    "transaction_not_found": "begin another: it was never begun here, or is forgotten",
    "producer_not_found": "it is not known, or forgotten: open a session",
    "method_not_allowed": "use a method of `Allow`",
    "conflict": "this instance is alone: there is nothing to drain or to pin",
    "topic_exists": "use it, or delete it first",
    "position_changed": "another client moved the reader: read its position",
    "generation_changed": "the topic was created anew: start over",
    "backup_running": "another backup is under way: wait, or end it",
    "already_published": "nothing can be stored under this pointer any more: publish, or begin another",
    "rolled_back": "begin another transaction",
    "transaction_expired": "begin another transaction; the pointer is too old",
    "transaction_not_in_progress": "it was decided, its time was over, or it was never begun here; the detail says which",
    "transaction_conflict": "roll back, abort, and run it again",
    "producer_fenced": "a newer session of this name was opened: stop, or open another",
    "partial_duplicate": "send only what is above the last sequence id",
    "sequence_consumed": "use new sequence ids; where the answer's outcome is `unknown`, look first whether the messages are there",
    "deduplication_disabled": "publish without a producer, or have it switched on",
    "partly_cleaned": "it cannot come back; create it anew",
    "as_of_too_old": "read as of a later moment: the detail has the earliest one",
    "producer_expired": "what it stored is not known any more: open a session, and decide",
    "precondition_failed": "the topic has changed since it was read: read it again, and decide by what it is now",
    "body_too_large": "send several requests",
    "message_too_large": "cut the message, or keep it elsewhere and send where",
    "request_too_large": "send fewer messages, values or topics at a time",
    "transaction_too_large": "change less in one transaction, or raise `transactions.max_change_set_bytes`; send less in one atomic request",
    "unsupported_media_type": "send one of the types in the detail",
    "quota_exceeded": "wait as long as `Retry-After` says; of readers, delete unused ones",
    "internal": "a bug of ours: report it with the `X-Request-Id`",
    "overloaded": "too much waits already: retry after a pause",
    "authentication_unavailable": "the keys of the OpenID provider cannot be had, so that nobody can say whether its tokens are good: retry; tokens of the daemon go on",
    "audit_unavailable": 'with `security.audit = "required"`, a change that cannot be recorded is not made: retry when `system:audit` can be written',
    "recovering": "the topic is being loaded again: retry",
    "no_owner": "the topic is going from one instance to another, or its owner cannot be reached: retry, anywhere",
    "cluster_unavailable": "ZooKeeper does not answer, so that nothing can be changed about who owns what: retry; topics are served meanwhile",
    "shutting_down": "retry; the daemon is leaving",
    "low_space": "publishes wait for disk space; polls go on",
    "topic_full": "retry when something has expired, or raise `max_bytes`; a request that alone is larger is 413 `request_too_large`",
    "storage_failed": "the store cannot be read, or a row of it is damaged: retry, and look at the log",
    "outcome_unknown": "the store failed while writing, or did not answer in time, or the owner was lost before it answered: a producer sends it again, others look whether it happened",
    "transactions_unavailable": "the transaction service is away or switched off: retry, or do without; the hint says which",
    "too_many_producers": "retry later, use fewer names, or raise `deduplication.max_producers`",
}


@dataclass(frozen=True, slots=True)
class Problems:
    """The route that explains errors."""

    async def explain(self, request: Request) -> Answer:
        """Answer with one error, as JSON, or as text for people. Raises NotFound: there is no such code."""
        request.parameters()
        code = request.path["code"]
        if code not in WHAT_TO_DO:
            raise NotFound(f"there is no error {code[:80]!r}", hint=nearest(code, WHAT_TO_DO))
        # BY_CODE has the root of all errors for ``internal``, which has no outcome of its own.
        kind = Internal if code == Internal.code else BY_CODE[code]
        status, what_to_do = status_of(kind()), WHAT_TO_DO[code]
        accepted = request.headers.get("accept", "")
        if "text/" in accepted and "application/json" not in accepted:
            text = f"{status} {code}\n{kind.title}\n\nOutcome: {kind.outcome}\nWhat to do: {what_to_do}\n"
            return Answer(200, text.encode(), "text/plain; charset=utf-8")
        return json_answer(
            {
                "type": f"/errors/{code}",
                "code": code,
                "title": kind.title,
                "status": status,
                "outcome": kind.outcome,
                "whatToDo": what_to_do,
            }
        )

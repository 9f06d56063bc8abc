"""The routes of the transaction service, and their JSON forms."""

from __future__ import annotations

from broker.openapi.errors import ANY
from broker.openapi.operation import POINTER, Operation
from broker.openapi.schemas import COUNT, MILLISECONDS, POSITIVE, STRING, Schema, array, nullable, record, ref

TRANSACTIONS = "/v1/transactions"
TRANSACTION = TRANSACTIONS + "/{transaction}"

_ASKS = (*ANY, "transactions_unavailable", "no_owner", "shutting_down")
_BODY = ("malformed_body", "unknown_field", "body_too_large")
#: It is looked up, and changed durably.
_DECIDES = (*_ASKS, *_BODY, "transaction_not_found", "transaction_not_in_progress", "storage_failed", "outcome_unknown")

_POINTER_VALUE: Schema = {"type": ["integer", "string"]}
_BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_STATE: Schema = {"enum": ["in_progress", "committed", "aborted", "invalid", "unknown"]}
_STATUS: dict[str, Schema] = {
    "id": _POINTER_VALUE,
    "writePointer": _POINTER_VALUE,
    "type": nullable({"enum": ["short", "long"]}),
    "clientId": nullable(STRING),
    "state": _STATE,
    "startedMs": nullable(MILLISECONDS),
    "expiresMs": nullable(MILLISECONDS),
    "decidedMs": nullable(MILLISECONDS),
    "topics": array(STRING),
    "hiddenMessages": nullable(COUNT),
}

TRANSACTION_SCHEMAS: dict[str, Schema] = {
    "BeginRequest": record(
        type={"enum": ["short", "long"], "default": "short"}, timeoutSeconds=nullable(POSITIVE), clientId=STRING
    ),
    "BegunTransaction": record(
        "id writePointer readPointer snapshot expires",
        id=_POINTER_VALUE,
        writePointer=_POINTER_VALUE,
        readPointer=_POINTER_VALUE,
        snapshot={**_BASE64, "description": "what a poll takes as transaction"},
        expires=MILLISECONDS,
    ),
    "ChangeSet": record(changes=array(_BASE64)),
    "DecidedTransaction": record("id state", id=_POINTER_VALUE, state=_STATE),
    "Transaction": record("id state", **_STATUS),
    "TransactionOutcome": record("id state keptUntilMs", **_STATUS, keptUntilMs=nullable(MILLISECONDS)),
    "Truncation": record(ids=array(_POINTER_VALUE), beforeMs=MILLISECONDS),
    "Pruning": record(
        "invalid topics oldestByTopic",
        invalid=COUNT,
        oldestInvalid=nullable(_POINTER_VALUE),
        safeBound=nullable(_POINTER_VALUE),
        lastPassMs=nullable(MILLISECONDS),
        maxLifetimeMs=COUNT,
        keptBecause=nullable(STRING),
        topics=COUNT,
        oldestByTopic=array(record("topic oldestPointer", topic=STRING, oldestPointer=_POINTER_VALUE)),
    ),
}


def _decision(name: str, path: str, summary: str, *more: str) -> Operation:
    return Operation(
        name,
        "POST",
        f"{TRANSACTION}/{path}",
        "transactions",
        summary,
        (*_DECIDES, *more),
        ("longs",),
        answer=ref("DecidedTransaction"),
    )


TRANSACTION_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "begin",
        "POST",
        TRANSACTIONS,
        "transactions",
        "Begin a transaction; an empty body asks for a short one.",
        (*_ASKS, *_BODY, "storage_failed", "outcome_unknown"),
        ("longs",),
        ref("BeginRequest"),
        example={"type": "short", "timeoutSeconds": 10, "clientId": "billing"},
        answer=ref("BegunTransaction"),
    ),
    Operation(
        "list_transactions",
        "GET",
        TRANSACTIONS,
        "transactions",
        "Transactions in progress and invalid, or those of one state, oldest first.",
        _ASKS,
        ("state", "limit", "longs"),
        answer=array(ref("Transaction")),
    ),
    Operation(
        "get_pruning",
        "GET",
        TRANSACTIONS + "/pruning",
        "transactions",
        "How far the invalid list may be pruned, and why it is not pruned by itself.",
        _ASKS,
        ("limit", "longs"),
        answer=ref("Pruning"),
    ),
    Operation(
        "truncate",
        "POST",
        TRANSACTIONS + "/truncate",
        "transactions",
        "Take transactions off the invalid list, after rolling back what is left of them.",
        (*_ASKS, *_BODY, "storage_failed", "outcome_unknown"),
        body=ref("Truncation"),
        example={"ids": [POINTER]},
        answer=record("removed", removed=COUNT),
    ),
    Operation(
        "get_transaction",
        "GET",
        TRANSACTION,
        "transactions",
        "What is known of a transaction, decided or not.",
        _ASKS,
        ("longs",),
        answer=ref("TransactionOutcome"),
    ),
    Operation(
        "prepare",
        "POST",
        TRANSACTION + "/prepare",
        "transactions",
        "Say what the transaction changed, and learn whether that conflicts.",
        (*_DECIDES, "transaction_conflict", "transaction_too_large", "request_too_large"),
        ("longs",),
        ref("ChangeSet"),
        answer=ref("DecidedTransaction"),
    ),
    _decision("commit", "commit", "Make the transaction visible, all of it; may be repeated.", "transaction_conflict"),
    _decision("abort", "abort", "Roll the transaction back; the state says what it came to."),
    _decision("invalidate", "invalidate", "Hide the transaction for ever, without waiting for any topic."),
    Operation(
        "checkpoint",
        "POST",
        TRANSACTION + "/checkpoint",
        "transactions",
        "A new write pointer for the same transaction.",
        (*_DECIDES, "malformed_transaction"),
        ("longs",),
        record(snapshot=nullable(_BASE64)),
        answer=ref("BegunTransaction"),
    ),
)

"""What the description says of each route: what it does, takes, gives, and what may go wrong.

What the description says of one method of one path.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from broker.api.schemas import _BASE64, ANY, BODY, COUNT, READS, STRING, WRITES, array, nullable, record, ref

if TYPE_CHECKING:
    from broker.api.schemas import Schema

JSON = "application/json"
AVRO = "avro/binary"
FRAMES = "application/vnd.plainsong.frames"
#: A write pointer for examples.
POINTER = 1_700_000_000_000_000_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path, for those who call it."""

    name: str
    method: str
    path: str
    tag: str
    summary: str
    codes: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    """Names of query parameters; ``build`` describes each."""
    body: Schema | None = None
    body_types: tuple[str, ...] = (JSON,)
    example: object = None
    """Of the body."""
    answer: Schema | None = None
    """Of status 200; None: an empty body."""
    answer_types: tuple[str, ...] = (JSON,)
    headers: tuple[str, ...] = field(default=())
    """Headers of the answer that are its own."""


# --- operations ------------------------------------------------------------------------------------
#
# One entry for each route: what it does, what it takes, what it gives, what may go wrong.


NAMESPACE = "/v1/namespaces/{namespace}"
TOPIC = NAMESPACE + "/topics/{topic}"
READER = TOPIC + "/readers/{reader}"
_ID = "0000018bcfe568000002" + "0" * 20
_POSITION_HEADERS = ("Plainsong-Last-Id", "Plainsong-End")
_HELD_HEADERS = ("Plainsong-Held-By", "Plainsong-Held-Since", "Plainsong-Hidden-Messages")
#: Reading with a snapshot, the client's or the daemon's.
_VIEWS = ("transactions_unavailable", "malformed_transaction", "request_too_large")
#: Writing under a write pointer.
_UNDER = (
    "transaction_refused",
    "transaction_required",
    "transaction_expired",
    "transaction_not_in_progress",
    "rolled_back",
    "transactions_unavailable",
)
#: Messages are taken in.
_STORES = (
    "unknown_field",
    "no_messages",
    "invalid_sequence_ids",
    "generation_changed",
    "message_too_large",
    "request_too_large",
    "low_space",
    "topic_full",
)
#: A producer brings them.
_PRODUCES = ("producer_fenced", "producer_expired", "sequence_consumed", "too_many_producers", "transaction_too_large")
_VERDICT_HEADERS = ("Plainsong-Duplicate", "Plainsong-Last-Sequence-Id")
_BAD_POSITION = ("invalid_message_id", "unknown_field")


# --- producers -------------------------------------------------------------------------------------


NAMESPACES = "/v1/namespaces"
NAMESPACE_PATH = NAMESPACES + "/{namespace}"
PRODUCERS = NAMESPACE_PATH + "/topics/{topic}/producers"
PRODUCER = PRODUCERS + "/{producer}"
#: A session is opened.
_OPENS = (
    *WRITES,
    *BODY,
    "unknown_field",
    "generation_changed",
    "deduplication_disabled",
    "too_many_producers",
)

PRODUCER_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "list_producers",
        "GET",
        PRODUCERS,
        "producers",
        "Producers by name, each with its highest sequence ids, taken and durable; and how they are kept.",
        READS,
        ("after", "limit"),
        answer=ref("Producers"),
    ),
    Operation(
        "open_producer",
        "POST",
        PRODUCERS,
        "producers",
        "Open a session under a name of the daemon's making.",
        (*_OPENS, "producer_fenced"),
        ("longs",),
        ref("SessionRequest"),
        example={"retentionSeconds": 86400},
        answer=ref("Producer"),
    ),
    Operation(
        "open_producer_by_name",
        "PUT",
        PRODUCER,
        "producers",
        "Open a session of a name; what older sessions of it still send is refused from now on.",
        _OPENS,
        ("longs",),
        ref("SessionRequest"),
        example={"generation": 1},
        answer=ref("Producer"),
    ),
    Operation(
        "get_producer",
        "GET",
        PRODUCER,
        "producers",
        "How far a producer came; with a generation also in a topic that was deleted since.",
        (*READS, "producer_not_found", "producer_expired", "generation_changed"),
        ("generation", "longs"),
        answer=ref("Producer"),
    ),
    Operation(
        "delete_producer",
        "DELETE",
        PRODUCER,
        "producers",
        "Forget a producer; its messages stay.",
        (*WRITES, "producer_not_found"),
    ),
    Operation(
        "maintain",
        "POST",
        NAMESPACE_PATH + "/topics/{topic}/maintenance",
        "topics",
        "What a job that cleans the topic from outside may rely on.",
        WRITES,
        ("longs",),
        answer=ref("Maintenance"),
    ),
    Operation(
        "list_namespaces",
        "GET",
        NAMESPACES,
        "namespaces",
        "The namespaces that have topics or properties, sorted.",
        (*ANY, "storage_failed"),
        answer=array(STRING),
    ),
    Operation(
        "get_namespace",
        "GET",
        NAMESPACE_PATH + "/properties",
        "namespaces",
        "What a namespace says for its topics.",
        (*ANY, "invalid_name"),
        answer=ref("Namespace"),
    ),
    Operation(
        "set_namespace",
        "PUT",
        NAMESPACE_PATH + "/properties",
        "namespaces",
        "Replace all properties of a namespace, durably, in force at once.",
        (*ANY, *BODY, "invalid_name", "invalid_property", "storage_failed", "outcome_unknown"),
        body=ref("NamespaceProperties"),
        example={"deduplication": "enabled"},
        answer=ref("Namespace"),
    ),
)


# --- transactions ----------------------------------------------------------------------------------


TRANSACTIONS = "/v1/transactions"
TRANSACTION = TRANSACTIONS + "/{transaction}"
_ASKS = (*ANY, "transactions_unavailable", "no_owner", "shutting_down")
_BODY = ("malformed_body", "unknown_field", "body_too_large")
#: It is looked up, and changed durably.
_DECIDES = (*_ASKS, *_BODY, "transaction_not_found", "transaction_not_in_progress", "storage_failed", "outcome_unknown")


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


# --- cluster ---------------------------------------------------------------------------------------


CLUSTER = "/v1/cluster"
DRAIN = CLUSTER + "/instances/{instance}/drain"
PIN = CLUSTER + "/pins/{namespace}/{topic}"
_CHANGES = (*ANY, "invalid_name", "conflict", "cluster_unavailable")
CLUSTER_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "get_cluster",
        "GET",
        CLUSTER,
        "cluster",
        "The instances and what is pinned, as the one that is asked sees it.",
        (*ANY, "invalid_name"),
        ("topic",),
        answer=ref("Cluster"),
    ),
    Operation(
        "drain_instance",
        "PUT",
        DRAIN,
        "cluster",
        "Give all topics of an instance to the others.",
        (*_CHANGES, "not_found"),
        answer=ref("Drained"),
    ),
    Operation(
        "undrain_instance",
        "DELETE",
        DRAIN,
        "cluster",
        "Let an instance have its share of the topics again.",
        _CHANGES,
        answer=ref("Drained"),
    ),
    Operation(
        "pin_topic",
        "PUT",
        PIN,
        "cluster",
        "Keep a topic at an instance, as long as that is there.",
        (*_CHANGES, *BODY, "unknown_field"),
        body=record("instance", instance=STRING),
        answer=ref("Pinned"),
    ),
    Operation(
        "unpin_topic",
        "DELETE",
        PIN,
        "cluster",
        "Let a topic be where its name says.",
        _CHANGES,
        answer=ref("Pinned"),
    ),
)

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "list_topics",
        "GET",
        NAMESPACE + "/topics",
        "topics",
        "The names of a namespace's topics, sorted.",
        (*ANY, "invalid_name", "storage_failed"),
        answer=array(STRING),
    ),
    Operation(
        "create_topic",
        "PUT",
        TOPIC,
        "topics",
        "Create a topic; after a deletion in a new generation.",
        (*WRITES, *BODY, "topic_exists", "invalid_property"),
        ("ifNotExists",),
        ref("Properties"),
        example={"ttl": 3600},
    ),
    Operation("get_topic", "GET", TOPIC, "topics", "A topic's properties.", READS, answer=ref("Topic")),
    Operation("delete_topic", "DELETE", TOPIC, "topics", "Delete a topic with its messages.", WRITES),
    Operation(
        "set_properties",
        "PUT",
        TOPIC + "/properties",
        "topics",
        "Replace all properties; what is left out has its default again.",
        (*WRITES, *BODY, "invalid_property"),
        body=ref("Properties"),
        example={"ttl": 86400, "max_bytes": 1073741824},
    ),
    Operation(
        "undelete_topic",
        "POST",
        TOPIC + "/undelete",
        "topics",
        "Bring a deleted topic back while all of its rows are there.",
        (*WRITES, "topic_exists", "partly_cleaned"),
        answer=ref("Topic"),
    ),
    Operation(
        "publish",
        "POST",
        TOPIC + "/publish",
        "messages",
        "Publish messages, under a write pointer also what was stored, or the segments that a producer staged; 200 "
        "means durable. Without a write pointer the answer is empty, or for a producer, and with "
        "Prefer: return=representation, a receipt.",
        (*WRITES, *BODY, *_UNDER, *_STORES, *_PRODUCES, "partial_duplicate"),
        ("ttl", "longs"),
        ref("PublishRequest"),
        (JSON, AVRO),
        {"messages": ["hello", {"payload": {"base64": "AP8="}, "ttlSeconds": 60}]},
        {"anyOf": [ref("PublishResponse"), ref("Receipt")]},
        (JSON, AVRO),
        _VERDICT_HEADERS,
    ),
    Operation(
        "store",
        "POST",
        TOPIC + "/store",
        "messages",
        "Keep messages under a write pointer, or stage them as a producer's segment, seen by nobody until a publish.",
        (*WRITES, *BODY, *_UNDER, *_STORES, *_PRODUCES, "already_published"),
        ("ttl",),
        ref("StoreRequest"),
        (JSON, AVRO),
        {"transactionWritePointer": POINTER, "messages": ["first", "second"], "segment": "task-7"},
    ),
    Operation(
        "rollback",
        "POST",
        TOPIC + "/rollback",
        "messages",
        "Take back what a write pointer has in the topic: what one publish answered, or all of it.",
        (*WRITES, *BODY, "unknown_field", "transaction_required"),
        body=ref("RollbackRequest"),
        body_types=(JSON, AVRO),
        example={"transactionWritePointer": POINTER},
    ),
    Operation(
        "poll",
        "POST",
        TOPIC + "/poll",
        "messages",
        "The messages from a position on, oldest first; with waitMs, wait until there is one.",
        (*READS, *BODY, *_VIEWS, *_BAD_POSITION),
        ("wait_ms", "max_bytes", "isolation", "payload", "longs"),
        ref("PollRequest"),
        (JSON, AVRO),
        {"startFrom": _ID, "inclusive": False, "limit": 1000, "waitMs": 30000},
        array(ref("Message")),
        (JSON, AVRO, FRAMES),
        (*_POSITION_HEADERS, *_HELD_HEADERS),
    ),
    Operation(
        "get_messages",
        "GET",
        TOPIC + "/messages",
        "looking",
        "Look at messages without consuming them, damaged ones included.",
        (*READS, "invalid_message_id"),
        ("from", "to", "limit", "payload", "longs"),
        answer=array(ref("ShownMessage")),
        headers=_POSITION_HEADERS,
    ),
    Operation(
        "get_stats",
        "GET",
        TOPIC + "/stats",
        "looking",
        "How much, how old, how fast; with a reader's position, how far behind.",
        (*READS, "invalid_message_id"),
        ("reader",),
        answer=ref("Stats"),
    ),
    Operation(
        "offsets",
        "POST",
        TOPIC + "/offsets",
        "looking",
        "Where a bounded read would end, and how to cut it in parts, without moving payloads.",
        (*READS, *BODY, *_VIEWS, *_BAD_POSITION),
        body=ref("OffsetsRequest"),
        example={"start": 1700000000000, "maxMessages": 100000, "splits": 4},
        answer=ref("Offsets"),
    ),
    Operation(
        "stream",
        "GET",
        TOPIC + "/stream",
        "messages",
        "A WebSocket: publishes sent ahead of their answers, as msgpack. This description knows no WebSockets; "
        "docs/http.md has the form. Without an upgrade it is 400.",
        (*ANY, "invalid_name", "forbidden"),
    ),
    Operation("list_readers", "GET", TOPIC + "/readers", "readers", "All readers.", READS, answer=array(ref("Reader"))),
    Operation("get_reader", "GET", READER, "readers", "A reader.", (*READS, "not_found"), answer=ref("Reader")),
    Operation(
        "put_reader",
        "PUT",
        READER,
        "readers",
        "Keep a position; with expected, only if the reader stands there now.",
        (*WRITES, *BODY, *_BAD_POSITION, "position_changed", "generation_changed", "quota_exceeded"),
        body=ref("ReaderPosition"),
        example={"position": _ID, "expected": None},
        answer=ref("Reader"),
    ),
    Operation("delete_reader", "DELETE", READER, "readers", "Forget a position.", (*WRITES, "not_found")),
    Operation(
        "poll_many",
        "POST",
        NAMESPACE + "/poll",
        "messages",
        "One poll of up to 1000 topics, and one wait for all of them.",
        (*ANY, *BODY, *_VIEWS, *_BAD_POSITION, "invalid_name", "request_too_large"),
        ("wait_ms", "max_bytes", "isolation", "payload", "longs"),
        ref("ManyRequest"),
        example={"topics": {"orders": {"startFrom": _ID, "inclusive": False}, "prices": {}}, "waitMs": 30000},
        answer=ref("ManyAnswer"),
    ),
    *PRODUCER_OPERATIONS,
    *TRANSACTION_OPERATIONS,
    *CLUSTER_OPERATIONS,
    Operation("ping", "GET", "/ping", "daemon", "OK.", (), answer=STRING, answer_types=("text/plain",)),
    Operation("livez", "GET", "/livez", "daemon", "Whether the daemon is alive.", (), answer={"type": "object"}),
    Operation(
        "readyz",
        "GET",
        "/readyz",
        "daemon",
        "Whether all is served; the problem has reasons.",
        ("shutting_down", "low_space", "recovering"),
        answer={"type": "object"},
    ),
    Operation(
        "metrics", "GET", "/metrics", "daemon", "For Prometheus.", (), answer=STRING, answer_types=("text/plain",)
    ),
    Operation("version", "GET", "/version", "daemon", "What is running.", (), answer={"type": "object"}),
    Operation("openapi", "GET", "/openapi.json", "daemon", "This description.", (), answer={"type": "object"}),
)

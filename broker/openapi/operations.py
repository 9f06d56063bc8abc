"""One entry for each route: what it does, what it takes, what it gives, what may go wrong."""

from __future__ import annotations

from broker.openapi.cluster import CLUSTER_OPERATIONS
from broker.openapi.errors import ANY, BODY, READS, WRITES
from broker.openapi.operation import AVRO, FRAMES, JSON, POINTER, Operation
from broker.openapi.producers import PRODUCER_OPERATIONS
from broker.openapi.schemas import STRING, array, ref
from broker.openapi.transactions import TRANSACTION_OPERATIONS

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

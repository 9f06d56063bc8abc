"""JSON schemas of requests, and error codes that routes share. ``shapes`` derives the schemas of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from broker.http.messages import STATUS_OF
from plainsong.protocol.errors import BY_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.security.identity import Verb

#: Any route.
ANY = ("invalid_parameter", "overloaded", "internal")
#: Reads of a topic, which may have no owner at the moment.
READS = (
    *ANY,
    "invalid_name",
    "topic_not_found",
    "recovering",
    "no_owner",
    "shutting_down",
    "storage_failed",
    "replication_unavailable",
)
#: Changes of a topic, whose outcome may be unknown.
WRITES = (*READS, "outcome_unknown")
#: Routes with a body.
BODY = ("malformed_body", "body_too_large", "unsupported_media_type")
#: Reads with a snapshot, the client's or the daemon's.
VIEWS = ("transactions_unavailable", "malformed_transaction", "request_too_large")
BAD_POSITION = ("invalid_message_id", "unknown_field")
AS_OF = ("as_of_too_old",)

#: A write pointer, for examples.
EXAMPLE_POINTER = 1_700_000_000_000_000_000

# Rights, where any one of several verbs is sufficient.
#: Any verb on a topic except ``transact`` allows reading its statistics.
LOOK: tuple[Verb, ...] = ("inspect", "poll", "publish", "admin", "operate")


def by_status(codes: Iterable[str]) -> dict[int, list[str]]:
    """Group codes by status, both in ascending order."""
    found: dict[int, list[str]] = {}
    for code in sorted(set(codes)):
        found.setdefault(status_of_code(code), []).append(code)
    return dict(sorted(found.items()))


def status_of_code(code: str) -> int:
    """Return the HTTP status of ``code``."""
    return next(STATUS_OF[cls] for cls in BY_CODE[code].__mro__ if cls in STATUS_OF)


# --- schemas ---------------------------------------------------------------------------------------


Schema = dict[str, Any]
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
COUNT: Schema = {"type": "integer", "minimum": 0}
MILLISECONDS: Schema = {"type": "integer", "minimum": 0, "description": "milliseconds since 1970"}
WAIT_MS: Schema = {"type": "integer", "minimum": 0, "maximum": 60_000}
ISOLATION: Schema = {"type": "string", "enum": ["uncommitted", "committed"]}


def ref(name: str) -> Schema:
    """Refer to a schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """Allow ``schema`` or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: str = "", /, **fields: Schema) -> Schema:
    """Describe an object with exactly these fields; ``required`` lists names, separated by spaces."""
    made: Schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return {**made, "required": required.split()} if required else made


def array(items: Schema, **more: Any) -> Schema:
    """Describe a list."""
    return {"type": "array", "items": items, **more}


_POSITION = ref("Position")
_ID = ref("MessageId")
BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_ATTRIBUTES: Schema = {"type": "object", "additionalProperties": STRING}
_PAYLOAD = ref("Payload")
WRITE_POINTER: Schema = {
    "description": "may exceed 2^53: a string of digits is accepted too, and returned with longs=string",
    "type": ["integer", "string", "null"],
}
_TRANSACTION: Schema = nullable({**BASE64, "description": "a snapshot"})
_WRITES: dict[str, Schema] = {
    "transactionWritePointer": WRITE_POINTER,
    "ttlSeconds": nullable(POSITIVE),
    "messageTtlsSeconds": nullable(array(nullable(POSITIVE))),
    "generation": nullable(POSITIVE),
    "producer": nullable({**STRING, "minLength": 1, "description": "at most 255 bytes"}),
    "producerEpoch": nullable(COUNT),
    "sequenceIds": nullable(array(COUNT, description="one per message, ascending; a single one without messages")),
    "routingKey": nullable(STRING),
    "attributes": nullable(array(_ATTRIBUTES, description="one map per message")),
}
_RANGE: dict[str, Schema] = {
    "transactionWritePointer": WRITE_POINTER,
    "startTimestamp": MILLISECONDS,
    "startSequenceId": COUNT,
    "endTimestamp": MILLISECONDS,
    "endSequenceId": COUNT,
}
#: Schemas by name, which may refer to those of answers.
REQUESTS: dict[str, Schema] = {
    "Position": {
        "description": "an id, or a time in milliseconds: the first message published then or later",
        "anyOf": [{"type": "string", "pattern": "^[0-9a-fA-F]{40}$"}, {"type": "integer", "minimum": 0}],
    },
    "CloudEvent": {
        "type": "object",
        "description": "a CloudEvents 1.0.2 event; all other members are extensions",
        "properties": {
            "specversion": {"const": "1.0"},
            "id": {**STRING, "minLength": 1},
            "source": {**STRING, "minLength": 1},
            "type": {**STRING, "minLength": 1},
            "subject": STRING,
            "time": {**STRING, "format": "date-time"},
            "datacontenttype": STRING,
            "dataschema": STRING,
            "data": {"description": "JSON, or text if datacontenttype is another type"},
            "data_base64": {"type": "string", "contentEncoding": "base64"},
            "plainsongid": {**STRING, "description": "in a poll: the message's id"},
        },
        "required": ["specversion", "id", "source", "type"],
    },
    "Properties": {
        "type": "object",
        "description": "an absent property has its default; generation is accepted if it is the topic's own",
        "properties": {
            "ttl": {"description": "seconds", "anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+$"}]},
            "transactional": {"enum": ["optional", "required", "disabled"], "default": "optional"},
            "deduplication": {"enum": ["inherit", "enabled", "disabled"], "default": "inherit"},
            "max_bytes": {"anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+$"}]},
            "chain": {"enum": ["none", "sha256"], "default": "none"},
            "generation": {"anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+$"}]},
        },
        "additionalProperties": False,
    },
    "PublishItem": {
        "anyOf": [
            _PAYLOAD,
            record(
                "payload",
                payload=_PAYLOAD,
                ttlSeconds=nullable(POSITIVE),
                sequenceId=nullable(COUNT),
                attributes=nullable(_ATTRIBUTES),
            ),
        ]
    },
    "PublishRequest": record(
        messages=array(ref("PublishItem")),
        **_WRITES,
        atomic={
            **BOOLEAN,
            "description": ("store the messages contiguously; they become visible together or not at all"),
        },
        segments=nullable(
            array(
                {**STRING, "minLength": 1, "maxLength": 64},
                description="with a write pointer: publish only these segments of what was stored, and never the "
                "others; with a producer, one sequence id and no messages: publish what it staged in "
                "these segments, as one batch",
            )
        ),
    ),
    "StoreRequest": {
        **record(
            "messages",
            messages=array(ref("PublishItem"), minItems=1),
            **_WRITES,
            segment=nullable({**STRING, "minLength": 1, "maxLength": 64}),
        ),
        "description": "stores under a write pointer, or stages in a producer's segment",
        "anyOf": [{"required": ["transactionWritePointer"]}, {"required": ["producer", "segment"]}],
    },
    "RollbackRequest": record("transactionWritePointer", **_RANGE, duplicate=BOOLEAN),
    "PollRequest": record(
        startFrom=nullable(_POSITION),
        inclusive={**BOOLEAN, "default": True},
        limit=nullable(POSITIVE),
        endBefore=nullable(_ID),
        waitMs=nullable(WAIT_MS),
        maxBytes=nullable(POSITIVE),
        isolation=nullable(ISOLATION),
        asOfMs=nullable(MILLISECONDS),
        transaction=_TRANSACTION,
    ),
    "OffsetsRequest": record(
        start=nullable(_POSITION),
        end=nullable(_POSITION),
        maxMessages=nullable(POSITIVE),
        maxBytes=nullable(POSITIVE),
        splits=nullable({"type": "integer", "minimum": 1, "maximum": 1000}),
        waitMs=nullable(WAIT_MS),
        isolation=nullable(ISOLATION),
        asOfMs=nullable(MILLISECONDS),
        transaction=_TRANSACTION,
    ),
    "ReaderPosition": record("position", position=_ID, generation=nullable(POSITIVE), expected=nullable(_ID)),
    "ManyRequest": record(
        "topics",
        topics={
            "type": "object",
            "minProperties": 1,
            "maxProperties": 1000,
            "additionalProperties": record(startFrom=nullable(_POSITION), inclusive=BOOLEAN, limit=nullable(POSITIVE)),
        },
        waitMs=nullable(WAIT_MS),
        isolation=nullable(ISOLATION),
        limit=nullable(POSITIVE),
        maxBytes=nullable(POSITIVE),
    ),
    "SessionRequest": record(
        retentionSeconds=nullable({**POSITIVE, "description": "how long to remember the producer when it is idle"}),
        generation=nullable(POSITIVE),
        discardStaged=nullable({**BOOLEAN, "description": "discard what is staged under this name"}),
    ),
    "BeginRequest": record(
        type={"enum": ["short", "long"], "default": "short"}, timeoutSeconds=nullable(POSITIVE), clientId=STRING
    ),
    "ChangeSet": record(changes=array(BASE64)),
    "Truncation": record(
        ids=array({"type": ["integer", "string"]}), beforeMs={**INTEGER, "description": "milliseconds since 1970"}
    ),
}

"""The JSON forms of requests and answers, as schemas."""

from __future__ import annotations

from typing import Any

from protocol.errors import BY_CODE

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
    """A schema by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def nullable(schema: Schema) -> Schema:
    """``schema``, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def record(required: str = "", /, **fields: Schema) -> Schema:
    """An object of exactly these fields; ``required`` lists names with blanks between."""
    made: Schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return {**made, "required": required.split()} if required else made


def array(items: Schema, **more: Any) -> Schema:
    """A list."""
    return {"type": "array", "items": items, **more}


_POSITION = ref("Position")
_ID = ref("MessageId")
_ATTRIBUTES: Schema = {"type": "object", "additionalProperties": STRING}
_PAYLOAD = ref("Payload")

WRITE_POINTER: Schema = {
    "description": "passes 2^53: digits in quotes are read too, and written with longs=string",
    "type": ["integer", "string", "null"],
}
_TRANSACTION: Schema = nullable({"type": "string", "contentEncoding": "base64", "description": "a snapshot"})
_WRITES: dict[str, Schema] = {
    "transactionWritePointer": WRITE_POINTER,
    "ttlSeconds": nullable(POSITIVE),
    "messageTtlsSeconds": nullable(array(nullable(POSITIVE))),
    "generation": nullable(POSITIVE),
    "producer": nullable({**STRING, "minLength": 1, "description": "at most 255 bytes"}),
    "producerEpoch": nullable(COUNT),
    "sequenceIds": nullable(array(COUNT, description="one for each message, ascending; one without messages")),
    "routingKey": nullable(STRING),
    "attributes": nullable(array(_ATTRIBUTES, description="one map for each message")),
}
_RANGE: dict[str, Schema] = {
    "transactionWritePointer": WRITE_POINTER,
    "startTimestamp": MILLISECONDS,
    "startSequenceId": COUNT,
    "endTimestamp": MILLISECONDS,
    "endSequenceId": COUNT,
}
_RANGE_NAMES = "startTimestamp startSequenceId endTimestamp endSequenceId"

SCHEMAS: dict[str, Schema] = {
    "MessageId": {"type": "string", "pattern": "^[0-9a-f]{40}$", "description": "20 bytes in hex; sorts as the topic"},
    "Position": {
        "description": "an id, or a time in milliseconds: the first message published then or later",
        "anyOf": [{"type": "string", "pattern": "^[0-9a-fA-F]{40}$"}, {"type": "integer", "minimum": 0}],
    },
    "Payload": {
        "description": "text, or any bytes in base64; base64 in answers wherever the bytes are no UTF-8",
        "anyOf": [STRING, record("base64", base64={"type": "string", "contentEncoding": "base64"})],
    },
    "Properties": {
        "type": "object",
        "description": "an absent one has its default; generation is accepted when it is the topic's own",
        "properties": {
            "ttl": {"description": "seconds", "anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+$"}]},
            "transactional": {"enum": ["optional", "required", "disabled"], "default": "optional"},
            "deduplication": {"enum": ["inherit", "enabled", "disabled"], "default": "inherit"},
            "max_bytes": {"anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+$"}]},
            "generation": {"anyOf": [POSITIVE, {"type": "string", "pattern": "^[0-9]+$"}]},
        },
        "additionalProperties": False,
    },
    "Topic": {
        "type": "object",
        "description": "with http.flat_topic_properties the properties alone",
        "properties": {
            "name": STRING,
            "properties": {"type": "object", "additionalProperties": STRING},
            "deduplication": ref("Deduplication"),
        },
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
        atomic={**BOOLEAN, "description": "all of them contiguous, visible together or not at all"},
        segments=nullable(
            array(
                {**STRING, "minLength": 1, "maxLength": 64},
                description="with a write pointer: of what was stored only these segments, for ever; with a producer, "
                "one sequence id and no messages: what it staged under these, as one batch",
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
        "description": "under a write pointer, or staged by a producer in a segment",
        "anyOf": [{"required": ["transactionWritePointer"]}, {"required": ["producer", "segment"]}],
    },
    "PublishResponse": record(f"transactionWritePointer {_RANGE_NAMES}", **_RANGE, duplicate=BOOLEAN),
    "RollbackRequest": record("transactionWritePointer", **_RANGE, duplicate=BOOLEAN),
    "Receipt": record(
        "firstId lastId generation",
        firstId=nullable(_ID),
        lastId=nullable(_ID),
        generation=POSITIVE,
        duplicate=BOOLEAN,
        deduplicated=BOOLEAN,
        lastSequenceId=nullable(INTEGER),
        stored=nullable(array(COUNT, description="only where a part was stored before")),
        dropped=nullable(array(COUNT)),
    ),
    "PollRequest": record(
        startFrom=nullable(_POSITION),
        inclusive={**BOOLEAN, "default": True},
        limit=nullable(POSITIVE),
        endBefore=nullable(_ID),
        waitMs=nullable(WAIT_MS),
        maxBytes=nullable(POSITIVE),
        isolation=nullable(ISOLATION),
        transaction=_TRANSACTION,
    ),
    "Message": record("id payload", id=_ID, payload=_PAYLOAD, attributes=_ATTRIBUTES),
    "ShownMessage": {
        "type": "object",
        "required": ["id", "state"],
        "properties": {
            "id": _ID,
            "state": {"enum": ["plain", "committed", "open", "rolled-back", "invalid", "damaged"]},
            "detail": {**STRING, "description": "what is wrong with a damaged one, which has nothing else"},
            "publishTimeMs": MILLISECONDS,
            "expiresMs": MILLISECONDS,
            "writePointer": nullable({"type": ["integer", "string"]}),
            "size": COUNT,
            "payload": _PAYLOAD,
            "attributes": _ATTRIBUTES,
            "producer": nullable(STRING),
            "sequenceId": nullable(INTEGER),
            "batch": nullable(record("index count", index=COUNT, count=COUNT)),
        },
    },
    "Stats": {
        "type": "object",
        "properties": {
            "messages": COUNT,
            "bytes": COUNT,
            "estimated": {**BOOLEAN, "description": "messages and bytes are upper bounds"},
            "oldestId": nullable(_ID),
            "newestId": nullable(_ID),
            "end": {**_ID, "description": "the position behind all that has been published, read by anybody or not"},
            "oldestAgeMs": nullable(COUNT),
            "publishPerSecond": {"type": "number"},
            "pollPerSecond": {"type": "number"},
            "openTransactions": COUNT,
            "producers": COUNT,
            "enabledFrom": nullable(_ID),
            "owner": nullable(STRING),
            "parkedPolls": COUNT,
            "generation": POSITIVE,
            "createdMs": MILLISECONDS,
            "reader": record(
                "visible hidden expiredUnread", visible=COUNT, hidden=COUNT, expiredUnread=COUNT, estimated=BOOLEAN
            ),
        },
    },
    "OffsetsRequest": record(
        start=nullable(_POSITION),
        end=nullable(_POSITION),
        maxMessages=nullable(POSITIVE),
        maxBytes=nullable(POSITIVE),
        splits=nullable({"type": "integer", "minimum": 1, "maximum": 1000}),
        waitMs=nullable(WAIT_MS),
        isolation=nullable(ISOLATION),
        transaction=_TRANSACTION,
    ),
    "Offsets": record(
        "end count bytes splits earliest expired generation",
        end=_ID,
        count=COUNT,
        bytes=COUNT,
        splits=array(_ID),
        earliest=_ID,
        expired=BOOLEAN,
        generation=POSITIVE,
    ),
    "ReaderPosition": record("position", position=_ID, generation=nullable(POSITIVE), expected=nullable(_ID)),
    "Reader": record(
        "name position generation changedMs expiresMs",
        name=STRING,
        position=_ID,
        generation=POSITIVE,
        changedMs=MILLISECONDS,
        expiresMs=MILLISECONDS,
    ),
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
    "ManyAnswer": record(
        "topics",
        topics={
            "type": "object",
            "additionalProperties": {
                "oneOf": [
                    record(
                        "messages lastId end",
                        messages=array(ref("Message")),
                        lastId=nullable(_ID),
                        end={"enum": ["end", "more", "held"]},
                        heldBy={"type": ["integer", "string"]},
                        heldSince=MILLISECONDS,
                        hiddenMessages=STRING,
                    ),
                    record("error", error=ref("Problem")),
                ]
            },
        },
    ),
    "Problem": {
        "type": "object",
        "description": "what went wrong, and whether the request happened all the same",
        "required": ["type", "title", "status", "detail", "code", "hint", "outcome"],
        "properties": {
            "type": STRING,
            "title": STRING,
            "status": INTEGER,
            "detail": STRING,
            "code": {"enum": sorted(BY_CODE), "description": "stable, for programs"},
            "hint": STRING,
            "outcome": {"enum": ["not-applied", "applied", "unknown"]},
        },
    },
}

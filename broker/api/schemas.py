"""JSON schemas of requests and answers, and families of error codes that routes share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from broker.finding import Kind, Severity
from broker.http.messages import STATUS_OF
from plainsong.protocol.errors import BY_CODE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from broker.security.identity import Verb

#: Any route.
ANY = ("invalid_parameter", "overloaded", "internal")
#: Reads of a topic, which may have no owner at the moment.
READS = (*ANY, "invalid_name", "topic_not_found", "recovering", "no_owner", "shutting_down", "storage_failed")
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
#: Any verb on a topic but ``transact`` allows reading its statistics.
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
    """Describe an object of exactly these fields; ``required`` lists names separated by blanks."""
    made: Schema = {"type": "object", "properties": fields, "additionalProperties": False}
    return {**made, "required": required.split()} if required else made


def array(items: Schema, **more: Any) -> Schema:
    """Describe a list."""
    return {"type": "array", "items": items, **more}


_POSITION = ref("Position")
_ID = ref("MessageId")
_ATTRIBUTES: Schema = {"type": "object", "additionalProperties": STRING}
_PAYLOAD = ref("Payload")
WRITE_POINTER: Schema = {
    "description": "may exceed 2^53: a string of digits is accepted too, and returned with longs=string",
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
_RANGE_NAMES = "startTimestamp startSequenceId endTimestamp endSequenceId"
_HEAD_NAMES = "topic generation count id atMs hash"
_CHAIN_HEAD: dict[str, Schema] = {
    "topic": {**STRING, "description": "namespace:topic"},
    "generation": POSITIVE,
    "count": {**POSITIVE, "description": "number of entries, and the number of the last one"},
    "id": {**_ID, "description": "id of the last entry"},
    "atMs": {**MILLISECONDS, "description": "when the last entry was written"},
    "hash": {**STRING, "pattern": "^[0-9a-f]{64}$", "description": "link of the last entry, SHA-256"},
}
SCHEMAS: dict[str, Schema] = {
    "MessageId": {
        "type": "string",
        "pattern": "^[0-9a-f]{40}$",
        "description": ("20 bytes in hex; sorts in the order of the topic"),
    },
    "Position": {
        "description": "an id, or a time in milliseconds: the first message published then or later",
        "anyOf": [{"type": "string", "pattern": "^[0-9a-fA-F]{40}$"}, {"type": "integer", "minimum": 0}],
    },
    "Payload": {
        "description": "text, or any bytes in base64; in responses base64 only if the bytes are not UTF-8",
        "anyOf": [STRING, record("base64", base64={"type": "string", "contentEncoding": "base64"})],
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
    "ChainHead": record(_HEAD_NAMES, **_CHAIN_HEAD),
    "SignedHead": record(
        f"{_HEAD_NAMES} signature",
        **_CHAIN_HEAD,
        signature=nullable(
            {
                **record(
                    "id timestamp payload signature",
                    id=STRING,
                    timestamp={**COUNT, "description": "seconds since 1970"},
                    payload={**STRING, "description": "the signed text, after id and timestamp"},
                    signature={**STRING, "description": "signature of id.timestamp.payload, as in Standard Webhooks"},
                ),
                "description": "null if topic.chain_secret_file is not set",
            }
        ),
    ),
    "ChainEntries": record(
        "head entries messages next oldestMs nowMs undecided",
        head=ref("ChainHead"),
        entries=array(record("id base64", id=_ID, base64={"type": "string", "contentEncoding": "base64"})),
        messages=array(
            record(
                "id base64",
                id=_ID,
                base64=nullable({"type": "string", "contentEncoding": "base64"}),
                row={
                    "type": "string",
                    "contentEncoding": "base64",
                    "description": "for stored messages and the row that publishes them: the row as stored",
                },
                writePointer={**STRING, "description": "negative: rolled back"},
                attributes=_ATTRIBUTES,
                ttlSeconds={**POSITIVE, "description": "the message's own ttl; absent if it has none"},
            )
        ),
        next=nullable({**_ID, "description": "`after` of the next page; null on the last page"}),
        oldestMs={**MILLISECONDS, "description": "everything published earlier has expired"},
        nowMs={**MILLISECONDS, "description": "the topic's time"},
        undecided=array({**STRING, "description": "a write pointer that may still be rolled back"}),
    ),
    "Topic": {
        "type": "object",
        "description": "with http.flat_topic_properties, only the properties",
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
        stored=nullable(array(COUNT, description="only if a part was stored before")),
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
        asOfMs=nullable(MILLISECONDS),
        transaction=_TRANSACTION,
    ),
    "Message": record("id payload", id=_ID, payload=_PAYLOAD, attributes=_ATTRIBUTES),
    "ShownMessage": {
        "type": "object",
        "required": ["state"],
        "properties": {
            "id": _ID,
            "state": {"enum": ["plain", "committed", "open", "rolled-back", "invalid", "damaged", "set-aside"]},
            "detail": {**STRING, "description": "what is wrong with a damaged message, which has no other fields"},
            "from": {**_ID, "description": "first id of a range that was set aside; such rows have no id of their own"},
            "to": {**_ID, "description": "last id of that range"},
            "rows": nullable({**COUNT, "description": "number of rows in that range; null if some could not be read"}),
            "publishTimeMs": MILLISECONDS,
            "expiresMs": MILLISECONDS,
            "writePointer": nullable({"type": ["integer", "string"]}),
            "size": COUNT,
            "payload": nullable(_PAYLOAD),
            "truncated": {
                **BOOLEAN,
                "description": ("true: only the beginning of the payload is returned; size is that of the whole"),
            },
            "attributes": nullable(_ATTRIBUTES),
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
            "end": {**_ID, "description": "the position after the last published message"},
            "oldestAgeMs": nullable(COUNT),
            "publishPerSecond": {"type": "number"},
            "pollPerSecond": {"type": "number"},
            "endToEndMs": record("p50 p99", p50=nullable(COUNT), p99=nullable(COUNT)),
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
    "MessageCount": record(
        "messages bytes estimated oldestMs newestMs",
        messages=COUNT,
        bytes=COUNT,
        estimated=BOOLEAN,
        oldestMs=nullable(MILLISECONDS),
        newestMs=nullable(MILLISECONDS),
    ),
    # The answer to a change or a dry run. Routes add their own fields, mostly to `effect`.
    "Change": {
        "type": "object",
        "properties": {
            "dryRun": BOOLEAN,
            "action": STRING,
            "target": STRING,
            "before": nullable({"type": "object"}),
            "after": nullable({"type": "object"}),
            "changed": array(STRING),
            "effect": {
                "type": "object",
                "properties": {each: ref("MessageCount") for each in ("hides", "returns", "removes")},
                "required": ["hides", "returns", "removes"],
            },
            "warnings": array(STRING),
            "etag": nullable(STRING),
        },
        "required": ["dryRun", "action", "target", "before", "after", "changed", "effect", "warnings"],
    },
    "DeletedTopics": record(
        "topics total next",
        topics=array(ref("DeletedTopic")),
        total=COUNT,
        next={"type": "null"},
    ),
    "DeletedTopic": record(
        "name generation deletedMs undeleteUntilMs state messages bytes",
        namespace={**STRING, "description": "only in the list of all namespaces"},
        name=STRING,
        generation=POSITIVE,
        deletedMs=MILLISECONDS,
        undeleteUntilMs=MILLISECONDS,
        state={"enum": ["kept", "partly-cleaned"]},
        messages=COUNT,
        bytes=COUNT,
    ),
    "TopicPage": record(
        "topics total next",
        topics=array(
            record(
                "namespace name messages bytes estimated oldestAgeMs publishPerSecond pollPerSecond openTransactions "
                "hiddenMessages parkedPolls ttl owner",
                namespace=STRING,
                name=STRING,
                messages=COUNT,
                bytes=COUNT,
                estimated={**BOOLEAN, "description": "messages and bytes are upper bounds"},
                oldestAgeMs=nullable(COUNT),
                publishPerSecond={"type": "number"},
                pollPerSecond={"type": "number"},
                openTransactions=COUNT,
                hiddenMessages=COUNT,
                parkedPolls=COUNT,
                ttl=POSITIVE,
                owner=nullable(STRING),
            )
        ),
        total={**COUNT, "description": "number of matching topics, on all pages"},
        next=nullable({**STRING, "description": "`after` of the next page; null on the last page"}),
    ),
    "Finding": record(
        "kind severity subject text sinceMs link",
        kind={"enum": list(get_args(Kind))},
        severity={"enum": list(get_args(Severity))},
        subject=STRING,
        text=STRING,
        sinceMs=nullable(MILLISECONDS),
        link={**STRING, "description": "its page in the console"},
    ),
    "History": record(
        "stepMs fromMs published polled bytes",
        stepMs=POSITIVE,
        fromMs={**MILLISECONDS, "description": "start of the first step; the last step is not complete yet"},
        published=array(COUNT),
        polled=array(COUNT),
        bytes=array(COUNT),
    ),
    "Lag": record(
        "readers",
        readers=array(ref("ReaderLag")),
        total={**COUNT, "description": "with limit: number of readers on all pages"},
        next=nullable({**STRING, "description": "with limit: `after` of the next page; null on the last page"}),
    ),
    "ReaderLag": record(
        "name kind position visible hidden expiredUnread estimated lagMs lastSeenMs by",
        name=STRING,
        kind={"enum": ["kept", "named"]},
        position=_ID,
        visible=COUNT,
        hidden=COUNT,
        expiredUnread=COUNT,
        estimated=BOOLEAN,
        lagMs=COUNT,
        lastSeenMs=MILLISECONDS,
        by=nullable(STRING),
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
                        setAside=COUNT,
                    ),
                    record("error", error=ref("Problem")),
                ]
            },
        },
    ),
    "ErrorType": record(
        "type code title status outcome whatToDo",
        type=STRING,
        code={"enum": sorted(BY_CODE)},
        title=STRING,
        status=INTEGER,
        outcome={"enum": ["not-applied", "applied", "unknown"]},
        whatToDo=STRING,
    ),
    "Problem": {
        "type": "object",
        "description": "what went wrong, and whether the request happened",
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


# --- producers -------------------------------------------------------------------------------------


_SEQUENCE_ID: Schema = {**INTEGER, "minimum": -1, "description": "-1: none yet"}
_BOUND: Schema = nullable(
    {**ref("MessageId"), "description": ("counts from this position on; null: from the first message on")}
)
PRODUCER_SCHEMAS: dict[str, Schema] = {
    "Deduplication": record(
        "enabled level",
        enabled={**BOOLEAN, "description": "whether sequence ids of producers are remembered"},
        level={"enum": ["topic", "namespace", "service"], "description": "the level at which this is set"},
    ),
    "SessionRequest": record(
        retentionSeconds=nullable({**POSITIVE, "description": "how long to remember the producer when it is idle"}),
        generation=nullable(POSITIVE),
        discardStaged=nullable({**BOOLEAN, "description": "discard what is staged under this name"}),
    ),
    "Producer": record(
        "producer epoch lastSequenceId generation enabledFrom recent",
        producer=STRING,
        epoch=COUNT,
        lastSequenceId=_SEQUENCE_ID,
        generation=POSITIVE,
        enabledFrom=_BOUND,
        activeMs=MILLISECONDS,
        expiresMs=MILLISECONDS,
        recent=array(
            record(
                "first last firstId lastId response",
                first=COUNT,
                last=COUNT,
                firstId=ref("MessageId"),
                lastId=ref("MessageId"),
                response=nullable(ref("PublishResponse")),
            )
        ),
    ),
    "Producers": record(
        "deduplication enabledFrom generation count snapshot lastReplay producers next",
        deduplication=ref("Deduplication"),
        enabledFrom=_BOUND,
        generation=POSITIVE,
        count=COUNT,
        snapshot=record("position ageMs entriesSince", position=_BOUND, ageMs=nullable(COUNT), entriesSince=COUNT),
        lastReplay=record("entries ms", entries=COUNT, ms=COUNT),
        producers=array(
            record(
                "producer epoch pushed persisted activeMs expiresMs damaged",
                producer=STRING,
                epoch=COUNT,
                pushed=_SEQUENCE_ID,
                persisted=_SEQUENCE_ID,
                activeMs=MILLISECONDS,
                expiresMs=MILLISECONDS,
                damaged=BOOLEAN,
            )
        ),
        next=nullable({**STRING, "description": "the name to continue after; null on the last page"}),
    ),
    "Maintenance": record(
        "generation expiredBefore invalid snapshotPosition",
        generation=POSITIVE,
        expiredBefore=MILLISECONDS,
        invalid=nullable(array({"type": ["integer", "string"]}, description="write pointers; null: not known")),
        snapshotPosition=_BOUND,
    ),
    "NamespaceProperties": record(
        deduplication={"enum": ["inherit", "enabled", "disabled"], "default": "inherit"},
    ),
    "Namespace": record(
        "name properties deduplication",
        name=STRING,
        properties=ref("NamespaceProperties"),
        deduplication=ref("Deduplication"),
    ),
}


# --- transactions ----------------------------------------------------------------------------------


_POINTER_VALUE: Schema = {"type": ["integer", "string"]}
_BASE64: Schema = {"type": "string", "contentEncoding": "base64"}
_STATE: Schema = {"enum": ["in_progress", "committed", "aborted", "invalid", "unknown"]}
_SERVICE: Schema = {
    "type": "string",
    "description": "identifies the transaction service; ids of different services may be equal",
}
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
    "name": {**STRING, "description": "the name that began it, if authentication is on and the caller may see it"},
}
TRANSACTION_SCHEMAS: dict[str, Schema] = {
    "BeginRequest": record(
        type={"enum": ["short", "long"], "default": "short"}, timeoutSeconds=nullable(POSITIVE), clientId=STRING
    ),
    "BegunTransaction": record(
        "id writePointer readPointer snapshot expires service",
        id=_POINTER_VALUE,
        writePointer=_POINTER_VALUE,
        readPointer=_POINTER_VALUE,
        snapshot={**_BASE64, "description": "pass this to a poll as transaction"},
        expires=MILLISECONDS,
        service=_SERVICE,
    ),
    "ChangeSet": record(changes=array(_BASE64)),
    "DecidedTransaction": record("id state", id=_POINTER_VALUE, state=_STATE),
    "Transaction": record("id state", **_STATUS),
    "TransactionOutcome": record(
        "id state keptUntilMs service", **_STATUS, keptUntilMs=nullable(MILLISECONDS), service=_SERVICE
    ),
    "Truncation": record(ids=array(_POINTER_VALUE), beforeMs={**INTEGER, "description": "milliseconds since 1970"}),
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


# --- cluster ---------------------------------------------------------------------------------------


CLUSTER_SCHEMAS: dict[str, Schema] = {
    "Whoami": record(
        "name via credential expires groups grants",
        name=STRING,
        via={"enum": ["none", "token", "oidc", "cert", "unix"]},
        credential=nullable(STRING),
        expires=nullable(STRING),
        groups=array(STRING),
        grants=array(record("verbs on", verbs=array(STRING), on=array(STRING))),
    ),
    "Cluster": record(
        "instance address zookeeper instances pins transactions topic",
        instance=STRING,
        address=STRING,
        zookeeper=nullable(record("connected since", connected=BOOLEAN, since=MILLISECONDS)),
        instances=array(ref("Instance")),
        pins={"type": "object", "additionalProperties": STRING},
        transactions=nullable(STRING),
        topic=nullable(record("name owner pinned", name=STRING, owner=nullable(STRING), pinned=nullable(STRING))),
    ),
    "Instance": record(
        "name address weight leaving drained slices topicsOpen security",
        name=STRING,
        address=STRING,
        weight=POSITIVE,
        leaving=BOOLEAN,
        drained=BOOLEAN,
        slices=COUNT,
        topicsOpen=nullable(COUNT),
        security=nullable(record("grants tokens", grants=nullable(STRING), tokens=STRING)),
    ),
    "Drained": record("instance drained", instance=STRING, drained=BOOLEAN),
    "Pinned": record("topic instance", topic=STRING, instance=nullable(STRING)),
}


# --- keeping ---------------------------------------------------------------------------------------


_SCRUB: dict[str, Schema] = {
    "state": {"enum": ["off", "waiting", "running", "stopped"]},
    "startedMs": nullable(MILLISECONDS),
    "lastCompleteMs": nullable(MILLISECONDS),
    "rows": COUNT,
    "bytes": COUNT,
    "findings": array(ref("ScrubFinding")),
    "moreFindings": COUNT,
    "unread": array(ref("ScrubUnread")),
    "moreUnread": COUNT,
}
KEEPING_SCHEMAS: dict[str, Schema] = {
    "BegunBackup": record(
        "format id expiresMs createdMs cutMs store exact version instances topics leftOut",
        format=POSITIVE,
        id=STRING,
        expiresMs={**MILLISECONDS, "description": "when the cut ends, unless another request for it arrives"},
        createdMs=MILLISECONDS,
        cutMs={**MILLISECONDS, "description": "everything acknowledged before this time is in the backup"},
        store=STRING,
        exact={**BOOLEAN, "description": "true if all topics are as of one instant"},
        version=STRING,
        instances=array(STRING),
        topics=array(ref("BackupTopic")),
        leftOut=array(ref("BackupLeftOut")),
    ),
    "BackupLeftOut": record(
        "table from to why",
        table={"enum": ["messages", "payloads", "metadata"]},
        **{"from": {**STRING, "description": "an id for messages, a key in hex for other rows"}, "to": STRING},
        why=STRING,
    ),
    "BackupTopic": record(
        "namespace topic generation properties deletedMs",
        namespace=STRING,
        topic=STRING,
        generation=nullable(POSITIVE),
        properties={"type": "object"},
        deletedMs=nullable(MILLISECONDS),
    ),
    "BackupObjects": record(
        "objects leftOut next line expiresMs",
        objects=array(ref("BackupObject")),
        leftOut=array(ref("BackupLeftOut")),
        next=nullable({**STRING, "description": "`after` of the next page; null on the last page"}),
        line=nullable({**STRING, "description": "on the last page: the topic's last position, 20 hex digits"}),
        expiresMs=MILLISECONDS,
    ),
    "BackupObject": record(
        "sha256 table rows bytes fromMs toMs",
        sha256=STRING,
        table={"enum": ["messages", "payloads", "metadata", "service"]},
        rows=POSITIVE,
        bytes=POSITIVE,
        fromMs=nullable(MILLISECONDS),
        toMs=nullable(MILLISECONDS),
    ),
    "Definitions": record(
        "format",
        format={"const": 1},
        namespaces={"type": "object", "additionalProperties": {"type": "object"}},
        topics={"type": "object", "additionalProperties": ref("Properties"), "description": "by namespace:topic"},
        pins={"type": "object", "additionalProperties": STRING, "description": "instances by namespace:topic"},
    ),
    "Scrub": record(" ".join(_SCRUB), **_SCRUB),
    "StartedScrub": record(" ".join(("started", *_SCRUB)), started=BOOLEAN, **_SCRUB),
    "ScrubUnread": record("namespace topic why", namespace=STRING, topic=STRING, why=STRING),
    "Replication": record(
        "role to mode epoch lastCommit countedCommit lagCommits lagBytes lagMs uploadedMs error baseCommit baseMs",
        role={"enum": ["none", "primary"]},
        to=nullable(STRING),
        mode={"enum": ["async", None]},
        epoch=nullable(COUNT),
        lastCommit=nullable(COUNT),
        countedCommit=nullable(COUNT),
        lagCommits=nullable(COUNT),
        lagBytes=nullable(COUNT),
        lagMs=nullable(COUNT),
        uploadedMs=nullable(MILLISECONDS),
        error=nullable(STRING),
        baseCommit=nullable(COUNT),
        baseMs=nullable(MILLISECONDS),
    ),
    "ScrubFinding": record(
        "namespace topic generation table from to rows why file",
        namespace=nullable(STRING),
        topic=nullable(STRING),
        generation=nullable(POSITIVE),
        table={"enum": ["metadata", "message", "payload"]},
        **{"from": STRING, "to": STRING},
        rows=nullable(POSITIVE),
        why=STRING,
        file=nullable(STRING),
    ),
}

"""The routes of producers, of namespaces and of those who clean, and their JSON forms."""

from __future__ import annotations

from broker.openapi.errors import ANY, BODY, READS, WRITES
from broker.openapi.operation import Operation
from broker.openapi.schemas import (
    BOOLEAN,
    COUNT,
    INTEGER,
    MILLISECONDS,
    POSITIVE,
    STRING,
    Schema,
    array,
    nullable,
    record,
    ref,
)

NAMESPACES = "/v1/namespaces"
NAMESPACE = NAMESPACES + "/{namespace}"
PRODUCERS = NAMESPACE + "/topics/{topic}/producers"
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
_SEQUENCE_ID: Schema = {**INTEGER, "minimum": -1, "description": "-1: none yet"}
_BOUND: Schema = nullable({**ref("MessageId"), "description": "what stands before it is not meant; null: nothing does"})

PRODUCER_SCHEMAS: dict[str, Schema] = {
    "Deduplication": record(
        "enabled level",
        enabled={**BOOLEAN, "description": "whether sequence ids of producers are remembered"},
        level={"enum": ["topic", "namespace", "service"], "description": "who says so"},
    ),
    "SessionRequest": record(
        retentionSeconds=nullable({**POSITIVE, "description": "how long to be remembered when idle"}),
        generation=nullable(POSITIVE),
        discardStaged=nullable({**BOOLEAN, "description": "never publish what is staged under the name"}),
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
        next=nullable({**STRING, "description": "the name to go on after; null: there are no more"}),
    ),
    "Maintenance": record(
        "generation expiredBefore invalid snapshotPosition",
        generation=POSITIVE,
        expiredBefore=MILLISECONDS,
        invalid=nullable(array({"type": ["integer", "string"]}, description="write pointers; null: nobody can say")),
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
        NAMESPACE + "/topics/{topic}/maintenance",
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
        NAMESPACE + "/properties",
        "namespaces",
        "What a namespace says for its topics.",
        (*ANY, "invalid_name"),
        answer=ref("Namespace"),
    ),
    Operation(
        "set_namespace",
        "PUT",
        NAMESPACE + "/properties",
        "namespaces",
        "Replace all properties of a namespace, durably, in force at once.",
        (*ANY, *BODY, "invalid_name", "invalid_property", "storage_failed", "outcome_unknown"),
        body=ref("NamespaceProperties"),
        example={"deduplication": "enabled"},
        answer=ref("Namespace"),
    ),
)

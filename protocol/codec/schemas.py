"""The Avro schemas of both versions, in exactly the field and union order of the HTTP contract, section 2.

Version 2 is version 1 with fields appended. Unions of version 1 keep the seeds' order, null last; those of
version 2 are written null first.
"""

from __future__ import annotations

from typing import Any

from fastavro import parse_schema

Schema = Any


def _record(name: str, **fields: Schema) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": key, "type": kind} for key, kind in fields.items()]}


def _array(items: Schema) -> dict[str, Any]:
    return {"type": "array", "items": items}


_STRING_MAP = {"type": "map", "values": "string"}
_ISOLATION = {"type": "enum", "name": "Isolation", "symbols": ["uncommitted", "committed"]}

_PUBLISH_FIELDS: dict[str, Schema] = {
    "transactionWritePointer": ["long", "null"],
    "messages": _array("bytes"),
}
_PUBLISH_FIELDS_2: dict[str, Schema] = {
    "ttlSeconds": ["null", "int"],
    "producer": ["null", "string"],
    "producerEpoch": ["null", "long"],
    "generation": ["null", "int"],
    "sequenceIds": ["null", _array("long")],
    "atomic": "boolean",
    "routingKey": ["null", "string"],
    "segment": ["null", "string"],
    "segments": ["null", _array("string")],
    "messageTtlsSeconds": ["null", _array(["null", "int"])],
    "attributes": ["null", _array(_STRING_MAP)],
}
_RESPONSE_FIELDS: dict[str, Schema] = {
    "transactionWritePointer": ["long", "null"],
    "startTimestamp": "long",
    "startSequenceId": "int",
    "endTimestamp": "long",
    "endSequenceId": "int",
}
_CONSUME_FIELDS: dict[str, Schema] = {
    "startFrom": ["bytes", "long", "null"],
    "inclusive": "boolean",
    "limit": ["int", "null"],
    "transaction": ["bytes", "null"],
}
_CONSUME_FIELDS_2: dict[str, Schema] = {
    "endBefore": ["null", "bytes"],
    "waitMs": ["null", "int"],
    "maxBytes": ["null", "int"],
    "isolation": ["null", _ISOLATION],
}

PUBLISH_REQUEST: Schema = parse_schema(_record("PublishRequest", **_PUBLISH_FIELDS))
PUBLISH_RESPONSE: Schema = parse_schema(_record("PublishResponse", **_RESPONSE_FIELDS))
CONSUME_REQUEST: Schema = parse_schema(_record("ConsumeRequest", **_CONSUME_FIELDS))
CONSUME_RESPONSE: Schema = parse_schema(_array(_record("Message", id="bytes", payload="bytes")))

PUBLISH_REQUEST_2: Schema = parse_schema(_record("PublishRequest", **_PUBLISH_FIELDS, **_PUBLISH_FIELDS_2))
PUBLISH_RESPONSE_2: Schema = parse_schema(_record("PublishResponse", **_RESPONSE_FIELDS, duplicate="boolean"))
CONSUME_REQUEST_2: Schema = parse_schema(_record("ConsumeRequest", **_CONSUME_FIELDS, **_CONSUME_FIELDS_2))
CONSUME_RESPONSE_2: Schema = parse_schema(
    _array(_record("Message", id="bytes", payload="bytes", attributes=_STRING_MAP))
)

#: The same under both versions.
RECEIPT: Schema = parse_schema(
    _record(
        "Receipt",
        firstId=["null", "bytes"],
        lastId=["null", "bytes"],
        duplicate="boolean",
        deduplicated="boolean",
        lastSequenceId=["null", "long"],
        generation="int",
        stored=["null", _array("long")],
        dropped=["null", _array("long")],
    )
)

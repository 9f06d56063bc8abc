"""A stored row in words: what each row of the three tables says, or why it cannot be read."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol import keys
from protocol.effects import Table
from protocol.ids import pack_id
from protocol.keys import DamagedRow
from protocol.records import HighWater, Metadata, Reader
from protocol.rows import SEGMENT, MessageRow, decode_row
from storage.copying.progress import copying_fields, is_copying_key
from storage.describe_producers import (
    TOLD,
    is_namespace_key,
    namespace_fields,
    origin_fields,
    producer_fields,
    producers_fields,
)
from storage.describe_transactions import is_service_key, pointer_fields, reference_fields, service_fields

if TYPE_CHECKING:
    from protocol.names import TopicName


@dataclass(slots=True)
class Described:
    """One row. What could not be read has its place empty and says so in ``problem``."""

    table: Table
    key: bytes
    value: bytes
    kind: str = "unparseable"
    """``metadata``, ``high-water``, ``reader``, ``pointer``, ``staged``, ``producer``, ``producers``, ``message``, ``reference``,
    ``payload``; ``namespace``; ``copying``; of the transaction
    service ``transactions``, ``transaction``, ``change-set``, ``last-pass``, ``authority``; or ``unparseable``."""
    name: TopicName | None = None
    generation: int | None = None
    time_ms: int | None = None
    """When a message or payload was written; None for the rest."""
    position: bytes | None = None
    """The first ten bytes of a message's id."""
    metadata: Metadata | None = None
    message: MessageRow | None = None
    fields: dict[str, object] = field(default_factory=dict)
    """The rest, ready for JSON."""
    problem: str = ""

    def shown(self) -> dict[str, object]:
        """Everything, ready for JSON; keys in hex, payloads in base64."""
        out: dict[str, object] = {"table": self.table.name.lower(), "kind": self.kind, "key": self.key.hex()}
        if self.name is not None:
            out |= {"namespace": self.name.namespace, "topic": self.name.topic}
        if self.generation is not None:
            out["generation"] = self.generation
        out |= self.fields
        if self.problem:
            out |= {"problem": self.problem, "value": self.value.hex()}
        return out


def describe(table: Table, key: bytes, value: bytes) -> Described:
    """What a row says; never raises for whatever bytes it has."""
    row = Described(table, key, value)
    try:
        if table is Table.MESSAGE:
            _message(row)
        elif table is Table.PAYLOAD:
            _payload(row)
        elif is_service_key(key):
            row.kind, row.fields = service_fields(key, value)
        elif is_copying_key(key):
            row.kind, row.fields = "copying", copying_fields(key, value)
        elif is_namespace_key(key):
            row.kind, row.fields = "namespace", namespace_fields(key, value)
        elif key[:1] == keys.SYSTEM:
            _system(row)
        else:
            _metadata(row)
    except DamagedRow as error:
        row.kind = "unparseable"
        row.problem = error.detail
    return row


def _message(row: Described) -> None:
    row.name, row.generation, ts, seq = keys.parse_message_key(row.key)
    row.time_ms, row.position = ts, row.key[-10:]
    row.fields = {"publish_ts_ms": ts, "sequence_id": seq}
    if ts >= 0:
        row.fields["id"] = pack_id(ts, seq).hex()
    message = _value(row)
    if message.payload is None:
        row.fields |= reference_fields(message)
    elif not message.extras.keys() <= TOLD:
        row.fields["extras"] = {name: _plain(value) for name, value in message.extras.items() if name not in TOLD}
    row.fields |= origin_fields(message)
    row.kind = "message" if message.payload is not None else "reference"


def _payload(row: Described) -> None:
    row.name, row.generation, pointer, ts, seq = keys.parse_payload_key(row.key)
    row.time_ms = ts
    under = "write_pointer" if pointer > 0 else "staged_pointer"
    row.fields = {under: pointer, "write_ts_ms": ts, "payload_sequence_id": seq}
    message = _value(row)
    if message.payload is None:
        raise DamagedRow("a payload row has no payload")
    if SEGMENT in message.extras:
        row.fields["segment"] = _plain(message.extras[SEGMENT])
    row.fields |= origin_fields(message)
    row.kind = "payload"


def _value(row: Described) -> MessageRow:
    message = row.message = decode_row(row.value)
    if message.pointer is not None:
        row.fields |= {"write_pointer": abs(message.pointer), "rolled_back": message.pointer < 0}
    if message.ttl_s is not None:
        row.fields["ttl_s"] = message.ttl_s
    if message.payload is not None:
        row.fields |= {"payload_bytes": len(message.payload), "payload": base64.b64encode(message.payload).decode()}
    return message


def _metadata(row: Described) -> None:
    row.name, rest = keys.topic_of(row.key)
    if rest:
        raise DamagedRow(f"metadata key {row.key.hex()} has {len(rest)} bytes after the topic")
    metadata = row.metadata = Metadata.decode(row.value)
    row.generation = metadata.generation
    row.fields = {
        "properties": metadata.properties.stored(),
        "created_ms": metadata.created_ms,
        "updated_ms": metadata.updated_ms,
        "deleted_ms": metadata.deleted_ms,
        "partly_cleaned": metadata.partly_cleaned,
        "floor_ms": metadata.floor_ms,
    }
    row.kind = "metadata"


def _system(row: Described) -> None:
    key = keys.parse_system_key(row.key)
    row.name, row.generation = key.name, key.generation
    if key.kind == keys.HIGH_WATER:
        mark = HighWater.decode(row.value)
        row.fields = {
            "time_ms": mark.time_ms,
            "last_ts_ms": mark.last_ts_ms,
            "last_sequence_id": mark.last_sequence_id,
            "published": mark.appended,
        }
        row.kind = "high-water"
    elif key.kind == keys.READER:
        reader = Reader.decode(row.value)
        row.fields = {
            "reader": key.rest.decode("ascii", "replace"),
            "position": _plain(reader.position),
            "changed_ms": reader.changed_ms,
        }
        row.kind = "reader"
    elif key.kind == keys.POINTER:
        row.kind, row.fields = pointer_fields(row.key, row.value)
    elif key.kind == keys.PRODUCER:
        row.fields = producer_fields(key.rest, row.value)
        row.kind = "producer"
    elif key.kind == keys.PRODUCERS:
        row.fields = producers_fields(row.value)
        row.kind = "producers"
    else:
        raise DamagedRow(f"system rows of kind {key.kind!r} are not known to this version")


def _plain(value: object) -> object:
    """What msgpack may give, as JSON can say it."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return repr(value)

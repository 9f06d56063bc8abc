"""Describes a stored row of any of the three tables, or says why it cannot be read."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plainsong.protocol import keys
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import POSITION_BYTES, pack_id, shown_id
from plainsong.protocol.keys import DamagedRow
from plainsong.protocol.records import HighWater, Metadata, NamespaceProperties, Reader, unpack_record
from plainsong.protocol.rows import (
    ATTRIBUTES,
    BATCH,
    INDEX,
    SEGMENT,
    STAMP,
    MessageRow,
    Stamp,
    Stored,
    attributes_in,
    decode_row,
)
from plainsong.protocol.topic.chain import ChainEntry
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer
from plainsong.protocol.transactions.ledger_rows import (
    AUTHORITY,
    CHANGES,
    ENLISTED,
    HEAD,
    PASS,
    TRANSACTION,
    ChangeSet,
    Head,
    LastPass,
    Record,
    enlisted_topic,
    parse_service_key,
)
from storage.copy_parts import copying_fields, is_copying_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.protocol.names import TopicName


@dataclass(slots=True)
class DescribedRow:
    """A row. Fields that could not be read are empty, and ``problem`` says why."""

    table: Table
    key: bytes
    value: bytes
    kind: str = "unparseable"
    """``metadata``, ``high-water``, ``reader``, ``pointer``, ``staged``, ``producer``, ``producers``, ``message``,
    ``reference``, ``payload``, ``chain-entry``; ``namespace``; ``copying``; for the transaction service
    ``transactions``, ``transaction``, ``enlisted``, ``change-set``, ``last-pass``, ``authority``; ``unparseable``."""
    name: TopicName | None = None
    generation: int | None = None
    time_ms: int | None = None
    """Write time of a message or payload; None for other rows."""
    position: bytes | None = None
    """The first ten bytes of a message's id."""
    metadata: Metadata | None = None
    message: MessageRow | None = None
    fields: dict[str, object] = field(default_factory=dict)
    """All other fields, ready for JSON."""
    problem: str = ""

    def shown(self) -> dict[str, object]:
        """Return everything, ready for JSON; keys in hex, payloads in base64."""
        out: dict[str, object] = {"table": self.table.name.lower(), "kind": self.kind, "key": self.key.hex()}
        if self.name is not None:
            out |= {"namespace": self.name.namespace, "topic": self.name.topic}
        if self.generation is not None:
            out["generation"] = self.generation
        out |= self.fields
        if self.problem:
            out |= {"problem": self.problem, "value": self.value.hex()}
        return out


def describe(table: Table, key: bytes, value: bytes) -> DescribedRow:
    """Describe a row. Never raises, whatever its bytes."""
    row = DescribedRow(table, key, value)
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


def _message(row: DescribedRow) -> None:
    row.name, row.generation, ts, seq = keys.parse_message_key(row.key)
    row.time_ms, row.position = ts, row.key[-10:]
    row.fields = {"publish_ts_ms": ts, "sequence_id": seq}
    if ts >= 0:
        row.fields["id"] = pack_id(ts, seq).hex()
    message = _value(row)
    if message.payload is None:
        row.fields |= reference_fields(message)
    elif not message.extras.keys() <= DESCRIBED_EXTRAS:
        row.fields["extras"] = {
            name: _plain(value) for name, value in message.extras.items() if name not in DESCRIBED_EXTRAS
        }
    row.fields |= origin_fields(message)
    row.kind = "message" if message.payload is not None else "reference"


def _entry(row: DescribedRow) -> None:
    """Describe an entry of a topic's chain."""
    row.time_ms, row.position = None, row.key[-POSITION_BYTES:]
    entry = ChainEntry.decode(row.position, row.value)
    row.kind = "chain-entry"
    row.fields = {
        "id": shown_id(entry.position),
        "number": entry.number,
        "about": entry.kind,
        "link": entry.link.hex(),
        "first": entry.first.hex(),
        "last": entry.last.hex(),
    }
    if entry.pointer:
        row.fields["write_pointer"] = entry.pointer
    if entry.epoch:
        row.fields["epoch"] = entry.epoch


def _payload(row: DescribedRow) -> None:
    row.name, row.generation, pointer, ts, seq = keys.parse_payload_key(row.key)
    row.time_ms = ts
    if pointer == keys.CHAIN_POINTER:
        _entry(row)
        return
    under = "write_pointer" if pointer > 0 else "staged_pointer"
    row.fields = {under: pointer, "write_ts_ms": ts, "payload_sequence_id": seq}
    message = _value(row)
    if message.payload is None:
        raise DamagedRow("a payload row has no payload")
    if SEGMENT in message.extras:
        row.fields["segment"] = _plain(message.extras[SEGMENT])
    row.fields |= origin_fields(message)
    row.kind = "payload"


def _value(row: DescribedRow) -> MessageRow:
    message = row.message = decode_row(row.value)
    if message.pointer is not None:
        row.fields |= {"write_pointer": abs(message.pointer), "rolled_back": message.pointer < 0}
    if message.ttl_s is not None:
        row.fields["ttl_s"] = message.ttl_s
    if message.payload is not None:
        row.fields |= {"payload_bytes": len(message.payload), "payload": base64.b64encode(message.payload).decode()}
    return message


def _metadata(row: DescribedRow) -> None:
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


def _system(row: DescribedRow) -> None:
    key = keys.parse_system_key(row.key)
    row.name, row.generation = key.name, key.generation
    if key.kind == keys.HIGH_WATER:
        mark = HighWater.decode(row.value)
        row.fields = {
            "time_ms": mark.time_ms,
            "last_ts_ms": mark.last_ts_ms,
            "last_sequence_id": mark.last_sequence_id,
            "published": mark.appended,
            **({"closed_ms": mark.closed_ms} if mark.closed_ms else {}),
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
    """Convert a value from msgpack to one that JSON can represent."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return repr(value)


# --- producers and namespaces ----------------------------------------------------------------------


Fields = dict[str, object]
#: Extras of message rows that are shown as separate fields.
DESCRIBED_EXTRAS = frozenset((ATTRIBUTES, BATCH, INDEX, STAMP))
#: Maximum number of a stamp's sequence ids to list; all are counted.
MAX_IDS = 20


def origin_fields(message: MessageRow) -> Fields:
    """Return a message row's attributes, producer, ids and batch. Raises DamagedRow."""
    fields: Fields = {}
    attributes = attributes_in(message.extras)
    if attributes:
        fields["attributes"] = attributes
    stamp = Stamp.of(message)
    if stamp is not None:
        fields |= {
            "producer": stamp.producer,
            "epoch": stamp.epoch,
            "first_producer_id": stamp.ids[0],
            "last_producer_id": stamp.ids[-1],
            "rows_of_request": stamp.rows,
        }
        if not isinstance(stamp.ids, range):
            fields["first_producer_ids"] = list(stamp.ids[:MAX_IDS])
    if message.payload is not None and BATCH in message.extras:
        fields["batch_messages"] = message.extras[BATCH]
    if INDEX in message.extras:
        fields["index_in_request"] = message.extras[INDEX]
    return fields


def is_namespace_key(key: bytes) -> bool:
    """True if a row of the metadata table is a namespace's."""
    return key.startswith(keys.SYSTEM + keys.NAMESPACE)


def namespace_fields(key: bytes, value: bytes) -> Fields:
    """Return a namespace's properties. Raises DamagedRow."""
    namespace = keys.namespace_of(key)
    properties = NamespaceProperties.decode(value)
    return {
        "namespace": namespace,
        "deduplication": properties.deduplication,
        "times_switched_off": properties.switched,
    }


def producer_fields(name: bytes, value: bytes) -> Fields:
    """Return what a topic stores about a producer. Raises DamagedRow."""
    producer = Producer.decode(name.decode("utf-8", "replace"), value)
    fields: Fields = {
        "producer": producer.name,
        "epoch": producer.epoch,
        "last_producer_id": producer.persisted,
        "active_ms": producer.active_ms,
        "last_requests": [
            {
                "first_producer_id": each.low,
                "last_producer_id": each.high,
                "first": each.first.hex(),
                "last": each.last.hex(),
                **({"write_pointer": each.pointer} if each.pointer else {}),
            }
            for each in producer.recent
        ],
    }
    if producer.retention_ms is not None:
        fields["remembered_for_ms"] = producer.retention_ms
    return fields


def producers_fields(value: bytes) -> Fields:
    """Return a topic's deduplication record. Raises DamagedRow."""
    record = DeduplicationRecord.decode(value)
    return {
        "remembered": record.on,
        "namespace_switched_off": record.switched,
        "highest_epoch": record.epochs,
        "since": None if record.since is None else record.since.hex(),
        "forgotten_up_to": None if record.forgotten is None else record.forgotten.hex(),
    }


# --- write pointers and the transaction service ----------------------------------------------------


#: Maximum number of a change set's keys to show; all are counted.
MAX_CHANGES = 20


def reference_fields(message: MessageRow) -> Fields:
    """Return the stored messages that a row without payload refers to. Raises DamagedRow if it names none."""
    stored = Stored.of(message)
    fields: Fields = {
        "messages": stored.messages,
        "message_bytes": stored.payload_bytes,
        "first_payload": stored.first.hex(),
        "last_payload": stored.last.hex(),
    }
    if stored.staged is not None:
        fields["staged_pointer"] = stored.staged
    if stored.segments is not None:
        fields["segments"] = sorted(stored.segments)
    return fields


def pointer_fields(key: bytes, value: bytes) -> tuple[str, Fields]:
    """Return kind and fields of a topic's row about a write pointer or a staged one. Raises DamagedRow."""
    pending = Pending.decode(keys.parse_pointer_key(key)[2], value)
    if pending.staged_by is not None:
        return "staged", {"staged_pointer": pending.pointer, "producer": pending.staged_by} | _used(pending)
    fields: Fields = {
        "write_pointer": pending.pointer,
        "messages": pending.messages,
        "message_bytes": pending.size,
        "rolled_back": pending.rolled_back,
        "runs": [{"first": run.first.hex(), "last": run.last.hex(), "before": run.before} for run in pending.runs],
    }
    if pending.published is not None:
        fields["stored_published"] = {"first": pending.published[0].hex(), "last": pending.published[1].hex()}
    return "pointer", fields | _used(pending)


def _used(pending: Pending) -> Fields:
    """Return the times when a pointer was used, and what is stored under it."""
    fields: Fields = {"first_used_ms": pending.since_ms, "last_used_ms": pending.used_ms}
    if pending.last_stored is not None and pending.first_stored is not None:
        fields |= {
            "stored": pending.stored,
            "stored_bytes": pending.stored_bytes,
            "first_payload": pending.first_stored.hex(),
            "last_payload": pending.last_stored.hex(),
            "being_removed": pending.orphaned,
        }
    if pending.segments:
        fields["segments"] = {
            name: {"index": each.index, "messages": each.messages, "bytes": each.size}
            for name, each in pending.segments.items()
        }
    if pending.stored_by:
        fields["stored_by"] = [
            {"producer": producer, "segment": segment or None, "epoch": epoch, "last_producer_id": highest}
            for (producer, segment), (epoch, highest) in pending.stored_by.items()
        ]
    return fields


def is_service_key(key: bytes) -> bool:
    """True if a row of the metadata table is the transaction service's."""
    return key.startswith(keys.SYSTEM + keys.SERVICE)


def service_fields(key: bytes, value: bytes) -> tuple[str, Fields]:
    """Return kind and fields of a row of the transaction service. Raises DamagedRow."""
    letter, pointer = parse_service_key(key)
    if letter not in _KINDS and letter != ENLISTED:
        raise DamagedRow(f"rows {letter!r} of the transaction service are not known to this version")
    if letter == ENLISTED:
        since_ms = unpack_record(value, "enlisted topic").get("m")
        return "enlisted", {"transaction": pointer, "topic": str(enlisted_topic(key)), "since_ms": since_ms}
    kind, fields = _KINDS[letter]
    return kind, fields(pointer, value)


def _head(_: int, value: bytes) -> Fields:
    head = Head.decode(value)
    return {
        "last_pointer": head.last,
        "read_pointer": head.read_pointer,
        "first_pointer": head.first,
        "forgotten_up_to": head.forgotten,
        "changes_forgotten_up_to": head.unchecked,
        "reserved_up_to": head.reserved,
        "reserved_for_tephra": head.tephra,
        "changes_lost_up_to": head.lacking,
    }


def _transaction(transaction_id: int, value: bytes) -> Fields:
    record = Record.decode(transaction_id, value)
    fields: Fields = {
        "transaction": transaction_id,
        "state": record.state,
        "type": record.type.name.lower(),
        "client": record.client_id,
        "started_ms": record.started_ms,
        "expires_ms": record.expires_ms,
        "read_pointer": record.read_pointer,
        "visibility_bound": record.bound,
    }
    if record.checkpoints:
        fields["checkpoints"] = list(record.checkpoints)
    if record.state != "in_progress":
        fields |= {"decided_ms": record.decided_ms, "decided_after_pointer": record.decided_at}
    if record.listed:
        fields["invalid_pointers"] = list(record.listed)
    for name, said in (("must_prepare", record.must_prepare), ("aborting", record.aborting)):
        if said:
            fields[name] = True
    return fields


def _change_set(transaction_id: int, value: bytes) -> Fields:
    changes = ChangeSet.decode(transaction_id, value)
    return {
        "transaction": transaction_id,
        "client": changes.client_id,
        "commit_pointer": changes.commit_pointer,
        "changes": len(changes.keys),
        "first_changes": [key.hex() for key in sorted(changes.keys)[:MAX_CHANGES]],
    }


def _last_pass(_: int, value: bytes) -> Fields:
    last = LastPass.decode(value)
    return {"begun_ms": last.begun_ms, "safe_bound": last.bound}


def _authority(_: int, value: bytes) -> Fields:
    return {"service": str(unpack_record(value, "authority").get("a"))}


_KINDS: dict[bytes, tuple[str, Callable[[int, bytes], Fields]]] = {
    HEAD: ("transactions", _head),
    TRANSACTION: ("transaction", _transaction),
    CHANGES: ("change-set", _change_set),
    PASS: ("last-pass", _last_pass),
    AUTHORITY: ("authority", _authority),
}

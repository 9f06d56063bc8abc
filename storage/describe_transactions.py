"""Rows about transactions in words: what a topic knows of a write pointer, and what the transaction service keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import keys
from protocol.keys import DamagedRow
from protocol.records import unpack_record
from protocol.references import Stored
from protocol.topic.pending import Pending
from protocol.transactions.manager.record import Record
from protocol.transactions.manager.rows import (
    AUTHORITY,
    CHANGES,
    ENLISTED,
    HEAD,
    PASS,
    TRANSACTION,
    ChangeSet,
    Head,
    LastPass,
    enlisted_topic,
    parse_service_key,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.rows import MessageRow

Fields = dict[str, object]

#: Keys of a change set that are shown; all are counted.
MAX_CHANGES = 20


def reference_fields(message: MessageRow) -> Fields:
    """What a message row without payload refers to. Raises DamagedRow when it does not say."""
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
    """Kind and words of a topic's row about a write pointer, or about what is staged. Raises DamagedRow."""
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
    """When it was used, and what is stored under it."""
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
    """Whether a row of the metadata table is the transaction service's."""
    return key.startswith(keys.SYSTEM + keys.SERVICE)


def service_fields(key: bytes, value: bytes) -> tuple[str, Fields]:
    """Kind and words of a row of the transaction service. Raises DamagedRow."""
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

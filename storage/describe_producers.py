"""Rows about producers in words: who sent a message, what a topic remembers of senders, what a namespace says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol import keys
from protocol.records import NamespaceProperties
from protocol.rows import ATTRIBUTES, BATCH, INDEX, STAMP, Stamp, attributes_in
from protocol.topic.producers.record import Producer, Remembering

if TYPE_CHECKING:
    from protocol.rows import MessageRow

Fields = dict[str, object]

#: Extras of message rows that are told in words.
TOLD = frozenset((ATTRIBUTES, BATCH, INDEX, STAMP))
#: Sequence ids of a stamp that are shown one by one; all are counted.
MAX_IDS = 20


def origin_fields(message: MessageRow) -> Fields:
    """What a message row says beside its payload: attributes, producer, ids, batch. Raises DamagedRow."""
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
    """Whether a row of the metadata table is a namespace's."""
    return key.startswith(keys.SYSTEM + keys.NAMESPACE)


def namespace_fields(key: bytes, value: bytes) -> Fields:
    """What was said about a namespace. Raises DamagedRow."""
    namespace = keys.namespace_of(key)
    properties = NamespaceProperties.decode(value)
    return {
        "namespace": namespace,
        "deduplication": properties.deduplication,
        "times_switched_off": properties.switched,
    }


def producer_fields(name: bytes, value: bytes) -> Fields:
    """What a topic remembers of one producer. Raises DamagedRow."""
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
    if producer.memory_ms is not None:
        fields["remembered_for_ms"] = producer.memory_ms
    return fields


def producers_fields(value: bytes) -> Fields:
    """Whether a topic remembers producers, and from where on. Raises DamagedRow."""
    record = Remembering.decode(value)
    return {
        "remembered": record.on,
        "namespace_switched_off": record.switched,
        "highest_epoch": record.epochs,
        "since": None if record.since is None else record.since.hex(),
        "forgotten_up_to": None if record.forgotten is None else record.forgotten.hex(),
    }

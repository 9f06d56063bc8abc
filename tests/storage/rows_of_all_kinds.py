"""A store with rows of every kind, readable and not, written as the daemon would."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from plainsong.protocol import keys
from plainsong.protocol.effects import Operation, Table, put_one
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import HighWater, Metadata, NamespaceProperties, Reader, pack_record
from plainsong.protocol.rows import SEGMENT, MessageRow, Stored, encode_row, staged_pointer
from plainsong.protocol.topic.pending import Pending, Segment
from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer, Result
from plainsong.protocol.transactions.ledger_rows import (
    AUTHORITY,
    CHANGES,
    HEAD,
    PASS,
    TRANSACTION,
    ChangeSet,
    Head,
    LastPass,
    Record,
    service_key,
)
from plainsong.protocol.transactions.transaction import TransactionType
from storage.leveldb import LevelDBStore

NOW_MS = 1_700_000_000_000
ORDERS = TopicName("shop", "orders")
GONE = TopicName("shop", "gone")
INVALID = NOW_MS * 1_000_000
#: The reference in row 77: two messages of one segment.
REFERENCE = Stored(2, 12, bytes(10), keys._POSITION.pack(NOW_MS, 0), frozenset((4,)))


def message(name: TopicName, generation: int, ts: int, seq: int, row: MessageRow) -> Operation:
    key = keys.generation_prefix(name, generation) + keys._POSITION.pack(ts, seq)
    return put_one(Table.MESSAGE, key, encode_row(row))


def payload(name: TopicName, generation: int, pointer: int, ts: int, seq: int, row: MessageRow) -> Operation:
    key = keys.generation_prefix(name, generation) + keys._PAYLOAD.pack(pointer, ts, seq)
    return put_one(Table.PAYLOAD, key, encode_row(row))


def rows_of_all_kinds() -> list[Operation]:
    """Two topics: one alive in generation 2 with rows of generation 1 left, one deleted."""
    properties = TopicProperties(ttl_s=3600)
    return [
        put_one(Table.METADATA, keys.metadata_key(ORDERS), Metadata(2, properties, 1, 2).encode()),
        put_one(Table.METADATA, keys.metadata_key(GONE), Metadata(1, properties, 1, 2, deleted_ms=NOW_MS).encode()),
        put_one(Table.METADATA, keys.system_key(keys.HIGH_WATER, ORDERS, 2), HighWater(NOW_MS, NOW_MS, 1).encode()),
        put_one(Table.METADATA, keys.system_key(keys.READER, ORDERS, 2, b"ana"), Reader(bytes(20), NOW_MS).encode()),
        message(ORDERS, 1, NOW_MS - 10, 0, MessageRow(b"of the first generation")),
        message(ORDERS, 2, NOW_MS - 3_600_001, 0, MessageRow(b"expired")),
        message(ORDERS, 2, NOW_MS - 3_600_000, 0, MessageRow(b"in its last millisecond")),
        message(ORDERS, 2, NOW_MS - 2000, 0, MessageRow(b"expired by its own ttl", ttl_s=1)),
        message(ORDERS, 2, NOW_MS, 0, MessageRow(b"\xff\x00plain")),
        message(ORDERS, 2, NOW_MS, 1, MessageRow(None, pointer=-77, extras=REFERENCE.extras())),
        message(ORDERS, 2, NOW_MS, 2, MessageRow(b"of an invalid transaction", pointer=INVALID)),
        message(GONE, 1, NOW_MS, 0, MessageRow(b"of a deleted topic")),
        payload(ORDERS, 2, 77, NOW_MS, 0, MessageRow(b"stored", ttl_s=9, extras={SEGMENT: 4})),
        put_one(Table.METADATA, keys.pointer_key(ORDERS, 2, INVALID), pending().encode()),
        *rows_of_the_transaction_service(),
    ]


def rows_about_producers() -> list[Operation]:
    """A stamped batch with attributes, and all records about its producer."""
    at = keys._POSITION.pack(NOW_MS, 3)
    stored_by = pending()
    stored_by.stored_by["p", "part 1"] = (3, 7)
    producer = Producer("p", 3, 9, 9, NOW_MS, 60_000, (Result(5, 9, at, at, 0), Result(10, 10, at, at, 77)))
    system = partial(keys.system_key, name=ORDERS, generation=2)
    return [
        message(ORDERS, 2, NOW_MS, 3, MessageRow(b"first of two", extras={"d": ["p", 3, 2, [5, 9]], "b": 2})),
        message(ORDERS, 2, NOW_MS, 4, MessageRow(b"second", extras={"i": 1, "a": {"routingKey": "k"}})),
        message(ORDERS, 2, NOW_MS, 5, MessageRow(None, 77, extras={**REFERENCE.extras(), "d": ["p", 3, 1, 10]})),
        payload(ORDERS, 2, 77, NOW_MS, 1, MessageRow(b"stored", extras={"a": {"traceparent": "t"}, SEGMENT: 4})),
        put_one(Table.METADATA, system(keys.PRODUCER, rest=b"p"), producer.encode()),
        put_one(Table.METADATA, system(keys.PRODUCERS), DeduplicationRecord(since=at, forgotten=at, epochs=3).encode()),
        put_one(Table.METADATA, keys.namespace_key("shop"), NamespaceProperties("enabled", 1).encode()),
        put_one(Table.METADATA, keys.pointer_key(ORDERS, 2, INVALID), stored_by.encode()),
    ]


def rows_about_staging() -> list[Operation]:
    """A producer's staged, unpublished messages, one of their rows, and a row of what it published."""
    open_, gone = (staged_pointer(NOW_MS, seq) for seq in (1, 0))
    at = keys._POSITION.pack(NOW_MS - 9, 0)
    staged = Pending(open_, NOW_MS - 9, NOW_MS, stored=2, stored_bytes=11, first_stored=at, last_stored=at)
    staged.staged_by = "p"
    staged.segments["a"] = Segment(0, 2, 11)
    staged.stored_by["p", "a"] = (3, 1)
    reference = Stored(2, 12, at, at, frozenset((0,)), gone)
    return [
        put_one(Table.METADATA, keys.pointer_key(ORDERS, 2, open_), staged.encode()),
        payload(ORDERS, 2, open_, NOW_MS - 9, 0, MessageRow(b"staged", extras={SEGMENT: 0})),
        message(ORDERS, 2, NOW_MS, 6, MessageRow(None, extras={**reference.extras(), "d": ["p", 3, 1, 11]})),
        payload(ORDERS, 2, gone, NOW_MS - 9, 0, MessageRow(b"a winner", extras={SEGMENT: 0})),
    ]


def pending() -> Pending:
    """A topic's record of a write pointer, with every field set."""
    at = keys._POSITION.pack(NOW_MS, 2)
    known = Pending(INVALID, NOW_MS - 9, NOW_MS, messages=1, size=25, stored=3, stored_bytes=30)
    known.add(at, at, 5)
    known.first_stored = known.last_stored = keys._POSITION.pack(NOW_MS - 9, 0)
    known.segments["part 1"] = Segment(0, 3, 30)
    known.published = (at, at)
    return known


def rows_of_the_transaction_service() -> list[Operation]:
    """One row of each kind, and a transaction in each state except unknown."""
    begun = {"type": TransactionType.SHORT, "client_id": "ana", "started_ms": NOW_MS, "expires_ms": NOW_MS + 30_000}
    begun |= {"bound": INVALID - 1, "read_pointer": INVALID - 1}
    decided = {"decided_ms": NOW_MS + 1, "decided_at": INVALID + 9}
    return [
        put_one(Table.METADATA, service_key(HEAD), Head(INVALID + 9, INVALID, 1, 2, 3, reserved=INVALID + 12).encode()),
        put_one(Table.METADATA, service_key(PASS), LastPass(NOW_MS - 5, INVALID - 7).encode()),
        put_one(Table.METADATA, service_key(AUTHORITY), pack_record({"a": "embedded"})),
        put_one(
            Table.METADATA,
            service_key(CHANGES, INVALID + 2),
            ChangeSet(INVALID + 2, "ana", frozenset((b"k",)), 9).encode(),
        ),
        *(
            put_one(Table.METADATA, service_key(TRANSACTION, record.transaction_id), record.encode())
            for record in (
                Record(
                    INVALID,
                    **begun,
                    state="invalid",
                    listed=(INVALID, INVALID + 3),
                    pointers=(INVALID, INVALID + 3),
                    **decided,
                ),
                Record(INVALID + 1, **begun, must_prepare=True, aborting=True),
                Record(INVALID + 2, **begun, state="committed", **decided),
            )
        ),
    ]


def rows_that_do_not_parse() -> list[Operation]:
    """One bad key or value of every kind."""
    prefix = keys.generation_prefix(ORDERS, 2)
    return [
        put_one(Table.METADATA, b"shop:later:", b"\x09future"),
        put_one(Table.METADATA, b"\x00zshop:orders:\x00\x00\x00\x02", b""),
        put_one(Table.METADATA, b"\x00h", b""),
        put_one(Table.MESSAGE, prefix + b"short", b""),
        put_one(Table.MESSAGE, prefix + keys._POSITION.pack(NOW_MS, 9), b"\x80"),
        put_one(Table.MESSAGE, b"no topic", b""),
        put_one(
            Table.MESSAGE, prefix + keys._POSITION.pack(NOW_MS, 8), encode_row(MessageRow(None, 7, extras={"n": 1}))
        ),
        put_one(Table.METADATA, keys.pointer_key(ORDERS, 2, 7), b"\x01\x80"),
        put_one(Table.METADATA, service_key(TRANSACTION, 7), b"\x01\x80"),
        put_one(Table.METADATA, service_key(b"z"), b""),
        put_one(Table.PAYLOAD, prefix + keys._PAYLOAD.pack(1, NOW_MS, 0), b""),
        put_one(Table.PAYLOAD, prefix + keys._PAYLOAD.pack(1, NOW_MS, 1), encode_row(MessageRow(None))),
    ]


async def make_store(directory: Path, *, damaged: bool = False) -> Path:
    """A stopped store with those rows."""
    async with await LevelDBStore.open(directory) as store:
        claim = await store.claim(ORDERS)
        await store.write(rows_of_all_kinds() + (rows_that_do_not_parse() if damaged else []), claim=claim)
    return directory

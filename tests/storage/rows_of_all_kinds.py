"""A store with rows of every kind, readable and not, written as the daemon would."""

from __future__ import annotations

from pathlib import Path

from protocol import keys
from protocol.effects import Operation, Table, put_one
from protocol.names import TopicName
from protocol.properties import TopicProperties
from protocol.records import HighWater, Metadata, Reader
from protocol.rows import MessageRow, encode_row
from storage.leveldb import LevelDBStore

NOW_MS = 1_700_000_000_000
ORDERS = TopicName("shop", "orders")
GONE = TopicName("shop", "gone")


def message(name: TopicName, generation: int, ts: int, seq: int, row: MessageRow) -> Operation:
    key = keys.generation_prefix(name, generation) + keys._POSITION.pack(ts, seq)
    return put_one(Table.MESSAGE, key, encode_row(row))


def payload(name: TopicName, generation: int, pointer: int, ts: int, seq: int, data: bytes) -> Operation:
    key = keys.generation_prefix(name, generation) + keys._PAYLOAD.pack(pointer, ts, seq)
    return put_one(Table.PAYLOAD, key, encode_row(MessageRow(data)))


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
        message(ORDERS, 2, NOW_MS, 1, MessageRow(None, pointer=-77, extras={"k": b"\x01"})),
        message(GONE, 1, NOW_MS, 0, MessageRow(b"of a deleted topic")),
        payload(ORDERS, 2, 77, NOW_MS, 0, b"stored"),
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
        put_one(Table.PAYLOAD, prefix + keys._PAYLOAD.pack(1, NOW_MS, 0), b""),
    ]


async def make_store(directory: Path, *, damaged: bool = False) -> Path:
    """A stopped store with those rows."""
    async with await LevelDBStore.open(directory) as store:
        claim = await store.claim(ORDERS)
        await store.write(rows_of_all_kinds() + (rows_that_do_not_parse() if damaged else []), claim=claim)
    return directory

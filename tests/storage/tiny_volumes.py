"""Volumes of a few rows each, and what is written to them."""

from __future__ import annotations

import trio

from plainsong.protocol.effects import Put, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix
from storage.leveldb import LevelDBOptions, LevelDBStore
from tests.storage.contract import MESSAGE, METADATA, NAME

#: A volume has a few rows.
TINY = LevelDBOptions(write_buffer_bytes=1 << 16, volume_bytes=1000, max_open_volumes=3)
PREFIX = generation_prefix(NAME, 1)


def message(number: int, value: bytes = b"v" * 100, prefix: bytes = PREFIX) -> Put:
    """One message of the topic."""
    return Put(MESSAGE, prefix, [pack_position(number, 0)], [value])


def key(number: int) -> bytes:
    return PREFIX + pack_position(number, 0)


async def fill(store: LevelDBStore, count: int, first: int = 0) -> None:
    """Messages, each in a commit of its own, with a row of metadata."""
    claim = await store.claim(NAME)
    for number in range(first, first + count):
        await store.write([message(number), put_one(METADATA, b"last", b"%d" % number)], claim=claim)


async def settled(store: LevelDBStore) -> None:
    """Wait until what is done beside commits is done."""
    await trio.to_thread.run_sync(store._db.upkeep.settle)

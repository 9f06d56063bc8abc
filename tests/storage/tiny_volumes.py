"""Volumes of a few rows each, and rows to write to them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from queue import SimpleQueue

import outcome
import trio

from plainsong.protocol.effects import Put, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix
from storage.config import StorageConfig
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.leveldb.tables import LevelDBTables
from tests.storage.contract import MESSAGE, METADATA, NAME

#: Options that limit a volume to a few rows.
TINY = LevelDBOptions(StorageConfig(write_buffer_bytes=1 << 16, volume_bytes=1000), max_open_volumes=3)
PREFIX = generation_prefix(NAME, 1)
#: A call that takes longer is deadlocked: it waits for the long work, which waits for the call.
MAX_PAUSE_S = 30.0


def message(number: int, value: bytes = b"v" * 100, prefix: bytes = PREFIX) -> Put:
    """Return the row of a message of the topic."""
    return Put(MESSAGE, prefix, [pack_position(number, 0)], [value])


def key(number: int) -> bytes:
    return PREFIX + pack_position(number, 0)


async def fill(store: LevelDBStore, count: int, first: int = 0) -> None:
    """Write messages, each in its own commit with a row of metadata; a volume is sealed as soon as it is full."""
    claim = await store.claim(NAME)
    for number in range(first, first + count):
        await store.write([message(number), put_one(METADATA, b"last", b"%d" % number)], claim=claim)
        # Make the next volume before this one is full.
        await settled(store)


def settle(tables: LevelDBTables) -> None:
    """Wait until the keeper has done the work that commits left to it, but not for long work. Blocks."""
    done: SimpleQueue[None] = SimpleQueue()
    tables.keeper.thread.put(lambda: done.put(None))
    done.get()


async def settled(store: LevelDBStore) -> None:
    """Wait as ``settle`` does."""
    await trio.to_thread.run_sync(settle, store._db)


def paused_until(loop: trio.lowlevel.TrioToken, call: Callable[[], Awaitable[object]]) -> Iterator[float]:
    """Yield pauses of the keeper's long work until ``call`` has ended on the event loop. Raises its exception."""
    ended: list[outcome.Outcome[object]] = []

    async def run() -> None:
        ended.append(await outcome.acapture(call))

    loop.run_sync_soon(trio.lowlevel.spawn_system_task, run)
    until_s = time.monotonic() + MAX_PAUSE_S
    while not ended:
        if time.monotonic() > until_s:
            raise TimeoutError("the call waits for the long work, or the keeper does not pause")
        yield 0.001
    ended[0].unwrap()

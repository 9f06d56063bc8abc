"""Which store the settings ask for, opened."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.config import Config
    from storage.base import Store


@asynccontextmanager
async def open_store(config: Config) -> AsyncIterator[Store]:
    """The store, closed when the block is left.

    Raises:
      StoreUnusable: it cannot be opened as it is; the detail says why, the hint what to do.
    """
    store: Store
    if config.storage.kind == "memory":
        store = MemoryStore()
    else:
        options = LevelDBOptions(
            write_buffer_bytes=config.storage.write_buffer_bytes, block_cache_bytes=config.storage.block_cache_bytes
        )
        store = await LevelDBStore.open(config.storage.data_dir, options, address=config.http.bind)
    try:
        yield store
    finally:
        await store.aclose()

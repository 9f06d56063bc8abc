"""Which store the settings ask for, opened; and settings that go beyond what it can hold, lowered."""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from broker.config import every_setting
from broker.config.values import parse_addresses
from storage.hbase.settings import HBaseOptions
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.config import Config
    from broker.config.hbase import HBaseConfig
    from storage.base import Store, StoreTraits
    from storage.inspect.explain import RowSource

log = logging.getLogger(__name__)

#: What a message's row has besides the message, at most: attributes, a routing key, its producer and segment.
MESSAGE_MARGIN_BYTES = 64 << 10
#: Of a row, a change set's keys may take this part: each has its length in front.
CHANGES_PART = 2


@asynccontextmanager
async def open_store(config: Config) -> AsyncIterator[Store]:
    """The store, closed when the block is left.

    Raises:
      StoreUnusable: it cannot be opened as it is; the detail says why, the hint what to do.
      StoreError: it does not answer.
    """
    store: Store
    if config.storage.kind == "memory":
        store = MemoryStore()
    elif config.storage.kind == "hbase":
        # Here, since its library takes a moment to load.
        from storage.hbase.store import HBaseStore

        store = await HBaseStore.open(_addresses(config.storage.hbase), hbase_options(config.storage.hbase))
    else:
        options = LevelDBOptions(
            write_buffer_bytes=config.storage.write_buffer_bytes, block_cache_bytes=config.storage.block_cache_bytes
        )
        store = await LevelDBStore.open(config.storage.data_dir, options, address=config.http.bind)
    try:
        yield store
    finally:
        await store.aclose()


def look_at_hbase(config: HBaseConfig) -> RowSource:
    """The rows of a store in HBase, for whoever only looks. Raises StoreUnusable."""
    from storage.hbase.store import HBaseRows

    return HBaseRows(_addresses(config), hbase_options(config))


def _addresses(config: HBaseConfig) -> list[tuple[str, int]]:
    return [(address.host, address.port) for address in parse_addresses(config.thrift)]


def place_of(config: Config) -> str:
    """Where the messages are, in a few words."""
    if config.storage.kind == "memory":
        return "in memory"
    if config.storage.kind == "leveldb":
        return str(config.storage.data_dir.absolute())
    hbase = config.storage.hbase
    return f"tables {hbase.table_prefix}* of the HBase behind {hbase.thrift}"


def hbase_options(config: HBaseConfig) -> HBaseOptions:
    """The store's part of the settings."""
    return HBaseOptions(
        table_prefix=config.table_prefix,
        timeout_s=config.timeout_s,
        max_connections=config.max_connections,
        max_cell_bytes=config.max_cell_bytes,
        create_tables=config.create_tables,
    )


def message_bound(config: Config, traits: StoreTraits) -> str:
    """The setting that decides how large a message may be, now that ``fitted`` has lowered what the store cannot hold."""
    most = traits.max_row_bytes
    is_lowered = most is not None and config.topic.max_message_bytes == most - MESSAGE_MARGIN_BYTES
    return "storage.hbase.max_cell_bytes" if is_lowered else "topic.max_message_bytes"


def fitted(config: Config, traits: StoreTraits) -> Config:
    """The settings with those lowered, and told, that would allow a row larger than the store's."""
    if traits.max_row_bytes is None:
        return config
    message_bytes = _lowered("topic.max_message_bytes", config, traits.max_row_bytes - MESSAGE_MARGIN_BYTES)
    changes_bytes = _lowered("transactions.max_change_set_bytes", config, traits.max_row_bytes // CHANGES_PART)
    return replace(
        config,
        topic=replace(config.topic, max_message_bytes=message_bytes),
        transactions=replace(config.transactions, max_change_set_bytes=changes_bytes),
    )


def _lowered(name: str, config: Config, most: int) -> int:
    wanted: int = config.value(name)
    if wanted > most:
        # Where nobody has asked for more, nobody needs to be warned.
        level = logging.INFO if wanted == every_setting()[name].default else logging.WARNING
        what = {"setting": name, "from": wanted, "to": most}
        log.log(level, "a setting is lowered to what the store holds", extra=what)
    return min(wanted, most)

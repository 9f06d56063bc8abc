"""Opens the store that the settings or a URL name, and lowers settings that go beyond its bounds."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker.config import every_setting
from broker.config.values import parse_addresses
from broker.tls import FileUnusable, gateway_context
from storage.base import StoreUnusable
from storage.directory import opening_failed, read_format
from storage.hbase.settings import HBaseOptions
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from broker.config import Config
    from broker.config.sections import HBaseConfig
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
            write_buffer_bytes=config.storage.write_buffer_bytes,
            volume_bytes=config.storage.volume_bytes,
            block_cache_bytes=config.storage.block_cache_bytes,
            compression=config.storage.compression,
            max_inline_s=config.storage.inline_commit_s,
        )
        store = await LevelDBStore.open(config.storage.data_dir, options, address=config.http.bind)
    try:
        yield store
    finally:
        await store.aclose()


def look_at_hbase(config: HBaseConfig) -> RowSource:
    """The rows of a store in HBase, for commands that only look. Raises StoreUnusable."""
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
    """The store's part of the settings. Raises FileUnusable."""
    return HBaseOptions(
        table_prefix=config.table_prefix,
        timeout_s=config.timeout_s,
        max_connections=config.max_connections,
        max_cell_bytes=config.max_cell_bytes,
        create_tables=config.create_tables,
        tls=gateway_tls(config.tls_ca, config.tls_certificate, config.tls_key) if config.tls else None,
    )


def gateway_tls(
    ca: str, certificate: str, key: str, *, named: str = "storage.hbase.tls_{}"
) -> Callable[[], ssl.SSLContext]:
    """Gives the context of each new connection, from the files as they are then; see ``gateway_context``.

    Raises:
      FileUnusable: now. Later a file that cannot be used is an OSError of the connection.
    """
    load = partial(gateway_context, ca, certificate, key, named=named)
    load()

    def context() -> ssl.SSLContext:
        try:
            return load()
        except FileUnusable as error:
            raise OSError(str(error)) from error

    return context


def message_bound(config: Config, traits: StoreTraits) -> str:
    """The setting that decides how large a message may be, now that ``fitted`` has lowered what the store cannot hold."""
    most = traits.max_row_bytes
    is_lowered = most is not None and config.topic.max_message_bytes == most - MESSAGE_MARGIN_BYTES
    return "storage.hbase.max_cell_bytes" if is_lowered else "topic.max_message_bytes"


def fitted(config: Config, traits: StoreTraits) -> Config:
    """The settings with those lowered, and logged, that would allow a row larger than the store's."""
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
        # A default is no request for more, so there is nothing to warn of.
        level = logging.INFO if wanted == every_setting()[name].default else logging.WARNING
        what = {"setting": name, "from": wanted, "to": most}
        log.log(level, "a setting is lowered to what the store holds", extra=what)
    return min(wanted, most)


# --- store urls ------------------------------------------------------------------------------------
#
# Stores as a command names them: ``leveldb:PATH``, ``hbase:HOST:PORT[,HOST:PORT…][?prefix=…]``; parsed, and opened.
#
# What else an HBase store takes (times, cells, connections) are the settings of ``storage.hbase``, from the file
# and the environment that the daemon would read them from.


EXPECTED = "leveldb:PATH or hbase:HOST:PORT[,HOST:PORT...][?prefix=NAME]"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """Where a store is."""

    kind: str
    """``leveldb`` or ``hbase``."""
    place: str
    """A directory, absolute; or the gateways' addresses, parted by commas."""
    prefix: str = ""
    """Of the tables in HBase."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" + (f"?prefix={self.prefix}" if self.prefix else "")

    @classmethod
    def parse(cls, text: str, default_prefix: str) -> StoreUrl:
        """Read it. Raises ValueError: the text says what is expected."""
        kind, _, rest = text.partition(":")
        if kind == "leveldb" and rest:
            return cls(kind, str(Path(rest).absolute()))
        if kind == "hbase" and rest:
            place, _, query = rest.partition("?")
            name, _, prefix = query.partition("=")
            if query and (name != "prefix" or not prefix):
                raise ValueError(f"{query!r} is not like prefix=NAME")
            parse_addresses(place)
            return cls(kind, place, prefix or default_prefix)
        raise ValueError(f"{text!r} is not like {EXPECTED}")


@asynccontextmanager
async def open_named(url: StoreUrl, settings: HBaseConfig, *, make: bool) -> AsyncIterator[Store]:
    """The store that ``url`` names, closed when the block is left.

    Args:
      make: whether to make what is not there: a directory, or tables.
    Raises:
      StoreInUse: a daemon holds the directory.
      StoreUnusable: it is not there, or cannot be opened as it is.
      StoreError: no gateway answers.
    """
    store: Store
    if url.kind == "leveldb":
        if not make and not is_there(url):
            raise StoreUnusable(f"{url.place} is no store: it has no FORMAT", hint="name the daemon's data directory")
        store = await LevelDBStore.open(Path(url.place), address="plainsong copy")
    else:
        from storage.hbase.store import HBaseStore  # here, since its library takes a moment to load

        options = replace(hbase_options(settings), table_prefix=url.prefix)
        addresses = [(each.host, each.port) for each in parse_addresses(url.place)]
        store = await HBaseStore.open(addresses, options if make else replace(options, create_tables=False))
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def open_to_look(url: StoreUrl, settings: HBaseConfig) -> AsyncIterator[Store]:
    """As ``open_named``, and nothing is made: what is not there is an empty store of the same bounds."""
    from storage.hbase.tables import NoTables  # as above

    async with AsyncExitStack() as stack:
        store: Store
        try:
            if url.kind == "leveldb" and not is_there(url):
                store = MemoryStore()
            else:
                store = await stack.enter_async_context(open_named(url, settings, make=False))
        except NoTables:
            store = empty = MemoryStore()
            empty.traits = replace(empty.traits, max_row_bytes=hbase_options(settings).max_row_bytes)
        yield store


def is_there(url: StoreUrl) -> bool:
    """Whether a directory is a store already. Raises StoreUnusable: it cannot be read."""
    try:
        return read_format(Path(url.place)) is not None
    except OSError as error:
        raise opening_failed(error, Path(url.place)) from error

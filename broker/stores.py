"""Opens the store that the settings or a URL name, and lowers settings that exceed the store's limits."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from broker.config import every_setting
from broker.config.values import parse_addresses
from broker.security.files import FileUnusable
from broker.tls import gateway_context
from storage.base import StoreUnusable
from storage.directory import opening_failed, read_format
from storage.leveldb import LevelDBOptions, LevelDBStore
from storage.memory import MemoryStore
from storage.replication.counted_store import CountedStore, CountingOutbox

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable

    from broker.config import Config
    from storage.base import Store, StoreTraits
    from storage.hbase.settings import HBaseConfig
    from storage.inspect.explain import RowSource
    from storage.leveldb.shipping import Shipper

log = logging.getLogger(__name__)
#: Maximum size of a message's row in addition to the message: attributes, a routing key, its producer and segment.
MESSAGE_MARGIN_BYTES = 64 << 10
#: A change set's keys may take this fraction of a row; each key is preceded by its length.
CHANGES_PART = 2


@asynccontextmanager
async def open_store(config: Config, shipper: Shipper | None = None) -> AsyncIterator[Store]:
    """Open the store; close it at the end of the block.

    Args:
      shipper: takes the commits of a LevelDB store for its second copy.
    Raises:
      StoreUnusable: it cannot be opened; the detail says why, the hint what to do.
      StoreError: it does not answer.
    """
    store: Store
    if config.storage.kind == "memory":
        store = MemoryStore()
    elif config.storage.kind == "hbase":
        # Imported here, since its library is slow to load.
        from storage.hbase.store import HBaseStore

        hbase = config.storage.hbase
        store = await HBaseStore.open(_addresses(hbase), hbase, hbase_tls(hbase))
    else:
        options = LevelDBOptions(config.storage)
        kind = CountedStore if isinstance(shipper, CountingOutbox) else LevelDBStore
        store = await kind.open(config.storage.data_dir, options, address=config.http.bind, shipper=shipper)
    try:
        yield store
    finally:
        await store.aclose()


def look_at_hbase(config: HBaseConfig) -> RowSource:
    """Return the rows of a store in HBase, for read-only commands. Raises StoreUnusable."""
    from storage.hbase.store import HBaseRows

    return HBaseRows(_addresses(config), config, hbase_tls(config))


def _addresses(config: HBaseConfig) -> list[tuple[str, int]]:
    return [(address.host, address.port) for address in parse_addresses(config.thrift)]


def place_of(config: Config) -> str:
    """Describe where the messages are, in a few words."""
    if config.storage.kind == "memory":
        return "in memory"
    if config.storage.kind == "leveldb":
        return str(config.storage.data_dir.absolute())
    hbase = config.storage.hbase
    return f"tables {hbase.table_prefix}* of the HBase at {hbase.thrift}"


def hbase_tls(config: HBaseConfig) -> Callable[[], ssl.SSLContext] | None:
    """Return a function that makes TLS contexts of connections to gateways; None for no TLS. Raises FileUnusable."""
    return gateway_tls(config.tls_ca, config.tls_certificate, config.tls_key) if config.tls else None


def gateway_tls(
    ca: str, certificate: str, key: str, *, named: str = "storage.hbase.tls_{}"
) -> Callable[[], ssl.SSLContext]:
    """Return a function that loads the context of each new connection from the current files; see ``gateway_context``.

    Raises:
      FileUnusable: a file cannot be used now. If it becomes unusable later, the connection raises OSError.
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
    """Return the setting that limits the size of messages, after ``fitted`` has lowered it to the store's limit."""
    most = traits.max_row_bytes
    is_lowered = most is not None and config.topic.max_message_bytes == most - MESSAGE_MARGIN_BYTES
    return "storage.hbase.max_cell_bytes" if is_lowered else "topic.max_message_bytes"


def fitted(config: Config, traits: StoreTraits) -> Config:
    """Lower, and log, settings that would allow a row larger than the store's limit."""
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
        # A default is not the operator's choice, so there is nothing to warn about.
        level = logging.INFO if wanted == every_setting()[name].default else logging.WARNING
        what = {"setting": name, "from": wanted, "to": most}
        log.log(level, "a setting is lowered to what the store supports", extra=what)
    return min(wanted, most)


# --- store urls ------------------------------------------------------------------------------------
#
# Stores named by a command: ``leveldb:PATH``, ``hbase:HOST:PORT[,HOST:PORT…][?prefix=…]``.
#
# Other settings of an HBase store (times, cells, connections) come from ``storage.hbase``, in the daemon's settings
# file and environment.


EXPECTED = "leveldb:PATH or hbase:HOST:PORT[,HOST:PORT...][?prefix=NAME]"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The location of a store."""

    kind: str
    """``leveldb`` or ``hbase``."""
    place: str
    """An absolute directory; or the gateways' addresses, separated by commas."""
    prefix: str = ""
    """Prefix of the tables in HBase."""

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" + (f"?prefix={self.prefix}" if self.prefix else "")

    @classmethod
    def parse(cls, text: str, default_prefix: str) -> StoreUrl:
        """Parse a URL. Raises ValueError, with the expected form."""
        kind, _, rest = text.partition(":")
        if kind == "leveldb" and rest:
            return cls(kind, str(Path(rest).absolute()))
        if kind == "hbase" and rest:
            place, _, query = rest.partition("?")
            name, _, prefix = query.partition("=")
            if query and (name != "prefix" or not prefix):
                raise ValueError(f"{query!r} is not prefix=NAME")
            parse_addresses(place)
            return cls(kind, place, prefix or default_prefix)
        raise ValueError(f"{text!r} is not of the form {EXPECTED}")


@asynccontextmanager
async def open_named(url: StoreUrl, settings: HBaseConfig, *, make: bool) -> AsyncIterator[Store]:
    """Open the store that ``url`` names; close it at the end of the block.

    Args:
      make: create a missing directory or missing tables.
    Raises:
      StoreInUse: a daemon holds the directory.
      StoreUnusable: it does not exist, or cannot be opened.
      StoreError: no gateway answers.
    """
    store: Store
    if url.kind == "leveldb":
        if not make and not is_there(url):
            raise StoreUnusable(
                f"{url.place} is not a store: it has no FORMAT", hint="name the daemon's data directory"
            )
        store = await LevelDBStore.open(Path(url.place), address="plainsong copy")
    else:
        from storage.hbase.store import HBaseStore  # here, since its library is slow to load

        addresses = [(each.host, each.port) for each in parse_addresses(url.place)]
        named = replace(settings, table_prefix=url.prefix, create_tables=make and settings.create_tables)
        store = await HBaseStore.open(addresses, named, hbase_tls(settings))
    try:
        yield store
    finally:
        await store.aclose()


@asynccontextmanager
async def open_to_look(url: StoreUrl, settings: HBaseConfig) -> AsyncIterator[Store]:
    """Like ``open_named``, but create nothing: a missing store is shown as an empty one with the same limits."""
    from storage.hbase.tables import NoTables  # here, since its library is slow to load

    async with AsyncExitStack() as stack:
        store: Store
        try:
            if url.kind == "leveldb" and not is_there(url):
                store = MemoryStore()
            else:
                store = await stack.enter_async_context(open_named(url, settings, make=False))
        except NoTables:
            store = empty = MemoryStore()
            empty.traits = replace(empty.traits, max_row_bytes=settings.max_row_bytes)
        yield store


def is_there(url: StoreUrl) -> bool:
    """True if the directory has a store. Raises StoreUnusable: it cannot be read."""
    try:
        return read_format(Path(url.place)) is not None
    except OSError as error:
        raise opening_failed(error, Path(url.place)) from error

"""Stores as a command names them: ``leveldb:PATH``, ``hbase:HOST:PORT[,HOST:PORT…][?prefix=…]``; parsed, and opened.

What else an HBase store is told (times, cells, connections) are the settings of ``storage.hbase``, from the file and
the environment that the daemon would read them from.
"""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from broker.config.values import parse_addresses
from broker.stores import hbase_options
from storage.base import StoreUnusable
from storage.directory import opening_failed, read_format
from storage.leveldb import LevelDBStore
from storage.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from broker.config.hbase import HBaseConfig
    from storage.base import Store

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

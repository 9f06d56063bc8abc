"""The three tables in HBase: what they are called, how they are made, and which region a key goes to.

    metadata           key
    messages, payloads hash:u8 key        hash: of namespace and topic, so that topics spread over region servers

One topic's rows stay one range. A range over many topics is 256 of them, merged.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import trio

from protocol.effects import Table
from protocol.keys import topic_prefix
from storage.base import StoreUnusable
from storage.hbase.gateway import REFUSALS, TrioConnection, refusal_text, thrift
from storage.hbase.patience import BROKEN
from storage.hbase.pool import GatewayRefused
from storage.hbase.scanning import Range, some

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.hbase.gateway import Gateway
    from storage.hbase.pool import Pool

NAMES = {Table.METADATA: "metadata", Table.MESSAGE: "messages", Table.PAYLOAD: "payloads"}
#: One version, since rows are written once; a filter and a cache for those that are asked for by key.
FAMILY_OPTIONS = {"max_versions": 1, "bloom_filter_type": "ROW", "block_cache_enabled": True}
HASHES = 256
#: How long it may take to make a table: a busy master takes seconds.
_CREATE_S = 60.0


def hashed(key: bytes) -> bytes:
    """The key as the message and payload tables have it."""
    return blake2b(topic_prefix(key), digest_size=1).digest() + key


def row_key(table: Table, key: bytes) -> bytes:
    """The key as ``table`` has it."""
    return key if table is Table.METADATA else hashed(key)


def is_within_topic(start: bytes, stop: bytes) -> bool:
    """Whether all keys of ``[start, stop)`` are of one topic."""
    prefix = topic_prefix(start)
    return prefix != b"" and stop <= prefix[:-1] + b";"


class NoTables(StoreUnusable):
    """None of the three is there, and they may not be made."""


class Tables:
    """The names of a store's tables."""

    def __init__(self, prefix: str) -> None:
        self._names = {table: (prefix + name).encode("ascii") for table, name in NAMES.items()}

    def __getitem__(self, table: Table) -> bytes:
        return self._names[table]

    async def prepare(self, pool: Pool, *, create: bool) -> None:
        """See that the tables are there, and make those that are not.

        Raises:
          NoTables: there are none, and none may be made.
          StoreUnusable: one is missing and may not be made, or was lost.
          StoreError: no gateway answers.
        """
        there = set(await self._there(pool))
        here = [name for name in self._names.values() if name in there]
        missing = [name for name in self._names.values() if name not in there]
        for name in here:
            if not await pool.call("isTableEnabled", name):
                raise StoreUnusable(f"HBase's table {name.decode()} is disabled", hint="enable it in hbase shell")
        if missing and not create:
            kind = StoreUnusable if here else NoTables
            raise kind(f"HBase has no table {missing[0].decode()}", hint=_hint(there))
        if missing:
            await self._refuse_lost(pool, here)
        for name in missing:
            await self._create(pool, name)

    async def _refuse_lost(self, pool: Pool, here: Sequence[bytes]) -> None:
        """Raise StoreUnusable for a table that was there: made anew it would be empty, and nobody would be told."""
        used = [name for name in here if await some(pool, Range(name, b"", b""), 1, timeout_s=pool.timeout_s)]
        # Looked at again: another instance that starts has rows only when it has made them all.
        if used and (lost := set(self._names.values()) - set(await self._there(pool))):
            raise StoreUnusable(
                f"HBase has rows in table {used[0].decode()}, and no table {min(lost).decode()}",
                hint="it was lost, and messages with it: look for a snapshot of it; hbase shell -n etc/hbase/tables.rb "
                "makes an empty one",
            )

    async def _there(self, pool: Pool) -> list[bytes]:
        try:
            return list(await pool.call("getTableNames"))
        except GatewayRefused as error:
            raise StoreUnusable(
                f"the gateway does not tell which tables there are: {error.detail}",
                hint="it has to be HBase's Thrift 1 gateway: hbase thrift start -f, not thrift2",
            ) from error

    async def _create(self, pool: Pool, name: bytes) -> None:
        try:
            with trio.fail_after(_CREATE_S):
                async with pool.connection() as gateway:
                    await _create_through(gateway, name)
        except (*BROKEN, trio.TooSlowError) as error:
            why = str(error) or "no answer in time"
            raise StoreUnusable(f"HBase does not make table {name.decode()}: {why}", hint="start again") from error


async def _create_through(gateway: Gateway, name: bytes) -> None:
    try:
        await TrioConnection.on(gateway).create_table(name, {"d": FAMILY_OPTIONS})
    except thrift.AlreadyExists:
        return  # by another instance, just now
    except REFUSALS as error:
        if "TableExistsException" in refusal_text(error):
            return  # the same, found out later
        raise StoreUnusable(
            f"HBase does not make table {name.decode()}: {refusal_text(error)}",
            hint="make it by hand: hbase shell -n etc/hbase/tables.rb",
        ) from error


def _hint(there: set[bytes]) -> str:
    """What to do about a table that is missing; stores of other prefixes are named, if there are any."""
    ending = NAMES[Table.METADATA].encode()
    prefixes = sorted(name[: -len(ending)].decode() for name in there if name.endswith(ending))
    others = f"; there are tables with storage.hbase.table_prefix {', '.join(map(repr, prefixes))}" if prefixes else ""
    return f"make it: hbase shell -n etc/hbase/tables.rb{others}"

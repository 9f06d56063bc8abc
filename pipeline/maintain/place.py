"""Where the tables are in HBase, and looks at them as they stand there: how many rows, and where one ends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from pipeline.maintain.ranges import KeyRange, cut
from plainsong.cli.verb import CommandFailed, Exit
from protocol.effects import Table
from protocol.errors import PlainsongError
from protocol.keys import metadata_key, stop_after, topic_prefix
from protocol.records import Metadata
from storage.hbase.layout import hashed
from storage.hbase.pool import Pool
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.settings import HBaseOptions
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from pipeline.maintain.looking import Look

#: Keys asked for at once when rows are counted: only the first cell's name comes along.
_PAGE_ROWS = 1000
_KEYS_ONLY = b"FirstKeyOnlyFilter() AND KeyOnlyFilter()"


@dataclass(frozen=True, slots=True)
class Place:
    """An HBase, by its Thrift gateways, and the tables of one deployment in it."""

    addresses: tuple[tuple[str, int], ...]
    table_prefix: str = "plainsong_"
    timeout_s: float = 60.0

    @classmethod
    def parse(cls, thrift: str, table_prefix: str) -> Place:
        """From ``host:port[,host:port…]``. Raises CommandFailed."""
        addresses = []
        for part in thrift.split(","):
            host, colon, port = part.strip().rpartition(":")
            if not (colon and host and port.isdigit()):
                raise CommandFailed(
                    f"--thrift {part[:60]!r} is not like host:port",
                    hint="name HBase's Thrift gateways as storage.hbase.thrift does",
                    code=Exit.USAGE,
                )
            addresses.append((host.strip("[]"), int(port)))
        return cls(tuple(addresses), table_prefix)

    @asynccontextmanager
    async def pool(self) -> AsyncIterator[Pool]:
        """Connections, for the block."""
        pool = Pool(self.addresses, size=2, timeout_s=self.timeout_s)
        try:
            yield pool
        finally:
            with trio.CancelScope(shield=True):
                await pool.aclose()

    async def store(self) -> HBaseStore:
        """The store; it claims nothing, so it deposes nobody. Raises StoreUnusable, StoreError."""
        options = HBaseOptions(self.table_prefix, self.timeout_s, max_connections=4, create_tables=False)
        return await HBaseStore.open(self.addresses, options)

    def rows(self, part: KeyRange) -> ScanRange:
        """The part as HBase's rows: each has the key of the last of ours in it."""
        stop = min(hashed(part.start)[:1] + part.stop, stop_after(hashed(topic_prefix(part.start))))
        return ScanRange(Tables(self.table_prefix)[part.table], hashed(part.start), stop)


async def check_same(store: HBaseStore, look: Look) -> None:
    """See that these are the tables of the daemon that was asked. Raises CommandFailed, StoreError."""
    name = look.limits.name
    value = await store.get(Table.METADATA, metadata_key(name))
    there = None if value is None else Metadata.decode(value)
    if there is None or (there.generation, there.created_ms) != (look.limits.generation, look.waiting.created_ms):
        raise CommandFailed(
            f"the tables have another topic {name} than the daemon, or none",
            hint="--thrift and --table-prefix have to be the daemon's storage.hbase.thrift and table_prefix",
            code=Exit.USAGE,
        )


async def cut_for(place: Place, whole: KeyRange, parts: int) -> list[KeyRange]:
    """A range in parts of equal shares of its keys, from the first row that is there to the last.

    No row of HBase is in two parts: two tasks that each remove half of what is in it would leave it, empty.

    Raises:
      StoreError: HBase does not answer.
    """
    async with place.pool() as pool:
        rows = place.rows(whole)
        ends = [
            await first_rows(pool, each, 1, timeout_s=place.timeout_s) for each in (rows, rows._replace(reverse=True))
        ]
        if not all(ends):
            return []
        bounds: list[bytes] = []
        for bound in shares(ends[0][0].key, ends[1][0].key, parts):
            found = await first_rows(pool, rows._replace(start=bound), 1, timeout_s=place.timeout_s)
            bounds += [row.key[1:] + b"\x00" for row in found]
    return cut(whole, bounds)


def shares(first: bytes, last: bytes, parts: int) -> list[bytes]:
    """Keys between two of one length that cut what is between them into ``parts`` of equal width."""
    if len(first) != len(last):
        return []
    low, high = int.from_bytes(first, "big"), int.from_bytes(last, "big")
    return [(low + (high - low) * part // parts).to_bytes(len(first), "big") for part in range(1, parts)]


async def count_rows(place: Place, parts: Sequence[KeyRange]) -> int:
    """The rows that HBase has in these ranges: each may have thousands of the store's. Raises StoreError."""
    from storage.hbase.gateway import thrift  # here, since it takes a moment to load

    count = 0
    async with place.pool() as pool:
        for part in parts:
            table, start, stop, _ = place.rows(part)
            asked = thrift.TScan(startRow=start, stopRow=stop, caching=_PAGE_ROWS, filterString=_KEYS_ONLY)
            try:
                async with pool.connection() as gateway:
                    with trio.fail_after(place.timeout_s) as waiting:
                        scanner = await gateway.call("scannerOpenWithScan", table, asked, {})
                        while rows := await gateway.call("scannerGetList", scanner, _PAGE_ROWS):
                            count += len(rows)
                            waiting.deadline = trio.current_time() + place.timeout_s
                        await gateway.call("scannerClose", scanner)
            except (OSError, trio.TooSlowError) as error:
                raise unreachable(error) from error
    return count


def unreachable(error: Exception) -> CommandFailed:
    """What to say of an HBase that does not answer."""
    detail = error.detail if isinstance(error, PlainsongError) else str(error) or "no answer in time"
    return CommandFailed(f"HBase: {detail}", hint="run it again: it goes on where it ended", code=Exit.UNAVAILABLE)

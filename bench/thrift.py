"""The baseline of storage on HBase: the same rows through raw Thrift calls, in a separate process.

One trio loop and the store's own framed client, the fastest available; the measured time contains only calls. The store
itself is also measured here, without a daemon.
"""

from __future__ import annotations

import multiprocessing
from contextlib import contextmanager, suppress
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import trio

from bench.bodies import payloads, topic
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, stop_after
from plainsong.protocol.rows import plain_head
from storage.hbase.gateway import Gateway, thrift
from storage.hbase.layout import CELL, hashed
from storage.hbase.pool import Pool
from storage.hbase.settings import HBaseConfig
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from multiprocessing.connection import Connection

#: Table prefix of the raw calls; their tables are like the store's.
RAW_PREFIX = "raw_"
#: Table prefixes of the store measured without a daemon, and of the daemon.
STORE_PREFIX, DAEMON_PREFIX = "store_", "plainsong_"
_PAGE_ROWS = 1000


class RawCalls:
    """Raw calls, and the store's, in a separate process; each method measures there and returns its result."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        #: Calls, or commits of the store, of the last measurement.
        self.made = 0

    def write(self, messages: int, size: int, connections: int, seconds: float) -> float:
        """Return rows/s of ``mutateRows``, ``messages`` rows a call, one call at a time on each connection."""
        return self._call("write", messages, size, connections, seconds)

    def commit(self, messages: int, size: int, connections: int, seconds: float) -> float:
        """Return rows/s of the store's commits of ``messages`` rows, one topic per connection."""
        return self._call("commit", messages, size, connections, seconds)

    def round_trips(self, size: int, seconds: float) -> float:
        """Return median ms of the calls of a one-message commit: put a row if absent, compare and set a head."""
        return self._call("round_trips", size, seconds)

    def get(self, seconds: float) -> float:
        """Return gets/s of one cell, on one connection."""
        return self._call("get", seconds)

    def fill(self, name: str, messages: int, size: int) -> None:
        """Write a topic with this many messages, an HBase row each."""
        self._call("fill", name, messages, size)

    def scan(self, prefix: str, name: str, seconds: float) -> float:
        """Return scans/s of a whole topic in the tables of ``prefix``; its cells are discarded."""
        return self._call("scan", prefix, name, seconds)

    def _call(self, *call: object) -> float:
        self._pipe.send(call)
        found = self._pipe.recv()
        if isinstance(found, str):
            raise RuntimeError(found)
        value, self.made = found
        return float(value)


@contextmanager
def raw_calls(address: tuple[str, int]) -> Iterator[RawCalls]:
    """Run a process that calls the gateway at ``address``; stop it at the end of the block."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, address), daemon=True)
    process.start()
    theirs.close()  # so that recv() fails if the process dies
    try:
        yield RawCalls(ours)
    finally:
        ours.close()
        process.join()


def _serve(pipe: Connection, address: tuple[str, int]) -> None:
    calls = _Calls(address)
    with suppress(EOFError):  # the other end closes after the last measurement
        while True:
            name, *arguments = pipe.recv()
            try:
                calls.made = 0
                value = trio.run(getattr(calls, name), *arguments)
                pipe.send((value, calls.made))
            except Exception as error:  # noqa: BLE001 - the other process raises it
                pipe.send(f"{name}: {error!r}")


class _Calls:
    """The measurements. Each public method is one measurement, and runs in its own event loop."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._tables = Tables(RAW_PREFIX)
        self._ts_ms = 1_700_000_000_000
        self._prepared = False
        self.made = 0

    async def _gateway(self) -> Gateway:
        if not self._prepared:
            pool = Pool([self._address], size=1, timeout_s=60)
            await self._tables.prepare(pool, create=True)
            await pool.aclose()
            self._prepared = True
        return await Gateway.open(self._address)

    def _next_ms(self) -> int:
        self._ts_ms += 1
        return self._ts_ms

    async def write(self, messages: int, size: int, connections: int, seconds: float) -> float:
        table = self._tables[Table.MESSAGE]
        values = [plain_head(size) + payload for payload in payloads(messages, size)]

        async def calls(index: int) -> tuple[Gateway, Callable[[], Awaitable[None]]]:
            gateway = await self._gateway()
            prefix = hashed(generation_prefix(topic(f"t{index}"), 1))
            batch = [thrift.BatchMutation(b"", [thrift.Mutation(column=CELL, value=value)]) for value in values]

            async def call() -> None:
                ts_ms = self._next_ms()
                for sequence, row in enumerate(batch):
                    row.row = prefix + pack_position(ts_ms, sequence)
                await gateway.call("mutateRows", table, batch, {})

            return gateway, call

        made = [await calls(index) for index in range(connections)]
        rate = await self._rate([call for _, call in made], seconds)
        for gateway, _ in made:
            await gateway.aclose()
        return rate * messages

    async def commit(self, messages: int, size: int, connections: int, seconds: float) -> float:
        values = [plain_head(size) + payload for payload in payloads(messages, size)]
        options = HBaseConfig(table_prefix=STORE_PREFIX)
        async with await HBaseStore.open([self._address], options) as store:

            async def calls(index: int) -> Callable[[], Awaitable[None]]:
                claim = await store.claim(topic(f"t{index}"))
                prefix = generation_prefix(claim.name, 1)

                async def call() -> None:
                    ts_ms = self._next_ms()
                    suffixes = [pack_position(ts_ms, sequence) for sequence in range(messages)]
                    await store.write([Put(Table.MESSAGE, prefix, suffixes, values)], claim=claim)

                return call

            return messages * await self._rate([await calls(index) for index in range(connections)], seconds)

    async def round_trips(self, size: int, seconds: float) -> float:
        gateway = await self._gateway()
        table = self._tables[Table.MESSAGE]
        prefix = hashed(generation_prefix(topic("single"), 1))
        head, column = hashed(b"bench:single:"), b"d:h"
        value = plain_head(size) + payloads(1, size)[0]
        before = await gateway.call("get", table, head, column, {})
        last = before[0].value if before else None
        taken: list[float] = []
        until = perf_counter() + seconds
        while (begun := perf_counter()) < until or not taken:
            row = prefix + pack_position(self._next_ms(), 0)
            put = thrift.Mutation(column=CELL, value=value)
            assert await gateway.call("checkAndPut", table, row, CELL, None, put, {})
            after = self._ts_ms.to_bytes(33, "big")
            moved = thrift.Mutation(column=column, value=after)
            assert await gateway.call("checkAndPut", table, head, column, last, moved, {})
            last = after
            taken.append(perf_counter() - begun)
        await gateway.aclose()
        self.made = 2 * len(taken)
        return median(taken) * 1e3

    async def get(self, seconds: float) -> float:
        gateway = await self._gateway()
        row = hashed(b"bench:single:")

        async def call() -> None:
            await gateway.call("get", self._tables[Table.MESSAGE], row, b"d:h", {})

        rate = await self._rate([call], seconds)
        await gateway.aclose()
        return rate

    async def fill(self, name: str, messages: int, size: int) -> float:
        gateway = await self._gateway()
        prefix = hashed(generation_prefix(topic(name), 1))
        cells = [thrift.Mutation(column=CELL, value=plain_head(size) + text) for text in payloads(messages, size)]
        for at in range(0, messages, _PAGE_ROWS):
            ts_ms = self._next_ms()
            some = enumerate(cells[at : at + _PAGE_ROWS])
            batch = [thrift.BatchMutation(prefix + pack_position(ts_ms, sequence), [cell]) for sequence, cell in some]
            await gateway.call("mutateRows", self._tables[Table.MESSAGE], batch, {})
        await gateway.aclose()
        return messages

    async def scan(self, prefix: str, name: str, seconds: float) -> float:
        gateway = await self._gateway()
        table = Tables(prefix)[Table.MESSAGE]
        start = hashed(generation_prefix(topic(name), 1))

        async def call() -> None:
            asked = thrift.TScan(startRow=start, stopRow=stop_after(start), caching=_PAGE_ROWS)
            scanner = await gateway.call("scannerOpenWithScan", table, asked, {})
            while len(await gateway.call("scannerGetList", scanner, _PAGE_ROWS)) == _PAGE_ROWS:
                pass
            await gateway.call("scannerClose", scanner)

        rate = await self._rate([call], seconds)
        await gateway.aclose()
        return rate

    async def _rate(self, calls: list[Callable[[], Awaitable[None]]], seconds: float) -> float:
        """Repeat ``calls`` concurrently until the time is over, after one uncounted call each; return calls/s."""
        done = 0

        async def repeat(call: Callable[[], Awaitable[None]], until: float) -> None:
            nonlocal done
            while perf_counter() < until or not done:
                await call()
                done += 1

        for call in calls:
            await call()
        begun = perf_counter()
        async with trio.open_nursery() as nursery:
            for call in calls:
                nursery.start_soon(repeat, call, begun + seconds)
        self.made = done + len(calls)
        return done / (perf_counter() - begun)

"""Carries out plans in HBase: many ranges at a time, by the janitor's rules, while the topics' owners keep working.

It removes only rows that no reader can see, whichever instance owns the topic. So the work needs no claim, and it may
be done twice, by two processes at once, or in part.
"""

from __future__ import annotations

import signal
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import trio

from broker.command.failures import CONTINUES, reported
from broker.command.maintain.plan import KeyRange, check_unchanged, cut
from broker.command.options import until_ctrl_c
from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.effects import RollBack, Table
from plainsong.protocol.errors import GenerationChanged, PlainsongError, TopicNotFound
from plainsong.protocol.keys import metadata_key, stop_after, topic_prefix
from plainsong.protocol.records import Metadata
from storage.base import StoreError
from storage.cleaning import Sweep, is_message, is_payload
from storage.hbase.cells import Slots
from storage.hbase.commit import RowRemover
from storage.hbase.layout import hashed
from storage.hbase.owners import Owners
from storage.hbase.pool import Pool
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.settings import HBaseConfig
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables
from storage.threaded import in_thread

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from typing import Self

    from broker.command.maintain.plan import TopicPlan
    from plainsong import Client
    from plainsong.cli.job import JobRun
    from storage.hbase.gateway import Address

#: Ranges cleaned concurrently.
AT_ONCE = 8
#: After this many ranges, ask the daemon again if their topics are unchanged.
CHECKED_RANGES = 64
#: Rows per step: as many as one row of HBase holds, so that HBase's rows are removed whole.
STEP_ROWS = 10_000
TIMEOUT_S = 60.0
#: Keys per page when rows are counted; HBase sends only the name of each row's first cell.
_PAGE_ROWS = 1000
_KEYS_ONLY = b"FirstKeyOnlyFilter() AND KeyOnlyFilter()"


class Cleaned(NamedTuple):
    """The outcome of cleaning a range, or all ranges of a topic."""

    removed: int = 0
    """Rows of the store, including payloads of expired messages."""
    before: int = 0
    """HBase's rows in the range, before and after."""
    after: int = 0

    def plus(self, other: Cleaned) -> Cleaned:
        """Return the sum of both."""
        return Cleaned(self.removed + other.removed, self.before + other.before, self.after + other.after)


class _Task(NamedTuple):
    topic: str
    part: KeyRange


def gateways(thrift: str) -> list[Address]:
    """Parse the addresses in ``host:port[,host:port…]``. Raises CommandFailed."""
    addresses = []
    for part in thrift.split(","):
        host, colon, port = part.strip().rpartition(":")
        if not (colon and host and port.isdigit()):
            raise CommandFailed(
                f"--thrift {part[:60]!r} is not host:port",
                hint="give HBase's Thrift gateways in the form of storage.hbase.thrift",
                code=Exit.USAGE,
            )
        addresses.append((host.strip("[]"), int(port)))
    return addresses


def clean(
    run: JobRun,
    client: Client,
    addresses: Sequence[Address],
    table_prefix: str,
    plans: Sequence[TopicPlan],
    parts: int,
    *,
    tls: Callable[[], ssl.SSLContext] | None = None,
) -> dict[str, Cleaned]:
    """Carry the plans out, and return what was removed, by topic. Run again, it continues.

    Args:
      addresses, table_prefix: the Thrift gateways' addresses, and the prefix of the daemon's tables.
      parts: number of parts to cut each range into.
      tls: returns the context of each connection to a gateway; None for no TLS.
    Raises:
      CommandFailed: HBase does not answer, or the tables are another daemon's, and nothing was done; or a part failed.
      PlainsongError: the daemon does not answer; some parts may have been done.
    """
    totals = {each.limits.name.topic: Cleaned() for each in plans}

    async def work() -> None:
        async with AsyncExitStack() as stack:
            try:
                tables = await stack.enter_async_context(HBaseTables.open(addresses, table_prefix, tls))
                tasks = await _tasks(tables, plans, parts)
            except PlainsongError as error:
                raise _failed(error, Exit.UNAVAILABLE) from error
            if tasks:
                await _carry_out(run, client, tables, tasks, {each.limits.name.topic: each for each in plans}, totals)

    with reported():
        trio.run(until_ctrl_c, work, signal.SIGTERM)
    return totals


async def _tasks(tables: HBaseTables, plans: Sequence[TopicPlan], parts: int) -> list[_Task]:
    for each in plans:
        await tables.check_same(each)
    return [
        _Task(each.limits.name.topic, part)
        for each in plans
        for whole in each.parts
        for part in await tables.cut(whole, parts)
    ]


async def _carry_out(
    run: JobRun,
    client: Client,
    tables: HBaseTables,
    tasks: Sequence[_Task],
    plans: Mapping[str, TopicPlan],
    totals: dict[str, Cleaned],
) -> None:
    limiter = trio.CapacityLimiter(AT_ONCE)
    finished = 0

    def report(*, last: bool = False) -> None:
        run.progress.step(sum(total.removed for total in totals.values()), batch=finished, last=last)

    async def carry_out(task: _Task) -> None:
        nonlocal finished
        async with limiter:
            try:
                cleaned = await tables.clean(task.part)
            except PlainsongError as error:
                raise _failed(error, Exit.FAILED) from error
        topic, part = task
        finished += 1
        totals[topic] = totals[topic].plus(cleaned)
        run.metrics.add("rows_total", cleaned.removed, topic=topic)
        run.metrics.add("batches_total", topic=topic)
        run.progress.event("part", topic=topic, why=part.why, table=part.table.name.lower(), **cleaned._asdict())
        report()

    run.progress.begin()
    for at in range(0, len(tasks), CHECKED_RANGES):
        some = tasks[at : at + CHECKED_RANGES]
        changed = set()
        for topic in sorted({task.topic for task in some}):
            check = partial(check_unchanged, client, plans[topic].limits)
            try:
                await in_thread(check, abandon_on_cancel=True)
            except (GenerationChanged, TopicNotFound) as error:
                run.warn(f"skipped {topic}: {error.detail}", "generation_changed", topic=topic)
                changed.add(topic)
        async with trio.open_nursery() as nursery:
            for task in some:
                if task.topic not in changed:
                    nursery.start_soon(carry_out, task)
    report(last=True)


def _failed(error: PlainsongError, code: Exit) -> CommandFailed:
    return CommandFailed(f"HBase: {error.detail}", hint=CONTINUES, code=code)


# --- tables ------------------------------------------------------------------------------------------


class HBaseTables:
    """The tables of a deployment, opened while its daemons run."""

    def __init__(self, store: HBaseStore, pool: Pool, table_prefix: str) -> None:
        """Use ``open``."""
        self.store = store
        self._pool = pool
        self._tables = Tables(table_prefix)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, addresses: Sequence[Address], table_prefix: str, tls: Callable[[], ssl.SSLContext] | None = None
    ) -> AsyncIterator[Self]:
        """Connect, for the block.

        The store claims nothing, so it deposes no owner. Raises StoreUnusable, StoreError.
        """
        # A range keeps one connection to scan, and uses another to remove rows.
        settings = HBaseConfig(
            table_prefix=table_prefix, timeout_s=TIMEOUT_S, max_connections=2 * AT_ONCE, create_tables=False
        )
        store = await HBaseStore.open(addresses, settings, tls)
        pool = Pool(addresses, size=2 * AT_ONCE, timeout_s=TIMEOUT_S, tls=tls)
        try:
            yield cls(store, pool, table_prefix)
        finally:
            with trio.CancelScope(shield=True):
                await pool.aclose()
                await store.aclose()

    async def check_same(self, plan: TopicPlan) -> None:
        """Check that the tables have the topic of the daemon's answer. Raises CommandFailed, StoreError."""
        name = plan.limits.name
        value = await self.store.get(Table.METADATA, metadata_key(name))
        stored = None if value is None else Metadata.decode(value)
        planned = (plan.limits.generation, plan.waiting.created_ms)
        if stored is None or (stored.generation, stored.created_ms) != planned:
            raise CommandFailed(
                f"topic {name} in these tables differs from the daemon's, or does not exist",
                hint="--thrift and --table-prefix must equal the daemon's storage.hbase.thrift and table_prefix",
                code=Exit.USAGE,
            )

    async def cut(self, whole: KeyRange, parts: int) -> list[KeyRange]:
        """Cut a range into equal shares of its keys, from its first row to its last; empty if it has no row.

        No row of HBase is in two parts: two tasks that removed one half each would leave an empty row.

        Raises:
          StoreError: HBase does not answer.
        """
        rows = self._rows(whole)
        ends = [await self._first_row(each) for each in (rows, rows._replace(reverse=True))]
        if ends[0] is None or ends[1] is None:
            return []
        starts = [await self._first_row(rows._replace(start=share)) for share in shares(ends[0], ends[1], parts)]
        return cut(whole, [key[1:] + b"\x00" for key in starts if key is not None])

    async def count_rows(self, part: KeyRange) -> int:
        """Count HBase's rows in a range; each may hold thousands of the store's. Raises StoreError."""
        from storage.hbase.gateway import thrift  # here, since it takes a moment to load

        count = 0
        table, start, stop, _ = self._rows(part)
        asked = thrift.TScan(startRow=start, stopRow=stop, caching=_PAGE_ROWS, filterString=_KEYS_ONLY)
        try:
            async with self._pool.connection() as gateway:
                with trio.fail_after(TIMEOUT_S) as waiting:
                    scanner = await gateway.call("scannerOpenWithScan", table, asked, {})
                    while rows := await gateway.call("scannerGetList", scanner, _PAGE_ROWS):
                        count += len(rows)
                        waiting.deadline = trio.current_time() + TIMEOUT_S
                    await gateway.call("scannerClose", scanner)
        except (OSError, trio.TooSlowError) as error:
            raise StoreError(str(error) or "no answer in time") from error
        return count

    async def clean(self, part: KeyRange) -> Cleaned:
        """Clean a range, wherever an earlier attempt ended. Raises StoreError."""
        before = await self.count_rows(part)
        removed = 0
        if before and part.why == "invalid":
            await self._roll_back(part)
        elif before:
            sweep = Sweep(self.store, STEP_ROWS, pause_factor=0.0)
            if part.why == "expired":
                removed = await sweep.remove_messages(part.start, part.stop)
            else:
                is_ours = is_message if part.table is Table.MESSAGE else is_payload
                removed = await sweep.remove(part.table, part.start, part.stop, is_ours)
        return Cleaned(removed, before, await self.count_rows(part))

    async def _roll_back(self, part: KeyRange) -> None:
        """Roll back the rows of invalid transactions, whose write pointers are never assigned again.

        The topic repeats this later, without effect: only the topic may report it to the list of invalid transactions.
        """
        owners = Owners(self._pool, self._tables, Slots(self._pool, self._tables[Table.METADATA]))
        removing = RowRemover(self._pool, self._tables, owners, timeout_s=TIMEOUT_S)
        for pointer in part.pointers:
            await removing.roll_back(RollBack(part.start, part.stop, pointer))

    def _rows(self, part: KeyRange) -> ScanRange:
        """Return the range of HBase's rows for a part: the key of each is the last key of our rows in it."""
        stop = min(hashed(part.start)[:1] + part.stop, stop_after(hashed(topic_prefix(part.start))))
        return ScanRange(self._tables[part.table], hashed(part.start), stop)

    async def _first_row(self, rows: ScanRange) -> bytes | None:
        found = await first_rows(self._pool, rows, 1, timeout_s=TIMEOUT_S)
        return found[0].key if found else None


def shares(first: bytes, last: bytes, parts: int) -> list[bytes]:
    """Return keys that cut the range between two keys into equal parts; empty if their lengths differ."""
    if len(first) != len(last):
        return []
    low, high = int.from_bytes(first, "big"), int.from_bytes(last, "big")
    return [(low + (high - low) * part // parts).to_bytes(len(first), "big") for part in range(1, parts)]

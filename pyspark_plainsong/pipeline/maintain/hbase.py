"""Carries a plan out in HBase, in parallel, by the janitor's own rules, beside the topics' living owners.

Where the tables are in HBase, and looks at them as they stand there: how many rows, and where one ends.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import trio

from plainsong.cli.verb import CommandFailed, Exit
from plainsong.protocol.effects import RollBack, Table
from plainsong.protocol.errors import GenerationChanged, PlainsongError, TopicNotFound
from plainsong.protocol.keys import metadata_key, stop_after, topic_prefix
from plainsong.protocol.records import Metadata
from pyspark_plainsong.pipeline.maintain.plan import KeyRange, check_unchanged, cut
from storage.cleaning import Sweep, is_message, is_payload
from storage.hbase.cells import Slots
from storage.hbase.commit import RowRemover
from storage.hbase.layout import hashed
from storage.hbase.owners import Owners
from storage.hbase.pool import Pool
from storage.hbase.scan import ScanRange, first_rows
from storage.hbase.settings import HBaseOptions
from storage.hbase.store import HBaseStore
from storage.hbase.tables import Tables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from plainsong import Client
    from pyspark_plainsong.pipeline.job import Run
    from pyspark_plainsong.pipeline.maintain.plan import Look

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


# --- working ---------------------------------------------------------------------------------------
#
# One part of a plan carried out, in a task of Spark: by the janitor's own rules, beside the topic's living owner.
#
# What is removed nobody can see, in any owner's eyes, for as long as the generation lives and after; so it needs no
# claim, may be done twice, by two at once, or half. It runs where Spark runs it, so it knows nothing but its
# arguments.


#: Rows of a step: as many as HBase's rows have of ours, so that these go whole.
STEP_ROWS = 10_000


class Worked(NamedTuple):
    """What became of a part."""

    topic: str
    why: str
    table: str
    removed: int
    """Rows of the store that went, payloads of expired messages included."""
    before: int
    """HBase's rows in the range, before and after."""
    after: int


def work(place: Place, topic: str, part: KeyRange) -> Worked:
    """Carry a part out, from wherever an earlier attempt has come to. Raises StoreError: run it again."""
    return trio.run(_work, place, topic, part)


async def _work(place: Place, topic: str, part: KeyRange) -> Worked:
    before = await count_rows(place, [part])
    removed = 0
    if before and part.why == "invalid":
        await _roll_back(place, part)
    elif before:
        async with await place.store() as store:
            sweep = Sweep(store, STEP_ROWS, pause_factor=0.0)
            if part.why == "expired":
                removed = await sweep.remove_messages(part.start, part.stop)
            else:
                is_ours = is_message if part.table is Table.MESSAGE else is_payload
                removed = await sweep.remove(part.table, part.start, part.stop, is_ours)
    after = await count_rows(place, [part])
    return Worked(topic, part.why, part.table.name.lower(), removed, before, after)


async def _roll_back(place: Place, part: KeyRange) -> None:
    """Turn the pointers' signs, for good: an invalid transaction never becomes another one.

    The topic does the same in its turn, and finds it done: only that tells the list of invalid transactions.
    """
    tables = Tables(place.table_prefix)
    async with place.pool() as pool:
        owners = Owners(pool, tables, Slots(pool, tables[Table.METADATA]))
        removing = RowRemover(pool, tables, owners, timeout_s=place.timeout_s)
        for pointer in part.pointers:
            await removing.roll_back(RollBack(part.start, part.stop, pointer))


# --- carrying --------------------------------------------------------------------------------------
#
# Plans carried out on Spark: the parts of all topics side by side, each topic asked for once more before its own.


#: Parts in one job of Spark, between which it is told how far it has come, and topics are asked for again.
AT_ONCE = 64


class Task(NamedTuple):
    """What one task of Spark is given."""

    topic: str
    part: KeyRange


class Total(NamedTuple):
    """What became of a topic, or of all."""

    removed: int = 0
    before: int = 0
    after: int = 0

    def plus(self, worked: Worked | Total) -> Total:
        """With another part."""
        return Total(self.removed + worked.removed, self.before + worked.before, self.after + worked.after)


async def tasks_of(place: Place, looks: Sequence[Look], parts: int) -> list[Task]:
    """The parts of all topics, cut where HBase's rows end.

    Raises:
      CommandFailed: these are not the daemon's tables; nothing was done. Or HBase does not answer.
    """
    try:
        store = await place.store()
        try:
            for look in looks:
                await check_same(store, look)
        finally:
            with trio.CancelScope(shield=True):
                await store.aclose()
        return [
            Task(look.limits.name.topic, part)
            for look in looks
            for whole in look.parts
            for part in await cut_for(place, whole, parts)
        ]
    except PlainsongError as error:
        raise unreachable(error) from error


def carry_out(run: Run, client: Client, place: Place, looks: Sequence[Look], parts: int) -> dict[str, Total]:
    """Do what is planned; what became of each topic. Run again, it goes on.

    Raises:
      CommandFailed: nothing was done, or a part failed: run it again.
    """
    tasks = trio.run(tasks_of, place, looks, parts)
    totals: defaultdict[str, Total] = defaultdict(Total)
    totals.update({look.limits.name.topic: Total() for look in looks})
    if not tasks:
        return totals
    limits = {look.limits.name.topic: look.limits for look in looks}
    spark = run.session().sparkContext
    run.progress.begin()
    for at in range(0, len(tasks), AT_ONCE):
        some = tasks[at : at + AT_ONCE]
        for topic in sorted({task.topic for task in some}):
            try:
                check_unchanged(client, limits[topic])
            except (GenerationChanged, TopicNotFound) as error:
                run.warn(f"{topic} is left out: {error.detail}", "generation_changed", topic=topic)
                some = [task for task in some if task.topic != topic]
        if some:
            done = spark.parallelize(some, len(some)).map(lambda task: work(place, *task)).collect()
            for worked in done:
                totals[worked.topic] = totals[worked.topic].plus(worked)
                run.metrics.add("rows_total", worked.removed, topic=worked.topic)
                run.metrics.add("batches_total", topic=worked.topic)
                run.progress.event("part", **worked._asdict())
        finished = at + len(some)
        run.progress.step(sum(total.removed for total in totals.values()), batch=finished, last=finished == len(tasks))
    return totals


def needed(thrift: str | None, table_prefix: str) -> Place:
    """Where the tables are. Raises CommandFailed: it was not said."""
    if thrift is None:
        raise CommandFailed(
            "the daemons keep their tables in HBase, and --thrift does not say where",
            hint="--thrift HOST:PORT, as the daemons' storage.hbase.thrift; or --dry-run for the plan",
        )
    return Place.parse(thrift, table_prefix)

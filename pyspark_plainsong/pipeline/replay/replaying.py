"""Carries out a replay's plan: finds its chunks in an archive or in other Parquet, and publishes them in order.

It resumes after the last chunk that the topic has.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import dropwhile, takewhile
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql import types

from plainsong.cli.command import CommandFailed, Exit
from plainsong.cli.output import counted
from plainsong.protocol.paging import pages
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES
from pyspark_plainsong.columns import ROUTING_KEY
from pyspark_plainsong.options import WriteOptions
from pyspark_plainsong.pipeline.archive import layout, reading
from pyspark_plainsong.pipeline.archive.table import TopicTable
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.replay.plans import ReplayChunk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    from plainsong import Client
    from plainsong.protocol.answers.topics import ProducerList
    from pyspark_plainsong.pipeline.archive.writing import Log
    from pyspark_plainsong.pipeline.files import Files
    from pyspark_plainsong.pipeline.job import Run
    from pyspark_plainsong.pipeline.replay.plans import Plan, Plans

FIRST_ID, LAST_ID = "00" * 20, "ff" * 20
#: The columns of a message; a source may lack all but the payload.
PARTS = ("payload", "routing_key", "headers")


@dataclass(frozen=True, slots=True)
class Source:
    """Rows ordered by a key. Bounds are keys as text, ``start <= key < end``."""

    name: str
    """A name of the source, the same wherever its files are mounted."""
    files: Files
    folder: str
    """The folder of the plans, from the files' root."""
    key: str
    """The column that orders the rows."""

    def rows(self, spark: SparkSession, start: str, end: str) -> DataFrame:
        """Return the rows of a range; an empty string is no bound."""
        raise NotImplementedError

    def as_read(self, spark: SparkSession) -> dict[str, str]:
        """Return a fingerprint that changes with the rows; empty if the name always denotes the same rows."""
        return {}


@dataclass(frozen=True, slots=True)
class ArchiveSource(Source):
    """One generation of a topic in an archive; its keys are ids, as 40 hex digits."""

    root: str
    log: Log

    def rows(self, spark: SparkSession, start: str, end: str) -> DataFrame:
        """See ``Source``: compacted days have the same rows."""
        bounds = layout.Range(bytes.fromhex(start or FIRST_ID), bytes.fromhex(end or LAST_ID))
        return reading.rows_of(spark, self._table(), bounds, self.log.generation)

    @property
    def end(self) -> str:
        """The id after all archived ones. Raises CommandFailed: there is no archive."""
        return self._table().end(self.log.generation).hex()

    def _table(self) -> TopicTable:
        table = TopicTable.open(self.files, self.log.namespace, self.log.topic)
        if table is None:
            raise CommandFailed(f"there is no archive of {self.log.name} in {self.root}", code=Exit.NOT_FOUND)
        return table


@dataclass(frozen=True, slots=True)
class ParquetSource(Source):
    """Any Parquet files."""

    path: str

    def rows(self, spark: SparkSession, start: str, end: str) -> DataFrame:
        """See ``Source``. Raises CommandFailed: a column is missing, or cannot order rows."""
        rows = spark.read.option("mergeSchema", True).parquet(self.path)  # a column may be in some of the files only
        if "payload" not in rows.columns or self.key not in rows.columns:
            missing = "payload" if "payload" not in rows.columns else self.key
            has = f"it has {', '.join(rows.columns)[:200]}"
            raise CommandFailed(f"{self.path} has no column {missing}", hint=has, code=Exit.USAGE)
        kind = rows.schema[self.key].dataType
        if start:
            rows = rows.where(sf.col(self.key) >= _value(start, kind))
        return rows.where(sf.col(self.key) < _value(end, kind)) if end else rows

    def as_read(self, spark: SparkSession) -> dict[str, str]:
        """See ``Source``: hashes of the files' names, sizes and times, and of names and sizes, which copies keep."""
        columns = [f"_metadata.{each}" for each in ("file_name", "file_size", "file_modification_time")]
        files = spark.read.parquet(self.path).select(*columns).distinct().collect()
        return {"files": _hash_of(map(str, files)), "names": _hash_of(f"{file[0]} {file[1]}" for file in files)}


def archive_source(root: str, log: Log, files: Files) -> ArchiveSource:
    """A topic's generation in an archive."""
    folder = f"{layout.topic_folder(log.namespace, log.topic)}/_replays"
    return ArchiveSource(f"{log.name} generation {log.generation}", files, folder, "message_id", root, log)


def parquet_source(spark: SparkSession, path: str, key: str) -> ParquetSource:
    """Return a source of the Parquet files at a path. Plans are kept there, or next to a local path that ends in .parquet."""
    at = PurePosixPath(path) if "://" not in path else None
    root = path if not path.rstrip("/").endswith(".parquet") or at is None else str(at.parent)
    name = f"{path.rstrip('/').rpartition('/')[2]} by {key}"
    return ParquetSource(name, open_files(root, lambda: spark), "_replays", key, path)


def _hash_of(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


def key_text(key: str, kind: types.DataType) -> Column:
    """Convert a key to the text that ``rows`` accepts as a bound."""
    return sf.lower(sf.hex(key)) if isinstance(kind, types.BinaryType) else sf.col(key).cast("string")


def _value(text: str, kind: types.DataType) -> Column:
    return sf.lit(bytes.fromhex(text)) if isinstance(kind, types.BinaryType) else sf.lit(text).cast(kind)


# --- replaying -------------------------------------------------------------------------------------

ORIGINAL_ID = "originalId"
ORIGINAL_TIME = "originalPublishTimeMs"
#: Retention of the producer, the most that daemons allow by default; a replay may pause for that long.
MEMORY_DAYS = 90
#: Bits of ``monotonically_increasing_id`` for the rows of a partition.
_ROW_BITS = 33


def with_chunks(
    spark: SparkSession, source: Source, plan: Plan, chunk_rows: int, *, with_originals: bool = True
) -> Plan:
    """Cut a plan into chunks of at most ``chunk_rows`` rows each.

    Raises:
      CommandFailed: a row has no key, no payload, or the key of another row, so the rows have no order; or with the
        original ids a row would have too many bytes of attributes.
    """
    rows = source.rows(spark, plan.start, plan.end)
    kind = rows.schema[source.key].dataType
    _check(rows, source.key)
    if with_originals and "message_id" in rows.columns:
        _check_attributes(_converted(rows, source.key, with_originals=True))
    # Each partition is a sorted range of keys, which is cut into chunks by counting; its last chunk may be smaller.
    # The key is renamed first: under its own name it could be another of these columns.
    keys = rows.select(sf.col(source.key).alias("key")).orderBy("key")
    numbered = keys.withColumn("number", sf.monotonically_increasing_id())
    part = sf.shiftright("number", _ROW_BITS).alias("part")
    in_part = sf.floor(sf.col("number").bitwiseAND((1 << _ROW_BITS) - 1) / chunk_rows).alias("chunk")
    cut = numbered.groupBy(part, in_part).agg(sf.min("key").alias("key"), sf.count(sf.lit(1)).alias("rows"))
    found = cut.orderBy("key").select(key_text("key", kind).alias("start"), "rows").collect()
    return replace(plan, chunks=tuple(ReplayChunk(row["start"], row["rows"]) for row in found))


def _check(rows: DataFrame, key: str) -> None:
    counts = [sf.count(sf.lit(1)).alias("rows"), sf.countDistinct(key).alias("keys")]
    nothing = sf.count(sf.when(sf.col("payload").isNull(), 1)).alias("without")
    found = rows.agg(*counts, nothing).first()
    assert found is not None
    if found["without"]:
        raise CommandFailed(f"there is no payload in {counted(found['without'], 'row')}", code=Exit.USAGE)
    if found["keys"] != found["rows"]:
        says = (
            f"{key} has {counted(found['keys'], 'value')} in {counted(found['rows'], 'row')}, which does not order them"
        )
        raise CommandFailed(says, hint="give --order-by a column with unique values", code=Exit.USAGE)


def _check_attributes(rows: DataFrame) -> None:
    size = sf.aggregate(
        sf.map_entries("headers"),
        sf.lit(0),
        lambda total, each: total + sf.octet_length(each["key"]) + sf.octet_length(each["value"]),
    )
    if "routing_key" in rows.columns:
        size += sf.coalesce(sf.octet_length("routing_key") + len(ROUTING_KEY), sf.lit(0))
    large = rows.where(size > MAX_ATTRIBUTE_BYTES).count()
    if large:
        raise CommandFailed(
            f"{counted(large, 'row')} would have more than {MAX_ATTRIBUTE_BYTES} bytes of attributes with {ORIGINAL_ID} "
            f"and {ORIGINAL_TIME}",
            hint="--no-originals leaves these two out",
            code=Exit.USAGE,
        )


def outgoing(rows: DataFrame, key: str, *, with_originals: bool) -> DataFrame:
    """Convert rows to what is published, sorted: payload, routing key, and headers with the original ids and times."""
    # One partition, since several tasks would interleave their rows.
    in_order = _converted(rows, key, with_originals=with_originals).repartition(1).sortWithinPartitions(key)
    return in_order.select(*(part for part in PARTS if part in in_order.columns))


def _converted(rows: DataFrame, key: str, *, with_originals: bool) -> DataFrame:
    has_id = "message_id" in rows.columns and with_originals
    found = rows.select(key, *(part for part in PARTS if part != key and part in rows.columns), *_id(rows, key, has_id))
    if has_id:
        own = sf.coalesce("headers", sf.create_map()) if "headers" in rows.columns else sf.create_map()
        own = own.cast("map<string,string>")
        digits = sf.lower(sf.hex("message_id"))
        time_ms = sf.conv(sf.substring(digits, 1, 16), 16, 10)
        originals = sf.create_map(sf.lit(ORIGINAL_ID), digits, sf.lit(ORIGINAL_TIME), time_ms)
        # A message that has an original id keeps it: it was replayed before, or its publisher gave it one.
        added = sf.map_filter(originals, lambda name, _: ~sf.map_contains_key(own, name))
        found = found.withColumn(
            "headers", sf.when(sf.map_contains_key(own, ORIGINAL_ID), own).otherwise(sf.map_concat(own, added))
        )
    return found


def _id(rows: DataFrame, key: str, has_id: bool) -> list[str]:
    return ["message_id"] if has_id and key != "message_id" else []


def follow(
    run: Run,
    source: Source,
    plans: Plans,
    plan: Plan,
    *,
    with_originals: bool = True,
    ttl_s: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Publish the remaining chunks of a plan; return the number of rows.

    Args:
      check: called before each chunk; raises if this process no longer holds the lock.
    Raises:
      CommandFailed: the topic has forgotten the progress of the replay.
      Exception: any error of Spark; the current chunk may be published, which the next run finds out.
    """
    first = resume_at(run, plan)
    if first > plan.done:
        plan = replace(plan, done=first)
        plans.save(plan)
    published, total = 0, sum(chunk.rows for chunk in plan.chunks[first:])
    run.progress.begin()
    for number in range(first, len(plan.chunks)):
        check()
        rows = outgoing(source.rows(run.session(), *plan.bounds(number)), source.key, with_originals=with_originals)
        rows.write.format("plainsong").options(**_options(run, plan, number, ttl_s)).mode("append").save()
        plan = replace(plan, done=number + 1)
        plans.save(plan)
        published += plan.chunks[number].rows
        run.metrics.add("rows_total", plan.chunks[number].rows, topic=plan.topic)
        run.metrics.add("batches_total", topic=plan.topic)
        run.metrics.write()
        run.progress.event("chunk", topic=plan.topic, chunk=number, rows=plan.chunks[number].rows)
        run.progress.step(published, of=total, what=plan.topic, batch=number)
    return published


def resume_at(run: Run, plan: Plan) -> int:
    """Return the number of the first chunk that the topic lacks. Raises CommandFailed: the topic has forgotten it."""
    with closing(WriteOptions.parse(run.source(topic=plan.topic), streaming=False).calls()) as calls:
        known = calls.producer(plan.topic, plan.producer)
    last = -1 if known is None else known.last_sequence_id
    if last + 1 < plan.done:
        raise CommandFailed(
            f"of {counted(plan.rows, 'row')}, {counted(plan.done, 'chunk')} were published, but {plan.topic} has only "
            f"{last + 1}: it has forgotten the producer {plan.producer}",
            hint="check by the attribute originalId what is there; --anew publishes everything again",
            code=Exit.FAILED,
        )
    return last + 1


def fresh(run: Run, plan: Plan, plans: Plans, *, anew: bool) -> Plan:
    """Check a new plan against the topic's producers; with ``anew``, return it with an unused producer.

    Raises:
      CommandFailed: the topic has rows of the same source from a replay whose plan is missing, so this one might
        publish rows twice.
    """
    families = {plan.family, replace(plan, as_read={}).family}  # versions before 0.2 used the second one
    with run.client(plan.topic) as client:
        known = {name for family in families for name in _producers(client, plan.topic, family)}
    while anew and plan.producer in known:
        plan = replace(plan, attempt=plan.attempt + 1)
    unknown = sorted(known - {each.producer for each in plans.all()})
    if unknown and not anew:
        raise CommandFailed(
            f"{plan.topic} has received rows of {plan.source} from {unknown[0]}, and its plan is missing",
            hint="restore the folder _replays, or publish everything again: --anew",
            code=Exit.FAILED,
        )
    return plan


def _producers(client: Client, topic: str, prefix: str) -> Iterator[str]:
    """Return the names of a topic's producers that start with ``prefix``."""

    def page(after: str | None) -> ProducerList:
        return client.admin.producers(topic, after=after or prefix[:-1], limit=1_000)

    listed = pages(page)
    names = (each["producer"] for page in listed for each in page["producers"])  # sorted; ``prefix[:-1]`` is before all
    return takewhile(lambda name: name.startswith(prefix), dropwhile(lambda name: name < prefix, names))


def _options(run: Run, plan: Plan, number: int, ttl_s: int | None) -> dict[str, str]:
    options = run.source(topic=plan.topic, producerName=plan.producer, sequenceId=str(number), ordered="true")
    options["memoryDays"] = str(MEMORY_DAYS)
    return options if ttl_s is None else {**options, "ttlSeconds": str(ttl_s)}

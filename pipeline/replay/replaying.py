"""Following a plan: its chunks found, then published one after the other from where the topic says it stands."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from pipeline.replay.plans import Chunk
from pipeline.replay.sources import PARTS, key_text
from plainsong.cli.output import show_count
from plainsong.cli.verb import CommandFailed, Exit
from pyspark_plainsong.options import WriteOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.job import Run
    from pipeline.replay.plans import Plan, Plans
    from pipeline.replay.sources import Source

ORIGINAL_ID = "originalId"
ORIGINAL_TIME = "originalPublishTimeMs"
#: The longest that a daemon remembers a producer by default: a replay may pause for so long.
MEMORY_DAYS = 90
#: ``monotonically_increasing_id`` counts the rows of a partition in so many bits.
_ROW_BITS = 33


def with_chunks(spark: SparkSession, source: Source, plan: Plan, chunk_rows: int) -> Plan:
    """The plan with its chunks, each of at most so many rows.

    Raises:
      CommandFailed: rows have no key, no payload, or the key of another row, so that they have no order.
    """
    rows = source.rows(spark, plan.start, plan.end)
    kind = rows.schema[source.key].dataType
    _check(rows, source.key)
    # Ranges of keys, sorted: chunks are counted off in each, so the last one of each is smaller.
    numbered = rows.select(source.key).orderBy(source.key).withColumn("number", sf.monotonically_increasing_id())
    part = sf.shiftright("number", _ROW_BITS).alias("part")
    in_part = sf.floor(sf.col("number").bitwiseAND((1 << _ROW_BITS) - 1) / chunk_rows).alias("chunk")
    cut = numbered.groupBy(part, in_part).agg(sf.min(source.key).alias("key"), sf.count(sf.lit(1)).alias("rows"))
    found = cut.orderBy("key").select(key_text("key", kind).alias("start"), "rows").collect()
    return replace(plan, chunks=tuple(Chunk(row["start"], row["rows"]) for row in found))


def _check(rows: DataFrame, key: str) -> None:
    counts = [sf.count(sf.lit(1)).alias("rows"), sf.countDistinct(key).alias("keys")]
    nothing = sf.count(sf.when(sf.col("payload").isNull(), 1)).alias("without")
    found = rows.agg(*counts, nothing).first()
    assert found is not None
    if found["without"]:
        raise CommandFailed(f"{found['without']} rows have no payload", code=Exit.USAGE)
    if found["keys"] != found["rows"]:
        says = f"{found['rows']} rows have {found['keys']} values of {key}, which gives them no order"
        raise CommandFailed(says, hint="--order-by a column with a value of its own in each row", code=Exit.USAGE)


def outgoing(rows: DataFrame, key: str, *, with_originals: bool) -> DataFrame:
    """Rows as they are published, sorted: payload, routing key, headers with the ids they had."""
    has_id = "message_id" in rows.columns and with_originals
    found = rows.select(key, *(part for part in PARTS if part != key and part in rows.columns), *_id(rows, key, has_id))
    if has_id:
        own = sf.coalesce("headers", sf.create_map()) if "headers" in rows.columns else sf.create_map()
        kept = sf.map_filter(own.cast("map<string,string>"), lambda name, _: ~name.isin(ORIGINAL_ID, ORIGINAL_TIME))
        digits = sf.lower(sf.hex("message_id"))
        time_ms = sf.conv(sf.substring(digits, 1, 16), 16, 10)
        originals = sf.create_map(sf.lit(ORIGINAL_ID), digits, sf.lit(ORIGINAL_TIME), time_ms)
        found = found.withColumn("headers", sf.map_concat(kept, originals))
    # One partition: what several tasks store at once stands interleaved.
    in_order = found.repartition(1).sortWithinPartitions(key)
    return in_order.select(*(part for part in PARTS if part in found.columns))


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
    """Publish what is left of a plan; how many rows.

    Args:
      check: called before each chunk; raises when this process is no longer the only one that replays this.
    Raises:
      CommandFailed: the topic has forgotten how far the replay came. What Spark raises: the chunk at hand is there or
        not, and the next run finds out.
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
    """The number of the first chunk that the topic does not have. Raises CommandFailed: nobody can tell any more."""
    with closing(WriteOptions.parse(run.source(topic=plan.topic), streaming=False).calls()) as calls:
        known = calls.producer(plan.topic, plan.producer)
    last = -1 if known is None else known.last_sequence_id
    if last + 1 < plan.done:
        raise CommandFailed(
            f"{plan.done} chunks of {show_count(plan.rows)} rows have been published, but {plan.topic} knows of "
            f"{last + 1} only: it has forgotten the producer {plan.producer}",
            hint="look what is there by the attribute originalId; --anew publishes everything once more",
            code=Exit.FAILED,
        )
    return last + 1


def fresh(run: Run, plan: Plan, plans: Plans, *, anew: bool) -> Plan:
    """A plan that nobody has begun, as one whose producer the topic does not know.

    Raises:
      CommandFailed: the topic has rows of the same source by a replay whose plan is not there: they might come twice.
    """
    with closing(WriteOptions.parse(run.source(topic=plan.topic), streaming=False).calls()) as calls:
        known = set(calls.producers(plan.topic, plan.family))
    while anew and plan.producer in known:
        plan = replace(plan, attempt=plan.attempt + 1)
    unknown = sorted(known - {each.producer for each in plans.all()})
    if unknown and not anew:
        raise CommandFailed(
            f"{plan.topic} has been given rows of {plan.source} by {unknown[0]}, and its plan is gone",
            hint="bring back the folder _replays, or publish everything once more: --anew",
            code=Exit.FAILED,
        )
    return plan


def _options(run: Run, plan: Plan, number: int, ttl_s: int | None) -> dict[str, str]:
    options = run.source(topic=plan.topic, producerName=plan.producer, sequenceId=str(number), ordered="true")
    options["memoryDays"] = str(MEMORY_DAYS)
    return options if ttl_s is None else {**options, "ttlSeconds": str(ttl_s)}

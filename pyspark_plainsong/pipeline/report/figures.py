"""The figures of a report: queue sizes, throughput, publish-to-visible latency and hold times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as sf

from pyspark_plainsong.pipeline.report import facts as of_topics
from pyspark_plainsong.pipeline.report.facts import Report
from pyspark_plainsong.pipeline.report.sources import DECISIONS, Asked, Found

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import Column, DataFrame, SparkSession

    from pyspark_plainsong.pipeline.report.facts import Grid, TopicFacts

#: Maximum number of transactions in the report, longest first. The Parquet files contain all of them.
MAX_HOLDS = 500


@dataclass(frozen=True)
class Frames:
    """The tables of a report, not yet collected, by the names of their Parquet folders."""

    sizes: DataFrame
    rates: DataFrame
    latency: DataFrame
    latency_steps: DataFrame
    stored: DataFrame
    holds: DataFrame

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all tables."""
        return list(cls.__dataclass_fields__)

    def by_name(self) -> dict[str, DataFrame]:
        """Return all tables by name."""
        return {name: getattr(self, name) for name in self.names()}


def pointers_of(messages: DataFrame, max_pointers: int) -> tuple[list[Found], int]:
    """Return the newest ``max_pointers`` write pointers in the messages, and the total number of write pointers."""
    under = messages.where("pointer != 0").select(sf.abs("pointer").alias("pointer"), "publish_ms")
    each = under.groupBy("pointer").agg(sf.min("publish_ms").alias("first_ms")).cache()
    try:
        newest = each.orderBy(sf.desc("pointer")).limit(max_pointers).collect()
        return [Found(row["pointer"], row["first_ms"]) for row in newest], each.count()
    finally:
        each.unpersist()


def frames_of(
    spark: SparkSession,
    messages: DataFrame,
    topics: Sequence[TopicFacts],
    asked: Asked,
    grid: Grid,
    now_ms: int,
) -> Frames:
    """Return all tables, not yet computed."""
    decisions = spark.createDataFrame(list(asked.decisions), DECISIONS)
    names = spark.createDataFrame(of_topics.rows_of(topics), of_topics.TOPICS)
    decided = with_decisions(messages, decisions)
    seen = visibility(decided).cache()
    readable = decided.where(~sf.col("state").isin("rolled_back", "aborted", "invalid"))
    ended_ms = sf.when(sf.col("state") == "in_progress", sf.lit(now_ms)).otherwise(
        sf.coalesce("decided_ms", "first_publish_ms")
    )
    within = (sf.col("first_publish_ms") < grid.end_ms) & (ended_ms >= grid.start_ms)
    return Frames(
        queue_sizes(readable, names, grid),
        throughput(messages, names, grid),
        latency_by_topic(seen, grid),
        latency_by_step(seen, grid),
        stored_for(messages, grid),
        hold_times(messages, decisions, now_ms).where(within),
    )


def report_of(
    frames: Frames,
    topics: Sequence[TopicFacts],
    grid: Grid,
    now_ms: int,
    count: int,
    notes: Sequence[str],
    *,
    step: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compute and collect the tables.

    Args:
      step: called with the name of each table before it is computed.
    """

    def rows(name: str, frame: DataFrame) -> list[dict[str, Any]]:
        step(name)
        return [row.asDict() for row in frame.collect()]

    return Report(
        grid,
        now_ms,
        topics,
        count,
        rows("queue sizes", frames.sizes),
        rows("throughput", frames.rates),
        rows("publish to visible", frames.latency),
        rows("publish to visible, step by step", frames.latency_steps),
        rows("store to publish", frames.stored),
        rows("transactions", frames.holds.limit(MAX_HOLDS)),
        rows("hold times", hold_quantiles(frames.holds)),
        [*(f"{facts.name}: {facts.note}" for facts in topics if facts.note), *notes],
    )


# --- sizes -----------------------------------------------------------------------------------------
#
# Queue sizes: at each moment of a grid, the messages that were published and had not expired.
#
# A message is in its queue from its publish time until the topic's ttl has passed; sizes are computed from these two
# times alone. Messages known to be rolled back or invalid are left out, since no reader gets them.
#
#     SIZES  topic, time_ms, messages, bytes, complete
#
# ``complete`` is false if messages may be missing because they have expired since; the figure is then a lower bound.


def queue_sizes(messages: DataFrame, topics: DataFrame, grid: Grid) -> DataFrame:
    """Count the messages and bytes that each topic held at each moment of ``grid.samples()``.

    Args:
      messages: the rows of ``MESSAGES`` that count.
      topics: ``topic, ttl_ms, known_from_ms, whole``. Messages before ``known_from_ms`` are unknown, unless ``whole``
        is true: then there were none.
    Returns:
      ``SIZES``, with a row for every topic and moment.
    """
    living = messages.join(sf.broadcast(topics), "topic").select(
        "topic", "bytes", "publish_ms", (sf.col("publish_ms") + sf.col("ttl_ms")).alias("last_ms")
    )
    came = living.where(sf.col("publish_ms") <= grid.end_ms).select(
        "topic", _at_or_after("publish_ms", grid), sf.lit(1).alias("messages"), "bytes"
    )
    went = living.where(sf.col("last_ms") < grid.end_ms).select(
        "topic", _after("last_ms", grid), sf.lit(-1).alias("messages"), (-sf.col("bytes")).alias("bytes")
    )
    changes = (
        came.unionByName(went)
        .groupBy("topic", "sample")
        .agg(sf.sum("messages").alias("messages"), sf.sum("bytes").alias("bytes"))
    )
    so_far = Window.partitionBy("topic").orderBy("sample").rowsBetween(Window.unboundedPreceding, 0)
    whole = sf.col("whole") | (sf.col("time_ms") - sf.col("ttl_ms") >= sf.col("known_from_ms"))
    return (
        topics.crossJoin(_samples(topics, grid))
        .join(changes, ["topic", "sample"], "left")
        .select(
            "topic",
            "time_ms",
            sf.sum(sf.coalesce("messages", sf.lit(0))).over(so_far).alias("messages"),
            sf.sum(sf.coalesce("bytes", sf.lit(0))).over(so_far).alias("bytes"),
            whole.alias("complete"),
        )
    )


def _samples(frame: DataFrame, grid: Grid) -> DataFrame:
    """``sample, time_ms``: the number and the time of every moment."""
    sample = sf.col("id").cast("int")
    time_ms = sf.least(sf.col("id") * grid.step_ms + grid.start_ms, sf.lit(grid.end_ms))
    return frame.sparkSession.range(grid.steps + 1).select(sample.alias("sample"), time_ms.alias("time_ms"))


def _at_or_after(column: str, grid: Grid) -> Column:
    """The first moment at or after a time, if there is one."""
    since = f"greatest({column} - {grid.start_ms}, 0)"
    return sf.expr(f"cast(({since} + {grid.step_ms - 1}) div {grid.step_ms} as int)").alias("sample")


def _after(column: str, grid: Grid) -> Column:
    """The first moment after a time, if there is one."""
    since = f"{column} - {grid.start_ms}"
    return sf.expr(f"if({since} < 0, 0, cast(least(({since}) div {grid.step_ms} + 1, {grid.steps}) as int))").alias(
        "sample"
    )


# --- rates -----------------------------------------------------------------------------------------
#
# Throughput: messages and bytes published in each step of a grid, and how long stored messages waited for their
# publish.
#
#     RATES   topic, time_ms (of the step's start), messages, bytes
#     STORED  topic, messages, p50_ms, p95_ms, p99_ms, max_ms

_QUANTILES = (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))


def in_range(frame: DataFrame, grid: Grid) -> DataFrame:
    """Select the rows with ``publish_ms`` within the grid."""
    return frame.where((sf.col("publish_ms") >= grid.start_ms) & (sf.col("publish_ms") < grid.end_ms))


def step_of(grid: Grid) -> Column:
    """The start of the step that ``publish_ms`` is in, in milliseconds, as ``time_ms``."""
    return sf.expr(f"(publish_ms - {grid.start_ms}) div {grid.step_ms} * {grid.step_ms} + {grid.start_ms}").alias(
        "time_ms"
    )


def throughput(messages: DataFrame, topics: DataFrame, grid: Grid) -> DataFrame:
    """``RATES``: all messages published in each step, in whatever state; a row for every topic and step."""
    counted = (
        in_range(messages, grid)
        .groupBy("topic", step_of(grid))
        .agg(sf.count("*").alias("messages"), sf.sum("bytes").alias("bytes"))
    )
    steps = topics.sparkSession.range(grid.steps).select((sf.col("id") * grid.step_ms + grid.start_ms).alias("time_ms"))
    return (
        topics.select("topic")
        .crossJoin(steps)
        .join(counted, ["topic", "time_ms"], "left")
        .select(
            "topic",
            "time_ms",
            sf.coalesce("messages", sf.lit(0)).alias("messages"),
            sf.coalesce("bytes", sf.lit(0)).alias("bytes"),
        )
    )


def stored_for(messages: DataFrame, grid: Grid) -> DataFrame:
    """``STORED``: the time from store to publish of messages that were stored first."""
    waited = in_range(messages, grid).where("write_ms is not null")
    return (
        waited.select("topic", (sf.col("publish_ms") - sf.col("write_ms")).alias("value_ms"))
        .groupBy("topic")
        .agg(sf.count("*").alias("messages"), *quantiles("value_ms"))
    )


def quantiles(column: str) -> list[Column]:
    """Median, 95th and 99th percentile, exact and interpolated, and the maximum; null without values."""
    return [
        *(sf.percentile(column, part).alias(name) for name, part in _QUANTILES),
        sf.max(column).alias("max_ms"),
    ]


# --- visibility ------------------------------------------------------------------------------------
#
# Publish to visible: the time during which committed readers could not get a message that was already published.
#
# A committed reader stops at the first undecided message of a topic. So a message becomes visible when the transactions
# of all messages up to it, its own included, are decided: at the latest of these times, or at its own publish if none
# of them was open. Rolled back and invalid messages block readers until they are decided, too, and never become
# visible.
#
#     VISIBLE   topic, message_id, publish_ms, waited_ms, known
#     known     exact     waited_ms is exact
#               at_least  may be longer: for a transaction up to this message, the time of its end is no longer stored
#               waiting   not visible yet; waited_ms is null
#               never     rolled back or invalid; null
#               unknown   the outcome of its transaction is no longer stored; null


def with_decisions(messages: DataFrame, decisions: DataFrame) -> DataFrame:
    """``MESSAGES`` with ``state`` and ``decided_ms`` of their transactions.

    ``state`` is ``plain`` without a transaction, ``rolled_back`` if the message itself is marked so, else the answer of
    the transaction service: ``committed``, ``aborted``, ``invalid``, ``in_progress`` or ``unknown``.
    """
    joined = messages.withColumn("positive", sf.abs("pointer")).join(
        sf.broadcast(decisions.select(sf.col("pointer").alias("positive"), "state", "decided_ms")), "positive", "left"
    )
    remembered = sf.coalesce("state", sf.lit("unknown"))
    state = sf.when(sf.col("pointer") == 0, "plain").when(sf.col("pointer") < 0, "rolled_back").otherwise(remembered)
    # Messages may be rolled back while their transaction continues. The time of such a rollback is not stored.
    rolled_back_alone = (sf.col("pointer") < 0) & remembered.isin("committed", "in_progress")
    ended = sf.when(~rolled_back_alone, sf.col("decided_ms"))
    return joined.select(*messages.columns, state.alias("state"), ended.alias("decided_ms"))


def visibility(decided: DataFrame) -> DataFrame:
    """Compute ``VISIBLE``. One task sorts each topic.

    Args:
      decided: the result of ``with_decisions``, with all messages of each topic from some point on.
    """
    up_to = Window.partitionBy("topic").orderBy("message_id").rowsBetween(Window.unboundedPreceding, 0)
    free_ms = sf.when(sf.col("state") == "plain", sf.col("publish_ms")).otherwise(
        sf.greatest("publish_ms", sf.coalesce("decided_ms", "publish_ms"))
    )
    is_open = sf.col("state") == "in_progress"
    in_doubt = (sf.col("state") != "plain") & ~is_open & sf.col("decided_ms").isNull()
    known = (
        sf.when(sf.col("state").isin("rolled_back", "aborted", "invalid"), "never")
        .when(sf.max(is_open).over(up_to), "waiting")
        .when(sf.col("state") == "unknown", "unknown")
        .when(sf.max(in_doubt).over(up_to), "at_least")
        .otherwise("exact")
    )
    seen = decided.select(
        "topic", "message_id", "publish_ms", known.alias("known"), sf.max(free_ms).over(up_to).alias("visible_ms")
    )
    waited_ms = sf.when(sf.col("known").isin("exact", "at_least"), sf.col("visible_ms") - sf.col("publish_ms"))
    return seen.select("topic", "message_id", "publish_ms", waited_ms.alias("waited_ms"), "known")


def latency_by_topic(visible: DataFrame, grid: Grid) -> DataFrame:
    """``topic, messages, p50_ms, p95_ms, p99_ms, max_ms, at_least, waiting, never, unknown`` of the range."""
    counts = [
        sf.count_if(sf.col("known") == known).alias(known) for known in ("at_least", "waiting", "never", "unknown")
    ]
    return (
        in_range(visible, grid)
        .groupBy("topic")
        .agg(sf.count("waited_ms").alias("messages"), *quantiles("waited_ms"), *counts)
    )


def latency_by_step(visible: DataFrame, grid: Grid) -> DataFrame:
    """``topic, time_ms, messages, p50_ms, p95_ms, p99_ms, max_ms`` of the steps with messages."""
    shown = in_range(visible, grid).where("waited_ms is not null")
    return shown.groupBy("topic", step_of(grid)).agg(sf.count("*").alias("messages"), *quantiles("waited_ms"))


# --- holds -----------------------------------------------------------------------------------------
#
# Hold times: how long a transaction was open, and how long its messages blocked each topic's readers.
#
#     HOLDS  transaction, topic, client, state, messages, bytes, begun_ms, first_publish_ms, decided_ms, open_ms, held_ms
#
# ``open_ms`` is from a transaction's begin to its end, ``held_ms`` from its first message in the topic to its end; if
# it is still open, both end at the time of the report. They are null if the time of its end is no longer stored. A
# transaction with several write pointers counts once, by its id.


def hold_times(messages: DataFrame, decisions: DataFrame, now_ms: int) -> DataFrame:
    """``HOLDS`` of the transactions that published one of ``messages``, longest first."""
    under = messages.where("pointer != 0").withColumn("pointer", sf.abs("pointer"))
    each = (
        under.join(sf.broadcast(decisions), "pointer")
        .groupBy("transaction", "topic")
        .agg(
            sf.first("client").alias("client"),
            sf.first("state").alias("state"),
            sf.count("*").alias("messages"),
            sf.sum("bytes").alias("bytes"),
            sf.min("begun_ms").alias("begun_ms"),
            sf.min("publish_ms").alias("first_publish_ms"),
            sf.max("decided_ms").alias("decided_ms"),
        )
    )
    until_ms = sf.when(sf.col("state") == "in_progress", sf.lit(now_ms)).otherwise(sf.col("decided_ms"))
    held_ms = sf.greatest(until_ms, sf.col("first_publish_ms")) - sf.col("first_publish_ms")
    return each.select(
        *each.columns,
        (until_ms - sf.col("begun_ms")).alias("open_ms"),
        sf.when(until_ms.isNotNull(), held_ms).alias("held_ms"),
    ).orderBy(sf.desc_nulls_last("held_ms"), "transaction", "topic")


def hold_quantiles(holds: DataFrame) -> DataFrame:
    """``topic, transactions, open, unknown, p50_ms, p95_ms, p99_ms, max_ms``: how long topics' readers were blocked.

    Computed from ``HOLDS``. ``open`` transactions count with their time so far. ``unknown`` ones, for which the time of
    the end is no longer stored, are left out of the quantiles.
    """
    return holds.groupBy("topic").agg(
        sf.count("*").alias("transactions"),
        sf.count_if(sf.col("state") == "in_progress").alias("open"),
        sf.count_if(sf.col("held_ms").isNull()).alias("unknown"),
        *quantiles("held_ms"),
    )

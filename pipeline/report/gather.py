"""All figures of a report, gathered: messages read once, their transactions asked about, every table computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from pipeline.report import facts as of_topics
from pipeline.report.decisions import DECISIONS, Asked, Found
from pipeline.report.holds import hold_quantiles, hold_times
from pipeline.report.rates import stored_for, throughput
from pipeline.report.report import Report
from pipeline.report.sizes import queue_sizes
from pipeline.report.visibility import latency_by_step, latency_by_topic, visibility, with_decisions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.report.facts import TopicFacts
    from pipeline.report.grid import Grid

#: Transactions listed one by one, the longest; Parquet has all.
MAX_HOLDS = 500


@dataclass(frozen=True)
class Frames:
    """The tables of a report before they are collected, by the names of their Parquet folders."""

    sizes: DataFrame
    rates: DataFrame
    latency: DataFrame
    latency_steps: DataFrame
    stored: DataFrame
    holds: DataFrame

    @classmethod
    def names(cls) -> list[str]:
        """Of all of them."""
        return list(cls.__dataclass_fields__)

    def by_name(self) -> dict[str, DataFrame]:
        """All of them."""
        return {name: getattr(self, name) for name in self.names()}


def pointers_of(messages: DataFrame, max_pointers: int) -> tuple[list[Found], int]:
    """The write pointers that messages carry, the newest of them, and how many there are in all."""
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
    """Every table, not computed yet."""
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
    """Compute and collect.

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

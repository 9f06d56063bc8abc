"""Queue sizes over time: at each moment of a grid, the messages that were published and had not expired.

A message is in its queue from its publish time until the topic's ttl has passed; a size is counted from these two
times alone. Messages that are known to be rolled back or invalid are left out: nobody reads them.

    SIZES  topic, time_ms, messages, bytes, complete

``complete`` is false where messages may be missing: they were alive then, and have expired since, so that the topic
cannot show them any more. The figure is then a lower bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from pipeline.report.grid import Grid


def queue_sizes(messages: DataFrame, topics: DataFrame, grid: Grid) -> DataFrame:
    """How many messages and bytes each topic held at each moment of ``grid.samples()``.

    Args:
      messages: those of ``MESSAGES`` that count.
      topics: ``topic, ttl_ms, known_from_ms, whole``: what is there since when; ``whole``: nothing was there before.
    Returns:
      ``SIZES``, a row for every topic and moment.
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
    """The first moment at or after a time that is not behind the end."""
    since = f"greatest({column} - {grid.start_ms}, 0)"
    return sf.expr(f"cast(({since} + {grid.step_ms - 1}) div {grid.step_ms} as int)").alias("sample")


def _after(column: str, grid: Grid) -> Column:
    """The first moment after a time that is before the end."""
    since = f"{column} - {grid.start_ms}"
    return sf.expr(f"if({since} < 0, 0, cast(least(({since}) div {grid.step_ms} + 1, {grid.steps}) as int))").alias(
        "sample"
    )

"""Throughput: messages and bytes published in each step of a grid, and how long stored ones waited to be published.

RATES   topic, time_ms (of the step's start), messages, bytes
STORED  topic, messages, p50_ms, p95_ms, p99_ms, max_ms
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from pipeline.report.grid import Grid

_QUANTILES = (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99))


def in_range(frame: DataFrame, grid: Grid) -> DataFrame:
    """The rows whose ``publish_ms`` is within the grid."""
    return frame.where((sf.col("publish_ms") >= grid.start_ms) & (sf.col("publish_ms") < grid.end_ms))


def step_of(grid: Grid) -> Column:
    """The start of the step that ``publish_ms`` is in, in milliseconds, as ``time_ms``."""
    return sf.expr(f"(publish_ms - {grid.start_ms}) div {grid.step_ms} * {grid.step_ms} + {grid.start_ms}").alias(
        "time_ms"
    )


def throughput(messages: DataFrame, topics: DataFrame, grid: Grid) -> DataFrame:
    """``RATES``: what was published in each step, whatever became of it; a row for every topic and step."""
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
    """``STORED``: for messages that were stored first, the time from their store to their publish."""
    waited = in_range(messages, grid).where("write_ms is not null")
    return (
        waited.select("topic", (sf.col("publish_ms") - sf.col("write_ms")).alias("value_ms"))
        .groupBy("topic")
        .agg(sf.count("*").alias("messages"), *quantiles("value_ms"))
    )


def quantiles(column: str) -> list[Column]:
    """Median, 95th and 99th percentile, exact and interpolated, and the maximum; null where there is no value."""
    return [
        *(sf.percentile(column, part).alias(name) for name, part in _QUANTILES),
        sf.max(column).alias("max_ms"),
    ]

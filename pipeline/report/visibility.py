"""Publish to visible: for how long a committed reader could not get a message that was already published.

A committed reader stops at the first undecided message of a topic. So a message becomes visible when the transactions
of all messages up to it, its own included, are decided: at the latest of these times, or at its own publish where
nothing before it was open. Rolled back and invalid messages hold a reader up until they are decided, too, and are
never visible themselves.

    VISIBLE   topic, message_id, publish_ms, waited_ms, known
    known     exact     waited_ms is what it was
              at_least  a message up to this one has a transaction whose end is not remembered: it may have been longer
              waiting   not visible yet; waited_ms is null
              never     rolled back or invalid; null
              unknown   of a transaction whose outcome nobody remembers; null
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as sf

from pipeline.report.rates import in_range, quantiles, step_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pipeline.report.grid import Grid


def with_decisions(messages: DataFrame, decisions: DataFrame) -> DataFrame:
    """``MESSAGES`` with ``state`` and ``decided_ms`` of their transactions.

    ``state`` is ``plain`` where there is none, ``rolled_back`` where the message says so itself, else what the
    transaction service said: ``committed``, ``aborted``, ``invalid``, ``in_progress`` or ``unknown``.
    """
    joined = messages.withColumn("positive", sf.abs("pointer")).join(
        sf.broadcast(decisions.select(sf.col("pointer").alias("positive"), "state", "decided_ms")), "positive", "left"
    )
    said = sf.coalesce("state", sf.lit("unknown"))
    state = sf.when(sf.col("pointer") == 0, "plain").when(sf.col("pointer") < 0, "rolled_back").otherwise(said)
    # Messages may be rolled back while their transaction goes on: nobody keeps from when on they held nobody up.
    rolled_back_alone = (sf.col("pointer") < 0) & said.isin("committed", "in_progress")
    ended = sf.when(~rolled_back_alone, sf.col("decided_ms"))
    return joined.select(*messages.columns, state.alias("state"), ended.alias("decided_ms"))


def visibility(decided: DataFrame) -> DataFrame:
    """``VISIBLE`` of messages ``with_decisions``, all of a topic from some point on; one task sorts a topic."""
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
    """``topic, messages, p50_ms, p95_ms, p99_ms, max_ms, at_least, waiting, never, unknown`` of those in the range."""
    counts = [
        sf.count_if(sf.col("known") == known).alias(known) for known in ("at_least", "waiting", "never", "unknown")
    ]
    return (
        in_range(visible, grid)
        .groupBy("topic")
        .agg(sf.count("waited_ms").alias("messages"), *quantiles("waited_ms"), *counts)
    )


def latency_by_step(visible: DataFrame, grid: Grid) -> DataFrame:
    """``topic, time_ms, messages, p50_ms, p95_ms, p99_ms, max_ms`` of the steps in which something was published."""
    shown = in_range(visible, grid).where("waited_ms is not null")
    return shown.groupBy("topic", step_of(grid)).agg(sf.count("*").alias("messages"), *quantiles("waited_ms"))

"""Transaction hold times: how long a transaction was open, and how long its messages held up each topic's readers.

    HOLDS  transaction, topic, client, state, messages, bytes, begun_ms, first_publish_ms, decided_ms, open_ms, held_ms

``open_ms`` is from its begin to its end, ``held_ms`` from its first message in the topic to its end; of one that is
still open both are up to the moment of the report. They are null where the end is not remembered. A transaction with
several write pointers is one, by its id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from pipeline.report.rates import quantiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def hold_times(messages: DataFrame, decisions: DataFrame, now_ms: int) -> DataFrame:
    """``HOLDS`` of the transactions that published any of ``messages``, longest first."""
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
    """``topic, transactions, open, unknown, p50_ms, p95_ms, p99_ms, max_ms``: how long each topic was held.

    Of ``HOLDS``; ``open`` are those still in progress, which count with the time so far, and ``unknown`` those whose
    end is not remembered, which do not.
    """
    return holds.groupBy("topic").agg(
        sf.count("*").alias("transactions"),
        sf.count_if(sf.col("state") == "in_progress").alias("open"),
        sf.count_if(sf.col("held_ms").isNull()).alias("unknown"),
        *quantiles("held_ms"),
    )

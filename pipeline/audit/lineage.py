"""Lineage: the edges between datasets and program runs, and the flows from dataset to dataset that they make.

A run that reads `a` and writes `b` makes a flow from `a` to `b`. An access of an unknown kind is an edge, kept and
shown; it makes flows only for who asks for it (`unknown=True`), and then as a read and as a write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, TimestampType

from pipeline.audit.accesses import access_rows
from pipeline.audit.messages import READ, UNKNOWN, WRITE
from pipeline.audit.table import totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EDGES: Final = totals(
    "edges",
    ("namespace", "program", "run", "dataset", "access"),
    first_seen=(TimestampType(), "min"),
    last_seen=(TimestampType(), "max"),
    accesses=(LongType(), "sum"),
)
RUN: Final = ("namespace", "program", "run")


def kinds(access: str, *, unknown: bool) -> list[str]:
    """The kinds of access that count as `access`."""
    return [access, UNKNOWN] if unknown else [access]


def edge_rows(judged: DataFrame) -> DataFrame:
    """What judged messages add to the edges."""
    each = access_rows(judged).select(
        *EDGES.keys,
        F.col("time").alias("first_seen"),
        F.col("time").alias("last_seen"),
        F.lit(1).cast("bigint").alias("accesses"),
    )
    return EDGES.merged(each)


def flows(edges: DataFrame, *, unknown: bool = False) -> DataFrame:
    """From dataset to dataset: namespace, source, program, target, runs, first_seen, last_seen; one row a program."""
    reads = edges.where(F.col("access").isin(kinds(READ, unknown=unknown)))
    writes = edges.where(F.col("access").isin(kinds(WRITE, unknown=unknown))).select(
        *RUN,
        F.col("dataset").alias("target"),
        F.col("first_seen").alias("written_first"),
        F.col("last_seen").alias("written_last"),
    )
    return (
        reads.withColumnRenamed("dataset", "source")
        .join(writes, list(RUN))
        .groupBy("namespace", "source", "program", "target")
        .agg(
            F.count_distinct("run").alias("runs"),
            F.min(F.least("first_seen", "written_first")).alias("first_seen"),
            F.max(F.greatest("last_seen", "written_last")).alias("last_seen"),
        )
    )


def closure(flow: DataFrame, *, depth: int | None = None) -> DataFrame:
    """Every pair of datasets of which one came from the other: namespace, source, target, distance (in runs).

    `flow` as made by `flows`. The distance is the shortest one, `depth` (None: any) its bound; a cycle ends where it
    meets what was found before. Each step is a join of what is new, and kept, so that step n does not redo n-1 others.
    """
    steps = flow.select("namespace", "source", "target").distinct().localCheckpoint()
    found = new = steps.withColumn("distance", F.lit(1)).localCheckpoint()
    distance = 1
    while (depth is None or distance < depth) and not new.isEmpty():
        distance += 1
        onward = steps.select("namespace", F.col("source").alias("target"), F.col("target").alias("beyond"))
        reached = new.join(onward, ["namespace", "target"]).select(
            "namespace", "source", F.col("beyond").alias("target"), F.lit(distance).alias("distance")
        )
        new = reached.distinct().join(found, ["namespace", "source", "target"], "left_anti").localCheckpoint()
        found = found.unionByName(new).localCheckpoint()
    return found

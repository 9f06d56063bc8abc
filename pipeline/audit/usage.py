"""The usage registry: which program uses which dataset, since when, until when, and how often it reads and writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import LongType, TimestampType

from pipeline.audit.accesses import access_rows
from pipeline.audit.messages import READ, UNKNOWN, WRITE
from pipeline.audit.table import totals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

USAGE: Final = totals(
    "usage",
    ("namespace", "program", "dataset"),
    first_seen=(TimestampType(), "min"),
    last_seen=(TimestampType(), "max"),
    reads=(LongType(), "sum"),
    writes=(LongType(), "sum"),
    unknowns=(LongType(), "sum"),
)


def usage_rows(judged: DataFrame) -> DataFrame:
    """What judged messages add to the registry. Times are of the events, in whatever order they were published."""
    return USAGE.merged(
        access_rows(judged).select(
            *USAGE.keys,
            F.col("time").alias("first_seen"),
            F.col("time").alias("last_seen"),
            *(
                F.when(F.col("access") == access, 1).otherwise(0).cast("bigint").alias(f"{access}s")
                for access in (READ, WRITE, UNKNOWN)
            ),
        )
    )

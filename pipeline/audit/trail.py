"""The audit trail: one row for each good message, never changed, and how it is searched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow.dataset as ds
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampType

from pipeline.audit.messages import CHANGE, PROGRAM
from pipeline.audit.searching import together
from pipeline.audit.table import Table

if TYPE_CHECKING:
    from datetime import datetime

    from pyspark.sql import DataFrame

TRAIL: Final = Table(
    "trail",
    StructType(
        [
            StructField("time", TimestampType()),
            StructField("type", StringType()),
            StructField("namespace", StringType()),
            StructField("user", StringType()),
            StructField("entity", StringType()),
            StructField("program", StringType()),
            StructField("run", StringType()),
            StructField("access", StringType()),
            StructField("previous", CHANGE),
            StructField("added", CHANGE),
            StructField("removed", CHANGE),
            StructField("topic", StringType()),
            StructField("message_id", BinaryType()),
            StructField("published", TimestampType()),
        ]
    ),
    order=("entity", "time", "message_id"),
)


def trail_rows(judged: DataFrame) -> DataFrame:
    """The good ones among judged messages."""
    return judged.where(F.col("reason").isNull()).select(*TRAIL.columns.names)


def trail_filter(
    *,
    namespace: str | None = None,
    entity: str | None = None,
    user: str | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
) -> ds.Expression | None:
    """What a search asks of a row: all that is given. Times are of the event, `start` included, `end` not.

    `program:NAME` finds also what that program accessed.
    """
    conditions = []
    if namespace is not None:
        conditions.append(ds.field("namespace") == namespace)
    if entity is not None:
        kind, _, name = entity.partition(":")
        itself = ds.field("entity") == entity
        conditions.append(itself | (ds.field("program") == name) if kind == PROGRAM else itself)
    if user is not None:
        conditions.append(ds.field("user") == user)
    if start is not None:
        conditions.append(ds.field("time") >= start)
    if end is not None:
        conditions.append(ds.field("time") < end)
    return together(conditions)

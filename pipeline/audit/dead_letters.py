"""The dead letters: each message that could not be read, whole, with the reason; so that none is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, StringType, StructField, StructType, TimestampType

from pipeline.audit.table import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DEAD_LETTERS: Final = Table(
    "dead_letters",
    StructType(
        [
            StructField("topic", StringType()),
            StructField("message_id", BinaryType()),
            StructField("published", TimestampType()),
            StructField("reason", StringType()),
            StructField("detail", StringType()),
            StructField("payload", BinaryType()),
        ]
    ),
    order=("topic", "message_id"),
)


def dead_letter_rows(judged: DataFrame) -> DataFrame:
    """The bad ones among judged messages."""
    return judged.where(F.col("reason").isNotNull()).select(*DEAD_LETTERS.columns.names)

"""What every figure is made from: one slim row for a message, whether it came from a topic or an archive.

topic        STRING  namespace:topic
message_id   BINARY  20 bytes, sorts as the topic does
publish_ms   BIGINT  when it was published
write_ms     BIGINT  when it was stored, for those that were stored before they were published; else null
bytes        BIGINT  of the payload
pointer      BIGINT  its write pointer: 0 none, negative rolled back
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

MESSAGES = StructType(
    [
        StructField("topic", StringType()),
        StructField("message_id", BinaryType()),
        StructField("publish_ms", LongType()),
        StructField("write_ms", LongType()),
        StructField("bytes", LongType()),
        StructField("pointer", LongType()),
    ]
)


def messages_of(rows: DataFrame) -> DataFrame:
    """Rows of the data source, or of an archive, brought to ``MESSAGES``.

    Rows without the column ``transaction_write_pointer`` were read as a committed reader reads: each was visible, and
    which transaction published it is not known; their pointer is 0.
    """
    has_pointer = "transaction_write_pointer" in rows.columns
    pointer = sf.coalesce("transaction_write_pointer", sf.lit(0)) if has_pointer else sf.lit(0)
    return rows.select(
        sf.concat_ws(":", "namespace", "topic").alias("topic"),
        "message_id",
        sf.unix_millis("publish_timestamp").alias("publish_ms"),
        sf.unix_millis("write_timestamp").alias("write_ms"),
        sf.octet_length("payload").cast("bigint").alias("bytes"),
        pointer.cast("bigint").alias("pointer"),
    )

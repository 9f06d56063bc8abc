"""One batch of messages into the four tables: what the stream does, again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812

from pipeline.audit.dead_letters import DEAD_LETTERS, dead_letter_rows
from pipeline.audit.judging import judged
from pipeline.audit.lineage import EDGES, edge_rows
from pipeline.audit.messages import ACCESS
from pipeline.audit.trail import TRAIL, trail_rows
from pipeline.audit.usage import USAGE, usage_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from pipeline.audit.keeping import Keeping

TABLES: Final = (TRAIL, USAGE, EDGES, DEAD_LETTERS)
TABLE: Final = {table.name: table for table in TABLES}


@dataclass(frozen=True)
class Absorbed:
    """What a batch came to: messages that were new, those of them that were bad, and the bytes of all."""

    messages: int = 0
    bad: int = 0
    bytes: int = 0
    #: The same by topic (`namespace:name`), for those with new ones.
    of_topic: dict[str, Absorbed] = field(default_factory=dict)


def absorb(keeping: Keeping, messages: DataFrame) -> Absorbed:
    """Put messages, rows of the connector, into the tables, but for those that are there.

    Of each topic they are the next ones, all up to the last of them. When it returns they are in, on the disk; when it
    raises they may be, and are to be given again.
    """
    weighed = keeping.unseen(judged(messages))
    # Of a good message the payload is of no more use; of a bad one it is all there is.
    lean = weighed.withColumn("size", F.length("payload")).withColumn(
        "payload", F.when(F.col("reason").isNotNull(), F.col("payload"))
    )
    rows = lean.persist()
    try:
        topics = (
            rows.groupBy("topic")
            .agg(
                F.max("message_id").alias("last"),
                F.count(F.lit(1)).alias("messages"),
                F.count("reason").alias("bad"),
                F.count_if(F.col("reason").isNull() & (F.col("type") == ACCESS)).alias("accesses"),
                F.sum("size").alias("bytes"),
            )
            .collect()
        )
        if not topics:
            return Absorbed()
        count = {name: sum(topic[name] for topic in topics) for name in ("messages", "bad", "accesses", "bytes")}
        batch = {}
        if count["messages"] > count["bad"]:
            batch[TRAIL.name] = trail_rows(rows)
        if count["accesses"]:
            batch |= {USAGE.name: usage_rows(rows), EDGES.name: edge_rows(rows)}
        if count["bad"]:
            batch[DEAD_LETTERS.name] = dead_letter_rows(rows)
        keeping.add(batch, {topic["topic"]: bytes(topic["last"]).hex() for topic in topics})
    finally:
        rows.unpersist()
    keeping.merge(messages.sparkSession)
    of_topic = {each["topic"]: Absorbed(each["messages"], each["bad"], each["bytes"]) for each in topics}
    return Absorbed(count["messages"], count["bad"], count["bytes"], of_topic)

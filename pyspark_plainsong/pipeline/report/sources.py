"""The input of a report: messages of topics and of an archive, each once, and the outcomes of their transactions.

Messages of both have the same few columns:

    topic        STRING  namespace:topic
    message_id   BINARY  20 bytes, sorts as the topic does
    publish_ms   BIGINT  when it was published
    write_ms     BIGINT  when it was stored, if it was stored before it was published; else null
    bytes        BIGINT  of the payload
    pointer      BIGINT  its write pointer: 0 none, negative rolled back
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sf
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from plainsong.cli.command import CommandFailed, Exit
from plainsong.protocol.errors import TransactionsUnavailable
from plainsong.protocol.transactions.transaction import issued_ms
from pyspark_plainsong.pipeline.archive.layout import time_bound, time_of
from pyspark_plainsong.pipeline.archive.reading import read
from pyspark_plainsong.pipeline.archive.table import TopicTable
from pyspark_plainsong.pipeline.files import open_files
from pyspark_plainsong.pipeline.report.facts import TopicFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from plainsong._sync.transactions import Transactions
    from plainsong.transactions import TransactionStatus
    from pyspark_plainsong.pipeline.report.facts import Grid

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
    """Convert rows of the data source or of an archive to ``MESSAGES``.

    Rows without the column ``transaction_write_pointer`` were read with committed isolation, so their transactions are
    unknown; their pointer is 0.
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


# --- sources ---------------------------------------------------------------------------------------


def from_topics(spark: SparkSession, source: Mapping[str, str], topics: Sequence[TopicFacts], grid: Grid) -> DataFrame:
    """Read ``MESSAGES`` of topics, those of open and rolled back transactions included.

    The range is from the oldest message that could be alive when the grid begins, to the end of the grid.
    """
    options = {
        "subscribe": ",".join(facts.name for facts in topics),
        "startingTimestamp": str(_since(topics, grid)),
        "endingTimestamp": str(grid.end_ms + 1),
        "isolation": "uncommitted",
        "includeTransaction": "true",
        "failOnDataLoss": "false",  # the report says that sizes at its edge are lower bounds
    }
    return messages_of(spark.read.format("plainsong").options(**source).options(**options).load())


def from_archive(spark: SparkSession, root: str, topics: Sequence[TopicFacts], grid: Grid) -> DataFrame:
    """Read ``MESSAGES`` of an archive, of the topics' current generations."""
    namespace = topics[0].topic.partition(":")[0]
    rows = read(
        spark,
        root,
        namespace=namespace,
        topic=topics[0].name if len(topics) == 1 else None,
        start=time_bound(_since(topics, grid)),
        end=time_bound(grid.end_ms + 1),
    )
    living = spark.createDataFrame(
        [(namespace, facts.name, facts.generation) for facts in topics],
        "namespace STRING, topic STRING, generation INT",
    )
    return messages_of(rows.join(sf.broadcast(living), ["namespace", "topic", "generation"], "left_semi"))


def each_once(topics: DataFrame, archive: DataFrame) -> DataFrame:
    """Merge ``MESSAGES`` of both. Those in both come from the topic, since an archive has no write pointers."""
    return topics.unionByName(archive.join(topics, ["topic", "message_id"], "left_anti"))


def _since(topics: Sequence[TopicFacts], grid: Grid) -> int:
    return max(0, grid.start_ms - max(facts.ttl_ms for facts in topics))


# --- what an archive covers --------------------------------------------------------------------------


def archived_facts(spark: SparkSession, root: str, namespace: str, topic: str, ttl_ms: int | None) -> TopicFacts:
    """Return the facts about a topic that an archive alone has, for its last generation.

    Raises:
      CommandFailed: the archive does not have the topic, or its time to live is not known.
    """
    table = _table(spark, root, namespace, topic)
    generations = [] if table is None else table.generations()
    if table is None or not generations:
        raise CommandFailed(f"the archive {root} has no messages of {namespace}:{topic}", code=Exit.NOT_FOUND)
    if ttl_ms is None:
        raise CommandFailed("an archive does not record the time to live", hint="give it: --ttl 7d", code=Exit.USAGE)
    start_ms = table.start_ms(generations[-1])
    return TopicFacts(f"{namespace}:{topic}", generations[-1], ttl_ms, start_ms, start_ms == 0, {}, "")


def archive_ranges(spark: SparkSession, root: str, facts: TopicFacts) -> tuple[list[tuple[int, int]], bool]:
    """Return the publish times that an archive holds of a topic's generation; True if they start at its beginning."""
    table = _table(spark, root, *facts.topic.split(":"))
    if table is None or facts.generation not in table.generations():
        return [], False
    start_ms = table.start_ms(facts.generation)
    return [(start_ms, time_of(table.end(facts.generation)))], start_ms == 0


def _table(spark: SparkSession, root: str, namespace: str, topic: str) -> TopicTable | None:
    return TopicTable.open(open_files(root, lambda: spark), namespace, topic)


# --- outcomes --------------------------------------------------------------------------------------
#
# The outcomes of transactions: one request to the daemon per write pointer.
#
#     DECISIONS  pointer, transaction, client, state, begun_ms, decided_ms
#
# A daemon remembers outcomes for a time (``transactions.outcome_retention_s``). For a pointer that it has forgotten, the
# state is ``unknown``, and only the time of issue remains, which is part of the pointer.

DECISIONS = StructType(
    [
        StructField("pointer", LongType()),
        StructField("transaction", LongType()),
        StructField("client", StringType()),
        StructField("state", StringType()),
        StructField("begun_ms", LongType()),
        StructField("decided_ms", LongType()),
    ]
)
#: The time in a forgotten pointer is trusted if it is at most this long before the pointer's first message.
MAX_AGE_MS = 25 * 3600 * 1000


class Found(NamedTuple):
    """A positive write pointer, and when its first message was published."""

    pointer: int
    first_publish_ms: int


class Decision(NamedTuple):
    """A row of ``DECISIONS``."""

    pointer: int
    transaction: int
    client: str | None
    state: str
    begun_ms: int | None
    decided_ms: int | None


@dataclass(frozen=True, slots=True)
class Asked:
    """The answers of the transaction service."""

    decisions: Sequence[Decision]
    unavailable: str | None = None
    """Why the service did not answer; None: it answered."""


def ask_about(found: Iterable[Found], transactions: Transactions) -> Asked:
    """Request the outcome of each pointer.

    Raises:
      PlainsongError: a request failed. A daemon without a transaction service is not a failure.
    """
    decisions: list[Decision] = []
    unavailable = None
    for each in found:
        if unavailable is None:
            try:
                decisions.append(_decision(each, transactions.get(each.pointer)))
                continue
            except TransactionsUnavailable as error:
                unavailable = error.detail
        decisions.append(_unknown(each))
    return Asked(decisions, unavailable)


def not_asked(found: Iterable[Found], why: str) -> Asked:
    """Return the answers without a daemon: every outcome is unknown."""
    return Asked([_unknown(each) for each in found], why)


def _decision(found: Found, status: TransactionStatus) -> Decision:
    if status.state == "unknown":
        return _unknown(found)
    return Decision(found.pointer, status.id, status.client_id, status.state, status.started_ms, status.decided_ms)


def _unknown(found: Found) -> Decision:
    begun_ms = issued_ms(found.pointer)
    believed = 0 <= found.first_publish_ms - begun_ms <= MAX_AGE_MS
    return Decision(found.pointer, found.pointer, None, "unknown", begun_ms if believed else None, None)

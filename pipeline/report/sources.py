"""Where the messages of a report come from: topics, an archive, or both, each message once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from pipeline.archive.coverage import covered
from pipeline.archive.files import open_files
from pipeline.archive.layout import time_bound, time_of, topic_folder
from pipeline.archive.reading import load_manifests, read
from pipeline.report.facts import TopicFacts
from pipeline.report.messages import messages_of
from plainsong.cli.verb import CommandFailed, Exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.archive.manifest import Manifest
    from pipeline.report.grid import Grid


def from_topics(spark: SparkSession, source: Mapping[str, str], topics: Sequence[TopicFacts], grid: Grid) -> DataFrame:
    """``MESSAGES`` of topics, of open and rolled back transactions too.

    From the oldest that could be alive when the grid begins until its end.
    """
    options = {
        "subscribe": ",".join(facts.name for facts in topics),
        "startingTimestamp": str(_since(topics, grid)),
        "endingTimestamp": str(grid.end_ms + 1),
        "isolation": "uncommitted",
        "includeTransaction": "true",
        "failOnDataLoss": "false",  # what expires while it is read is what the report says of its edge anyway
    }
    return messages_of(spark.read.format("plainsong").options(**source).options(**options).load())


def from_archive(spark: SparkSession, root: str, topics: Sequence[TopicFacts], grid: Grid) -> DataFrame:
    """``MESSAGES`` of an archive, of the generations that the topics have."""
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
    """Both: what the topic still has comes from there, since it knows the write pointers."""
    return topics.unionByName(archive.join(topics, ["topic", "message_id"], "left_anti"))


def _since(topics: Sequence[TopicFacts], grid: Grid) -> int:
    return max(0, grid.start_ms - max(facts.ttl_ms for facts in topics))


# --- what an archive covers --------------------------------------------------------------------------


def archived_facts(spark: SparkSession, root: str, namespace: str, topic: str, ttl_ms: int | None) -> TopicFacts:
    """What an archive alone tells of a topic: of its last generation, from the beginning of its last range without gap.

    Raises:
      CommandFailed: the archive has nothing of it, or nobody says how long its messages live.
    """
    entries = _entries(spark, root, namespace, topic)
    if not entries:
        raise CommandFailed(f"the archive {root} has nothing of {namespace}:{topic}", code=Exit.NOT_FOUND)
    if ttl_ms is None:
        raise CommandFailed("an archive does not know how long messages live", hint="say it: --ttl 7d", code=Exit.USAGE)
    generation = max(entry.generation for entry in entries)
    ranges = covered(entry for entry in entries if entry.generation == generation)
    gaps = f"the archive has {len(ranges) - 1} gaps: figures are of what it holds" if len(ranges) > 1 else ""
    start = ranges[-1].start
    return TopicFacts(f"{namespace}:{topic}", generation, ttl_ms, time_of(start), not any(start), {}, gaps)


def archive_ranges(spark: SparkSession, root: str, facts: TopicFacts) -> tuple[list[tuple[int, int]], bool]:
    """The publish times that an archive holds of a topic's generation, and whether from the first message on."""
    namespace, _, topic = facts.topic.partition(":")
    entries = [each for each in _entries(spark, root, namespace, topic) if each.generation == facts.generation]
    ranges = covered(entries)
    return [(time_of(each.start), time_of(each.end)) for each in ranges], bool(ranges) and not any(ranges[0].start)


def _entries(spark: SparkSession, root: str, namespace: str, topic: str) -> list[Manifest]:
    return load_manifests(open_files(root, lambda: spark), topic_folder(namespace, topic))

"""Compares an archive with its topic over a time range, message by message, and its files with their manifests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from plainsong.cli.options import now_ms
from pyspark_plainsong.pipeline.archive.appending import starting_offsets
from pyspark_plainsong.pipeline.archive.layout import time_bound
from pyspark_plainsong.pipeline.archive.manifest import Range, holes
from pyspark_plainsong.pipeline.archive.reading import damaged, load_manifests, pieces_of, row_hash, rows_of, within

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.pipeline.archive.manifest import Manifest, Piece
    from pyspark_plainsong.pipeline.archive.writing import Log
    from pyspark_plainsong.pipeline.files import Files

#: Ids named for each kind of difference.
EXAMPLES = 5
#: The verdicts on a message, and whether an archive promises them.
VERDICTS: dict[str, tuple[str, bool]] = {
    "same": ("in the topic and in the archive, identical", True),
    "expired": ("in the archive, expired in the topic since", True),
    "gone": ("in the archive, removed from the topic before its ttl, by a time to live of their own", True),
    "waiting": ("in the topic, not archived yet", True),
    "missing": ("in the topic, missing in the archive", False),
    "different": ("in both, with another payload, routing key or headers", False),
    "twice": ("more than once in the archive", False),
}
_BAD = [name for name, (_, good) in VERDICTS.items() if not good]


@dataclass
class Findings:
    """The result of a comparison."""

    counts: dict[str, int]
    """Messages by verdict."""
    examples: dict[str, list[str]]
    """The first ids of each wrong verdict, as 40 hex digits."""
    damaged: dict[str, str] = field(default_factory=dict)
    """Damaged entries: folder → description. Their rows count as missing."""
    holes: list[Range] = field(default_factory=list)
    """Ranges that no entry holds, although later entries exist or the checkpoint is past them."""

    @property
    def is_good(self) -> bool:
        """True if the archive is complete and undamaged."""
        return not self.damaged and not self.holes and not any(self.counts.get(name) for name in _BAD)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        holes = [{"start": hole.start.hex(), "end": hole.end.hex()} for hole in self.holes]
        return {"good": self.is_good, **self.counts, "examples": self.examples, "damaged": self.damaged, "holes": holes}


class Verification:
    """One comparison.

    Args:
      bounds: the ids to compare, ``start <= id < end``.
      reached: the range that is archived by the checkpoint; None: there is no checkpoint.
    """

    def __init__(
        self, spark: SparkSession, files: Files, log: Log, bounds: Range, reached: Range | None = None
    ) -> None:
        self._spark = spark
        self._files = files
        self._log = log
        self._bounds = bounds
        self._reached = reached

    def run(self, source: Mapping[str, str], ttl_s: int) -> Findings:
        """Compare with the topic, and files with their manifests.

        Args:
          source: options of the connector: daemon, topic and isolation.
          ttl_s: the topic's.
        Raises:
          CommandFailed: a manifest cannot be read. What Spark raises.
        """
        entries, found, broken = self._checked()
        sound = [piece for piece in found if piece.entry.folder not in broken]
        ends = [entry.end for entry in entries] + ([self._reached.end] if self._reached else [])
        archived = self._hashed(rows_of(self._spark, self._files, sound))
        counts, examples = _compared(
            archived, self._hashed(self._in_topic(source)), ttl_s, max(ends, default=bytes(20))
        )
        return Findings(counts, examples, broken, self._holes(entries))

    def run_alone(self) -> Findings:
        """Compare files with their manifests, and find ranges that are missing between them. Raises as ``run``."""
        entries, _, broken = self._checked()
        return Findings({}, {}, broken, self._holes(entries))

    def _checked(self) -> tuple[list[Manifest], list[Piece], dict[str, str]]:
        entries = load_manifests(self._files, self._log.folder)
        found = within(pieces_of(entries), *self._bounds)
        return entries, found, damaged(self._spark, self._files, [piece.entry for piece in found])

    def _hashed(self, rows: DataFrame) -> DataFrame:
        return rows.select("message_id", row_hash().alias("hash"))

    def _in_topic(self, source: Mapping[str, str]) -> DataFrame:
        start, end = (starting_offsets(self._log, bound) for bound in self._bounds)
        options = {**source, "startingOffsets": start, "endingOffsets": end, "failOnDataLoss": "false"}
        return self._spark.read.format("plainsong").options(**options).load()

    def _holes(self, entries: Sequence[Manifest]) -> list[Range]:
        start, end = self._bounds
        found = [Range(max(hole.start, start), min(hole.end, end)) for hole in holes(entries, self._reached)]
        return [hole for hole in found if hole.start < hole.end]


def _compared(
    archived: DataFrame, theirs: DataFrame, ttl_s: int, archive_end: bytes
) -> tuple[dict[str, int], dict[str, list[str]]]:
    """The number of messages of each verdict, and the first ids of the wrong ones."""
    expired_before = time_bound(max(0, now_ms() - ttl_s * 1000))
    ours = archived.groupBy("message_id").agg(sf.count(sf.lit(1)).alias("times"), sf.min("hash").alias("ours"))
    theirs = theirs.withColumnRenamed("hash", "theirs")
    verdict = (
        sf.when(sf.col("times") > 1, "twice")
        .when(sf.col("theirs").isNull() & (sf.col("message_id") < sf.lit(expired_before)), "expired")
        .when(sf.col("theirs").isNull(), "gone")
        .when(sf.col("ours").isNull() & (sf.col("message_id") >= sf.lit(archive_end)), "waiting")
        .when(sf.col("ours").isNull(), "missing")
        .when(sf.col("ours") != sf.col("theirs"), "different")
        .otherwise("same")
    )
    verdicts = ours.join(theirs, "message_id", "full_outer").select("message_id", verdict.alias("verdict"))
    ids = sf.when(sf.col("verdict").isin(_BAD), sf.lower(sf.hex("message_id")))
    rows = verdicts.groupBy("verdict").agg(
        sf.count(sf.lit(1)).alias("count"), sf.slice(sf.sort_array(sf.collect_set(ids)), 1, EXAMPLES).alias("ids")
    )
    by_verdict = {row["verdict"]: row for row in rows.collect()}
    counts = {name: int(by_verdict[name]["count"]) if name in by_verdict else 0 for name in VERDICTS}
    return counts, {name: list(by_verdict[name]["ids"]) for name in _BAD if name in by_verdict}

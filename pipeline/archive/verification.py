"""Comparing an archive with its topic over a time range, message by message, and its files with their manifests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from pipeline.archive.appending import starting_offsets
from pipeline.archive.coverage import Range, covered, minus
from pipeline.archive.inspection import damaged
from pipeline.archive.layout import time_bound
from pipeline.archive.reading import load_manifests, pieces_of, rows_of, within
from pipeline.archive.rows import row_hash
from plainsong.cli.times import now_ms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.archive.coverage import Piece
    from pipeline.archive.files import Files
    from pipeline.archive.manifest import Manifest
    from pipeline.archive.writing import Log

#: Ids named for each kind of difference.
EXAMPLES = 5

#: What can become of a message, and whether that is what an archive promises.
VERDICTS: dict[str, tuple[str, bool]] = {
    "same": ("in the topic and in the archive, alike", True),
    "expired": ("in the archive, expired in the topic meanwhile", True),
    "gone": ("in the archive, gone from the topic before its ttl: by a time to live of its own", True),
    "waiting": ("in the topic, not archived yet", True),
    "missing": ("in the topic, missing in the archive", False),
    "different": ("in both, with another payload, routing key or headers", False),
    "twice": ("more than once in the archive", False),
}

_BAD = [name for name, (_, good) in VERDICTS.items() if not good]


@dataclass
class Findings:
    """What a comparison came to."""

    counts: dict[str, int]
    """By verdict."""
    examples: dict[str, list[str]]
    """Ids, as 40 hex digits; for verdicts that are not promised."""
    damaged: dict[str, str] = field(default_factory=dict)
    """What is wrong with an entry, by its folder; its rows count as missing."""
    holes: list[Range] = field(default_factory=list)
    """Ranges before the archive's end that no entry holds."""

    @property
    def is_good(self) -> bool:
        """Whether the archive holds what it promises."""
        return not self.damaged and not any(self.counts[name] for name, (_, good) in VERDICTS.items() if not good)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        holes = [{"start": hole.start.hex(), "end": hole.end.hex()} for hole in self.holes]
        return {"good": self.is_good, **self.counts, "examples": self.examples, "damaged": self.damaged, "holes": holes}


class Verification:
    """One comparison.

    Args:
      source: options of the connector that say which daemon, topic and isolation.
      ttl_s: of the topic.
      bounds: ids ``start <= id < end`` that are compared.
    """

    def __init__(
        self, spark: SparkSession, files: Files, log: Log, source: Mapping[str, str], ttl_s: int, bounds: Range
    ) -> None:
        self._spark = spark
        self._files = files
        self._log = log
        self._source = source
        self._ttl_s = ttl_s
        self._bounds = bounds

    def run(self) -> Findings:
        """Compare. Raises what Spark raises."""
        entries = load_manifests(self._files, self._log.folder)
        found = within(pieces_of(entries), *self._bounds)
        broken = damaged(self._spark, self._files, [piece.entry for piece in found])
        sound = [piece for piece in found if piece.entry.folder not in broken]
        counts, examples = self._compare(sound, max((entry.end for entry in entries), default=bytes(20)))
        return Findings(counts, examples, broken, self._holes(entries))

    def _compare(self, sound: Sequence[Piece], archive_end: bytes) -> tuple[dict[str, int], dict[str, list[str]]]:
        expired_before = time_bound(max(0, now_ms() - self._ttl_s * 1000))
        archived = self._hashed(rows_of(self._spark, self._files, sound)).groupBy("message_id")
        ours = archived.agg(sf.count(sf.lit(1)).alias("times"), sf.min("hash").alias("ours"))
        theirs = self._hashed(self._in_topic()).withColumnRenamed("hash", "theirs")
        verdict = (
            sf.when(sf.col("times") > 1, "twice")
            .when(sf.col("theirs").isNull() & (sf.col("message_id") < sf.lit(expired_before)), "expired")
            .when(sf.col("theirs").isNull(), "gone")
            .when(sf.col("ours").isNull() & (sf.col("message_id") >= sf.lit(archive_end)), "waiting")
            .when(sf.col("ours").isNull(), "missing")
            .when(sf.col("ours") != sf.col("theirs"), "different")
            .otherwise("same")
        )
        judged = ours.join(theirs, "message_id", "full_outer").select("message_id", verdict.alias("verdict"))
        ids = sf.when(sf.col("verdict").isin(_BAD), sf.lower(sf.hex("message_id")))
        rows = judged.groupBy("verdict").agg(
            sf.count(sf.lit(1)).alias("count"), sf.slice(sf.sort_array(sf.collect_set(ids)), 1, EXAMPLES).alias("ids")
        )
        told = {row["verdict"]: row for row in rows.collect()}
        counts = {name: int(told[name]["count"]) if name in told else 0 for name in VERDICTS}
        return counts, {name: list(told[name]["ids"]) for name in _BAD if name in told}

    def _hashed(self, rows: DataFrame) -> DataFrame:
        return rows.select("message_id", row_hash().alias("hash"))

    def _in_topic(self) -> DataFrame:
        start, end = (starting_offsets(self._log, bound) for bound in self._bounds)
        options = {**self._source, "startingOffsets": start, "endingOffsets": end, "failOnDataLoss": "false"}
        return self._spark.read.format("plainsong").options(**options).load()

    def _holes(self, entries: Sequence[Manifest]) -> list[Range]:
        held = covered(entries)
        if not held:
            return []
        inside = Range(max(held[0].start, self._bounds.start), min(held[-1].end, self._bounds.end))
        return minus(inside, held) if inside.start < inside.end else []

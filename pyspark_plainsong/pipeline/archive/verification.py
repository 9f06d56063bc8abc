"""Compares an archive with its topic over a time range, message by message, and its files with what the table records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from plainsong.cli.output import counted
from plainsong.positions import now_ms
from pyspark_plainsong.pipeline.archive import layout
from pyspark_plainsong.pipeline.archive.appending import starting_offsets
from pyspark_plainsong.pipeline.archive.reading import (
    CHECKSUM,
    archived,
    checksum,
    day_column,
    file_path,
    name_in,
    rows_in,
)
from pyspark_plainsong.pipeline.archive.table import DAY, TableFile, Tally, TopicTable
from pyspark_plainsong.pipeline.job import reason_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from pyspark.sql import DataFrame, Row, SparkSession

    from pyspark_plainsong.pipeline.archive.writing import Log

#: Ids named for each kind of difference.
EXAMPLES = 5
#: The verdicts on a message, and whether an archive promises them.
VERDICTS: dict[str, tuple[str, bool]] = {
    "same": ("in the topic and in the archive, identical", True),
    "expired": ("in the archive, expired in the topic since", True),
    "gone": ("in the archive, removed from the topic before its ttl, by a time to live of their own", True),
    "waiting": ("in the topic, not archived yet", True),
    "pruned": ("in the topic, pruned from the archive", True),
    "missing": ("in the topic, missing in the archive", False),
    "different": ("in both, with different contents", False),
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
    """Damaged files and days: path or day → description. Rows of damaged files count as missing."""

    @property
    def is_good(self) -> bool:
        """True if the archive is complete and undamaged."""
        return not self.damaged and not any(self.counts.get(name) for name in _BAD)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"good": self.is_good, **self.counts, "examples": self.examples, "damaged": self.damaged}


class Verification:
    """One comparison.

    Args:
      bounds: the ids to compare, ``start <= id < end``.
    """

    def __init__(self, spark: SparkSession, table: TopicTable, log: Log, bounds: layout.Range) -> None:
        self._spark = spark
        self._table = table
        self._log = log
        self._bounds = bounds

    def run(self, source: Mapping[str, str], ttl_s: int) -> Findings:
        """Compare with the topic, and files with the table's records. Raises what Spark raises.

        Args:
          source: options of the connector: daemon, topic and isolation.
          ttl_s: the topic's.
        """
        found, broken = self._checked()
        sound = [each for each in found if each.path not in broken]
        mine = rows_in(self._spark, self._table, sound).where(sf.col("generation") == self._log.generation)
        theirs = archived(self._in_topic(source), self._log.generation)
        counts, examples = self._compared(self._hashed(mine), self._hashed(theirs), ttl_s)
        return Findings(counts, examples, broken)

    def run_alone(self) -> Findings:
        """Compare files with the table's records. Raises the same as ``run``."""
        return Findings({}, {}, self._checked()[1])

    def _checked(self) -> tuple[list[TableFile], dict[str, str]]:
        days = {layout.day_of(_known_ms(each)) for each in self._bounds}
        first, last = min(days), max(days)
        found = [each for each in self._table.all_files() if first <= each.day <= last]
        wanted = [each for each in self._table.days(self._log.generation) if first <= each <= last]
        return found, damaged(self._spark, self._table, found, [self._log.generation], wanted)

    def _hashed(self, rows: DataFrame) -> DataFrame:
        start, end = (sf.lit(each) for each in self._bounds)
        inside = rows.where((sf.col("message_id") >= start) & (sf.col("message_id") < end))
        return inside.select("message_id", checksum().alias("hash"))

    def _in_topic(self, source: Mapping[str, str]) -> DataFrame:
        start, end = (starting_offsets(self._log, bound) for bound in self._bounds)
        options = {**source, "startingOffsets": start, "endingOffsets": end, "failOnDataLoss": "false"}
        return self._spark.read.format("plainsong").options(**options).load()

    def _compared(self, mine: DataFrame, theirs: DataFrame, ttl_s: int) -> tuple[dict[str, int], dict[str, list[str]]]:
        """The number of messages of each verdict, and the first ids of the wrong ones."""
        expired_before = layout.time_bound(max(0, now_ms() - ttl_s * 1000))
        pruned_before = layout.time_bound(self._table.start_ms(self._log.generation))
        archive_end = self._table.end(self._log.generation)
        ours = mine.groupBy("message_id").agg(sf.count(sf.lit(1)).alias("times"), sf.min("hash").alias("ours"))
        theirs = theirs.withColumnRenamed("hash", "theirs")
        verdict = (
            sf.when(sf.col("times") > 1, "twice")
            .when(sf.col("theirs").isNull() & (sf.col("message_id") < sf.lit(expired_before)), "expired")
            .when(sf.col("theirs").isNull(), "gone")
            .when(sf.col("ours").isNull() & (sf.col("message_id") >= sf.lit(archive_end)), "waiting")
            .when(sf.col("ours").isNull() & (sf.col("message_id") < sf.lit(pruned_before)), "pruned")
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


# --- damage ----------------------------------------------------------------------------------------


def damaged(
    spark: SparkSession,
    table: TopicTable,
    found: Sequence[TableFile],
    generations: Sequence[int],
    days: Collection[str],
) -> dict[str, str]:
    """Return a description of the damage, by path of a file or by day.

    Args:
      found: all files of the days.
      generations: those whose days are compared with their records.
      days: days that may have rows.
    """
    broken = altered(table, found)
    tallies: dict[tuple[int, str], Tally] = {}
    examined = examine(spark, table, [each for each in found if each.path not in broken])
    for file in found:
        if file.path in broken:
            continue
        is_now = examined[file.path]
        if isinstance(is_now, str):
            broken[file.path] = is_now
            continue
        for generation, tally in is_now.items():
            key = generation, file.day
            tallies[key] = tallies.get(key, Tally()) + tally
    incomplete = {each.day for each in found if each.path in broken}
    for day in sorted({*days, *(each.day for each in found)} - incomplete):
        for generation in generations:
            there, recorded = tallies.get((generation, day), Tally()), table.tally(generation, day)
            if there.rows != recorded.rows:
                broken[f"{DAY}={day}"] = f"has {counted(there.rows, 'row')}, not {recorded.rows}"
            elif there != recorded:
                broken[f"{DAY}={day}"] = "has different rows from those that were archived"
    return broken


def altered(table: TopicTable, found: Sequence[TableFile]) -> dict[str, str]:
    """Return a description of missing files and wrong sizes, by path; opens no file."""
    sizes: dict[str, dict[str, int]] = {}
    broken = {}
    for file in found:
        above, _, name = f"{table.folder}/{file.path}".rpartition("/")
        if above not in sizes:
            sizes[above] = table.files.sizes(above)
        size = sizes[above].get(name)
        if size is None:
            broken[file.path] = "is missing"
        elif size != file.size:
            broken[file.path] = f"has {size} bytes, not {file.size}"
    return broken


def examine(spark: SparkSession, table: TopicTable, found: Sequence[TableFile]) -> dict[str, dict[int, Tally] | str]:
    """Return the figures of each file by generation, or its damage. One scan; bisected if a file cannot be read."""
    if not found:
        return {}
    try:
        return _examined_at_once(spark, table, found)
    except Exception as error:  # noqa: BLE001 - Spark's errors for broken files vary
        if len(found) == 1:
            return {found[0].path: f"cannot be read: {reason_of(error)}"}
        half = len(found) // 2
        return {**examine(spark, table, found[:half]), **examine(spark, table, found[half:])}


def _examined_at_once(
    spark: SparkSession, table: TopicTable, found: Sequence[TableFile]
) -> dict[str, dict[int, Tally] | str]:
    namespace, topic = table.folder.split("/")
    is_wrong = (
        ~sf.col(CHECKSUM).eqNullSafe(checksum())
        | ~sf.col("namespace").eqNullSafe(sf.lit(namespace))
        | ~sf.col("topic").eqNullSafe(sf.lit(topic))
    )
    by_file = rows_in(spark, table, found).groupBy(file_path(), "generation", day_column().alias(DAY))
    columns = [sf.count(sf.lit(1)).alias("rows"), sf.bit_xor(CHECKSUM).alias("digest")]
    by_name: dict[str, list[Row]] = {}
    for row in by_file.agg(*columns, sf.count_if(is_wrong).alias("wrong")).collect():
        by_name.setdefault(name_in(row["path"]), []).append(row)
    result: dict[str, dict[int, Tally] | str] = {}
    for file in found:
        mine = by_name.get(name_in(file.path), [])
        wrong = sum(int(row["wrong"]) for row in mine)
        count = sum(int(row["rows"]) for row in mine)
        if wrong:
            result[file.path] = f"has {counted(wrong, 'row')} with a wrong checksum"
        elif any(str(row[DAY]) != file.day for row in mine):
            result[file.path] = "has rows of another day"
        elif file.rows is not None and count != file.rows:
            result[file.path] = f"has {counted(count, 'row')}, not {file.rows}"
        else:
            result[file.path] = {int(row["generation"]): Tally(int(row["rows"]), int(row["digest"])) for row in mine}
    return result


def _known_ms(message_id: bytes) -> int:
    """Return the publish time in an id that may be later than any day has a name for."""
    return min(layout.time_of(message_id), layout.day_start_ms("9999-12-31"))

"""The tables of the audit: their columns, how parts are merged, and the rows of each table.

A table consists of parts, which are written once and never change. Parts of a table without keys are concatenated;
parts of a table with keys hold subtotals, which are combined by key with a minimum, a maximum or a sum. These are
associative and commutative, so it does not matter whether and when parts are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from pyspark_plainsong.pipeline.audit.messages import ACCESS, CHANGE, DATASET, READ, UNKNOWN, WRITE

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

Total = Literal["min", "max", "sum"]


@dataclass(frozen=True)
class Table:
    """A table's name, columns and order within files; for a table of totals also its keys and aggregates."""

    name: str
    columns: StructType
    order: tuple[str, ...]
    keys: tuple[str, ...] = ()
    totals: tuple[tuple[str, Total], ...] = ()

    def merged(self, parts: DataFrame) -> DataFrame:
        """Merge the rows of parts into the table's rows: one per key, if there are keys."""
        if not self.keys:
            return parts.select(*self.columns.names)
        how = {"min": F.min, "max": F.max, "sum": F.sum}
        totals = [how[total](name).alias(name) for name, total in self.totals]
        return parts.groupBy(*self.keys).agg(*totals).select(*self.columns.names)

    def merged_arrow(self, parts: pa.Table) -> pa.Table:
        """Merge rows in memory, as ``merged`` does."""
        if not self.keys:
            return parts
        summed = parts.group_by(list(self.keys)).aggregate(list(self.totals))
        wanted = [*self.keys, *(f"{name}_{total}" for name, total in self.totals)]
        return summed.select(wanted).rename_columns(self.columns.names)


def totals(name: str, keys: tuple[str, ...], **columns: tuple[DataType, Total]) -> Table:
    """Declare a table with one row per combination of ``keys``, which are strings, and these totals."""
    fields = [StructField(key, StringType()) for key in keys]
    fields += [StructField(column, kind) for column, (kind, _total) in columns.items()]
    how = tuple((column, total) for column, (_kind, total) in columns.items())
    return Table(name, StructType(fields), order=keys, keys=keys, totals=how)


# --- trail -----------------------------------------------------------------------------------------


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


def trail_rows(parsed: DataFrame) -> DataFrame:
    """Select the good ones among parsed messages."""
    return parsed.where(F.col("reason").isNull()).select(*TRAIL.columns.names)


# --- accesses --------------------------------------------------------------------------------------


def access_rows(parsed: DataFrame) -> DataFrame:
    """Return a row per good access: namespace, program, run, dataset (the name alone), access, time."""
    good = parsed.where(F.col("reason").isNull() & (F.col("type") == ACCESS))
    name = F.substring(F.col("entity"), len(DATASET) + 2, 2_000)
    return good.select("namespace", "program", "run", name.alias("dataset"), "access", "time")


# --- usage -----------------------------------------------------------------------------------------

USAGE: Final = totals(
    "usage",
    ("namespace", "program", "dataset"),
    first_seen=(TimestampType(), "min"),
    last_seen=(TimestampType(), "max"),
    reads=(LongType(), "sum"),
    writes=(LongType(), "sum"),
    unknowns=(LongType(), "sum"),
)


def usage_rows(parsed: DataFrame) -> DataFrame:
    """Return the rows that parsed messages add to the registry. Times are those of events, which may be out of order."""
    return USAGE.merged(
        access_rows(parsed).select(
            *USAGE.keys,
            F.col("time").alias("first_seen"),
            F.col("time").alias("last_seen"),
            *(
                F.when(F.col("access") == access, 1).otherwise(0).cast("bigint").alias(f"{access}s")
                for access in (READ, WRITE, UNKNOWN)
            ),
        )
    )


# --- dead letters ----------------------------------------------------------------------------------

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


def dead_letter_rows(parsed: DataFrame) -> DataFrame:
    """Select the bad ones among parsed messages."""
    return parsed.where(F.col("reason").isNotNull()).select(*DEAD_LETTERS.columns.names)

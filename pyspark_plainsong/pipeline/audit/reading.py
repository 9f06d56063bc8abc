"""Reads the tables as of one batch of messages, with or without Spark, and searches them in little memory.

Everything read by one manifest is consistent. Its files stay for a while after a merge (``keep_s`` of `Keeping`); a
query that takes longer fails with a missing file, and never returns wrong rows.
"""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql.pandas.types import to_arrow_schema

from plainsong.cli.command import Exit
from pyspark_plainsong.pipeline.audit.manifest import TablesManifest, TablesUnreadable, load_manifest
from pyspark_plainsong.pipeline.audit.messages import PROGRAM
from pyspark_plainsong.pipeline.files import literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from pyspark_plainsong.pipeline.audit.manifest import Part
    from pyspark_plainsong.pipeline.audit.table import Table

_TRIES = 3


def manifest_of(root: Path) -> TablesManifest:
    """Load the manifest in a folder. Raises TablesUnreadable: there is none."""
    manifest = load_manifest(root)
    if manifest is None:
        hint = "plainsong pipeline run audit run TOPIC --root DIR makes them"
        raise TablesUnreadable(f"there are no audit tables in {root}", hint=hint, code=Exit.NOT_FOUND)
    return manifest


def paths(root: Path, parts: list[Part]) -> list[str]:
    """Return the paths of the parts' files."""
    return [str(root.absolute() / part.path / name) for part in parts for name in part.files]


def unmerged(spark: SparkSession, root: Path, table: Table, parts: list[Part]) -> DataFrame:
    """Read the rows of parts, unmerged."""
    if not parts:
        return spark.createDataFrame([], table.columns)
    return spark.read.schema(table.columns).parquet(*map(literal, paths(root, parts)))


def frame(spark: SparkSession, root: Path, table: Table, manifest: TablesManifest | None = None) -> DataFrame:
    """Read a table with Spark, as of ``manifest`` (by default the newest). Raises TablesUnreadable."""
    as_of = manifest or manifest_of(root)
    return table.merged(unmerged(spark, root, table, as_of.of(table.name)))


def arrow(
    root: Path, table: Table, where: ds.Expression | None = None, manifest: TablesManifest | None = None
) -> pa.Table:
    """Read a table into memory, without Spark.

    Args:
      where: selects rows; for a table with keys it may use only the keys.
    Raises:
      TablesUnreadable: there are no tables.
      FileNotFoundError: the files of an old ``manifest`` are gone.
    """
    for left in reversed(range(_TRIES)):
        as_of = manifest or manifest_of(root)
        try:
            return table.merged_arrow(scan(root, table, as_of, where))
        except FileNotFoundError:
            # The files were merged and removed since the manifest was read: retry with the newest one.
            if manifest is not None or not left:
                raise
    raise AssertionError


def scan(root: Path, table: Table, manifest: TablesManifest, where: ds.Expression | None = None) -> pa.Table:
    """Read the rows of a table's parts that match ``where``, unmerged."""
    schema = to_arrow_schema(table.columns, timezone="UTC")
    parts = manifest.of(table.name)
    if not parts:
        return schema.empty_table()
    return ds.dataset(paths(root, parts), schema=schema, format="parquet").to_table(filter=where)


# --- searching -------------------------------------------------------------------------------------
#
# Top-N search in bounded memory.

Order = Literal["ascending", "descending"]


def all_of(values: Mapping[str, str | None]) -> ds.Expression | None:
    """Return the condition that columns have these values; None matches any."""
    return together([ds.field(name) == value for name, value in values.items() if value is not None])


def together(conditions: Sequence[ds.Expression]) -> ds.Expression | None:
    """Return the conjunction of conditions; None without any."""
    return reduce(and_, conditions) if conditions else None


def first_rows(
    root: Path, table: Table, where: ds.Expression | None, by: Sequence[str], order: Order, limit: int
) -> pa.Table:
    """Return the first ``limit`` rows, ordered by some columns, that match ``where`` in a table without keys.

    Memory holds ``limit`` rows and one or two batches of a file. Raises TablesUnreadable, FileNotFoundError.
    """
    schema = to_arrow_schema(table.columns, timezone="UTC")
    parts = manifest_of(root).of(table.name)
    found = schema.empty_table()
    if not parts:
        return found
    keys = [(name, order) for name in by]
    for batch in ds.dataset(paths(root, parts), schema=schema, format="parquet").to_batches(filter=where):
        if batch.num_rows:
            both = pa.concat_tables([found, pa.Table.from_batches([batch])])
            found = both.take(pc.sort_indices(both.select(list(by)), sort_keys=keys)[:limit])
    return found


# --- trail -----------------------------------------------------------------------------------------


def trail_filter(
    *,
    namespace: str | None = None,
    entity: str | None = None,
    user: str | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
) -> ds.Expression | None:
    """Return the conjunction of the given criteria. Times are those of events, ``start`` inclusive, ``end`` exclusive.

    The entity ``program:NAME`` also matches the program's accesses.
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

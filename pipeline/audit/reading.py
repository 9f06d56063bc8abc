"""Reading the tables: as they were after one batch of messages, with Spark or without.

Everything read by one manifest fits together. The files that it names stay for a while after they were merged into
others (`keep_s` of `Keeping`); a query that takes longer than that fails with a missing file, never with wrong rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.dataset as ds
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.audit.manifest import Manifest, TablesUnreadable, load_manifest
from plainsong.cli.verb import Exit

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from pipeline.audit.manifest import Part
    from pipeline.audit.table import Table

_TRIES = 3


def manifest_of(root: Path) -> Manifest:
    """The manifest in a folder. Raises TablesUnreadable when there is none."""
    manifest = load_manifest(root)
    if manifest is None:
        hint = "plainsong pipeline run audit run TOPIC --root DIR makes them"
        raise TablesUnreadable(f"there are no audit tables in {root}", hint=hint, code=Exit.NOT_FOUND)
    return manifest


def paths(root: Path, parts: list[Part]) -> list[str]:
    """The files of parts, as paths."""
    return [str(root.absolute() / part.path / name) for part in parts for name in part.files]


def unmerged(spark: SparkSession, root: Path, table: Table, parts: list[Part]) -> DataFrame:
    """The rows of parts as they stand in the files."""
    if not parts:
        return spark.createDataFrame([], table.columns)
    return spark.read.schema(table.columns).parquet(*paths(root, parts))


def frame(spark: SparkSession, root: Path, table: Table, manifest: Manifest | None = None) -> DataFrame:
    """A table for Spark, as of `manifest` (default: the newest). Raises TablesUnreadable."""
    as_of = manifest or manifest_of(root)
    return table.merged(unmerged(spark, root, table, as_of.of(table.name)))


def arrow(root: Path, table: Table, where: ds.Expression | None = None, manifest: Manifest | None = None) -> pa.Table:
    """A table in memory, without Spark: the rows that fit `where`, which for a table of totals may name keys only.

    Raises TablesUnreadable; and FileNotFoundError when `manifest` is older than what is kept.
    """
    for left in reversed(range(_TRIES)):
        as_of = manifest or manifest_of(root)
        try:
            return table.merged_arrow(scan(root, table, as_of, where))
        except FileNotFoundError:
            # Merged and cleaned away since the manifest was read: the newest knows where the rows went.
            if manifest is not None or not left:
                raise
    raise AssertionError


def scan(root: Path, table: Table, manifest: Manifest, where: ds.Expression | None = None) -> pa.Table:
    """The rows of a table's parts that fit `where`, unmerged."""
    schema = to_arrow_schema(table.columns, timezone="UTC")
    parts = manifest.of(table.name)
    if not parts:
        return schema.empty_table()
    return ds.dataset(paths(root, parts), schema=schema, format="parquet").to_table(filter=where)

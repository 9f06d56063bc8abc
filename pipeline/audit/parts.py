"""Writing a part of a table: a few Parquet files in a folder of their own, on the disk before anyone is told."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq

from pipeline.audit.manifest import Part, sync

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from pipeline.audit.table import Table

#: Where parts lie within the tables' folder.
DATA: Final = "data"
#: Merged parts have files of about this size: large enough to be few, small enough to be read in parallel.
FILE_BYTES: Final = 128 << 20


def new_folder(sequence: int) -> str:
    """A path for parts, never used before: who died while writing one like it left it incomplete."""
    return f"{DATA}/{sequence:012d}-{secrets.token_hex(4)}"


def write_part(rows: DataFrame, table: Table, root: Path, folder: str, *, level: int = 0) -> Part | None:
    """Write rows as a part of a table under `folder`; None when there are none. Nobody sees them before a manifest."""
    path = root / folder / table.name
    # Times as 64-bit integers have bounds in the files' footers, by which readers skip what they do not need.
    rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    ordered = rows.select(*table.columns.names).sortWithinPartitions(*table.order)
    ordered.write.option("compression", "zstd").parquet(str(path.absolute()))
    files = []
    count = size = 0
    for file in sorted(path.glob("part-*.parquet")):
        in_file = pq.read_metadata(file).num_rows
        if in_file:
            sync(file)
            files.append(file.name)
            count += in_file
            size += file.stat().st_size
    if not files:
        return None
    for each in (path, path.parent, path.parent.parent):
        sync(each)
    return Part(table.name, f"{folder}/{table.name}", tuple(files), count, size, level)


def merge_parts(parts: list[Part], table: Table, root: Path, folder: str, frame: DataFrame) -> Part | None:
    """Write the rows of parts, which `frame` reads, as one part of the next level."""
    files = max(1, math.ceil(sum(part.bytes for part in parts) / FILE_BYTES))
    merged = table.merged(frame)
    spread = merged.coalesce(1) if files == 1 else merged.repartitionByRange(files, *table.order)
    return write_part(spread, table, root, folder, level=max(part.level for part in parts) + 1)

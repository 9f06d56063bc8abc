"""Writing a part of a table: a few Parquet files in a folder of their own, on the disk before anyone is told."""

from __future__ import annotations

import math
import re
import secrets
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq

from pipeline.archive.files import LocalFiles
from pipeline.audit.manifest import Part

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

    from pipeline.audit.table import Table

#: Where parts lie within the tables' folder.
DATA: Final = "data"
#: What the folders in there are called that `new_folder` makes.
FOLDER: Final = re.compile(r"\d{12,}-[0-9a-f]{8}")
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
    disk, where = LocalFiles(root), f"{folder}/{table.name}"
    counts = {name: pq.read_metadata(path / name).num_rows for name in disk.sizes(where)}
    sizes = {name: size for name, size in disk.sizes(where).items() if counts[name]}
    if not sizes:
        disk.remove(where)
        return None
    disk.settle(where)
    return Part(table.name, where, tuple(sizes), sum(counts.values()), sum(sizes.values()), level)


def merge_parts(parts: list[Part], table: Table, root: Path, folder: str, frame: DataFrame) -> Part | None:
    """Write the rows of parts, which `frame` reads, as one part of the next level."""
    files = max(1, math.ceil(sum(part.bytes for part in parts) / FILE_BYTES))
    merged = table.merged(frame)
    spread = merged.coalesce(1) if files == 1 else merged.repartitionByRange(files, *table.order)
    return write_part(spread, table, root, folder, level=max(part.level for part in parts) + 1)

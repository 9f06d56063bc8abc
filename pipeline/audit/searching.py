"""Searching a table without holding it: the first rows by some columns, out of any number."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyspark.sql.pandas.types import to_arrow_schema

from pipeline.audit.reading import manifest_of, paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.audit.table import Table

Order = Literal["ascending", "descending"]


def all_of(values: Mapping[str, str | None]) -> ds.Expression | None:
    """That columns have these values; of None any will do."""
    return together([ds.field(name) == value for name, value in values.items() if value is not None])


def together(conditions: Sequence[ds.Expression]) -> ds.Expression | None:
    """All of these conditions; None when there are none."""
    return reduce(and_, conditions) if conditions else None


def first_rows(
    root: Path, table: Table, where: ds.Expression | None, by: Sequence[str], order: Order, limit: int
) -> pa.Table:
    """The first `limit` rows of a table without keys that fit `where`, by these columns.

    In memory are `limit` rows and a batch or two of files. Raises TablesUnreadable, FileNotFoundError.
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

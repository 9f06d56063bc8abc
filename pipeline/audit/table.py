"""What a table of the audit is: its columns, and how two parts of it make one.

A table is kept as parts that are written once and never changed. Parts of a table without keys stand beside each other;
parts of a table with keys hold subtotals, and are added up by key: a minimum, a maximum or a sum, in any order and any
grouping. So parts can be merged, or read unmerged, whenever it suits, and the table is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StringType, StructField, StructType

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType

Total = Literal["min", "max", "sum"]


@dataclass(frozen=True)
class Table:
    """A table's name, columns, the order within its files, and for one of totals: its keys and how each total adds up."""

    name: str
    columns: StructType
    order: tuple[str, ...]
    keys: tuple[str, ...] = ()
    totals: tuple[tuple[str, Total], ...] = ()

    def merged(self, parts: DataFrame) -> DataFrame:
        """The rows of parts, put together, as the table's rows: one a key, where there are keys."""
        if not self.keys:
            return parts.select(*self.columns.names)
        how = {"min": F.min, "max": F.max, "sum": F.sum}
        totals = [how[total](name).alias(name) for name, total in self.totals]
        return parts.groupBy(*self.keys).agg(*totals).select(*self.columns.names)

    def merged_arrow(self, parts: pa.Table) -> pa.Table:
        """The same of rows that are in memory."""
        if not self.keys:
            return parts
        summed = parts.group_by(list(self.keys)).aggregate(list(self.totals))
        wanted = [*self.keys, *(f"{name}_{total}" for name, total in self.totals)]
        return summed.select(wanted).rename_columns(self.columns.names)


def totals(name: str, keys: tuple[str, ...], **columns: tuple[DataType, Total]) -> Table:
    """A table with one row for each combination of `keys`, which are strings, and these totals."""
    fields = [StructField(key, StringType()) for key in keys]
    fields += [StructField(column, kind) for column, (kind, _total) in columns.items()]
    how = tuple((column, total) for column, (_kind, total) in columns.items())
    return Table(name, StructType(fields), order=keys, keys=keys, totals=how)

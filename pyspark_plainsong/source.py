"""The data source `plainsong`: Spark finds it by the package's name and asks it for readers and writers."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pyspark_plainsong.columns import check_schema, read_schema
from pyspark_plainsong.options import ReadOptions, WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """The entry point of ``format("plainsong")`` for reads and writes of tables and streams.

    Spark creates one per use, in a process of its own. It passes the arguments of ``writer`` and ``streamWriter`` by
    name.
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Check what can be checked before Spark says whether it will read or write, so that ``load()`` raises errors.

        Raises:
          Lacking: pyarrow is not installed. Spark's own import, later, would fail without a hint.
          BadOption: the options are those of a read, and fit neither a table nor a stream.
        """
        check_pyarrow()
        ReadOptions.check(options)
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """Return the name in ``format(…)``, and after ``USING`` in SQL."""
        return "plainsong"

    def schema(self) -> StructType:
        """Return all columns, for a user who gives no schema. Needs no daemon, so views can be created without one.

        Raises:
          BadOption: the options are neither for a table nor for a stream. ``load()`` calls this without a schema.
        """
        return read_schema(include_transaction=ReadOptions.of_either(self.options).include_transaction)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of a table. Raises BadOption, BadSchema."""
        from pyspark_plainsong.readers import BatchReader

        return BatchReader(ReadOptions.parse(self.options, streaming=False), check_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader of a stream. Raises BadOption, BadSchema."""
        from pyspark_plainsong.readers import StreamReader

        return StreamReader(ReadOptions.parse(self.options, streaming=True), check_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer of a table. Raises ValueError."""
        from pyspark_plainsong.writers import BatchWriter

        return BatchWriter(WriteOptions.parse(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Return a writer of a stream. Raises ValueError."""
        from pyspark_plainsong.writers import StreamWriter

        return StreamWriter(WriteOptions.parse(self.options, streaming=True), schema, overwrite)


class Lacking(ImportError):
    """A package is not installed for the interpreter of Spark's workers."""


def check_pyarrow() -> None:
    """Check that Spark's interpreter has pyarrow. Raises Lacking."""
    if find_spec("pyarrow") is None:
        raise Lacking(
            f"Spark's Python workers run {sys.executable}, which has no pyarrow: install plainsong-spark there, or "
            "set PYSPARK_PYTHON to an interpreter that has it, before the session starts"
        )

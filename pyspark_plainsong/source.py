"""The data source ``plainsong``: what Spark finds by this package's name, and asks for readers and writers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

from pyspark_plainsong.lacking import check_pyarrow
from pyspark_plainsong.option_text import TRUTH
from pyspark_plainsong.options import ReadOptions, WriteOptions
from pyspark_plainsong.schema import check_schema, read_schema

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """``spark.read.format("plainsong")`` and its three sisters.

    Spark makes one for every use, in a process of its own, and names the arguments of ``writer`` and ``streamWriter``.
    """

    def __init__(self, options: dict[str, str]) -> None:
        """Raises Lacking: before Spark's own import of pyarrow fails without a word on what to do."""
        check_pyarrow()
        super().__init__(options)

    @classmethod
    def name(cls) -> str:
        """What stands in ``format(…)``, and behind ``USING`` in SQL."""
        return "plainsong"

    def schema(self) -> StructType:
        """All columns, where the user gives no schema. Needs no daemon: a view can be made without one."""
        given = self.options.get("includetransaction", "").strip().lower()
        return read_schema(include_transaction=TRUTH.get(given, False))  # the reader refuses what is neither

    def reader(self, schema: StructType) -> DataSourceReader:
        """Reads a table. Raises BadOption, BadSchema."""
        from pyspark_plainsong.batch_reader import BatchReader

        return BatchReader(ReadOptions.parse(self.options, streaming=False), check_schema(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Reads a stream. Raises BadOption, BadSchema."""
        from pyspark_plainsong.stream_reader import StreamReader

        return StreamReader(ReadOptions.parse(self.options, streaming=True), check_schema(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Writes a table. Raises ValueError."""
        from pyspark_plainsong.batch_writer import BatchWriter

        return BatchWriter(WriteOptions.parse(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """Writes a stream. Raises ValueError."""
        from pyspark_plainsong.stream_writer import StreamWriter

        return StreamWriter(WriteOptions.parse(self.options, streaming=True), schema, overwrite)

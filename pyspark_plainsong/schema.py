"""The columns of a topic read as a table, and which of them a query asks for."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

if TYPE_CHECKING:
    from pyspark.sql.types import DataType

_STRINGS = MapType(StringType(), StringType())

COLUMNS: dict[str, DataType] = {
    "namespace": StringType(),
    "topic": StringType(),
    "message_id": BinaryType(),
    "publish_timestamp": TimestampType(),
    "seq_id": IntegerType(),
    "write_timestamp": TimestampType(),
    "payload_seq_id": IntegerType(),
    "payload": BinaryType(),
    "routing_key": StringType(),
    "headers": _STRINGS,
}
#: Only with includeTransaction, or when it is asked for by name.
TRANSACTION_COLUMN = "transaction_write_pointer"
#: Of which a message may have none.
_MAY_BE_NULL = frozenset({"write_timestamp", "payload_seq_id", "routing_key", "headers", TRANSACTION_COLUMN})
_ALL: dict[str, DataType] = {**COLUMNS, TRANSACTION_COLUMN: LongType()}


class BadSchema(ValueError):
    """A schema that names a column there is not, or gives one another type."""


def read_schema(*, include_transaction: bool) -> StructType:
    """All columns, in their order. All are nullable for Spark; docs/spark.md says which ones are ever null."""
    columns = _ALL if include_transaction else COLUMNS
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def check_schema(asked: StructType) -> StructType:
    """``asked`` if it is some of the columns, in any order.

    Raises:
      BadSchema: a column is unknown, is there twice, has another type, or is said to be never null and may be.
    """
    seen: set[str] = set()
    for field in asked.fields:
        kind = _ALL.get(field.name)
        if kind is None:
            close = get_close_matches(field.name.lower(), _ALL, 1, cutoff=0.5)
            near = f"is {close[0]} meant?" if close else f"there are {', '.join(_ALL)}"
            raise BadSchema(f"there is no column {field.name}: {near}")
        if field.name in seen:
            raise BadSchema(f"the column {field.name} is there twice")
        seen.add(field.name)
        if not _same(field.dataType, kind):
            raise BadSchema(
                f"the column {field.name} is {kind.simpleString()}, not {field.dataType.simpleString()}: "
                "read it as it is, then cast it"
            )
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise BadSchema(f"the column {field.name} may be null: leave NOT NULL out")
    return asked


def _same(asked: DataType, kind: DataType) -> bool:
    """Whether they are one type; whether values of a map may be null is nobody's concern."""
    return asked.simpleString() == kind.simpleString()

"""The columns of a topic that is read as a table, and the columns that a DataFrame is written from."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.sql import types
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
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
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
#: Present only with includeTransaction, or if the schema names it.
TRANSACTION_COLUMN = "transaction_write_pointer"
#: Columns that may be null.
_MAY_BE_NULL = frozenset({"write_timestamp", "payload_seq_id", "routing_key", "headers", TRANSACTION_COLUMN})
_ALL: dict[str, DataType] = {**COLUMNS, TRANSACTION_COLUMN: LongType()}


class BadSchema(ValueError):
    """A schema that names an unknown column, or gives a column the wrong type."""


def read_schema(*, include_transaction: bool) -> StructType:
    """Return all columns, in order. All are declared nullable; docs/spark.md says which ones can be null."""
    columns = _ALL if include_transaction else COLUMNS
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def check_schema(asked: StructType) -> StructType:
    """Check a user's schema, which may have any of the columns in any order, and return it.

    Raises:
      BadSchema: a column is unknown, duplicate, of the wrong type, or declared not null although it may be null.
    """
    seen: set[str] = set()
    for field in asked.fields:
        kind = _ALL.get(field.name)
        if kind is None:
            close = get_close_matches(field.name.lower(), _ALL, 1, cutoff=0.5)
            near = f"did you mean {close[0]}?" if close else f"the columns are {', '.join(_ALL)}"
            raise BadSchema(f"unknown column {field.name}: {near}")
        if field.name in seen:
            raise BadSchema(f"the column {field.name} occurs twice")
        seen.add(field.name)
        if not _same(field.dataType, kind):
            raise BadSchema(
                f"the column {field.name} is {kind.simpleString()}, not {field.dataType.simpleString()}: read it with "
                "its own type, then cast it"
            )
        if not field.nullable and field.name in _MAY_BE_NULL:
            raise BadSchema(f"the column {field.name} may be null: remove NOT NULL")
    return asked


def _same(asked: DataType, kind: DataType) -> bool:
    """True if two types are equal, ignoring whether the values of a map may be null."""
    return asked.simpleString() == kind.simpleString()


# --- writing ---------------------------------------------------------------------------------------

#: Maximum size of a chunk's payloads, unless a single one is larger: far below the largest body that daemons accept.
MAX_CHUNK_BYTES = 4 << 20
ROUTING_KEY = "routingKey"
_TEXT_OR_BYTES = (types.BinaryType, types.StringType)
_WHOLE = (types.ByteType, types.ShortType, types.IntegerType, types.LongType)
#: The types that a column may have, and their names in errors.
_KNOWN: dict[str, tuple[tuple[type[types.DataType], ...], str]] = {
    "payload": (_TEXT_OR_BYTES, "BINARY or STRING"),
    "topic": ((types.StringType,), "STRING"),
    "routing_key": ((types.StringType,), "STRING"),
    "headers": ((types.MapType,), "MAP<STRING,STRING>"),
    "ttl_seconds": (_WHOLE, "INT"),
}

#: Kafka's headers may repeat a name and have any bytes; a message's attributes have unique names and are text.
_OF_KAFKA = "; map_from_entries(transform(headers, h -> struct(h.key, decode(h.value, 'UTF-8')))) converts Kafka's"


class Chunk(NamedTuple):
    """The messages of one request, all of one topic."""

    topic: str
    payloads: Sequence[bytes]
    ttls_s: Sequence[int | None] | None
    attributes: Sequence[Mapping[str, str]] | None


@dataclass(frozen=True)
class WriteColumns:
    """The positions of the columns in a batch; None: the DataFrame has no such column."""

    payload: int
    payload_is_text: bool
    topic: int | None = None
    routing_key: int | None = None
    headers: int | None = None
    ttl_seconds: int | None = None

    @classmethod
    def of(cls, schema: types.StructType) -> WriteColumns:
        """Find the columns by name, in any order and case.

        Raises:
          ValueError: payload is missing, or a column is duplicate, of the wrong type, or cannot be written.
        """
        found: dict[str, int] = {}
        for index, field in enumerate(schema.fields):
            name = field.name.lower()
            if name not in _KNOWN:
                raise ValueError(
                    f"column {field.name} cannot be written: a message has {', '.join(_KNOWN)}; select() only those"
                )
            if name in found:
                raise ValueError(f"column {field.name} occurs twice")
            allowed, called = _KNOWN[name]
            if not isinstance(field.dataType, allowed) or not _map_of_strings(field.dataType):
                hint = _OF_KAFKA if isinstance(field.dataType, types.ArrayType) and name == "headers" else ""
                kind = field.dataType.simpleString().upper()
                raise ValueError(f"column {field.name} is {kind}; it must be {called}{hint}")
            found[name] = index
        if "payload" not in found:
            raise ValueError(f"there is no column payload (BINARY or STRING) among {', '.join(schema.names) or 'none'}")
        is_text = isinstance(schema.fields[found["payload"]].dataType, types.StringType)
        return cls(payload_is_text=is_text, **found)

    def chunks(self, batch: pa.RecordBatch, topic: str | None, max_rows: int) -> Iterator[Chunk]:
        """Yield the messages of a batch; those of one topic keep the batch's order.

        Args:
          topic: the topic of all rows; None: the column ``topic`` names it.
        Raises:
          ValueError: a value cannot be written; the error names the column.
        """
        payloads = self._payloads(batch)
        ttls_s = None if self.ttl_seconds is None else _values(batch, self.ttl_seconds)
        attributes = self._attributes(batch)
        if topic is None:
            assert self.topic is not None
            parts = _rows_by_topic(_values(batch, self.topic))
        else:
            parts = {topic: None}
        for name, rows in parts.items():
            own = _picked(payloads, rows), _picked(ttls_s, rows), _picked(attributes, rows)
            yield from _cut(name, *own, max_rows)

    def _payloads(self, batch: pa.RecordBatch) -> list[bytes]:
        column = batch.column(self.payload)
        if column.null_count:
            raise ValueError(
                "payload is null: a message needs a payload, which may be empty; filter or coalesce() first"
            )
        # Spark's STRING need not be valid UTF-8, and a payload is bytes: do not decode.
        found: list[bytes] = (column.cast("binary") if self.payload_is_text else column).to_pylist()
        return found

    def _attributes(self, batch: pa.RecordBatch) -> list[dict[str, str]] | None:
        """Return the attributes of each message; None if no message of the batch has any."""
        headers = self.headers is not None and _values(batch, self.headers)
        keys = self.routing_key is not None and _values(batch, self.routing_key)
        if not (headers and any(headers)) and not (keys and any(key is not None for key in keys)):
            return None
        found = [_header_map(pairs) for pairs in headers] if headers else [{} for _ in range(batch.num_rows)]
        if keys:
            for attributes, key in zip(found, keys, strict=True):
                if key is not None:
                    attributes[ROUTING_KEY] = key
        return found


def _map_of_strings(kind: types.DataType) -> bool:
    """True unless the type is a map with keys or values other than strings."""
    if not isinstance(kind, types.MapType):
        return True
    return isinstance(kind.keyType, types.StringType) and isinstance(kind.valueType, types.StringType)


def _values(batch: pa.RecordBatch, index: int) -> list[Any]:
    try:
        values: list[Any] = batch.column(index).to_pylist()
    except UnicodeDecodeError as error:
        name = batch.schema.names[index]
        raise ValueError(
            f"column {name} has a value that is not UTF-8: {error}; only a payload can have arbitrary bytes"
        ) from error
    return values


def _header_map(pairs: Sequence[tuple[str, str | None]] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in pairs or ():
        if value is None:
            raise ValueError(f"header {name} is null: an attribute is a string; remove the pair from the map")
        if name == ROUTING_KEY:
            raise ValueError(f"headers contain {ROUTING_KEY}: it has a column of its own, routing_key")
        found[name] = value
    return found


def _rows_by_topic(topics: Sequence[str | None]) -> dict[str, list[int] | None]:
    """The rows of each topic; None: all rows."""
    distinct = dict.fromkeys(topics)
    if None in distinct:
        raise ValueError("topic is null: every row needs a topic")
    if len(distinct) == 1:
        return {str(name): None for name in distinct}
    rows: dict[str, list[int]] = {}
    for index, name in enumerate(topics):
        rows.setdefault(str(name), []).append(index)
    return dict(rows)


def _picked(values: Any, rows: list[int] | None) -> Any:
    return values if values is None or rows is None else [values[row] for row in rows]


def _cut(name: str, payloads: list[bytes], ttls_s: Any, attributes: Any, max_rows: int) -> Iterator[Chunk]:
    """Yield chunks of at most ``max_rows`` rows and about ``MAX_CHUNK_BYTES``."""
    start = 0
    while start < len(payloads):
        stop = _end_of_chunk(payloads, attributes, start, min(len(payloads), start + max_rows))
        yield Chunk(
            name,
            payloads[start:stop],
            None if ttls_s is None else ttls_s[start:stop],
            None if attributes is None else attributes[start:stop],
        )
        start = stop


def _end_of_chunk(payloads: list[bytes], attributes: Any, start: int, stop: int) -> int:
    if attributes is None and sum(map(len, payloads[start:stop])) <= MAX_CHUNK_BYTES:
        return stop
    size = 0
    for index in range(start, stop):
        size += len(payloads[index])
        if attributes is not None:
            size += sum(len(name) + len(value) for name, value in attributes[index].items())
        if size > MAX_CHUNK_BYTES and index > start:
            return index
    return stop

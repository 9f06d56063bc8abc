"""A write task: stores its rows under a segment of its own, in chunks, each exactly once.

Every attempt of a task has its own segment, a speculative copy too. The commit lists the segments of the attempts that
Spark counts; rows of other attempts stay invisible, however late they arrive.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext

from pyspark_plainsong.columns import WriteColumns
from pyspark_plainsong.publishing import Stored, TaskStored
from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_plainsong.calls import Calls
    from pyspark_plainsong.columns import Chunk
    from pyspark_plainsong.options import WriteOptions

QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True)
class Staging:
    """The parameters of a save's or query's write tasks. Sent to executors."""

    columns: WriteColumns
    topic: str | None
    """None: the column ``topic`` names it."""
    max_rows: int
    """Rows per request, at most."""
    producer: str | None
    """None: the streaming query's id."""
    write_pointer: int | None = None
    """The outer transaction's; None: rows are staged."""
    ttl_s: int | None = None

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType, overwrite: bool, producer: str | None) -> Staging:
        """Create it from the user's options and columns.

        Raises:
          ValueError: options and columns contradict each other, or a column cannot be written.
        """
        if overwrite:
            raise ValueError("a topic can only be appended to: use mode('append'), and in streams outputMode('append')")
        columns = WriteColumns.of(schema)
        if (options.topic is None) == (columns.topic is None):
            both = "both the option topic and a column topic" if columns.topic is not None else "neither"
            raise ValueError(f"give the option topic, or a column topic of type STRING; found {both}")
        return cls(
            columns,
            options.topic,
            options.store_batch_size,
            producer,
            options.transaction_write_pointer,
            options.ttl_s,
        )

    def run(self, calls: Calls, batches: Iterable[pa.RecordBatch]) -> TaskStored:
        """Store all rows of one partition; return what the commit needs.

        Raises:
          ValueError: a value cannot be written.
          BrokerError: a chunk was not stored, or may not have been; Spark runs the task again, with another segment.
        """
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(QUERY_ID)
        producer = self.producer or query_id
        if producer is None:
            raise RuntimeError(f"Spark did not identify the query of these rows: no property {QUERY_ID}")
        segment = uuid.uuid4().hex
        topics: dict[str, _Topic] = {}
        for batch in batches:
            for chunk in self.columns.chunks(batch, self.topic, self.max_rows):
                topic = topics.get(chunk.topic)
                if topic is None:
                    topic = topics[chunk.topic] = self._begun(calls, chunk.topic, producer, segment)
                topic.store(chunk)
        stored = {name: topic.stored for name, topic in topics.items()}
        return TaskStored(0 if context is None else context.partitionId(), segment, stored, query_id)

    def _begun(self, calls: Calls, name: str, producer: str, segment: str) -> _Topic:
        """Bind the rows to the topic's current generation: the daemon refuses them if the topic was created again."""
        under = StoredUnder(producer, segment, calls.generation(name), self.write_pointer, self.ttl_s)
        return _Topic(calls, name, under)


class _Topic:
    """The rows that one attempt stores in one topic."""

    def __init__(self, calls: Calls, name: str, under: StoredUnder) -> None:
        self._calls = calls
        self._name = name
        self._under = under
        self._rows = 0

    def store(self, chunk: Chunk) -> None:
        """Store a chunk. Sequence ids continue from chunk to chunk, so the daemon recognizes one that is sent twice."""
        body = store_body(self._under, chunk.payloads, self._rows, chunk.ttls_s, chunk.attributes)
        try:
            self._calls.store(self._name, body)
        except BrokerError as error:
            raise self._naming_row(error) from error
        self._rows += len(chunk.payloads)

    def _naming_row(self, error: BrokerError) -> BrokerError:
        """Return the error with a row of the task instead of a message of the request, which users do not know."""

        def row(found: re.Match[str]) -> str:
            return f"row {self._rows + int(found[1]) + 1} that this task writes to topic {self._name}"

        detail = re.sub(r"\bmessage (\d+)", row, error.detail, count=1)
        return BrokerError(error.status, error.code, detail, error.hint, error.outcome, error.retry_after_s)

    @property
    def stored(self) -> Stored:
        assert self._under.generation is not None
        return Stored(self._rows, self._under.generation)


# --- store body ------------------------------------------------------------------------------------
#
# The body of a store request in Avro binary version 2, encoded here because executors have no Avro library:
#
#     pointer  messages  ttl  producer  epoch  generation  ids  atomic  key  segment  segments  ttls  attributes
#
# Payloads of equal length, as in most tables, need no loop: one join puts the same length prefix between them.

_NULL = b"\x00"
#: The second branch of a union whose first is null.
_GIVEN = b"\x02"
_END = b"\x00"
_FALSE = b"\x00"
#: The branch null of a union whose second branch is null, as in version 1.
_NULL_LAST = b"\x02"


def zigzag(number: int) -> bytes:
    """Encode an Avro int or long of at most 64 bits."""
    raw = number << 1 ^ number >> 63
    if raw < 0x80:
        return bytes((raw,))
    out = bytearray()
    while raw > 0x7F:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    out.append(raw)
    return bytes(out)


_BLOCK = 64
#: The first bytes of the 64 numbers of a block, each with its continuation bit.
_FIRST_BYTES = [bytes([0x80 | number << 1]) for number in range(_BLOCK)]
#: Encoded lengths of short payloads, the common case.
_SHORT = [zigzag(number) for number in range(4096)]


@dataclass(frozen=True, slots=True)
class StoredUnder:
    """The fields that all chunks of one task attempt share."""

    producer: str
    segment: str
    generation: int | None = None
    """The only generation that accepts the rows, so a topic created again refuses them; None: any."""
    write_pointer: int | None = None
    """The outer transaction's; None: the rows are staged."""
    ttl_s: int | None = None
    """For messages without a time to live of their own."""


def store_body(
    under: StoredUnder,
    payloads: Sequence[bytes],
    first_id: int,
    ttls_s: Sequence[int | None] | None = None,
    attributes: Sequence[Mapping[str, str]] | None = None,
) -> bytes:
    """Encode the request for one chunk of a segment; its messages have the sequence ids from ``first_id`` on.

    Args:
      ttls_s: seconds to live, one for each message.
      attributes: each message's attributes, including its routing key as ``routingKey``.
    """
    count = len(payloads)
    pointer = _NULL_LAST if under.write_pointer is None else b"\x00" + zigzag(under.write_pointer)
    return b"".join(
        (
            pointer,
            *_messages(payloads),
            _number_or_null(under.ttl_s),
            _GIVEN + _string(under.producer),
            _NULL,  # no epoch: the commit opens the session, and only publishes are fenced
            _number_or_null(under.generation),
            _GIVEN + zigzag(count) + consecutive(first_id, count) + _END if count else _GIVEN + _END,
            _FALSE,
            _NULL,
            _GIVEN + _string(under.segment),
            _NULL,
            _NULL if ttls_s is None else _GIVEN + _array(count, map(_number_or_null, ttls_s)),
            _NULL if attributes is None else _GIVEN + _array(count, map(_strings, attributes)),
        )
    )


def _messages(payloads: Sequence[bytes]) -> list[bytes]:
    """Encode an array of bytes, in pieces: one block, and its end."""
    count = len(payloads)
    if not count:
        return [_END]
    sizes = list(map(len, payloads))
    largest = max(sizes)
    if min(sizes) == largest:
        prefix = zigzag(largest)
        return [zigzag(count), prefix, prefix.join(payloads), _END]
    parts = [b""] * (2 * count)
    parts[::2] = map(_SHORT.__getitem__ if largest < len(_SHORT) else zigzag, sizes)
    parts[1::2] = payloads
    return [zigzag(count), *parts, _END]


def consecutive(first: int, count: int) -> bytes:
    """Encode ``count`` consecutive numbers from ``first`` on, which is 0 or more.

    Numbers that differ only in their last six bits share all bytes but the first, so 64 are encoded at a time.
    """
    out: list[bytes] = []
    stop = first + count
    while first < stop:
        end = min(stop, (first | _BLOCK - 1) + 1)
        if end - first < _BLOCK or first < _BLOCK:
            out += map(zigzag, range(first, end))
        else:
            rest = zigzag(first)[1:]
            out += (rest.join(_FIRST_BYTES), rest)
        first = end
    return b"".join(out)


def _array(count: int, items: map[bytes]) -> bytes:
    return b"".join((zigzag(count), *items, _END)) if count else _END


def _string(text: str) -> bytes:
    raw = text.encode()
    return zigzag(len(raw)) + raw


def _number_or_null(number: int | None) -> bytes:
    return _NULL if number is None else _GIVEN + zigzag(number)


def _strings(pairs: Mapping[str, str]) -> bytes:
    """Encode a map of strings: one block, and its end."""
    if not pairs:
        return _END
    return b"".join((zigzag(len(pairs)), *(_string(text) for pair in pairs.items() for text in pair), _END))

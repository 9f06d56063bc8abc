"""What a task does: it stores its rows under a segment of its own, in chunks, each of them exactly once.

Every attempt of a task, a speculative copy too, has its own segment. The commit lists those of the attempts that
Spark counts; what the others stored is seen by nobody, however late it comes.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark import TaskContext

from pyspark_plainsong.messages import Stored, TaskStored
from pyspark_plainsong.store_body import StoredUnder, store_body
from pyspark_plainsong.write_columns import WriteColumns

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_plainsong.calls import Calls
    from pyspark_plainsong.options import WriteOptions
    from pyspark_plainsong.write_columns import Chunk

QUERY_ID = "sql.streaming.queryId"


@dataclass(frozen=True)
class Staging:
    """How all tasks of a save or a query store."""

    columns: WriteColumns
    topic: str | None
    """None: the column ``topic`` says."""
    max_rows: int
    """Of one request."""
    producer: str | None
    """None: the streaming query's id."""
    write_pointer: int | None = None
    """Of the outer transaction; None: rows are staged."""
    ttl_s: int | None = None

    @classmethod
    def of(cls, options: WriteOptions, schema: StructType, overwrite: bool, producer: str | None) -> Staging:
        """As the user's options and columns say.

        Raises:
          ValueError: they contradict each other, or cannot be written.
        """
        if overwrite:
            raise ValueError(
                "a topic is only ever appended to: use mode('append'), and in streams outputMode('append')"
            )
        columns = WriteColumns.of(schema)
        if (options.topic is None) == (columns.topic is None):
            both = "both the option topic and a column topic" if columns.topic is not None else "neither"
            raise ValueError(f"give the option topic, or a column topic of type STRING: there is {both}")
        return cls(
            columns,
            options.topic,
            options.store_batch_size,
            producer,
            options.transaction_write_pointer,
            options.ttl_s,
        )

    def run(self, calls: Calls, batches: Iterable[pa.RecordBatch]) -> TaskStored:
        """Store all rows of one partition; what the commit has to know of them.

        Raises:
          ValueError: a value that no message can have.
          BrokerError: a chunk is not stored, or nobody knows; Spark tries the task again, under another segment.
        """
        context = TaskContext.get()
        query_id = None if context is None else context.getLocalProperty(QUERY_ID)
        producer = self.producer or query_id
        if producer is None:
            raise RuntimeError(f"Spark did not say whose rows these are: no property {QUERY_ID}")
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
        """In the generation the topic has now: rows that would go to a later one are refused."""
        topic = calls.describe(name)
        under = StoredUnder(producer, segment, topic.generation, self.write_pointer, self.ttl_s)
        return _Topic(calls, name, under)


class _Topic:
    """How far one attempt has come in one topic."""

    def __init__(self, calls: Calls, name: str, under: StoredUnder) -> None:
        self._calls = calls
        self._name = name
        self._under = under
        self._rows = 0

    def store(self, chunk: Chunk) -> None:
        """Store it. Sent again after a lost answer it is known by its numbers, which go on from chunk to chunk."""
        body = store_body(self._under, chunk.payloads, self._rows, chunk.ttls_s, chunk.attributes)
        self._calls.store(self._name, body)
        self._rows += len(chunk.payloads)

    @property
    def stored(self) -> Stored:
        assert self._under.generation is not None
        return Stored(self._rows, self._under.generation)

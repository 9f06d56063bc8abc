"""Writing a stream: each micro-batch becomes part of its topics once, however often Spark runs it."""

from __future__ import annotations

import logging
from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceStreamArrowWriter

from pyspark_plainsong.messages import TaskStored, check_order, winners
from pyspark_plainsong.publishing import Identity
from pyspark_plainsong.staging import Staging

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from pyspark_plainsong.options import WriteOptions

LOG = logging.getLogger(__name__)


class StreamWriter(DataSourceStreamArrowWriter):
    """One micro-batch of a query. Spark makes one for its tasks and another one for its commit.

    A query is remembered by its id, which stays the same as long as its checkpoint is kept, and a micro-batch by its
    number: for ``memory_s`` after its last one, since a query that was stopped over a holiday must find them known.

    Raises:
      ValueError: columns or options with which nothing can be written.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self._connection = options.connection
        self._name = options.producer_name
        self._memory_s = options.memory_s
        self._ordered = options.ordered
        self._staging = Staging.of(options, schema, overwrite, self._name)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of one partition; in a task."""
        with closing(self._connection.calls()) as calls:
            return self._staging.run(calls, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's own name
        """Publish the micro-batch, unless its topics have it from an earlier run.

        Raises:
          MixedGenerations, NotPublished, OutcomeUnknown, OutOfOrder: the query stops; started again it does the
            same micro-batch again.
        """
        tasks = [task for task in messages if isinstance(task, TaskStored)]
        won = winners(tasks)
        check_order(won, ordered=self._ordered)
        if not won:
            return
        producer = self._name or tasks[0].query_id
        assert producer is not None  # or the tasks would have failed
        identity = Identity(producer, batchId, self._memory_s)
        if self._name is not None and batchId == 0:
            LOG.warning(
                "producerName=%s stands in for the query's id: a new checkpoint's micro-batches are counted from 0 again, "
                "and those that a topic remembers by this name are not stored",
                producer,
            )
        with closing(self._connection.calls()) as calls:
            for each in won:
                if not identity.publish(calls, each):
                    LOG.warning(
                        "topic %s has micro-batch %d of producer %s already: its %d rows are not stored again",
                        each.topic,
                        batchId,
                        producer,
                        each.rows,
                    )

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's own name
        """Do nothing: Spark also calls this when a publish landed and its answer did not.

        Taken back then, the micro-batch would be lost, since its next run is told that it is there. What was stored and
        not published is seen by nobody, and cleaned.
        """

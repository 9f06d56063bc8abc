"""Spark's writers, of a table and of a micro-batch: in each topic the rows appear atomically, all or none."""

from __future__ import annotations

import logging
import uuid
from contextlib import closing
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from pyspark_plainsong.publishing import (
    Identity,
    MicroBatch,
    MixedGenerations,
    NotPublished,
    OutcomeUnknown,
    TaskStored,
    Winners,
    check_order,
    publish_under,
    show_rows,
    winners,
)
from pyspark_plainsong.staging import Staging
from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

    from pyspark_plainsong.calls import Calls
    from pyspark_plainsong.options import WriteOptions

LOG = logging.getLogger("pyspark_plainsong")


class SaveIsComplete(RuntimeError):
    """The save failed according to Spark, but all its rows are in the named topics."""


class BatchWriter(DataSourceArrowWriter):
    """One save. Spark creates it once, and calls ``write``, ``commit`` and ``abort`` on copies of it.

    Raises:
      ValueError: columns or options are wrong.
      BrokerError: the topic does not exist, or the daemon does not answer.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self._connection = options.connection
        #: A save without a producerName gets a unique one: it happens once, and running it again publishes again.
        self._identity = Identity(
            options.producer_name or f"spark-{uuid.uuid4().hex}",
            options.sequence_id or 0,
            options.memory_s,
            must_be_remembered=options.producer_name is not None,
            is_micro_batch=False,
        )
        self._is_named = options.producer_name is not None
        self._pointer = options.transaction_write_pointer
        self._ordered = options.ordered
        self._staging = Staging.of(options, schema, overwrite, self._identity.producer)
        if options.topic is not None:
            with closing(options.calls()) as calls:
                calls.generation(options.topic)  # if the topic does not exist, fail before a task starts

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of one partition; in a task."""
        with closing(self._connection.calls()) as calls:
            return self._staging.run(calls, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish the segments of the winning tasks, topic by topic.

        Raises:
          MixedGenerations, NotPublished, OutcomeUnknown, OutOfOrder: the error names the topics that have all rows.
        """
        won = winners(task for task in messages if isinstance(task, TaskStored))
        check_order(won, ordered=self._ordered)
        done: list[str] = []
        try:
            with closing(self._connection.calls()) as calls:
                for each in won:
                    self._publish(calls, each)
                    done.append(each.topic)
                if not self._is_named and self._pointer is None:
                    # This name is never used again, and a topic remembers a limited number of producers.
                    self._identity.forget(calls, won)
        except (NotPublished, OutcomeUnknown) as error:
            if not done:
                raise
            raise type(error)(f"{error}; {self._report(done, all_of_them=False)}") from error

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Ensure that no further row of the save can appear.

        Rows that were published without a transaction stay: readers may have seen them.

        Raises:
          SaveIsComplete: at least one topic has all its rows of the save.
          BrokerError: the daemon does not answer.
        """
        if any(message is None for message in messages):
            return  # a task did not finish, so Spark did not call commit
        try:
            won = winners(task for task in messages if isinstance(task, TaskStored))
        except MixedGenerations:
            return  # the commit raised this error already
        with closing(self._connection.calls()) as calls:
            if self._pointer is not None:
                self._roll_back(calls, won, self._pointer)
                return
            complete = [each.topic for each in won if self._identity.is_complete(calls, each)]
        if complete:
            raise SaveIsComplete(self._report(complete, all_of_them=len(complete) == len(won)))

    def _publish(self, calls: Calls, won: Winners) -> None:
        if self._pointer is not None:
            publish_under(calls, won, self._pointer)
        elif not self._identity.publish(calls, won):
            LOG.warning(
                "topic %s has save %d of producer %s already, and does not store its %s again",
                won.topic,
                self._identity.sequence_id,
                self._identity.producer,
                show_rows(won.rows),
            )

    @staticmethod
    def _roll_back(calls: Calls, won: Sequence[Winners], pointer: int) -> None:
        for each in won:
            try:
                calls.rollback(each.topic, pointer)
            except BrokerError as error:
                if error.code != "topic_not_found":
                    raise

    def _report(self, topics: Sequence[str], *, all_of_them: bool) -> str:
        """Describe the topics that have all their rows although the save failed."""
        if self._is_named:
            advice = "run it again with the same producerName and sequenceId: stored rows are not stored again"
        elif all_of_them:
            advice = "do not run it again"
        else:
            advice = "a second run would publish those rows again: write only the rows of the other topics"
        return f"these topics have all rows of the save, and keep them: {', '.join(topics)}; {advice}"


# --- stream writer ---------------------------------------------------------------------------------


class StreamWriter(DataSourceStreamArrowWriter):
    """One micro-batch of a query. Spark creates one writer for its tasks and another for its commit.

    The producer is the query's id, which is stored in its checkpoint; the sequence id is a ``MicroBatch``.
    Topics remember them for ``memory_s`` after the last one, so a query may be stopped that long without duplicates.

    Raises:
      ValueError: columns or options are wrong.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self._connection = options.connection
        self._name = options.producer_name
        self._memory_s = options.memory_s
        self._checkpoint = options.checkpoint
        self._ordered = options.ordered
        self._staging = Staging.of(options, schema, overwrite, self._name)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Store the rows of one partition; in a task."""
        with closing(self._connection.calls()) as calls:
            return self._staging.run(calls, iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's own name
        """Publish the micro-batch in the topics that do not have it from an earlier run.

        Raises:
          MixedGenerations, NotPublished, OutcomeUnknown, OutOfOrder: the query stops; a restart repeats the
            micro-batch.
          CheckpointRewound: the query stops, and cannot continue from this checkpoint.
        """
        tasks = [task for task in messages if isinstance(task, TaskStored)]
        won = winners(tasks)
        check_order(won, ordered=self._ordered)
        if not won:
            return
        producer = self._name or tasks[0].query_id
        assert producer is not None  # without it the tasks fail
        identity = Identity(producer, MicroBatch.logged(self._checkpoint, batchId).sequence_id, self._memory_s)
        if self._name is not None and batchId == 0:
            LOG.warning(
                "producerName=%s replaces the query's id: a new checkpoint counts micro-batches from 0 again, and a "
                "topic that remembers later ones under this name refuses them",
                producer,
            )
        with closing(self._connection.calls()) as calls:
            for each in won:
                if not identity.publish(calls, each):
                    LOG.warning(
                        "topic %s has micro-batch %d of producer %s already, and does not store its %s again",
                        each.topic,
                        batchId,
                        producer,
                        show_rows(each.rows),
                    )

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803  Spark's own name
        """Do nothing: Spark also calls this if a publish landed but its answer was lost.

        Rolling back would then lose the micro-batch, since its next run would find it published. Rows that were stored
        and not published are invisible, and the daemon removes them.
        """

"""Spark's readers: of a table, up to the end of each topic when a task begins, and of a stream, between offsets."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)

from pyspark_plainsong.following import Following, Trigger
from pyspark_plainsong.offsets import FIRST, Position, from_offset, to_offset
from pyspark_plainsong.partitions import LaterTopics, TopicRange, cut, splits_for
from pyspark_plainsong.range_reader import RangeReader
from pyspark_plainsong.subscription import Losses, Subscription
from pyspark_plainsong.wire import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_plainsong.options import ReadOptions

#: How long a task waits for a transaction service that became unavailable after the query was planned.
BATCH_PATIENCE_S = 60.0


class BatchReader(DataSourceReader):
    """A loaded table. It defines no ``pushFilters``: see docs/spark.md.

    Spark plans the partitions of a table once, for all its queries. So tasks look for the end of their topic, and for
    topics that were created later.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._calls = options.connection.calls()
        self._losses = Losses(options.connection.namespace, fail=options.fail_on_data_loss)
        self._reader = RangeReader(
            self._calls, schema, self._losses, fetch_size=options.fetch_size, patience_s=BATCH_PATIENCE_S
        )

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks' input: a range of each topic, in parts.

        Raises:
          BrokerError: a topic does not exist, the daemon does not answer, or its transaction service is not available.
          DataLoss: messages that the options name are lost.
        """
        options, subscription = self._options, self._subscription()
        try:
            subscription.check_transactions()
            topics = subscription.topics()
            ranges = [self._range(subscription, topic) for topic in topics]
            wanted = [each for each in ranges if each.grows or each.start < each.end]
            found = list(cut(self._calls, wanted, options.min_partitions, options.max_records_per_partition))
        except BrokerError as error:
            raise self._hinted(error) from error
        finally:
            self._calls.close()
        may_get_topics = options.topics is None and options.as_of_ms is None
        return [*found, LaterTopics(frozenset(topics))] if may_get_topics else found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; in a task."""
        match partition:  # Spark makes another kind if there is nothing to read
            case TopicRange(grows=True):
                yield from self._reader.read(self._grown(partition))
            case TopicRange():
                yield from self._reader.read(partition)
            case LaterTopics():
                for each in self._later(partition):
                    yield from self._reader.read(each)

    def _subscription(self) -> Subscription:
        return Subscription(self._calls, self._options, self._losses)

    def _range(self, subscription: Subscription, topic: str) -> TopicRange:
        start = subscription.start(topic)
        end = subscription.end(topic, start.next)
        # A start at a message promises all messages after it. A time, or "earliest", promises only those that still exist.
        named = isinstance(self._options.starting.of(topic).bound, bytes) and start.next != FIRST
        return TopicRange(
            topic,
            start.generation,
            start.next,
            max(start.next, end),
            subscription.isolation,
            start.next if named else None,
            self._options.as_of_ms,
            subscription.may_grow(topic, end),
        )

    def _grown(self, part: TopicRange) -> TopicRange:
        """Return a range up to the end that its topic has now."""
        subscription = self._subscription()
        try:
            end = subscription.end(part.topic, part.start)
            return replace(part, end=max(part.end, end), isolation=subscription.isolation)
        except BrokerError as error:
            if error.code == "topic_not_found":
                return part  # reading it reports the loss
            raise self._hinted(error) from error

    def _later(self, partition: LaterTopics) -> Iterator[TopicRange]:
        """Return the ranges of the topics that are not known."""
        subscription = self._subscription()
        try:
            for topic in subscription.topics():
                if topic not in partition.known:
                    yield self._range(subscription, topic)
        except BrokerError as error:
            raise self._hinted(error) from error
        finally:
            self._calls.close()

    def _hinted(self, error: BrokerError) -> BrokerError:
        if error.code == "transactions_unavailable" and self._options.as_of_ms is None:
            return error.with_hint(
                "isolation=uncommitted reads everything, including undecided and rolled-back messages"
            )
        return error


# --- stream reader ---------------------------------------------------------------------------------

log = logging.getLogger("pyspark_plainsong")
#: How long tasks and AvailableNow runs wait for a transaction service that is not available.
STREAM_PATIENCE_S = 600.0
_PAUSE_S = 1.0
_WARN_EVERY_S = 30.0
_NO_BOUNDS = Trigger(None, None)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The source of one query. Spark keeps it in a process of its own while the query runs."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._namespace = options.connection.namespace
        self._calls = options.connection.calls()
        self._losses = Losses(self._namespace, fail=options.fail_on_data_loss)
        self._subscription = Subscription(self._calls, options, self._losses)
        self._following = Following(self._calls, self._subscription, self._losses, splits_for(options.min_partitions))
        self._reader = RangeReader(
            self._calls, schema, self._losses, fetch_size=options.fetch_size, patience_s=STREAM_PATIENCE_S
        )
        #: End positions of an AvailableNow run, by topic; None: the stream does not end.
        self._targets: dict[str, bytes] | None = None
        self._warn_again_s = 0.0

    # --- what Spark asks, batch by batch -------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return where a query without a checkpoint starts. Spark may call it more than once."""
        positions = {topic: self._subscription.start(topic) for topic in self._subscription.topics()}
        return to_offset(self._namespace, positions)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the bound of a micro-batch. If several are set, all apply, though Spark sees only one."""
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.max_bytes is not None:
            return ReadMaxBytes(self._options.max_bytes)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Fix where an AvailableNow run ends."""
        self._targets = {}
        for topic in self._subscription.topics():
            try:
                self._targets[topic] = self._subscription.newest(topic)
            except BrokerError as error:
                # Without a target: a query that has read the topic reports it as deleted, a new one as not existing.
                if error.code != "topic_not_found":
                    raise

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return the end of the next micro-batch; ``start`` itself if no message arrived during the wait.

        Raises:
          BrokerError: the daemon does not answer, or refuses. It waits for a transaction service that is not available.
          DataLoss: with failOnDataLoss.
        """
        if self._targets is None:  # targets were found with one isolation, which must stay
            self._subscription.ask_again()
        known = from_offset(self._namespace, start)
        deadline_s = time.monotonic() + STREAM_PATIENCE_S
        while True:
            try:
                found = self._following.advance(
                    known, self._trigger(limit), self._targets, wait_ms=self._options.poll_timeout_ms
                )
                return start if found == known else to_offset(self._namespace, found)
            except BrokerError as error:
                if error.code != "transactions_unavailable":
                    raise
                self._warn(error)
                if self._targets is not None and time.monotonic() >= deadline_s:
                    raise
                time.sleep(max(_PAUSE_S, self._options.poll_timeout_ms / 1000))
                if self._targets is None:
                    return start  # back to Spark, so that the query can be stopped

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return the newest known positions, and how many messages of each topic are not in a micro-batch yet.

        Spark shows them unchanged in the query's progress, and does nothing else with them. Python sources have no
        metrics of their own: see docs/spark-limits.md.
        """
        newest, behind = self._following.newest, self._following.behind
        if not newest:
            return None
        lag = {f"{self._namespace}:{topic}": behind.get(topic, 0) for topic in sorted(newest)}
        return {**to_offset(self._namespace, newest), "behind": lag}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the input of a micro-batch's tasks."""
        before, behind = from_offset(self._namespace, start), from_offset(self._namespace, end)
        ranges = []
        for topic, last in behind.items():
            first = before.get(topic, Position(last.generation, FIRST))
            first_id = first.next if first.generation == last.generation else FIRST
            if first_id < last.next:
                ranges.append(self._range(topic, last.generation, first_id, last.next))
        extents = {each: self._following.extent(each.topic, each.generation, each.start, each.end) for each in ranges}
        measured = {each: extent for each, extent in extents.items() if extent is not None}
        return cut(self._calls, ranges, self._options.min_partitions, self._options.max_records_per_partition, measured)

    def _range(self, topic: str, generation: int, start: bytes, end: bytes) -> TopicRange:
        # A read from the oldest message promises only those that still exist when it runs.
        complete_from = None if start == FIRST else self._following.complete_from(topic, start)
        return TopicRange(topic, generation, start, end, self._subscription.isolation, complete_from)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; in a task."""
        if isinstance(partition, TopicRange):
            yield from self._reader.read(partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing: a topic keeps its messages, read or not."""

    def stop(self) -> None:
        """Close the connection."""
        self._calls.close()

    def _warn(self, error: BrokerError) -> None:
        """Log why the stream waits, at most every half minute."""
        if time.monotonic() >= self._warn_again_s:
            log.warning("the stream waits for the transaction service: %s", error)
            self._warn_again_s = time.monotonic() + _WARN_EVERY_S

    def _trigger(self, limit: ReadLimit) -> Trigger:
        if isinstance(limit, ReadAllAvailable):
            return _NO_BOUNDS  # a Trigger.Once run also reads everything
        options = self._options
        return Trigger(options.max_offsets, options.max_bytes, options.min_offsets, options.max_delay_ms / 1000)

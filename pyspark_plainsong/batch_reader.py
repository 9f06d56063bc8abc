"""Topics read as a table: the ends are fixed when Spark plans, so that the table does not change under a query."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from pyspark_plainsong.loss import Losses
from pyspark_plainsong.offsets import FIRST
from pyspark_plainsong.partitions import TopicRange, cut
from pyspark_plainsong.reading import RangeReader
from pyspark_plainsong.subscription import Subscription
from pyspark_plainsong.wire_errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_plainsong.options import ReadOptions

#: How long a task waits for a transaction service that went away after the query was planned.
PATIENCE_S = 60.0


class BatchReader(DataSourceReader):
    """One planned scan. It defines no ``pushFilters``: see docs/spark.md."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._calls = options.connection.calls()
        self._losses = Losses(options.connection.namespace, fail=options.fail_on_data_loss)
        self._reader = RangeReader(
            self._calls, schema, self._losses, fetch_size=options.fetch_size, patience_s=PATIENCE_S
        )

    def partitions(self) -> Sequence[InputPartition]:
        """What the tasks read; a fixed range of each topic, in parts.

        Raises:
          BrokerError: a topic is not there, the daemon is not, or its transaction service.
          DataLoss: messages that the options name are gone.
        """
        subscription = Subscription(self._calls, self._options, self._losses)
        ranges = []
        try:
            subscription.check_transactions()
            for topic in subscription.topics():
                start = subscription.start(topic)
                end = subscription.end(topic, start.next)
                if start.next < end:
                    ranges.append(self._range(subscription, topic, start.generation, start.next, end))
            options = self._options
            return list(cut(self._calls, ranges, options.min_partitions, options.max_records_per_partition))
        except BrokerError as error:
            if error.code == "transactions_unavailable":
                raise error.with_hint("isolation=uncommitted reads everything, undecided and rolled back") from error
            raise
        finally:
            self._calls.close()

    def _range(self, subscription: Subscription, topic: str, generation: int, start: bytes, end: bytes) -> TopicRange:
        # Whoever names a message wants all that comes after it; a time, or "earliest", asks for what is there.
        named = isinstance(self._options.starting.of(topic).bound, bytes) and start != FIRST
        return TopicRange(topic, generation, start, end, subscription.isolation, start if named else None)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one partition; in a task."""
        if isinstance(partition, TopicRange):  # where there is nothing to read Spark makes one of its own
            yield from self._reader.read(partition)

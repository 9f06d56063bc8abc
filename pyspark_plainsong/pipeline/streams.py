"""Waits for streaming queries, and passes on the progress and the errors of their batches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import CommandFailed
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

#: Seconds between reads of a query's progress; its end is noticed at once.
LOOK_S = 1


class Batches:
    """A function for ``foreachBatch`` that keeps its error: Spark passes on only the text, not the exit code."""

    def __init__(self, write: Callable[[DataFrame, int], None]) -> None:
        self._write = write
        #: The error that ended the query, if it was ours.
        self.failure: CommandFailed | PlainsongError | None = None

    def __call__(self, rows: DataFrame, batch: int) -> None:
        """Handle a batch. Raises what the function raises."""
        try:
            self._write(rows, batch)
        except (CommandFailed, PlainsongError) as error:
            self.failure = error
            raise

    @contextmanager
    def own_error(self) -> Iterator[None]:
        """Wrap the wait for the query: raise a batch's own error instead of Spark's."""
        try:
            yield
        except Exception as error:
            if self.failure is not None:
                raise self.failure from error
            raise


def watch(
    query: StreamingQuery, on_batch: Callable[[dict[str, Any]], None], *, idle: Callable[[], None] | None = None
) -> None:
    """Wait until the query ends; a query that follows a topic never does.

    Args:
      query: a query that was started.
      on_batch: called with Spark's progress of each batch that had rows (``batchId``, ``numInputRows``,
        ``durationMs``, ``sources``), in order; Spark keeps only the last ones, so some may be left out.
      idle: called about every second.
    Raises:
      StreamingQueryException: the query failed.
      Exception: of ``on_batch`` or ``idle``; the query is stopped.
    """
    last_batch = -1
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(LOOK_S))
            for each in query.recentProgress:
                if each["batchId"] > last_batch and each["numInputRows"] > 0:
                    last_batch = each["batchId"]
                    on_batch(dict(each))
            if idle is not None:
                idle()
    finally:
        if query.isActive:
            query.stop()


def watch_all(queries: Sequence[StreamingQuery], *, idle: Callable[[], object]) -> None:
    """Wait until all queries have ended.

    Args:
      idle: called about every second, and at the end.
    Raises:
      StreamingQueryException: one failed; the others are stopped.
      Exception: of ``idle``; all queries are stopped.
    """
    try:
        left = list(queries)
        while left:
            left[0].awaitTermination(LOOK_S)
            for query in left:
                if not query.isActive:
                    query.awaitTermination()  # raises the error that it failed with
            left = [query for query in left if query.isActive]
            idle()
    finally:
        for query in queries:
            if query.isActive:
                query.stop()

"""A streaming query under way: waited for, and its batches told as they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pyspark.sql.streaming.query import StreamingQuery

#: How often the query is looked at; its end is noticed at once.
LOOK_S = 1


def watch(
    query: StreamingQuery, on_batch: Callable[[dict[str, Any]], None], *, idle: Callable[[], None] | None = None
) -> None:
    """Wait until the query ends, for ever if it follows.

    Args:
      query: that was started.
      on_batch: called with the progress of each batch that had rows, in their order, as Spark tells it
        (``batchId``, ``numInputRows``, ``durationMs``, ``sources``); those that Spark kept no longer are left out.
      idle: called about every second.
    Raises:
      StreamingQueryException: the query failed. Whatever ``on_batch`` raises; the query is stopped then.
    """
    told = -1
    try:
        ended = False
        while not ended:
            ended = bool(query.awaitTermination(LOOK_S))
            for each in query.recentProgress:
                if each["batchId"] > told and each["numInputRows"] > 0:
                    told = each["batchId"]
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
      StreamingQueryException: one failed; the others are stopped. Whatever ``idle`` raises; all are stopped then.
    """
    try:
        left = list(queries)
        while left:
            left[0].awaitTermination(LOOK_S)  # of one; the others are looked at
            for query in left:
                if not query.isActive:
                    query.awaitTermination()  # raises what it failed of
            left = [query for query in left if query.isActive]
            idle()
    finally:
        for query in queries:
            if query.isActive:
                query.stop()

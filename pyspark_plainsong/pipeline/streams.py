"""Waits for streaming queries, and passes on the progress and the errors of their batches."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from plainsong.cli.command import CommandFailed
from plainsong.protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

#: Seconds between reads of a query's progress; its end is noticed at once.
LOOK_S = 1
#: The setting for the class that writes checkpoints, and a class for checkpoints that no other run will use. That class
#: starts no processes; Spark's default starts some forty for each micro-batch, which take as long as a small batch itself.
CHECKPOINTS = "spark.sql.streaming.checkpointFileManagerClass"
DISPOSABLE = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


@contextmanager
def disposable_checkpoints(session: SparkSession) -> Iterator[None]:
    """Let the queries that start in this block write their checkpoints for this run only.

    Changes nothing if the user has set the class, or if this Spark has no class of that name.
    """
    from py4j.java_gateway import JavaClass

    found: Any = session._jvm  # the JVM's packages and classes by name
    for part in DISPOSABLE.split("."):
        found = getattr(found, part)
    if session.conf.get(CHECKPOINTS, None) is not None or not isinstance(found, JavaClass):
        yield
        return
    session.conf.set(CHECKPOINTS, DISPOSABLE)
    try:
        yield
    finally:
        session.conf.unset(CHECKPOINTS)


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


def watch_all(queries: Sequence[StreamingQuery], *, idle: Callable[[], object]) -> None:
    """Wait until all queries have ended.

    Args:
      queries: may grow during the wait.
      idle: called about every second, and at the end.
    Raises:
      StreamingQueryException: one failed; the others are stopped.
      Exception: of ``idle``; all queries are stopped.
    """
    ended: list[StreamingQuery] = []
    try:
        while running := [query for query in queries if query not in ended]:
            running[0].awaitTermination(LOOK_S)
            for query in running:
                if not query.isActive:
                    query.awaitTermination()  # raises the error that it failed with
                    ended.append(query)
            idle()
    finally:
        for query in queries:
            if query.isActive:
                query.stop()

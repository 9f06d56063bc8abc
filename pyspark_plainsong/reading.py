"""What a task does: it reads one range of one topic, page by page, and makes each page an Arrow batch."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pyspark_plainsong.batches import FrameBatches
from pyspark_plainsong.offsets import after
from pyspark_plainsong.wire_errors import BrokerError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from pyspark_plainsong.answers import FramesPage
    from pyspark_plainsong.calls import Calls
    from pyspark_plainsong.loss import Losses
    from pyspark_plainsong.partitions import TopicRange

log = logging.getLogger("pyspark_plainsong")

#: How long one poll waits where the transaction service knows less than it did when the range was made.
HELD_WAIT_MS = 5_000
_PAUSE_S = 1.0


class Undecided(RuntimeError):
    """A transaction below the end of a range is undecided: the daemon has forgotten, or forsworn, its decision."""


class RangeReader:
    """Reads ranges with the columns of ``schema``.

    Args:
      fetch_size: messages of a page, and so of a batch.
      patience_s: how long to wait for a transaction service that went away, or is behind.
    """

    def __init__(self, calls: Calls, schema: StructType, losses: Losses, *, fetch_size: int, patience_s: float) -> None:
        self._calls = calls
        self._schema = schema
        self._losses = losses
        self._fetch_size = fetch_size
        self._patience_s = patience_s

    def read(self, part: TopicRange) -> Iterator[pa.RecordBatch]:
        """All messages of the range, in their order.

        Raises:
          BrokerError: the daemon did not answer, or refused.
          DataLoss: the topic is gone, is another one, or messages of the range expired meanwhile.
          Undecided: a transaction in it has no outcome any more.
        """
        batches = FrameBatches(self._schema, self._calls.namespace, part.topic)
        try:
            for body in self._pages(part, batches):
                batch = batches.batch(body)
                if batch.num_rows:
                    yield batch
            self._check(part)
        except BrokerError as error:
            if error.code != "topic_not_found":
                raise
            self._losses.deleted(part.topic)
        finally:
            self._calls.close()  # the next task has a reader of its own

    def _pages(self, part: TopicRange, batches: FrameBatches) -> Iterator[bytes]:
        """Page after page, until there is nothing more before the end: a page may end earlier, by the daemon's bounds."""
        at = part.start
        deadline_s = None
        while at < part.end:
            page = self._page(part, at, batches)
            yield page.body
            moved = page.last_id is not None and page.last_id >= at
            if moved:
                assert page.last_id is not None
                at = after(page.last_id)
                deadline_s = None
            if page.end == "end":
                return
            if page.end == "held" and not moved:
                deadline_s = deadline_s or time.monotonic() + self._patience_s
                if time.monotonic() >= deadline_s:
                    raise Undecided(
                        f"transaction {page.held_by} in topic {part.topic} was decided when this range was made, and is "
                        "not any more"
                    )

    def _page(self, part: TopicRange, at: bytes, batches: FrameBatches) -> FramesPage:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._calls.poll_frames(
                    part.topic,
                    start=at,
                    end_before=part.end,
                    limit=self._fetch_size,
                    isolation=part.isolation,
                    wait_ms=HELD_WAIT_MS if part.isolation == "committed" else 0,
                    pointers=batches.pointers,
                    attributes=batches.attributes,
                )
            except BrokerError as error:
                if error.code != "transactions_unavailable" or time.monotonic() >= deadline_s:
                    raise
                log.warning("topic %s waits for the transaction service: %s", part.topic, error)
                time.sleep(_PAUSE_S)

    def _check(self, part: TopicRange) -> None:
        """Whether all that was read was still there, of the topic it was meant of. Raises DataLoss."""
        now = self._calls.standing(part.topic, part.end if part.complete_from is None else part.complete_from)
        if now.generation != part.generation:
            self._losses.recreated(part.topic, part.generation, now.generation)
        elif part.complete_from is not None and now.expired:
            self._losses.expired(part.topic, part.complete_from, now.earliest)

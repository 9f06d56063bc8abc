"""One step of a topic: the rows it writes, those about the topic itself last, and whom to answer once they are durable.

One step of a topic: what it wants written, and whom to answer once that is durable.

    operations   first, in this order, as one commit
    answers      then, and only then
    looks        then too, against the watermark that the commit moved

If the commit fails, none of it is said: the actor falls, and everybody learns that the outcome is unknown.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.topic.row_batch import RowBatch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from plainsong.protocol.effects import Operation
    from plainsong.protocol.errors import PlainsongError
    from plainsong.protocol.topic.asks import Look
    from plainsong.protocol.topic.producer_state import Producer


class Step:
    """The outcome of one step, in the order in which it has to happen."""

    __slots__ = (
        "_payloads",
        "_prefix",
        "_row_batch",
        "answers",
        "dropped",
        "looks",
        "messages",
        "operations",
        "pointers",
        "producer_outcomes",
        "producers",
        "renewed",
        "rolled_back",
        "row_batches",
        "since",
    )

    def __init__(self, since: bytes) -> None:
        #: The bound from which on the messages of this commit are all there is.
        self.since = since
        self.operations: list[Operation] = []
        self.answers: list[tuple[Hashable, object | PlainsongError]] = []
        self.looks: list[tuple[Hashable, Look]] = []
        #: Messages of the commit in wire form, for the scan cache, with their generation's key prefix.
        self.row_batches: list[tuple[bytes, RowBatch]] = []
        #: The topic was created, deleted or brought back: nothing cached before is true any more.
        self.renewed = False
        #: Write pointers that this commit writes rows under, or about.
        self.pointers: set[int] = set()
        #: What it rolls back: pointer, first and last position (10 bytes each).
        self.rolled_back: list[tuple[int, bytes, bytes]] = []
        #: Messages that it publishes.
        self.messages = 0
        #: Write pointers about which the topic has no row any more.
        self.dropped: list[int] = []
        #: Producers whose messages are among them.
        self.producers: list[Producer] = []
        #: What became of requests of producers and of producers themselves, counted by words of ours: ``duplicate``,
        #: ``partial``, ``unremembered``, ``expired``, ``evicted``, ``removed``.
        self.producer_outcomes: Counter[str] = Counter()
        self._payloads: list[Put] = []
        self._row_batch: RowBatch | None = None
        self._prefix = b""

    def row_batch(self, prefix: bytes) -> RowBatch:
        """Where message rows of this commit gather; all of one generation."""
        if self._row_batch is None or self._prefix != prefix:
            self.flush()
            self._row_batch, self._prefix = RowBatch(), prefix
        return self._row_batch

    def add_payloads(self, payloads: Put) -> None:
        """Rows of the payload table, which stand before the message rows that speak of them."""
        self._payloads.append(payloads)

    def flush(self) -> None:
        """Put the gathered rows in their place among the operations."""
        self.operations += self._payloads
        self._payloads.clear()
        if self._row_batch is not None and len(self._row_batch):
            self.operations.append(Put(Table.MESSAGE, self._prefix, self._row_batch.suffixes, self._row_batch.values))
            self.row_batches.append((self._prefix, self._row_batch))
        self._row_batch = None

    def write(self, operation: Operation) -> None:
        """Add an operation after everything gathered so far."""
        self.flush()
        self.operations.append(operation)

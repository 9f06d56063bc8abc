"""One step of a topic: the rows to write, and the answers to give once these are durable.

    operations   first, in this order, as one commit
    answers      then, and only then
    looks        then too, against the watermark that the commit moved

If the commit fails, no answer is given: the actor falls, and every open request learns that its outcome is unknown.
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
    """The result of one step, in the order in which it has to happen."""

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
        #: From this bound on, the topic has no messages but those of this commit.
        self.since = since
        self.operations: list[Operation] = []
        self.answers: list[tuple[Hashable, object | PlainsongError]] = []
        self.looks: list[tuple[Hashable, Look]] = []
        #: Messages of the commit in wire form, for the scan cache, with their generation's key prefix.
        self.row_batches: list[tuple[bytes, RowBatch]] = []
        #: The topic was created, deleted or restored: everything cached before is stale.
        self.renewed = False
        #: Write pointers that this commit writes rows under, or about.
        self.pointers: set[int] = set()
        #: Ranges that it rolls back: pointer, first and last position (10 bytes each).
        self.rolled_back: list[tuple[int, bytes, bytes]] = []
        #: The number of messages that it publishes.
        self.messages = 0
        #: Write pointers whose rows about them it removes.
        self.dropped: list[int] = []
        #: Producers whose messages it publishes.
        self.producers: list[Producer] = []
        #: Outcomes of producers' requests and of producers, for metrics: ``duplicate``, ``partial``, ``unremembered``;
        #: ``expired``, ``evicted``, ``removed``.
        self.producer_outcomes: Counter[str] = Counter()
        self._payloads: list[Put] = []
        self._row_batch: RowBatch | None = None
        self._prefix = b""

    def row_batch(self, prefix: bytes) -> RowBatch:
        """The batch to which message rows of one generation are added."""
        if self._row_batch is None or self._prefix != prefix:
            self.flush()
            self._row_batch, self._prefix = RowBatch(), prefix
        return self._row_batch

    def add_payloads(self, payloads: Put) -> None:
        """Add rows of the payload table; they are written before the message rows that refer to them."""
        self._payloads.append(payloads)

    def flush(self) -> None:
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

"""From a group of commits to batches: rollbacks read their rows in the writer's thread, a bounded number at a time.

LevelDB has no update in place, so a rollback is a scan, and a batch of the rows it turns. Both happen in the
writer's thread: a row that another thread had read before could be discarded meanwhile, and would come back.

A commit is one batch as long as its rollbacks are short. Otherwise what comes before, and each step, is durable by
itself, in order; the rest is left in ``Work.rest`` for its owner to submit again, behind the others that wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Delete, Put, RollBack, Table
from storage.rolled import rolled_back

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.effects import Operation
    from storage.leveldb.database import Database
    from storage.leveldb.joining import Work

#: What the rollbacks of a group may read together, in bytes: a writer's step, and what it holds in memory.
STEP_BYTES = 2 << 20
#: What a row counts besides its value, so that a step has 2048 rows at most: a hundredth of a second.
STEP_ROW_BYTES = 1024


def write_works(database: Database, group: Sequence[Work]) -> None:
    """Make a group durable, except for what is left in each ``Work.rest``. For the one thread that writes."""
    batch = _Batch(database, sync=any(work.sync for work in group))
    for work in group:
        work.rest = batch.take(work.operations)
    batch.write()


class _Batch:
    """Operations on their way into one batch."""

    def __init__(self, database: Database, *, sync: bool) -> None:
        self._database = database
        self._sync = sync
        self._left = STEP_BYTES
        self._operations: list[Put | Delete] = []
        #: Those of them that put or remove message rows: a rollback does not see them before they are written.
        self._unseen: list[Put | Delete] = []

    def take(self, operations: Sequence[Operation]) -> Sequence[Operation]:
        """Take a commit's operations in, and give those that are for a later batch."""
        for index, operation in enumerate(operations):
            if isinstance(operation, RollBack):
                again = self._roll_back(operation)
                if again is not None:
                    return [again, *operations[index + 1 :]]
            else:
                self._operations.append(operation)
                if operation.table is Table.MESSAGE:
                    self._unseen.append(operation)
        return ()

    def write(self) -> None:
        """Write what was taken in so far."""
        if self._operations:
            self._database.write(self._operations, sync=self._sync)
        self._operations, self._unseen = [], []

    def _roll_back(self, operation: RollBack) -> RollBack | None:
        """Turn rows of the range; what is left of the operation, None when all of it is done."""
        if self._left <= 0:
            return operation
        if any(_touches(unseen, operation) for unseen in self._unseen):
            self.write()
        rows = self._database.first_rows(Table.MESSAGE, operation.start, operation.stop, self._left, STEP_ROW_BYTES)
        turned = list(rolled_back(rows, operation.pointer))
        if turned:
            # Not among the unseen: no other rollback would find anything else in these rows.
            self._operations.append(Put(Table.MESSAGE, b"", [key for key, _ in turned], [value for _, value in turned]))
        self._left -= sum(len(value) + STEP_ROW_BYTES for _, value in rows)
        if self._left > 0:
            return None
        return RollBack(rows[-1][0] + b"\x00", operation.stop, operation.pointer)


def _touches(unseen: Put | Delete, operation: RollBack) -> bool:
    """Whether a put or delete of message rows may change what a rollback finds."""
    if isinstance(unseen, Delete):
        return any(operation.start <= key < operation.stop for key in unseen.keys)
    if not unseen.suffixes:
        return False
    first, last = unseen.prefix + unseen.suffixes[0], unseen.prefix + unseen.suffixes[-1]
    return first < operation.stop and last >= operation.start

"""Group commit over all topics: whoever finds nobody writing writes for all who wait.

LevelDB would join concurrent writers by itself, but two things speak for doing it here, on the event loop:

* A failed write can leave a torn record at the end of LevelDB's log and the handle open. A second
  writer that succeeds behind it is acknowledged, and gone at the next opening (with a full disk that
  was freed in between: tried, and a test). So no write may begin before the last one is known to be good.
* A hop into a thread per group costs less than one per commit: single-row commits of 16 tasks went from
  9 000 to 26 000 a second, those of 64 tasks from 9 500 to 55 000.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from protocol.effects import Delete, Put
from storage.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from protocol.effects import Expect, Operation

#: Bytes after which a group takes no further commit: beyond, joining saves nothing and only delays its first.
MAX_GROUP_BYTES = 4 << 20
#: What a row costs besides its value, roughly.
_ROW_BYTES = 64


@dataclass(eq=False, slots=True)
class Work:
    """One commit on its way to the disk."""

    operations: Sequence[Operation]
    expect: Sequence[Expect] = ()
    sync: bool = True
    turn: trio.Event = field(default_factory=trio.Event)
    """Set when the work is settled, or when it is this one's turn to write."""
    settled: bool = False
    error: StoreError | None = None
    rest: Sequence[Operation] = ()
    """What a long rollback leaves to do, once the work is settled: the next work of whoever submitted it."""


class Joining:
    """The queue before the database. As long as the number of writing tasks: one a topic."""

    def __init__(self, write: Callable[[list[Work]], Awaitable[None]]) -> None:
        """``write`` makes a group durable; a StoreError of it is the answer of the whole group."""
        self._write = write
        self._waiting: deque[Work] = deque()
        self._writing = False

    async def submit(self, work: Work) -> None:
        """Return when ``work`` is written; not interrupted by cancellation.

        Raises:
          StoreError, StoreConflict: as ``write`` raised it.
        """
        with trio.CancelScope(shield=True):
            if self._writing:
                self._waiting.append(work)
                await work.turn.wait()
            if not work.settled:
                self._writing = True
                await self._lead(work)
        if work.error is not None:
            # Each caller gets an exception of its own: one object raised in many tasks mixes their tracebacks.
            raise type(work.error)(work.error.detail, hint=work.error.hint) from work.error

    async def _lead(self, first: Work) -> None:
        group = self._group(first)
        # What the others learn if something unforeseen passes through: nobody may wait for ever.
        error: StoreError | None = StoreError("a commit of the same group failed")
        try:
            await self._write(group)
            error = None
        except StoreError as failed:
            error = failed
        finally:
            if self._waiting:
                self._waiting.popleft().turn.set()
            else:
                self._writing = False
            for work in group:
                work.settled, work.error = True, error
                work.turn.set()

    def _group(self, first: Work) -> list[Work]:
        """``first`` and those waiting behind it, in order; a commit with expectations goes alone."""
        group = [first]
        if first.expect or not self._waiting:
            return group
        size = _size(first)
        while self._waiting and not self._waiting[0].expect:
            size += _size(self._waiting[0])
            if size > MAX_GROUP_BYTES:
                break
            group.append(self._waiting.popleft())
        return group


def _size(work: Work) -> int:
    size = 0
    for operation in work.operations:
        if isinstance(operation, Put):
            size += len(operation.values) * _ROW_BYTES + sum(map(len, operation.values))
        elif isinstance(operation, Delete):
            size += len(operation.keys) * _ROW_BYTES
        else:
            # The rollbacks of a group share a bound of their own: storage.leveldb.rolling.
            size += _ROW_BYTES
    return size

"""Reading much of a store beside everything else it does: in small steps, with pauses, within a number of bytes a second."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from plainsong.protocol.effects import Table
    from storage.base import Reads, Row

#: Bytes of keys and values read at a time: a worker thread holds the interpreter for under a millisecond.
STEP_BYTES = 128 << 10
#: A pause is so many times as long as the step before it took. With 5, sixteen connections that publish as fast as they are
#: answered kept 0.88 of their rate (the median of five pairs; the worst 0.71), on two cores that seven others used too.
REST = 8.0


class Pace:
    """How fast a store is read: with pauses, and within a number of bytes a second.

    Args:
      on_pause: called at each pause; it renews the view that is read.
    """

    def __init__(self, bytes_per_s: int = 0, rest: float = REST, on_pause: Callable[[], object] = lambda: None) -> None:
        self._bytes_per_s = bytes_per_s
        self._rest = rest
        self._on_pause = on_pause

    async def rest(self, busy_s: float, size: int) -> None:
        """Pause after a step that took ``busy_s`` for ``size`` bytes."""
        pause_s = busy_s * self._rest
        if self._bytes_per_s:
            pause_s = max(pause_s, size / self._bytes_per_s - busy_s)
        self._on_pause()
        await trio.sleep(pause_s)


async def paced_rows(
    view: Reads, table: Table, start: bytes, stop: bytes, pace: Pace, work: Callable[[Sequence[Row]], object]
) -> AsyncGenerator[int, None]:
    """Read a range in steps; ``work`` runs with the rows of each in the thread that reads them.

    Yields the bytes of each step, before its pause: whoever has enough ends the iteration. Raises StoreError.
    """
    more = True
    while more:
        step = _Step(work)
        begun_s = trio.current_time()
        await view.scan(table, start, stop, step.take, first_chunk=256)
        busy_s = trio.current_time() - begun_s
        if step.last is None:
            return
        start, more = step.last + b"\x00", step.cut
        yield step.size
        await pace.rest(busy_s, step.size)


class _Step:
    """Rows of one step; in a worker thread."""

    def __init__(self, work: Callable[[Sequence[Row]], object]) -> None:
        self._work = work
        self.last: bytes | None = None
        self.size = 0
        self.cut = False

    def take(self, rows: Sequence[Row]) -> bool:
        self._work(rows)
        self.size += sum(len(key) + len(value) for key, value in rows)
        self.last = rows[-1][0]
        self.cut = self.size >= STEP_BYTES
        return not self.cut

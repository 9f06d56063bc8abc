"""Reads much of a store without disturbing its other users: in small steps, with pauses and a rate limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from plainsong.protocol.effects import Table
    from storage.base import Reads, Row

#: Bytes of keys and values read at a time: a worker thread holds the interpreter lock for under a millisecond.
STEP_BYTES = 128 << 10
#: A pause is this many times as long as the step before it. With 5, sixteen connections that published at full speed
#: lost an eighth of their rate.
REST = 8.0
#: Cost of a step to this process if the store is reached over a network: its nine or so calls (estimated), then each
#: row (metadata, which is the most expensive) and each byte (measured).
STEP_S, ROW_S, BYTE_S = 2e-3, 20e-6, 2e-9


class Pace:
    """Limits how fast a store is read: pauses, and bytes per second.

    Args:
      on_pause: called at each pause; renews the view that is read.
      is_far: True if the store is reached over a network. A step is mostly waiting then, which costs others nothing, so
        only its estimated work counts for the pause.
    """

    def __init__(
        self,
        bytes_per_s: int = 0,
        rest: float = REST,
        on_pause: Callable[[], object] = lambda: None,
        *,
        is_far: bool = False,
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._rest = rest
        self._on_pause = on_pause
        self._is_far = is_far

    async def rest(self, busy_s: float, size: int, *, read_rows: int | None = None) -> None:
        """Pause after a step that took ``busy_s`` for ``size`` bytes.

        Args:
          read_rows: rows of the store read in it; None if it did not use the store, so that all of it was work.
        """
        work_s = busy_s
        if self._is_far and read_rows is not None:
            # Processor time would include other users of the loop during the wait for the answer.
            work_s = min(busy_s, STEP_S + read_rows * ROW_S + size * BYTE_S)
        pause_s = work_s * self._rest
        if self._bytes_per_s:
            pause_s = max(pause_s, size / self._bytes_per_s - busy_s)
        self._on_pause()
        await trio.sleep(pause_s)


async def paced_rows(
    view: Reads, table: Table, start: bytes, stop: bytes, pace: Pace, work: Callable[[Sequence[Row]], object]
) -> AsyncGenerator[int, None]:
    """Read a range in steps; ``work`` runs with the rows of each in the thread that reads them.

    Yields the bytes of each step before its pause, so that a caller that has enough can stop. Raises StoreError.
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
        await pace.rest(busy_s, step.size, read_rows=step.count)


class _Step:
    """Collects the rows of one step, in a worker thread."""

    def __init__(self, work: Callable[[Sequence[Row]], object]) -> None:
        self._work = work
        self.last: bytes | None = None
        self.size = 0
        self.count = 0
        self.cut = False

    def take(self, rows: Sequence[Row]) -> bool:
        self._work(rows)
        self.size += sum(len(key) + len(value) for key, value in rows)
        self.count += len(rows)
        self.last = rows[-1][0]
        self.cut = self.size >= STEP_BYTES
        return not self.cut

"""The one thread that writes lines, and the bounded queue in front of it.

Whatever the output does — stands still, is closed, has no room — happens to this thread alone. Callers
put a line or lose it; at the exit nobody waits for longer than they said.
"""

from __future__ import annotations

import os
import select
import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes gathered for one write, where that many wait.
_GATHER_BYTES = 64 * 1024


class LineWriter:
    """Writes lines to a file descriptor in the background.

    Args:
      descriptor: where to; None where there is no output at all, which fails every line.
      max_lines: that may wait.
      gap: makes the line that stands for ``n`` dropped ones.
    """

    def __init__(self, descriptor: int | None, *, max_lines: int, gap: Callable[[int], str]) -> None:
        self.dropped = 0
        self.failed = 0
        self._descriptor = descriptor
        self._max_lines = max_lines
        self._gap = gap
        self._gap_told = 0
        self._torn = False
        self._closed = False
        # A SimpleQueue may be put to from anywhere, a signal handler and a destructor included.
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._put = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="plainsong-logs", daemon=True)
        self._thread.start()

    def put(self, line: str) -> None:
        """Have ``line`` written some time, or drop and count it. Never waits for the output."""
        with self._put:
            if self._closed or self._lines.qsize() >= self._max_lines:
                self.dropped += 1
            else:
                self._lines.put(line)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most ``timeout_s``; what is left then is counted as dropped."""
        with self._put:
            if not self._closed:
                self._closed = True
                self._lines.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._put:
                self.dropped += max(0, self._lines.qsize() - 1)

    def _run(self) -> None:
        while (first := self._lines.get()) is not None:
            batch, ended = self._gather(first)
            self._write(batch)
            if ended:
                break
        self._write([])

    def _gather(self, first: str) -> tuple[list[str], bool]:
        batch, size = [first], len(first)
        while size < _GATHER_BYTES:
            try:
                line = self._lines.get_nowait()
            except Empty:
                break
            if line is None:
                return batch, True
            batch.append(line)
            size += len(line)
        return batch, False

    def _write(self, batch: list[str]) -> None:
        missed = self.dropped - self._gap_told
        if missed:
            batch = [self._gap(missed), *batch]
        if not batch:
            return
        # A write that broke off left half a line behind: begin a new one.
        text = ("\n" if self._torn else "") + "\n".join(batch) + "\n"
        try:
            self._write_all(text.encode("utf-8", "backslashreplace"))
        except OSError:
            self.failed += len(batch) - (1 if missed else 0)
        else:
            self._gap_told += missed

    def _write_all(self, data: bytes) -> None:
        if self._descriptor is None:
            raise OSError("there is no output")
        rest = memoryview(data)
        while rest:
            try:
                written = os.write(self._descriptor, rest)
            except BlockingIOError:
                # Whoever shares the other end made it non-blocking.
                poll = select.poll()
                poll.register(self._descriptor, select.POLLOUT)
                poll.poll()
                continue
            rest = rest[written:]
            self._torn = bool(rest)

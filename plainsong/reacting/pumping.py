"""One process under watch: fed, listened to, ended with its group when its time is over or the end is asked for."""

from __future__ import annotations

import math
import os
import selectors
import signal
from contextlib import suppress
from time import monotonic
from typing import IO, TYPE_CHECKING

from plainsong.reacting.stopping import Stopped

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from typing import Self

    from plainsong.reacting.stopping import Stop

#: Between asking a process group to end and killing it.
KILL_AFTER_S = 5.0
#: Bytes read or written at once; as many of standard error are kept for its last line.
CHUNK = 1 << 16
#: What is still read of a stream when the process has ended; others may hold its pipes open for ever.
MAX_REST = 1 << 20
#: How often an exit is looked for where the kernel cannot tell of it.
LOOK_S = 0.02


class Pump:
    """A process with three pipes, which leads its process group. Use it in a ``with`` block, and nothing is left.

    Args:
      take: gets the name of a stream and bytes of it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], payload: bytes, stop: Stop, take: Callable[[str, bytes], None]
    ) -> None:
        self._process = process
        self._left = memoryview(payload)
        self._stop = stop
        self._take = take
        self._selector = selectors.DefaultSelector()
        self._has_ended = False
        self._pidfd: int | None = None
        #: Whether it was ended because its time was over.
        self.is_late = False
        #: The end of standard error.
        self.last_error = b""

    def __enter__(self) -> Self:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            os.set_blocking(pipe.fileno(), False)
        self._selector.register(self._process.stdin, selectors.EVENT_WRITE, self._feed)
        self._selector.register(self._process.stdout, selectors.EVENT_READ, lambda pipe: self._listen(pipe, "stdout"))
        self._selector.register(self._process.stderr, selectors.EVENT_READ, lambda pipe: self._listen(pipe, "stderr"))
        self._selector.register(self._stop, selectors.EVENT_READ, lambda _: self._stop.listened())
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self._process.pid)
            self._selector.register(self._pidfd, selectors.EVENT_READ, lambda _: self._look())
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)  # its leader has not been waited for, so the group is still its own
            self._process.wait()
        self._selector.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def run(self, timeout_s: float) -> int:
        """Until the process has ended.

        Returns:
          its exit code, negative for a signal.
        Raises:
          Stopped: the end was asked for, and it was ended for that.
        """
        until_s = monotonic() + timeout_s
        while not self._turn(min(until_s, self._stop.until_s)):
            if monotonic() >= until_s:
                self.is_late = True
                break
            if monotonic() >= self._stop.until_s:
                break
        if self._has_ended:
            return self._process.wait()
        self._end()
        if not self.is_late:
            raise Stopped
        return self._process.wait()

    def _end(self) -> None:
        self._signal_group(signal.SIGTERM)
        kill_s = monotonic() + KILL_AFTER_S
        while not self._turn(kill_s) and monotonic() < kill_s:
            pass
        self._signal_group(signal.SIGKILL)  # also whom the leader has left behind
        while not self._turn(math.inf):
            pass

    def _turn(self, until_s: float) -> bool:
        """Feed, listen and wait, until then at the latest; whether the process has ended."""
        wait_s = None if until_s == math.inf else max(0.0, until_s - monotonic())
        if self._pidfd is None:
            wait_s = LOOK_S if wait_s is None else min(wait_s, LOOK_S)
        if not self._has_ended:
            for key, _ in self._selector.select(wait_s):
                key.data(key.fileobj)
            if self._pidfd is None:
                self._look()
        return self._has_ended

    def _look(self) -> None:
        """Has it ended? It stays unwaited for, so that nobody else gets its number meanwhile."""
        self._has_ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        if self._has_ended:
            assert self._process.stdout is not None
            assert self._process.stderr is not None
            self._listen(self._process.stdout, "stdout", MAX_REST)
            self._listen(self._process.stderr, "stderr", MAX_REST)

    def _feed(self, pipe: IO[bytes]) -> None:
        try:
            self._left = self._left[os.write(pipe.fileno(), self._left[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it does not want to know; its exit code says whether that is an error
            self._left = memoryview(b"")
        if not self._left:
            self._selector.unregister(pipe)
            with suppress(BrokenPipeError):
                pipe.close()

    def _listen(self, pipe: IO[bytes], stream: str, limit: int = 1) -> None:
        """Read what there is; with a ``limit`` go on until there is no more, or that much was read."""
        if pipe.closed:
            return
        while limit > 0:
            try:
                data = os.read(pipe.fileno(), CHUNK)
            except BlockingIOError:
                return
            if not data:
                self._selector.unregister(pipe)
                pipe.close()
                return
            if stream == "stderr":
                self.last_error = (self.last_error + data)[-CHUNK:]
            self._take(stream, data)
            limit -= len(data)

    def _signal_group(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

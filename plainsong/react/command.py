"""An effect that runs a command: the payload is its standard input, the rest its environment, its exit code the verdict.

0 is done, 65 (EX_DATAERR of sysexits.h) rejects the message for good, anything else is retried.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import selectors
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import IO, TYPE_CHECKING, Protocol

from plainsong.react.reaction import Done, Reject, Retry
from plainsong.react.stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from plainsong.messages import Message
    from plainsong.react.reaction import Verdict
    from plainsong.react.stopping import Stop

#: The exit code that rejects a message for good. Source: sysexits.h, EX_DATAERR.
REJECTED = 65
#: Characters of the last line of standard error that a verdict quotes.
MAX_QUOTED = 300
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Output(Protocol):
    """Receives the output of commands."""

    def take(self, message: Message, stream: str, data: bytes) -> None:
        """Some bytes of ``stdout`` or ``stderr``, as they arrived."""
        ...

    def end(self, message: Message) -> None:
        """The attempt has no more output."""
        ...


class Runner:
    """Runs a command for each message.

    Args:
      words: the command and its arguments.
      environ: its environment, to which the variables about the message are added.
      namespace: the topic's namespace.
      timeout_s: for one attempt; then its process group is ended.
    """

    def __init__(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        namespace: str,
        *,
        timeout_s: float,
        stop: Stop,
        output: Output,
    ) -> None:
        self._words = list(words)
        inherited = {name: value for name, value in environ.items() if not name.startswith("PLAINSONG_ATTRIBUTE")}
        self._environ: dict[str, str | bytes] = {**inherited, "PLAINSONG_NAMESPACE": namespace}
        self._timeout_s = timeout_s
        self._stop = stop
        self._output = output

    def __call__(self, message: Message, attempt: int) -> Verdict:
        """Runs the command once. Raises Stopped: it was ended early for a stop."""
        environ = {**self._environ, **environment_of(message, attempt)}
        try:
            process = subprocess.Popen(  # noqa: S603 - running the user's command is the purpose
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environ,
                start_new_session=True,
                preexec_fn=_die_with_parent(),  # noqa: PLW1509 - only system calls
            )
        except (OSError, subprocess.SubprocessError) as error:
            return Retry(f"cannot start {self._words[0]}: {error}")
        try:
            with Pump(process, message.payload, self._stop, partial(self._output.take, message)) as pump:
                code = pump.run(self._timeout_s)
        finally:
            self._output.end(message)
        if pump.is_late:
            return Retry(_with_last_line(f"took longer than {self._timeout_s:g} s", pump.last_error))
        return verdict_of(code, pump.last_error)


def verdict_of(code: int, last_error: bytes = b"") -> Verdict:
    """The verdict for an exit code, negative for a signal.

    Args:
      last_error: the end of standard error, quoted in the verdict.
    """
    if code == 0:
        return Done()
    if code < 0:
        return Retry(_with_last_line(f"killed by {_signal_name(-code)}", last_error))
    why = _with_last_line(f"exit {code}", last_error)
    return Reject(why) if code == REJECTED else Retry(why)


def environment_of(message: Message, attempt: int) -> dict[str, str | bytes]:
    """The variables that describe a message. The payload is not among them, since it may be of any size.

    An attribute ``some-name`` is PLAINSONG_ATTRIBUTE_SOME_NAME, unless its value has a NUL, which no variable can
    hold. When two names become one variable, the first in alphabetical order wins.
    """
    variables: dict[str, str | bytes] = {
        "PLAINSONG_TOPIC": message.topic,
        "PLAINSONG_MESSAGE_ID": str(message.id),
        "PLAINSONG_PUBLISH_TIME_MS": str(message.id.publish_time_ms),
        "PLAINSONG_ATTEMPT": str(attempt),
        "PLAINSONG_ATTRIBUTES": json.dumps(dict(message.attributes)),
    }
    for name, value in sorted(message.attributes.items()):
        if "\0" not in value:
            variables.setdefault(variable_of(name), value.encode())
    if _is_plain(message.attributes.get("traceparent", "")):
        variables["TRACEPARENT"] = message.attributes["traceparent"]
    return variables


def variable_of(name: str) -> str:
    return "PLAINSONG_ATTRIBUTE_" + re.sub(r"[^A-Z0-9]", "_", name.upper())


def _is_plain(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _with_last_line(why: str, last_error: bytes) -> str:
    lines = last_error.decode("utf-8", "backslashreplace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    last = "".join(char if char.isprintable() else " " for char in last)
    return f"{why}: {last[:MAX_QUOTED]}" if last else why


def _die_with_parent() -> Callable[[], None] | None:
    """Makes the child die with this process, so that a command never runs concurrently with its own retry.

    On Linux only; elsewhere a command continues when this program is killed.
    """
    prctl, parent = _prctl, os.getpid()
    if prctl is None:
        return None

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)  # this process died before the call, and the signal with it

    return tie


# --- the process -----------------------------------------------------------------------------------


#: Between SIGTERM and SIGKILL to a process group.
KILL_AFTER_S = 5.0
#: Bytes read or written at once; as many of standard error are kept for its last line.
CHUNK = 1 << 16
#: Bytes read of a stream after the process has ended; other processes may keep its pipes open forever.
MAX_REST = 1 << 20
#: Interval between checks for an exit on kernels without pidfd.
LOOK_S = 0.02


def reap_orphans() -> None:
    """Reap orphans of commands, if this is the first process of a container.

    Call it only while no command of our own runs, or it would take that exit code.
    """
    if os.getpid() != 1:
        return
    with suppress(ChildProcessError):  # there are no more
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class Pump:
    """Feeds a process, reads its output, and ends it with its process group on a time-out or a stop.

    Use it in a ``with`` block, which leaves no process and no pipe open.

    Args:
      take: called with the name of a stream and bytes of it.
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
        #: True if the process was ended for its time-out.
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
        self._selector.register(self._stop, selectors.EVENT_READ, lambda _: self._stop.acknowledge())
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self._process.pid)
            self._selector.register(self._pidfd, selectors.EVENT_READ, lambda _: self._look())
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._signal_group(signal.SIGKILL)  # the leader was not reaped yet, so the group id was not reused
            self._process.wait()
        reap_orphans()
        self._selector.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def run(self, timeout_s: float) -> int:
        """Waits for the process and returns its exit code, negative for a signal.

        Raises:
          Stopped: a stop was requested, and the process was ended for it.
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
        self._signal_group(signal.SIGKILL)  # also children that outlived the leader
        while not self._turn(math.inf):
            pass

    def _turn(self, until_s: float) -> bool:
        """Feeds, reads and waits, until ``until_s`` at the latest; returns whether the process has ended."""
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
        """Checks whether the process has ended, without reaping it, so that its number is not used again."""
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
        except BrokenPipeError:  # the command closed its stdin; its exit code says whether that is an error
            self._left = memoryview(b"")
        if not self._left:
            self._selector.unregister(pipe)
            with suppress(BrokenPipeError):
                pipe.close()

    def _listen(self, pipe: IO[bytes], stream: str, limit: int = 1) -> None:
        """Reads what is available; with a ``limit``, until the end or that many bytes."""
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

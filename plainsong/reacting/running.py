"""An effect that is a command: the payload on its standard input, all else in its environment, its exit code the verdict.

0 is done, 65 (EX_DATAERR of sysexits.h) says that this message never will be, anything else that another attempt may
go better.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Protocol

from plainsong.reacting.pumping import Pump
from plainsong.reacting.verdicts import Again, Done, Never

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from plainsong.messages import Message
    from plainsong.reacting.stopping import Stop
    from plainsong.reacting.verdicts import Verdict

#: The exit code for a message that no attempt will do better with. Source: sysexits.h, EX_DATAERR.
NEVER = 65
#: Characters of the last line of standard error that a verdict quotes.
MAX_QUOTED = 300

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class Output(Protocol):
    """Where the command's output goes."""

    def take(self, message: Message, stream: str, data: bytes) -> None:
        """Some bytes of ``stdout`` or ``stderr``, as they came."""
        ...

    def end(self, message: Message) -> None:
        """There is no more from this attempt."""
        ...


class Runner:
    """Runs a command for each message.

    Args:
      words: the command and its arguments.
      environ: what its environment has besides what is told of the message.
      namespace: of the topic.
      timeout_s: how long an attempt may take; then its process group is ended.
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
        """One run of the command. Raises Stopped: it was ended before its time was over."""
        environ = {**self._environ, **told_of(message, attempt)}
        try:
            process = subprocess.Popen(  # noqa: S603 - to run what the user says is the purpose
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=environ,
                start_new_session=True,
                preexec_fn=_dying_with_us(),  # noqa: PLW1509 - system calls alone
            )
        except (OSError, subprocess.SubprocessError) as error:
            return Again(f"{self._words[0]} cannot be started: {error}")
        try:
            with Pump(process, message.payload, self._stop, partial(self._output.take, message)) as pump:
                code = pump.run(self._timeout_s)
        finally:
            self._output.end(message)
        if pump.is_late:
            return Again(_with_last_line(f"took longer than {self._timeout_s:g} s", pump.last_error))
        return verdict_of(code, pump.last_error)


def verdict_of(code: int, last_error: bytes = b"") -> Verdict:
    """What an exit code means; negative for a signal.

    Args:
      last_error: the end of what the command said on standard error.
    """
    if code == 0:
        return Done()
    if code < 0:
        return Again(_with_last_line(f"killed by {_signal_name(-code)}", last_error))
    why = _with_last_line(f"exit {code}", last_error)
    return Never(why) if code == NEVER else Again(why)


def told_of(message: Message, attempt: int) -> dict[str, str | bytes]:
    """The variables that tell a command of a message. Payloads are not among them: they may be of any size.

    An attribute ``some-name`` is PLAINSONG_ATTRIBUTE_SOME_NAME, unless its value has a NUL, which no variable can
    hold. Where two names become one variable it is the first in alphabetical order.
    """
    told: dict[str, str | bytes] = {
        "PLAINSONG_TOPIC": message.topic,
        "PLAINSONG_MESSAGE_ID": str(message.id),
        "PLAINSONG_PUBLISH_TIME_MS": str(message.id.publish_time_ms),
        "PLAINSONG_ATTEMPT": str(attempt),
        "PLAINSONG_ATTRIBUTES": json.dumps(dict(message.attributes)),
    }
    for name, value in sorted(message.attributes.items()):
        if "\0" not in value:
            told.setdefault(variable_of(name), value.encode())
    if _is_plain(message.attributes.get("traceparent", "")):
        told["TRACEPARENT"] = message.attributes["traceparent"]
    return told


def variable_of(name: str) -> str:
    """The environment variable for an attribute."""
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


def _dying_with_us() -> Callable[[], None] | None:
    """What the child does first: it is killed with us, so that no command works on beside its own repetition.

    Only Linux can; elsewhere a command goes on when this program is killed.
    """
    prctl, parent = _prctl, os.getpid()
    if prctl is None:
        return None

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)  # we are gone already, and the signal with us

    return tie

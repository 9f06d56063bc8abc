"""What ``plainsong on`` says: lines for people, events in JSON for programs, and the output of commands."""

from __future__ import annotations

import shlex
import sys
from typing import IO, TYPE_CHECKING, Any

import click

from plainsong.cli.say import echo_json, harmless
from plainsong.cli.times import show_length
from plainsong.reacting.verdicts import Done

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong.messages import Message
    from plainsong.reacting.reaction import Patience, Told
    from plainsong.reacting.running import Output
    from plainsong.reacting.verdicts import Verdict

#: A longer line of a command comes in pieces.
MAX_LINE_BYTES = 1 << 16


class Teller:
    """Says what happens to messages: on standard error what went wrong, or everything as JSON on standard output."""

    def __init__(self, patience: Patience, dead_letters: str | None, *, as_json: bool) -> None:
        self._patience = patience
        self._dead_letters = dead_letters
        self._as_json = as_json

    def __call__(self, told: Told) -> None:
        """Say one thing."""
        if self._as_json:
            echo_json(self._event(told))
        elif told.event != "done":
            click.echo(f"{told.message.id}: {self._line(told)}", err=True)

    def _event(self, told: Told) -> dict[str, Any]:
        event = {**named(told.event, told.message), "attempt": told.attempt}
        if told.event in ("done", "again"):
            event["tookMs"] = round(told.took_s * 1000)
        if told.event != "done":
            event["error"] = told.why
        if told.pause_s:
            event["pauseMs"] = round(told.pause_s * 1000)
        return event

    def _line(self, told: Told) -> str:
        why = harmless(told.why)
        if told.event == "dead-letter":
            return f"{why}; now in {self._dead_letters}, after {times(told.attempt)}"
        pause = show_length(told.pause_s * 1000)
        if told.event == "again":
            of = "" if self._patience.retries is None else f" of {self._patience.retries + 1}"
            return f"{why}; attempt {told.attempt + 1}{of} in {pause}"
        what = "the position cannot be saved" if told.event == "unsaved" else "it cannot be put aside"
        return f"{what}: {why}; again in {pause}"


def named(event: str, message: Message) -> dict[str, Any]:
    """The beginning of an event in JSON."""
    return {"event": event, "topic": message.topic, "id": str(message.id)}


def times(count: int) -> str:
    """``3 attempts``."""
    return "1 attempt" if count == 1 else f"{count} attempts"


# --- the output of commands ----------------------------------------------------------------------------


def output_for(*, prefix: bool, as_json: bool) -> Output:
    """Where a command's output goes: on as it is, line by line with the message's id, or as events."""
    if as_json:
        return EventOutput()
    return PrefixedOutput() if prefix else PlainOutput()


class PlainOutput:
    """Everything goes on at once, byte for byte."""

    def take(self, message: Message, stream: str, data: bytes) -> None:
        """Pass it on."""
        del message
        _write(_stream(stream), data)

    def end(self, message: Message) -> None:
        """Nothing is left."""


class _LineOutput:
    """Whole lines, and at the end what is left of one."""

    def __init__(self) -> None:
        self._left = {"stdout": b"", "stderr": b""}

    def take(self, message: Message, stream: str, data: bytes) -> None:
        """Say the lines that are whole."""
        *lines, left = (self._left[stream] + data).split(b"\n")
        while len(left) > MAX_LINE_BYTES:
            lines.append(left[:MAX_LINE_BYTES])
            left = left[MAX_LINE_BYTES:]
        self._left[stream] = left
        for line in lines:
            self.say(message, stream, line)

    def end(self, message: Message) -> None:
        """Say what is left."""
        for stream, left in self._left.items():
            if left:
                self.say(message, stream, left)
                self._left[stream] = b""

    def say(self, message: Message, stream: str, line: bytes) -> None:
        """One line, without its end."""
        raise NotImplementedError


class PrefixedOutput(_LineOutput):
    """Each line behind the id of its message."""

    def say(self, message: Message, stream: str, line: bytes) -> None:
        """Write it."""
        _write(_stream(stream), b"%s: %s\n" % (str(message.id).encode(), line))


class EventOutput(_LineOutput):
    """Each line an event in JSON."""

    def say(self, message: Message, stream: str, line: bytes) -> None:
        """Write it."""
        event = named("output", message)
        echo_json({**event, "stream": stream, "line": line.decode("utf-8", "backslashreplace")})


def _stream(name: str) -> IO[bytes]:
    return sys.stdout.buffer if name == "stdout" else sys.stderr.buffer


def _write(stream: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:  # an unbuffered stream may take a part
        left = left[stream.write(left) :]
    stream.flush()


# --- a dry run -----------------------------------------------------------------------------------------


class Pretended:
    """An effect that says what would be done, and does nothing."""

    def __init__(self, words: Sequence[str] | None, url: str | None, *, as_json: bool) -> None:
        self._told: dict[str, Any] = {"run": list(words)} if words is not None else {"post": url}
        self._line = f"would run: {shlex.join(words)}" if words is not None else f"would post to {url}"
        self._as_json = as_json

    def __call__(self, message: Message, attempt: int) -> Verdict:
        """Say it."""
        del attempt
        if self._as_json:
            echo_json({**named("would", message), "bytes": len(message.payload), **self._told})
        else:
            click.echo(f"{message.id} ({len(message.payload)} bytes): {self._line}")
        return Done()

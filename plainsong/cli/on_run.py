"""One run of `on`: begins, reacts and ends, and reports each message to people or as JSON.

The course of ``plainsong on``: how it begins, goes on, and ends, and what it says of that.
"""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import click

from plainsong.cli.options import show_length
from plainsong.cli.output import echo_json, harmless, note, show_count
from plainsong.cli.verb import CommandFailed, failure_of, one_line
from plainsong.protocol.errors import PlainsongError, PositionChanged
from plainsong.react.reaction import DeadLetters, Done, Reaction, Stuck
from plainsong.react.stopping import Stopped

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client
    from plainsong._sync.read import Reader
    from plainsong.cli.on_options import KeptPosition
    from plainsong.messages import Message
    from plainsong.react.command import Output
    from plainsong.react.reaction import Effect, Patience, ReactionEvent, Verdict
    from plainsong.react.stopping import Stop


class Course:
    """One run of the command.

    Args:
      dead_letter: the topic for what fails for good, or None.
      ends: it ends when there is no more.
      dry_run: the effect only says what would be done.
    """

    def __init__(
        self,
        client: Client,
        effect: Effect,
        stop: Stop,
        patience: Patience,
        keeper: KeptPosition,
        *,
        dead_letter: str | None,
        ends: bool,
        dry_run: bool,
        as_json: bool,
    ) -> None:
        self._stop = stop
        self._keeper = keeper
        self._ends = ends
        self._dry_run = dry_run
        self._as_json = as_json
        letters = None if dead_letter is None else DeadLetters(client, dead_letter, keeper.name)
        teller = _silent if dry_run else EventPrinter(patience, dead_letter, as_json=as_json)
        self._reaction = Reaction(effect, stop, patience, letters, teller, waits=not ends)

    def run(self, topic: str, reader: Reader) -> None:
        """To its end.

        Raises:
          click.Abort: SIGINT asked for it. CommandFailed: a message was given up, or the position is not ours alone.
          PlainsongError: of reading, a position, or a dead letter.
        """
        if self._as_json and not self._dry_run:
            echo_json({"event": "begun", "topic": topic, "position": self._keeper.name})
        elif not self._as_json:
            note(f"{topic}: position {self._keeper.name}" + ("" if self._ends else "; Ctrl-C ends"))
        try:
            self._reaction.run(reader)
        except Stopped:
            if self._stop.signal == signal.SIGINT:
                raise click.Abort from None
        except Stuck as error:
            raise _stuck(error) from error
        except PositionChanged as error:
            hint = "two at work need a --position each; after a plainsong reader reset start this again"
            raise failure_of(error, hint=hint) from error
        finally:
            with suppress(PlainsongError):  # its last chance to save; that it could not has been raised
                reader.close()
            self._say_ended(topic)

    def _say_ended(self, topic: str) -> None:
        done, dead = self._reaction.done, self._reaction.dead
        if self._dry_run:
            note(f"{show_count(done)} messages; nothing was done")
        elif self._as_json:
            echo_json({"event": "ended", "topic": topic, "done": done, "deadLetters": dead})
        else:
            note(f"{show_count(done)} messages done" + (f", {show_count(dead)} dead letters" if dead else ""))


def _silent(told: ReactionEvent) -> None:
    del told


def _stuck(error: Stuck) -> CommandFailed:
    message_id = str(error.message.id)
    failed = CommandFailed(
        f"message {message_id}: {one_line(error.why)} ({times(error.attempts)})",
        hint="it is still the first in line; --dead-letter TOPIC would have put it aside",
    )
    failed.word = "message_given_up"
    failed.more = {"topic": error.message.topic, "id": message_id, "attempts": error.attempts}
    return failed


# --- on told ---------------------------------------------------------------------------------------
#
# What ``plainsong on`` says: lines for people, events in JSON for programs, and the output of commands.


#: A longer line of a command comes in pieces.
MAX_LINE_BYTES = 1 << 16


class EventPrinter:
    """Says what happens to messages: on standard error what went wrong, or everything as JSON on standard output."""

    def __init__(self, patience: Patience, dead_letters: str | None, *, as_json: bool) -> None:
        self._patience = patience
        self._dead_letters = dead_letters
        self._as_json = as_json

    def __call__(self, told: ReactionEvent) -> None:
        """Say one thing."""
        if self._as_json:
            echo_json(self._event(told))
        elif told.event != "done":
            click.echo(f"{told.message.id}: {self._line(told)}", err=True)

    def _event(self, told: ReactionEvent) -> dict[str, Any]:
        event = {**named(told.event, told.message), "attempt": told.attempt}
        if told.event in ("done", "again"):
            event["tookMs"] = round(told.took_s * 1000)
        if told.event != "done":
            event["error"] = told.why
        if told.pause_s:
            event["pauseMs"] = round(told.pause_s * 1000)
        return event

    def _line(self, told: ReactionEvent) -> str:
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

"""One run of `on`: starts, reacts and ends, and reports each message to people or as JSON."""

from __future__ import annotations

import shlex
import signal
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any

import click

from plainsong.cli.command import CommandFailed, failure_of, one_line
from plainsong.cli.options import show_length
from plainsong.cli.output import counted, echo_json, escaped, note, show_messages
from plainsong.protocol.errors import PlainsongError, PositionChanged
from plainsong.react.reaction import DeadLetters, Done, Reaction, Stuck
from plainsong.react.stopping import Stopped
from plainsong.tracing import processing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client
    from plainsong._sync.read import Reader
    from plainsong.cli.on_options import KeptPosition
    from plainsong.messages import Message
    from plainsong.react.command import Output
    from plainsong.react.reaction import Effect, ReactionEvent, RetryPolicy, Verdict
    from plainsong.react.stopping import Stop


class OnRun:
    """One run of the command.

    Args:
      dead_letter: the topic for messages that fail for good, or None.
      ends: stop at the end of the topic.
      dry_run: the effect only reports what it would do.
    """

    def __init__(
        self,
        client: Client,
        effect: Effect,
        stop: Stop,
        retry_policy: RetryPolicy,
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
        report = _silent if dry_run else EventPrinter(retry_policy, dead_letter, as_json=as_json)
        self._reaction = Reaction(
            _traced(effect, client.namespace), stop, retry_policy, letters, report, waits=not ends
        )

    def run(self, topic: str, reader: Reader) -> None:
        """Reads and reacts until the end.

        Raises:
          click.Abort: stopped by SIGINT. CommandFailed: a message failed for good, or another process moved the
            position. PlainsongError: reading, saving the position or publishing a dead letter failed.
        """
        if self._as_json and not self._dry_run:
            echo_json({"event": "begun", "topic": topic, "position": self._keeper.name})
        elif not self._as_json:
            note(f"{topic}: position {self._keeper.name}" + ("" if self._ends else "; Ctrl-C stops"))
        try:
            self._reaction.run(reader)
        except Stopped:
            if self._stop.signal == signal.SIGINT:
                raise click.Abort from None
        except Stuck as error:
            raise _stuck(error) from error
        except PositionChanged as error:
            hint = "two processes need a --position each; after plainsong reader reset, start this again"
            raise failure_of(error, hint=hint) from error
        finally:
            with suppress(PlainsongError):  # the last chance to save; an earlier failure has been raised already
                reader.close()
            self._note_end(topic)

    def _note_end(self, topic: str) -> None:
        done, dead = self._reaction.done, self._reaction.dead
        if self._dry_run:
            note(f"{show_messages(done)}; nothing was done")
        elif self._as_json:
            echo_json({"event": "ended", "topic": topic, "done": done, "deadLetters": dead})
        else:
            note(f"{show_messages(done)} done" + (f", {counted(dead, 'dead letter')}" if dead else ""))


def _silent(event: ReactionEvent) -> None:
    del event


def _stuck(error: Stuck) -> CommandFailed:
    message_id = str(error.message.id)
    failed = CommandFailed(
        f"message {message_id}: {one_line(error.why)} ({counted(error.attempts, 'attempt')})",
        hint="the next run begins with it; with --dead-letter TOPIC it would have been moved there",
    )
    failed.word = "message_given_up"
    failed.more = {"topic": error.message.topic, "id": message_id, "attempts": error.attempts}
    return failed


# --- events ----------------------------------------------------------------------------------------


#: A longer line of a command's output is split.
MAX_LINE_BYTES = 1 << 16


class EventPrinter:
    """Prints failures on standard error, or all events as JSON on standard output."""

    def __init__(self, retry_policy: RetryPolicy, dead_letters: str | None, *, as_json: bool) -> None:
        self._retry_policy = retry_policy
        self._dead_letters = dead_letters
        self._as_json = as_json

    def __call__(self, event: ReactionEvent) -> None:
        if self._as_json:
            echo_json(self._fields(event))
        elif event.kind != "done":
            click.echo(f"{event.message.id}: {self._line(event)}", err=True)

    def _fields(self, event: ReactionEvent) -> dict[str, Any]:
        fields = {**named(event.kind, event.message), "attempt": event.attempt}
        if event.kind in ("done", "again"):
            fields["tookMs"] = round(event.took_s * 1000)
        if event.kind != "done":
            fields["error"] = event.why
        if event.pause_s:
            fields["pauseMs"] = round(event.pause_s * 1000)
        return fields

    def _line(self, event: ReactionEvent) -> str:
        why = escaped(event.why)
        if event.kind == "dead-letter":
            return f"{why}; now in {self._dead_letters}, after {counted(event.attempt, 'attempt')}"
        pause = show_length(event.pause_s * 1000)
        if event.kind == "again":
            of = "" if self._retry_policy.retries is None else f" of {self._retry_policy.retries + 1}"
            return f"{why}; attempt {event.attempt + 1}{of} in {pause}"
        what = "cannot save the position" if event.kind == "unsaved" else "cannot publish the dead letter"
        return f"{what}: {why}; retry in {pause}"


def named(event: str, message: Message) -> dict[str, Any]:
    """The first fields of an event in JSON."""
    return {"event": event, "topic": message.topic, "id": str(message.id)}


# --- the output of commands ----------------------------------------------------------------------------


def output_for(*, prefix: bool, as_json: bool) -> Output:
    """Chooses how a command's output is passed on: unchanged, by line with the message's id, or as events."""
    if as_json:
        return EventOutput()
    return PrefixedOutput() if prefix else PlainOutput()


class PlainOutput:
    """Passes everything on at once, byte for byte."""

    def take(self, message: Message, stream: str, data: bytes) -> None:
        del message
        _write(_stream(stream), data)

    def end(self, message: Message) -> None:
        """Nothing is buffered."""


class _LineOutput:
    """Passes on whole lines, and at the end the rest."""

    def __init__(self) -> None:
        self._left = {"stdout": b"", "stderr": b""}

    def take(self, message: Message, stream: str, data: bytes) -> None:
        *lines, left = (self._left[stream] + data).split(b"\n")
        while len(left) > MAX_LINE_BYTES:
            lines.append(left[:MAX_LINE_BYTES])
            left = left[MAX_LINE_BYTES:]
        self._left[stream] = left
        for line in lines:
            self.say(message, stream, line)

    def end(self, message: Message) -> None:
        for stream, left in self._left.items():
            if left:
                self.say(message, stream, left)
                self._left[stream] = b""

    def say(self, message: Message, stream: str, line: bytes) -> None:
        """Writes one line, given without its end."""
        raise NotImplementedError


class PrefixedOutput(_LineOutput):
    """Puts the message's id before each line."""

    def say(self, message: Message, stream: str, line: bytes) -> None:
        _write(_stream(stream), b"%s: %s\n" % (str(message.id).encode(), line))


class EventOutput(_LineOutput):
    """Prints each line as an event in JSON."""

    def say(self, message: Message, stream: str, line: bytes) -> None:
        event = named("output", message)
        echo_json({**event, "stream": stream, "line": line.decode("utf-8", "backslashreplace")})


def _stream(name: str) -> IO[bytes]:
    return sys.stdout.buffer if name == "stdout" else sys.stderr.buffer


def _write(stream: IO[bytes], data: bytes) -> None:
    left = memoryview(data)
    while left:  # an unbuffered stream may write a part
        left = left[stream.write(left) :]
    stream.flush()


# --- a dry run -----------------------------------------------------------------------------------------


class DryRunEffect:
    """Reports what the effect would do, and does nothing."""

    def __init__(self, words: Sequence[str] | None, url: str | None, *, as_json: bool) -> None:
        self._action: dict[str, Any] = {"run": list(words)} if words is not None else {"post": url}
        self._line = f"would run: {shlex.join(words)}" if words is not None else f"would post to {url}"
        self._as_json = as_json

    def __call__(self, message: Message, attempt: int) -> Verdict:
        del attempt
        if self._as_json:
            echo_json({**named("would", message), "bytes": len(message.payload), **self._action})
        else:
            click.echo(f"{message.id} ({len(message.payload)} bytes): {self._line}")
        return Done()


def _traced(effect: Effect, namespace: str) -> Effect:
    def attempted(message: Message, attempt: int) -> Verdict:
        with processing(message, namespace=namespace):
            return effect(message, attempt)

    return attempted

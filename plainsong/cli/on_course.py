"""The course of ``plainsong on``: how it begins, goes on, and ends, and what it says of that."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from plainsong.cli.exits import CommandFailed
from plainsong.cli.on_told import Teller, times
from plainsong.cli.say import echo_json, note
from plainsong.cli.tables import show_count
from plainsong.cli.verb import failure_of, one_line
from plainsong.reacting.dead_letters import DeadLetters
from plainsong.reacting.reaction import Reaction, Stuck
from plainsong.reacting.stopping import Stopped
from protocol.errors import PlainsongError, PositionChanged

if TYPE_CHECKING:
    from plainsong import Client
    from plainsong.cli.on_parts import Keeper
    from plainsong.reacting.reaction import Patience, Told
    from plainsong.reacting.stopping import Stop
    from plainsong.reacting.verdicts import Effect
    from plainsong.sync.reader import Reader


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
        keeper: Keeper,
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
        teller = _silent if dry_run else Teller(patience, dead_letter, as_json=as_json)
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


def _silent(told: Told) -> None:
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

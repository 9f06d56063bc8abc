"""The loop around an effect: one message at a time, in order, until each is done or given up; nothing is skipped.

    next message → attempt → done ────────────────────────→ position saved → next message
                      │  └─→ again: pause, next attempt         ↑
                      └────→ never, or too often → dead letter ─┘   (without dead letters: the end, not behind it)

The position is saved after the effect, so what dies in between repeats it: at least once. A dead letter is there
before the position is behind its message, and once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal

from plainsong.core.attempts import may_repeat
from plainsong.reacting.stopping import Stopped
from plainsong.reacting.verdicts import Again, Done
from protocol.errors import PlainsongError

if TYPE_CHECKING:
    from collections.abc import Callable

    from plainsong.messages import Message
    from plainsong.reacting.dead_letters import DeadLetters
    from plainsong.reacting.stopping import Stop
    from plainsong.reacting.verdicts import Effect, Never
    from plainsong.sync.reader import Reader


class Stuck(Exception):
    """A message was given up, and there are no dead letters: it is the first one next time."""

    def __init__(self, message: Message, why: str, attempts: int) -> None:
        super().__init__(why)
        self.message = message
        self.why = why
        self.attempts = attempts


@dataclass(frozen=True, slots=True)
class Patience:
    """How often, and after what pauses."""

    retries: int | None = 8
    """Attempts after the first one; None: for ever."""
    pause_s: float = 0.5
    """Before the second attempt; doubles each time, and is shortened by up to half at random."""
    max_pause_s: float = 60.0
    """Of any pause, also one that the other side asks for."""

    def pause_after(self, attempt: int, verdict: Again, chance: float) -> float:
        """The pause after attempt number ``attempt``; ``chance`` is from 0 to 1."""
        doubled: float = min(self.max_pause_s, self.pause_s * 2.0 ** min(attempt - 1, 60))
        return min(self.max_pause_s, max(doubled * (1 - chance / 2), verdict.pause_s))

    def is_over(self, attempt: int) -> bool:
        """Whether there is none after attempt number ``attempt``."""
        return self.retries is not None and attempt > self.retries


@dataclass(frozen=True, slots=True)
class Told:
    """Something happened to a message."""

    event: Literal["done", "again", "dead-letter", "unsaved", "unsent"]
    """``unsaved`` and ``unsent``: the daemon does not take the position, or the dead letter; it is tried again."""
    message: Message
    attempt: int
    why: str = ""
    pause_s: float = 0.0
    took_s: float = 0.0


@dataclass(slots=True)
class Reaction:
    """Works off what a reader brings. In one thread, the main one where ``stop`` listens to signals."""

    effect: Effect
    stop: Stop
    patience: Patience
    dead_letters: DeadLetters | None
    tell: Callable[[Told], object]
    waits: bool = True
    """Whether a daemon that is away is waited for, when a position is to be saved."""
    chance: Callable[[], float] = random.random
    done: int = 0
    """Messages that were done."""
    dead: int = 0
    """Messages that became dead letters."""

    def run(self, reader: Reader) -> None:
        """Until the reader's end.

        Raises:
          Stopped: the message at hand was given back. Stuck: it was given up.
          PlainsongError: of reading, or of a position (it was not saved, or somebody else has moved it) or a dead
            letter; what is not behind the position comes again.
        """
        messages = iter(reader)
        while True:
            with self.stop.interrupting():
                message = next(messages, None)
            if message is None:
                return
            is_done = self._settle(message)
            self._patiently(reader.save, "unsaved", message)
            if is_done:
                self.done += 1
            elif self.dead_letters is not None:
                self.dead += 1
                self.dead_letters.forget(message)

    def _settle(self, message: Message) -> bool:
        """Attempt until it is done, or a dead letter; whether it is done."""
        attempt = 0
        while True:
            self.stop.check()
            attempt += 1
            began_s = monotonic()
            verdict = self.effect(message, attempt)
            took_s = monotonic() - began_s
            if isinstance(verdict, Done):
                self.tell(Told("done", message, attempt, took_s=took_s))
                return True
            if not isinstance(verdict, Again) or self.patience.is_over(attempt):
                self._give_up(message, verdict, attempt)
                return False
            pause_s = self.patience.pause_after(attempt, verdict, self.chance())
            self.tell(Told("again", message, attempt, verdict.why, pause_s, took_s))
            self.stop.pause(pause_s)

    def _give_up(self, message: Message, verdict: Again | Never, attempts: int) -> None:
        letters = self.dead_letters
        if letters is None:
            raise Stuck(message, verdict.why, attempts)
        self._patiently(lambda: letters.put(message, verdict.why, attempts), "unsent", message)
        self.tell(Told("dead-letter", message, attempts, verdict.why))

    def _patiently(self, work: Callable[[], None], event: Literal["unsaved", "unsent"], message: Message) -> None:
        """Do what needs the daemon, also one that is away just now. Raises what it failed with, when there is no waiting."""
        tries = 0
        while True:
            try:
                work()
            except PlainsongError as error:
                if not self.waits or not may_repeat("harmless", error):
                    raise
                tries += 1
                pause_s = self.patience.pause_after(tries, Again(""), self.chance())
                self.tell(Told(event, message, tries, error.detail or error.title, pause_s))
                try:
                    self.stop.pause(pause_s)
                except Stopped:
                    raise error from None
            else:
                return

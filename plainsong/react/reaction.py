"""The loop around an effect: one message at a time, in order, until each is done or is put into a dead-letter topic.

What became of one attempt at one message: it is done, it is worth another attempt, or it never will be.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from plainsong.messages import Outgoing
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES
from plainsong.react.stopping import Stopped
from plainsong.retry import may_repeat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plainsong._sync.client import Client
    from plainsong._sync.read import Reader
    from plainsong.messages import Message
    from plainsong.react.stopping import Stop


@dataclass(frozen=True, slots=True)
class Done:
    """The effect has happened."""


@dataclass(frozen=True, slots=True)
class Again:
    """It has not, or nobody knows; another attempt may go better."""

    why: str
    """One line, for people and for dead letters."""
    pause_s: float = 0.0
    """How long whoever was asked wants to be left alone; 0: he did not say."""


@dataclass(frozen=True, slots=True)
class Never:
    """It has not, and this very message is the reason: no attempt will go better."""

    why: str
    """One line, for people and for dead letters."""


Verdict: TypeAlias = Done | Again | Never


class Effect(Protocol):
    """What is done about a message."""

    def __call__(self, message: Message, attempt: int) -> Verdict:
        """One attempt; the first is number 1. Raises Stopped when it was given up for the sake of an early end."""
        ...


# --- reaction --------------------------------------------------------------------------------------
#
# The loop around an effect: one message at a time, in order, until each is done or given up; nothing is skipped.
#
#     next message → attempt → done ────────────────────────→ position saved → next message
#                       │  └─→ again: pause, next attempt         ↑
#                       └────→ never, or too often → dead letter ─┘   (without dead letters: the end, not behind it)
#
# The position is saved after the effect, so what dies in between repeats it: at least once. A dead letter is there
# before the position is behind its message, and once.


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
class ReactionEvent:
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
    tell: Callable[[ReactionEvent], object]
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
                self.tell(ReactionEvent("done", message, attempt, took_s=took_s))
                return True
            if not isinstance(verdict, Again) or self.patience.is_over(attempt):
                self._give_up(message, verdict, attempt)
                return False
            pause_s = self.patience.pause_after(attempt, verdict, self.chance())
            self.tell(ReactionEvent("again", message, attempt, verdict.why, pause_s, took_s))
            self.stop.pause(pause_s)

    def _give_up(self, message: Message, verdict: Again | Never, attempts: int) -> None:
        letters = self.dead_letters
        if letters is None:
            raise Stuck(message, verdict.why, attempts)
        self._patiently(lambda: letters.put(message, verdict.why, attempts), "unsent", message)
        self.tell(ReactionEvent("dead-letter", message, attempts, verdict.why))

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
                self.tell(ReactionEvent(event, message, tries, error.detail or error.title, pause_s))
                try:
                    self.stop.pause(pause_s)
                except Stopped:
                    raise error from None
            else:
                return


# --- dead letters ----------------------------------------------------------------------------------
#
# Messages that could not be worked off, in a topic of their own: each once, with where it came from and why.
#
# Every dead letter has a producer of its own, whose name is made of the message's id: sent again after a crash it
# is stored once. When the reader's position is behind the message for good, nobody sends it again, and the producer
# is forgotten.


#: Bytes of ``error`` at most, and what there must be room for whatever the message brings.
MAX_ERROR_BYTES = 1024
MIN_ERROR_BYTES = 200
#: For the daemon to take one; then it is tried again, or the end may come.
DEADLINE_S = 15.0


class DeadLetters:
    """A topic for dead letters.

    Args:
      topic: in the client's own namespace.
      reader: who gives messages up: his position's name. Two readers of one topic have dead letters of their own.
    """

    def __init__(self, client: Client, topic: str, reader: str) -> None:
        self.topic = topic
        self._client = client
        self._reader = reader

    def put(self, message: Message, why: str, attempts: int) -> None:
        """Publish a message as a dead letter; the same again is stored once. Raises PlainsongError."""
        letter = Outgoing(message.payload, attributes=attributes_of(message, why, attempts))
        name = self._name(message)
        with self._client.producer(self.topic, name, optional=True, deadline_s=DEADLINE_S) as producer:
            producer.publish([letter], sequence_ids=[0], deadline_s=DEADLINE_S)

    def forget(self, message: Message) -> None:
        """Nobody will put this one again. Where this fails, the topic forgets by itself after a while."""
        with suppress(PlainsongError):
            self._client.delete_producer(self.topic, self._name(message))

    def _name(self, message: Message) -> str:
        whole = f"{self._reader}\n{self._client.namespace}:{message.topic}:{message.id}"
        return f"on-{hashlib.sha256(whole.encode()).hexdigest()[:32]}"


def attributes_of(message: Message, why: str, attempts: int) -> dict[str, str]:
    """The message's own attributes, and ``originalTopic``, ``originalId``, ``attempts`` and ``error``.

    Together they keep to the bound of all attributes: ``error`` is shortened, and where that is not enough its own are left out.
    """
    told = {"originalTopic": message.topic, "originalId": str(message.id), "attempts": str(attempts)}
    kept = {name: value for name, value in message.attributes.items() if name not in (*told, "error")}
    said = why.encode("utf-8", "replace")[:MAX_ERROR_BYTES]
    if _room(kept, told) < min(len(said), MIN_ERROR_BYTES):
        kept = {}
    error = said[: _room(kept, told)].decode("utf-8", "ignore")
    return {**kept, **told, "error": error}


def _room(kept: Mapping[str, str], told: Mapping[str, str]) -> int:
    """Bytes that are left for the text of ``error``."""
    return MAX_ATTRIBUTE_BYTES - size_of({**kept, **told, "error": ""})


def size_of(attributes: Mapping[str, str]) -> int:
    """Bytes of names and values, as the bound counts them."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in attributes.items())

"""The loop around an effect: one message at a time, in order, until each is done or is put into a dead-letter topic.

    next message → attempt → done ────────────────────→ position saved → next message
                      │  └─→ retry: pause, next attempt     ↑
                      └────→ rejected, or too many retries → dead letter
                                                            (without dead letters: the run ends before the message)

The position is saved after the effect, so a run that dies in between repeats the message: at least once. A dead letter
is published, once, before the position passes its message.
"""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias

from plainsong.messages import Outgoing
from plainsong.protocol.backoff import Backoff
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.requests import MAX_ATTRIBUTE_BYTES
from plainsong.react.stopping import Stopped
from plainsong.retry import may_repeat
from plainsong.settings import upload_s

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
class Retry:
    """The effect failed, or its outcome is unknown; another attempt may succeed."""

    why: str
    """One line, reported and stored in the dead letter."""
    pause_s: float = 0.0
    """The pause that the endpoint asked for; 0: none."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The effect failed because of this message: no attempt will succeed."""

    why: str
    """One line, reported and stored in the dead letter."""


Verdict: TypeAlias = Done | Retry | Reject


class Effect(Protocol):
    """The action for a message."""

    def __call__(self, message: Message, attempt: int) -> Verdict:
        """Makes one attempt; the first is number 1. Raises Stopped if it was abandoned because of a stop."""
        ...


# --- reaction --------------------------------------------------------------------------------------


class Stuck(Exception):
    """A message failed permanently, and there is no dead-letter topic: the next run starts with it."""

    def __init__(self, message: Message, why: str, attempts: int) -> None:
        super().__init__(why)
        self.message = message
        self.why = why
        self.attempts = attempts


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Limits the retries, and sets the pauses between them."""

    retries: int | None = 8
    """Attempts after the first; None: no limit."""
    pause_s: float = 0.5
    """Before the second attempt; doubles each time, and is shortened at random by up to half."""
    max_pause_s: float = 60.0
    """Limits every pause, including one that the endpoint asks for."""

    def backoff(self, random: Callable[[], float]) -> Backoff:
        """Return the pauses between the attempts at one thing, before ``at_most``; ``random``: as for ``Backoff``."""
        pauses_s = [min(self.pause_s, self.max_pause_s)]
        while 0 < pauses_s[-1] < self.max_pause_s:
            pauses_s.append(min(2 * pauses_s[-1], self.max_pause_s))
        return Backoff(pauses_s, random)

    def at_most(self, pause_s: float, wanted_s: float) -> float:
        """Return the pause of a backoff, or the longer one that the endpoint asked for, up to the limit."""
        return min(self.max_pause_s, max(pause_s, wanted_s))


@dataclass(frozen=True, slots=True)
class ReactionEvent:
    """An event in the processing of a message."""

    kind: Literal["done", "again", "dead-letter", "unsaved", "unsent"]
    """``unsaved`` and ``unsent``: saving the position, or publishing the dead letter, failed and is retried."""
    message: Message
    attempt: int
    why: str = ""
    pause_s: float = 0.0
    took_s: float = 0.0


class _Tried(NamedTuple):
    """The last attempt at one thing."""

    verdict: Verdict
    attempts: int
    last_took_s: float


@dataclass(slots=True)
class Reaction:
    """Processes the messages of a reader, in one thread; in the main thread if ``stop`` listens to signals."""

    effect: Effect
    stop: Stop
    retry_policy: RetryPolicy
    dead_letters: DeadLetters | None
    report: Callable[[ReactionEvent], object]
    waits: bool = True
    """True if saving a position or publishing a dead letter waits for an unavailable daemon."""
    chance: Callable[[], float] = random.random
    done: int = 0
    """Messages that succeeded."""
    dead: int = 0
    """Messages that became dead letters."""

    def run(self, reader: Reader) -> None:
        """Processes messages until the reader ends.

        Raises:
          Stopped: the current message was returned unprocessed. Stuck: it failed permanently.
          PlainsongError: reading failed, the position was not saved or another process moved it, or a dead letter was
            not published. Messages after the position are delivered again.
        """
        messages = iter(reader)
        while True:
            with self.stop.interrupting():
                message = next(messages, None)
            if message is None:
                return
            is_done = self._settle(message)
            self._until_available(reader.save, "unsaved", message)
            if is_done:
                self.done += 1
            elif self.dead_letters is not None:
                self.dead += 1
                self.dead_letters.forget(message)

    def _settle(self, message: Message) -> bool:
        """Tries until the message is done or dead-lettered. True if it is done."""

        def try_once(attempt: int) -> Verdict:
            self.stop.check()
            return self.effect(message, attempt)

        tried = self._repeat(try_once, "again", message, self.retry_policy.retries)
        if isinstance(tried.verdict, Done):
            self.report(ReactionEvent("done", message, tried.attempts, took_s=tried.last_took_s))
            return True
        self._give_up(message, tried.verdict, tried.attempts)
        return False

    def _repeat(
        self,
        try_once: Callable[[int], Verdict],
        event: Literal["again", "unsaved", "unsent"],
        message: Message,
        retries: int | None,
    ) -> _Tried:
        """Try until the verdict is not to retry, or ``retries`` (None: no limit) are exhausted; reports each retry."""
        backoff = self.retry_policy.backoff(self.chance)
        for attempt in count(1):
            began_s = monotonic()
            verdict = try_once(attempt)
            took_s = monotonic() - began_s
            if not isinstance(verdict, Retry) or (retries is not None and attempt > retries):
                return _Tried(verdict, attempt, took_s)
            pause_s = self.retry_policy.at_most(backoff.failed(), verdict.pause_s)
            self.report(ReactionEvent(event, message, attempt, verdict.why, pause_s, took_s))
            self.stop.pause(pause_s)
        raise AssertionError("counting does not end")

    def _give_up(self, message: Message, verdict: Retry | Reject, attempts: int) -> None:
        letters = self.dead_letters
        if letters is None:
            raise Stuck(message, verdict.why, attempts)
        self._until_available(lambda: letters.put(message, verdict.why, attempts), "unsent", message)
        self.report(ReactionEvent("dead-letter", message, attempts, verdict.why))

    def _until_available(self, work: Callable[[], None], event: Literal["unsaved", "unsent"], message: Message) -> None:
        """Retries ``work`` while the daemon is unavailable. Raises its error if the run does not wait."""
        last: PlainsongError | None = None

        def try_once(_: int) -> Verdict:
            nonlocal last
            try:
                work()
            except PlainsongError as error:
                if not self.waits or not may_repeat("harmless", error):
                    raise
                last = error
                return Retry(error.detail or error.title)
            return Done()

        try:
            self._repeat(try_once, event, message, None)
        except Stopped:
            if last is None:
                raise
            raise last from None


# --- dead letters ----------------------------------------------------------------------------------
#
# Every dead letter has its own producer, named after the message's id, so that one that is sent again after a crash is
# stored once. Once the saved position has passed the message, it is never sent again, and the producer is deleted.


#: Limits on the bytes of ``error``; the message's own attributes are dropped if they leave less than the minimum.
MAX_ERROR_BYTES = 1024
MIN_ERROR_BYTES = 200
#: The limit for publishing one dead letter, in addition to ``upload_s``; then it is retried, or the run may stop.
DEADLINE_S = 15.0


class DeadLetters:
    """Publishes messages that failed permanently, each once, with their origin and the error.

    Args:
      topic: in the client's own namespace.
      reader: name of the reader's position, so that two readers of one topic have separate dead letters.
    """

    def __init__(self, client: Client, topic: str, reader: str) -> None:
        self.topic = topic
        self._client = client
        self._reader = reader

    def put(self, message: Message, why: str, attempts: int) -> None:
        """Publishes a dead letter; the same one sent again is stored once. Raises PlainsongError."""
        letter = Outgoing(message.payload, attributes=attributes_of(message, why, attempts))
        name = self._name(message)
        with self._client.producer(self.topic, name, optional=True, deadline_s=DEADLINE_S) as producer:
            producer.publish([letter], sequence_ids=[0], deadline_s=DEADLINE_S + upload_s(len(message.payload)))

    def forget(self, message: Message) -> None:
        """Forgets the producer of a dead letter; if this fails, the topic forgets it after its retention time."""
        with suppress(PlainsongError):
            self._client.admin.delete_producer(self.topic, self._name(message))

    def _name(self, message: Message) -> str:
        whole = f"{self._reader}\n{self._client.namespace}:{message.topic}:{message.id}"
        return f"on-{hashlib.sha256(whole.encode()).hexdigest()[:32]}"


def attributes_of(message: Message, why: str, attempts: int) -> dict[str, str]:
    """The message's own attributes, and ``originalTopic``, ``originalId``, ``attempts`` and ``error``.

    To stay within the limit on attributes, ``error`` is cut, and if that is not enough the message's own are dropped.
    """
    origin = {"originalTopic": message.topic, "originalId": str(message.id), "attempts": str(attempts)}
    kept = {name: value for name, value in message.attributes.items() if name not in (*origin, "error")}
    text = why.encode("utf-8", "replace")[:MAX_ERROR_BYTES]
    if _room(kept, origin) < min(len(text), MIN_ERROR_BYTES):
        kept = {}
    error = text[: _room(kept, origin)].decode("utf-8", "ignore")
    return {**kept, **origin, "error": error}


def _room(kept: Mapping[str, str], origin: Mapping[str, str]) -> int:
    """Bytes left for the text of ``error``."""
    return MAX_ATTRIBUTE_BYTES - size_of({**kept, **origin, "error": ""})


def size_of(attributes: Mapping[str, str]) -> int:
    """Bytes of names and values, as the bound counts them."""
    return sum(len(name.encode()) + len(value.encode()) for name, value in attributes.items())

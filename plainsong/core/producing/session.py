"""The session of a producer: its name and epoch, how it is opened, and when it is over."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plainsong.core.attempts import Backoff
from plainsong.core.effects import Now, Pause
from plainsong.core.producing import calls
from plainsong.core.producing.numbering import checked_sequence_id
from plainsong.protocol.errors import DeduplicationDisabled, InvalidParameter, PlainsongError

if TYPE_CHECKING:
    from plainsong.core.effects import Steps
    from plainsong.core.operations import Operations
    from plainsong.core.producing.calls import Known


@dataclass(slots=True)
class Session:
    """What a producer is to its topic. Changed by whoever delivers, one at a time."""

    topic: str
    name: str
    epoch: int | None
    """None: there is no session, since deduplication is switched off."""
    generation: int
    last_sequence_id: int
    """The highest that is known to be durable; -1: none."""
    optional: bool
    doubted: int = -1
    """Up to this a request may have come whose outcome nobody knows; -1: there is none."""
    over: PlainsongError | None = None
    """Why nothing may be sent any more."""

    def passed(self, sequence_id: int) -> None:
        """So far it is durable."""
        self.last_sequence_id = max(self.last_sequence_id, sequence_id)


def begin(
    operations: Operations,
    topic: str,
    name: str | None,
    *,
    initial_sequence_id: int | None,
    optional: bool,
    retention_s: int | None,
    deadline_s: float | None,
) -> Steps[Session]:
    """A session, and whatever older one there was of that name is over.

    Raises:
      InvalidParameter, InvalidSequenceIds: nothing was sent.
      DeduplicationDisabled: it is switched off there, and not ``optional``. TopicNotFound, TooManyProducers, and
      whatever the daemon answers: nothing happened that another opening would not mend.
    """
    if name is not None:
        _check_name(name)
    if initial_sequence_id is not None:
        checked_sequence_id(initial_sequence_id)
    if retention_s is not None and not (isinstance(retention_s, int) and retention_s > 0):
        raise InvalidParameter(f"retention_s is {retention_s!r}", hint="use a whole number of seconds above 0")
    limit_s = operations.settings.deadline_s if deadline_s is None else deadline_s
    try:
        known, _ = yield from opened(operations, topic, name, retention_s=retention_s, limit_s=limit_s)
    except DeduplicationDisabled:
        if not optional:
            raise
        return Session(topic, name or uuid.uuid4().hex, None, 0, -1, optional)
    return Session(topic, known.producer, known.epoch, known.generation, known.last_sequence_id, optional)


def _check_name(name: str) -> None:
    if not name:
        raise InvalidParameter("the producer's name is empty", hint="leave it out: the daemon makes one")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidParameter(
            f"the producer's name {name!r} cannot be written as UTF-8",
            hint="any text but half a surrogate pair will do",
        ) from error


def opened(
    operations: Operations,
    topic: str,
    name: str | None,
    *,
    limit_s: float,
    retention_s: int | None = None,
    generation: int | None = None,
) -> Steps[tuple[Known, int]]:
    """What the daemon knows of it, and how many sessions this may have opened.

    An opening whose answer is lost is made again: one session more that nobody uses.
    """
    call = calls.open_session(operations.namespace, topic, name, retention_s=retention_s, generation=generation)
    begun_s: float = yield Now()
    backoff, count = Backoff(operations.random), 1
    left_s = limit_s
    while True:
        try:
            known = yield from operations.call(call, max(0.001, left_s))
        except PlainsongError as error:
            if error.outcome != "unknown":
                raise
            pause_s = backoff.next_s(error)
            now_s: float = yield Now()
            left_s = begun_s + limit_s - now_s - pause_s
            if left_s <= 0 or not operations.settings.retry:
                raise
            yield Pause(pause_s)
            count += 1
        else:
            return known, count

"""Many small requests at once: each has its own verdict, and all of them cost what one costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import PlainsongError, TooLarge, TopicFull
from protocol.requests import PublishRequest
from protocol.topic.asks import Publish
from protocol.topic.publish import publish
from protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from protocol.requests import Receipt
    from protocol.topic.asks import PublishEach
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step

#: By how much the row of a plain message is counted larger than its payload, at most: flags and the length before it.
_ROW_EXTRA_BYTES = ROW_BYTES + 6


def publish_each(state: TopicState, step: Step, ask: PublishEach, now: Now) -> Receipt | list[Receipt | PlainsongError]:
    """Store what may be stored, as one request where that comes to the same.

    Raises:
      PlainsongError: what every one of them is refused with; nothing happened.
    """
    if _may_fill(state, ask):
        return [_publish_one(state, step, message, now) for message in ask.messages]
    try:
        return publish(state, step, Publish(PublishRequest(ask.messages), ask.size), now)
    except (TooLarge, TopicFull):
        # Some may still fit. What was refused left nothing behind.
        return [_publish_one(state, step, message, now) for message in ask.messages]


def _may_fill(state: TopicState, ask: PublishEach) -> bool:
    """Whether the first of them may leave no room for the others: rows are larger than the payloads that are admitted."""
    max_bytes = None if state.metadata is None else state.metadata.properties.max_bytes
    if max_bytes is None:
        return False
    size = sum(map(len, ask.messages)) + _ROW_EXTRA_BYTES * len(ask.messages)
    return state.usage.bytes + state.stored_bytes + size > max_bytes


def _publish_one(state: TopicState, step: Step, message: bytes, now: Now) -> Receipt | PlainsongError:
    try:
        return publish(state, step, Publish(PublishRequest([message]), len(message)), now)
    except PlainsongError as error:
        return error

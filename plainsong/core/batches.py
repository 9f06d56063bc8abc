"""One attempt to deliver a batch: the request, and what its answer means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plainsong.core import calls
from plainsong.core.attempts import read_answer
from plainsong.core.effects import Send
from plainsong.protocol.errors import Internal
from plainsong.protocol.requests import PublishRequest

if TYPE_CHECKING:
    from plainsong.core.attempts import Call
    from plainsong.core.effects import Answer, Failure
    from plainsong.core.gathering import Batch
    from plainsong.core.operations import Operations
    from plainsong.messages import Receipt
    from plainsong.protocol.errors import PlainsongError


def attempt_of(operations: Operations, batch: Batch[Any], left_s: float) -> tuple[Send, Call[Receipt]]:
    """What to send; it takes no longer than the batch has time left."""
    ttls_s = calls.own_ttls([item.ttl_s for item in batch.items])
    attributes = [dict(item.attributes or {}) for item in batch.items]
    request = PublishRequest(
        [item.payload for item in batch.items],
        message_ttls_s=ttls_s,
        attributes=attributes if any(attributes) else None,
    )
    call = calls.publish(operations.namespace, batch.lane.topic, request)
    settings = operations.settings
    timeout_s = min(settings.request_timeout_s, left_s)
    places, path = operations.places, call.request.path
    url = places.where(path)
    return Send(url, call.request, places.connect_s(url, min(settings.connect_timeout_s, timeout_s)), timeout_s), call


def bug_of(bug: Exception) -> PlainsongError:
    """What to tell of something that must not happen."""
    error = Internal(f"{type(bug).__name__}: {bug}", hint="this is a bug of the client: please report it")
    error.__cause__ = bug
    return error


def outcome_of(
    operations: Operations, call: Call[Receipt], answer: Answer | Failure, url: str
) -> tuple[Receipt | None, PlainsongError | None]:
    """The receipt, or what went wrong; another daemon is tried next where that may help."""
    receipt, error = read_answer(call, answer, url)
    operations.places.heard(call.request.path, url, answer, error)
    return receipt, error

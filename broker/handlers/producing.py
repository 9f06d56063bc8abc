"""What a publish or store of a producer has besides others: a bound on its wait, headers, and refusals that are counted."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from broker.handlers.under import asked_under
from protocol.errors import (
    OutcomeUnknown,
    PartialDuplicate,
    ProducerExpired,
    ProducerFenced,
    SequenceConsumed,
    TooManyProducers,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from broker.service import Service
    from protocol.names import TopicName
    from protocol.requests import ProducerVerdict, PublishRequest
    from protocol.topic.asks import Ask

A = TypeVar("A")

#: Refusals that are counted, by code.
_REFUSALS = (PartialDuplicate, ProducerExpired, ProducerFenced, SequenceConsumed, TooManyProducers)


async def asked(service: Service, name: TopicName, request: PublishRequest, ask: Ask[A]) -> A:
    """The topic's answer to a publish or store; a producer waits no longer than ``deduplication.answer_timeout_s``.

    Raises:
      OutcomeUnknown: there was no answer in that time; what was asked may still happen.
      PlainsongError: whatever the topic refuses.
    """
    answer = partial(asked_under, service, name, request.write_pointer, ask)
    return await (answer() if request.producer is None else patiently(service, name, answer))


async def asked_to_open(service: Service, name: TopicName, ask: Ask[A]) -> A:
    """The topic's answer to one who opens a session; that there are too many is counted. Raises as the topic does."""
    try:
        return await service.directory.ask(name, ask)
    except TooManyProducers as error:
        service.metrics.producer_refused(error.code)
        raise


async def patiently(service: Service, name: TopicName, answer: Callable[[], Awaitable[A]]) -> A:
    """The answer to something that a producer asked; raises as ``asked`` does."""
    timeout_s = service.config.deduplication.answer_timeout_s
    try:
        with trio.move_on_after(timeout_s):
            return await answer()
    except _REFUSALS as error:
        service.metrics.producer_refused(error.code)
        raise
    raise OutcomeUnknown(
        f"topic {name} did not answer within {timeout_s:g} s",
        hint="send it again with the same sequence ids, or open the producer again: it says how far it came",
    )


def verdict_headers(verdict: ProducerVerdict | None) -> list[tuple[str, str]]:
    """The headers that say what became of a producer's publish; none where it named no producer."""
    if verdict is None:
        return []
    headers: list[tuple[str, str]] = [("Plainsong-Duplicate", verdict.duplicate)]
    if verdict.last_sequence_id is not None:
        headers.append(("Plainsong-Last-Sequence-Id", str(verdict.last_sequence_id)))
    return headers

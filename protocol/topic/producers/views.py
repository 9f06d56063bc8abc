"""Producers as they are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.ids import NO_PAYLOAD_PART, unpack_position
from protocol.requests import PublishResponse
from protocol.topic.producers.asks import ProducerView, ResultView

if TYPE_CHECKING:
    from protocol.topic.producers.record import Producer, Remembering, Result
    from protocol.topic.state import TopicState


def view_of(state: TopicState, producer: Producer, *, durable: bool = False) -> ProducerView:
    """A producer of the last generation; ``durable``: it is shown when all that was taken by now is durable."""
    view = old_view(producer, state.producers.record, state.living_or_last().generation)
    last = producer.pushed if durable else producer.persisted
    return replace(view, last_sequence_id=last, expires_ms=state.producers.expires_ms(producer))


def old_view(producer: Producer, record: Remembering | None, generation: int) -> ProducerView:
    """A producer of a generation that is gone, as its row says."""
    return ProducerView(
        producer.name,
        producer.epoch,
        last_sequence_id=producer.persisted,
        pushed=producer.pushed,
        generation=generation,
        enabled_from=None if record is None or not record.on else record.since,
        active_ms=producer.active_ms,
        expires_ms=producer.active_ms,
        recent=tuple(map(result_view, producer.recent)),
    )


def result_view(result: Result) -> ResultView:
    """One remembered request."""
    response = None
    if result.pointer:
        response = PublishResponse(result.pointer, *unpack_position(result.first), *unpack_position(result.last))
    return ResultView(result.low, result.high, result.first + NO_PAYLOAD_PART, result.last + NO_PAYLOAD_PART, response)

"""Requests about producers: open a session, show one, list them, remove one."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from plainsong.protocol.errors import (
    DeduplicationDisabled,
    GenerationChanged,
    InvalidParameter,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    TooManyProducers,
)
from plainsong.protocol.ids import NO_PAYLOAD_PART, unpack_position
from plainsong.protocol.plurals import counted
from plainsong.protocol.requests import PublishResponse
from plainsong.protocol.topic.asks import ProducerPage, ProducerView, ResultView, SnapshotView
from plainsong.protocol.topic.checkpoint import write_producer
from plainsong.protocol.topic.deduplication import (
    add_producer,
    find_producer,
    forget_expired_producers,
    forget_producers,
)
from plainsong.protocol.topic.transactional import abandon_stored

if TYPE_CHECKING:
    from plainsong.protocol.topic.asks import GetProducer, ListProducers, OpenProducer, RemoveProducer
    from plainsong.protocol.topic.producer_state import DeduplicationRecord, Producer, Result
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step


def open_producer(state: TopicState, step: Step, ask: OpenProducer, now: Now) -> ProducerView:
    """Open a session, which is durable when this is answered. Raises the errors of ``OpenProducer``."""
    del now
    generation = state.living().generation
    producers, limits = state.producers, state.limits
    if ask.generation is not None and ask.generation != generation:
        raise GenerationChanged(f"the topic is in generation {generation}, not {ask.generation}")
    if not producers.enabled:
        raise DeduplicationDisabled(
            f"topic {state.name} remembers no producers (set by the {producers.policy.level})",
            hint="switch deduplication on, or publish without a session: messages are stored unchecked",
        )
    if ask.retention_ms is not None and not 0 <= ask.retention_ms <= limits.max_retention_ms:
        raise InvalidParameter(
            f"retention is {ask.retention_ms} ms", hint=f"at most {limits.max_retention_ms // 1000} s"
        )
    forget_expired_producers(state, step)
    producer = find_producer(state, step, ask.name)
    if producer is not None and ask.must_be_new:
        raise ProducerFenced(f"producer {ask.name!r} exists already", hint="choose another name")
    retention_ms = _retention_ms(state, producer, ask)
    if producer is None:
        producer = add_producer(state, step, ask.name)
    if not producer.epoch:
        # Its first session since it was added, perhaps after publishes without one. No epoch of an earlier producer
        # of this name may be valid for it.
        producer.epoch = producers.epochs
    producers.long_retention += (retention_ms is not None) - (producer.retention_ms is not None)
    producer.retention_ms = retention_ms
    producer.epoch += 1
    if ask.discard_staged:
        _discard_staged(state, ask.name)
    producers.touch(producer, state.time_ms)
    write_producer(state, step, producer)
    return producer_view(state, producer, durable=True)


def _discard_staged(state: TopicState, name: str) -> bool:
    """Abandon the messages that the producer staged. Returns True if there were any."""
    pointer = state.staged.get(name)
    if pointer is not None:
        abandon_stored(state, state.pending[pointer])
    return pointer is not None


def _retention_ms(state: TopicState, producer: Producer | None, ask: OpenProducer) -> int | None:
    """Return the producer's own retention; None for the default. Raises TooManyProducers."""
    limits = state.limits
    if ask.retention_ms is None:
        return None if producer is None else producer.retention_ms
    if ask.retention_ms <= limits.producer_retention_ms:
        return None
    is_long = producer is not None and producer.retention_ms is not None
    if not is_long and state.producers.long_retention >= limits.max_long_producers:
        raise TooManyProducers(
            f"topic {state.name} has its maximum of {counted(state.producers.long_retention, 'producer')} with more than the default retention",
            hint="open it without a retention, or raise deduplication.max_long_producers",
        )
    return ask.retention_ms


def get_producer(state: TopicState, step: Step, ask: GetProducer, now: Now) -> ProducerView:
    """Show one producer. Raises the errors of ``GetProducer``."""
    del now
    metadata = state.living() if ask.generation is None else state.living_or_last()
    if ask.generation is not None and ask.generation != metadata.generation:
        raise GenerationChanged(f"the topic is in generation {metadata.generation}, not {ask.generation}")
    if metadata.partly_cleaned:
        raise ProducerExpired(f"generation {metadata.generation} of topic {state.name} is gone")
    producer = find_producer(state, step, ask.name)
    if producer is None:
        raise ProducerNotFound(f"topic {state.name} has no producer {ask.name!r}")
    return producer_view(state, producer, durable=True)


def list_producers(state: TopicState, step: Step, ask: ListProducers, now: Now) -> ProducerPage:
    """List some producers by name, with the state of their snapshot. Raises TopicNotFound."""
    del now
    generation = state.living().generation
    forget_expired_producers(state, step)
    producers = state.producers
    names = sorted([*producers.known, *producers.damaged])
    start = bisect_right(names, ask.after) if ask.after else 0
    chosen = names[start : start + ask.limit]
    since = _enabled_from(state)
    views = tuple(
        producer_view(state, producers.known[name])
        if name in producers.known
        else ProducerView(name, 0, -1, -1, generation, since, 0, 0, damaged=True)
        for name in chosen
    )
    return ProducerPage(
        views,
        more=start + len(chosen) < len(names),
        total=len(names),
        enabled=producers.enabled,
        enabled_from=since,
        snapshot=SnapshotView(
            producers.snapshot_position,
            producers.snapshot_ms,
            producers.entries,
            producers.replayed_entries,
            producers.replay_ms,
        ),
    )


def _enabled_from(state: TopicState) -> bytes | None:
    record = state.producers.record
    return None if record is None or not record.on else record.since


def remove_producer(state: TopicState, step: Step, ask: RemoveProducer, now: Now) -> None:
    """Forget a producer and its staged messages. Raises TopicNotFound, ProducerNotFound."""
    del now
    state.living()
    forget_expired_producers(state, step)
    producers = state.producers
    if ask.dry_run:
        if ask.name not in producers.known and ask.name not in producers.damaged and ask.name not in state.staged:
            raise ProducerNotFound(f"topic {state.name} has no producer {ask.name!r}")
        return
    staged = _discard_staged(state, ask.name)
    if ask.name not in producers.known and ask.name not in producers.damaged:
        if staged:
            return
        raise ProducerNotFound(f"topic {state.name} has no producer {ask.name!r}")
    forget_producers(state, step, [ask.name])
    step.producer_outcomes["removed"] += 1


# --- views -----------------------------------------------------------------------------------------


def producer_view(state: TopicState, producer: Producer, *, durable: bool = False) -> ProducerView:
    """Show a producer of the last generation; ``durable``: accepted requests are durable before this is answered."""
    view = old_producer_view(producer, state.producers.record, state.living_or_last().generation)
    last = producer.pushed if durable else producer.persisted
    return replace(view, last_sequence_id=last, expires_ms=state.producers.expires_ms(producer))


def old_producer_view(producer: Producer, record: DeduplicationRecord | None, generation: int) -> ProducerView:
    """Show a producer of an earlier generation, from its row."""
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
    """Show one remembered request."""
    response = None
    if result.pointer:
        response = PublishResponse(result.pointer, *unpack_position(result.first), *unpack_position(result.last))
    return ResultView(result.low, result.high, result.first + NO_PAYLOAD_PART, result.last + NO_PAYLOAD_PART, response)

"""What may be removed: planned by the topic, carried out by the janitor, seen by nobody.

A plan is answered after the topic's time is durable, so that what it removes would stay expired after any
restart; until then nothing is removed, afterwards nothing of it can be read again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.effects import Table, put_one
from protocol.ids import pack_position
from protocol.keys import metadata_key
from protocol.topic.asks import CleaningPlan
from protocol.topic.bookkeeping import forget_all, write_mark
from protocol.topic.producers.forgetting import forget_expired
from protocol.topic.readers import drop_expired
from protocol.topic.settling import orphans_removed, plan_pointers

if TYPE_CHECKING:
    from protocol.records import Metadata
    from protocol.topic.asks import Cleaned, PlanCleaning
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def plan_cleaning(state: TopicState, step: Step, ask: PlanCleaning, now: Now) -> CleaningPlan:
    """The rows of this topic that nobody can see any more."""
    del now
    metadata = state.metadata
    if metadata is None:
        return CleaningPlan()
    if metadata.deleted_ms is not None:
        return _plan_purge(state, step, ask)
    drop_expired(state, step)
    state.usage.drop_before(state.oldest_ms)
    orphans = plan_pointers(state)
    forget_expired(state, step)
    write_mark(state, step)
    prefix = state.prefix
    return CleaningPlan(
        expired=expired_range(prefix, state.oldest_ms),
        due=tuple(state.usage.due(state.time_ms)),
        purge=older_generations(metadata.generation),
        prefix=prefix,
        now_ms=state.time_ms,
        orphans=tuple(orphans),
        forget=_old_generations(metadata, state.time_ms, ask.delete_grace_ms),
    )


def expired_range(prefix: bytes, oldest_ms: int) -> tuple[bytes, bytes]:
    """``[start, stop)`` of the message keys of a generation that were published before ``oldest_ms``."""
    return prefix, prefix + pack_position(oldest_ms, 0)


def older_generations(generation: int) -> tuple[int, int] | None:
    """The first and the last of those before ``generation``: all of their rows are gone for every reader."""
    return (1, generation - 1) if generation > 1 else None


def _old_generations(metadata: Metadata, time_ms: int, grace_ms: int) -> tuple[int, int] | None:
    """Generations whose producers are known no more: they are asked about for a while after a re-creation."""
    if metadata.generation == 1 or time_ms < metadata.created_ms + grace_ms:
        return None
    return 1, metadata.generation - 1


def _plan_purge(state: TopicState, step: Step, ask: PlanCleaning) -> CleaningPlan:
    metadata = state.living_or_last()
    if metadata.deleted_ms is None or state.time_ms < metadata.deleted_ms + ask.delete_grace_ms:
        return CleaningPlan(purge=older_generations(metadata.generation))
    if not metadata.partly_cleaned:
        state.producers.clear()
        state.metadata = replace(metadata, partly_cleaned=True)
        step.write(put_one(Table.METADATA, metadata_key(state.name), state.metadata.encode()))
        for removal in forget_all(state, step):
            step.write(removal)
    return CleaningPlan(purge=(1, metadata.generation), forget=(1, metadata.generation))


def cleaned(state: TopicState, step: Step, ask: Cleaned, now: Now) -> None:
    """Count out what the janitor removed, unless the topic is another one by now."""
    del now
    if state.metadata is None or state.metadata.deleted_ms is not None or state.prefix != ask.prefix:
        return
    for done in ask.slices:
        state.usage.cleaned(done.first_ms, done.last_ms, done.messages, done.bytes, done.own_expiry_ms)
    orphans_removed(state, ask.orphans)
    write_mark(state, step)

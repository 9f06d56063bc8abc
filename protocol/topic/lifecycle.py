"""Creating, changing, deleting topics and bringing them back: one metadata row, one generation at a time.

    absent ──create──► generation 1 ──delete──► gone (1) ──create──► generation 2 …
                            ▲                     │
                            └──────undelete───────┘   while none of its rows has been removed

Ids go on across generations, so the high-water mark moves with every change; it is written before the
metadata row that relies on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.effects import Table, put_one
from protocol.errors import PartlyCleaned, TopicExists, TopicNotFound
from protocol.keys import metadata_key
from protocol.properties import parse_properties
from protocol.records import Metadata
from protocol.topic.asks import Description
from protocol.topic.bookkeeping import forget_all, write_mark, write_pointers
from protocol.topic.producers.noting import renew
from protocol.topic.producers.switching import follow_policy
from protocol.topic.usage import Usage

if TYPE_CHECKING:
    from protocol.topic.asks import Create, Describe, Remove, SetProperties, Undelete
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def describe(state: TopicState, step: Step, ask: Describe, now: Now) -> Description:
    """The topic as it is. Raises TopicNotFound."""
    del step, ask, now
    return Description(state.living(), state.time_ms)


def create(state: TopicState, step: Step, ask: Create, now: Now) -> Description:
    """A new generation. Raises TopicExists, unless an equal one was acceptable and is there."""
    old = state.metadata
    if old is not None and old.deleted_ms is None:
        if ask.if_not_exists and old.properties == ask.properties:
            return Description(old, state.time_ms)
        hint = (
            "its properties differ from the ones given" if ask.if_not_exists else "add ?ifNotExists=true to accept it"
        )
        raise TopicExists(f"topic {state.name} exists already", hint=hint)
    generation = 1 if old is None else old.generation + 1
    step.flush()
    removals = [] if old is None else forget_all(state, step)
    state.usage = Usage()
    state.appended = 0
    state.readers.clear()
    if old is not None:
        renew(state, step, generation)
    description = _write(state, step, Metadata(generation, ask.properties, state.time_ms, state.time_ms))
    follow_policy(state, step, now)
    for removal in removals:
        # Not before: a generation that can still be brought back keeps what is known about its pointers.
        step.write(removal)
    return description


def set_properties(state: TopicState, step: Step, ask: SetProperties, now: Now) -> Description:
    """Replace all properties; what has expired under the old ones stays expired.

    Raises:
      TopicNotFound, InvalidProperty: nothing happened.
    """
    old = state.living()
    properties = parse_properties(ask.given, generation=old.generation, default_ttl_s=ask.default_ttl_s)
    changed = replace(old, properties=properties, updated_ms=state.time_ms, floor_ms=state.oldest_ms)
    description = _write(state, step, changed, renewed=False)
    follow_policy(state, step, now)
    return description


def remove(state: TopicState, step: Step, ask: Remove, now: Now) -> None:
    """Negate the generation: nobody reads it from now on. Raises TopicNotFound."""
    del ask, now
    _write(state, step, replace(state.living(), deleted_ms=state.time_ms, floor_ms=state.oldest_ms))


def undelete(state: TopicState, step: Step, ask: Undelete, now: Now) -> Description:
    """Bring the last generation back.

    Raises:
      TopicExists: there is a living one.
      TopicNotFound: there never was one.
      PartlyCleaned: rows of it have been removed.
    """
    del ask, now
    old = state.metadata
    if old is None:
        raise TopicNotFound(f"topic {state.name} has never existed")
    if old.deleted_ms is None:
        raise TopicExists(f"topic {state.name} exists, in generation {old.generation}")
    if old.partly_cleaned:
        raise PartlyCleaned(
            f"rows of generation {old.generation}, deleted at {old.deleted_ms}, are being removed",
            hint="`plainsong store dump` on the stopped daemon shows what is left",
        )
    return _write(state, step, replace(old, deleted_ms=None, updated_ms=state.time_ms))


def _write(state: TopicState, step: Step, metadata: Metadata, *, renewed: bool = True) -> Description:
    if state.metadata is not None:
        write_pointers(state, step)
    state.metadata = metadata
    write_mark(state, step)
    step.write(put_one(Table.METADATA, metadata_key(state.name), metadata.encode()))
    step.renewed |= renewed
    return Description(metadata, state.time_ms)

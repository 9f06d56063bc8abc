"""Creating, changing, deleting and restoring a topic, and planning the removal of rows.

    absent ──create──► generation 1 ──delete──► gone (1) ──create──► generation 2 …
                            ▲                     │
                            └──────undelete───────┘   until its first row is removed

Ids keep increasing across generations, so every change writes the high-water mark, before the metadata row that
relies on it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Delete, Table, put_one
from plainsong.protocol.errors import (
    Conflict,
    GenerationChanged,
    PartlyCleaned,
    PreconditionFailed,
    TopicExists,
    TopicNotFound,
)
from plainsong.protocol.ids import FIRST_BOUND, pack_position
from plainsong.protocol.keys import metadata_key, payload_prefix, stop_after
from plainsong.protocol.properties import parse_properties
from plainsong.protocol.records import MAX_SET_ASIDE, Metadata, SetAside
from plainsong.protocol.topic.asks import CleaningPlan, Description, Slice, Span, StatsView, TopicChange
from plainsong.protocol.topic.chain import SET_ASIDE
from plainsong.protocol.topic.chain_rules import add_entry, begin_chain, chain_prefix, end_chain, say_restored
from plainsong.protocol.topic.checkpoint import carry_pointers, forget_all_pointers, write_mark, write_pointers
from plainsong.protocol.topic.deduplication import follow_policy, forget_expired_producers, renew_producers
from plainsong.protocol.topic.readers import drop_expired_readers
from plainsong.protocol.topic.transactional import forget_orphans, has_open_pointers, plan_pointers
from plainsong.protocol.topic.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plainsong.protocol.topic.asks import (
        Cleaned,
        Create,
        Describe,
        NoteSetAside,
        PlanCleaning,
        Remove,
        SetProperties,
        Undelete,
    )
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step


def create(state: TopicState, step: Step, ask: Create, now: Now) -> Description:
    """Create a generation. Raises TopicExists, except with ``if_not_exists`` for a topic with the given properties."""
    old = state.metadata
    if old is not None and old.deleted_ms is None:
        if ask.if_not_exists and old.properties.agrees_with(ask.properties, ask.given):
            return Description(old, state.time_ms)
        hint = (
            "its properties differ from the ones given" if ask.if_not_exists else "add ?ifNotExists=true to accept it"
        )
        raise TopicExists(f"topic {state.name} exists already", hint=hint)
    generation = 1 if old is None else old.generation + 1
    if ask.dry_run:
        return Description(Metadata(generation, ask.properties, state.time_ms, state.time_ms), state.time_ms)
    step.flush()
    removals = [] if old is None else carry_pointers(state, step, generation, state.time_ms)
    state.usage = Usage()
    state.appended = 0
    state.readers.clear()
    if old is not None:
        renew_producers(state, step, generation)
    state.chain = None
    created = Metadata(generation, ask.properties, state.time_ms, state.time_ms, creator=ask.creator)
    description = _write(state, step, created)
    if ask.properties.chain != "none":
        begin_chain(state, step)
    follow_policy(state, step, now)
    for removal in removals:
        # Not at the deletion: until now the generation could be restored, and needed its pointers' rows.
        step.write(removal)
    return description


def set_properties(state: TopicState, step: Step, ask: SetProperties, now: Now) -> TopicChange:
    """Replace all properties; messages that expired under the old ones stay expired.

    Raises:
      TopicNotFound, PreconditionFailed, InvalidProperty, Conflict (a chain cannot begin while there are stored
      messages, which have no links and may be published after its beginning): nothing happened.
    """
    old = state.living()
    check_etag(old, ask.if_match)
    properties = parse_properties(ask.given, default_ttl_s=ask.default_ttl_s)
    changed = replace(old, properties=properties, updated_ms=state.time_ms, floor_ms=state.oldest_ms)
    held = _held(state)
    begins = properties.chain != "none" and old.properties.chain == "none"
    if begins and any(each.last_stored is not None and each.published is None for each in state.pending.values()):
        raise Conflict(
            f"messages are stored in topic {state.name} that are not published",
            hint="publish them, or have their transactions aborted; then switch the chain on",
        )
    if not ask.dry_run:
        if state.chain is not None and properties.chain == "none":
            changed = replace(changed, chain_end=end_chain(state, step))
        _write(state, step, changed, renewed=False)
        if begins:
            begin_chain(state, step)
            say_restored(state, step)
        follow_policy(state, step, now)
    return TopicChange(old, changed, held)


def check_etag(metadata: Metadata, if_match: frozenset[str] | None) -> None:
    """Raise PreconditionFailed unless the topic's etag is one of those given."""
    if if_match is not None and metadata.etag not in if_match:
        raise PreconditionFailed(f"the topic's etag is {metadata.etag} now", hint="read the topic again, then decide")


def remove(state: TopicState, step: Step, ask: Remove, now: Now) -> TopicChange:
    """Delete the topic.

    Raises:
      TopicNotFound, PreconditionFailed: nothing happened.
    """
    del now
    old = state.living()
    check_etag(old, ask.if_match)
    change = TopicChange(old, replace(old, deleted_ms=state.time_ms, floor_ms=state.oldest_ms), _held(state))
    if not ask.dry_run:
        _write(state, step, change.after)
    return change


def undelete(state: TopicState, step: Step, ask: Undelete, now: Now) -> TopicChange:
    """Restore the last generation.

    Raises:
      TopicExists: the topic is not deleted.
      TopicNotFound: there never was such a topic.
      PartlyCleaned: rows have been removed, or may have been removed.
      PreconditionFailed: the deleted generation has another etag.
    """
    del now
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
    if ask.grace_ms is not None and state.time_ms >= old.deleted_ms + ask.grace_ms:
        # ``partly_cleaned`` is not enough: the janitor never sets it for a topic without rows.
        raise PartlyCleaned(
            f"generation {old.generation} can be restored until {old.deleted_ms + ask.grace_ms}",
            hint="create it again; retention.delete_grace_s says how long a deleted topic is kept",
        )
    check_etag(old, ask.if_match)
    change = TopicChange(
        old, replace(old, deleted_ms=None, updated_ms=state.time_ms, creator=ask.creator), _held(state)
    )
    if not ask.dry_run:
        _write(state, step, change.after)
    return change


def note_set_aside(state: TopicState, step: Step, ask: NoteSetAside, now: Now) -> TopicChange:
    """Record a range that is set aside.

    Raises:
      TopicNotFound, GenerationChanged, Conflict (there are too many ranges): nothing happened.
    """
    old = state.living()
    if old.generation != ask.generation:
        raise GenerationChanged(f"topic {state.name} has generation {old.generation} now, not {ask.generation}")
    first, last, rows = ask.first, ask.last, ask.rows
    kept = []
    for each in old.set_aside:
        if each.last < pack_position(state.oldest_ms, 0):
            continue  # all of it has expired
        if each.last < first or last < each.first:
            kept.append(each)
            continue
        first, last = min(first, each.first), max(last, each.last)
        rows = None if rows is None or each.rows is None else rows + each.rows
    if len(kept) >= MAX_SET_ASIDE:
        raise Conflict(f"topic {state.name} has {len(kept)} ranges set aside", hint=("set larger ranges aside"))
    noted = tuple(sorted([*kept, SetAside(first, last, rows)]))
    change = TopicChange(old, replace(old, set_aside=noted), _held(state))
    add_entry(state, step, SET_ASIDE, f=ask.first, l=ask.last)
    _write(state, step, change.after)
    del now
    return change


def _held(state: TopicState) -> StatsView:
    """Return the readable messages; of a deleted generation, those readable after a restore."""
    span = Span(
        generation=state.living_or_last().generation,
        prefix=state.prefix,
        since=FIRST_BOUND,
        until=state.until,
        now_ms=state.time_ms,
        oldest_ms=state.oldest_ms,
        watermark=state.watermark,
    )
    living = (each for each in state.usage.stored() if each[1] >= state.oldest_ms)
    return StatsView(span, tuple(Slice._make(each) for each in living))


def _write(state: TopicState, step: Step, metadata: Metadata, *, renewed: bool = True) -> Description:
    if state.metadata is not None:
        write_pointers(state, step)
    state.metadata = metadata
    write_mark(state, step)
    step.write(put_one(Table.METADATA, metadata_key(state.name), metadata.encode()))
    step.renewed |= renewed
    step.frees_readers = True
    return Description(metadata, state.time_ms)


def describe(state: TopicState, step: Step, ask: Describe, now: Now) -> Description:
    del step, ask, now
    return Description(state.living(), state.time_ms)


# --- cleaning --------------------------------------------------------------------------------------
#
# The topic plans the removal of rows that are invisible, and the janitor removes them. A plan is answered only after
# the topic's time is durable, so that its rows stay expired after any restart.


def plan_cleaning(state: TopicState, step: Step, ask: PlanCleaning, now: Now) -> CleaningPlan:
    """Plan the removal of the rows that readers can no longer see."""
    del now
    metadata = state.metadata
    if metadata is None:
        return CleaningPlan()
    if metadata.deleted_ms is not None:
        return _plan_purge(state, step, ask)
    drop_expired_readers(state, step)
    state.usage.drop_before(state.oldest_ms)
    orphans = plan_pointers(state)
    forget_expired_producers(state, step)
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
        entries=_expired_entries(state, metadata),
    )


def _expired_entries(state: TopicState, metadata: Metadata) -> tuple[bytes, bytes] | None:
    """Return ``[start, stop)`` of the keys of a chain's entries, of which all but the last may be removed."""
    if metadata.properties.chain == "none" and metadata.chain_end is None:
        return None
    prefix = chain_prefix(state)
    return prefix, prefix + pack_position(state.oldest_ms, 0)


def _plan_purge(state: TopicState, step: Step, ask: PlanCleaning) -> CleaningPlan:
    metadata = state.living_or_last()
    if metadata.deleted_ms is None or state.time_ms < metadata.deleted_ms + ask.delete_grace_ms:
        return CleaningPlan(purge=older_generations(metadata.generation))
    if not metadata.partly_cleaned and has_open_pointers(state):
        # If the topic is created again it has to refuse them: see ``carry_pointers``.
        return CleaningPlan(purge=older_generations(metadata.generation))
    if not metadata.partly_cleaned:
        state.producers.clear()
        state.chain = None
        state.metadata = replace(metadata, partly_cleaned=True)
        step.write(put_one(Table.METADATA, metadata_key(state.name), state.metadata.encode()))
        for removal in forget_all_pointers(state, step):
            step.write(removal)
    return CleaningPlan(purge=(1, metadata.generation), forget=(1, metadata.generation))


def _old_generations(metadata: Metadata, time_ms: int, grace_ms: int) -> tuple[int, int] | None:
    """Return the generations whose producers can be forgotten; clients may ask for a while after a re-creation."""
    if metadata.generation == 1 or time_ms < metadata.created_ms + grace_ms:
        return None
    return 1, metadata.generation - 1


def expired_range(prefix: bytes, oldest_ms: int) -> tuple[bytes, bytes]:
    """Return ``[start, stop)`` of the keys of messages that were published before ``oldest_ms``."""
    return prefix, prefix + pack_position(oldest_ms, 0)


def older_generations(generation: int) -> tuple[int, int] | None:
    """Return the first and the last generation before ``generation``, whose rows are invisible; None if none."""
    return (1, generation - 1) if generation > 1 else None


def cleaned(state: TopicState, step: Step, ask: Cleaned, now: Now) -> None:
    """Subtract the rows that the janitor removed, unless the topic has a new generation by now."""
    del now
    if state.metadata is None or state.metadata.deleted_ms is not None or state.prefix != ask.prefix:
        return
    step.frees_readers = True
    for done in ask.slices:
        state.usage.cleaned(done.first_ms, done.last_ms, done.messages, done.bytes, done.own_expiry_ms)
    forget_orphans(state, ask.orphans)
    write_mark(state, step)


# --- torn commits ----------------------------------------------------------------------------------
#
# A store that writes a commit row by row may lose its end: some rows of an atomic request, or the pointer row about
# payload rows. The request was not acknowledged, so the client sends it again, and it gets later positions. Without
# this cleaning readers would see part of a batch, or messages twice.


def remove_torn_rows(state: TopicState, step: Step) -> None:
    """Remove the rows of an atomic request that was cut off; no reader has seen them."""
    rows = len(state.torn)
    ts_ms = int.from_bytes(state.torn[-1][-10:-2], "big")
    state.usage.cleaned(ts_ms, ts_ms, rows, state.torn_bytes, state.usage.own_expiry_ms())
    state.appended -= rows
    # Last row first: if this is cut off too, the next load still finds the request incomplete.
    step.write(Delete(Table.MESSAGE, state.torn))
    state.torn = []
    write_mark(state, step)


def torn_ranges(state: TopicState) -> Iterator[tuple[bytes, bytes]]:
    """Yield ``[start, stop)`` of the payload keys after the last one in a pointer's row, if more may be stored."""
    for pending in state.pending.values():
        over = pending.rolled_back or pending.orphaned or pending.published is not None
        if pending.last_stored is not None and not over:
            prefix = payload_prefix(state.name, state.living_or_last().generation, pending.pointer)
            yield prefix + pending.last_stored + b"\x00", stop_after(prefix)


def remove_torn_payloads(state: TopicState, step: Step) -> None:
    """Remove the payload rows found in ``torn_ranges``, before more messages are stored after them."""
    step.write(Delete(Table.PAYLOAD, state.torn_payloads))
    state.torn_payloads = []

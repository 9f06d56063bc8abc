"""Requests under a write pointer: publish, store, roll back; and when a topic may forget the pointer.

    store     adds invisible payload rows; a segment names the writer that stored them
    publish   the first one adds a reference row for everything stored, before the request's own messages

The sign in a message's row and the reader's snapshot determine its visibility. For each pointer the topic stores the
positions of its rows (``Pending``), to roll them back, and to report that they hold readers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plainsong.protocol.effects import RollBack
from plainsong.protocol.errors import (
    AlreadyPublished,
    NoMessages,
    SequenceConsumed,
    TransactionNotInProgress,
    TransactionsUnavailable,
)
from plainsong.protocol.ids import pack_position, unpack_position
from plainsong.protocol.keys import payload_prefix, stop_after
from plainsong.protocol.requests import PublishResponse
from plainsong.protocol.rows import STAMP, MessageRow, encode_row
from plainsong.protocol.topic.asks import PointerView
from plainsong.protocol.topic.chain import ROLLBACK
from plainsong.protocol.topic.chain_rules import add_entry, chain_stored
from plainsong.protocol.topic.checkpoint import forget_pointer, touch_pointer, write_pointers
from plainsong.protocol.topic.deduplication import (
    NEW_IDS,
    DeduplicationVerdict,
    deduplicate,
    ensure_producer,
    record_publish,
    without_duplicates,
)
from plainsong.protocol.topic.pending import digest_of
from plainsong.protocol.topic.publish import (
    NOT_DEDUPLICATED,
    add_messages,
    admit_pointer,
    check_atomic,
    check_generation,
    check_messages,
    check_pointer,
    close_enlistment,
    count_messages,
    ends_of,
    standing_to_roll_back,
    too_old,
)
from plainsong.protocol.topic.row_extras import row_extras_of, with_stamp
from plainsong.protocol.topic.staging import (
    check_segment,
    deduplicate_store,
    drop_stored,
    links_of,
    record_store,
    reference_to,
    store_messages,
)
from plainsong.protocol.topic.state import Run

if TYPE_CHECKING:
    from collections.abc import Iterable

    from plainsong.protocol.records import Metadata
    from plainsong.protocol.requests import ProducerVerdict, PublishRequest
    from plainsong.protocol.rows import Stamp
    from plainsong.protocol.topic.asks import ListPointers, PublishUnder, RollBackPointer, StoreUnder
    from plainsong.protocol.topic.pending import Pending
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step
    from plainsong.protocol.transactions.transaction import Standing


def publish_under(state: TopicState, step: Step, ask: PublishUnder, now: Now) -> PublishResponse:
    """Publish everything stored under the request's write pointer, then its messages. Returns their positions.

    A request with nothing to publish writes nothing: if the stored messages are already published, it returns that
    answer again, otherwise an empty range.

    Raises:
      TopicNotFound, TransactionRequired, TransactionRefused, InvalidParameter, TransactionExpired, RolledBack,
      TransactionNotInProgress, DamagedRow, GenerationChanged, AlreadyPublished (an earlier one listed other segments),
      MessageTooLarge, RequestTooLarge, LowSpace, TopicFull, Overloaded, InvalidParameter (two routing keys),
      TransactionTooLarge (an atomic one); with a producer also what ``deduplicate`` and ``ensure_producer`` raise:
      nothing happened.
    """
    request = ask.request
    metadata = state.living()
    dedup = None
    if request.producer is not None and state.producers.enabled:
        check_generation(metadata, request)
        dedup = deduplicate(state, step, request, request.write_pointer or 0)
        if dedup.duplicate:
            return answer_duplicate(state, metadata, dedup)
        request = without_duplicates(request, dedup)
    pointer = admit_pointer(state, metadata, request.write_pointer)
    check_generation(metadata, request)
    pending = state.pending.get(pointer)
    stored = 0 if pending is None or not pending.stored else 1
    _check_listed(state, pending, request)
    verdict = None if request.producer is None else NOT_DEDUPLICATED if dedup is None else dedup.producer_verdict()
    if not stored and not request.messages:
        return _repeat_answer(state, pointer, pending, verdict)
    check_messages(state, metadata, request, now)
    check_atomic(state, request)
    row_extras = row_extras_of(request)
    pending = touch_pointer(state, step, pointer)
    stamp = None
    if dedup is not None:
        ensure_producer(state, step, dedup)
        stamp = dedup.stamp(stored + len(request.messages))
        row_extras = with_stamp(row_extras, stamp, begin=stored)
    runs = state.sequence.take(state.time_ms, stored + len(request.messages))
    first, last = ends_of(runs)
    pending.add(first, last, state.appended)
    pending.used_ms = state.time_ms
    if stored:
        _publish_stored(state, step, metadata, pending, request, runs[0], stamp)
        pending.published = (first, last)
        pending.listed_digest = digest_of(request.segments)
        runs = _without_first(runs)
    if request.messages:
        add_messages(state, step, metadata, runs, request, pointer, row_extras)
        pending.messages += len(request.messages)
        pending.size += request.lengths.total
    pending.ends_at = state.appended
    if dedup is None:
        return _response(state, pointer, first, last, verdict)
    record_publish(state, step, dedup, first, last)
    return _response(state, pointer, dedup.begin or first, last, dedup.producer_verdict())


def _publish_stored(
    state: TopicState,
    step: Step,
    metadata: Metadata,
    pending: Pending,
    request: PublishRequest,
    run: Run,
    stamp: Stamp | None,
) -> None:
    """Write the reference row; nothing can be stored under the pointer afterwards."""
    reference = reference_to(pending, request.segments)
    extras = reference.extras() if stamp is None else {**reference.extras(), STAMP: stamp.packed()}
    value = encode_row(MessageRow(None, pointer=pending.pointer, ttl_s=request.ttl_s, extras=extras))
    position = pack_position(run.ts_ms, run.first)
    step.add_reference(state.prefix, position, value)
    links = links_of(pending, request.segments)
    chain_stored(state, step, position, reference, links, request.ttl_s, pending.pointer)
    own_expiry_ms = 0 if request.ttl_s is None else run.ts_ms + request.ttl_s * 1000
    count_messages(
        state, step, metadata, Run(run.ts_ms, run.first, 1), reference.messages, reference.payload_bytes, own_expiry_ms
    )
    state.rows_since_mark += 1
    pending.messages += reference.messages
    pending.size += reference.payload_bytes
    drop_stored(state, pending)


def _without_first(runs: list[Run]) -> list[Run]:
    """Return the positions without the first one."""
    head, *rest = runs
    return [Run(head.ts_ms, head.first + 1, head.length - 1), *rest] if head.length > 1 else rest


def _check_listed(state: TopicState, pending: Pending | None, request: PublishRequest) -> None:
    """Check that the request lists the same segments as an earlier publish: others would never become visible.

    Raises AlreadyPublished.
    """
    if pending is None or pending.listed_digest is None or not request.segments:
        return
    if digest_of(request.segments) != pending.listed_digest:
        raise AlreadyPublished(
            f"the messages stored under write pointer {pending.pointer} in topic {state.name} have been published by "
            "a request that listed other segments",
            hint="one publish of a transaction lists all segments of a topic; messages in other segments are never seen",
        )


def _repeat_answer(
    state: TopicState, pointer: int, pending: Pending | None, verdict: ProducerVerdict | None
) -> PublishResponse:
    if pending is not None and pending.published is not None:
        return _response(state, pointer, *pending.published, verdict)
    here = pack_position(state.sequence.last_ts_ms, max(0, state.sequence.last_sequence_id))
    return _response(state, pointer, here, here, verdict)


def _response(
    state: TopicState, pointer: int, first: bytes, last: bytes, verdict: ProducerVerdict | None
) -> PublishResponse:
    positions = *unpack_position(first), *unpack_position(last)
    return PublishResponse(pointer, *positions, verdict=verdict, generation=state.living().generation)


def store_under(state: TopicState, step: Step, ask: StoreUnder, now: Now) -> None:
    """Store the request's messages in the payload table until a publish under the pointer refers to them.

    Raises:
      TopicNotFound, TransactionRequired, TransactionRefused, InvalidParameter, TransactionExpired, RolledBack,
      TransactionNotInProgress, DamagedRow, GenerationChanged, AlreadyPublished, NoMessages, MessageTooLarge,
      RequestTooLarge, LowSpace, TopicFull, TransactionTooLarge, Overloaded; with a producer also what
      ``deduplicate_store`` raises: nothing happened.
    """
    request = ask.request
    metadata = state.living()
    pointer = admit_pointer(state, metadata, request.write_pointer)
    check_generation(metadata, request)
    known = state.pending.get(pointer)
    dedup = deduplicate_store(state, step, known, request)
    if dedup is not None:
        if dedup.duplicate:
            return
        request = without_duplicates(request, dedup)
    if known is not None and known.published is not None:
        raise AlreadyPublished(
            f"the messages stored under write pointer {pointer} in topic {state.name} have been published",
            hint="publish further messages directly",
        )
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    check_messages(state, metadata, request, now)
    check_segment(state, known, request.segment)
    row_extras = row_extras_of(request)
    pending = touch_pointer(state, step, pointer)
    store_messages(state, step, pending, request, row_extras)
    if dedup is not None:
        record_store(pending, request, dedup)


# --- duplicates ------------------------------------------------------------------------------------


def answer_duplicate(state: TopicState, metadata: Metadata, dedup: DeduplicationVerdict) -> PublishResponse:
    """Return the answer to a publish without new messages: the original one, if it is remembered.

    Raises as ``admit_pointer`` does, unless the transaction is committed; SequenceConsumed when nothing is published
    under the pointer.
    """
    pointer = dedup.pointer
    pending = state.pending.get(pointer)
    rolled_back = pending is not None and pending.rolled_back
    if rolled_back or state.authority.standing(pointer) not in ("deciding", "committed"):
        admit_pointer(state, metadata, pointer)
    first, last = dedup.position(dedup.ids[0]), dedup.position(dedup.ids[-1])
    if first is None or last is None:
        first, last = _whole_range(dedup, pending)
    verdict = dedup.producer_verdict()
    positions = *unpack_position(first), *unpack_position(last)
    return PublishResponse(pointer, *positions, duplicate=True, verdict=verdict, generation=metadata.generation)


def _whole_range(dedup: DeduplicationVerdict, pending: Pending | None) -> tuple[bytes, bytes]:
    """Return the positions of the pointer's first and last row, if the ids are known to be published under it."""
    if pending is not None and pending.runs and pending.has_ids(dedup.name, dedup.ids[0], dedup.ids[-1]):
        return pending.runs[0].first, pending.runs[-1].last
    own = [] if dedup.producer is None else dedup.producer.recent
    rows = [(result.first, result.last) for result in own if result.pointer == dedup.pointer]
    if not rows:
        raise SequenceConsumed(
            f"producer {dedup.name!r} has used ids up to {dedup.ids[-1]}, not under write pointer {dedup.pointer}",
            hint=NEW_IDS,
        )
    return min(first for first, _ in rows), max(last for _, last in rows)


# --- rollback --------------------------------------------------------------------------------------
#
# A rollback negates the pointer in its message rows; the rows stay where they are.
#
# A store may carry out a rollback in several steps. So the pointer's row is written before the rollback unchanged, and
# again after it: if the commit is interrupted in between, a load still finds the rows, and the rollback can be
# repeated.


def roll_back(state: TopicState, step: Step, ask: RollBackPointer, now: Now) -> None:
    """Roll back rows of the pointer: those within a range; or all, after which writes under it are refused.

    Raises:
      TopicNotFound, InvalidParameter, TransactionNotInProgress (it was committed), NotEnlisted, Overloaded: nothing
      happened.
    """
    del now
    if ask.by_client:
        state.living()
    elif state.metadata is None:
        return
    check_pointer(ask.pointer)
    if not ask.by_client:
        close_enlistment(state, (ask.pointer,))
    elif standing_to_roll_back(state, ask.pointer) in ("deciding", "committed"):
        raise TransactionNotInProgress(
            f"write pointer {ask.pointer} is committed, or is being committed",
            hint="a committed transaction cannot be rolled back",
        )
    if ask.within is None:
        _roll_back_all(state, step, ask)
    else:
        _roll_back_range(state, step, ask.pointer, *ask.within)


def _roll_back_all(state: TopicState, step: Step, ask: RollBackPointer) -> None:
    pending = state.pending.get(ask.pointer)
    if pending is None and (not ask.by_client or too_old(state, ask.pointer) or _is_refused(state, ask.pointer)):
        return  # the pointer has no rows, and later publishes are refused anyway
    if pending is not None and pending.rolled_back:
        return
    write_pointers(state, step)
    pending = touch_pointer(state, step, ask.pointer)
    for run in pending.runs:
        _negate_rows(state, step, ask.pointer, run.first, run.last)
    pending.clear_runs()
    pending.rolled_back = True


def _is_refused(state: TopicState, pointer: int) -> bool:
    standing = state.authority.standing(pointer)
    return standing == "aborted" or (standing == "unknown" and state.limits.issues_pointers)


def _roll_back_range(state: TopicState, step: Step, pointer: int, first: bytes, last: bytes) -> None:
    pending = state.pending.get(pointer)
    if pending is None:
        # Rows may exist although the topic has forgotten their pointer.
        _negate_rows(state, step, pointer, first, last)
        return
    write_pointers(state, step)
    parts = pending.cut(first, last)
    if parts:
        touch_pointer(state, step, pointer)
    for part in parts:
        _negate_rows(state, step, pointer, *part)


def _negate_rows(state: TopicState, step: Step, pointer: int, first: bytes, last: bytes) -> None:
    """Negate the pointer in its rows from ``first`` to ``last``, up to the last assigned position."""
    if state.sequence.last_sequence_id < 0:
        return
    last = min(last, pack_position(state.sequence.last_ts_ms, state.sequence.last_sequence_id))
    if first <= last:
        step.write(RollBack(state.prefix + first, state.prefix + last + b"\x00", pointer))
        step.rolled_back.append((pointer, first, last))
        # After the rollback: a load that finds neither rolls back again, and then adds the entry.
        add_entry(state, step, ROLLBACK, p=pointer, f=first, l=last)


# --- forgetting pointers ---------------------------------------------------------------------------
#
# A topic forgets a write pointer once it is decided, or older than any transaction can be.
#
#     committed, aborted      at once; stored messages that were never published are removed first
#     rolled back, unknown    past the maximum lifetime; without one, a topic's ttl after it was last used
#     in progress, invalid    never; an invalid one becomes unknown when the service prunes it

#: Maximum number of pointers whose stored messages one cleaning plan removes.
MAX_ORPHANS = 10_000


def apply_decisions(state: TopicState, pointers: Iterable[int]) -> None:
    """Forget pointers that have been committed or aborted."""
    for pointer in pointers:
        pending = state.pending.get(pointer)
        if pending is not None:
            _forget_decided(state, pending)


def apply_known_decisions(state: TopicState) -> None:
    """Forget the pointers that were decided while the topic was not loaded."""
    partly_cleaned = state.metadata is not None and state.metadata.partly_cleaned
    for pending in list(state.pending.values()):
        if partly_cleaned:
            forget_pointer(state, pending)
        elif pending.pointer > 0 and _standing(state, pending.pointer) in ("committed", "aborted"):
            _forget_decided(state, pending)


def has_open_pointers(state: TopicState) -> bool:
    """True if the topic has messages of a transaction in progress, which may still write more."""
    return any(each > 0 and _standing(state, each) == "in_progress" for each in state.pending)


def _standing(state: TopicState, pointer: int) -> Standing:
    """Ask the authority; while it is unavailable, pointers count as in progress. Never waits."""
    try:
        return state.authority.standing(pointer)
    except TransactionsUnavailable:
        return "in_progress"


def _forget_decided(state: TopicState, pending: Pending) -> None:
    if pending.stored:
        pending.decided = True
    else:
        forget_pointer(state, pending)


def plan_pointers(state: TopicState) -> list[tuple[int, bytes, bytes]]:
    """Forget pointers that are no longer needed. Returns pointers and ``[start, stop)`` of payload keys to remove.

    Their messages are abandoned permanently, since a crash may leave only some of the rows removed.
    """
    orphans: list[tuple[int, bytes, bytes]] = []
    for pending in list(state.pending.values()):
        if pending.pointer < 0:
            orphans += plan_staged(state, pending, room=len(orphans) < MAX_ORPHANS)
            continue
        standing = _standing(state, pending.pointer)
        old = _is_old(state, pending)
        if standing in ("committed", "aborted"):
            _forget_decided(state, pending)
        if pending.stored and len(orphans) < MAX_ORPHANS and _is_orphan(pending, standing, old=old):
            orphans.append(abandon_stored(state, pending))
        elif not pending.stored and pending.pointer in state.pending and _may_forget(pending, standing, old=old):
            forget_pointer(state, pending)
    return orphans


def plan_staged(state: TopicState, pending: Pending, *, room: bool) -> list[tuple[int, bytes, bytes]]:
    """Plan the removal of staged messages that were not published within the lifetime of a transaction."""
    life_ms = state.limits.max_lifetime_ms or state.living_or_last().properties.ttl_ms
    if not pending.orphaned and pending.used_ms + life_ms > state.time_ms:
        return []
    if pending.damaged:
        forget_pointer(state, pending)
        return []
    return [abandon_stored(state, pending)] if room else []


def abandon_stored(state: TopicState, pending: Pending) -> tuple[int, bytes, bytes]:
    """Ensure that a pointer's stored messages are never published. Returns pointer and ``[start, stop)`` of keys."""
    if not pending.orphaned:
        pending.orphaned = True
        state.changed.add(pending.pointer)
        if pending.staged_by is not None:
            del state.staged[pending.staged_by]
    start = payload_prefix(state.name, state.living().generation, pending.pointer)
    return pending.pointer, start, stop_after(start)


def forget_orphans(state: TopicState, pointers: Iterable[int]) -> None:
    """Forget these pointers, or at least their stored messages, which the janitor has removed."""
    for pointer in pointers:
        pending = state.pending.get(pointer)
        if pending is None or not pending.orphaned:
            continue
        drop_stored(state, pending)
        if pending.pointer < 0:
            forget_pointer(state, pending)
            continue
        standing = _standing(state, pointer)
        if pending.decided or _may_forget(pending, standing, old=_is_old(state, pending)):
            forget_pointer(state, pending)
        else:
            state.changed.add(pointer)


def _is_orphan(pending: Pending, standing: Standing, *, old: bool) -> bool:
    gone = pending.rolled_back or pending.decided or pending.orphaned
    return gone or (old and standing in ("unknown", "invalid"))


def _may_forget(pending: Pending, standing: Standing, *, old: bool) -> bool:
    return old and standing != "invalid" and (pending.rolled_back or standing == "unknown")


def _is_old(state: TopicState, pending: Pending) -> bool:
    if pending.rolled_back and state.limits.issues_pointers and _standing(state, pending.pointer) == "unknown":
        return True  # earlier versions accepted pointers that were never issued, of any age
    if state.limits.max_lifetime_ms > 0:
        return too_old(state, pending.pointer)
    return pending.used_ms + state.living_or_last().properties.ttl_ms < state.time_ms


# --- undecided pointers, for operators -------------------------------------------------------------


def list_pointers(state: TopicState, step: Step, ask: ListPointers, now: Now) -> list[PointerView]:
    """List all undecided pointers, those without rows last. Raises TopicNotFound."""
    del step, ask, now
    state.living()
    state.usage.drop_before(state.oldest_ms)
    undecided = (each for each in state.pending.values() if each.pointer > 0 and not each.decided)
    known = [_view(state, pending) for pending in undecided]
    return sorted(known, key=lambda view: (view.first is None, view.first or b"", view.pointer))


def _view(state: TopicState, pending: Pending) -> PointerView:
    placed = bool(pending.runs) and not pending.damaged
    return PointerView(
        pending.pointer,
        pending.since_ms,
        first=pending.runs[0].first if placed else None,
        messages=pending.messages,
        bytes=pending.size,
        stored=pending.stored,
        stored_bytes=pending.stored_bytes,
        rolled_back=pending.rolled_back,
        hidden=min(pending.hidden(state.appended), state.usage.messages) if placed else 0,
    )

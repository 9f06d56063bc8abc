"""Stored messages: kept invisible in the payload table until a publish refers to them.

A transaction stores messages under its write pointer; a producer without a transaction *stages* them under a pointer
that the topic assigns. Both are stored in the same way: under one pointer, by segments, at growing payload positions.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.errors import (
    AlreadyPublished,
    InvalidParameter,
    InvalidSequenceIds,
    NoMessages,
    Overloaded,
    PartialDuplicate,
    TransactionRequired,
    TransactionTooLarge,
)
from plainsong.protocol.ids import NO_PAYLOAD_PART, unpack_position
from plainsong.protocol.keys import payload_prefix, pointer_key
from plainsong.protocol.requests import Receipt
from plainsong.protocol.rows import SEGMENT, STAMP, MessageRow, Stored, encode_row, staged_pointer
from plainsong.protocol.topic.chain import NO_SEGMENT, link_rows
from plainsong.protocol.topic.chain_rules import chain_stored
from plainsong.protocol.topic.checkpoint import forget_pointer
from plainsong.protocol.topic.deduplication import (
    DeduplicationVerdict,
    deduplicate,
    ensure_producer,
    record_publish,
    session_of,
    without_duplicates,
)
from plainsong.protocol.topic.pending import Pending, Segment
from plainsong.protocol.topic.publish import (
    NOT_DEDUPLICATED,
    check_generation,
    check_messages,
    count_messages,
    ends_of,
    receipt_of,
)
from plainsong.protocol.topic.row_extras import RowExtras, row_extras_of
from plainsong.protocol.topic.state import PositionSequence, Run
from plainsong.protocol.topic.step import own_ttls, positions, values_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from plainsong.protocol.records import Metadata
    from plainsong.protocol.requests import PublishRequest
    from plainsong.protocol.rows import Stamp
    from plainsong.protocol.topic.asks import PublishStaged, StoreStaged
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step


def check_segment(state: TopicState, pending: Pending | None, name: str | None) -> None:
    """Check the bound on segments, if this one is new. Raises TransactionTooLarge."""
    if name is None or pending is None or name in pending.segments:
        return
    if len(pending.segments) >= state.limits.max_segments:
        raise too_many_segments(state, pending)


def too_many_segments(state: TopicState, pending: Pending) -> TransactionTooLarge:
    """Return the error for one segment too many."""
    whose = f"write pointer {pending.pointer}" if pending.staged_by is None else f"producer {pending.staged_by!r}"
    hint = f"at most {state.limits.max_segments}"
    if pending.staged_by is not None:
        hint += "; if they are of attempts that failed, open the producer with discardStaged, and start again"
    return TransactionTooLarge(f"{whose} has {len(pending.segments)} segments in topic {state.name}", hint=hint)


def store_messages(
    state: TopicState, step: Step, pending: Pending, request: PublishRequest, row_extras: RowExtras | None
) -> None:
    """Add the messages of a checked request to the payload rows of a pointer."""
    segment = None
    if request.segment is not None:
        segment = pending.segments.setdefault(request.segment, Segment(len(pending.segments)))
        row_extras = row_extras or RowExtras()
        row_extras.every = {SEGMENT: segment.index}
    suffixes = positions(_payload_positions(pending, state.time_ms, len(request.messages)))
    ttls_s = own_ttls(len(request.messages), request.ttl_s, request.message_ttls_s)
    values = values_of(request.messages, ttls_s, None, row_extras)
    prefix = payload_prefix(state.name, state.living().generation, pending.pointer)
    step.add_payloads(Put(Table.PAYLOAD, prefix, suffixes, values))
    size = sum(map(len, request.messages))
    pending.first_stored = pending.first_stored or suffixes[0]
    pending.last_stored = suffixes[-1]
    pending.used_ms = state.time_ms
    pending.stored += len(request.messages)
    pending.stored_bytes += size
    state.stored_bytes += size
    if state.chain is not None:
        linked = pending if segment is None else segment
        linked.link = link_rows(linked.link, suffixes, values)
    if segment is not None:
        segment.grow(len(request.messages), size)


def reference_to(pending: Pending, segments: Collection[str] | None) -> Stored:
    """Return the reference to a pointer's stored messages: all of them, or those of the given segments that exist."""
    assert pending.first_stored is not None
    assert pending.last_stored is not None  # messages are stored, and have positions
    staged = None if pending.staged_by is None else pending.pointer
    first, last = pending.first_stored, pending.last_stored
    if segments is None:
        return Stored(pending.stored, pending.stored_bytes, first, last, None, staged)
    listed = [pending.segments[name] for name in dict.fromkeys(segments) if name in pending.segments]
    messages, size = sum(each.messages for each in listed), sum(each.size for each in listed)
    return Stored(messages, size, first, last, frozenset(each.index for each in listed), staged)


def links_of(pending: Pending, segments: Collection[str] | None) -> dict[int, bytes]:
    """Return the links of the same messages, by the index of their segment; empty if the topic has no chain."""
    names = pending.segments if segments is None else frozenset(segments)
    links = {each.index: each.link for name, each in pending.segments.items() if name in names and each.link}
    if segments is None and pending.link:
        links[NO_SEGMENT] = pending.link
    return links


def drop_stored(state: TopicState, pending: Pending) -> None:
    """Reset a pointer's stored messages, which were published or removed."""
    state.stored_bytes -= pending.stored_bytes
    pending.stored = pending.stored_bytes = 0
    pending.segments.clear()
    pending.link = b""


def _payload_positions(pending: Pending, time_ms: int, count: int) -> list[Run]:
    """Assign payload positions of a pointer: above all earlier ones, and never 0, which means a message table row."""
    sequence = (
        PositionSequence() if pending.last_stored is None else PositionSequence(*unpack_position(pending.last_stored))
    )
    return sequence.take(max(1, time_ms), count)


# --- deduplication of stores -----------------------------------------------------------------------


def deduplicate_store(
    state: TopicState, step: Step, pending: Pending | None, request: PublishRequest, *, staged: bool = False
) -> DeduplicationVerdict | None:
    """Return the verdict on a store under its pointer and segment; None if there is no producer to remember.

    Args:
      staged: the messages are staged. These are deduplicated in every topic, since their pointer's row has the ids;
        sessions exist only if producers are remembered.
    Raises:
      InvalidSequenceIds, ProducerFenced, ProducerExpired, PartialDuplicate, TransactionTooLarge, DamagedRow: nothing
      happened.
    """
    if request.producer is None or not (staged or state.producers.enabled):
        return None
    ids = request.sequence_ids
    if ids is None:
        raise InvalidSequenceIds("a request with a producer needs sequenceIds", hint="give one for each message")
    producer = session_of(state, step, request) if state.producers.enabled else None
    if producer is not None:
        state.producers.touch(producer, state.time_ms)
    stored_by = {} if pending is None else pending.stored_by
    who = (request.producer, request.segment or "")
    if who not in stored_by and len(stored_by) >= state.limits.max_segments:
        if staged and pending is not None:
            raise too_many_segments(state, pending)
        raise TransactionTooLarge(
            f"{len(stored_by)} producers and segments have stored under one pointer of topic {state.name}",
            hint=f"at most {state.limits.max_segments}",
        )
    _, highest = stored_by.get(who, (0, -1))
    dedup = DeduplicationVerdict(
        request.producer, ids, bisect_right(ids, highest), request.write_pointer or 0, producer
    )
    if request.atomic and dedup.new and not dedup.duplicate:
        raise PartialDuplicate(f"ids up to {highest} are stored already", hint="store the new messages only")
    if dedup.new:
        step.producer_outcomes["duplicate" if dedup.duplicate else "partial"] += 1
    return dedup


def record_store(pending: Pending, request: PublishRequest, dedup: DeduplicationVerdict) -> None:
    """Record the sequence ids of a store, in the pointer's row and the same commit."""
    epoch = 0 if dedup.producer is None else dedup.producer.epoch
    pending.record_store(dedup.name, request.segment or "", epoch, dedup.ids[-1])


# --- staging ---------------------------------------------------------------------------------------
#
# A producer's messages are stored by segments, and published once as one plain batch, without a transaction.
#
#     store     payload rows under a negative pointer that the topic assigns to the producer; no reader sees them
#     publish   one reference row without a pointer: the listed segments become visible at once for every reader;
#               the other segments stay invisible forever
#
# The pointer is derived from a position that no message gets, so it is unique, even after a crash or when the clock is
# set back. A producer has one at a time. Transaction authorities and readers' snapshots do not include it.


#: The end of the highest id at a position.
_LAST_PAYLOAD_PART = b"\xff" * len(NO_PAYLOAD_PART)
#: Maximum number of segments named in an error.
_MAX_NAMED = 5


def store_staged(state: TopicState, step: Step, ask: StoreStaged, now: Now) -> None:
    """Store the request's messages until its producer publishes their segment.

    Messages with sequence ids up to the segment's highest are not stored again.

    Raises:
      TopicNotFound, GenerationChanged, TransactionRequired, NoMessages, MessageTooLarge, RequestTooLarge, LowSpace,
      TopicFull, TransactionTooLarge (too many segments), Overloaded, InvalidParameter (two routing keys),
      ProducerFenced, ProducerExpired, DamagedRow, AlreadyPublished (the segment's earlier messages are no longer
        staged): nothing happened.
    """
    request = ask.request
    metadata = _check_topic(state, request)
    known = find_staged(state, request.producer)
    dedup = _deduplicate(state, step, known, request)
    if dedup is not None:
        if dedup.duplicate:
            return
        request = without_duplicates(request, dedup)
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    check_messages(state, metadata, request, now)
    check_segment(state, known, request.segment)
    row_extras = row_extras_of(request)
    pending = _open_staging(state, step, request.producer or "") if known is None else known
    store_messages(state, step, pending, request, row_extras)
    if dedup is not None:
        record_store(pending, request, dedup)
    state.changed.add(pending.pointer)


def publish_staged(state: TopicState, step: Step, ask: PublishStaged, now: Now) -> Receipt:
    """Publish the listed segments. A duplicate gets its original answer, and its segments are not checked.

    Raises:
      TopicNotFound, GenerationChanged, TransactionRequired, LowSpace, InvalidParameter (nothing is staged under a
      listed segment); with a remembered producer also what ``deduplicate`` and ``ensure_producer`` raise: nothing
      happened.
    """
    request = ask.request
    metadata = _check_topic(state, request)
    dedup = None
    if state.producers.enabled:
        dedup = deduplicate(state, step, request)
        if dedup.duplicate:
            return _with_enclosing_ids(receipt_of(metadata, dedup, *dedup.ends()))
    pending = _find_segments(state, request)
    check_messages(state, metadata, request, now)
    stamp = None
    if dedup is not None:
        ensure_producer(state, step, dedup)
        stamp = dedup.stamp(rows=1)
    position = _publish(state, step, metadata, pending, request, stamp)
    forget_pointer(state, pending)
    if dedup is not None:
        record_publish(state, step, dedup, position, position)
        return _with_enclosing_ids(receipt_of(metadata, dedup, position, position))
    message_id = position + NO_PAYLOAD_PART
    return _with_enclosing_ids(Receipt(message_id, message_id, metadata.generation, verdict=NOT_DEDUPLICATED))


def find_staged(state: TopicState, producer: str | None) -> Pending | None:
    """Return the staged messages that a producer can still publish; None if it has none."""
    pointer = state.staged.get(producer or "")
    return None if pointer is None else state.pending[pointer]


def _check_topic(state: TopicState, request: PublishRequest) -> Metadata:
    metadata = state.living()
    check_generation(metadata, request)
    if metadata.properties.transactional == "required":
        raise TransactionRequired(f"topic {state.name} accepts messages only with a write pointer")
    return metadata


def _deduplicate(
    state: TopicState, step: Step, known: Pending | None, request: PublishRequest
) -> DeduplicationVerdict | None:
    """Return the verdict on a staged store; None if it has no sequence ids. Raises the same as ``store_staged``."""
    if request.sequence_ids is None:
        if state.producers.enabled:
            session_of(state, step, request)
        return None
    dedup = deduplicate_store(state, step, known, request, staged=True)
    if dedup is not None:
        _check_continuation(state, known, request, dedup.ids[0])
    return dedup


def _check_continuation(state: TopicState, known: Pending | None, request: PublishRequest, first_id: int) -> None:
    """Raise AlreadyPublished if a segment continues without its first messages being staged."""
    who = (request.producer or "", request.segment or "")
    if first_id and (known is None or who not in known.stored_by):
        raise AlreadyPublished(
            f"segment {request.segment!r} continues with sequence id {first_id} in topic {state.name}, and nothing of "
            f"it is staged: producer {request.producer!r} has published since, or it was cleaned",
            hint="begin a new segment with id 0",
        )


def _open_staging(state: TopicState, step: Step, producer: str) -> Pending:
    """Assign a staging pointer to a producer that has none. Raises Overloaded."""
    if len(state.pending) >= state.limits.max_pending:
        raise Overloaded(
            f"{len(state.pending)} write pointers and staging producers are undecided in topic {state.name}",
            hint="publish staged messages, or raise transactions.max_per_topic",
        )
    (run,) = state.sequence.take(max(1, state.time_ms), 1)
    pending = Pending(staged_pointer(run.ts_ms, run.first), state.time_ms, state.time_ms, staged_by=producer)
    state.pending[pending.pointer] = pending
    state.staged[producer] = pending.pointer
    # Before the payload rows: if the commit is interrupted after them, the pointer must not be assigned a second time.
    key = pointer_key(state.name, state.living().generation, pending.pointer)
    step.write(put_one(Table.METADATA, key, pending.encode()))
    return pending


def _find_segments(state: TopicState, request: PublishRequest) -> Pending:
    """Return the producer's staged messages. Raises InvalidParameter if a listed segment is missing."""
    pending = find_staged(state, request.producer)
    known = {} if pending is None else pending.segments
    missing = [name for name in dict.fromkeys(request.segments or ()) if name not in known]
    if pending is not None and not missing:
        return pending
    shown = ", ".join(map(repr, missing[:_MAX_NAMED])) + (" and others" if len(missing) > _MAX_NAMED else "")
    raise InvalidParameter(
        f"producer {request.producer!r} has nothing staged in topic {state.name} under {shown}: it was never stored, "
        "or was already published or cleaned",
        hint="list only segments that were stored since the producer's last publish; nothing was published",
    )


def _publish(
    state: TopicState, step: Step, metadata: Metadata, pending: Pending, request: PublishRequest, stamp: Stamp | None
) -> bytes:
    """Write the reference row. Returns its position."""
    reference = reference_to(pending, request.segments)
    extras = reference.extras() if stamp is None else {**reference.extras(), STAMP: stamp.packed()}
    runs = state.sequence.take(state.time_ms, 1)
    position, _ = ends_of(runs)
    value = encode_row(MessageRow(None, ttl_s=request.ttl_s, extras=extras))
    step.add_reference(state.prefix, position, value)
    chain_stored(state, step, position, reference, links_of(pending, request.segments), request.ttl_s, 0)
    own_expiry_ms = 0 if request.ttl_s is None else runs[0].ts_ms + request.ttl_s * 1000
    count_messages(state, step, metadata, runs[0], reference.messages, reference.payload_bytes, own_expiry_ms)
    state.rows_since_mark += 1
    return position


def _with_enclosing_ids(receipt: Receipt) -> Receipt:
    """Return the receipt with ids that enclose those of all messages, which end with their payload positions."""
    if receipt.last_id is None:
        return receipt
    return replace(receipt, last_id=receipt.last_id[: -len(NO_PAYLOAD_PART)] + _LAST_PAYLOAD_PART)

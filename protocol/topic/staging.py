"""Staging: a producer's messages, stored by segments and published as one plain batch, once, without a transaction.

    store     payload rows under a negative pointer, which the topic gives to the producer; seen by nobody
    publish   one reference row without a pointer: the listed segments become visible in one moment, to every reader;
              what was staged under others goes with it, never shown

The pointer is made of a position of the topic's own, which no message gets, so it is never given again: not after a
crash, and not when the clock was set back. A producer has one at a time. To the authorities of transactions, and to
whoever reads with a snapshot, there is none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from protocol.effects import Table, put_one
from protocol.errors import AlreadyPublished, InvalidParameter, NoMessages, Overloaded, TransactionRequired
from protocol.ids import NO_PAYLOAD_PART
from protocol.keys import pointer_key
from protocol.references import staged_pointer
from protocol.requests import Receipt
from protocol.rows import STAMP, MessageRow, encode_row
from protocol.topic.admission import check_generation, check_messages
from protocol.topic.bookkeeping import forget
from protocol.topic.keeping import check_segment, keep_messages, reference_to
from protocol.topic.marks import marks_of
from protocol.topic.pending import Pending
from protocol.topic.producers.judging import admit, judge, remember, session_of, trimmed
from protocol.topic.producers.under import judge_store, remember_store
from protocol.topic.publish import NOT_JUDGED, count, ends_of, receipt_of

if TYPE_CHECKING:
    from protocol.records import Metadata
    from protocol.requests import PublishRequest
    from protocol.rows import Stamp
    from protocol.topic.producers.judging import Judged
    from protocol.topic.staging_asks import PublishStaged, StoreStaged
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step

#: What a position is followed by in the id that no message published there comes after.
_LAST_PAYLOAD_PART = b"\xff" * len(NO_PAYLOAD_PART)
#: Segments named in a refusal.
_MAX_NAMED = 5


def store_staged(state: TopicState, step: Step, ask: StoreStaged, now: Now) -> None:
    """Keep the request's messages until its producer publishes their segment.

    With sequence ids, those at or below the segment's highest are not stored again.

    Raises:
      TopicNotFound, GenerationChanged, TransactionRequired, NoMessages, MessageTooLarge, RequestTooLarge, LowSpace,
      TopicFull, TransactionTooLarge (too many segments), Overloaded, InvalidParameter (two routing keys),
      ProducerFenced, ProducerExpired, DamagedRow, AlreadyPublished (what the segment had before is not staged any
      more): nothing happened.
    """
    request = ask.request
    metadata = _admitted(state, request)
    known = staged_by(state, request.producer)
    storing = _judge(state, step, known, request)
    if storing is not None:
        if storing.duplicate:
            return
        request = trimmed(request, storing)
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    check_messages(state, metadata, request, now)
    check_segment(state, known, request.segment)
    marks = marks_of(request)
    pending = _opened(state, step, request.producer or "") if known is None else known
    keep_messages(state, step, pending, request, marks)
    if storing is not None:
        remember_store(pending, request, storing)
    state.changed.add(pending.pointer)


def publish_staged(state: TopicState, step: Step, ask: PublishStaged, now: Now) -> Receipt:
    """Publish the listed segments; where their messages stand. A duplicate is answered as it was, and looks nothing up.

    Raises:
      TopicNotFound, GenerationChanged, TransactionRequired, LowSpace, InvalidParameter (nothing is staged under a
      listed segment); with a producer that is remembered what ``judge`` and ``admit`` raise too: nothing happened.
    """
    request = ask.request
    metadata = _admitted(state, request)
    judged = None
    if state.producers.enabled:
        judged = judge(state, step, request)
        if judged.duplicate:
            return _enclosing(receipt_of(metadata, judged, *judged.ends()))
    pending = _with_all(state, request)
    check_messages(state, metadata, request, now)
    stamp = None
    if judged is not None:
        admit(state, step, judged)
        stamp = judged.stamp(rows=1)
    position = _publish(state, step, metadata, pending, request, stamp)
    forget(state, pending)
    if judged is not None:
        remember(state, step, judged, position, position)
        return _enclosing(receipt_of(metadata, judged, position, position))
    message_id = position + NO_PAYLOAD_PART
    return _enclosing(Receipt(message_id, message_id, metadata.generation, verdict=NOT_JUDGED))


def staged_by(state: TopicState, producer: str | None) -> Pending | None:
    """What a producer has staged and not published; None: nothing that could be."""
    pointer = state.staged.get(producer or "")
    return None if pointer is None else state.pending[pointer]


def _admitted(state: TopicState, request: PublishRequest) -> Metadata:
    metadata = state.living()
    check_generation(metadata, request)
    if metadata.properties.transactional == "required":
        raise TransactionRequired(f"topic {state.name} takes messages only with a write pointer")
    return metadata


def _judge(state: TopicState, step: Step, known: Pending | None, request: PublishRequest) -> Judged | None:
    """Which messages are new under their segment; None: there is nothing to tell it by. Raises as ``store_staged``."""
    if request.sequence_ids is None:
        if state.producers.enabled:
            session_of(state, step, request)
        return None
    judged = judge_store(state, step, known, request, staged=True)
    if judged is not None:
        _check_begun(state, known, request, judged.ids[0])
    return judged


def _check_begun(state: TopicState, known: Pending | None, request: PublishRequest, first_id: int) -> None:
    """Raise AlreadyPublished when a segment goes on of which nothing is staged: its rows so far would be missed."""
    who = (request.producer or "", request.segment or "")
    if first_id and (known is None or who not in known.stored_by):
        raise AlreadyPublished(
            f"segment {request.segment!r} goes on with sequence id {first_id} in topic {state.name}, and nothing "
            f"of it is staged: producer {request.producer!r} has published since, or it was cleaned",
            hint="begin a new segment with id 0",
        )


def _opened(state: TopicState, step: Step, producer: str) -> Pending:
    """A staged pointer for a producer that has none. Raises Overloaded."""
    if len(state.pending) >= state.limits.max_pending:
        raise Overloaded(
            f"{len(state.pending)} write pointers and staging producers are undecided in topic {state.name}",
            hint="publish what is staged, or raise transactions.max_per_topic",
        )
    (run,) = state.sequence.take(max(1, state.time_ms), 1)
    pending = Pending(staged_pointer(run.ts_ms, run.first), state.time_ms, state.time_ms, staged_by=producer)
    state.pending[pending.pointer] = pending
    state.staged[producer] = pending.pointer
    # Before the payload rows: cut off behind them, the pointer must not be given again with these in its range.
    key = pointer_key(state.name, state.living().generation, pending.pointer)
    step.write(put_one(Table.METADATA, key, pending.encode()))
    return pending


def _with_all(state: TopicState, request: PublishRequest) -> Pending:
    """What is staged, with every segment the request lists. Raises InvalidParameter when one is missing."""
    pending = staged_by(state, request.producer)
    known = {} if pending is None else pending.segments
    missing = [name for name in dict.fromkeys(request.segments or ()) if name not in known]
    if pending is not None and not missing:
        return pending
    shown = ", ".join(map(repr, missing[:_MAX_NAMED])) + (" and others" if len(missing) > _MAX_NAMED else "")
    raise InvalidParameter(
        f"producer {request.producer!r} has nothing staged in topic {state.name} under {shown}: "
        "it was never stored, or is published or cleaned already",
        hint="list only segments that were stored since the producer's last publish; nothing was published",
    )


def _publish(
    state: TopicState, step: Step, metadata: Metadata, pending: Pending, request: PublishRequest, stamp: Stamp | None
) -> bytes:
    """Write the one row; its position."""
    reference = reference_to(pending, request.segments)
    extras = reference.extras() if stamp is None else {**reference.extras(), STAMP: stamp.packed()}
    runs = state.sequence.take(state.time_ms, 1)
    position, _ = ends_of(runs)
    value = encode_row(MessageRow(None, ttl_s=request.ttl_s, extras=extras))
    step.roll(state.prefix).add_reference(position, value)
    own_expiry_ms = 0 if request.ttl_s is None else runs[0].ts_ms + request.ttl_s * 1000
    count(state, step, metadata, runs[0], reference.messages, reference.payload_bytes, own_expiry_ms)
    state.rows_since_mark += 1
    return position


def _enclosing(receipt: Receipt) -> Receipt:
    """The same, with ids that none of the messages is before or behind: theirs end as their payload rows do."""
    if receipt.last_id is None:
        return receipt
    return replace(receipt, last_id=receipt.last_id[: -len(NO_PAYLOAD_PART)] + _LAST_PAYLOAD_PART)

"""Publishing and storing under a write pointer, and publishing what was stored: one row, whatever it brings.

    store     payload rows, seen by nobody; a segment names who stored them
    publish   a reference row for all that is stored, the first time; then the request's own messages

Whether somebody sees them is between the sign in the row and the reader's snapshot. The topic keeps, per pointer,
where its rows are (``Pending``), so that they can be rolled back and be said to hold readers up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import AlreadyPublished, NoMessages
from protocol.ids import pack_position, unpack_position
from protocol.requests import PublishResponse
from protocol.rows import STAMP, MessageRow, encode_row
from protocol.topic.admission import admit_pointer, check_generation, check_messages
from protocol.topic.bookkeeping import touch
from protocol.topic.keeping import check_segment, drop_stored, keep_messages, reference_to
from protocol.topic.marks import check_atomic, marks_of, with_stamp
from protocol.topic.producers.judging import admit, judge, remember, trimmed
from protocol.topic.producers.under import answer_duplicate, judge_store, remember_store
from protocol.topic.publish import NOT_JUDGED, add_messages, count, ends_of
from protocol.topic.segments import digest_of
from protocol.topic.sequence import Run

if TYPE_CHECKING:
    from protocol.records import Metadata
    from protocol.requests import ProducerVerdict, PublishRequest
    from protocol.rows import Stamp
    from protocol.topic.pending import Pending
    from protocol.topic.pointer_asks import PublishUnder, StoreUnder
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step


def publish_under(state: TopicState, step: Step, ask: PublishUnder, now: Now) -> PublishResponse:
    """Publish what is stored under the request's write pointer, then its messages; where their rows stand.

    With nothing to publish nothing is written: the publish of what was stored answers again as it did, and one that
    never had anything answers an empty range.

    Raises:
      TopicNotFound, TransactionRequired, TransactionRefused, InvalidParameter, TransactionExpired, RolledBack,
      TransactionNotInProgress, DamagedRow, GenerationChanged, AlreadyPublished (an earlier one listed other segments),
      MessageTooLarge, RequestTooLarge, LowSpace, TopicFull, Overloaded, InvalidParameter (two routing keys),
      TransactionTooLarge (an atomic one); with a producer what ``judge`` and ``admit`` raise too: nothing happened.
    """
    request = ask.request
    metadata = state.living()
    judged = None
    if request.producer is not None and state.producers.enabled:
        check_generation(metadata, request)
        judged = judge(state, step, request, request.write_pointer or 0)
        if judged.duplicate:
            return answer_duplicate(state, metadata, judged)
        request = trimmed(request, judged)
    pointer = admit_pointer(state, metadata, request.write_pointer)
    check_generation(metadata, request)
    pending = state.pending.get(pointer)
    stored = 0 if pending is None or not pending.stored else 1
    _check_listed(state, pending, request)
    verdict = None if request.producer is None else NOT_JUDGED if judged is None else judged.verdict()
    if not stored and not request.messages:
        return _answer_again(state, pointer, pending, verdict)
    check_messages(state, metadata, request, now)
    check_atomic(state, request)
    marks = marks_of(request)
    pending = touch(state, step, pointer)
    stamp = None
    if judged is not None:
        admit(state, step, judged)
        stamp = judged.stamp(stored + len(request.messages))
        marks = with_stamp(marks, stamp, begin=stored)
    runs = state.sequence.take(state.time_ms, stored + len(request.messages))
    first, last = ends_of(runs)
    pending.add(first, last, state.appended)
    pending.used_ms = state.time_ms
    if stored:
        _publish_stored(state, step, metadata, pending, request, runs[0], stamp)
        pending.published = (first, last)
        pending.listed = digest_of(request.segments)
        runs = _behind_first(runs)
    if request.messages:
        add_messages(state, step, metadata, runs, request, pointer, marks)
        pending.messages += len(request.messages)
        pending.size += sum(map(len, request.messages))
    if judged is None:
        return _response(pointer, first, last, verdict)
    remember(state, step, judged, first, last)
    return _response(pointer, judged.begin or first, last, judged.verdict())


def _publish_stored(
    state: TopicState,
    step: Step,
    metadata: Metadata,
    pending: Pending,
    request: PublishRequest,
    run: Run,
    stamp: Stamp | None,
) -> None:
    """Write the reference row; from now on nothing can be stored under the pointer."""
    reference = reference_to(pending, request.segments)
    extras = reference.extras() if stamp is None else {**reference.extras(), STAMP: stamp.packed()}
    value = encode_row(MessageRow(None, pointer=pending.pointer, ttl_s=request.ttl_s, extras=extras))
    step.roll(state.prefix).add_reference(pack_position(run.ts_ms, run.first), value)
    own_expiry_ms = 0 if request.ttl_s is None else run.ts_ms + request.ttl_s * 1000
    count(
        state, step, metadata, Run(run.ts_ms, run.first, 1), reference.messages, reference.payload_bytes, own_expiry_ms
    )
    state.rows_since_mark += 1
    pending.messages += reference.messages
    pending.size += reference.payload_bytes
    drop_stored(state, pending)


def _behind_first(runs: list[Run]) -> list[Run]:
    """All positions but the first one."""
    head, *rest = runs
    return [Run(head.ts_ms, head.first + 1, head.length - 1), *rest] if head.length > 1 else rest


def _check_listed(state: TopicState, pending: Pending | None, request: PublishRequest) -> None:
    """See that segments are not listed behind a publish that listed others: what is stored there is never seen.

    Raises AlreadyPublished.
    """
    if pending is None or pending.listed is None or not request.segments:
        return
    if digest_of(request.segments) != pending.listed:
        raise AlreadyPublished(
            f"what was stored under write pointer {pending.pointer} in topic {state.name} has been published, and that "
            "publish listed other segments",
            hint="one publish of a transaction lists all segments of a topic; what is under others is never seen",
        )


def _answer_again(
    state: TopicState, pointer: int, pending: Pending | None, verdict: ProducerVerdict | None
) -> PublishResponse:
    if pending is not None and pending.published is not None:
        return _response(pointer, *pending.published, verdict)
    here = pack_position(state.sequence.last_ts_ms, max(0, state.sequence.last_sequence_id))
    return _response(pointer, here, here, verdict)


def _response(pointer: int, first: bytes, last: bytes, verdict: ProducerVerdict | None) -> PublishResponse:
    return PublishResponse(pointer, *unpack_position(first), *unpack_position(last), verdict=verdict)


def store_under(state: TopicState, step: Step, ask: StoreUnder, now: Now) -> None:
    """Keep the request's messages in the payload table until the pointer's stored messages are published.

    Raises:
      TopicNotFound, TransactionRequired, TransactionRefused, InvalidParameter, TransactionExpired, RolledBack,
      TransactionNotInProgress, DamagedRow, GenerationChanged, AlreadyPublished, NoMessages, MessageTooLarge,
      RequestTooLarge, LowSpace, TopicFull, TransactionTooLarge, Overloaded; with a producer what ``judge_store``
      raises too: nothing happened.
    """
    request = ask.request
    metadata = state.living()
    pointer = admit_pointer(state, metadata, request.write_pointer)
    check_generation(metadata, request)
    known = state.pending.get(pointer)
    storing = judge_store(state, step, known, request)
    if storing is not None:
        if storing.duplicate:
            return
        request = trimmed(request, storing)
    if known is not None and known.published is not None:
        raise AlreadyPublished(
            f"what was stored under write pointer {pointer} in topic {state.name} has been published",
            hint="publish further messages directly",
        )
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    check_messages(state, metadata, request, now)
    check_segment(state, known, request.segment)
    marks = marks_of(request)
    pending = touch(state, step, pointer)
    keep_messages(state, step, pending, request, marks)
    if storing is not None:
        remember_store(pending, request, storing)

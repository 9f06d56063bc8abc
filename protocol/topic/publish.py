"""Publishing without a write pointer: what is refused, what is a duplicate, and what becomes of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.errors import NoMessages, TransactionRequired
from protocol.ids import NO_PAYLOAD_PART, pack_id, pack_position
from protocol.requests import ProducerVerdict, Receipt
from protocol.topic.admission import check_generation, check_messages
from protocol.topic.marks import check_atomic, marks_of, with_stamp
from protocol.topic.producers.judging import admit, judge, remember, trimmed
from protocol.topic.roll import own_ttls
from protocol.topic.usage import ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from protocol.records import Metadata
    from protocol.requests import PublishRequest
    from protocol.topic.asks import Publish
    from protocol.topic.marks import Marks
    from protocol.topic.producers.judging import Judged
    from protocol.topic.sequence import Run
    from protocol.topic.state import Now, TopicState
    from protocol.topic.step import Step

#: What is said of a producer's request where deduplication is switched off: stored as it came.
NOT_JUDGED = ProducerVerdict("false", None)


def publish(state: TopicState, step: Step, ask: Publish, now: Now) -> Receipt:
    """Give ids to the messages of one request and add their rows to the step.

    Raises:
      TopicNotFound, NoMessages, MessageTooLarge, RequestTooLarge, TransactionRequired, GenerationChanged,
      LowSpace, TopicFull, TransactionTooLarge (an atomic one), InvalidParameter (two routing keys); with a producer
      InvalidSequenceIds, ProducerFenced, ProducerExpired, PartialDuplicate, SequenceConsumed, TooManyProducers,
      DamagedRow too: nothing happened.
    """
    metadata = state.living()
    request = ask.request
    check_generation(metadata, request)
    if metadata.properties.transactional == "required":
        raise TransactionRequired(f"topic {state.name} takes messages only with a write pointer")
    if not request.messages:
        raise NoMessages("messages is empty", hint="send at least one message")
    if request.producer is not None and state.producers.enabled:
        return _publish_once(state, step, metadata, request, now)
    check_messages(state, metadata, request, now)
    marks = None
    if request.atomic or request.routing_key is not None or request.attributes is not None:
        check_atomic(state, request)
        marks = marks_of(request)
    runs = state.sequence.take(state.time_ms, len(request.messages))
    add_messages(state, step, metadata, runs, request, marks=marks)
    head, last = runs[0], runs[-1]
    return Receipt(
        first_id=pack_id(head.ts_ms, head.first),
        last_id=pack_id(last.ts_ms, last.first + last.length - 1),
        generation=metadata.generation,
        verdict=None if request.producer is None else NOT_JUDGED,
    )


def _publish_once(state: TopicState, step: Step, metadata: Metadata, request: PublishRequest, now: Now) -> Receipt:
    """Store what of a producer's request is new."""
    judged = judge(state, step, request)
    if judged.duplicate:
        return receipt_of(metadata, judged, *judged.ends())
    fresh = trimmed(request, judged)
    check_messages(state, metadata, fresh, now)
    check_atomic(state, fresh)
    marks = marks_of(fresh)
    admit(state, step, judged)
    marks = with_stamp(marks, judged.stamp(len(fresh.messages)))
    runs = state.sequence.take(state.time_ms, len(fresh.messages))
    first, final = ends_of(runs)
    add_messages(state, step, metadata, runs, fresh, marks=marks)
    remember(state, step, judged, first, final)
    return receipt_of(metadata, judged, first, final)


def receipt_of(metadata: Metadata, judged: Judged, first: bytes | None, last: bytes | None) -> Receipt:
    """What a producer is told of its request, whose rows stand at the positions ``first`` to ``last``."""
    verdict = judged.verdict()
    partial = verdict.duplicate == "partial"
    return Receipt(
        first_id=None if first is None else first + NO_PAYLOAD_PART,
        last_id=None if last is None else last + NO_PAYLOAD_PART,
        generation=metadata.generation,
        duplicate=judged.duplicate,
        deduplicated=True,
        last_sequence_id=verdict.last_sequence_id,
        stored=list(judged.ids[judged.new :]) if partial else None,
        dropped=list(judged.ids[: judged.new]) if partial else None,
        verdict=verdict,
    )


def ends_of(runs: Sequence[Run]) -> tuple[bytes, bytes]:
    """The first and the last position."""
    head, last = runs[0], runs[-1]
    return pack_position(head.ts_ms, head.first), pack_position(last.ts_ms, last.first + last.length - 1)


def add_messages(
    state: TopicState,
    step: Step,
    metadata: Metadata,
    runs: Sequence[Run],
    request: PublishRequest,
    pointer: int | None = None,
    marks: Marks | None = None,
) -> None:
    """Add the rows of a request's messages to the step, under the positions of ``runs``, and count them."""
    roll = step.roll(state.prefix)
    first, messages = len(roll), request.messages
    ttls_s = own_ttls(len(messages), request.ttl_s, request.message_ttls_s)
    own_expiry_ms = roll.add(runs, messages, ttls_s, pointer, marks)
    for run in runs:
        values = roll.values[first : first + run.length]
        count(state, step, metadata, run, run.length, sum(map(len, values)), own_expiry_ms)
        first += run.length


def count(
    state: TopicState, step: Step, metadata: Metadata, run: Run, messages: int, size: int, own_expiry_ms: int
) -> None:
    """Count messages published at the positions of ``run`` whose values take ``size`` bytes."""
    size += ROW_BYTES * messages
    last = run.first + run.length - 1
    state.usage.add(run.ts_ms, messages, size, metadata.properties.ttl_ms, own_expiry_ms, last)
    state.rows_since_mark += messages
    state.appended += messages
    step.messages += messages

"""Producers under a write pointer: duplicates of what was published under it, and stores done once."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from protocol.errors import InvalidSequenceIds, PartialDuplicate, SequenceConsumed, TransactionTooLarge
from protocol.ids import unpack_position
from protocol.requests import PublishResponse
from protocol.topic.admission import admit_pointer
from protocol.topic.keeping import too_many_segments
from protocol.topic.producers.judging import NEW_IDS, Judged, session_of

if TYPE_CHECKING:
    from protocol.records import Metadata
    from protocol.requests import PublishRequest
    from protocol.topic.pending import Pending
    from protocol.topic.state import TopicState
    from protocol.topic.step import Step


def answer_duplicate(state: TopicState, metadata: Metadata, judged: Judged) -> PublishResponse:
    """What a publish whose ids are all taken is answered: as it was, if that is remembered.

    Raises what ``admit_pointer`` does, unless the transaction is committed, and SequenceConsumed when nothing is
    published under the pointer.
    """
    pointer = judged.pointer
    pending = state.pending.get(pointer)
    rolled_back = pending is not None and pending.rolled_back
    if rolled_back or state.authority.standing(pointer) not in ("deciding", "committed"):
        admit_pointer(state, metadata, pointer)
    first, last = judged.position(judged.ids[0]), judged.position(judged.ids[-1])
    if first is None or last is None:
        first, last = _all_of(judged, pending)
    verdict = judged.verdict()
    return PublishResponse(pointer, *unpack_position(first), *unpack_position(last), duplicate=True, verdict=verdict)


def _all_of(judged: Judged, pending: Pending | None) -> tuple[bytes, bytes]:
    """From the first to the last row of the pointer, where it is known that the ids were published under it."""
    if pending is not None and pending.runs and pending.has_ids(judged.name, judged.ids[0], judged.ids[-1]):
        return pending.runs[0].first, pending.runs[-1].last
    own = [] if judged.producer is None else judged.producer.recent
    rows = [(result.first, result.last) for result in own if result.pointer == judged.pointer]
    if not rows:
        raise SequenceConsumed(
            f"producer {judged.name!r} has used ids up to {judged.ids[-1]}, not under write pointer {judged.pointer}",
            hint=NEW_IDS,
        )
    return min(first for first, _ in rows), max(last for _, last in rows)


def judge_store(
    state: TopicState, step: Step, pending: Pending | None, request: PublishRequest, *, staged: bool = False
) -> Judged | None:
    """Which messages of a store are new under its pointer and segment; None: it has no producer, or nobody asks.

    Args:
      staged: what is staged is judged wherever it is, since it is known from its own row; sessions are only where
        producers are remembered.
    Raises:
      InvalidSequenceIds, ProducerFenced, ProducerExpired, PartialDuplicate, TransactionTooLarge, DamagedRow: nothing
      happened.
    """
    if request.producer is None or not (staged or state.producers.enabled):
        return None
    ids = request.sequence_ids
    if ids is None:
        raise InvalidSequenceIds("there is a producer and no sequenceIds", hint="give one for each message")
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
    judged = Judged(request.producer, ids, bisect_right(ids, highest), request.write_pointer or 0, producer)
    if request.atomic and judged.new and not judged.duplicate:
        raise PartialDuplicate(f"ids up to {highest} are stored already", hint="store what is new")
    if judged.new:
        step.told["duplicate" if judged.duplicate else "partial"] += 1
    return judged


def remember_store(pending: Pending, request: PublishRequest, judged: Judged) -> None:
    """Its messages are stored; the pointer's row says so in the same commit."""
    epoch = 0 if judged.producer is None else judged.producer.epoch
    pending.took_store(judged.name, request.segment or "", epoch, judged.ids[-1])

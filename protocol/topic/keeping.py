"""Keeping messages in the payload table, seen by nobody, until a reference to them is published.

What a transaction stores and what a producer stages are kept alike: under one pointer, by segments, at payload
positions that grow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from protocol.effects import Put, Table
from protocol.errors import TransactionTooLarge
from protocol.ids import unpack_position
from protocol.keys import payload_prefix
from protocol.references import Stored
from protocol.rows import SEGMENT
from protocol.topic.marks import Marks
from protocol.topic.roll import own_ttls, positions, values_of
from protocol.topic.segments import Segment
from protocol.topic.sequence import Run, Sequence

if TYPE_CHECKING:
    from collections.abc import Collection

    from protocol.requests import PublishRequest
    from protocol.topic.pending import Pending
    from protocol.topic.state import TopicState
    from protocol.topic.step import Step


def check_segment(state: TopicState, pending: Pending | None, name: str | None) -> None:
    """See that there is room for the segment, if it is a new one. Raises TransactionTooLarge."""
    if name is None or pending is None or name in pending.segments:
        return
    if len(pending.segments) >= state.limits.max_segments:
        raise too_many_segments(state, pending)


def too_many_segments(state: TopicState, pending: Pending) -> TransactionTooLarge:
    """What is said then, and what can be done about it."""
    whose = f"write pointer {pending.pointer}" if pending.staged_by is None else f"producer {pending.staged_by!r}"
    hint = f"at most {state.limits.max_segments}"
    if pending.staged_by is not None:
        hint += "; if they are of attempts that failed, open the producer with discardStaged, and start again"
    return TransactionTooLarge(f"{whose} has {len(pending.segments)} segments in topic {state.name}", hint=hint)


def keep_messages(
    state: TopicState, step: Step, pending: Pending, request: PublishRequest, marks: Marks | None
) -> None:
    """Add the messages of a request, which have been checked, to the payload rows of the pointer."""
    segment = None
    if request.segment is not None:
        segment = pending.segments.setdefault(request.segment, Segment(len(pending.segments)))
        marks = marks or Marks()
        marks.every = {SEGMENT: segment.index}
    suffixes = positions(_payload_positions(pending, state.time_ms, len(request.messages)))
    ttls_s = own_ttls(len(request.messages), request.ttl_s, request.message_ttls_s)
    values = values_of(request.messages, ttls_s) if marks is None else marks.values(request.messages, ttls_s, None)
    prefix = payload_prefix(state.name, state.living().generation, pending.pointer)
    step.keep(Put(Table.PAYLOAD, prefix, suffixes, values))
    size = sum(map(len, request.messages))
    pending.first_stored = pending.first_stored or suffixes[0]
    pending.last_stored = suffixes[-1]
    pending.used_ms = state.time_ms
    pending.stored += len(request.messages)
    pending.stored_bytes += size
    state.stored_bytes += size
    if segment is not None:
        segment.grow(len(request.messages), size)


def reference_to(pending: Pending, segments: Collection[str] | None) -> Stored:
    """What a row says that publishes what is kept under the pointer: all of it, or these segments, as far as known."""
    assert pending.first_stored is not None
    assert pending.last_stored is not None  # something is stored, and has its positions
    staged = None if pending.staged_by is None else pending.pointer
    first, last = pending.first_stored, pending.last_stored
    if segments is None:
        return Stored(pending.stored, pending.stored_bytes, first, last, None, staged)
    listed = [pending.segments[name] for name in dict.fromkeys(segments) if name in pending.segments]
    messages, size = sum(each.messages for each in listed), sum(each.size for each in listed)
    return Stored(messages, size, first, last, frozenset(each.index for each in listed), staged)


def drop_stored(state: TopicState, pending: Pending) -> None:
    """What was stored under the pointer is stored no more: it was published, or is gone."""
    state.stored_bytes -= pending.stored_bytes
    pending.stored = pending.stored_bytes = 0
    pending.segments.clear()


def _payload_positions(pending: Pending, time_ms: int, count: int) -> list[Run]:
    """The next payload positions of a pointer: above all it had, and never 0, which says that there is no payload."""
    sequence = Sequence() if pending.last_stored is None else Sequence(*unpack_position(pending.last_stored))
    return sequence.take(max(1, time_ms), count)

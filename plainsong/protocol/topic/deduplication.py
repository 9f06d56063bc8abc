"""Deduplication: the verdict on a producer's request, and when producers are remembered and forgotten.

    all ids above the last one         new
    none                               a duplicate: gets the original answer, as far as that is remembered
    some                               those above are new; an atomic request is refused
    remembered with another pointer    refused: the ids are consumed, rolled back or not

The *last one* is the highest id accepted, durable or not. Answers wait until the commit is durable, so a copy in the
same step shares the outcome of the first, and a later copy waits for that outcome in the mailbox.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import (
    InvalidSequenceIds,
    PartialDuplicate,
    ProducerExpired,
    ProducerFenced,
    SequenceConsumed,
    TooManyProducers,
)
from plainsong.protocol.keys import PRODUCERS, DamagedRow, system_key
from plainsong.protocol.plurals import counted
from plainsong.protocol.requests import ProducerVerdict
from plainsong.protocol.rows import Stamp
from plainsong.protocol.topic.checkpoint import delete_producers, last_position, write_mark, write_producers_record
from plainsong.protocol.topic.producer_state import (
    AppliedPolicy,
    DeduplicationRecord,
    Producer,
    ProducerTable,
    Result,
    effective_policy,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from plainsong.protocol.requests import PublishRequest
    from plainsong.protocol.topic.state import Now, TopicState
    from plainsong.protocol.topic.step import Step

NEW_IDS = "messages under another write pointer need new ids, also after a rollback"


def deduplicate(state: TopicState, step: Step, request: PublishRequest, pointer: int = 0) -> DeduplicationVerdict:
    """Return the verdict on a producer's request, in a topic that remembers producers.

    Raises:
      InvalidSequenceIds, ProducerFenced, ProducerExpired, PartialDuplicate, SequenceConsumed, DamagedRow: nothing
      happened.
    """
    assert request.producer is not None  # checked by the caller
    ids = request.sequence_ids
    if ids is None:
        raise InvalidSequenceIds("a request with a producer needs sequenceIds", hint="give one for each message")
    producer = session_of(state, step, request)
    pushed = -1 if producer is None else producer.pushed
    new = 0 if ids[0] > pushed else bisect_right(ids, pushed)
    dedup = DeduplicationVerdict(request.producer, ids, new, pointer, producer)
    if producer is None or not dedup.new:
        return dedup
    _check_pointer(state, dedup, producer)
    if request.atomic and not dedup.duplicate:
        raise PartialDuplicate(
            f"ids {ids[0]} to {ids[dedup.new - 1]} of {ids[0]} to {ids[-1]} are not new: the last one is {pushed}",
            hint="an atomic request is stored as a whole: send the new messages with ids above the last one",
        )
    state.producers.touch(producer, state.time_ms)
    step.producer_outcomes["duplicate" if dedup.duplicate else "partial"] += 1
    if dedup.position(ids[0]) is None:
        # A duplicate by contract, even if it was never stored: ids up to the last one count as used.
        step.producer_outcomes["unremembered"] += 1
    return dedup


@dataclass(slots=True)
class DeduplicationVerdict:
    """The decision which messages of a producer's request are new, made before anything is stored."""

    name: str
    ids: Sequence[int]
    new: int
    """Index of the first new id; the number of ids if none is new."""
    pointer: int
    """The write pointer; 0 if none."""
    producer: Producer | None
    """None if it is new to the topic."""

    @property
    def duplicate(self) -> bool:
        """True if no message of it is new."""
        return self.new == len(self.ids)

    @property
    def begin(self) -> bytes | None:
        """The position of the first message, if it is a duplicate and remembered."""
        return self.position(self.ids[0]) if self.new else None

    def stamp(self, rows: int) -> Stamp:
        """Return the stamp for the first of its ``rows`` rows."""
        assert self.producer is not None  # by ``ensure_producer``
        return Stamp(self.name, self.producer.epoch, self.ids[self.new :] if self.new else self.ids, rows)

    def position(self, sequence_id: int) -> bytes | None:
        """Return the position of a duplicate message; None if it is not remembered."""
        for result in () if self.producer is None else self.producer.recent:
            if result.low == sequence_id:
                return result.first
            if result.high == sequence_id:
                return result.last
            if result.low < sequence_id < result.high:
                first, last = int.from_bytes(result.first, "big"), int.from_bytes(result.last, "big")
                if last - first == result.high - result.low:
                    return (first + sequence_id - result.low).to_bytes(len(result.first), "big")
        return None

    def ends(self) -> tuple[bytes | None, bytes | None]:
        """Return the positions of the first and the last row of a duplicate, each None if it is not certain.

        Both belong to one remembered request: between two requests there may be messages of other clients.
        """
        low, high = self.ids[0], self.ids[-1]
        for result in () if self.producer is None else self.producer.recent:
            if result.low <= low and high <= result.high:
                first = result.first if low == result.low else self.position(low)
                return first, result.last if high == result.high else self.position(high)
        return None, None

    def producer_verdict(self) -> ProducerVerdict:
        """Return the verdict for the answer's headers, valid once everything accepted is durable."""
        last = None if self.producer is None else self.producer.pushed
        return ProducerVerdict("true" if self.duplicate else "partial" if self.new else "false", last)


def _check_pointer(state: TopicState, dedup: DeduplicationVerdict, producer: Producer) -> None:
    low, high = dedup.ids[0], dedup.ids[dedup.new - 1]
    for result in producer.recent:
        if result.low <= high and low <= result.high and result.pointer != dedup.pointer:
            under = f"under write pointer {result.pointer}" if result.pointer else "without a write pointer"
            raise SequenceConsumed(
                f"producer {dedup.name!r} has used ids {result.low} to {result.high} {under}",
                hint=NEW_IDS,
            )
    if low >= min((result.low for result in producer.recent), default=producer.pushed + 1):
        return
    # Ids that are not remembered may have been rolled back with their pointer, and must not count as duplicates.
    pending = state.pending.get(dedup.pointer)
    known = pending is not None and pending.has_ids(dedup.name, low, high)
    if (dedup.pointer and not known) or (not dedup.pointer and low <= producer.highest_transactional):
        error = SequenceConsumed(
            f"producer {dedup.name!r} has used ids from {low} on, under a write pointer that is not remembered",
            hint="read the topic to check whether they are stored; " + NEW_IDS,
        )
        error.outcome = "unknown"  # this may be a repetition of the request that used them
        raise error


def ensure_producer(state: TopicState, step: Step, dedup: DeduplicationVerdict) -> None:
    """Add the request's producer if it is new, before its messages are stored. Raises TooManyProducers."""
    if dedup.producer is None:
        dedup.producer = add_producer(state, step, dedup.name)


def without_duplicates(request: PublishRequest, dedup: DeduplicationVerdict) -> PublishRequest:
    """Return the request without its duplicate messages."""
    new = dedup.new
    if not new or not request.messages:
        return request
    return replace(
        request,
        messages=request.messages[new:],
        sequence_ids=dedup.ids[new:],
        message_ttls_s=None if request.message_ttls_s is None else request.message_ttls_s[new:],
        attributes=None if request.attributes is None else request.attributes[new:],
    )


def record_publish(state: TopicState, step: Step, dedup: DeduplicationVerdict, first: bytes, last: bytes) -> None:
    """Remember the request with the positions of its rows, ``first`` to ``last``."""
    assert dedup.producer is not None  # by ``ensure_producer``
    dedup.producer.record(Result(dedup.ids[dedup.new], dedup.ids[-1], first, last, dedup.pointer))
    state.producers.touch(dedup.producer, state.time_ms)
    state.producers.entries += 1
    if dedup.pointer:
        state.pending[dedup.pointer].record_ids(dedup.name, dedup.ids[dedup.new], dedup.ids[-1])
    step.producers.append(dedup.producer)


# --- producers and their sessions ------------------------------------------------------------------


def session_of(state: TopicState, step: Step, request: PublishRequest) -> Producer | None:
    """Return the request's producer, if its session is the latest; None if it is unknown.

    Raises ProducerFenced, ProducerExpired, DamagedRow.
    """
    name, epoch = request.producer or "", request.producer_epoch
    producer = find_producer(state, step, name)
    if epoch is None:
        return producer
    if producer is None or epoch > producer.epoch:
        raise ProducerExpired(
            f"topic {state.name} has no session {epoch} of producer {name!r}",
            hint="open the producer again; its earlier messages are not remembered",
        )
    if epoch < producer.epoch:
        raise ProducerFenced(
            f"session {epoch} of producer {name!r} has ended: session {producer.epoch} was opened",
            hint="two programs use the same name, or this one opened it again",
        )
    return producer


def find_producer(state: TopicState, step: Step, name: str) -> Producer | None:
    """Return the producer; None if it is not remembered. Raises DamagedRow."""
    producers = state.producers
    if name in producers.damaged:
        raise DamagedRow(
            f"the row of producer {name!r} in topic {state.name} cannot be read",
            hint="delete the producer; its sequence ids then start again",
        )
    producer = producers.known.get(name)
    if producer is None or state.time_ms <= producer.active_ms + producers.retention_ms:
        return producer
    if state.time_ms > producers.expires_ms(producer):
        forget_expired_producers(state, step)
        return None
    return producer


def add_producer(state: TopicState, step: Step, name: str) -> Producer:
    """Add a new producer. Raises TooManyProducers."""
    make_room_for_producer(state, step)
    begin_remembering(state, step)
    producer = Producer(name, active_ms=state.time_ms)
    state.producers.add(producer)
    state.producers.changed.add(name)
    return producer


# --- forgetting producers --------------------------------------------------------------------------
#
# The rows of the other producers are written first, then the high-water mark, so that a replay finds no stamps of
# forgotten producers. The removal comes last.


def make_room_for_producer(state: TopicState, step: Step) -> None:
    """Forget producers until one more may be added: expired ones first, then the longest idle, a few at a time.

    Raises TooManyProducers: all of them were active recently; nothing happened.
    """
    producers, limits = state.producers, state.limits
    if len(producers.known) < limits.max_producers:
        return
    forget_expired_producers(state, step)
    if len(producers.known) < limits.max_producers:
        return
    # Evict several at once: each eviction writes a high-water mark, and some topics have many one-time producers.
    at_most = len(producers.known) - limits.max_producers + 1 + limits.max_producers // 64
    gone = producers.idle(state.time_ms - limits.producer_active_ms, at_most)
    if len(producers.known) - len(gone) >= limits.max_producers:
        raise TooManyProducers(
            f"topic {state.name} remembers its maximum of {counted(len(producers.known), 'producer')}, all active recently",
            hint="use fewer names, delete producers that are done, or raise deduplication.max_producers",
        )
    forget_producers(state, step, gone)
    step.producer_outcomes["evicted"] += len(gone)


def forget_expired_producers(state: TopicState, step: Step) -> None:
    """Forget the producers that have been inactive for longer than their retention."""
    gone = state.producers.expired(state.time_ms)
    if gone:
        forget_producers(state, step, gone)
        step.producer_outcomes["expired"] += len(gone)


def forget_producers(state: TopicState, step: Step, names: Collection[str]) -> None:
    """Forget producers: their sessions are over, and their sequence ids may be used again."""
    producers = state.producers
    gone = [producers.pop(name) for name in names]
    epochs = max([producers.epochs, *(producer.epoch for producer in gone if producer is not None)])
    write_mark(state, step)
    record = replace(
        producers.record or DeduplicationRecord(switched=producers.switched),
        forgotten=last_position(state),
        epochs=epochs,
    )
    write_producers_record(state, step, record)
    delete_producers(state, step, names)


# --- whether producers are remembered --------------------------------------------------------------
#
# The topic's property, its namespace and the service's default decide, and may be changed at any time.
#
#     on → off   everything is forgotten at once, rows too
#     off → on   used sequence ids are accepted again; ``since`` is the position from which stamps are valid


def follow_policy(state: TopicState, step: Step, now: Now) -> None:
    """Apply the current policy; cheap if it has not changed."""
    if state.follows(now.deduplication):
        return
    metadata, producers = state.living(), state.producers
    own = metadata.properties.deduplication
    producers.applied = AppliedPolicy(metadata.generation, own, now.deduplication)
    producers.policy = effective_policy(state.name, own, now.deduplication, default=state.limits.deduplication_default)
    if producers.obsolete:
        delete_producers(state, step, producers.obsolete)
        producers.obsolete = []
    record = producers.record
    if record is None:
        return
    was_off = own == "inherit" and record.switched != now.deduplication.switched
    if record.on and (was_off or not producers.enabled):
        _forget_all(state, step, record)
    elif record.switched != now.deduplication.switched:
        producers.record, producers.record_changed = replace(record, switched=now.deduplication.switched), True


def _forget_all(state: TopicState, step: Step, record: DeduplicationRecord) -> None:
    producers = state.producers
    names = [*producers.known, *producers.damaged]
    epochs = max([record.epochs, *(producer.epoch for producer in producers.known.values())])
    # First: this voids producer rows and stamps, including those that a power cut leaves.
    write_producers_record(state, step, replace(record, on=False, switched=producers.switched, epochs=epochs))
    delete_producers(state, step, names)
    producers.clear()


def begin_remembering(state: TopicState, step: Step) -> None:
    """Validate stamps from the current position on, if they are void, since a producer is about to be added."""
    producers = state.producers
    if producers.record is None or not producers.record.on:
        record = DeduplicationRecord(switched=producers.switched, since=last_position(state), epochs=producers.epochs)
        write_producers_record(state, step, record)


def renew_producers(state: TopicState, step: Step, generation: int) -> None:
    """Start a generation without producers; epochs continue, so that older generations' sessions are invalid."""
    old = state.producers
    producers = state.producers = ProducerTable(state.limits.producer_retention_ms)
    epochs = max([old.epochs, *(producer.epoch for producer in old.known.values())])
    if epochs:
        producers.record = DeduplicationRecord(on=False, switched=old.switched, epochs=epochs)
        key = system_key(PRODUCERS, state.name, generation)
        step.write(Put(Table.METADATA, key, (b"",), (producers.record.encode(),)))

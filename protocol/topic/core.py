"""The topic core: takes what has arrived, decides, and says what to write and whom to answer.

    step(arrivals, now)    decides everything; nothing has happened yet
    … the actor writes step.operations …
    settled(step, now)     they are durable: the watermark moves, and these answers are true

It has no clock, disk or loop, never waits, and is driven just as well from a test, power cuts included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from protocol.errors import Overloaded, PlainsongError, TopicNotFound
from protocol.ids import FIRST_BOUND
from protocol.topic import asks, pointer_asks
from protocol.topic.bookkeeping import MAX_FORGOTTEN, write_mark, write_pointers
from protocol.topic.cleaning import cleaned, plan_cleaning
from protocol.topic.each import publish_each
from protocol.topic.enlisted import close_pointers
from protocol.topic.lifecycle import create, describe, remove, set_properties, undelete
from protocol.topic.parking import Parking
from protocol.topic.producers import asks as producer_asks
from protocol.topic.producers.forgetting import forget_expired
from protocol.topic.producers.noting import is_due, note_later, remove_torn
from protocol.topic.producers.sessions import get_producer, list_producers, open_producer, remove_producer
from protocol.topic.producers.switching import follow_policy
from protocol.topic.publish import publish
from protocol.topic.readers import list_readers, remove_reader, set_reader
from protocol.topic.rollback import roll_back
from protocol.topic.settling import list_pointers, take_decided
from protocol.topic.staging import publish_staged, store_staged
from protocol.topic.staging_asks import PublishStaged, StoreStaged
from protocol.topic.step import Step
from protocol.topic.torn_payloads import remove_torn_payloads
from protocol.topic.under import publish_under, store_under

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from protocol.topic.asks import Ask, Look, Span
    from protocol.topic.state import Now, TopicState

    Answers = list[tuple[Hashable, object | PlainsongError]]


def _stats(state: TopicState, step: Step, ask: asks.Stats, now: Now) -> asks.TopicStats:
    del step, ask, now
    state.living()
    state.usage.drop_before(state.oldest_ms)
    return asks.TopicStats(
        span=span_of(state, asks.Look(since=bytes(20))),
        slices=tuple(asks.Slice._make(counted) for counted in state.usage.stored()),
    )


#: Each kind of ask and the rule that answers it; a rule returns the answer or raises the error.
RULES: dict[type[Ask[Any]], Callable[[TopicState, Step, Any, Now], object]] = {
    asks.Publish: publish,
    asks.PublishEach: publish_each,
    pointer_asks.PublishUnder: publish_under,
    pointer_asks.StoreUnder: store_under,
    PublishStaged: publish_staged,
    StoreStaged: store_staged,
    pointer_asks.RollBackPointer: roll_back,
    pointer_asks.ClosePointers: close_pointers,
    pointer_asks.ListPointers: list_pointers,
    producer_asks.OpenProducer: open_producer,
    producer_asks.GetProducer: get_producer,
    producer_asks.ListProducers: list_producers,
    producer_asks.RemoveProducer: remove_producer,
    asks.Describe: describe,
    asks.Create: create,
    asks.SetProperties: set_properties,
    asks.Remove: remove,
    asks.Undelete: undelete,
    asks.Stats: _stats,
    asks.ListReaders: list_readers,
    asks.SetReader: set_reader,
    asks.RemoveReader: remove_reader,
    asks.PlanCleaning: plan_cleaning,
    asks.Cleaned: cleaned,
}


def span_of(state: TopicState, look: Look) -> Span:
    """What ``look`` may read now. Raises TopicNotFound."""
    metadata = state.living()
    until = state.until
    if look.end_before is not None:
        until = min(until, look.end_before)
    return asks.Span(
        generation=metadata.generation,
        prefix=state.prefix,
        since=look.since,
        until=until,
        now_ms=state.time_ms,
        oldest_ms=state.oldest_ms,
        watermark=state.watermark,
        expired=state.usage.expired_from(look.since, state.oldest_ms),
    )


class TopicCore:
    """The rules of one topic around its state; tickets are whatever the caller uses to know whom to answer."""

    def __init__(self, state: TopicState) -> None:
        self.state = state
        self.parking = Parking()

    def __repr__(self) -> str:
        return f"<TopicCore {self.state!r} parked={len(self.parking)}>"

    def step(self, arrivals: Iterable[tuple[Hashable, Ask[Any]]], now: Now) -> Step:
        """Decide all of ``arrivals``, in their order."""
        state = self.state
        state.time_ms = max(state.time_ms, now.wall_ms)
        take_decided(state, now.decided)
        step = Step(state.until if state.usage.messages else FIRST_BOUND)
        if state.torn:
            remove_torn(state, step)
        if state.torn_payloads:
            remove_torn_payloads(state, step)
        follow_policy(state, step, now)
        for ticket, ask in arrivals:
            if isinstance(ask, asks.Look):
                step.looks.append((ticket, ask))
                continue
            try:
                answer: object = RULES[type(ask)](state, step, ask, now)
            except PlainsongError as error:
                answer = error
            step.answers.append((ticket, answer))
        step.flush()
        note_later(state, now)
        if step.operations or step.pointers or len(state.forgotten) > MAX_FORGOTTEN or is_due(state, now):
            self._write_about(step, now)
        return step

    def _write_about(self, step: Step, now: Now) -> None:
        """What is to be said about the topic itself, behind the rows of the step."""
        state = self.state
        if state.metadata is None:
            return
        write_pointers(state, step)
        if state.needs_mark() or is_due(state, now):
            forget_expired(state, step)
            write_mark(state, step)

    def settled(self, step: Step, now: Now) -> Answers:
        """The step's operations are durable: move the watermark, and answer."""
        if step.operations:
            self.state.advance_watermark()
        for producer in step.producers:
            producer.persisted = producer.pushed
        answers = step.answers
        if step.renewed:
            answers += self._forsake()
        for ticket, look in step.looks:
            self._look(ticket, look, now, answers)
        if len(self.parking):
            answers += [(parked.ticket, self._span(parked.look)) for parked in self.parking.reached(self.state.until)]
            answers += [(parked.ticket, self._span(parked.look)) for parked in self.parking.overdue(now.mono_s)]
        return answers

    def close(self, decided: Iterable[int] = (), *, few_rows: int = 0) -> tuple[Step, Answers]:
        """Nothing comes after this: what is still to be written, and the parked polls, answered empty.

        Args:
          few_rows: so many since the last mark are replayed by the next load rather than marked now.
        """
        state = self.state
        step = Step(state.until)
        take_decided(state, decided)
        if state.metadata is not None:
            write_pointers(state, step)
            if state.rows_since_mark > few_rows or state.producers.changed:
                write_mark(state, step)
        return step, [(parked.ticket, self._span(parked.look)) for parked in self.parking.everyone()]

    def leave(self, ticket: Hashable) -> bool:
        """A caller is gone: forget its parked poll, if it has one."""
        return self.parking.leave(ticket)

    def next_deadline_s(self) -> float | None:
        """When a step is due although nothing has arrived."""
        parked_s, due_s = self.parking.next_deadline_s(), self.state.producers.due_s
        return min(parked_s, due_s) if parked_s is not None and due_s is not None else parked_s or due_s

    def _look(self, ticket: Hashable, look: Look, now: Now, answers: Answers) -> None:
        span = self._span(look)
        if not isinstance(span, asks.Span) or not self._waits(look, span, now):
            answers.append((ticket, span))
        elif len(self.parking) >= self.state.limits.max_parked_polls:
            answers.append((ticket, Overloaded(f"{len(self.parking)} polls wait on topic {self.state.name}")))
        else:
            assert look.deadline_s is not None  # said by _waits
            self.parking.park(ticket, look, look.deadline_s)

    @staticmethod
    def _waits(look: Look, span: Span, now: Now) -> bool:
        bounded = look.end_before is not None and look.end_before <= max(look.since, span.until)
        return look.since >= span.until and not bounded and look.deadline_s is not None and now.mono_s < look.deadline_s

    def _span(self, look: Look) -> Span | TopicNotFound:
        try:
            return span_of(self.state, look)
        except TopicNotFound as error:
            return error

    def _forsake(self) -> Answers:
        """The topic is not the one they waited on: answer every parked poll."""
        return [(parked.ticket, self._span(parked.look)) for parked in self.parking.everyone()]

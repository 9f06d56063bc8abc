"""The topic core: decides all requests that have arrived, and returns the rows to write and the answers.

    step(arrivals, now)    decides everything; nothing has happened yet
    … the actor writes step.operations …
    settled(step, now)     they are durable: the watermark moves, and the answers are valid

It has no clock, disk or event loop and never waits, so that a test can drive it, including power cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TYPE_CHECKING, Any

from plainsong.protocol.errors import Overloaded, PlainsongError, TopicNotFound
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.topic.asks import (
    CheckPublish,
    Cleaned,
    ClosePointers,
    Create,
    Describe,
    DescribeChain,
    GetProducer,
    ListPointers,
    ListProducers,
    ListReaders,
    Look,
    NoteSetAside,
    OpenProducer,
    PlanCleaning,
    Publish,
    PublishEach,
    PublishStaged,
    PublishUnder,
    Remove,
    RemoveProducer,
    RemoveReader,
    RollBackPointer,
    SetProperties,
    SetReader,
    Slice,
    Span,
    Stats,
    StatsView,
    StoreStaged,
    StoreUnder,
    Undelete,
)
from plainsong.protocol.topic.chain_rules import describe_chain, write_due
from plainsong.protocol.topic.checkpoint import (
    MAX_FORGOTTEN,
    schedule_snapshot,
    write_mark,
    write_pointers,
)
from plainsong.protocol.topic.deduplication import follow_policy, forget_expired_producers
from plainsong.protocol.topic.producer_sessions import get_producer, list_producers, open_producer, remove_producer
from plainsong.protocol.topic.publish import check_publish, close_pointers, publish, publish_each
from plainsong.protocol.topic.readers import list_readers, remove_reader, set_reader
from plainsong.protocol.topic.staging import publish_staged, store_staged
from plainsong.protocol.topic.step import Step
from plainsong.protocol.topic.transactional import apply_decisions, list_pointers, publish_under, roll_back, store_under
from plainsong.protocol.topic.upkeep import (
    cleaned,
    create,
    describe,
    note_set_aside,
    plan_cleaning,
    remove,
    remove_torn_payloads,
    remove_torn_rows,
    set_properties,
    undelete,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from plainsong.protocol.effects import Ask
    from plainsong.protocol.topic.state import Now, TopicState

    Answers = list[tuple[Hashable, object | PlainsongError]]


class TopicCore:
    """The rules of one topic around its state. A ticket is the caller's key for a request, and for its answer."""

    def __init__(self, state: TopicState) -> None:
        self.state = state
        self.parking = Parking()

    def __repr__(self) -> str:
        return f"<TopicCore {self.state!r} parked={len(self.parking)}>"

    def step(self, arrivals: Iterable[tuple[Hashable, Ask[Any]]], now: Now) -> Step:
        """Decide all of ``arrivals``, in order."""
        state = self.state
        self._announce_time(now)
        if now.decided:
            apply_decisions(state, now.decided)
        step = Step(state.until if state.usage.messages else FIRST_BOUND)
        if state.torn:
            remove_torn_rows(state, step)
        if state.torn_payloads:
            remove_torn_payloads(state, step)
        if state.chain is not None and state.chain.due:
            write_due(state, step)
        if not state.follows(now.deduplication):
            follow_policy(state, step, now)
        to_mark = False
        for ticket, ask in arrivals:
            try:
                if isinstance(ask, Look):
                    if ask.as_of_ms is not None:
                        to_mark |= state.close_moment(ask.as_of_ms, now.wall_ms)
                    step.looks.append((ticket, ask))
                    continue
                answer: object = RULES[type(ask)](state, step, ask, now)
            except PlainsongError as error:
                answer = error.with_traceback(None)  # avoids a reference cycle of error, traceback and frame
            step.answers.append((ticket, answer))
        step.flush()
        if state.producers.changed and state.producers.due_s is None:
            schedule_snapshot(state, now)
        due_s = state.producers.due_s
        is_due = due_s is not None and now.mono_s >= due_s
        ahead = to_mark or (bool(step.looks) and not now.low_space and state.expires_ahead())
        if step.operations or step.pointers or is_due or ahead or len(state.forgotten) > MAX_FORGOTTEN:
            self._write_about(step, is_due=is_due or ahead)
        return step

    def _announce_time(self, now: Now) -> None:
        """Advance the topic's time to the clock; it never goes back."""
        self.state.time_ms = max(self.state.time_ms, now.wall_ms)

    def look_now(self, look: Look, now: Now) -> Span | None:
        """Answer a look without a step; None if one is needed, to write something first, to refuse it, or to park it.

        Args:
          look: must not have ``as_of_ms``.
        """
        state = self.state
        self._announce_time(now)
        if (
            state.torn
            or state.torn_payloads
            or (state.chain is not None and state.chain.due)
            or not state.follows(now.deduplication)
            or state.expires_ahead()
        ):
            return None
        span = self._span(look)
        return None if not isinstance(span, Span) or self._may_park(look, span, now) else span

    def park_in_turn(self, ticket: Hashable, look: Look) -> bool:
        """Park a poll while the commit of a step is under way; False if it does not wait, or there is no room.

        The step must only add messages.
        """
        span = self._span(look)
        if look.as_of_ms is not None or not isinstance(span, Span) or not self._waits(look, span):
            return False
        if len(self.parking) >= self.state.limits.max_parked_polls:
            return False
        self.parking.park(ticket, look, span)
        return True

    def look_in_turn(self, ticket: Hashable, look: Look, now: Now) -> Answers:
        """Answer a look while the commit of a step is under way, from the state before it, or park it.

        The step must only add messages.
        """
        answers: Answers = []
        if look.as_of_ms is None:
            self._answer_look(ticket, look, now, answers)
        else:
            answers.append((ticket, Overloaded("the moment cannot be closed while a commit waits")))
        return answers

    def overdue(self, now: Now) -> Answers:
        """Answer the parked polls whose wait is over: nothing was added since they were parked.

        The current state may be that of a step whose commit is under way, so it is not shown.
        """
        return [(parked.ticket, parked.span) for parked in self.parking.take_overdue(now.mono_s)]

    def _write_about(self, step: Step, *, is_due: bool) -> None:
        """Write the due rows about the topic itself, after the message rows of the step."""
        state = self.state
        if state.metadata is None:
            return
        if state.changed or state.forgotten:
            write_pointers(state, step)
        if is_due or state.needs_mark():
            forget_expired_producers(state, step)
            write_mark(state, step)

    def needs_time(self, step: Step) -> bool:
        """Return True if ``settled`` needs the time: only for polls, so that publishes need not read two clocks."""
        return bool(step.looks) or len(self.parking) > 0

    def settled(self, step: Step, now: Now) -> Answers:
        """Move the watermark after the step's operations are durable, and return the answers.

        Does not change the step: if the commit fails after all, its refusals are valid, and these answers are not.

        Args:
          now: any value, unless ``needs_time``.
        """
        if step.operations:
            self.state.advance_watermark()
        for producer in step.producers:
            producer.persisted = producer.pushed
        answers = list(step.answers)
        if step.renewed:
            answers += self._answer_parked()
        for ticket, look in step.looks:
            self._answer_look(ticket, look, now, answers)
        if len(self.parking):
            answers += [
                (parked.ticket, self._span(parked.look)) for parked in self.parking.take_reached(self.state.until)
            ]
            answers += self.overdue(now)
        return answers

    def close(self, decided: Iterable[int] = (), *, few_rows: int = 0) -> tuple[Step, Answers]:
        """Return the last step, with the rows still to write, and empty answers for the parked polls.

        Args:
          few_rows: skip the mark if the next load has to replay at most this many rows.
        """
        state = self.state
        step = Step(state.until)
        apply_decisions(state, decided)
        if state.metadata is not None:
            write_pointers(state, step)
            if state.rows_since_mark > few_rows or state.producers.changed:
                write_mark(state, step)
        return step, [(parked.ticket, self._span(parked.look)) for parked in self.parking.take_all()]

    def leave(self, ticket: Hashable) -> bool:
        """Drop the parked poll of a caller that was cancelled. Returns True if it had one."""
        return self.parking.leave(ticket)

    def next_deadline_s(self) -> float | None:
        """Return when a step is due even if no request arrives; None: never."""
        parked_s, due_s = self.parking.next_deadline_s(), self.state.producers.due_s
        if parked_s is None or due_s is None:
            return due_s if parked_s is None else parked_s
        return min(parked_s, due_s)

    def _answer_look(self, ticket: Hashable, look: Look, now: Now, answers: Answers) -> None:
        span = self._span(look)
        if not isinstance(span, Span) or not self._may_park(look, span, now):
            answers.append((ticket, span))
        elif len(self.parking) >= self.state.limits.max_parked_polls:
            answers.append((ticket, Overloaded(f"{len(self.parking)} polls wait on topic {self.state.name}")))
        else:
            self.parking.park(ticket, look, span)

    @classmethod
    def _may_park(cls, look: Look, span: Span, now: Now) -> bool:
        return cls._waits(look, span) and look.deadline_s is not None and now.mono_s < look.deadline_s

    @staticmethod
    def _waits(look: Look, span: Span) -> bool:
        bounded = look.end_before is not None and look.end_before <= max(look.since, span.until)
        return look.since >= span.until and not bounded and look.deadline_s is not None

    def _span(self, look: Look) -> Span | TopicNotFound:
        try:
            return span_of(self.state, look)
        except TopicNotFound as error:
            return error

    def _answer_parked(self) -> Answers:
        """Answer every parked poll, as the topic was deleted or created again."""
        return [(parked.ticket, self._span(parked.look)) for parked in self.parking.take_all()]


def span_of(state: TopicState, look: Look) -> Span:
    """Return the span that ``look`` may read now. Raises TopicNotFound."""
    metadata = state.living()
    until = state.until
    if look.end_before is not None:
        until = min(until, look.end_before)
    return Span(
        generation=metadata.generation,
        prefix=state.prefix,
        since=look.since,
        until=until,
        now_ms=state.time_ms,
        oldest_ms=state.oldest_ms,
        watermark=state.watermark,
        expired=state.usage.expired_from(look.since, state.oldest_ms),
        undecided=_undecided(state, look.undecided) if look.undecided else frozenset(),
        set_aside=metadata.set_aside,
    )


def _undecided(state: TopicState, most: int) -> frozenset[int]:
    """Return pointers of transactions with possible messages here that are not known to be decided."""
    known = (each.pointer for each in state.pending.values() if each.pointer > 0 and not each.decided)
    return frozenset(islice(known, most))


def _stats(state: TopicState, step: Step, ask: Stats, now: Now) -> StatsView:
    del step, ask, now
    state.living()
    state.usage.drop_before(state.oldest_ms)
    return StatsView(
        span=span_of(state, Look(since=bytes(20))),
        slices=tuple(Slice._make(counted) for counted in state.usage.stored()),
    )


#: The rule for each kind of ask; returns the answer or raises the error.
RULES: dict[type[Ask[Any]], Callable[[TopicState, Step, Any, Now], object]] = {
    Publish: publish,
    CheckPublish: check_publish,
    PublishEach: publish_each,
    PublishUnder: publish_under,
    StoreUnder: store_under,
    PublishStaged: publish_staged,
    StoreStaged: store_staged,
    RollBackPointer: roll_back,
    ClosePointers: close_pointers,
    ListPointers: list_pointers,
    OpenProducer: open_producer,
    GetProducer: get_producer,
    ListProducers: list_producers,
    RemoveProducer: remove_producer,
    Describe: describe,
    DescribeChain: describe_chain,
    Create: create,
    SetProperties: set_properties,
    Remove: remove,
    Undelete: undelete,
    NoteSetAside: note_set_aside,
    Stats: _stats,
    ListReaders: list_readers,
    SetReader: set_reader,
    RemoveReader: remove_reader,
    PlanCleaning: plan_cleaning,
    Cleaned: cleaned,
}


# --- parked polls ----------------------------------------------------------------------------------
#
# Two heaps over one dictionary: by position, and by deadline. A poll is removed from the dictionary at once; its heap
# entries are dropped when they reach the top, or when stale entries outnumber the others.


class Parking:
    """The parked polls of one topic."""

    def __init__(self) -> None:
        self._parked: dict[Hashable, Parked] = {}
        self._by_since: list[tuple[bytes, int, Parked]] = []
        self._by_deadline: list[tuple[float, int, Parked]] = []
        self._number = 0

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, ticket: Hashable, look: Look, span: Span) -> None:
        """Park ``ticket`` until its deadline at the latest; ``span`` is the answer then."""
        assert look.deadline_s is not None  # otherwise it does not wait
        self._number += 1
        parked = Parked(ticket, look, self._number, span)
        self._parked[ticket] = parked
        heappush(self._by_since, (look.since, parked.number, parked))
        heappush(self._by_deadline, (look.deadline_s, parked.number, parked))
        self._tidy()

    def leave(self, ticket: Hashable) -> bool:
        """Remove ``ticket``. Returns True if it was parked."""
        left = self._parked.pop(ticket, None) is not None
        self._tidy()
        return left

    def take_reached(self, until: bytes) -> list[Parked]:
        """Remove and return the polls that start before the bound ``until``."""
        out = []
        while self._by_since and self._by_since[0][0] < until:
            parked = heappop(self._by_since)[2]
            if self._take(parked):
                out.append(parked)
        return out

    def take_overdue(self, now_s: float) -> list[Parked]:
        """Remove and return the polls whose deadline has passed."""
        out = []
        while self._by_deadline and self._by_deadline[0][0] <= now_s:
            parked = heappop(self._by_deadline)[2]
            if self._take(parked):
                out.append(parked)
        return out

    def take_all(self) -> list[Parked]:
        """Remove and return all polls."""
        out = list(self._parked.values())
        self._parked.clear()
        self._by_since.clear()
        self._by_deadline.clear()
        return out

    def next_deadline_s(self) -> float | None:
        """Return the earliest deadline; None if no poll is parked."""
        heap = self._by_deadline
        while heap and self._parked.get(heap[0][2].ticket) is not heap[0][2]:
            heappop(heap)
        return heap[0][0] if heap else None

    def _take(self, parked: Parked) -> bool:
        if self._parked.get(parked.ticket) is not parked:
            return False
        del self._parked[parked.ticket]
        return True

    def _tidy(self) -> None:
        """Drop stale heap entries once they outnumber the others."""
        if max(len(self._by_since), len(self._by_deadline)) <= 64 + 2 * len(self._parked):
            return
        self._by_since = [entry for entry in self._by_since if self._parked.get(entry[2].ticket) is entry[2]]
        self._by_deadline = [entry for entry in self._by_deadline if self._parked.get(entry[2].ticket) is entry[2]]
        heapify(self._by_since)
        heapify(self._by_deadline)


@dataclass(slots=True)
class Parked:
    """One waiting poll."""

    ticket: Hashable
    look: Look
    number: int
    span: Span
    """An empty one."""

"""The topic's write pointers against plain lists: stores, publishes, rollbacks, decisions, power cuts, recreated
topics.

The model is the view of an uncommitted reader, in order, with the sign of each row, and the stored, unpublished
messages of each pointer. All other state of the core (runs, counts, forgotten pointers) must follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model_store import NAME, ModelStore, loaded_state

from plainsong.protocol import errors
from plainsong.protocol.effects import Put, Table
from plainsong.protocol.ids import pack_position, unpack_position
from plainsong.protocol.keys import generation_prefix, parse_pointer_key, payload_prefix, pointer_key
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest, PublishResponse
from plainsong.protocol.rows import Stored, decode_row
from plainsong.protocol.topic.asks import (
    Cleaned,
    Create,
    PlanCleaning,
    Publish,
    PublishUnder,
    Remove,
    RollBackPointer,
    StoreUnder,
    TopicChange,
    Undelete,
)
from plainsong.protocol.topic.core import TopicCore
from plainsong.protocol.topic.pending import Pending
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.transactions.transaction import NoAuthority

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
LIFETIME_MS = 25 * HOUR_MS
LIMITS = TopicLimits(checkpoint_rows=5, max_pending=4, max_segments=2, max_lifetime_ms=LIFETIME_MS)
FOR_EVER = TopicProperties(ttl_s=10**9)
REFUSALS = (errors.RolledBack, errors.GenerationChanged, errors.TransactionNotInProgress, errors.TransactionExpired)
#: Index into the last pointers, newest first.
PICKS = st.sampled_from([0, 0, 0, 0, 1, 1, 2, 3])
SEGMENTS = st.sampled_from([None, None, "a", "b", "c"])


@dataclass
class Message:
    """A published message, as an uncommitted reader gets it."""

    position: bytes
    payload: bytes
    pointer: int = 0


@dataclass
class Kept:
    """A stored message: the position of its payload row, and its segment."""

    position: bytes
    payload: bytes
    segment: str | None
    known: bool = True
    """False if a power cut left the row, but nothing that records it."""


@dataclass
class Pointer:
    """The state of a write pointer in one generation, except its messages."""

    kept: list[Kept] = field(default_factory=list)
    response: PublishResponse | None = None
    listed: set[str] | None = None
    """The segments listed by the publish of stored messages; None if it listed none, or was found after a power cut."""
    rolled_back: bool = False
    orphaned: bool = False


class Authority(NoAuthority, dict):
    """Standings by pointer."""

    def standing(self, pointer):
        return self.get(pointer, "unknown")


def following(position):
    """Return the next position of a request, if its millisecond has one."""
    ts_ms, sequence_id = unpack_position(position)
    return pack_position(ts_ms, sequence_id + 1)


def is_payloads(operation):
    return isinstance(operation, Put) and operation.table is Table.PAYLOAD


class PointerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.store, self.authority = ModelStore(), Authority()
        self.wall_ms = START_MS
        self.generation, self.alive = 0, False
        self.messages, self.pointers, self.begun, self.ranges, self.decided = [], {}, [], [], []
        self.core = TopicCore(loaded_state(self.store, limits=LIMITS, authority=self.authority))
        self.numbers, self.exact, self.final = 0, True, set()
        self.create()
        self.begin()

    # --- requests: one per step, whole or cut off ---

    def ask(self, ask, *refusals):
        """Write the step; return the answer, or one of ``refusals`` if it was raised."""
        self.numbers += 1
        now = Now(self.wall_ms, 0.0, decided=tuple(self.decided))
        self.decided.clear()
        self.step = self.core.step([(self.numbers, ask)], now)
        self.store.write(self.step.operations)
        answer = dict(self.core.settled(self.step, now))[self.numbers]
        assert isinstance(answer, Exception) == bool(refusals), (ask, answer, refusals)
        assert not refusals or isinstance(answer, refusals), (ask, answer)
        return answer

    @rule(rows=st.integers(0, 9), what=st.sampled_from("pksrRxc"), pointer=PICKS, segment=SEGMENTS)
    def the_power_is_cut(self, rows, what, pointer, segment):
        """There is no answer: the request may be partly written, and everything before it survives."""
        number, model = self.pick(pointer)
        request = PublishRequest([b"%dx" % self.numbers, b"%dy" % self.numbers], write_pointer=number)
        requests = {
            "p": PublishUnder(request, 0),
            "k": StoreUnder(replace(request, segment=segment), 0),
            "s": Publish(replace(request, write_pointer=None), 0),
            "r": RollBackPointer(number, by_client=self.standing(number) != "committed"),
            "R": RollBackPointer(number, (bytes(10), b"\xff" * 10)),
            "x": Remove(),
            "c": Create(FOR_EVER),
        }
        arrivals = [(0, requests[what]), (1, PublishUnder(request, 0))]
        step = self.core.step(reversed(arrivals) if rows % 2 else arrivals, Now(self.wall_ms, 0.0))
        again = {at for each in step.operations if is_payloads(each) for at in each.suffixes}
        model.kept = [each for each in model.kept if each.position not in again]
        self.store.power_cut()
        self.store.write(step.operations, rows)
        self.core = TopicCore(loaded_state(self.store, limits=LIMITS, authority=self.authority))
        self.look_again()

    def look_again(self):
        """Update the model from the store, and check that nothing acknowledged was lost."""
        state, before, self.exact = self.core.state, self.messages, False
        same = state.metadata.generation == self.generation
        self.generation, self.alive = state.metadata.generation, state.metadata.deleted_ms is None
        self.messages = self.shown()
        if not same:
            self.pointers, self.ranges, before = {}, [], []
        for old, new in zip(before, self.messages[: len(before)], strict=True):
            assert (old.position, old.payload, abs(old.pointer)) == (new.position, new.payload, abs(new.pointer))
            assert old.pointer == new.pointer or new.pointer < 0
        for number in self.begun:
            self.look_at(number, self.pointers.setdefault(number, Pointer()), state.pending.get(number))

    def look_at(self, number, model, pending):
        state = self.core.state
        if pending is None:
            assert not [each for each in model.kept if each.known]
            return
        assert pending.rolled_back >= model.rolled_back
        assert pending.orphaned >= model.orphaned
        model.rolled_back, model.orphaned = pending.rolled_back, pending.orphaned
        if model.response is None and pending.published is not None:
            first, last = map(unpack_position, pending.published)
            model.response = PublishResponse(number, *first, *last)
            self.ranges.append((number, model.response))
        kept, model.kept = model.kept, []
        if pending.published is not None:
            return
        names = {segment.index: name for name, segment in pending.segments.items()}
        start = payload_prefix(NAME, self.generation, number)
        unknown = {each.position for each in kept if not each.known}
        for key, value in self.store.scan(Table.PAYLOAD, start, start + b"\xff" * 11):
            row, position = decode_row(value), key[len(start) :]
            if key in state.torn_payloads:
                continue  # the next step removes it
            given = pending.first_stored is not None and pending.first_stored <= position <= pending.last_stored
            known = given and position not in unknown
            model.kept.append(Kept(position, row.payload, names.get(row.extras.get("s")), known))
        there = {each.position for each in model.kept if each.known}
        assert model.orphaned or {each.position for each in kept if each.known} <= there

    # --- events ---

    @rule(pointer=PICKS, count=st.integers(0, 3), listed=st.none() | st.lists(SEGMENTS, max_size=2))
    def publish(self, pointer, count, listed=None):
        number, model = self.pick(pointer)
        payloads = [b"%d.%d" % (self.numbers, index) for index in range(count)]
        segments = None if listed is None else [name for name in listed if name]
        kept = [each for each in model.kept if each.known]
        ask = PublishUnder(PublishRequest(payloads, write_pointer=number, segments=segments), 0)
        refusals = self.refusals(number, model)
        if not refusals and segments and model.listed not in (None, set(segments)):
            refusals = (errors.AlreadyPublished,)
        if refusals == (errors.Overloaded,) and not payloads:
            refusals = ()  # nothing is written
        answer = self.ask(ask, *refusals)
        if isinstance(answer, Exception):
            return
        assert answer.write_pointer == number
        if not kept and not payloads:
            if model.response is not None:
                assert answer == model.response
            assert not self.step.operations
            return
        position = pack_position(answer.start_timestamp_ms, answer.start_sequence_id)
        if kept:
            model.response = answer
            model.listed = None if segments is None else set(segments)
            between = [each for each in model.kept if kept[0].position <= each.position <= kept[-1].position]
            winners = [each for each in between if segments is None or each.segment in segments]
            self.messages += [Message(position, each.payload, number) for each in winners]
            model.kept = []
            position = following(position)
        for payload in payloads:
            self.messages.append(Message(position, payload, number))
            position = following(position)
        self.ranges.append((number, answer))

    @rule(pointer=PICKS, count=st.integers(1, 2), segment=SEGMENTS)
    def keep(self, pointer, count, segment=None):
        number, model = self.pick(pointer)
        payloads = [b"s%d.%d" % (self.numbers, index) for index in range(count)]
        refusals = self.refusals(number, model)
        if not refusals and model.response is not None:
            refusals = (errors.AlreadyPublished,)
        names = {each.segment for each in model.kept if each.known} - {None, segment}
        if not refusals and segment and len(names) >= LIMITS.max_segments:
            refusals = (errors.TransactionTooLarge,)
        answer = self.ask(StoreUnder(PublishRequest(payloads, write_pointer=number, segment=segment), 0), *refusals)
        if answer is None:
            (put,) = filter(is_payloads, self.step.operations)
            assert put.prefix == payload_prefix(NAME, self.generation, number)
            assert all(each.position < put.suffixes[0] for each in model.kept if each.known)
            model.kept = [each for each in model.kept if each.position not in put.suffixes]
            model.kept += [Kept(at, payload, segment) for at, payload in zip(put.suffixes, payloads, strict=True)]

    @rule(
        pointer=PICKS, segments=st.lists(SEGMENTS, min_size=1, max_size=3), count=st.integers(0, 2), again=st.booleans()
    )
    def store_and_publish(self, pointer, segments, count, again):
        for segment in segments:
            self.keep(pointer, 1, segment)
            self.publish_plainly(1)
        self.publish(pointer, count)
        if again:
            self.publish(pointer, 0)

    @rule(count=st.integers(1, 3))
    def publish_plainly(self, count):
        payloads = [b"p%d.%d" % (self.numbers, index) for index in range(count)]
        answer = self.ask(Publish(PublishRequest(payloads), 0), *self.absent())
        if not isinstance(answer, Exception):
            position = answer.first_id[:10]
            for payload in payloads:
                self.messages.append(Message(position, payload))
                position = following(position)

    @rule(pointer=PICKS, by_client=st.booleans())
    def roll_back(self, pointer, by_client=True):
        number, model = self.pick(pointer)
        committed = (errors.TransactionNotInProgress,) if self.standing(number) == "committed" else ()
        if committed and not by_client:
            return
        known = number in self.core.state.pending
        marks = known or (by_client and self.standing(number) != "aborted")
        full = (errors.Overloaded,) if marks and self.full(number) else ()
        refusals = (by_client and self.absent()) or committed or full
        answer = self.ask(RollBackPointer(number, by_client=by_client), *refusals)
        if answer is None:
            model.rolled_back |= marks
            if known:  # otherwise it was decided, or is older than any lifetime
                self.turn(number, bytes(10), b"\xff" * 10)

    @precondition(lambda self: self.ranges)
    @rule(which=st.integers(0, 20), other=st.none() | st.integers(0, 20), pointer=st.none() | PICKS)
    def roll_back_a_range(self, which, other=None, pointer=None):
        number, response = self.ranges[which % len(self.ranges)]
        end = response if other is None else self.ranges[other % len(self.ranges)][1]
        number = number if pointer is None else self.pick(pointer)[0]
        first = pack_position(response.start_timestamp_ms, response.start_sequence_id)
        last = pack_position(end.end_timestamp_ms, end.end_sequence_id)
        committed = (errors.TransactionNotInProgress,) if self.standing(number) == "committed" else ()
        if self.ask(RollBackPointer(number, (first, last)), *(self.absent() or committed)) is None:
            self.exact = False
            self.turn(number, first, last)

    def turn(self, number, first, last):
        for message in self.messages:
            if message.pointer == number and first <= message.position <= last:
                message.pointer = -number

    @rule()
    def begin(self):
        if len(self.begun) > 3 and self.standing(self.begun[-2]) == "in_progress" and not self.is_old(self.begun[-2]):
            return
        self.wall_ms += 1
        number = self.wall_ms * 1_000_000
        self.begun.append(number)
        self.authority[number] = "in_progress"

    @rule(pointer=PICKS, how=st.sampled_from(["committed", "aborted", "invalid", "unknown"]))
    def decide(self, pointer, how):
        number, _ = self.pick(pointer)
        if number in self.final:
            self.authority.pop(number, None) if how == "unknown" and self.is_old(number) else None
            return
        if how == "unknown" and not (self.standing(number) == "invalid" and self.is_old(number)):
            return
        if how == "aborted":
            self.roll_back(pointer, by_client=False)
        self.authority[number] = how
        if how in ("committed", "aborted"):
            self.final.add(number)
            self.decided.append(number)

    @rule(by_ms=st.sampled_from([0, 1, 1, 1, 1, 1, 1, HOUR_MS, -HOUR_MS, LIFETIME_MS]))
    def the_clock_moves(self, by_ms):
        self.wall_ms += by_ms

    @rule()
    def create(self):
        if self.alive:
            self.ask(Create(FOR_EVER), errors.TopicExists)
        else:
            pending = self.core.state.pending.values()
            carried = [each.pointer for each in pending if not each.decided and each.pointer not in self.decided]
            self.ask(Create(FOR_EVER))
            self.generation, self.alive = self.generation + 1, True
            self.messages, self.ranges = [], []
            self.pointers = {number: Pointer(rolled_back=True) for number in carried}

    @rule(really=st.sampled_from([False, False, False, True]))
    def delete(self, really):
        if really and isinstance(self.ask(Remove(), *self.absent()), TopicChange):
            self.alive = False

    @precondition(lambda self: not self.alive)
    @rule()
    def bring_back(self):
        self.ask(Undelete())
        self.alive = True

    @rule(share=st.sampled_from([0.0, 0.5, 1.0]))
    def the_janitor_comes_round(self, share):
        if not self.alive:
            return
        plan = self.ask(PlanCleaning(0))
        gone = []
        for number, start, stop in plan.orphans:
            model = self.pointers[number]
            assert model.kept
            assert model.rolled_back or model.orphaned or self.is_old(number) or self.standing(number) != "in_progress"
            model.orphaned = True
            keys = [key for key, _ in self.store.scan(Table.PAYLOAD, start, stop)]
            taken = keys[: round(share * len(keys))]
            self.store.discard(Table.PAYLOAD, taken)
            if len(taken) == len(keys):
                gone.append(number)
                model.kept = []
        if gone:
            self.ask(Cleaned(self.core.state.prefix, (), tuple(gone)))

    @rule()
    def the_topic_is_let_go_and_opened_again(self):
        step, _ = self.core.close(self.decided)
        self.decided.clear()
        self.store.write(step.operations)
        known = self.core.state.pending
        self.core = TopicCore(loaded_state(self.store, limits=LIMITS, authority=self.authority))
        assert {number: replace(each, packed=[]) for number, each in known.items()} == self.core.state.pending

    # --- invariants ---

    def pick(self, index):
        number = self.begun[-1 - index % len(self.begun)]
        return number, self.pointers.setdefault(number, Pointer())

    def standing(self, number):
        return self.authority.standing(number)

    def is_old(self, number):
        return number // 1_000_000 + LIFETIME_MS <= max(self.core.state.time_ms, self.wall_ms)

    def full(self, number):
        pending = self.core.state.pending
        kept = [each for each in pending.values() if each.pointer not in self.decided or each.stored]
        return number not in pending and len(kept) >= LIMITS.max_pending

    def absent(self):
        return () if self.alive else (errors.TopicNotFound,)

    def refusals(self, number, model):
        """Return the errors of a write under a pointer; empty if it is allowed."""
        if not self.alive:
            return (errors.TopicNotFound,)
        if model.rolled_back or model.orphaned or self.is_old(number):
            return REFUSALS
        if self.standing(number) in ("committed", "aborted", "invalid"):
            return (errors.TransactionNotInProgress,)
        return (errors.Overloaded,) if self.full(number) else ()

    def shown(self):
        """Return the messages that an uncommitted reader gets, from the rows."""
        out = []
        prefix = generation_prefix(NAME, self.generation)
        for key, value in self.store.scan(Table.MESSAGE, prefix, prefix + b"\xff" * 11):
            row, position = decode_row(value), key[len(prefix) :]
            if row.payload is not None:
                out.append(Message(position, row.payload, row.pointer or 0))
                continue
            stored = Stored.of(row)
            start = payload_prefix(NAME, self.generation, abs(row.pointer))
            for _, kept in self.store.scan(Table.PAYLOAD, start + stored.first, start + stored.last + b"\x00"):
                payload = decode_row(kept)
                if stored.segments is None or payload.extras.get("s") in stored.segments:
                    out.append(Message(position, payload.payload, row.pointer))
        return out

    @invariant()
    def readers_see_what_was_published_and_rolled_back(self):
        assert self.shown() == self.messages

    @invariant()
    def every_row_that_may_have_to_be_rolled_back_can_be_found(self):
        for message in self.messages:
            if self.standing(message.pointer) in ("in_progress", "invalid"):
                runs = self.core.state.pending[message.pointer].runs
                assert any(run.first <= message.position <= run.last for run in runs)

    @invariant()
    def what_is_stored_is_counted(self):
        state = self.core.state
        for number, model in self.pointers.items():
            kept = [each for each in model.kept if each.known]
            pending = state.pending.get(number, Pending(number, 0, 0))
            if pending.orphaned:
                continue  # some rows may be gone
            assert pending.stored == len(kept)
            assert pending.stored_bytes == sum(len(each.payload) for each in kept)
        assert state.stored_bytes == sum(pending.stored_bytes for pending in state.pending.values())

    @invariant()
    def what_a_pointer_hides_is_counted(self):
        for pending in self.core.state.pending.values():
            if pending.runs:
                behind = sum(message.position >= pending.runs[0].first for message in self.messages)
                hidden = pending.hidden(self.core.state.appended)
                assert hidden == behind if self.exact else hidden >= 0

    @invariant()
    def pointer_rows_are_those_of_undecided_pointers(self):
        state = self.core.state
        assert len(state.pending) <= LIMITS.max_pending
        first, last = (pointer_key(NAME, self.generation, number) for number in (0, 2**63 - 1))
        rows = {parse_pointer_key(key)[2] for key, _ in self.store.scan(Table.METADATA, first, last)}
        assert set(state.pending) - state.changed <= rows <= set(state.pending) | state.forgotten


TestPointerMachine = PointerMachine.TestCase
if settings.get_current_profile_name() != "torture":
    TestPointerMachine.settings = settings(max_examples=50, stateful_step_count=50, derandomize=True, database=None)

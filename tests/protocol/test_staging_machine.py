"""Staging compared with lists: stores, publishes, repeats, power cuts, clocks set back, expiry, cleaning, recreation.

The model contains the messages that every reader sees, in order, and each producer's staged messages by segment. After
a power cut, an unanswered request is looked up once, and must be there completely or not at all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from model_store import NAME, ModelStore, loaded_state
from reading_in_memory import messages_of

from plainsong.protocol import errors
from plainsong.protocol.effects import Table
from plainsong.protocol.ids import bound_at
from plainsong.protocol.keys import generation_prefix, parse_payload_key, pointer_key
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import (
    Cleaned,
    Create,
    ListPointers,
    Look,
    OpenProducer,
    PlanCleaning,
    Publish,
    PublishStaged,
    Remove,
    StoreStaged,
    TopicChange,
    Undelete,
)
from plainsong.protocol.topic.core import TopicCore, span_of
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.transactions.view import View
from storage.cleaning import is_reference, payloads_of

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
LIFETIME_MS = 25 * HOUR_MS
TTL_S = 7 * 24 * 3600
LIMITS = TopicLimits(
    checkpoint_rows=5,
    max_pending=3,
    max_segments=2,
    max_lifetime_ms=LIFETIME_MS,
    snapshot_entries=4,
    producer_retention_ms=10**15,
)
PRODUCERS = st.sampled_from(["p", "p", "p", "q", "r"])
SEGMENTS = st.sampled_from(["a", "b", "c"])
LISTED = st.lists(SEGMENTS, min_size=1, max_size=3)


@dataclass
class Staged:
    """A producer's staged messages, in stored order."""

    messages: list[tuple[str, bytes]] = field(default_factory=list)
    highest: dict[str, int] = field(default_factory=dict)
    """The highest sequence id of each segment."""
    used_ms: int = 0
    pointer: int = 0

    def winners(self, segments):
        return [payload for segment, payload in self.messages if segment in segments]


@dataclass
class Producer:
    """A producer's publishes, and its session."""

    last: int = -1
    epoch: int = 0
    receipts: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)


class StagingMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.store, self.wall_ms, self.numbers = ModelStore(), START_MS, 0
        self.generation, self.alive = 0, False
        self.visible, self.staged, self.producers, self.pointers = [], {}, {}, set()
        self.sent = []
        self.load()
        self.create()

    def load(self):
        self.core = TopicCore(loaded_state(self.store, limits=LIMITS))

    # --- requests -------------------------------------------------------------------------------

    def ask(self, ask, *refusals):
        """Return the answer, or one of ``refusals`` if that is raised."""
        self.numbers += 1
        now = Now(self.wall_ms, 0.0)
        step = self.core.step([(self.numbers, ask)], now)
        assert all(pointer > 0 for pointer in (*step.pointers, *step.dropped))
        self.store.write(step.operations)
        answer = dict(self.core.settled(step, now))[self.numbers]
        assert isinstance(answer, Exception) == bool(refusals), (ask, answer, refusals)
        assert not refusals or isinstance(answer, refusals), (ask, answer)
        return answer

    def cut_off(self, ask, rows):
        """Write only the first ``rows`` rows of the step; there is no answer."""
        step = self.core.step([(0, ask)], Now(self.wall_ms, 0.0))
        self.store.power_cut()
        self.store.write(step.operations, rows)
        self.load()

    def absent(self):
        return () if self.alive else (errors.TopicNotFound,)

    @property
    def time_ms(self):
        return max(self.core.state.time_ms, self.wall_ms)

    # --- events ---------------------------------------------------------------------------------

    @rule(producer=PRODUCERS, segment=SEGMENTS, count=st.integers(1, 2), cut=st.none() | st.integers(0, 5))
    def stage(self, producer, segment, count, cut=None):
        staged = self.staged.get(producer, Staged())
        first = staged.highest.get(segment, -1) + 1
        payloads = [b"%s%s%d.%d" % (producer.encode(), segment.encode(), self.numbers, at) for at in range(count)]
        self.send(producer, segment, range(first, first + count), payloads, cut)

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 5), cut=st.none() | st.integers(0, 5))
    def stage_again(self, which, cut=None):
        producer, segment, ids, payloads = self.sent[which % len(self.sent)]
        self.send(producer, segment, ids, payloads, cut)

    def send(self, producer, segment, ids, payloads, cut):
        request = PublishRequest(payloads, producer=producer, segment=segment, sequence_ids=ids)
        self.sent = [*self.sent[-3:], (producer, segment, ids, payloads)]
        staged = self.staged.get(producer)
        highest = -1 if staged is None else staged.highest.get(segment, -1)
        if cut is not None:
            self.cut_off(StoreStaged(request, 0), cut)
            self.look_again()
            pending = self.pending_of(producer)
            if pending is None or pending.stored_by.get((producer, segment), (0, -1))[1] <= highest:
                return
        else:
            new = [at for at in ids if at > highest]
            refusals = self.refusals(staged, segment, new, ids[0])
            self.ask(StoreStaged(request, 0), *refusals)
            if refusals or not new:
                return
        if staged is None:
            staged = self.staged[producer] = Staged(pointer=self.pending_of(producer).pointer)
            assert staged.pointer not in self.pointers, "given twice"
            self.pointers.add(staged.pointer)
        staged.messages += [(segment, payload) for at, payload in zip(ids, payloads, strict=True) if at > highest]
        staged.highest[segment], staged.used_ms = ids[-1], self.core.state.time_ms

    def refusals(self, staged, segment, new, first):
        if not self.alive or not new:
            return self.absent()
        is_new = staged is None or segment not in staged.highest
        if staged is not None and is_new and len(staged.highest) >= LIMITS.max_segments:
            return (errors.TransactionTooLarge,)
        if first and is_new:
            return (errors.AlreadyPublished,)
        full = staged is None and len(self.core.state.pending) >= LIMITS.max_pending
        return (errors.Overloaded,) if full else ()

    @rule(producer=PRODUCERS, segments=LISTED, back=st.sampled_from([0, 0, 0, 1, 2]), stale=st.booleans())
    def publish(self, producer, segments, back=0, stale=False):
        known, staged = self.producers.setdefault(producer, Producer()), self.staged.get(producer)
        request = self.listing(producer, segments, known, back)
        if stale and known.epoch > 1:
            request.producer_epoch = known.epoch - 1
            self.ask(PublishStaged(request, 0), *self.absent() or (errors.ProducerFenced,))
            return
        number, duplicate = request.sequence_ids[0], request.sequence_ids[0] <= known.last
        missing = not duplicate and (staged is None or not set(segments) <= set(staged.highest))
        receipt = self.ask(PublishStaged(request, 0), *self.absent() or ((errors.InvalidParameter,) if missing else ()))
        if isinstance(receipt, Exception):
            return
        assert (receipt.duplicate, receipt.last_sequence_id) == (duplicate, max(known.last, number))
        if duplicate:
            assert receipt.first_id is None or (receipt.first_id, receipt.last_id) == known.receipts[number]
            assert receipt.first_id is not None or number <= known.last - 5
        else:
            self.published(producer, number, segments, receipt.first_id, receipt.last_id)

    def listing(self, producer, segments, known, back):
        number = max(0, known.last + 1 - back)
        epoch = known.epoch or None
        return PublishRequest(
            [], producer=producer, sequence_ids=[number], segments=segments, producer_epoch=epoch, atomic=True
        )

    def published(self, producer, number, segments, first_id, last_id):
        winners = self.staged.pop(producer).winners(segments)
        self.visible += [(first_id, last_id, payload) for payload in winners]
        known = self.producers[producer]
        known.last, known.receipts[number] = number, (first_id, last_id)

    @rule(producer=PRODUCERS, segments=LISTED, rows=st.integers(0, 3))
    def the_power_is_cut_in_a_publish(self, producer, segments, rows):
        known = self.producers.setdefault(producer, Producer())
        request = self.listing(producer, segments, known, 0)
        self.cut_off(PublishStaged(request, 0), rows)
        self.look_again()
        now = self.core.state.producers.known.get(producer)
        if now is not None and now.pushed > known.last:
            first, last = now.recent[-1].first, now.recent[-1].last
            assert first == last
            self.published(producer, now.pushed, segments, first + bytes(10), last + b"\xff" * 10)

    def look_again(self):
        """A load keeps everything that was acknowledged; a partly removed pointer is now an orphan."""
        state = self.core.state
        for producer in list(self.staged):
            if producer not in state.staged and self.pending_with(self.staged[producer].pointer) is not None:
                assert state.pending[self.staged[producer].pointer].orphaned
                del self.staged[producer]

    @rule(count=st.integers(1, 3))
    def publish_plainly(self, count):
        payloads = [b"plain%d.%d" % (self.numbers, index) for index in range(count)]
        receipt = self.ask(Publish(PublishRequest(payloads), 0), *self.absent())
        if not isinstance(receipt, Exception):
            ids = [(int.from_bytes(receipt.first_id[:10], "big") + at).to_bytes(10, "big") for at in range(count)]
            self.visible += [
                (at + bytes(10), at + bytes(10), payload) for at, payload in zip(ids, payloads, strict=True)
            ]

    @rule(producer=PRODUCERS)
    def open(self, producer):
        view = self.ask(OpenProducer(producer), *self.absent())
        if not isinstance(view, Exception):
            known = self.producers.setdefault(producer, Producer())
            assert view.epoch > known.epoch
            assert view.last_sequence_id == known.last
            known.epoch = view.epoch

    @rule(by_ms=st.sampled_from([0, 1, 1, 1, 5, HOUR_MS, -HOUR_MS, LIFETIME_MS, TTL_S * 1000]))
    def the_clock_moves(self, by_ms):
        self.wall_ms += by_ms

    @rule(closed=st.booleans())
    def the_topic_is_loaded_again(self, closed):
        if closed:
            self.store.write(self.core.close()[0].operations)
        self.load()
        self.look_again()

    @rule()
    def create(self):
        if self.alive:
            self.ask(Create(TopicProperties(TTL_S)), errors.TopicExists)
            return
        self.ask(Create(TopicProperties(TTL_S)))
        self.generation, self.alive = self.generation + 1, True
        self.visible, self.staged, self.pointers, self.sent = [], {}, set(), []
        self.producers = {}

    @rule(really=st.sampled_from([False, False, False, True]))
    def delete(self, really):
        if really and isinstance(self.ask(Remove(), *self.absent()), TopicChange):
            self.alive = False

    @precondition(lambda self: not self.alive)
    @rule()
    def bring_back(self):
        self.ask(Undelete())
        self.alive = True

    @rule(share=st.sampled_from([0.5, 1.0, 1.0]))
    def the_janitor_comes_round(self, share):
        if not self.alive:
            return
        plan = self.ask(PlanCleaning(10**15))
        gone = []
        for pointer, start, stop in plan.orphans:
            for producer in [name for name, staged in self.staged.items() if staged.pointer == pointer]:
                assert self.staged.pop(producer).used_ms + LIFETIME_MS <= self.core.state.time_ms
            keys = [key for key, _ in self.store.scan(Table.PAYLOAD, start, stop)]
            self.store.discard(Table.PAYLOAD, keys[: round(share * len(keys))])
            gone += [pointer] if share == 1.0 else []
        assert all(each.used_ms + LIFETIME_MS > self.core.state.time_ms for each in self.staged.values())
        for row in self.store.scan(Table.MESSAGE, *plan.expired):
            if is_reference(row):
                self.store.discard(Table.PAYLOAD, [key for key, _ in self.store.scan(Table.PAYLOAD, *payloads_of(row))])
            self.store.discard(Table.MESSAGE, [row[0]])
        if plan.purge:
            last = generation_prefix(NAME, plan.purge[1]) + b"\xff" * 20
            for table in (Table.MESSAGE, Table.PAYLOAD):
                keys = [key for key, _ in self.store.scan(table, generation_prefix(NAME, 1), last)]
                self.store.discard(table, keys)
        self.ask(Cleaned(plan.prefix, (), tuple(gone)))
        if share == 1.0:
            self.no_payload_row_is_left_behind()

    def no_payload_row_is_left_behind(self):
        rows = self.store.scan(Table.MESSAGE, b"", b"\xff")
        ranges = [payloads_of(row) for row in rows if is_reference(row)]
        for key, _ in self.store.scan(Table.PAYLOAD, b"", b"\xff"):
            known = parse_payload_key(key).write_pointer in self.core.state.pending
            assert known or any(start <= key < stop for start, stop in ranges)

    # --- invariants -----------------------------------------------------------------------------

    def pending_of(self, producer):
        pointer = self.core.state.staged.get(producer)
        return None if pointer is None else self.core.state.pending[pointer]

    def pending_with(self, pointer):
        return self.core.state.pending.get(pointer)

    @invariant()
    def every_reader_sees_what_was_published_and_nothing_else(self):
        if not self.alive:
            return
        oldest_ms = self.core.state.oldest_ms
        living = [each for each in self.visible if each[0] >= bound_at(oldest_ms)]
        for limit, view in ((1000, None), (1, None), (2, View(0, frozenset(), frozenset()))):
            seen = messages_of(self.store, span_of(self.core.state, Look(bytes(20))), limit, view)
            assert [payload for _, payload in seen] == [payload for _, _, payload in living]
            for (message_id, _), (first, last, _) in zip(seen, living, strict=True):
                assert first <= message_id <= last
            assert all(one[0] < other[0] for one, other in itertools.pairwise(seen))

    @invariant()
    def what_is_staged_is_known_and_counted(self):
        state = self.core.state
        assert set(state.staged) == set(self.staged)
        for producer, staged in self.staged.items():
            pending = self.pending_of(producer)
            assert (pending.pointer, pending.staged_by) == (staged.pointer, producer)
            assert pending.stored == len(staged.messages)
            assert pending.stored_bytes == sum(len(payload) for _, payload in staged.messages)
            assert {name: each.messages for name, each in pending.segments.items()} == {
                name: sum(segment == name for segment, _ in staged.messages) for name in staged.highest
            }
        assert state.stored_bytes == sum(each.stored_bytes for each in state.pending.values())

    @invariant()
    def rows_about_staged_pointers_are_those_of_the_state(self):
        state = self.core.state
        first, last = pointer_key(NAME, self.generation, -(2**63)), pointer_key(NAME, self.generation, -1) + b"\x00"
        rows = {key for key, _ in self.store.scan(Table.METADATA, first, last)}
        wanted = {pointer_key(NAME, self.generation, pointer) for pointer in state.pending}
        assert wanted <= rows <= wanted | {pointer_key(NAME, self.generation, each) for each in state.forgotten}

    @precondition(lambda self: self.alive)
    @invariant()
    def no_list_of_transactions_shows_it(self):
        assert self.ask(ListPointers()) == []


TestStagingMachine = StagingMachine.TestCase
if settings.get_current_profile_name() != "torture":
    TestStagingMachine.settings = settings(max_examples=50, stateful_step_count=40, derandomize=True, database=None)

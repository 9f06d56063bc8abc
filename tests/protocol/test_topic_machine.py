"""The topic core compared with a plain list: clocks that jump, power cuts at any row, cleaning that stops half-way.

The machine drives the core as its actor does, on a store of dicts. Its model is a list of messages and four facts about
the topic, from which alone it computes what the core may and must show.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_store import NAME, ModelStore, loaded_state, page_of, single_rows

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import (
    GenerationChanged,
    LowSpace,
    NoMessages,
    NotFound,
    Overloaded,
    PartlyCleaned,
    PlainsongError,
    PositionChanged,
    TopicExists,
    TopicNotFound,
)
from plainsong.protocol.ids import after, pack_id, unpack_id
from plainsong.protocol.keys import generations_range, metadata_key
from plainsong.protocol.page import item
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest, Receipt
from plainsong.protocol.rows import own_ttl_s
from plainsong.protocol.topic.asks import (
    Cleaned,
    CleaningPlan,
    Create,
    Describe,
    Description,
    ListReaders,
    Look,
    PlanCleaning,
    Publish,
    ReaderView,
    Remove,
    RemoveReader,
    SetProperties,
    SetReader,
    SliceCleaned,
    Stats,
    StatsView,
    TopicChange,
    Undelete,
)
from plainsong.protocol.topic.core import TopicCore, span_of
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.topic.usage import ROW_BYTES

HOUR_MS = 3600 * 1000
GRACE_MS = 2 * HOUR_MS
LIMITS = TopicLimits(checkpoint_rows=4, max_parked_polls=4, max_readers=2)

ttls_s = st.sampled_from([1, 2, 3600, 24 * 3600])
requests = st.builds(
    lambda messages, ttl_s, own: PublishRequest(
        messages, ttl_s=ttl_s, message_ttls_s=None if own is None else (own * 5)[: len(messages)]
    ),
    st.sampled_from([1, 1, 1, 2, 3, 4, 0]).flatmap(
        lambda count: st.lists(st.binary(max_size=3), min_size=count, max_size=count)
    ),
    st.sampled_from([None, None, 1, 2, 3600]),
    st.none() | st.none() | st.lists(st.none() | ttls_s, min_size=1, max_size=3).map(lambda own: own * 4),
)
#: The machine's functions that make asks.
publishing = requests.map(lambda request: lambda machine: Publish(request, 1))
changing = st.one_of(
    ttls_s.map(lambda ttl_s: lambda machine: Create(TopicProperties(ttl_s=ttl_s))),
    ttls_s.map(lambda ttl_s: lambda machine: SetProperties({"ttl": ttl_s})),
    ttls_s.map(lambda ttl_s: lambda machine: SetProperties({"ttl": ttl_s})),
    st.sampled_from([lambda machine: Remove(), lambda machine: Undelete()]),
)
looking = st.builds(
    lambda consumer, wait_s, end: lambda machine: machine.look(consumer, wait_s, end),
    st.integers(0, 2),
    st.none() | st.sampled_from([0.0, 1.0, 5000.0]),
    st.none() | st.integers(0, 5),
)
reading = st.one_of(
    st.builds(
        lambda name, at, compare: lambda machine: SetReader(name, pack_id(at, 0), None, pack_id(1, 0), compare),
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.booleans(),
    ),
    st.sampled_from("abc").map(lambda name: lambda machine: RemoveReader(name)),
)
others = st.sampled_from([lambda machine: Describe(), lambda machine: Stats(), lambda machine: ListReaders()])
kinds = {"p": publishing, "c": changing, "l": looking, "r": reading, "o": others}
groups = st.lists(st.sampled_from("ppppppcllro").flatmap(kinds.get), min_size=1, max_size=6)


@dataclass
class Message:
    """A message that is, or was, in the topic."""

    id: bytes
    payload: bytes
    generation: int
    own_expiry_ms: int | None
    dead: bool = False
    """True if it expired under earlier properties of the topic; it then stays expired."""
    removed: bool = False
    """True if its row was cleaned up."""

    @property
    def ts_ms(self):
        return unpack_id(self.id).publish_ts_ms

    def lives(self, time_ms, ttl_s):
        own = self.own_expiry_ms is None or time_ms <= self.own_expiry_ms
        return not self.dead and self.ts_ms >= time_ms - ttl_s * 1000 and own


@dataclass(frozen=True)
class Facts:
    """All facts about a topic except its messages."""

    generation: int = 0
    alive: bool = False
    partly_cleaned: bool = False
    ttl_s: int = 0


@dataclass
class Change:
    """An ask's effect on the model once it is durable: messages, or new facts."""

    messages: list[Message] = field(default_factory=list)
    facts: Facts | None = None


def is_metadata(row):
    return isinstance(row, Put) and (row.table, row.prefix) == (Table.METADATA, metadata_key(NAME))


class TopicMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.store = ModelStore()
        self.wall_ms = 1_700_000_000_000
        self.mono_s = 100.0
        self.facts = Facts()
        self.messages = []
        self.readers = {}
        self.positions = [bytes(20)] * 3
        self.last_id = bytes(20)
        self.delivered = bytes(20)
        self.parked = {}
        self.numbers = 0
        self.plan = None
        self.miscounted = False
        self.core = TopicCore(loaded_state(self.store, limits=LIMITS))

    # --- environment ---

    @initialize(ttl_s=st.sampled_from([None, 1, 2, 3600, 24 * 3600]))
    def there_may_be_a_topic(self, ttl_s):
        if ttl_s is not None:
            self.a_commit_succeeds([lambda machine: Create(TopicProperties(ttl_s=ttl_s))], low_space=False)

    @rule(by_ms=st.sampled_from([1, 2, 500, 999, 1000, 1001, 2001, HOUR_MS, HOUR_MS + 1, -HOUR_MS, 24 * HOUR_MS]))
    def the_clock_moves(self, by_ms):
        self.wall_ms += by_ms
        self.a_commit_succeeds([], low_space=False)

    @rule(by_s=st.sampled_from([0.5, 1.0, 6000.0]))
    def time_passes(self, by_s):
        self.mono_s += by_s

    @rule(group=groups, low_space=st.sampled_from([False] * 9 + [True]))
    def a_commit_succeeds(self, group, low_space):
        step, changes, expected = self.decide(group, low_space)
        self.store.write(step.operations)
        for change in changes:
            self.happen(change)
        self.check_answers(step, expected)

    @rule(group=groups, rows=st.integers(0, 9))
    def the_power_is_cut_during_a_commit(self, group, rows):
        step, changes, _ = self.decide(group, low_space=False)
        self.store.power_cut()
        applied = {row.prefix for row in self.store.write(step.operations, rows) if isinstance(row, Put)}
        metas = [row for row in list(single_rows(step.operations))[:rows] if is_metadata(row)]
        facts = [change for change in changes if change.facts is not None][: len(metas)]
        for change in changes:
            if change.facts is None:
                change.messages = [each for each in change.messages if self.key(each) in applied]
            elif not any(change is other for other in facts):
                continue
            self.happen(change)
        self.start_again()

    @rule()
    def the_topic_is_let_go_and_opened_again(self):
        step, answers = self.core.close()
        assert {ticket for ticket, _ in answers} == set(self.parked)
        self.store.write(step.operations)
        self.start_again()

    def start_again(self):
        self.parked.clear()
        # Positions that never reached the disk may be assigned again, since no reader saw them.
        self.last_id = max((message.id for message in self.messages), default=bytes(20))
        self.core = TopicCore(loaded_state(self.store, limits=LIMITS))
        self.readers = {name: reader.position for name, reader in self.core.state.readers.items()}
        state = self.core.state
        if self.facts.generation:
            assert state.time_ms >= unpack_id(self.last_id).publish_ts_ms
            assert (state.metadata.generation, state.metadata.deleted_ms is None) == (
                self.facts.generation,
                self.facts.alive,
            )

    # --- cleaning ---

    @rule()
    def the_janitor_plans(self):
        step, changes, _ = self.decide([lambda machine: PlanCleaning(GRACE_MS)], low_space=False)
        self.store.write(step.operations)
        for change in changes:
            self.happen(change)
        self.plan = dict(self.core.settled(step, self.now()))[self.numbers]

    @rule(share=st.sampled_from([0.5, 1.0]), by_ms=st.sampled_from([0, 1001, 2 * GRACE_MS]))
    def the_janitor_comes_round(self, share, by_ms):
        self.the_clock_moves(by_ms)
        self.the_janitor_plans()
        self.the_janitor_removes(share)

    @precondition(lambda self: self.plan is not None)
    @rule(share=st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    def the_janitor_removes(self, share):
        plan, self.plan = self.plan, None
        keys = []
        if plan.purge is not None:
            keys += [key for key, _ in self.store.scan(Table.MESSAGE, *generations_range(NAME, *plan.purge))]
        if plan.expired is not None:
            keys += [key for key, _ in self.store.scan(Table.MESSAGE, *plan.expired)]
        self.remove(keys[: round(share * len(keys))])
        slices = []
        for first_ms, last_ms in plan.due[: round(share * len(plan.due))]:
            slices.append(self.clean_slice(plan, first_ms, last_ms))
        if plan.due and share == 1.0:
            step, _, _ = self.decide([lambda machine: Cleaned(plan.prefix, slices)], low_space=False)
            self.store.write(step.operations)
            self.core.settled(step, self.now())
        elif slices:
            self.miscounted = True

    def clean_slice(self, plan, first_ms, last_ms):
        low, high = plan.prefix + pack_id(first_ms, 0)[:10], plan.prefix + pack_id(last_ms + 1, 0)[:10]
        due, later = [], []
        for key, value in self.store.scan(Table.MESSAGE, low, high):
            ttl_s = own_ttl_s(value)
            if ttl_s is not None:
                expires_ms = int.from_bytes(key[-10:-2], "big") + ttl_s * 1000
                due += [(key, value)] if expires_ms < plan.now_ms else []
                later += [expires_ms] if expires_ms >= plan.now_ms else []
        self.remove([key for key, _ in due])
        size = sum(len(value) + ROW_BYTES for _, value in due)
        return SliceCleaned(first_ms, last_ms, len(due), size, min(later, default=0))

    def remove(self, keys):
        self.store.discard(Table.MESSAGE, keys)
        gone = set(keys)
        for message in self.messages:
            if self.key(message) in gone:
                message.removed = True

    # --- asks, and expected answers ---

    def now(self, *, low_space=False):
        return Now(self.wall_ms, self.mono_s, low_space)

    def look(self, consumer, wait_s, end):
        since = self.positions[consumer]
        end_before = None
        if end is not None:
            ids = [message.id for message in self.messages if message.id > since][end : end + 1]
            end_before = ids[0] if ids else None
        return Look(since, end_before, None if wait_s is None else self.mono_s + wait_s)

    def key(self, message):
        return generations_range(NAME, message.generation, message.generation)[0] + message.id[:10]

    def decide(self, group, low_space):
        """Run one step of both core and model; return the step, its changes, and the expected answers."""
        arrivals = []
        for make in group:
            self.numbers += 1
            arrivals.append((self.numbers, make(self)))
        before_ms = self.core.state.time_ms
        step = self.core.step(arrivals, self.now(low_space=low_space))
        time_ms = self.core.state.time_ms
        assert time_ms >= max(before_ms, self.wall_ms)
        answers = dict(step.answers)
        facts, readers, changes, expected = self.facts, dict(self.readers), [], {}
        for ticket, ask in arrivals:
            if isinstance(ask, Look):
                expected[ticket] = ask
                continue
            facts, change, kind = self.play(ask, facts, readers, answers[ticket], time_ms, low_space)
            assert isinstance(answers[ticket], kind), (ask, answers[ticket])
            expected[ticket] = kind
            if change is not None:
                changes.append(change)
        self.readers = readers
        return step, changes, expected

    def play(self, ask, facts, readers, answer, time_ms, low_space):
        """Apply one ask to the model; return the new facts, the change, and the answer's type."""
        match ask:
            case Publish():
                if not facts.alive:
                    return facts, None, TopicNotFound
                if not ask.request.messages:
                    return facts, None, NoMessages
                if low_space:
                    return facts, None, LowSpace
                return facts, Change(self.published(ask.request, answer, facts.generation)), Receipt
            case Create() if facts.alive:
                return facts, None, TopicExists
            case Create():
                readers.clear()
                return self.changed(Facts(facts.generation + 1, True, False, ask.properties.ttl_s), Description)
            case Undelete() if facts.alive:
                return facts, None, TopicExists
            case Undelete() if facts.generation and facts.partly_cleaned:
                return facts, None, PartlyCleaned
            case Undelete() if facts.generation:
                return self.changed(replace(facts, alive=True), TopicChange)
            case PlanCleaning():
                first_purge = facts.generation and not facts.alive and not facts.partly_cleaned
                if not first_purge or answer.purge is None or answer.purge[1] < facts.generation:
                    return facts, None, CleaningPlan
                assert time_ms >= self.core.state.metadata.deleted_ms + GRACE_MS
                return self.changed(replace(facts, partly_cleaned=True), CleaningPlan)
            case Cleaned():
                return facts, None, type(None)
            case _ if not facts.alive:
                return facts, None, TopicNotFound
            case SetProperties():
                return self.changed(replace(facts, ttl_s=ask.given["ttl"]), TopicChange)
            case Remove():
                return self.changed(replace(facts, alive=False), TopicChange)
            case SetReader():
                return facts, None, self.set_reader(ask, readers)
            case RemoveReader():
                return facts, None, NotFound if readers.pop(ask.name, None) is None else type(None)
            case ListReaders():
                assert {view.name: view.reader.position for view in answer} == readers
                return facts, None, list
            case Stats():
                return facts, None, StatsView
        assert isinstance(ask, Describe)
        assert answer.metadata.properties.ttl_s == facts.ttl_s
        return facts, None, Description

    def changed(self, facts, kind):
        return facts, Change(facts=facts), kind

    def set_reader(self, ask, readers):
        if ask.compare and readers.get(ask.name) != ask.expected:
            return PositionChanged
        if ask.name not in readers and len(readers) >= LIMITS.max_readers:
            return PlainsongError
        readers[ask.name] = ask.position
        return ReaderView

    def published(self, request, receipt, generation):
        """Return the messages of an accepted request, at consecutive positions after all others."""
        assert not isinstance(receipt, GenerationChanged)
        assert receipt.generation == generation
        assert receipt.first_id > self.last_id
        first = int.from_bytes(receipt.first_id[:10], "big")
        out = []
        for index, payload in enumerate(request.messages):
            message_id = (first + index).to_bytes(10, "big") + bytes(10)
            own = [ttl for ttl in (request.ttl_s, (request.message_ttls_s or {index: None})[index]) if ttl is not None]
            expiry_ms = unpack_id(message_id).publish_ts_ms + min(own) * 1000 if own else None
            out.append(Message(message_id, payload, generation, expiry_ms))
        assert receipt.last_id == out[-1].id
        self.last_id = receipt.last_id
        return out

    def happen(self, change):
        """Apply a durable change."""
        if change.facts is not None:
            for message in self.messages:
                if message.generation == self.facts.generation:
                    message.dead |= message.ts_ms < self.core.state.time_ms - self.facts.ttl_s * 1000
            self.facts = change.facts
        assert all(message.id > self.delivered for message in change.messages), "appears behind a reader"
        self.messages += change.messages

    # --- visible messages ---

    def visible(self, since=bytes(20)):
        """Return exactly the messages that a reader must see from ``since`` on."""
        state, facts = self.core.state, self.facts
        out = []
        for message in self.messages:
            if message.generation == facts.generation and message.lives(state.time_ms, facts.ttl_s):
                assert not message.removed, "the janitor took a living message"
                if message.id >= since:
                    out.append(message)
        return out

    def check_answers(self, step, expected):
        answers = dict(self.core.settled(step, self.now()))
        renewed = step.renewed
        looks = {ticket: ask for ticket, ask in expected.items() if isinstance(ask, Look)}
        assert set(expected) - set(looks) <= set(answers)
        assert set(answers) <= set(expected) | set(self.parked)
        for ticket, look in {**self.parked, **looks}.items():
            if ticket in answers:
                self.check_look(look, answers[ticket], woken=ticket in self.parked and not renewed)
                self.parked.pop(ticket, None)
            else:
                self.parked[ticket] = look
                assert self.facts.alive
                assert look.deadline_s is not None
                assert look.deadline_s > self.mono_s
                assert not self.visible(look.since)
        assert len(self.parked) == len(self.core.parking) <= LIMITS.max_parked_polls
        deadlines = [look.deadline_s for look in self.parked.values()]
        assert self.core.next_deadline_s() == min(deadlines, default=None)

    def check_look(self, look, span, *, woken):
        if not self.facts.alive:
            assert isinstance(span, TopicNotFound)
            return
        if isinstance(span, Overloaded):
            assert len(self.parked) >= LIMITS.max_parked_polls
            return
        if woken:
            assert look.since < self.core.state.until or self.mono_s >= look.deadline_s
        page = page_of(self.rows(span), span)
        wanted = [m for m in self.visible(look.since) if look.end_before is None or m.id < look.end_before]
        assert list(page.messages()) == [(message.id, message.payload) for message in wanted]
        if wanted:
            self.delivered = max(self.delivered, wanted[-1].id)

    def rows(self, span):
        return self.store.scan(Table.MESSAGE, span.prefix, span.prefix + b"\xff" * 20)

    @rule(consumer=st.integers(0, 2), limit=st.integers(1, 4), max_bytes=st.sampled_from([1, 50, 1000]))
    def a_consumer_reads_a_page(self, consumer, limit, max_bytes):
        step, _, _ = self.decide([lambda machine: Look(machine.positions[consumer])], low_space=False)
        span = dict(self.core.settled(step, self.now()))[self.numbers]
        self.drop_answered()
        if not self.facts.alive:
            return
        page = page_of(self.rows(span), span, limit, max_bytes)
        wanted = self.visible(self.positions[consumer])
        fitting = wanted[:limit]
        while len(fitting) > 1 and sum(len(item(m.id, m.payload)) for m in fitting) > max_bytes:
            fitting.pop()
        assert list(page.messages()) == [(message.id, message.payload) for message in fitting]
        assert page.end == ("end" if len(fitting) == len(wanted) else "more")
        if page.last_id is not None:
            self.positions[consumer] = after(page.last_id)
            assert fitting or page.last_id >= self.delivered or self.positions[consumer] <= self.core.state.until
        if fitting:
            self.delivered = max(self.delivered, fitting[-1].id)

    def drop_answered(self):
        """Forget parked looks that were due and answered by an unrelated step."""
        left = set(self.core.parking._parked)
        self.parked = {ticket: look for ticket, look in self.parked.items() if ticket in left}

    @rule(consumer=st.integers(0, 2))
    def a_consumer_starts_over(self, consumer):
        self.positions[consumer] = bytes(20)

    @precondition(lambda self: self.parked)
    @rule()
    def a_waiting_caller_leaves(self):
        ticket = next(iter(self.parked))
        del self.parked[ticket]
        assert self.core.leave(ticket)
        assert not self.core.leave(ticket)

    @invariant()
    def everything_that_lives_is_shown_and_nothing_else(self):
        if self.facts.alive:
            span = span_of(self.core.state, Look(bytes(20)))
            shown = list(page_of(self.rows(span), span).messages())
            assert shown == [(message.id, message.payload) for message in self.visible()]

    @invariant()
    def the_count_is_a_recount_within_one_slice(self):
        state = self.core.state
        if state.metadata is None or not self.facts.alive:
            return
        state.usage.drop_before(state.oldest_ms)
        rows = self.store.scan(Table.MESSAGE, state.prefix, state.prefix + b"\xff" * 20)
        stamps = [int.from_bytes(key[-10:-2], "big") for key, _ in rows]
        assert state.usage.messages >= sum(ts_ms >= state.oldest_ms for ts_ms in stamps)
        assert all(bucket.messages >= 0 for bucket in state.usage.buckets)
        first_ms = state.usage.buckets[0].first_ms if state.usage.buckets else state.oldest_ms
        if not self.miscounted:
            counted = [(key, value) for key, value in rows if int.from_bytes(key[-10:-2], "big") >= first_ms]
            missing = [m for m in self.messages if m.generation == self.facts.generation and m.removed]
            assert len(counted) <= state.usage.messages <= len(counted) + len(missing)


TestTopicMachine = TopicMachine.TestCase
if settings.get_current_profile_name() != "torture":
    TestTopicMachine.settings = settings(max_examples=50, stateful_step_count=50, derandomize=True, database=None)

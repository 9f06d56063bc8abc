"""A topic's producers compared with a dict: power cuts at any row, reloads, snapshots, expiry, eviction, switches.

The model has each producer's session, highest id and last activity, and the list of messages in the topic. After a
power cut it gets only the number of message rows of the step that were written.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_store import page_of, single_rows
from producing_topic import Topic, publish

from plainsong.protocol.effects import Put, Table
from plainsong.protocol.errors import (
    DeduplicationDisabled,
    PartialDuplicate,
    PlainsongError,
    ProducerExpired,
    ProducerFenced,
    ProducerNotFound,
    TooManyProducers,
)
from plainsong.protocol.ids import bound_at
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.topic.asks import GetProducer, Look, OpenProducer, PlanCleaning, RemoveProducer, SetProperties
from plainsong.protocol.topic.core import span_of
from plainsong.protocol.topic.producer_state import NamespacePolicy

TTL_S, RETENTION_MS, ACTIVE_MS, LONG_MS = 60, 20_000, 1_000, 50_000
LIMITS = {
    "checkpoint_rows": 9,
    "snapshot_entries": 4,
    "snapshot_interval_ms": 500,
    "producer_retention_ms": RETENTION_MS,
    "max_retention_ms": LONG_MS,
    "max_producers": 3,
    "max_long_producers": 1,
    "producer_active_ms": ACTIVE_MS,
}


@dataclass
class Known:
    """A producer in one of its lives."""

    life: int
    epoch: int = 0
    highest: int = -1
    active_ms: int = 0
    memory_ms: int = RETENTION_MS


@dataclass
class Model:
    """The model of a topic with producers."""

    known: OrderedDict[str, Known] = field(default_factory=OrderedDict)
    epochs: int = 0
    lives: int = 0
    enabled: bool = True
    stored: list[tuple[str, int]] = field(default_factory=list)
    """Payloads and publish times, in order. A payload names its producer, life and id."""

    def forget(self, names):
        for name in names:
            self.epochs = max(self.epochs, self.known.pop(name).epoch)

    def expire(self, now_ms):
        self.forget([name for name, each in self.known.items() if now_ms > each.active_ms + each.memory_ms])

    def idle(self, now_ms):
        return [
            name
            for name, each in self.known.items()
            if each.memory_ms == RETENTION_MS and each.active_ms < now_ms - ACTIVE_MS
        ]

    def touch(self, name, now_ms):
        self.known[name].active_ms = now_ms
        self.known.move_to_end(name)

    def admit(self, name, now_ms):
        """True if there is room for one more producer; evict an idle one if necessary."""
        if len(self.known) >= LIMITS["max_producers"]:
            idle = self.idle(now_ms)[:1]
            if not idle:
                return False
            self.forget(idle)
        self.lives += 1
        self.known[name] = Known(self.lives, active_ms=now_ms)
        return True

    # --- expected answers ----------------------------------------------------------------------

    def publish(self, ask, now_ms):
        """Return the error, or the request's ids that are stored."""
        self.expire(now_ms)
        request = ask.request
        name, ids = request.producer, list(request.sequence_ids)
        if not self.enabled:
            self.stored += [(f"{name}/off/{each}", now_ms) for each in ids]
            return ids
        known = self.known.get(name)
        epoch = request.producer_epoch
        if epoch is not None and (known is None or epoch > known.epoch):
            return ProducerExpired
        if epoch is not None and epoch < known.epoch:
            return ProducerFenced
        new = [each for each in ids if known is None or each > known.highest]
        if request.atomic and new and len(new) < len(ids):
            return PartialDuplicate
        if new and known is None and not self.admit(name, now_ms):
            return TooManyProducers
        self.touch(name, now_ms)
        if new:
            known = self.known[name]
            known.highest = new[-1]
            self.stored += [(f"{name}/{known.life}/{each}", now_ms) for each in new]
        return new

    def open(self, ask, now_ms):
        """Return the error, or the session's epoch and the last id."""
        self.expire(now_ms)
        if not self.enabled:
            return DeduplicationDisabled
        known = self.known.get(ask.name)
        memory_ms = ask.retention_ms or (RETENTION_MS if known is None else known.memory_ms)
        long = [name for name, each in self.known.items() if each.memory_ms > RETENTION_MS]
        if ask.retention_ms and ask.name not in long and len(long) >= LIMITS["max_long_producers"]:
            return TooManyProducers
        if known is None:
            if not self.admit(ask.name, now_ms):
                return TooManyProducers
            known = self.known[ask.name]
        known.epoch = (known.epoch or self.epochs) + 1
        known.memory_ms = memory_ms
        self.touch(ask.name, now_ms)
        return known.epoch, known.highest

    def answer(self, ask, now_ms):
        return self.publish(ask, now_ms) if hasattr(ask, "request") else self.open(ask, now_ms)


names = st.sampled_from("abcde")
publishing = st.builds(
    lambda name, start, holes, epoch, atomic: (name, start, holes, epoch, atomic),
    names,
    st.integers(-3, 3),
    st.lists(st.integers(1, 3), max_size=3),
    st.sampled_from([None, None, 0, 0, -1, 1]),
    st.booleans(),
)
opening = st.tuples(names, st.sampled_from([None, None, LONG_MS]))
groups = st.lists(publishing | opening, min_size=1, max_size=4)


class ProducerMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.model = Model()
        self.topic = Topic(TopicProperties(ttl_s=TTL_S), **LIMITS)
        self.switched = 0
        self.serial = 0

    @initialize(policy=st.booleans())
    def the_namespace_says_something(self, policy):
        if policy:
            self.topic.policy = NamespacePolicy(enabled=True)

    def ask_of(self, drawn, model):
        """Return the ask, with ids around the producer's last one and the payloads that the model expects."""
        if len(drawn) == 2:
            return OpenProducer(drawn[0], drawn[1])
        name, start, holes, epoch, atomic = drawn
        known = model.known.get(name, Known(0))
        first = max(0, known.highest + start)
        ids = [first]
        for hole in holes:
            ids.append(ids[-1] + hole)
        sent = None if epoch is None else max(0, known.epoch + epoch)
        return publish(ids, name, producer_epoch=sent, atomic=atomic)

    def predicted(self, drawn):
        """Return a step's asks, the expected answers, and the model after each."""
        model = copy.deepcopy(self.model)
        asks, answers, models = [], [], []
        for each in drawn:
            ask = self.ask_of(each, model)
            before = len(model.stored)
            answers.append(model.answer(ask, self.topic.now_ms))
            if hasattr(ask, "request"):
                # Payloads are unique, so that a misplaced message is noticed.
                fresh = [payload for payload, _ in model.stored[before:]]
                dropped = [b"dropped"] * (len(ask.request.messages) - len(fresh))
                ask.request.messages = [*dropped, *(payload.encode() for payload in fresh)]
            asks.append(ask)
            models.append(copy.deepcopy(model))
        return asks, answers, models

    @rule(drawn=groups)
    def requests_come(self, drawn):
        asks, expected, models = self.predicted(drawn)
        for ask, answer, wanted in zip(asks, self.topic.step(*asks), expected, strict=True):
            self.check(ask, answer, wanted)
        self.model = models[-1]

    def check(self, ask, answer, wanted):
        if isinstance(wanted, type):
            assert type(answer) is wanted
        elif isinstance(wanted, tuple):
            assert (answer.epoch, answer.last_sequence_id) == wanted
        else:
            ids = list(ask.request.sequence_ids)
            assert not isinstance(answer, PlainsongError), answer
            assert answer.deduplicated is self.model.enabled
            assert answer.duplicate is (not wanted)
            if wanted and wanted != ids:
                assert (answer.stored, answer.dropped) == (wanted, [each for each in ids if each not in wanted])

    @rule(drawn=groups, rows=st.integers(0, 25))
    def the_power_goes_in_the_middle(self, drawn, rows):
        self.topic.page()  # removes expired producers
        self.model.expire(self.topic.now_ms)
        asks, _, models = self.predicted(drawn)
        before = self.model
        step = self.topic.core.step(list(enumerate(asks)), self.topic.now())
        landed = list(single_rows(step.operations))[:rows]
        self.topic.store.write(step.operations, rows)
        self.topic.load()
        self.topic.step()
        messages = sum(isinstance(each, Put) and each.table is Table.MESSAGE for each in landed)
        self.model = self.after_cut(before, asks, models, messages)

    def after_cut(self, before, asks, models, messages):
        """Return the model after a power cut: only the first rows remain, and no part of an atomic request."""
        model = copy.deepcopy(before)
        model.lives, model.epochs = models[-1].lives, models[-1].epochs
        lives = {name: [each.life] for name, each in before.known.items()}
        left, earlier = messages, before
        for ask, later in zip(asks, models, strict=True):
            for name, each in later.known.items():
                if each.life not in lives.setdefault(name, []):
                    lives[name].append(each.life)
            new = later.stored[len(earlier.stored) :]
            count = min(left, len(new))
            left -= count
            if not (getattr(ask, "request", None) and ask.request.atomic and count < len(new)):
                model.stored += new[:count]
            earlier = later
        idle = set(before.idle(self.topic.now_ms))
        found = self.topic.book.known
        for name in before.known.keys() - found.keys():
            assert name in idle
        known = OrderedDict()
        for name, producer in found.items():
            highest = {
                life: max([-1, *(int(p.split("/")[2]) for p, _ in model.stored if p.startswith(f"{name}/{life}/"))])
                for life in lives[name]
            }
            if name in before.known:
                life = before.known[name].life
                highest[life] = max(highest[life], before.known[name].highest)
            life = next(life for life in reversed(lives[name]) if highest[life] == producer.pushed)
            landed = [each for each in lives[name] if any(p.startswith(f"{name}/{each}/") for p, _ in model.stored)]
            assert not landed or life >= landed[-1]
            memory_ms = RETENTION_MS if producer.retention_ms is None else producer.retention_ms
            known[name] = Known(life, producer.epoch, producer.pushed, producer.active_ms, memory_ms)
            sessions = [each.known[name].epoch for each in (before, *models) if name in each.known]
            assert producer.epoch in {0, *sessions}
            assert producer.epoch >= (before.known[name].epoch if name in before.known and name not in idle else 0)
        model.known = known
        model.epochs = self.topic.book.epochs
        return model

    @rule(ms=st.sampled_from([0, 1, 499, ACTIVE_MS + 1, RETENTION_MS + 1, LONG_MS + 1]))
    def time_passes(self, ms):
        self.topic.now_ms += ms

    @rule()
    def the_clock_wakes_the_topic(self):
        self.topic.step()

    @rule(tidy=st.booleans())
    def the_topic_is_let_go_or_falls(self, tidy):
        if tidy:
            self.topic.close()
        else:
            self.topic.load()
            self.some_activity_may_be_forgotten()

    def some_activity_may_be_forgotten(self):
        """A producer's duplicates count as activity only from the next snapshot on, not at once."""
        known, found = self.model.known, self.topic.book.known
        for name, producer in found.items():
            if name in known:
                assert producer.active_ms <= known[name].active_ms
                known[name].active_ms = producer.active_ms
                known.move_to_end(name)

    @rule()
    def the_mark_is_lost(self):
        self.topic.now_ms += 1  # positions that only the mark recorded are not assigned again
        for key in self.topic.system_rows(b"h"):
            self.topic.store.tables[Table.METADATA][key] = b"garbled"
        self.topic.store.tables[Table.METADATA] = {
            key: value for key, value in self.topic.store.tables[Table.METADATA].items() if value != b"garbled"
        }
        self.topic.load()
        self.some_activity_may_be_forgotten()
        self.the_book_says_what_the_model_does()
        self.every_message_is_there_once_in_its_order()
        # Until the next mark, an atomic request that is cut off would stay, which requires two faults at once.
        self.topic.ask(SetProperties({"ttl": TTL_S}))

    @rule()
    def the_janitor_comes(self):
        plan = self.topic.ask(PlanCleaning(0))
        self.model.expire(self.topic.now_ms)
        keys = [key for key, _ in self.topic.store.scan(Table.MESSAGE, *plan.expired)]
        self.topic.store.discard(Table.MESSAGE, keys)

    @rule(name=names)
    def somebody_deletes_a_producer(self, name):
        self.model.expire(self.topic.now_ms)
        [answer] = self.topic.step(RemoveProducer(name))
        if self.model.enabled and name in self.model.known:
            assert answer is None
            self.model.forget([name])
        else:
            assert type(answer) is ProducerNotFound

    @rule(name=names)
    def somebody_looks_at_a_producer(self, name):
        self.model.expire(self.topic.now_ms)
        [answer] = self.topic.step(GetProducer(name))
        known = self.model.known.get(name)
        if known is None:
            assert type(answer) is ProducerNotFound
        else:
            assert (answer.epoch, answer.last_sequence_id, answer.active_ms) == (
                known.epoch,
                known.highest,
                known.active_ms,
            )

    @rule(enabled=st.booleans())
    def the_namespace_is_switched(self, enabled):
        if self.model.enabled and not enabled:
            self.switched += 1
            self.model.forget(list(self.model.known))
        self.model.enabled = enabled
        self.topic.policy = NamespacePolicy(enabled, self.switched)
        # There may be no request before the next switch: the topic detects that it missed one.

    @precondition(lambda self: self.model.enabled)
    @rule()
    def the_book_has_no_more_than_it_may(self):
        page = self.topic.page()
        self.model.expire(self.topic.now_ms)
        assert page.total == len(self.model.known) <= LIMITS["max_producers"]
        assert len(self.topic.system_rows(b"p")) <= LIMITS["max_producers"]

    @invariant()
    def the_book_says_what_the_model_does(self):
        self.topic.step()
        book, now_ms = self.topic.book, self.topic.now_ms
        if self.model.enabled:
            said = {name: (p.epoch, p.pushed, p.persisted, p.active_ms) for name, p in book.known.items()}
            wanted = {n: (k.epoch, k.highest, k.highest, k.active_ms) for n, k in self.model.known.items()}
            # The topic may remove expired producers at any time.
            over = {name for name, k in self.model.known.items() if now_ms > k.active_ms + k.memory_ms}
            over |= {name for name, p in book.known.items() if now_ms > book.expires_ms(p)}
            for name in over:
                said.pop(name, None)
                wanted.pop(name, None)
            assert said == wanted
        else:
            assert book.known == {}

    @invariant()
    def every_message_is_there_once_in_its_order(self):
        self.topic.step()
        span = span_of(self.topic.state, Look(bound_at(0)))
        rows = self.topic.store.scan(Table.MESSAGE, self.topic.state.prefix, self.topic.state.prefix + b"\xff" * 20)
        oldest_ms = self.topic.now_ms - TTL_S * 1000
        shown = [payload.decode() for _, payload in page_of(rows, span).messages()]
        living = [payload for payload, ts_ms in self.model.stored if ts_ms >= oldest_ms]
        assert shown == living
        kept = [payload for payload in shown if "/off/" not in payload]
        assert len(set(kept)) == len(kept)


TestProducerMachine = ProducerMachine.TestCase
if settings.get_current_profile_name() != "torture":
    TestProducerMachine.settings = settings(max_examples=50, stateful_step_count=40, derandomize=True, database=None)

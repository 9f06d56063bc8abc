"""A topic with producers on a store of dicts: one request at a time, with power cuts and reloads."""

from __future__ import annotations

from model_store import NAME, ModelStore, loaded_state, page_of

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import bound_at
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import (
    Create,
    GetProducer,
    ListProducers,
    Look,
    OpenProducer,
    Publish,
    PublishUnder,
    RemoveProducer,
    StoreUnder,
)
from plainsong.protocol.topic.core import TopicCore, span_of
from plainsong.protocol.topic.producer_state import INHERITED
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.transactions.transaction import POINTERS_PER_MS

NOW_MS = 1_700_000_000_000
#: The first write pointer of that millisecond.
POINTER = NOW_MS * POINTERS_PER_MS


class Topic:
    """The core of a topic, and its store."""

    def __init__(self, properties=None, *, name=NAME, authority=None, create=True, **limits):
        self.name, self.store, self.limits, self.authority = name, ModelStore(), TopicLimits(**limits), authority
        self.now_ms, self.policy = NOW_MS, INHERITED
        self.load()
        if create:
            self.ask(Create(properties or TopicProperties()))

    def load(self):
        """Load the topic from the store again."""
        self.core = TopicCore(loaded_state(self.store, self.name, self.limits, self.authority))

    @property
    def state(self):
        return self.core.state

    @property
    def book(self):
        return self.core.state.producers

    def now(self):
        return Now(self.now_ms, self.now_ms / 1000, deduplication=self.policy)

    def step(self, *asks, rows=None):
        """Run one step for all asks; with ``rows`` the power is cut after this many rows, and there are no answers."""
        step = self.core.step(list(enumerate(asks)), self.now())
        if rows is not None:
            self.store.write(step.operations, rows)
            self.load()
            return step
        self.store.write(step.operations)
        return [answer for _, answer in sorted(self.core.settled(step, self.now()), key=lambda each: each[0])]

    def ask(self, ask):
        """Return the answer, or raise it if it is an error."""
        [answer] = self.step(ask)
        if isinstance(answer, PlainsongError):
            raise answer
        return answer

    def close(self):
        """Close as the actor does, then load again."""
        step, _ = self.core.close()
        self.store.write(step.operations)
        self.load()

    # --- asks ----------------------------------------------------------------------------------

    def publish(self, ids, producer="p", payloads=None, **fields):
        return self.ask(publish(ids, producer, payloads, **fields))

    def publish_under(self, pointer, ids, producer="p", payloads=None, **fields):
        ask = publish(ids, producer, payloads, write_pointer=pointer, **fields)
        return self.ask(PublishUnder(ask.request, 0))

    def store_under(self, pointer, ids, producer="p", payloads=None, **fields):
        ask = publish(ids, producer, payloads, write_pointer=pointer, **fields)
        return self.ask(StoreUnder(ask.request, 0))

    def open(self, name="p", **fields):
        return self.ask(OpenProducer(name, **fields))

    def get(self, name="p", generation=None):
        return self.ask(GetProducer(name, generation))

    def page(self, after="", limit=100):
        return self.ask(ListProducers(after, limit))

    def remove(self, name="p"):
        return self.ask(RemoveProducer(name))

    # --- content -------------------------------------------------------------------------------

    def payloads(self):
        """Return the payloads of live messages whose rows contain them."""
        span = span_of(self.state, Look(bound_at(0)))
        rows = self.store.scan(Table.MESSAGE, self.state.prefix, self.state.prefix + b"\xff" * 20)
        return [payload.decode() for _, payload in page_of(rows, span).messages()]

    def system_rows(self, kind):
        """Return the keys of system rows of a kind."""
        return [key for key in self.store.tables[Table.METADATA] if key[:2] == b"\x00" + kind]


def publish(ids, producer="p", payloads=None, **fields):
    """Return a request whose payloads name producer and id: ``p7`` is message 7 of producer p."""
    if payloads is None:
        payloads = [f"{producer}{each}" for each in ids]
    request = PublishRequest([each.encode() for each in payloads], producer=producer, sequence_ids=ids, **fields)
    return Publish(request, 0)

"""A chained topic on a store of dicts, and its verification as a reader does it."""

from __future__ import annotations

from model_store import NAME, ModelStore, loaded_state, stored_rows

from plainsong.protocol.effects import Table
from plainsong.protocol.errors import PlainsongError
from plainsong.protocol.ids import FIRST_BOUND
from plainsong.protocol.keys import CHAIN_POINTER, generation_prefix, payload_prefix, stop_after
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.rows import own_ttl_s
from plainsong.protocol.topic.asks import (
    Create,
    Look,
    PlanCleaning,
    Publish,
    PublishStaged,
    PublishUnder,
    SetProperties,
    StoreStaged,
    StoreUnder,
)
from plainsong.protocol.topic.chain import StoredRow, row_of
from plainsong.protocol.topic.core import TopicCore, span_of
from plainsong.protocol.topic.state import Now, TopicLimits
from plainsong.protocol.topic.verify import KnownHead, Verifier

START_MS = 1_700_000_000_000


class ChainedTopic:
    """One topic, its store and its clock."""

    def __init__(self, limits=None, authority=None, **properties):
        self.store, self.limits, self.authority = ModelStore(), limits or TopicLimits(max_lifetime_ms=0), authority
        self.now_ms = START_MS
        self.load()
        if properties.pop("create", True):
            self.do(Create(TopicProperties(**{"ttl_s": 3600, "chain": "sha256", **properties})))

    def load(self):
        """Load the topic from its store."""
        self.core = TopicCore(loaded_state(self.store, limits=self.limits, authority=self.authority))

    @property
    def state(self):
        return self.core.state

    def do(self, *asks, rows=None):
        """Run one step; with ``rows`` the power is cut after this many of its rows, and the topic is loaded again."""
        now = Now(self.now_ms, self.now_ms / 1000)
        step = self.core.step([(index, ask) for index, ask in enumerate(asks)], now)
        self.store.write(step.operations, rows)
        if rows is not None:
            self.load()
            return None
        answers = dict(self.core.settled(step, now))
        for answer in answers.values():
            if isinstance(answer, PlainsongError):
                raise answer
        return answers[0] if len(asks) == 1 else [answers[index] for index in range(len(asks))]

    def publish(self, *messages, **fields):
        return self.do(Publish(PublishRequest(list(messages), **fields), 1))

    def publish_under(self, pointer, *messages, **fields):
        return self.do(PublishUnder(PublishRequest(list(messages), write_pointer=pointer, **fields), 1))

    def store_under(self, pointer, *messages, **fields):
        return self.do(StoreUnder(PublishRequest(list(messages), write_pointer=pointer, **fields), 1))

    def stage(self, segment, *messages, producer="job", **fields):
        request = PublishRequest(list(messages), producer=producer, segment=segment, **fields)
        return self.do(StoreStaged(request, 1))

    def publish_staged(self, *segments, producer="job", **fields):
        return self.do(self.staged(*segments, producer=producer, **fields))

    def staged(self, *segments, producer="job", **fields):
        """Return the publish of staged segments, with the producer's next sequence id."""
        known = self.state.producers.known.get(producer)
        ids = [0 if known is None else known.pushed + 1]
        return PublishStaged(
            PublishRequest([], producer=producer, segments=list(segments), sequence_ids=ids, **fields), 1
        )

    def set(self, **properties):
        return self.do(SetProperties({"ttl": 3600, **properties}))

    def clean(self):
        """Clean everything as the janitor does."""
        plan = self.do(PlanCleaning(0))
        for table, wanted, kept in ((Table.MESSAGE, plan.expired, 0), (Table.PAYLOAD, plan.entries, 1)):
            if wanted is not None:
                keys = [key for key, _ in self.store.scan(table, *wanted)]
                for key in keys[: len(keys) - kept]:
                    self._remove(table, key)
        for key, value in list(self.messages()):
            ttl_s = own_ttl_s(value)
            if ttl_s is not None and int.from_bytes(key[-10:-2], "big") + ttl_s * 1000 < plan.now_ms:
                self._remove(Table.MESSAGE, key)
        for _, start, stop in plan.orphans:
            for key, _ in self.store.scan(Table.PAYLOAD, start, stop):
                del self.store.tables[Table.PAYLOAD][key]
        return plan

    def _remove(self, table, key):
        rows = self.store.tables[table]
        if table is Table.MESSAGE:
            for stored, _ in stored_rows(self.store, (key, rows[key])):
                del self.store.tables[Table.PAYLOAD][stored]
        del rows[key]

    # --- content of the store ---------------------------------------------------------------------

    def messages(self):
        start = generation_prefix(NAME, self.state.metadata.generation)
        return self.store.scan(Table.MESSAGE, start, stop_after(start))

    def entries(self):
        start = payload_prefix(NAME, self.state.metadata.generation, CHAIN_POINTER)
        return self.store.scan(Table.PAYLOAD, start, stop_after(start))

    def head(self):
        chain = self.state.chain
        return KnownHead(self.state.metadata.generation, chain.number, chain.position, chain.link)

    def verify(self, known=None, head=None):
        """Verify the whole store as a reader would."""
        verifier = Verifier(str(NAME), self.state.metadata.generation, known, head)
        entries = [(key[-10:], value) for key, value in self.entries()]
        for entry in entries:
            verifier.survey(*entry)
        rows = [(row_of(row[0][-10:], row[1]), stored_rows(self.store, row)) for row in self.messages()]
        span = span_of(self.state, Look(FIRST_BOUND))
        for position, value in entries:
            while rows and rows[0][0].position <= position:
                give(verifier, *rows.pop(0), span.oldest_ms)
            verifier.entry(position, value, oldest_ms=span.oldest_ms, now_ms=span.now_ms)
        for row, stored in rows:
            give(verifier, row, stored, span.oldest_ms)
        return verifier.end(undecided=[each for each in self.state.pending if not self.state.pending[each].rolled_back])


def give(verifier, row, stored, oldest_ms):
    """Feed a verifier a row and the payload rows that it publishes."""
    verifier.row(row, oldest_ms)
    for key, value in stored:
        verifier.stored(StoredRow(row.position + key[-10:], value))

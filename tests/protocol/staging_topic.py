"""A topic with staging producers on a store of dicts: one request at a time."""

from __future__ import annotations

import pytest
from producing_topic import Topic
from reading_in_memory import messages_of

from plainsong.protocol.requests import PublishRequest
from plainsong.protocol.topic.asks import Look, PublishStaged, StoreStaged
from plainsong.protocol.topic.core import span_of


class StagingTopic(Topic):
    """A topic with a staging producer."""

    def store_ask(self, segment, *payloads, ids=None, producer="p", **fields):
        messages = [each if isinstance(each, bytes) else each.encode() for each in payloads]
        request = PublishRequest(messages, producer=producer, segment=segment, sequence_ids=ids, **fields)
        return StoreStaged(request, 0)

    def stage(self, segment, *payloads, **fields):
        return self.ask(self.store_ask(segment, *payloads, **fields))

    def batch(self, sequence_id, *segments, producer="p", **fields):
        request = PublishRequest([], producer=producer, sequence_ids=[sequence_id], segments=segments, **fields)
        return self.ask(PublishStaged(request, 0))

    def read(self, view=None, limit=1000):
        span = span_of(self.state, Look(bytes(20)))
        return [payload.decode() for _, payload in messages_of(self.store, span, limit, view)]

    def pending(self, producer="p"):
        return self.state.pending[self.state.staged[producer]]

    def refuses(self, error, ask):
        """Check that ``ask`` raises the error and changes nothing; return the error."""
        before = {table: dict(rows) for table, rows in self.store.tables.items()}
        with pytest.raises(error) as caught:
            ask()
        assert {table: dict(rows) for table, rows in self.store.tables.items()} == before
        return caught.value

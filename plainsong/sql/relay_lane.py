"""The way into the topics: for each a producer that is opened, published by once, and opened again when in doubt.

A publish is one request and is never repeated here: whatever happens to it, the next opening tells what became of it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from plainsong.core.producing import calls
from plainsong.core.producing.session import opened
from plainsong.sql.relay_doubt import Opened
from protocol.errors import GenerationChanged, Gone, ProducerNotFound
from protocol.frames import NO_ATTRIBUTES
from protocol.requests import PublishRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plainsong import Client
    from plainsong.sql.relay_rows import Numbered

#: Producers that are open at once; one more closes the one that was opened first.
MAX_LANES = 1_000


class Lane:
    """The session of one topic's producer."""

    def __init__(self, client: Client, topic: str, producer: str, opened: Opened) -> None:
        self._client = client
        self._topic = topic
        self._producer = producer
        self.opened = opened

    def publish(self, messages: Sequence[Numbered]) -> None:
        """Publish them in one request. Raises what went wrong; open the producer again then."""
        request = PublishRequest(
            [each.payload for each in messages],
            producer=self._producer,
            producer_epoch=self.opened.epoch,
            generation=self.opened.generation,
            sequence_ids=[each.number for each in messages],
        )
        ttls_s = [each.ttl_s for each in messages]
        if any(ttl_s is not None for ttl_s in ttls_s):
            request.message_ttls_s = ttls_s
        if any(each.attributes for each in messages):
            request.attributes = [
                json.loads(each.attributes) if each.attributes else NO_ATTRIBUTES for each in messages
            ]
        operations = self._client._operations
        call = calls.publish(operations.namespace, self._topic, request)
        self._client._shell.run(operations.call(call))


class Lanes:
    """The sessions that are open."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._open: dict[str, Lane] = {}

    def get(self, topic: str) -> Lane | None:
        """The topic's, if it is open."""
        return self._open.get(topic)

    def open(self, topic: str, producer: str) -> Lane:
        """Open a session: from now on nothing that an older one has sent can arrive."""
        operations = self._client._operations
        limit_s = operations.settings.deadline_s
        known, _ = self._client._shell.run(opened(operations, topic, producer, limit_s=limit_s))
        while len(self._open) >= MAX_LANES:
            del self._open[next(iter(self._open))]
        lane = Lane(self._client, topic, producer, Opened(known.epoch, known.generation, known.last_sequence_id))
        self._open[topic] = lane
        return lane

    def last_known(self, topic: str, producer: str, generation: int) -> int | None:
        """The last sequence id in a generation of the topic; None: the daemon does not know it any more."""
        operations = self._client._operations
        try:
            known = self._client._shell.run(
                operations.call(calls.ask(operations.namespace, topic, producer, generation))
            )
        except (ProducerNotFound, Gone, GenerationChanged):
            return None
        return known.last_sequence_id

    def drop(self, topic: str) -> None:
        """The next one is opened anew."""
        self._open.pop(topic, None)

    def close(self) -> None:
        """All are opened anew."""
        self._open.clear()

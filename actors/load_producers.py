"""Loading what a topic remembers of producers, and of those of its generations that are gone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from protocol.effects import Table
from protocol.errors import GenerationChanged, ProducerExpired, ProducerNotFound
from protocol.keys import PRODUCER, PRODUCERS, DamagedRow, stop_after, system_key
from protocol.topic.producers.asks import GetProducer
from protocol.topic.producers.record import Producer, Remembering
from protocol.topic.producers.views import old_view

if TYPE_CHECKING:
    from actors.directory import Directory
    from protocol.names import TopicName
    from protocol.topic.producers.asks import ProducerView
    from protocol.topic.state import TopicState
    from storage.base import Row, Store

log = logging.getLogger(__name__)


async def load_producers(state: TopicState, generation: int, store: Store) -> None:
    """Fill the topic's book from its rows; what was stored since is replayed behind it.

    Raises:
      StoreError: the store cannot be read.
      DamagedRow: the row that says what the others mean cannot be; nothing is accepted unchecked.
    """
    value = await store.get(Table.METADATA, system_key(PRODUCERS, state.name, generation))
    if value is None:
        return
    start = system_key(PRODUCER, state.name, generation)
    found: dict[str, Producer | None] = {}

    def take(rows: list[Row]) -> bool:
        for key, row in rows:
            name = key[len(start) :].decode("utf-8", "replace")
            try:
                found[name] = Producer.decode(name, row)
            except DamagedRow as error:
                # One producer's, so the others go on; its own requests are refused until somebody deletes it.
                log.warning(
                    "producer row unreadable", extra={"topic": str(state.name), "producer": name, "why": str(error)}
                )
                found[name] = None
        return True

    await store.scan(Table.METADATA, start, stop_after(start), take)
    state.producers.load(Remembering.decode(value), found)


async def producer_of(
    directory: Directory, store: Store, name: TopicName, producer: str, generation: int | None
) -> ProducerView:
    """A producer of a topic's generation, also of one that is gone while its producers are still known.

    Raises:
      TopicNotFound, GenerationChanged (there was no such generation yet), DamagedRow, StoreError.
      ProducerNotFound: the generation never knew it.
      ProducerExpired: what the generation knew is gone, and with it the answer; or it never knew any producer, which
        looks the same, and to say that it knew none of this name could have its messages sent twice.
    """
    try:
        return await directory.ask(name, GetProducer(producer, generation))
    except GenerationChanged:
        state = directory.peek(name)
        if generation is None or state is None or generation > state.living_or_last().generation:
            raise
    value = await store.get(Table.METADATA, system_key(PRODUCERS, name, generation))
    if value is None:
        raise ProducerExpired(
            f"nothing is known of producers of generation {generation} of topic {name}: it is gone, or never was",
            hint="nobody can say any more what became of its last messages",
        )
    row = await store.get(Table.METADATA, system_key(PRODUCER, name, generation, producer.encode()))
    if row is None:
        raise ProducerNotFound(f"generation {generation} of topic {name} knew no producer {producer!r}")
    return old_view(Producer.decode(producer, row), Remembering.decode(value), generation)

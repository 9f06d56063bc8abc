"""A store that several instances share, with slow answers."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from plainsong.protocol.effects import Put, Table, put_one
from plainsong.protocol.ids import pack_position
from plainsong.protocol.keys import generation_prefix, metadata_key
from plainsong.protocol.names import TopicName
from plainsong.protocol.properties import TopicProperties
from plainsong.protocol.records import Metadata
from plainsong.protocol.rows import plain_head
from tests.storage.shared_memory import SharedMemory, SharedMemoryStore

#: Duration of a read.
ANSWER_S = 2.7


@dataclass
class LiveView:
    """A view that also shows later commits."""

    get: object
    scan: object
    exact = False

    def renew(self, max_s):
        """See ``StoreView.renew``: the view never expires."""

    async def aclose(self):
        """See ``StoreView.aclose``: there is nothing to release."""
        await trio.lowlevel.checkpoint()


class FarStore(SharedMemoryStore):
    """Records the time for which readers have waited."""

    def __init__(self) -> None:
        super().__init__(SharedMemory())
        self.waited_s = 0.0

    async def _wait(self):
        self.waited_s += ANSWER_S
        await trio.sleep(ANSWER_S)

    async def get(self, *args, **more):
        """See ``Store.get``."""
        await self._wait()
        return await super().get(*args, **more)

    async def scan(self, *args, **more):
        """See ``Store.scan``."""
        await self._wait()
        await super().scan(*args, **more)

    async def pin(self, max_s):
        """See ``Store.pin``: like HBase's, the view is not of a single moment."""
        await trio.lowlevel.checkpoint()
        return LiveView(self.get, self.scan)


async def fill(store, topics):
    """Create topics with one message each."""
    names = [TopicName("shop", f"topic-{number:05d}") for number in range(topics)]
    metadata = Metadata(1, TopicProperties(), 1, 1).encode()
    commit = [put_one(Table.METADATA, metadata_key(name), metadata) for name in names]
    for name in names:
        value = plain_head(5) + b"hello"
        commit.append(Put(Table.MESSAGE, generation_prefix(name, 1), [pack_position(1_700_000_000_000, 0)], [value]))
    await store.write(commit, claim=await store.claim(names[0]))
    return names

"""What handlers and views work with: the actors behind the directory, the store to read from, and the bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from actors.pointer_index import PointerIndex
from actors.reading import read_page
from broker.authorities import SwitchedOff
from broker.rates import Rates

if TYPE_CHECKING:
    from actors.clock import Clock
    from actors.directory import Directory
    from actors.space import SpaceGuard
    from broker.access import AccessLog
    from broker.authorities import Transactions
    from broker.config import Config
    from broker.metrics import Metrics
    from protocol.names import TopicName
    from protocol.page import Page
    from protocol.topic.asks import Span
    from protocol.transactions.authority import Authority
    from storage.base import Store


@dataclass(slots=True)
class Service:
    """The daemon as its front end sees it; one for all connections."""

    config: Config
    store: Store
    directory: Directory
    clock: Clock
    space: SpaceGuard
    metrics: Metrics
    access: AccessLog
    version: str
    transactions: Transactions = field(default_factory=SwitchedOff)
    """Who decides transactions: what committed readers see, and what became of a pointer."""
    pointers: PointerIndex = field(default_factory=PointerIndex)
    """Undecided write pointers, their topics, and who waits for them."""
    stopping: bool = False
    """Whether the daemon is leaving: readyz says so, and new work is refused by the closed mailboxes."""
    rates: Rates = field(default_factory=Rates)
    """How much each topic was published to and read lately."""
    served: trio.Event = field(default_factory=trio.Event)
    """Set once the server has stopped and its last answers have left."""

    @property
    def authority(self) -> Authority:
        """The authority as topics ask it."""
        return self.transactions

    async def read(self, name: TopicName, span: Span, *, limit: int, max_bytes: int) -> Page:
        """The next messages of a span, from the scan cache or the store. Raises StoreError."""
        return await read_page(self.store, self.directory.cache(name), span, limit=limit, max_bytes=max_bytes)
